"""Formats without loss and without PyAV: WAV, NumPy's `.npz` and a folder of PNG pictures."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...spec import FPS, SAMPLE_RATE
from .. import FRAME_NAME, SOUND_NAME
from .content import Content, hash_pictures

IEEE_FLOAT = 3  # WAVE's format tag
PNG_LEVEL = 3  # zlib's: near the size of the default at a third of its time
EPOCH = (1980, 1, 1, 0, 0, 0)  # the clock is no part of a file's bytes
WAV_HEADER = "<4sI4s4sIHHIIHHH4sII4sI"


def write_wav(path: Path, waveform: NDArray[np.float32]) -> None:
    """float32 `[2, n]` as 32-bit float stereo WAV: every bit is kept."""
    channels, length = waveform.shape
    data = np.ascontiguousarray(waveform.T, dtype="<f4").tobytes()
    width = 4 * channels
    header = struct.pack(
        WAV_HEADER,
        *(b"RIFF", struct.calcsize(WAV_HEADER) - 8 + len(data), b"WAVE"),
        *(b"fmt ", 18, IEEE_FLOAT, channels, SAMPLE_RATE, SAMPLE_RATE * width, width, 32, 0),
        *(b"fact", 4, length),
        *(b"data", len(data)),
    )
    path.write_bytes(header + data)


def read_wav(path: Path, content: Content) -> list[str]:
    """What differs from the sound as written."""
    data = path.read_bytes()
    size = struct.calcsize(WAV_HEADER)
    expected = np.ascontiguousarray(content.samples().T, dtype="<f4").tobytes()
    return [] if data[:4] == b"RIFF" and data[size:] == expected else [f"the samples of {path.name} differ"]


def write_folder(path: Path, content: Content) -> None:
    """`frame-00000.png` and on, with `sound.wav`, in the new folder `path`."""
    from PIL import Image

    path.mkdir()
    for number, picture in enumerate(content.pictures()):
        Image.fromarray(picture).save(path / FRAME_NAME.format(number), compress_level=PNG_LEVEL)
    if content.waveform is not None:
        write_wav(path / SOUND_NAME, content.waveform)


def read_folder(path: Path, content: Content) -> list[str]:
    """What differs from frames and sound as written."""
    from PIL import Image

    def pictures() -> Iterator[NDArray[np.uint8]]:
        for number in range(len(list(path.glob("*.png")))):
            with Image.open(path / FRAME_NAME.format(number)) as picture:
                yield np.asarray(picture)

    problems = _compare_frames(content, *hash_pictures(pictures()))
    return problems + (read_wav(path / SOUND_NAME, content) if content.waveform is not None else [])


def write_npz(path: Path, content: Content) -> None:
    """`frames` uint8 `[F, H, W, 3]`, `fps`, and with sound `audio` float32 `[2, n]` and `rate`; not compressed.

    Raises ValueError when the number of frames is not known beforehand: the array's header comes first.
    """
    if content.expected is None:
        raise ValueError("npz needs the number of frames beforehand")
    arrays: dict[str, Any] = {"fps": np.int64(FPS)}
    if content.waveform is not None:
        arrays |= {"audio": content.waveform, "rate": np.int64(SAMPLE_RATE)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with _entry(archive, "frames", "w") as file:
            header: bytes | None = None
            for picture in content.pictures():
                if header is None:
                    header = _header((content.expected, *picture.shape))
                    file.write(header)
                file.write(picture.data)
        if content.frames != content.expected:
            raise ValueError(f"{content.frames} frames came, {content.expected} were announced")
        for name, array in arrays.items():
            with _entry(archive, name, "w") as file:
                np.lib.format.write_array(file, np.asarray(array))


def read_npz(path: Path, content: Content) -> list[str]:
    """What differs from frames and sound as written."""
    width, height = content.size or (0, 0)

    def pictures(file: Any) -> Iterator[NDArray[np.uint8]]:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        while data := file.read(width * height * 3):
            yield np.frombuffer(data, np.uint8)

    with zipfile.ZipFile(path) as archive:
        with archive.open("frames.npy") as file:
            problems = _compare_frames(content, *hash_pictures(pictures(file)))
        if content.waveform is not None:
            with archive.open("audio.npy") as file:
                if not np.array_equal(np.lib.format.read_array(file), content.waveform, equal_nan=True):
                    problems.append("its samples differ")
    return problems


def _entry(archive: zipfile.ZipFile, name: str, mode: Any) -> Any:
    return archive.open(zipfile.ZipInfo(f"{name}.npy", EPOCH), mode, force_zip64=True)


def _header(shape: tuple[int, ...]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return header.getvalue()


def _compare_frames(content: Content, count: int, found: str) -> list[str]:
    if count != content.frames:
        return [f"{count} frames of {content.frames}"]
    return [] if found == content.hash else ["its frames differ"]
