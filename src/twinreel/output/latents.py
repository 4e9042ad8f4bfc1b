"""What sampling ends with: kept in a file until the finished one has been read back, and decoded from it later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import CheckpointError, RequestError
from ..plan import Condition, Plan
from ..spec import Spec
from . import LATENTS_SUFFIX
from .placing import give_name, hold, unfinished
from .report import HIDDEN

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "twinreel latents 2"
NAME_ONE = f"name one that ends in {LATENTS_SUFFIX}"


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


def save_latents(
    path: Path, latents: Latents, report: Mapping[str, Any], spec: Spec, private: bool = False
) -> BinaryIO:
    """Write the latents and all that the final report needs to `path`, whole or not at all; returns them as `hold` does.

    Raises OSError, FileExistsError where something is called so.
    """
    from safetensors.torch import save

    plan = replace(latents.plan, prompt=HIDDEN) if private else latents.plan
    texts = {"plan": asdict(plan), "facts": latents.facts, "report": report}
    metadata = {name: json.dumps(value) for name, value in texts.items()}
    metadata |= {"format": FORMAT, "vae": decoder_key(spec)}
    tensors = {"video": latents.video.contiguous(), "audio": latents.audio.contiguous()}
    metadata["digest"] = _digest(metadata, tensors)
    data = save(tensors, metadata)
    with unfinished(path) as temporary:
        temporary.write_bytes(data)
        with ExitStack() as stack:
            held = stack.enter_context(hold(temporary))  # before it has a name that others know
            give_name(temporary, path)
            stack.pop_all()
    return held


def load_latents(path: Path, spec: Spec) -> Kept:
    """Read what `save_latents` wrote. RequestError for a file that is another or not as it was written, CheckpointError
    for another model's latents.
    """
    with _opened(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in ("video", "audio")}
    # one sum over all of it: no field needs a check of its own
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        raise RequestError("latents", f"{path} is not as it was written; run its request again")
    if metadata.get("vae") != decoder_key(spec):
        raise CheckpointError(f"{path} was made for another VAE than this model's; name the model that sampled it")
    try:
        plan, facts, report = (json.loads(metadata[name]) for name in ("plan", "facts", "report"))
        latents = Latents(_plan(plan), **tensors, facts=facts)
    except (KeyError, TypeError) as error:
        raise RequestError("latents", f"{path} is of another version ({error}); decode it with that one") from None
    return Kept(latents, report)


def check_latents(path: Path) -> None:
    """Refuse what `load_latents` could not read whatever the model is, by its head alone and without torch. Raises
    RequestError."""
    with _opened(path, "np"):
        pass


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    """The tensors of a latents file. Raises RequestError for another file, and for what reading in the block shows."""
    from safetensors import SafetensorError, safe_open

    foreign = f"{path} holds no latents of an interrupted run (format {FORMAT!r}); {NAME_ONE}"
    try:
        if path.exists() and not path.is_file():
            raise RequestError("latents", f"{path} is no file; {NAME_ONE}")
        with path.open("rb") as raw:
            if raw.read(9)[8:] not in (b"{", b""):  # behind its length stands a head in JSON
                raise RequestError("latents", foreign)
        with safe_open(path, framework) as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise RequestError("latents", foreign)
            yield file
    except OSError as error:
        raise RequestError("latents", f"{path} cannot be read ({error.strerror or error}); {NAME_ONE}") from None
    except (SafetensorError, ValueError) as error:
        raise RequestError("latents", f"{path} is not whole ({error}); run its request again") from None


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of every text and every tensor's dtype, shape and bytes."""
    import torch

    sha = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in tensors.items():
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def decoder_key(spec: Spec) -> str:
    """A hash of every size and constant of both VAEs: latents of one key decode with any weights of that key."""
    sizes = json.dumps([asdict(spec.video), asdict(spec.audio)], sort_keys=True, default=list)
    return hashlib.sha256(sizes.encode()).hexdigest()[:16]


def _plan(values: dict[str, Any]) -> Plan:
    conditions = tuple(Condition(**condition) for condition in values.pop("conditions"))
    whole: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Plan(**whole, conditions=conditions)
