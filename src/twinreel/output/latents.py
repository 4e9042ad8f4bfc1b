"""What sampling ends with: kept in a file until the finished one has been read back, and decoded from it later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, RequestError
from ..plan import Condition, Plan
from ..spec import AUDIO_CHANNELS, Spec
from .report import HIDDEN, replacing

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "twinreel latents 1"


@dataclass(frozen=True)
class Latents:
    """What sampling ends with and decoding starts from: normalised latents, CPU fp32.

    `video` [1, C, T, h, w], `audio` [2, 32, A]; `facts` is what the report says of the sampling.
    """

    plan: Plan
    video: Tensor
    audio: Tensor
    facts: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """Latents from a file, and the report of the run that made them (request, engine, versions, stages)."""

    latents: Latents
    report: dict[str, Any]


def save_latents(path: Path, latents: Latents, report: Mapping[str, Any], spec: Spec, private: bool = False) -> None:
    """Write the latents and all that the final report needs to `path`, whole or not at all. Raises OSError."""
    from safetensors.torch import save

    plan = replace(latents.plan, prompt=HIDDEN) if private else latents.plan
    texts = {"plan": asdict(plan), "facts": latents.facts, "report": report}
    metadata = {name: json.dumps(value, ensure_ascii=False) for name, value in texts.items()}
    metadata |= {"format": FORMAT, "vae": decoder_key(spec)}
    data = save({"video": latents.video.contiguous(), "audio": latents.audio.contiguous()}, metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def load_latents(path: Path, spec: Spec) -> Kept:
    """Read what `save_latents` wrote. RequestError for another file, CheckpointError for another model's latents."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise RequestError("latents", f"{path} holds no latents of an interrupted run (format {FORMAT!r})")
            video, audio = file.get_tensor("video"), file.get_tensor("audio")
        plan, facts, report = (json.loads(metadata[name]) for name in ("plan", "facts", "report"))
    except OSError as error:
        raise RequestError("latents", f"{path} cannot be read ({error.strerror or error})") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise RequestError("latents", f"{path} is not whole: {error}") from None
    if metadata.get("vae") != decoder_key(spec):
        raise CheckpointError(f"{path} was made for another VAE than this model's; name the model that sampled it")
    latents = Latents(_plan(plan), video, audio, facts)
    _check_shapes(path, latents, spec)
    return Kept(latents, report)


def decoder_key(spec: Spec) -> str:
    """A hash of every size and constant of both VAEs: latents of one key decode with any weights of that key."""
    sizes = json.dumps([asdict(spec.video), asdict(spec.audio)], sort_keys=True, default=list)
    return hashlib.sha256(sizes.encode()).hexdigest()[:16]


def _plan(values: dict[str, Any]) -> Plan:
    conditions = tuple(Condition(**condition) for condition in values.pop("conditions"))
    whole: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Plan(**whole, conditions=conditions)


def _check_shapes(path: Path, latents: Latents, spec: Spec) -> None:
    plan, space = latents.plan, spec.video.space
    video = (1, spec.video.latent_channels, plan.latents, plan.height // space, plan.width // space)
    audio = (AUDIO_CHANNELS, spec.audio.latent_channels, plan.audio_latents)
    for name, tensor, shape in (("video", latents.video, video), ("audio", latents.audio, audio)):
        if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point:
            raise RequestError("latents", f"{path}: {name} is {list(tensor.shape)}, its plan says {list(shape)}")
