"""`twinreel compare A B`: two files, latents, traces or reports, and by how much they differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..spec import FPS, VideoVAESpec
from .media import MediaFile, read_media_file, read_report
from .pictures import VideoPair
from .sounds import sound_report
from .trace import compare_traces, difference, is_trace

SHAS = ("frames", "waveform", "file")


def compare(a: str | Path, b: str | Path, page: str | Path | None = None, with_ssim: bool = True) -> dict[str, Any]:
    """Compare two of a kind: videos, raw `.npz`, `.safetensors`, traces (folders), reports (`.json`). JSON values.

    `page` writes the HTML page (videos only). Raises RequestError for a path that is none of these, or for two kinds.
    """
    first, second = Path(a), Path(b)
    kinds = kind_of(first, "a"), kind_of(second, "b")
    if kinds[0] != kinds[1]:
        raise RequestError("compare", f"{a} is a {kinds[0]} and {b} a {kinds[1]}; compare two of a kind")
    if page is not None and kinds[0] != "video":
        raise RequestError("page", f"is drawn for videos only, and {a} is a {kinds[0]}; leave it out")
    names = {"a": str(a), "b": str(b)}
    if kinds[0] == "trace":
        return names | compare_traces(first, second)
    if kinds[0] == "latents":
        return names | compare_latents(first, second)
    if kinds[0] == "report":
        return names | compare_reports(_report(first, "a"), _report(second, "b"))
    if kinds[0] == "raw":
        return names | compare_media(read_raw(first, "a"), read_raw(second, "b"), with_ssim=with_ssim)
    return names | compare_videos(first, second, page, with_ssim)


def kind_of(path: Path, field: str) -> str:
    """`trace`, `latents`, `report`, `raw` (`.npz`) or `video`. Raises RequestError."""
    if path.is_dir():
        if is_trace(path):
            return "trace"
        raise RequestError(field, f"{path} is a folder without a manifest.json; a trace has one")
    if not path.is_file():
        raise RequestError(field, f"{path} does not exist; name a file, or the folder of a trace")
    return {".safetensors": "latents", ".json": "report", ".npz": "raw"}.get(path.suffix, "video")


def same_hashes(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, bool | None]:
    """Of raw frames, waveform and file: equal, different, or None where one side does not state it."""
    return {name: a[name] == b[name] if name in a and name in b else None for name in SHAS}


def compare_latents(a: Path, b: Path) -> dict[str, Any]:
    """Tensor by tensor of two safetensors files."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        first, second = load_file(a), load_file(b)
    except SafetensorError as error:
        raise RequestError("compare", f"{a} or {b} is no safetensors file: {error}") from None
    rows = [{"tensor": k} | difference(first.get(k), second.get(k)) for k in dict.fromkeys([*first, *second])]
    return {"kind": "latents", "identical": all(row["equal"] for row in rows), "tensors": rows}


