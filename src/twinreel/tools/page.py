"""The page of `compare`: both videos side by side, the worst frame and its difference, curves, every figure.

One file besides the videos, which it links relative to itself. Pictures and plots are inside it.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from .plots import Frame, draw_lines
from .sounds import envelope, step
from .targets import plain

if TYPE_CHECKING:
    from .pictures import VideoPair

STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:1500px;padding:0 1em;color:#24292f}
.row{display:flex;gap:1em;flex-wrap:wrap}figure{margin:0;flex:1 1 20em}video,img{width:100%;image-rendering:pixelated}
figcaption{color:#57606a}pre{background:#f6f8fa;padding:1em;overflow:auto}svg{max-width:100%;height:auto}"""
# Both start, stop and jump together; sound comes from the one that was used.
SCRIPT = """const v=[...document.querySelectorAll('video')];v.forEach((x,i)=>{const o=v[1-i];
x.onplay=()=>{o.muted=true;x.muted=false;o.currentTime=x.currentTime;if(o.paused)o.play()};
x.onpause=()=>{if(!o.paused)o.pause()};x.onseeked=()=>{if(x.paused&&Math.abs(o.currentTime-x.currentTime)>.02)
o.currentTime=x.currentTime}})"""


def draw_page(
    path: Path,
    a: Path,
    b: Path,
    result: Mapping[str, Any],
    pair: VideoPair,
    sounds: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> str:
    """The text of the page at `path` of `compare_videos`' result."""
    folder = path.absolute().parent
    body = [
        f"<h1>{escape(a.name)} and {escape(b.name)}</h1>",
        '<div class="row">',
        *(_video(file, folder, name) for file, name in ((a, "A"), (b, "B"))),
        "</div>",
        *_worst(pair),
        *_plots(result, pair, sounds),
        f"<h2>Figures</h2><pre>{escape(json.dumps(plain(result), indent=2))}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(a.name)} and {escape(b.name)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}<script>{SCRIPT}</script></body></html>\n"
    )


def _video(file: Path, folder: Path, name: str) -> str:
    link = quote(os.fsencode(os.path.relpath(file.absolute(), folder)))  # a name may be no text
    caption = f"<figcaption>{name}: {escape(file.name)}</figcaption>"
    return f'<figure><video controls loop muted preload="auto" src="{link}"></video>{caption}</figure>'


def _worst(pair: VideoPair) -> list[str]:
    if pair.worst is None or not any(pair.squared):
        return ["<p>No frame differs.</p>"]
    a, b = (frame.astype(np.int32) for frame in pair.worst)
    apart = np.abs(a - b)
    gain = max(1, 255 // max(1, int(apart.max())))
    pictures = ((a, "A"), (b, "B"), (apart * gain, f"difference, times {gain}"))
    figures = [
        f'<figure><img alt="{text}" src="{data_address(pixels.astype(np.uint8))}">'
        f"<figcaption>{text}</figcaption></figure>"
        for pixels, text in pictures
    ]
    return [f"<h2>Worst frame: {pair.worst_index}</h2>", '<div class="row">', *figures, "</div>"]


def _plots(
    result: Mapping[str, Any], pair: VideoPair, sounds: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> list[str]:
    lumas = {"A": pair.a.luma, "B": pair.b.luma}
    plots = [
        draw_lines(Frame("PSNR of each frame", "seconds", "dB"), {"PSNR": pair.curve()}, 1 / pair.fps),
        draw_lines(Frame("PSNR pooled over each second", "seconds", "dB"), {"PSNR": pair.per_second()}),
        draw_lines(Frame("Mean brightness", "seconds", "0 to 255"), lumas, 1 / pair.fps),
    ]
    if "audio" in result:
        rate = result["audio"]["rate"]
        envelopes = {n: envelope(x.astype(np.float64), rate).tolist() for n, x in zip("AB", sounds, strict=True)}
        length = min(x.shape[1] for x in sounds)
        error = sounds[1][:, :length].astype(np.float64) - sounds[0][:, :length]
        envelopes["B - A"] = envelope(error, rate).tolist()
        plots.append(draw_lines(Frame("Sound, RMS over 5 ms", "seconds", "RMS"), envelopes, step(rate) / rate))
    return ["<h2>Curves</h2>", *(f"<p>{plot}</p>" for plot in plots)]


def data_address(pixels: NDArray[np.uint8]) -> str:
    """A uint8 RGB picture `[H, W, 3]` as a PNG `data:` address."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
