"""What every training run shares: rates, optimisers, averaged weights, resumable files, a log of losses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ...errors import CheckpointError
from ...small_files import why
from ..recipe import Pace

SAVE_SECONDS = 100.0


@dataclass(frozen=True)
class Piece:
    """One call of a long run: `seconds` of wall clock that take it from `begin` to `end` (shares of the whole run).

    `folder` is read for the state that an earlier piece left and written to; `steps` ends the piece earlier (tests).
    """

    folder: Path
    seconds: float
    begin: float = 0.0
    end: float = 1.0
    steps: int | None = None


class Weights:
    """The trained parameters in float32 and their running average, beside modules that may compute in bfloat16."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.live = {f"{key}/{name}": p for key, module in modules.items() for name, p in module.named_parameters()}
        self.live = {name: p for name, p in self.live.items() if p.requires_grad}
        self.low = [name for name, p in self.live.items() if p.dtype != torch.float32]
        self.masters = {
            name: nn.Parameter(p.detach().float().clone()) if name in set(self.low) else p
            for name, p in self.live.items()
        }
        self.mean = {name: p.detach().clone() for name, p in self.masters.items()}

    def take_gradients(self) -> None:
        """Widen the gradients of low-precision parameters onto their masters."""
        for name in self.low:
            grad = self.live[name].grad
            self.masters[name].grad = None if grad is None else grad.float()
            self.live[name].grad = None

    @torch.no_grad()
    def give(self, decay: float) -> None:
        """Round the masters into the modules and move the average."""
        for name in self.low:
            self.live[name].copy_(self.masters[name])
        torch._foreach_lerp_(list(self.mean.values()), [p.detach() for p in self.masters.values()], 1.0 - decay)

    @torch.no_grad()
    def use_mean(self) -> None:
        """Put the average into the modules, for looking at it or for freezing them."""
        for name, p in self.live.items():
            p.copy_(self.mean[name])

    @torch.no_grad()
    def load(self, folder: Path, stem: str) -> dict[str, Any] | None:
        """Resume from what `save` wrote; None where there is nothing. Raises CheckpointError."""
        path, averaged = folder / f"{stem}.safetensors", folder / f"{stem}-mean.safetensors"
        if not path.exists():
            return None
        (stored, state), (mean, _) = read_file(path), read_file(averaged)
        check_fit(path, stored, self.masters)
        check_fit(averaged, mean, self.masters)
        for name, p in self.masters.items():
            p.copy_(stored[name])
            self.mean[name].copy_(mean[name])
            if name in self.live:
                self.live[name].copy_(p)
        return state

    def save(self, folder: Path, stem: str, state: dict[str, Any]) -> None:
        """Two files, written whole or not at all; in float16, which is four times finer than what is shipped."""
        folder.mkdir(parents=True, exist_ok=True)
        text = {"state": json.dumps(state)}
        for tail, values in (("", self.masters), ("-mean", self.mean)):
            partial = folder / f"{stem}{tail}.partial"
            tensors = {name: p.detach().half().cpu().contiguous() for name, p in values.items()}
            partial.write_bytes(save(tensors, text))
            partial.rename(folder / f"{stem}{tail}.safetensors")


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a training file, and the state that it carries beside them. Raises CheckpointError."""
    try:
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["state"])
            state |= {"step": int(state["step"]), "facts": dict(state["facts"])}
            return {name: file.get_tensor(name) for name in file.keys()}, state
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; train the part that leaves it first, or name another --folder"
        ) from None
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        told = f"{path} is damaged, or no file of this training ({type(error).__name__}: {why(error)})"
        raise CheckpointError(f"{told}; remove it to begin anew, or name another --folder") from None


def read_state(path: Path) -> dict[str, Any]:
    """The state alone. Raises CheckpointError."""
    return read_file(path)[1]


def check_fit(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Refuse a file with other tensors than these names and shapes. Raises CheckpointError."""
    names = sorted(found.keys() | wanted.keys())
    wrong = [n for n in names if n not in found or n not in wanted or found[n].shape != wanted[n].shape]
    if wrong:
        told = f"{path}: {len(wrong)} tensors are missing, left over or of another size, such as {wrong[0]}"
        raise CheckpointError(f"{told}; --smoke has sizes of its own, so give it as before, or name another --folder")


def load_means(path: Path, key: str, module: nn.Module) -> dict[str, Any]:
    """Fill `module` with the averaged weights whose names begin with `key` in `path`; returns the state beside them.

    Raises CheckpointError.
    """
    tensors, state = read_file(path)
    found = {name.removeprefix(key): t.float() for name, t in tensors.items() if name.startswith(key)}
    check_fit(path, found, dict(module.named_parameters()))
    module.load_state_dict(found, strict=False)
    return state


