"""The public implementation, run on one request and recorded boundary by boundary. The one file that knows diffusers.

It is imported by `against` and the benches alone, and imports diffusers inside functions: an engine must not need it,
and it must be possible to hold ours against it where both are installed. Components are loaded one at a time and let go.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..demo.tiny_configs import dit_config
from ..errors import ConfigError
from ..noise import ConditionLatents
from ..pipeline import Settled
from ..plan import Plan
from ..presentation import vision_patches
from ..spec import PIXEL_MEAN, PIXEL_STD, POSTERIOR_SEED, Spec
from ..watch import Boundary
from ..weights.keymap import stored_tensors
from ..weights.stream import assign, cut, finish

if TYPE_CHECKING:
    from ..config import Choices

LAYOUT = ("position_ids", "token_tags", "text_indices", "video_indices", "audio_indices")
NAMES = {"position_ids": "positions", "token_tags": "tags"}


def check_diffusers() -> str:
    """diffusers' version. Raises ConfigError where it, or its support of the model, is absent."""
    try:
        import diffusers
        from diffusers import MiniMaxH3Transformer3DModel  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--against diffusers: {error}; install it with: pip install -c constraints.txt -e '.[parity]'"
        ) from None
    return str(diffusers.__version__)


# Our name of a whole parameter, its shape and dtype -> its values, on the device that the module is to be on.
Whole = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


def public_dit(spec: Spec, weights: Whole, dtype: torch.dtype, device: torch.device) -> Any:
    """The public DiT of the sizes of `spec` with `weights`: blocks in `dtype`, islands in fp32."""
    from diffusers import MiniMaxH3Transformer3DModel

    config = dit_config(spec, "diffusers")
    config = {name: value for name, value in config.items() if not name.startswith("_") and name != "dtype"}
    with torch.device("meta"):
        module: Any = MiniMaxH3Transformer3DModel(**config)
    name, whole = "", torch.empty(0)
    for row in stored_tensors("transformer", "diffusers", spec).values():
        if row.parameter != name:  # pieces of one parameter follow each other
            name = row.parameter
            whole = weights(name, row.target_shape, torch.float32 if row.island else dtype)
        path, _, leaf = row.name.rpartition(".")
        assign(module.get_submodule(path), leaf, cut(row, whole).contiguous())
    module.rope = type(module.rope)(spec.dit.rope_freqs, spec.dit.rope_theta).to(device)
    finish(module, device)
    return module


