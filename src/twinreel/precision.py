"""The precision of the DiT and of the conditioner as a word: `auto`, `bf16`, `fp32`, or `fp8` with its fields."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .errors import ConfigError
from .spec import DiTSpec

NAMES = ("auto", "bf16", "fp32", "fp8")
ATTENTIONS = ("auto", "fp8", "bf16")
MOST = 999
ALIGNED = 16  # what e4m3 products need of their sizes
FORM = "fp8, or with fields as in fp8:blocks=2,steps=0,attention=auto"


@dataclass(frozen=True)
class Fp8:
    """Products in e4m3, with a scale for each row, in the trunk's blocks: not exact, and never what `auto` takes.

    blocks: at either end of the trunk so many stay bf16. steps: at either end of a request so many calls run in bf16
    throughout, which needs both sets of weights in memory. attention: `fp8`, `bf16`, or `auto`: fp8 where fa3 runs.
    """

    blocks: int = 2
    steps: int = 0
    attention: str = "auto"

    def __str__(self) -> str:
        """The word that means this."""
        return f"fp8:blocks={self.blocks},steps={self.steps},attention={self.attention}"


def parse_precision(text: object) -> tuple[str, Fp8 | None]:
    """Name and, for fp8, its fields. Raises ConfigError."""
    if text in ("fp16", "float16", "half"):
        raise ConfigError(
            "precision: fp16 is refused: the DiT's residual passes 65,504, fp16's largest; use bf16 or fp32"
        )
    name, colon, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name not in NAMES or colon and name != "fp8":
        raise ConfigError(f"precision: got {text!r:.80}; use {', '.join(NAMES[:-1])}, {FORM}")
    if name != "fp8":
        return name, None
    given: dict[str, int | str] = {}
    for word in rest.split(",") if colon else ():
        key, _, value = word.partition("=")
        if key in given or key not in {item.name for item in fields(Fp8)}:
            raise ConfigError(f"precision: got {text!r:.80}; use {FORM}")
        given[key] = _field(key, value)
    return name, Fp8(**given)  # type: ignore[arg-type]


def _field(key: str, value: str) -> int | str:
    if key == "attention":
        if value not in ATTENTIONS:
            raise ConfigError(f"precision: fp8: attention: got {value!r:.80}; use {', '.join(ATTENTIONS)}")
        return value
    if not (value.isascii() and value.isdecimal() and int(value[:9]) <= MOST):
        raise ConfigError(f"precision: fp8: {key}: got {value!r:.80}; a whole number from 0 to {MOST}")
    return int(value)


def _check_fp8(fp8: Fp8, layers: int, stored: int | None) -> None:
    """Whether a trunk of `layers` blocks can run so; `stored`: blocks at either end that a quantized checkpoint keeps in
    bf16, None for one that is not. Raises ConfigError."""
    if 2 * fp8.blocks >= layers:
        most = (layers - 1) // 2
        allowed = f"blocks=0 to blocks={most}" if most else "blocks=0"
        raise ConfigError(f"precision: fp8: blocks={fp8.blocks} leaves none of {layers} blocks in fp8; use {allowed}")
    if stored is not None and fp8.blocks > stored:
        raise ConfigError(
            f"precision: fp8: blocks={fp8.blocks}, but these weights are quantized but for {stored} blocks at either "
            f"end; use blocks={stored} or fewer, or weights that are not quantized"
        )
    if stored is not None and fp8.steps:
        raise ConfigError(
            f"precision: fp8: steps={fp8.steps} needs bf16 weights of every block, and these are quantized; use steps=0, "
            "or weights that are not quantized"
        )


def check_weights(precision: str, dit: DiTSpec) -> None:
    """Whether weights as they are stored can run in a precision. Raises ConfigError."""
    name, fp8 = parse_precision(precision)
    if fp8 is not None:
        _check_fp8(fp8, dit.layers, dit.fp8_edge)
        sizes = {"hidden": dit.hidden, "heads x head_dim": dit.inner, "ffn": dit.ffn}
        odd = [f"{name} {size}" for name, size in sizes.items() if size % ALIGNED]
        if odd:
            raise ConfigError(
                f"precision: fp8: needs sizes in multiples of {ALIGNED}, this DiT has {', '.join(odd)}; use bf16"
            )
    elif dit.fp8_edge is not None:
        raise ConfigError(
            f"precision: got {name}, but these weights are quantized to e4m3; use fp8:blocks={dit.fp8_edge}"
        )


def running(dit: DiTSpec, fp8: Fp8 | None) -> DiTSpec:
    """The sizes of the weights as they are used in memory, without the second set that `steps` needs."""
    return dit if fp8 is None else replace(dit, fp8_edge=fp8.blocks)