class Optimisers:
    """Muon for hidden matrices, AdamW for everything else, one rate for both (Muon's is matched to AdamW's)."""

    def __init__(self, weights: Weights, pace: Pace, matrices: Iterable[str] = ()) -> None:
        chosen = set(matrices)
        rest = [p for name, p in weights.masters.items() if name not in chosen]
        fused = rest[0].is_cuda
        self.pace, self.all = pace, list(weights.masters.values())
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=pace.rate, betas=pace.betas, weight_decay=pace.decay, fused=fused)
        ]
        if chosen:
            muon = [weights.masters[name] for name in chosen]
            self.parts.append(
                torch.optim.Muon(muon, lr=pace.rate, weight_decay=pace.decay, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, factor: float) -> Tensor:
        """One step at `factor` of the rate; returns the gradient's norm before clipping to 1."""
        norm = nn.utils.clip_grad_norm_(self.all, 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.pace.rate * factor
            part.step()
            part.zero_grad(set_to_none=True)
        return norm


def rate_factor(progress: float, step: int, pace: Pace) -> float:
    """Share of the full rate at `progress` of the whole run and after `step` steps since the moments were new."""
    warm = min(1.0, progress / pace.warmup) if pace.warmup else 1.0
    left = (1.0 - progress) / pace.cooldown if pace.cooldown else 1.0
    return max(min(warm, 1.0, left), pace.floor) * min(1.0, (step + 1) / pace.rewarm)


class Log:
    """Losses as one JSON object a line, in `<stem>.jsonl`, and on standard output."""

    def __init__(self, folder: Path, stem: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.begin = folder / f"{stem}.jsonl", time.monotonic()

    def write(self, **values: Any) -> None:
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        line = json.dumps({"at": round(time.monotonic() - self.begin, 1)} | rounded)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(self.path.stem, line, flush=True)


class Run:
    """The loop of one piece: `for progress in run:` with `run.learn(losses)` once a step."""

    def __init__(self, stem: str, piece: Piece, pace: Pace, weights: Weights, matrices: Iterable[str] = ()) -> None:
        self.stem, self.piece, self.pace, self.weights = stem, piece, pace, weights
        self.optimisers = Optimisers(weights, pace, matrices)
        self.log = Log(piece.folder, stem)
        state = weights.load(piece.folder, stem) or {}
        self.total, self.facts = int(state.get("step", 0)), dict(state.get("facts", {}))
        self.done, self.sums = 0, dict[str, Tensor]()
        self.start = self.saved = time.monotonic()
        self.progress = piece.begin

    def __iter__(self) -> Run:
        return self

    def hurry(self, spent: float) -> None:
        """Seconds of the piece that went before the first step."""
        self.start, self.saved = time.monotonic() - spent, time.monotonic()

    def __next__(self) -> float:
        now = time.monotonic()
        share = (now - self.start) / self.piece.seconds
        if self.piece.steps is not None:
            share = self.done / self.piece.steps
        if share >= 1.0:
            if self.done == 0:
                print(f"{self.stem}: no step was made; all {self.piece.seconds:g} s went into what comes before them")
            self.save(self.piece.end)
            raise StopIteration
        self.progress = self.piece.begin + share * (self.piece.end - self.piece.begin)
        if now - self.saved > SAVE_SECONDS:
            self.save(self.progress)
        return self.progress

    def learn(self, loss: Tensor, **parts: Tensor) -> None:
        """Backward, step, average, log. `parts` are scalars to be averaged into the log."""
        loss.backward()
        self.weights.take_gradients()
        factor = rate_factor(self.progress, self.done, self.pace)
        norm = self.optimisers.step(factor)
        # The average forgets its first values sooner: early in a run a long memory is mostly noise.
        self.weights.give(min(self.pace.ema, (1 + self.total) / (10 + self.total)))
        for name, value in (parts | {"loss": loss, "norm": norm}).items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach()
        self.done, self.total = self.done + 1, self.total + 1
        if self.done % self.pace.log_every == 0:
            means = {name: float(value) / self.pace.log_every for name, value in self.sums.items()}
            self.sums.clear()
            self.log.write(step=self.total, progress=self.progress, rate=self.pace.rate * factor, **means)

    def save(self, progress: float) -> None:
        self.saved = time.monotonic()
        state = {"step": self.total, "progress": progress, "facts": self.facts}
        self.weights.save(self.piece.folder, self.stem, state)