class Oracle:
    """The public classes on the weights of a diffusers root, in the precision and on the device of `choices`."""

    def __init__(self, root: Path, choices: Choices, spec: Spec) -> None:
        self.root, self.choices, self.spec = root, choices, spec

    @torch.no_grad()
    def run(self, settled: Settled, boundary: Boundary) -> None:
        """Prompt to media; `boundary` gets what the engine's own would. The random draws are the sequential ones."""
        plan = settled.plan
        ids = self.prompt_ids(settled)
        if ids is not None:
            boundary("prompt", {"ids": ids})
        text = self.text(settled)
        boundary("text", {"embeddings": text[0]})
        conditions = self.conditions(settled)
        named = ("visual", conditions.visual), ("sound", conditions.sounds)
        boundary("conditions", {f"{kind}.{i}": value for kind, values in named for i, value in enumerate(values)})
        video, audio = self.denoise(plan, text, settled.prompt.tags, conditions, boundary)
        boundary("latents", {"video": video, "audio": audio})
        self.decode(video, audio, boundary)

    def prompt_ids(self, settled: Settled) -> Tensor | None:
        """Ids by the public tokenizer; None for prompts with vision blocks, which need torchvision's processors."""
        if settled.prompt.visions:
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.root / "tokenizer")
        return torch.tensor(tokenizer(settled.plan.prompt, add_special_tokens=False)["input_ids"])

    def text(self, settled: Settled) -> Tensor:
        """The conditioner's hidden state [1, L, C] for our ids and patches."""
        from transformers import Qwen3VLForConditionalGeneration

        prompt, device, vision = settled.prompt, self.choices.device, dict[str, Tensor]()
        for kind, pixels, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            seen = [vision for vision in prompt.visions if vision.kind == kind]
            if seen:
                patches = torch.cat([vision_patches(item, self.spec.processor) for item in seen])
                vision[pixels] = patches.to(device, self.choices.dtype)
                vision[grid] = torch.tensor([item.grid for item in seen], device=device)
        ids = prompt.ids[None].to(device)
        with self._loaded(Qwen3VLForConditionalGeneration, "text_encoder", self.choices.dtype) as conditioner:
            states = conditioner.model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=prompt.token_types[None].to(device),
                use_cache=False,
                output_hidden_states=True,
                **vision,
            ).hidden_states
            return states[self.spec.text.hidden_layer]

    def conditions(self, settled: Settled) -> ConditionLatents:
        """Normalised latents of every medium, CPU fp32."""
        pixels = [item.frames[: c.vae_frames] for c, item in self._inputs(settled) if item.frames is not None]
        waves = [item.waveform for _, item in self._inputs(settled) if item.waveform is not None]
        return ConditionLatents(tuple(self._visual(pixels)), tuple(self._sounds(waves)))

    def _inputs(self, settled: Settled) -> Iterator[tuple[Any, Any]]:
        return zip(settled.plan.conditions, settled.inputs, strict=True)

    def _visual(self, pixels: list[np.ndarray]) -> list[Tensor]:
        if not pixels:
            return []
        from diffusers import AutoencoderKLMiniMaxH3
        from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

        with self._loaded(AutoencoderKLMiniMaxH3, "vae", torch.float32) as vae:
            tensors = [torch.from_numpy(np.array(p)).permute(3, 0, 1, 2)[None].to(self.choices.device) for p in pixels]
            return [encode_vae_condition(vae, t, PIXEL_MEAN, PIXEL_STD, POSTERIOR_SEED).cpu() for t in tensors]

    def _sounds(self, waves: list[np.ndarray]) -> list[Tensor]:
        if not waves:
            return []
        from diffusers import AutoencoderKLMiniMaxH3Audio

        with self._loaded(AutoencoderKLMiniMaxH3Audio, "audio_vae", torch.float32) as vae:
            mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
            made = []
            for wave in waves:
                moments = vae.encode(torch.tensor(wave)[:, None].to(self.choices.device)).latent_dist.mode().cpu()
                made.append(((moments.transpose(1, 2) - mean) / std).reshape(-1, len(mean)))
            return made

    def denoise(
        self, plan: Plan, text: Tensor, tags: Tensor, conditions: ConditionLatents, boundary: Boundary
    ) -> tuple[Tensor, Tensor]:
        """The public chain of blocks from embeddings to latents: layout, noise and velocities are recorded."""
        from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
        from diffusers.modular_pipelines.modular_pipeline import SequentialPipelineBlocks

        folder = "transformer_ref" if plan.task == "ref2va" else "transformer"
        before, after = chain(plan.task)

        def pipe(blocks: tuple[type, ...], **components: Any) -> Any:
            names = [f"step_{i}" for i in range(len(blocks))]
            body = {"model_name": "minimax-h3", "block_classes": list(blocks), "block_names": names}
            made = type("Chain", (SequentialPipelineBlocks,), body)().init_pipeline()
            made.update_components(**components)
            return made

        video_shift, audio_shift = plan.shifts
        schedulers = {
            "scheduler": MiniMaxH3Scheduler(shift=video_shift),
            "audio_scheduler": MiniMaxH3Scheduler(shift=audio_shift),
        }
        with self._loaded(MiniMaxH3Transformer3DModel, folder, self.choices.dtype) as transformer:
            state = pipe(before, **schedulers)(**_chain_inputs(plan, tags, conditions))
            boundary("layout", {NAMES.get(name, name): state.get(name) for name in LAYOUT})
            boundary("noise", {"video": state.get("latents"), "audio": state.get("audio_latents")})
            steps = iter(range(plan.calls))

            def record(module: Any, inputs: Any, output: Any) -> None:
                boundary("velocity", {"video": output[0][0], "audio": output[1][0]}, next(steps), plan.calls)

            hook = transformer.register_forward_hook(record)
            state = pipe(after, **schedulers, **{folder: transformer})(state, prompt_embeds=text)
            hook.remove()
        return state.get("latents"), state.get("audio_latents")

    def decode(self, video: Tensor, audio: Tensor, boundary: Boundary) -> None:
        """Waveform, then frames, truncated to uint8 as the released program does."""
        from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio

        device = self.choices.device

        def column(values: Any, dims: int) -> Tensor:
            return torch.tensor(values, device=device).view(1, -1, *[1] * dims)

        with self._loaded(AutoencoderKLMiniMaxH3Audio, "audio_vae", torch.float32) as vae:
            config = vae.config
            latents = audio.to(device) * column(config.latents_std, 1) + column(config.latents_mean, 1)
            boundary("waveform", {"samples": vae.decode(latents).sample[:, 0]})
        with self._loaded(AutoencoderKLMiniMaxH3, "vae", torch.float32) as vae:
            config = vae.config
            pixels = vae.decode(
                video.to(device) * column(config.latents_std, 3) + column(config.latents_mean, 3)
            ).sample
            pixels = (pixels * column(PIXEL_STD, 3) + column(PIXEL_MEAN, 3)).clamp(0, 1)
            frames = (pixels[0].permute(1, 2, 3, 0) * 255).to(torch.uint8)
        clip = self.spec.video.clip
        for number, start in enumerate(range(0, len(frames), clip)):
            boundary("frames", {"pixels": frames[start : start + clip]}, number, 0)

    @contextmanager
    def _loaded(self, kind: Any, folder: str, dtype: torch.dtype) -> Iterator[Any]:
        """One public module from its folder, in eval mode on the device, gone after the block."""
        module = kind.from_pretrained(self.root / folder, torch_dtype=dtype)
        for tensor in (*module.parameters(), *module.buffers()):
            # out of the mapped file: its alignment would change the last bits of products on a CPU
            tensor.data = tensor.data.clone()
        try:
            yield module.to(self.choices.device).eval()
        finally:
            del module
            gc.collect()
            if self.choices.device.type == "cuda":
                torch.cuda.empty_cache()


