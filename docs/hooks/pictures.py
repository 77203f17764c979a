"""Figures of the pages: in a size that follows from their own, and beside each one for the dark theme.

Without a size, pixels by the dots per inch that the file has, a browser draws a figure of 300 dots per inch three times
as large as a page in print. In the dark theme, figures drawn for white paper are white boxes: the other file has the
colour of the page in place of white, light letters in place of black ones, and all colours as they are.
"""

import re
import struct
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

FOLDER = Path(__file__).parent.parent / "pictures"
IMAGE = re.compile(r'<img (?=[^>]*src="[./]*pictures/([^"]+\.(?:png|svg))")(?![^>]*width=)([^>]*)>')
CSS_PIXELS_PER_INCH = 96
ENLARGED = 1.4
"""Letters of figures, 7 to 9 points in print, are then about as large as those of tables."""
PAGE, INK = numpy.array([30, 33, 41]) / 255, numpy.array([226, 229, 236]) / 255
"""The background and the text of the dark theme."""
GREY, COLOURED = 0.06, 0.25
"""Between these differences of a pixel's largest and smallest channel, grey goes over into a colour."""
PHOTOGRAPHS = {"example-vision.png"}
"""Whose black and white are what was seen, and not paper and ink."""
HEX = re.compile(r"#([0-9a-fA-F]{6})\b")
_named: set[str] = set()


def on_page_content(content: str, **_: Any) -> str:
    """Give each figure of a page, already in HTML, its width and height, and the one that the dark theme shows."""
    return IMAGE.sub(_both, content)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the figures of the dark theme beside the others."""
    for name in sorted(_named):
        target = Path(config["site_dir"]) / "pictures" / dark_name(name)
        if not target.exists():  # else the build of the other language has written it
            target.parent.mkdir(parents=True, exist_ok=True)
            write_dark(FOLDER / name, target)


def dark_name(name: str) -> str:
    """The file of the dark theme.

    >>> dark_name("mechanisms/luong-dot.png")
    'mechanisms/luong-dot.dark.png'
    """
    return re.sub(r"(\.\w+)$", r".dark\1", name)


def write_dark(source: Path, target: Path) -> None:
    """Write a figure with the colours of the dark theme."""
    if source.suffix == ".svg":
        text = HEX.sub(lambda match: _hex(match[1]), source.read_text("utf-8"))
        target.write_text(text.replace("<svg ", f'<svg fill="{_hex("000000")}" ', 1), "utf-8")
        return
    pixels = numpy.asarray(Image.open(source).convert("RGB")).astype(numpy.uint32)
    numbers = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    table = numpy.zeros((2**24, 3), numpy.uint8)  # of all colours, but computed for those that are there
    table[numbers, 0] = 1
    used = numpy.flatnonzero(table[:, 0])
    colours = numpy.stack([used >> 16, used >> 8 & 255, used & 255], -1) / 255
    table[used] = numpy.rint(255 * in_the_dark(colours))
    Image.fromarray(table[numbers]).save(target)


def in_the_dark(colours: numpy.ndarray) -> numpy.ndarray:
    """Colours (..., 3) of 0 to 1: grey ones between page and ink, from white to black; others as they are.

    >>> in_the_dark(numpy.array([[1.0, 1.0, 1.0], [0.99, 0.91, 0.15]])).round(2).tolist()
    [[0.12, 0.13, 0.16], [0.99, 0.91, 0.15]]
    """
    chroma = colours.max(-1, keepdims=True) - colours.min(-1, keepdims=True)
    is_coloured = ((chroma - GREY) / (COLOURED - GREY)).clip(0, 1)
    lightness = colours.mean(-1, keepdims=True)
    return is_coloured * colours + (1 - is_coloured) * (lightness * PAGE + (1 - lightness) * INK)


def _hex(digits: str) -> str:
    colour = numpy.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in in_the_dark(colour))


def _both(match: re.Match[str]) -> str:
    name, attributes = match.group(1), f"{_size(match.group(1))}{match.group(2)}"
    if name in PHOTOGRAPHS:
        return f"<img {attributes}>"
    _named.add(name)
    dark = attributes.replace(name, dark_name(name))
    return f'<img class="in-light" loading="lazy" {attributes}><img class="in-dark" loading="lazy" {dark}>'


def _size(name: str) -> str:
    """Width and height of a figure in pixels of the page; nothing for one that has its own."""
    if name.endswith(".svg"):
        return ""
    data = (FOLDER / name).read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    resolution = data.find(b"pHYs", 0, 4096)
    if resolution < 0:
        return ""
    per_metre = struct.unpack(">I", data[resolution + 4 : resolution + 8])[0]
    scale = ENLARGED * CSS_PIXELS_PER_INCH / (per_metre * 0.0254)
    return f'width="{round(width * scale)}" height="{round(height * scale)}" '