def compare_reports(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes, and every value that differs, by its path in the report; times and memory are left out."""
    same = same_hashes(a["sha256"], b["sha256"])
    skip = ("stages.", "sha256.", "file", "path")
    first, second = dict(_leaves(a)), dict(_leaves(b))
    paths = [path for path in dict.fromkeys([*first, *second]) if not path.startswith(skip)]
    rows = [{"field": p, "a": first.get(p), "b": second.get(p)} for p in paths if first.get(p) != second.get(p)]
    return {
        "kind": "reports",
        "identical": bool(same["frames"] and same["waveform"]),
        "sha256": same,
        "differing": rows,
    }


def _report(path: Path, field: str) -> dict[str, Any]:
    report = read_report(path)
    if report is None:
        raise RequestError(field, f"{path} is no report of a run: it has no sha256")
    return report


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def compare_videos(a: Path, b: Path, page: str | Path | None = None, with_ssim: bool = True) -> dict[str, Any]:
    """Two files as a player decodes them, with the hashes of what they were made from where reports state them."""
    first, second = read_media_file(a, "a"), read_media_file(b, "b")
    pair = VideoPair(with_ssim=with_ssim)
    counts = [0, 0]
    for one, other in itertools.zip_longest(first.frames(), second.frames()):
        counts[0] += one is not None
        counts[1] += other is not None
        if one is not None and other is not None:
            try:
                pair.add(one, other)
            except ValueError as error:
                raise RequestError("compare", f"{a} and {b} have {error}; only one size can be compared") from None
    same = same_hashes(first.sha256, second.sha256)
    video = pair.report() | {"frames": counts}
    result: dict[str, Any] = {"kind": "videos", "identical": bool(same["file"]), "sha256": same, "video": video}
    if first.rate and second.rate:
        if first.rate != second.rate:
            raise RequestError("compare", f"sound of {first.rate} and {second.rate} Hz; only one rate can be compared")
        result["audio"] = sound_report(first.waveform, second.waveform, first.rate)
    result["av_offset"] = av_offset(first, second, result)
    if page is not None:
        from .page import write_page

        write_page(Path(page), a, b, result, pair, (first.waveform, second.waveform))
        result["page"] = str(page)
    return result


def av_offset(a: MediaFile, b: MediaFile, result: Mapping[str, Any]) -> dict[str, Any]:
    """Sound's start minus picture's in each file, and by how much `b`'s sound lags its picture more than `a`'s, ms."""
    offsets: dict[str, Any] = {}
    for name, file in (("a", a), ("b", b)):
        known = file.video_start is not None and file.audio_start is not None
        offsets[name] = 1000 * (file.audio_start - file.video_start) if known else None  # type: ignore[operator]
    if "audio" in result and result["video"].get("lag_frames") is not None:
        offsets["content"] = result["audio"]["envelope_lag_ms"] - 1000 * result["video"]["lag_frames"] / FPS
    return offsets


def read_raw(path: Path, field: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames and waveform (empty where there is none) of an `.npz` as `generate` writes it. Raises RequestError."""
    try:
        with np.load(path) as stored:
            audio = stored["audio"] if "audio" in stored else np.zeros((2, 0), np.float32)
            return stored["frames"], audio
    except (OSError, ValueError, KeyError) as error:
        raise RequestError(field, f"{path} is no .npz of frames and audio: {error}") from None


def compare_media(
    a: tuple[NDArray[np.uint8], NDArray[np.float32]],
    b: tuple[NDArray[np.uint8], NDArray[np.float32]],
    video: VideoVAESpec | None = None,
    with_ssim: bool = True,
) -> dict[str, Any]:
    """Raw results in memory: frames uint8 `[F, H, W, 3]` and waveform float32 `[2, n]`. Raises RequestError."""
    if a[0].shape != b[0].shape:
        raise RequestError(
            "compare", f"frames {list(a[0].shape)} and {list(b[0].shape)}; only one size can be compared"
        )
    identical = np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    pair = VideoPair(video, with_ssim and not identical)
    for one, other in zip(a[0], b[0], strict=True):
        pair.add(one, other)
    report = pair.report()
    if identical:
        report["ssim"] = 1.0
    return {"kind": "raw", "identical": identical, "video": report, "audio": sound_report(a[1], b[1])}


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """The result as a JSON file. Raises RequestError when it cannot be written."""
    try:
        Path(path).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError("output", f"{path} cannot be written: {error.strerror}") from None


def summary(result: Mapping[str, Any]) -> str:
    """What `compare` prints for people."""
    lines = [f"{result['a']} and {result['b']}: " + ("identical" if result["identical"] else "different")]
    if "sha256" in result:
        words = {True: "same", False: "different", None: "not stated"}
        lines.append("  SHA-256      " + ", ".join(f"{name} {words[same]}" for name, same in result["sha256"].items()))
    if result["kind"] == "traces":
        first = result["first_difference"]
        if first:
            amount = first.get("why") or f"max {first['max']:.3g}, relative L1 {first['relative_l1']:.3g}"
            lines.append(f"  first difference: {first['boundary']}, {first['tensor']}: {amount}")
        alone = len(result["only_a"] + result["only_b"])
        lines.append(f"  compared     {len(result['boundaries'])} tensors; boundaries in one only: {alone}")
    for row in result.get("tensors", []):
        lines.append(
            f"  {row['tensor']}: "
            + ("equal" if row["equal"] else row.get("why") or f"relative L1 {row['relative_l1']:.3g}")
        )
    lines += [f"  {row['field']}: {row['a']} | {row['b']}" for row in result.get("differing", [])[:20]]
    if result.get("video", {}).get("frames"):
        lines += _video_lines(result)
    return "\n".join(lines)


def _video_lines(result: Mapping[str, Any]) -> list[str]:
    video, audio = result["video"], result.get("audio")
    ssim = "not measured (pip install twinreel[quality])" if video["ssim"] is None else f"{video['ssim']:.4f}"
    lines = [
        f"  video        PSNR {decibels(video['psnr'])}, SSIM {ssim}, worst frame {video['worst_frame']['index']} "
        f"at {decibels(video['worst_frame']['psnr'])}",
        f"  SSIM by      {video['ssim_settings']}",
    ]
    for name, text in (("brightness_spikes", "clip borders"), ("tile_seams", "tile seams")):
        lines.append(f"  {text:<13}" + "; ".join(f"{side}: {_break(video[name][side])}" for side in ("a", "b")))
    if audio:
        lines.append(
            f"  audio        SNR {decibels(audio['snr'])}, cosine {audio['cosine']:.4f}, RMSE {audio['rmse']:.2e}, "
            f"log-spectral distance {audio['log_spectral_distance_db']:.2f} dB, lag {audio['envelope_lag_ms']:.0f} ms"
        )
    offset = result.get("av_offset", {})
    names = {"a": "a", "b": "b", "content": "b's sound lags its picture more than a's by"}
    known = [f"{names[name]} {value:.1f} ms" for name, value in offset.items() if value is not None]
    return [*lines, f"  A/V offset   {', '.join(known) or 'not known'}"]


def _break(facts: Mapping[str, Any]) -> str:
    """A jump of brightness at a clip border or a tile's edge, in words."""
    if "step" in facts:
        return f"largest step {facts['step']:.2f} at frame {facts['frame']}, {facts['times_median']:.1f} x the usual"
    if "ratio" in facts:
        return f"largest {facts['ratio']:.2f} x its neighbours, at {facts['at']}"
    return "none to look at"


def decibels(value: float | None) -> str:
    """`43.21 dB`, or `exact` for no difference at all."""
    return "exact" if value is None else f"{value:.2f} dB"