def chain(task: str) -> tuple[tuple[type, ...], tuple[type, ...]]:
    """The public blocks of a task up to the noise, and from the loop to the latents."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise, decoders, denoise

    names = {
        "t2va": ("NoKeyframeAnchors", "PrepareLayout", "PrepareLatents", "SetTimesteps"),
        "fl2va": ("PrepareLayout", "PrepareConditionLatents", "PrepareLatents", "FL2VAPrepareLatents", "SetTimesteps"),
        "ref2va": (
            "Ref2VAPrepareLayout", "PrepareConditionLatents", "PrepareLatents", "Ref2VAPrepareLatents", "SetTimesteps",
        ),
    }[task]  # fmt: skip
    loop = denoise.MiniMaxH3Ref2VADenoiseStep if task == "ref2va" else denoise.MiniMaxH3DenoiseStep
    before = tuple(getattr(before_denoise, f"MiniMaxH3{name}Step") for name in names)
    return before, (loop, decoders.MiniMaxH3AfterDenoiseStep)


def _chain_inputs(plan: Plan, tags: Tensor, conditions: ConditionLatents) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "text_token_tags": tags,
        "height": plan.height,
        "width": plan.width,
        "num_frames": plan.frames,
        "num_inference_steps": plan.steps,
        "generator": torch.Generator().manual_seed(plan.seed),
    }
    if plan.task != "t2va":
        inputs["condition_latents"] = list(conditions.visual)
    if plan.task == "fl2va":
        inputs["keyframe_anchors"] = tuple(condition.anchor for condition in plan.conditions)
    if plan.task == "ref2va":
        inputs["audio_condition_latents"] = list(conditions.sounds)
        inputs["normalized_references"] = [
            SimpleNamespace(kind=condition.kind, has_audio=condition.audio_latents > 0) for condition in plan.conditions
        ]
    return inputs
