"""`twinreel compare A B`: two files, latents, traces or reports, and by how much they differ."""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from ..media.addresses import what_is
from ..small_files import why
from ..spec import FPS, VideoVAESpec
from .media import MediaFile, read_media_file, read_report
from .pictures import VideoPair
from .sounds import same_bits, sound_report
from .targets import Write, not_finite_line, plain, write_whole
from .trace import amount, compare_traces, difference, is_trace, read_tensors

SHAS = ("frames", "waveform", "file")
# what NumPy raises for a .npz with any of its bytes changed
DAMAGE = (OSError, ValueError, KeyError, EOFError, MemoryError, RuntimeError, BadZipFile, zlib.error, SyntaxError)


def compare(
    a: str | Path,
    b: str | Path,
    page: str | Path | None = None,
    with_ssim: bool = True,
    *,
    write: Write = write_whole,
) -> dict[str, Any]:
    """Compare two of a kind: videos, raw `.npz`, `.safetensors`, traces (folders), reports (`.json`). JSON values.

    `page`: where `write` puts the HTML page (videos only). `identical` is None where neither states a hash; numbers that
    are not finite are None, and named under `not_finite`. Raises RequestError for a path that is none of these, for two
    kinds, and for a file that is not whole.
    """
    return plain(_compare(a, b, page, with_ssim, write))


def _compare(a: str | Path, b: str | Path, page: str | Path | None, with_ssim: bool, write: Write) -> dict[str, Any]:
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
    return names | compare_videos(first, second, page, with_ssim, write)


def kind_of(path: Path, field: str) -> str:
    """`trace`, `latents`, `report`, `raw` (`.npz`) or `video`. Raises RequestError."""
    try:
        if is_trace(path):
            return "trace"
        if path.is_dir():
            raise RequestError(field, f"{path} is a folder without a manifest.json; a trace has one")
        if not path.exists():
            raise RequestError(field, f"{path} does not exist; name a file, or the folder of a trace")
        if not path.is_file():
            raise RequestError(field, f"{path} is {what_is(path)}, not a file; name a file, or the folder of a trace")
    except OSError as error:
        raise RequestError(field, f"{path} cannot be read ({why(error)}); check its name and permissions") from None
    return {".safetensors": "latents", ".json": "report", ".npz": "raw"}.get(path.suffix, "video")


def same_hashes(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, bool | None]:
    """Of raw frames, waveform and file: equal, different, or None where one side does not state it."""
    return {name: a[name] == b[name] if name in a and name in b else None for name in SHAS}


def compare_latents(a: Path, b: Path) -> dict[str, Any]:
    """Tensor by tensor of two safetensors files."""
    first, second = read_tensors(a, "a"), read_tensors(b, "b")
    rows = [{"tensor": k} | difference(first.get(k), second.get(k)) for k in dict.fromkeys([*first, *second])]
    return {"kind": "latents", "identical": all(row["equal"] for row in rows), "tensors": rows}


