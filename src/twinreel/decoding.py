"""Latents to sound and pictures; what does not fit into memory is tried again in smaller pieces, and reported."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .config import set_flags
from .media.landing import land
from .media.pixels import quantise
from .output.latents import Latents
from .parts import Parts
from .watch import Stages

T = TypeVar("T")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way to decode: tiles of the video VAE that share a call, and the device where windows are put together."""

    name: str
    tile_batch: int
    canvas: torch.device | None = None


class Attempts:
    """The way in use. Out of memory, the next one is taken for good; after the last, the error goes on.

    First every part but the decoders leaves the device, which changes no bit. Then tiles are decoded one by one and put
    together in host memory: where several shared a call, their last bits may change.
    """

    def __init__(self, parts: Parts, stages: Stages, names: tuple[str, ...]) -> None:
        batch = parts.choices.tile_batch
        self._parts, self._stages, self._names = parts, stages, names
        self._ways = [Way("as planned", batch), Way("alone in memory", batch), Way("tile by tile", 1, CPU)]
        if parts.parallel.every.size > 1:
            del self._ways[1:]  # one rank alone cannot take another way
        self._retries: list[dict[str, Any]] = []
        self.not_finite = 0  # values of pictures

    @property
    def way(self) -> Way:
        """The way to decode now."""
        return self._ways[0]

    def report(self) -> dict[str, Any]:
        """The way that went through, what was tried before, and how many values of pictures were not finite."""
        found = {"not_finite": self.not_finite} if self.not_finite else {}
        return {"way": self.way.name, "tile_batch": self.way.tile_batch, "retries": self._retries, **found}

    def run(self, what: str, work: Callable[[Way], T]) -> T:
        """`work(way)`, again by the next way when it runs out of memory."""
        while True:
            try:
                return work(self.way)
            except (RuntimeError, MemoryError) as error:
                self.admit(error, what)
            self.retreat()

    def admit(self, error: RuntimeError | MemoryError, what: str) -> None:
        """Take note of an `error` that the next way may avoid; raise any other."""
        if not out_of_memory(error) or len(self._ways) == 1:
            raise error
        told = str(error).split("\n")[0][:200]
        self._retries.append({"at": what, "error": f"{type(error).__name__}: {told}", "then": self._ways[1].name})

    def retreat(self) -> None:
        """Take the next way. Called outside of the `except`: the error's frames hold the tensors that did not fit."""
        self._ways.pop(0)
        self._parts.keep_only(*self._names)
        self._stages.tell(0, 0, f"out of memory, once more {self.way.name}")


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a device or a host that has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    texts = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


@torch.inference_mode()
def decode(
    latents: Latents, parts: Parts, stages: Stages, *, rounding: str = "truncate", picture: bool = True
) -> Generator[np.ndarray, None, None]:
    """First the waveform, float32 [2, samples] at 32 kHz, then clips uint8 [f, H, W, 3] in order (SPEC 8.3, 9, 10).

    `picture=False` loads and decodes the sound alone.
    """
    latents.facts["flags"]["decode"] = set_flags("decode", parts.choices)
    names = ("video_decoder", "audio_decoder") if picture else ("audio_decoder",)
    attempts = Attempts(parts, stages, names)
    with ExitStack() as stack:
        attempts.run("loading", lambda way: stack.enter_context(parts.resident(stages, *names)))
        stack.enter_context(stages.stage("decode", latents.plan.frames if picture else 1))
        making = partial(decode_sound, latents.audio, parts)
        sound = stack.enter_context(closing(Waveform(making, parts.choices.device, apart(parts) and picture)))
        clips: Iterator[np.ndarray] = iter(())
        if picture:
            clips = stack.enter_context(closing(_pictures(latents, parts, stages, attempts, rounding)))
        early = [next(clips)] if sound.runs else []  # the first clip, while the sound is decoded
        waveform = attempts.run("sound", lambda way: sound.get())
        stages.boundary("waveform", {"samples": waveform})
        if not picture:
            stages.tell(1, 1)
        latents.facts["decode"] = attempts.report()
        yield waveform
        yield from early
        del early
        yield from clips
        if costs := parts.lap():
            latents.facts["decode"]["communication"] = costs


