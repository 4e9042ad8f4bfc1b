"""`--trace DIR`: the values between stages as safetensors with a manifest, and reading such a folder.

The schema is small on purpose, so that other engines' traces can be compared too; `docs/validation.md` has it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..limits import check_text
from ..output import write_probe
from ..output.placing import replacing
from ..small_files import read_small_json, why
from .targets import plain

SCHEMA = "twinreel-trace/1"
MANIFEST = "manifest.json"
NUMBERED = ("velocity", "frames")  # by step and by clip, also where there is one


class Trace:
    """A `watch.Boundary` that writes: each boundary at once as a file, the manifest at `finish`.

    Of `velocity` the first, the middle and the last step are kept, or with `all_steps` every one. The folder is made;
    RequestError for one that holds anything or cannot be written to, then and when its disk fills up.
    """

    def __init__(self, folder: str | Path, all_steps: bool = False) -> None:
        self.folder, self.all_steps = Path(folder), all_steps
        self.boundaries: list[dict[str, Any]] = []
        check_text("trace", os.fspath(folder))
        if self.folder == Path():
            raise RequestError("trace", "is the current folder; name a new one")
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise RequestError("trace", f"{folder} holds files already; name a new folder")
            write_probe(self.folder / MANIFEST)

    def __call__(self, name: str, values: Mapping[str, Any], part: int = 0, parts: int = 1) -> None:
        """Write one boundary; no tensors, no file."""
        if not values or name == "velocity" and not self.all_steps and part not in (0, parts // 2, parts - 1):
            return
        from safetensors.torch import save

        label = f"{name}.{part}" if name in NUMBERED else name
        tensors = {key: _plain(value) for key, value in values.items()}
        file = f"{len(self.boundaries):03d}-{label}.safetensors"
        with self._writing(), replacing(self.folder / file) as temporary:
            temporary.write_bytes(save(tensors))
        self.boundaries.append({"name": label, "file": file, "tensors": {k: _facts(t) for k, t in tensors.items()}})

    def finish(self, report: Mapping[str, Any]) -> Path:
        """Write the manifest with the run's report; returns its path."""
        from .. import __version__

        manifest = {
            "schema": SCHEMA,
            "engine": f"twinreel {__version__}",
            "report": report,
            "boundaries": self.boundaries,
        }
        with self._writing(), replacing(self.folder / MANIFEST) as temporary:
            text = json.dumps(plain(manifest), indent=1, default=str, allow_nan=False)
            temporary.write_text(text + "\n", encoding="utf-8")
        return self.folder / MANIFEST

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"cannot be written to ({error.strerror or error}); free some room there, or name another folder"
            raise RequestError("trace", f"{self.folder} {why}") from None


def _plain(value: Any) -> Any:
    """A tensor on the CPU in memory of its own: the loop goes on in the original."""
    import torch

    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    return tensor.detach().to("cpu", copy=True).contiguous()


def _facts(tensor: Any) -> dict[str, Any]:
    import torch

    raw = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(raw).hexdigest()}


def is_trace(path: Path) -> bool:
    """Whether `path` is a trace's folder."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path, field: str = "trace") -> dict[str, Any]:
    """A trace's manifest. Raises RequestError (`field`) when it is not one of this schema."""
    path = folder / MANIFEST
    try:
        manifest = read_small_json(path)
    except (OSError, ValueError) as error:
        raise RequestError(field, f"{path} cannot be read: {why(error)}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise RequestError(field, f"{path} is not of schema {SCHEMA}")
    boundaries = manifest.get("boundaries")
    if not isinstance(boundaries, list) or not all(map(_is_boundary, boundaries)):
        raise RequestError(
            field, f"{path} has no boundaries, each with a name and a file of this folder; record it anew"
        )
    return manifest


def _is_boundary(value: Any) -> bool:
    texts: list[Any] = [value.get("name"), value.get("file")] if isinstance(value, dict) else [None]
    return all(isinstance(text, str) for text in texts) and os.path.basename(texts[1]) == texts[1]


def read_tensors(path: Path, field: str) -> dict[str, Any]:
    """Every tensor of a safetensors file, on the CPU. Raises RequestError (`field`)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no plain file")
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RequestError(
            field, f"{path} is no safetensors file, or not whole ({why(error)}); copy it again"
        ) from None


def compare_traces(a: Path, b: Path) -> dict[str, Any]:
    """Boundary by boundary in `a`'s order: equal bits or the distances, and the first that differs.

    Boundaries that only one trace has are listed and do not count as a difference. Raises RequestError (`a`, `b`).
    """
    first, second = read_manifest(a, "a"), read_manifest(b, "b")
    files = {boundary["name"]: boundary["file"] for boundary in second["boundaries"]}
    rows, differing = [], None
    for boundary in first["boundaries"]:
        name = boundary["name"]
        if name not in files:
            continue
        tensors, others = read_tensors(a / boundary["file"], "a"), read_tensors(b / files[name], "b")
        for key in [*tensors, *(key for key in others if key not in tensors)]:
            row = {"boundary": name, "tensor": key} | difference(tensors.get(key), others.get(key))
            rows.append(row)
            if not row["equal"] and differing is None:
                differing = row
    names = [boundary["name"] for boundary in first["boundaries"]]
    return {
        "kind": "traces",
        "identical": differing is None,
        "first_difference": differing,
        "boundaries": rows,
        "only_a": [name for name in names if name not in files],
        "only_b": [name for name in files if name not in names],
    }


def difference(a: Any, b: Any) -> dict[str, Any]:
    """Of two tensors: `equal` bits, or why they cannot be compared, or max and mean |a - b|, relative L1 and cosine: None
    where values are not finite, which are counted, or there is none."""
    import torch

    if a is None or b is None:
        return {"equal": False, "why": "only in " + ("b" if a is None else "a")}
    if a.shape != b.shape:
        return {"equal": False, "why": f"shapes {list(a.shape)} and {list(b.shape)}"}
    if a.dtype == b.dtype and (not a.numel() or torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))):
        return {"equal": True}
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    apart = (x - y).abs()
    norms = x.norm() * y.norm()
    row: dict[str, Any] = {
        "equal": False,
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in (a, b)],
        "differing": int((apart != 0).sum()),
        "of": x.numel(),
    }
    broken = [int((~values.isfinite()).sum()) for values in (x, y)]
    if any(broken) or not x.numel():
        counts = {"values_not_finite": broken} if any(broken) else {}
        return row | dict.fromkeys(("max", "mean", "relative_l1", "cosine")) | counts
    return row | {
        "max": float(apart.max()),
        "mean": float(apart.mean()),
        "relative_l1": float(apart.sum() / x.abs().sum().clamp(min=1e-300)),
        "cosine": float((x @ y) / norms) if norms else 0.0,
    }


def amount(row: Mapping[str, Any]) -> str:
    """A row of `difference` that is not equal, in words."""
    if "why" in row:
        return str(row["why"])
    if broken := row.get("values_not_finite"):
        return f"{broken[0]} and {broken[1]} of {row['of']} values are not finite"
    figures = [
        f"{words} {row[name]:.3g}"
        for name, words in (("max", "max"), ("relative_l1", "relative L1"))
        if row[name] is not None
    ]
    return ", ".join(figures) or f"dtypes {' and '.join(row['dtypes'])}"
