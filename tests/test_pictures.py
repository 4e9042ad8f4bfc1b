"""Pictures: orientation, transparency, depth, colour, animation; what is too large or broken."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from media_files import barred
from twinreel.errors import RequestError
from twinreel.media.read import read_source
from twinreel.request import Keyframe
from twinreel.sources import Picture
from twinreel.spec import Spec

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def read(image: Any) -> Picture:
    picture = read_source(Keyframe(image), Spec(), 1, "keyframes[0]")
    assert isinstance(picture, Picture) and picture.pixels.dtype == np.uint8 and picture.pixels.shape[2] == 3
    return picture


def saved(image: Image.Image, path: Path, **options: Any) -> Picture:
    image.save(path, **options)
    return read(path)


def profile(space: bytes, tags: dict[bytes, bytes], connection: bytes = b"XYZ ") -> bytes:
    """An ICC v2 profile of device `space` with these tags."""
    table, body = struct.pack(">I", len(tags)), b""
    first = 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", first + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    head = struct.pack(">I4sI4s4s4s", first + len(body), b"\0" * 4, 0x02400000, b"prtr", space, connection)
    head += b"\0" * 12 + b"acsp" + b"\0" * 28 + struct.pack(">3i", 0xF6D6, 0x10000, 0xD32D)
    return head.ljust(128, b"\0") + table + body


# --- upright ----------------------------------------------------------------------------------------------------------

STORED = {
    # how a camera held that way stores an upright scene
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("kind", ["png", "jpg", "tiff", "webp", "in memory"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_red_bar_is_on_top(tmp_path: Path, kind: str, orientation: int):
    image = Image.fromarray(barred())
    image = image.transpose(STORED[orientation]) if orientation > 1 else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    if kind == "in memory":
        stream = io.BytesIO()
        image.save(stream, "PNG", exif=exif)
        picture = read(Image.open(stream))
    else:
        lossless = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(kind, {})
        picture = saved(image, tmp_path / f"a.{kind}", exif=exif, **lossless)
    assert picture.pixels.shape == barred().shape
    assert np.abs(picture.pixels.astype(int) - barred()).max() <= (3 if kind == "jpg" else 0)
    # Pillow turns a TIFF by itself and keeps silent about it
    assert bool(picture.notes) == (orientation > 1 and kind != "tiff")


def test_exif_that_cannot_be_read_is_told(tmp_path: Path):
    pixels = barred()
    picture = saved(Image.fromarray(pixels), tmp_path / "a.png", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert np.array_equal(picture.pixels, pixels)


# --- transparency, depth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "webp", "tiff"])
@pytest.mark.parametrize("alpha", [0, 1, 64, 128, 200, 254])
def test_transparency_is_laid_over_white(tmp_path: Path, kind: str, alpha: int):
    colour = (200, 10, 90)
    options = {"webp": {"lossless": True, "exact": True}}.get(kind, {})
    picture = saved(Image.new("RGBA", (8, 8), (*colour, alpha)), tmp_path / f"a.{kind}", **options)
    expected = [c * alpha / 255 + 255 * (1 - alpha / 255) for c in colour]
    assert np.abs(picture.pixels - np.array(expected)).max() <= 1
    assert "over white" in picture.notes[0]


def test_every_kind_of_transparency(tmp_path: Path):
    image = Image.new("LA", (4, 4), (40, 128))
    for grey in (saved(image, tmp_path / "la.png"), read(image.convert("La"))):
        assert (grey.pixels == 147).all() and "over white" in grey.notes[0]
    palette = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for options in ({"transparency": 1}, {"transparency": bytes([255, 0, 255])}):
        found = saved(palette, tmp_path / "p.png", **options).pixels
        assert found.tolist() == [[[255, 0, 0], [255, 255, 255]], [[0, 0, 255], [255, 255, 255]]]
    plain = saved(palette, tmp_path / "plain.gif")
    assert plain.pixels[0, 1].tolist() == [0, 255, 0] and not plain.notes
    keyed = Image.fromarray(np.array([[[1, 2, 3], [9, 9, 9]]], np.uint8))
    assert saved(keyed, tmp_path / "k.png", transparency=(1, 2, 3)).pixels.tolist() == [[[255] * 3, [9, 9, 9]]]
    opaque = saved(Image.new("RGBA", (4, 4), (1, 2, 3, 255)), tmp_path / "o.png")
    assert (opaque.pixels == (1, 2, 3)).all() and not opaque.notes
    premultiplied = read(Image.new("RGBA", (4, 4), (200, 100, 0, 128)).convert("RGBa"))
    assert np.abs(premultiplied.pixels[0, 0].astype(int) - (227, 177, 127)).max() <= 2


def test_depths(tmp_path: Path):
    ramp = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    expected = np.round(ramp / 257).astype(np.uint8)
    for name in ("a.png", "a.tiff"):
        found = saved(Image.fromarray(ramp), tmp_path / name).pixels
        assert np.array_equal(found, np.repeat(expected[..., None], 3, axis=2))
    clear = saved(Image.fromarray(ramp), tmp_path / "clear.png", transparency=int(ramp[3, 3]))
    assert (clear.pixels[3, 3] == 255).all() and (clear.pixels[3, 4] == expected[3, 4]).all()
    assert (saved(Image.new("1", (4, 4), 1), tmp_path / "one.png").pixels == 255).all()
    assert (saved(Image.new("L", (4, 4), 77), tmp_path / "l.jpg", quality=100).pixels == 77).all()
    assert (read(Image.fromarray(np.full((4, 4), 0.5, np.float32))).pixels == 128).all()
    colour = _png(np.array([[[0x1234, 0xABCD, 0xFFFF]]]))
    assert read(_file(tmp_path, colour)).pixels[0, 0].tolist() == [0x12, 0xAB, 0xFF]
    for values in (np.full((4, 4), 70_000, np.int32), np.full((4, 4), np.nan, np.float32)):
        with pytest.raises(RequestError, match="outside"):
            read(Image.fromarray(values))


def _png(pixels: np.ndarray) -> bytes:
    """A PNG of 16 bits a channel, [h, w, 3]."""
    h, w = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return png_of(w, h, 16, 2, zlib.compress(rows))


def png_of(width: int, height: int, bits: int, colour: int, data: bytes) -> bytes:
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    for name, body in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        out += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return out


def _file(folder: Path, data: bytes) -> Path:
    (folder / "file").write_bytes(data)
    return folder / "file"


# --- colour -----------------------------------------------------------------------------------------------------------


def test_profiles_are_converted_to_srgb(tmp_path: Path):
    # with red and green primaries changed over, what is stored as red is green
    swapped = SRGB.replace(b"rXYZ", b"tmp_").replace(b"gXYZ", b"rXYZ").replace(b"tmp_", b"gXYZ")
    for name in ("a.png", "a.jpg", "a.tiff", "a.webp"):
        options = {"a.jpg": {"quality": 100, "subsampling": 0}, "a.webp": {"lossless": True}}.get(name, {})
        picture = saved(Image.new("RGB", (8, 8), (255, 0, 0)), tmp_path / name, icc_profile=swapped, **options)
        assert np.abs(picture.pixels[4, 4].astype(int) - (0, 255, 0)).max() <= 3, name
        assert "colour profile is converted" in picture.notes[0]
    half = Image.new("RGBA", (8, 8), (255, 0, 0, 128))
    assert (
        np.abs(saved(half, tmp_path / "h.png", icc_profile=swapped).pixels[0, 0].astype(int) - (127, 255, 127)).max()
        <= 2
    )


def test_grey_and_ink_profiles(tmp_path: Path):
    white = b"XYZ " + struct.pack(">I3i", 0, 0xF6D6, 0x10000, 0xD32D)
    linear = profile(b"GRAY", {b"wtpt": white, b"kTRC": b"curv" + bytes(8)})
    grey = Image.new("L", (8, 8), 128)
    deep = Image.fromarray(np.full((8, 8), 128 * 257, np.uint16))
    for image, options, expected in (
        (grey, {}, 188),  # 1.055 * 0.502 ** (1 / 2.4) - 0.055
        (grey, {"transparency": 5}, 188),
        (deep, {}, 188),
        (Image.new("LA", (8, 8), (128, 255)), {}, 188),
        (Image.new("LA", (8, 8), (128, 51)), {}, 242),  # a fifth over white
        (Image.new("1", (8, 8), 0), {"transparency": 0}, 255),
    ):
        picture = saved(image, tmp_path / "a.png", icc_profile=linear, **options)
        assert np.abs(picture.pixels.astype(int) - expected).max() <= 1
        assert "colour profile is converted" in picture.notes[0]
    for image, other, words in ((grey, SRGB, "for RGB and not for GRAY"), (deep, SRGB, "for RGB and not for GRAY"),
                                (grey.convert("RGB"), linear, "for GRAY and not for RGB")):  # fmt: skip
        picture = saved(image, tmp_path / "a.png", icc_profile=other)
        assert (picture.pixels == 128).all() and f"{words}, so it is taken as sRGB" in picture.notes[0]
    # an ink table that sees black ink only: a plain reading would show cyan
    straight = bytes(range(256))
    lab = b"".join(bytes([0 if i & 1 else 255, 128, 128]) for i in range(16))
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    ink = profile(b"CMYK", {b"wtpt": white, b"A2B0": table + straight * 4 + lab + straight * 3}, b"Lab ")
    for amounts, expected in (((255, 0, 0, 0), 255), ((0, 0, 0, 255), 0)):
        picture = saved(Image.new("CMYK", (8, 8), amounts), tmp_path / "a.tiff", icc_profile=ink)
        assert np.abs(picture.pixels.astype(int) - expected).max() <= 2, picture.notes
        assert "colour profile is converted" in picture.notes[0]


def test_cmyk_without_a_profile(tmp_path: Path):
    for name in ("a.tiff", "a.jpg"):
        picture = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / name)
        assert np.abs(picture.pixels.astype(int) - (255, 0, 0)).max() <= 4
        assert "approximate" in picture.notes[0]


def test_srgb_itself_changes_nothing_and_a_broken_profile_is_told(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    same = saved(Image.fromarray(pixels), tmp_path / "a.png", icc_profile=SRGB)
    assert np.array_equal(same.pixels, pixels) and not same.notes
    for broken in (b"no profile", SRGB[:200], profile(b"CMYK", {})):
        picture = saved(Image.fromarray(pixels), tmp_path / "b.png", icc_profile=broken)
        assert np.array_equal(picture.pixels, pixels) and "taken as sRGB" in picture.notes[0]


# --- more than a picture, and too much --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "tiff"])
def test_the_first_of_many_frames_is_used(tmp_path: Path, kind: str):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "webp" else {}
    picture = saved(frames[0], tmp_path / f"a.{kind}", save_all=True, append_images=frames[1:], **options)
    assert (picture.pixels == (255, 0, 0)).all() and "3 frames, the first" in picture.notes[0]


def bombs() -> dict[str, bytes]:
    """Files of some hundred bytes that claim 30,000 x 30,000 pixels."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    jpeg = bytearray(stream.getvalue())
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 30_000, 30_000)
    gif = b"GIF89a" + struct.pack("<HH", 30_000, 30_000) + b"\x80\0\0" + bytes(6)
    gif += b"," + struct.pack("<4H", 0, 0, 30_000, 30_000) + b"\0\x02\x02D\x01\0;"
    bmp = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 200, 0, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return {
        "png": png_of(30_000, 30_000, 8, 2, zlib.compress(bytes(1000))),
        "jpeg": bytes(jpeg),
        "gif": gif,
        "bmp": bmp,
    }


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp"])
def test_giants_are_refused_by_their_header(tmp_path: Path, kind: str):
    with pytest.raises(RequestError, match="scale it down"):
        read(_file(tmp_path, bombs()[kind]))