def compare_reports(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes, and every value that differs, by its path in the report; times and memory are left out."""
    same = same_hashes(a["sha256"], b["sha256"])
    skip = ("stages.", "sha256.", "file", "path")
    first, second = dict(_leaves(a)), dict(_leaves(b))
    paths = [path for path in dict.fromkeys([*first, *second]) if not path.startswith(skip)]
    rows = [{"field": p, "a": first.get(p), "b": second.get(p)} for p in paths if _differ(first.get(p), second.get(p))]
    stated = [same[name] for name in ("frames", "waveform") if name in a["sha256"] or name in b["sha256"]]
    return {
        "kind": "reports",
        "identical": all(stated) if stated else None,
        "sha256": same,
        "differing": rows,
    }


def _differ(a: Any, b: Any) -> bool:
    """Whether two values of reports differ; what is no number is itself."""
    return a != b and json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)


def _report(path: Path, field: str) -> dict[str, Any]:
    report = read_report(path)
    if report is None:
        raise RequestError(field, f"{path} is no report of a run: it has no sha256")
    return report


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]
    return [(path, value)]


def compare_videos(
    a: Path, b: Path, page: str | Path | None = None, with_ssim: bool = True, write: Write = write_whole
) -> dict[str, Any]:
    """Two files as a player decodes them, with the hashes of what they were made from where reports state them."""
    first, second = read_media_file(a, "a"), read_media_file(b, "b")
    if first.fps and second.fps and round(first.fps) != round(second.fps):
        speeds = f"{first.fps:g} and {second.fps:g} frames a second"
        raise RequestError("compare", f"{a} and {b} have {speeds}; only one rate can be compared")
    pair = VideoPair(with_ssim=with_ssim, fps=first.fps or second.fps or FPS)
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
        channels = len(first.waveform), len(second.waveform)
        if channels[0] != channels[1]:
            raise RequestError("compare", f"sound of {channels[0]} and {channels[1]} channels; make them one number")
        result["audio"] = sound_report(first.waveform, second.waveform, first.rate)
    result["av_offset"] = av_offset(first, second, result)
    if page is not None:
        from .page import draw_page

        write(Path(page), draw_page(Path(page), a, b, result, pair, (first.waveform, second.waveform)))
        result["page"] = str(page)
    return result


def av_offset(a: MediaFile, b: MediaFile, result: Mapping[str, Any]) -> dict[str, Any]:
    """Sound's start minus picture's in each file, and by how much `b`'s sound lags its picture more than `a`'s, ms."""
    offsets: dict[str, Any] = {}
    for name, file in (("a", a), ("b", b)):
        known = file.video_start is not None and file.audio_start is not None
        offsets[name] = 1000 * (file.audio_start - file.video_start) if known else None  # type: ignore[operator]
    lags = result.get("audio", {}).get("envelope_lag_ms"), result["video"].get("lag_frames")
    if None not in lags:  # then both have both streams; sound and pictures are counted from where each begins
        content = result["audio"]["envelope_lag_ms"] - 1000 * result["video"]["lag_frames"] / result["video"]["fps"]
        offsets["content"] = content + offsets["b"] - offsets["a"]
    return offsets


def read_raw(path: Path, field: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Frames and waveform (empty where there is none) of an `.npz` as `generate` writes it. Raises RequestError."""
    try:
        with path.open("rb") as file, np.lib.npyio.NpzFile(file) as stored:
            audio = stored["audio"] if "audio" in stored else np.zeros((2, 0), np.float32)
            frames = stored["frames"]
    except DAMAGE as error:
        raise RequestError(field, f"{path} is no .npz of frames and audio, or not whole ({_cause(error)})") from None
    forms = {"frames": (frames, np.uint8, (-1, -1, -1, 3)), "audio": (audio, np.float32, (2, -1))}
    for name, (values, dtype, shape) in forms.items():
        fits = values.ndim == len(shape) and all(
            want in (-1, got) for want, got in zip(shape, values.shape, strict=True)
        )
        if values.dtype != dtype or not fits or 0 in values.shape[1:3] * (name == "frames"):
            wanted = "uint8 [F, H, W, 3]" if name == "frames" else "float32 [2, n]"
            raise RequestError(field, f"{path} has {name} of {values.dtype} {list(values.shape)}; {wanted} is compared")
    return frames, audio


def _cause(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


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
    identical = same_bits(a[0], b[0]) and same_bits(a[1], b[1])
    pair = VideoPair(video, with_ssim and not identical)
    for one, other in zip(a[0], b[0], strict=True):
        pair.add(one, other)
    report = pair.report()
    if identical and len(a[0]):
        report["ssim"] = 1.0
    return {"kind": "raw", "identical": identical, "video": report, "audio": sound_report(a[1], b[1])}


def summary(result: Mapping[str, Any]) -> str:
    """What `compare` prints for people."""
    words = {True: "identical", False: "different", None: "neither states a hash of its frames or sound"}
    lines = [f"{result['a']} and {result['b']}: {words[result['identical']]}"]
    if "sha256" in result:
        words = {True: "same", False: "different", None: "not stated"}
        lines.append("  SHA-256      " + ", ".join(f"{name} {words[same]}" for name, same in result["sha256"].items()))
    if result["kind"] == "traces":
        first = result["first_difference"]
        if first:
            lines.append(f"  first difference: {first['boundary']}, {first['tensor']}: {amount(first)}")
        alone = len(result["only_a"] + result["only_b"])
        lines.append(f"  compared     {len(result['boundaries'])} tensors; boundaries in one only: {alone}")
    for row in result.get("tensors", []):
        lines.append(f"  {row['tensor']}: " + ("equal" if row["equal"] else amount(row)))
    lines += [f"  {row['field']}: {row['a']} | {row['b']}" for row in result.get("differing", [])[:20]]
    if "video" in result:
        lines += _media_lines(result)
    return "\n".join([*lines, *(f"  {line}" for line in not_finite_line(result))])


def _media_lines(result: Mapping[str, Any]) -> list[str]:
    video, audio = result["video"], result.get("audio")
    lines = _video_lines(video) if "psnr" in video else ["  video        no frames to compare"]
    if audio and audio.get("samples_not_finite"):
        lines.append("  audio        {} and {} samples are not finite: no figures".format(*audio["samples_not_finite"]))
    elif audio and audio["rmse"] is None:
        lines.append("  audio        {} and {} samples: nothing to compare".format(*audio["samples"]))
    elif audio:
        if audio["samples"][0] != audio["samples"][1]:
            lines.append("  samples      {} and {}: what both have is compared".format(*audio["samples"]))
        lines.append(
            f"  audio        SNR {decibels(audio['snr'])}, cosine {audio['cosine']:.4f}, RMSE {audio['rmse']:.2e}, "
            f"log-spectral distance {audio['log_spectral_distance_db']:.2f} dB, "
            + ("too unlike for a lag" if audio["envelope_lag_ms"] is None else f"lag {audio['envelope_lag_ms']:.0f} ms")
        )
    offset = result.get("av_offset", {})
    names = {"a": "a", "b": "b", "content": "b's sound lags its picture more than a's by"}
    known = [f"{names[name]} {value:.1f} ms" for name, value in offset.items() if value is not None]
    return [*lines, f"  A/V offset   {', '.join(known) or 'not known'}"]


def _video_lines(video: Mapping[str, Any]) -> list[str]:
    ssim = (
        "not measured (pip install -c constraints.txt -e '.[quality]')"
        if video["ssim"] is None
        else f"{video['ssim']:.4f}"
    )
    counts = video["frames"]
    uneven = isinstance(counts, list) and counts[0] != counts[1]
    lines = [f"  frames       {counts[0]} and {counts[1]}: what both have is compared"] if uneven else []
    lines += [
        f"  video        PSNR {decibels(video['psnr'])}, SSIM {ssim}, worst frame {video['worst_frame']['index']} "
        f"at {decibels(video['worst_frame']['psnr'])}",
    ]
    if video["ssim"] is not None:
        lines.append(f"  SSIM by      {video['ssim_settings']}")
    for name, text in (("brightness_spikes", "clip borders"), ("tile_seams", "tile seams")):
        lines.append(f"  {text:<13}" + "; ".join(f"{side}: {_break(video[name][side])}" for side in ("a", "b")))
    return lines


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