def apart(parts: Parts) -> bool:
    """Whether sound is decoded beside pictures: not on a CPU, whose threads are all taken."""
    return parts.choices.device.type == "cuda"


class Waveform:
    """The samples that `work` makes: at once in a thread and on a stream of its own where `apart`, otherwise in `get`."""

    def __init__(self, work: Callable[[], np.ndarray], device: torch.device, apart: bool) -> None:
        self._work, self._device = work, device
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(1, "sound")
        self._started = self._pool.submit(self._run) if apart else None

    @property
    def runs(self) -> bool:
        """Whether it is being made."""
        return self._started is not None

    def get(self) -> np.ndarray:
        """The samples. Raises what `work` raises; after that it is made anew, here."""
        started, self._started = self._started, None
        return self._work() if started is None else started.result()

    def close(self) -> None:
        """Wait for a thread that nobody has asked for its samples: it works with what is loaded now."""
        self._pool.shutdown()

    def _run(self) -> np.ndarray:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())  # each thread has its own
            if self._main is not None:
                stack.enter_context(torch.cuda.device(self._device))
                side = _side_stream(self._device)
                side.wait_stream(self._main)
                stack.enter_context(torch.cuda.stream(side))
            return self._work()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one beside the current stream: memory that was freed on a stream serves that stream alone from then on."""
    return torch.cuda.Stream(device)


def decode_sound(audio: Tensor, parts: Parts) -> np.ndarray:
    """Normalised latents [2, 32, A] -> float32 [2, 800A]."""
    device, spec = parts.choices.device, parts.spec.audio
    return parts["audio_decoder"].decode(_denormalised(audio, spec.mean, spec.std, device)).cpu().numpy()


def _pictures(
    latents: Latents, parts: Parts, stages: Stages, attempts: Attempts, rounding: str
) -> Generator[np.ndarray, None, None]:
    device, spec = parts.choices.device, parts.spec.video
    frames = clips = 0
    while True:
        try:
            video = _denormalised(latents.video, spec.mean, spec.std, device)
            way = attempts.way
            decoded = parts["video_decoder"].clips(video, tile_batch=way.tile_batch, first=clips, canvas=way.canvas)
            with closing(decoded), closing(land(_as_bytes(decoded, rounding, stages.gate))) as landed:
                for pixels, finite in landed:
                    if broken := pixels.size - int(finite):
                        attempts.not_finite += broken
                        latents.facts["decode"] = attempts.report()
                    stages.boundary("frames", {"pixels": pixels}, clips, 0)
                    frames, clips = frames + len(pixels), clips + 1
                    stages.tell(frames, latents.plan.frames, "frames")
                    yield pixels
            return
        except (RuntimeError, MemoryError) as error:
            attempts.admit(error, f"clip {clips}")
        attempts.retreat()
        latents.facts["decode"] = attempts.report()


def _as_bytes(
    decoded: Iterator[Tensor], rounding: str, gate: Callable[[], None]
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Each clip's pixels, uint8 [f, H, W, 3], and how many of its values are finite, int64 []; `gate()` after each.

    Nothing here waits for the device, unless the gate of several ranks does: the next clip is not queued yet, this
    one's copy is.
    """
    for clip in decoded:
        yield quantise(clip, rounding), torch.isfinite(clip).sum()
        del clip  # not beside the next one
        gate()


def _denormalised(latents: Tensor, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Tensor:
    """Latents [., C, ...] times std plus mean, two fp32 roundings (SPEC 8.4)."""
    shape = (1, -1, *[1] * (latents.ndim - 2))
    scale, shift = (torch.tensor(values, dtype=torch.float32, device=device).view(shape) for values in (std, mean))
    return latents.to(device) * scale + shift