def test_a_large_photograph_is_no_bomb(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    # above Pillow's own warning and above our limit, which a photograph meets at half its size
    Image.new("L", (9_600, 9_360), 90).save(tmp_path / "a.jpg")
    picture = read(tmp_path / "a.jpg")
    assert picture.pixels.shape == (4680, 4800, 3) and (picture.pixels == 90).all()
    assert "is a picture of 9600x9360" in picture.notes[0] and "half its size" in picture.notes[0]
    assert not recwarn.list


@pytest.mark.parametrize(
    ("options", "most"), [({"progressive": True}, "67,108,864"), ({"format": "WEBP"}, "33,554,432")]
)
def test_what_has_no_half_is_refused_by_its_limit(
    tmp_path: Path, options: dict[str, Any], most: str, monkeypatch: pytest.MonkeyPatch
):
    Image.new("L", (64, 48), 90).save(tmp_path / "a.jpg", **options)
    monkeypatch.setattr(Image.Image, "size", property(lambda image: (9_600, 9_360)))
    with pytest.raises(RequestError, match=f"9600x9360; at most {most} pixels, so scale it down"):
        read(tmp_path / "a.jpg")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "I;16", "CMYK"])
def test_bands_change_nothing(tmp_path: Path, mode: str, orientation: int, monkeypatch: pytest.MonkeyPatch):
    values = np.random.default_rng(1).integers(0, 256, (37, 29, 4), np.uint8)
    image = Image.fromarray(values).convert("RGB" if mode in ("P", "CMYK") else "RGBA")
    image = Image.fromarray(values[..., 0].astype(np.uint16) * 200) if mode == "I;16" else image.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path := tmp_path / ("a.tiff" if mode == "CMYK" else "a.png"), exif=exif)
    whole = read(path)
    monkeypatch.setattr("twinreel.media.pictures.PIXELS_AT_ONCE", 29 * 5)
    assert (read(path).pixels == whole.pixels).all() and read(path).notes == whole.notes


def _solid_png(width: int, height: int) -> bytes:
    return png_of(width, height, 1, 0, zlib.compress((b"\0" + b"\xff" * (width // 8)) * height))


def test_what_pillow_cannot_read_is_refused_by_name(tmp_path: Path):
    with pytest.raises(RequestError, match="HEIF picture, which this Pillow does not read; save it as PNG"):
        read(_file(tmp_path, b"\0\0\0\x18ftypheic" + bytes(100)))
    closed = Image.open(_file(tmp_path, _solid_png(8, 8)))
    closed.close()
    with pytest.raises(RequestError, match="cannot be read"):
        read(closed)
