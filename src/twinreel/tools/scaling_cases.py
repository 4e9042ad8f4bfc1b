"""What a rank of `bench scaling` measures: calls of the DiT, the video VAE, whole requests; weights filled once a mesh."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..beside import beside
from ..config import EngineConfig, resolve, set_flags
from ..decoding import decode
from ..launch import PATIENCE, quiet
from ..layout import shard, shard_sizes
from ..models.dit import DiT
from ..models.video_decoder import VideoDecoder
from ..models.video_encoder import VideoEncoder
from ..noise import Rows
from ..ops import frames, vit
from ..output.write import write_media
from ..parallel import Axis, Parallel
from ..parallel.axis import Exchange
from ..parallel.mesh import Mesh, join_mesh
from ..parallel.ulysses import PLAIN, Relayout, Ulysses
from ..parts import Parts
from ..pipeline import predictor, sample
from ..schedule import make_sigmas, step_timesteps
from ..scratch import scratch
from ..topology import OVERLAPPED_CHUNKS, open_board
from ..watch import Event, Stages
from .bench_dit import STEP, Sizes, distance, plan_of, request_of
from .bench_e2e import ENDS_IN, WARM, writes
from .bench_scaling import BALANCED, Settings
from .random_weights import RandomWeights, fill, shape_spec
from .scaling_record import Case, read_base, write_base
from .timing import card

MEETING = 240.0  # seconds
FEWEST, MOST = 3, 200  # calls measured


class Still(Axis):
    """An axis whose other ranks are not there: what would go to them stays, and nothing is waited for."""

    def exchange(self, x: Tensor) -> Exchange:
        """What is sent, as if it had arrived."""
        return Exchange(self, "all_to_all", x, x, None)

    def all_reduce(self, x: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return x


class Bench:
    """One rank, or one of several cards that each run alone. It keeps the axes and the model of the last mesh. `together`
    returns once all processes of its kind are there."""

    def __init__(self, rank: int, world: int, meeting: str, settings: Settings, together: Callable[[], object]) -> None:
        self.rank, self.world, self.settings, self.spec = rank, world, settings, shape_spec(settings.shape)
        self._together = together
        self.sizes = Sizes(settings.frames, settings.size, settings.text)
        cuda = settings.device == "cuda"
        device = f"cuda:{rank}" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(rank)
        threads = max(1, torch.get_num_threads() // world) if cuda else 1  # as ranks of one host divide them
        torch.set_num_threads(threads)
        if world > 1:
            import torch.distributed as dist

            quiet()
            where: dict[str, Any] = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world}
            dist.init_process_group("gloo", timeout=timedelta(seconds=MEETING), **where)
        config = EngineConfig(
            device=device, ops=settings.ops, attention=settings.attention, adaln="precompute", vae_encode="fp32",
            threads=threads,
        )  # fmt: skip
        self.choices = resolve(config, self.spec.dit.head_dim)
        self.weights = RandomWeights(self.spec, self.choices.device)
        self.kept: dict[str, Any] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """The figures of one case, on every rank; they are told together."""
        mesh = Mesh(case.sp, case.tp, case.ranks if self.spec.text.kv_heads % case.ranks == 0 else 1)
        share = case.what == "share"
        with torch.inference_mode():
            if self.kept.get("mesh") != (mesh, share):
                self._forget()
                apart = Parallel(Still("sp", mesh.sp), Still("tp", mesh.tp))
                self.kept = {"mesh": (mesh, share), "parallel": apart if share else self._join(mesh)}
            parallel = self._with(self._packing() if share and case.sp > 1 else case.variant)
            self._reset_peak()
            if case.what == "vae":
                found = self._vae(parallel)
            elif case.what in ("call", "share"):
                found = self._call(case, parallel)
            else:
                found = self._whole(parallel, BALANCED if case.what.endswith("balanced") else "every-step")
        return {"card": card(self.choices.device), "torch": torch.__version__, "ops": self.choices.ops.name, **found}

    def _forget(self) -> None:
        self.kept = {}
        if self.choices.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _join(self, mesh: Mesh) -> Parallel:
        if mesh.size == 1:
            return Parallel.single()
        backend = "nccl" if self.choices.device.type == "cuda" else "gloo"
        return join_mesh(mesh, self.rank, backend=backend, patience=2 * PATIENCE)

    def _packing(self) -> str:
        return "packed" if self.choices.ops.name == "triton" else "plain"

    def _with(self, variant: str) -> Parallel:
        """The axes, attending by `variant`. Raises ValueError where it cannot run."""
        parallel: Parallel = self.kept["parallel"]
        if not variant:
            return replace(parallel, strategy=Parallel.single().strategy)
        relayout, chunks, board = PLAIN, 1, None
        if variant != "plain" and self.choices.ops.name == "triton":
            from ..ops import relayout as kernels

            relayout = Relayout("packed", kernels.pack, kernels.merge)
        elif variant == "packed":
            raise ValueError(f"packed needs the triton table of ops, this run has {self.choices.ops.name}")
        if variant == "overlapped":
            chunks = OVERLAPPED_CHUNKS
            if "board" not in self.kept:
                self.kept["board"], problem = open_board(parallel, self.choices.device, self.world)
                if problem:
                    del self.kept["board"]
                    raise ValueError(f"overlapped: {problem}")
            board = self.kept["board"]
        strategy = partial(Ulysses, relayout=relayout, chunks=chunks, board=board)
        return replace(parallel, strategy=strategy, board=board, chunks=chunks)

    def _model(self, parallel: Parallel) -> DiT:
        if "dit" not in self.kept:
            with torch.device("meta"):
                made = DiT(self.spec.dit, self.choices.ops, parallel, self.choices.dtype)
            self.kept["dit"] = fill(made, self.choices.device)
        dit: DiT = self.kept["dit"]
        attend = parallel.attend(self.choices.ops.attention)
        blocks: Any = dit.blocks
        for block in blocks:
            block.attn.attend = attend
        return dit

    def _call(self, case: Case, parallel: Parallel) -> dict[str, Any]:
        set_flags("denoise", self.choices)
        dit, device, sp = self._model(parallel), self.choices.device, parallel.sp
        plan, layout = plan_of(self.sizes, self.spec)
        sigmas = make_sigmas(3, plan.shifts)
        part = shard(layout, sp.size, sp.rank)
        parallel.reserve(len(part.layout.tags_S), self.spec.dit.heads, self._head_bytes())
        steps = [step_timesteps(layout, sigmas, step) for step in range(sigmas.calls)]
        tables = self.weights.tables(self.choices.dtype, parallel)
        tables.prepare([timesteps for timesteps, _ in steps])
        generator = torch.Generator().manual_seed(1)
        shapes = (len(layout.text_indices), self.spec.dit.text_dim), *self.settings.rows.values()
        text, video, audio = (torch.randn(*shape, generator=generator) for shape in shapes)
        call = predictor(dit, tables, text.to(device, self.choices.dtype), part, steps)
        own = Rows(video[part.video], audio[part.audio]).to(device)
        meet = self._together if case.each or case.world > 1 else lambda: None
        laps, out = self._timed(parallel, lambda: call(STEP, own), meet)
        if case.what == "share":
            tables.release()
            told = self._told(parallel, laps)
            line = f"{told['seconds']:8.4f} s a call, one rank's work of {case.ranks}, nothing sent"
            return told | {"line": line, "rows": layout.rows}
        sizes = shard_sizes(layout, sp.size)
        whole = Rows(*(sp.join(x, size) for x, size in zip(vars(out).values(), sizes, strict=True))).to("cpu")
        tables.release()
        return self._told(parallel, laps) | self._compared(case, whole) | {"rows": layout.rows}

    def _timed(
        self, parallel: Parallel, call: Callable[[], Rows], meet: Callable[[], object]
    ) -> tuple[list[dict[str, Any]], Rows]:
        """A few warm-up calls, `meet`, then calls as the loop makes them, with their votes and laps; all ranks alike."""
        meter = parallel.every.meter
        spent = [0.0]

        def one() -> Rows:
            begin = time.perf_counter()
            made = call()
            ballot = torch.stack([~torch.isfinite(x).all() for x in vars(made).values()]).to(torch.int32)
            assert not any(parallel.every.vote(ballot).tolist()), "values that are not finite"
            lap = meter.lap() if meter is not None else {}
            spent[0] = time.perf_counter() - begin
            laps.append({**lap, "seconds": spent[0]})
            return made

        laps: list[dict[str, Any]] = []
        one(), one()
        self._reset_peak()
        slowest = max(parallel.control.tell_all(spent[0]))
        laps.clear()
        meet()
        for _ in range(max(FEWEST, min(MOST, int(self.settings.seconds / slowest)))):
            made = one()
        return laps, made

    def _told(self, parallel: Parallel, laps: list[dict[str, Any]]) -> dict[str, Any]:
        """Medians of every rank; the slowest rank's seconds are the case's."""
        numbers = [key for key, value in laps[-1].items() if isinstance(value, float | int)]
        mine: dict[str, Any] = {key: statistics.median(lap[key] for lap in laps) for key in numbers}
        mine |= {"best": min(lap["seconds"] for lap in laps), "worst": max(lap["seconds"] for lap in laps)}
        mine |= {"calls": len(laps), "collectives": laps[-1].get("collectives", {}), **self._memory(parallel)}
        ranks = parallel.control.tell_all(mine)
        seconds, peak = (max(rank[key] for rank in ranks) for key in ("seconds", "peak_gib"))
        exposed, hidden = (max(rank.get(key, 0.0) for rank in ranks) for key in ("exposed_seconds", "hidden_seconds"))
        line = f"{seconds:8.4f} s a call, exposed {exposed:.4f} s, hidden {hidden:.4f} s, peak {peak:.2f} GiB"
        return {"line": line, "seconds": seconds, "peak_gib": peak, "ranks": ranks}

    def _compared(self, case: Case, whole: Rows) -> dict[str, Any]:
        """Hash of the velocities, and their distance to those of one rank where it has been run."""
        if self.rank:
            return {}
        digest = hashlib.sha256(whole.video.numpy().tobytes() + whole.audio.numpy().tobytes()).hexdigest()
        base = Path(self.settings.base)
        one = read_base(base, self.settings.alike, self.settings.rows)  # what came there meanwhile stays
        if case.world == 1:
            one = vars(whole)
            write_base(base, one, self.settings.alike)
        told = {"distance_to_one": distance(whole, Rows(**one))} if one else {}
        return {"sha256": digest, **told}

    def _vae(self, parallel: Parallel) -> dict[str, Any]:
        spec, device, cuda = self.spec.video, self.choices.device, self.choices.device.type == "cuda"
        plan, _ = plan_of(self.sizes, self.spec)
        set_flags("decode", self.choices)
        with torch.device("meta"):
            passes = vit.choose(self.choices.ops.name, device)
            decoder = VideoDecoder(spec, self.choices.vae_compute, parallel.every, passes)
            kind = "tf32" if cuda else "fp32"  # strict fp32 takes a minute on one H200 and says nothing more of ranks
            between = frames.choose(self.choices.ops.name, kind, spec.channels, device)
            encoder = VideoEncoder(spec, parallel.every, passes=between)
        fill(decoder, device)
        shape = 1, spec.latent_channels, plan.latents, plan.height // spec.space, plan.width // spec.space
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)
        found: dict[str, float] = {}
        found["decode"], digest = self._once(parallel, partial(decoder.clips, latents, self.choices.tile_batch), True)
        del decoder
        fill(encoder, device)
        pixels = torch.randn(1, 3, plan.frames, plan.height, plan.width, generator=torch.Generator().manual_seed(3))
        pixels = pixels.to(device)
        set_flags("encode", replace(self.choices, vae_encode=kind))
        found[f"encode_{kind}"], _ = self._once(parallel, lambda: encoder.encode(pixels), cuda)
        line = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found.items())
        memory = parallel.control.tell_all(self._memory(parallel))
        return {"line": line, "frames": plan.frames, **found, "sha256": digest, "ranks": memory}

    def _once(self, parallel: Parallel, work: Callable[[], Any], warm: bool) -> tuple[float, str]:
        """Seconds of one run of `work` (tensors, each used up as it comes), the slowest rank's, and a hash of them."""
        for _ in range(1 + warm):
            parallel.control.tell_all(None)
            begin = time.perf_counter()
            parts = [tensor.flatten()[:1024].clone() for tensor in work()]
            drawn = torch.cat(parts).cpu().numpy().tobytes()  # the one thing that waits for the device
            seconds = time.perf_counter() - begin
        return max(parallel.control.tell_all(seconds)), hashlib.sha256(drawn).hexdigest()

    def _whole(self, parallel: Parallel, policy: str) -> dict[str, Any]:
        """A T2VA request from token ids to an MP4 that was read back, or to frames and sound in host memory where PyAV is
        not installed; a short one before it makes it warm."""
        self.kept.pop("dit", None)
        steps = self.settings.calls + 1
        if "parts" not in self.kept:
            self.kept["parts"] = Parts(self.weights, self.choices, "all", parallel=parallel)
            self._request(self.kept["parts"], steps, WARM)
        self._reset_peak()
        facts = self._request(self.kept["parts"], steps, policy)
        ranks = parallel.control.tell_all({**facts, **self._memory(parallel)})
        seconds = max(rank["seconds"] for rank in ranks)
        stages = ", ".join(f"{name} {record['seconds']:.2f}" for name, record in ranks[0]["stages"].items())
        peak = max(rank["peak_gib"] for rank in ranks)
        line = f"{seconds:.2f} s a request ({stages}), peak {peak:.2f} GiB"
        return {"line": line, "seconds": seconds, "policy": policy, "ends_in": ENDS_IN[writes()], "ranks": ranks}

    def _request(self, parts: Parts, steps: int, policy: str) -> dict[str, Any]:
        parts.parallel.control.tell_all(None)
        begin, began = time.perf_counter(), dict[str, float]()  # of each stage: time between them shows here

        def watch(event: Event) -> None:
            began.setdefault(event.stage, time.perf_counter() - begin)

        stages = Stages(watch, self.choices.device)

        def vote(step: int, velocity: Rows) -> None:
            ballot = torch.stack([~torch.isfinite(x).all() for x in vars(velocity).values()]).to(torch.int32)
            assert not any(parts.parallel.every.vote(ballot).tolist()), f"step {step}: values that are not finite"

        latents = sample(request_of(self.sizes, steps=steps, policy=policy), parts, stages, vote)
        waveform, *clips = self._ended(decode(latents, parts, stages), stages)
        facts = {"seconds": time.perf_counter() - begin, "stages": stages.records, "began": began}
        assert sum(len(clip) for clip in clips) == latents.plan.frames
        facts["calls"] = latents.facts["policy"]["calls"]
        return facts | {"sha256": hashlib.sha256(b"".join(x.tobytes() for x in (waveform, *clips))).hexdigest()}

    def _ended(self, media: Iterator[Any], stages: Stages) -> list[Any]:
        """What `media` gives, once the first rank has made a file of it, as a request would end."""
        made = [next(media)]
        if writes() and self.rank == 0:

            def kept() -> Iterator[Any]:
                for clip in media:
                    made.append(clip)
                    yield clip

            with scratch("bench") as folder:
                write = partial(write_media, folder / "a.mp4", waveform=made[0])
                beside(write, kept(), rest=stages.stage("mux"))
        return [*made, *media]

    def _head_bytes(self) -> int:
        return self.spec.dit.head_dim * self.choices.dtype.itemsize

    def _reset_peak(self) -> None:
        if self.choices.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _memory(self, parallel: Parallel) -> dict[str, float]:
        """What PyTorch's allocator had at most since `_reset_peak`, and the board beside it, which it does not count."""
        board = 0.0 if parallel.board is None else parallel.board.size / 2**30
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.choices.device.type == "cuda" else 0.0
        return {"peak_gib": peak + board, "board_gib": board}
