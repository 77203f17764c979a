"""Figures of the pages: in a size that follows from their own, and beside each one for the dark theme.

Without a size, pixels by the dots per inch that the file has, a browser draws a figure of 300 dots per inch three times
as large as a page in print. In the dark theme, figures drawn for white paper are white boxes: the other file has the
colour of the page in place of white, light letters in place of black ones, and all colours as they are.

Korean pages show NAME.ko.png in place of NAME.png where there is one; the plugin of languages writes it to the Korean
half of the site, under the other's name. Of NAME.svg the labels of picture_labels.json are put in Korean here.
"""

import json
import posixpath
import re
import struct
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

FOLDER = Path(__file__).parent.parent / "pictures"
LABELS = json.loads((Path(__file__).parent / "picture_labels.json").read_text("utf-8"))
IMAGE = re.compile(r'<img (?=[^>]*src="([./]*pictures/([^"]+\.(?:png|svg)))")(?![^>]*width=)([^>]*)>')
LABEL = re.compile(r"(<text[^>]*>)([^<]+)(?=</text>)")
CSS_PIXELS_PER_INCH = 96
ENLARGED = 1.4
"""Letters of figures, 7 to 9 points in print, are then about as large as those of tables."""
PAGE, INK = numpy.array([30, 33, 41]) / 255, numpy.array([226, 229, 236]) / 255
"""The background and the text of the dark theme."""
GREY, COLOURED = 0.06, 0.25
"""Between these differences of a pixel's largest and smallest channel, grey goes over into a colour."""
PHOTOGRAPHS = {"example-vision.png"}
"""Figures with pictures in rows and columns, whose black and white are what was seen, and not paper and ink."""
ROOT_WITH_FILL = re.compile(r"<svg [^>]*\bfill=")
HEX = re.compile(r"#([0-9a-fA-F]{6})\b")
_wanted: dict[str, Path] = {}
"""Figures to be written to the site, NAME.dark.EXT, NAME.ko.svg and NAME.ko.dark.svg, and the file of each."""


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Give each figure of a page, already in HTML, its width and height, and the one that the dark theme shows."""
    return IMAGE.sub(lambda match: _both(match, page), content)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the figures of the dark theme, and those with Korean labels, beside the others."""
    for place, source in sorted(_wanted.items()):
        target = Path(config["site_dir"]) / place
        if not target.exists():  # else the build of the other language has written it
            target.parent.mkdir(parents=True, exist_ok=True)
            write(source, target)


def write(source: Path, target: Path) -> None:
    """Write a figure with Korean labels, NAME.ko.svg, in the colours of the dark theme, NAME.dark.EXT, or both."""
    kinds = target.name.split(".")[1:-1]
    if source.suffix != ".svg":
        write_dark_pixels(source, target)
        return
    text = source.read_text("utf-8")
    if "ko" in kinds:
        labels = LABELS[source.name]
        text = LABEL.sub(lambda match: match[1] + labels.get(match[2], match[2]), text)
    if "dark" in kinds:
        text = HEX.sub(lambda match: _hex(match[1]), text)
        if not ROOT_WITH_FILL.search(text):  # black, else: an attribute must not be there twice
            text = text.replace("<svg ", f'<svg fill="{_hex("000000")}" ', 1)
    target.write_text(text, "utf-8")


def dark_name(name: str) -> str:
    """The file of the dark theme.

    >>> dark_name("mechanisms/luong-dot.png")
    'mechanisms/luong-dot.dark.png'
    """
    return re.sub(r"(\.\w+)$", r".dark\1", name)


def write_dark_pixels(source: Path, target: Path) -> None:
    """Write a figure with the colours of the dark theme."""
    pixels = numpy.asarray(Image.open(source).convert("RGB")).astype(numpy.uint32)
    kept = photographs(source) if source.name.replace(".ko.", ".") in PHOTOGRAPHS else numpy.zeros((1, 1), bool)
    numbers = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    table = numpy.zeros((2**24, 3), numpy.uint8)  # of all colours, but computed for those that are there
    table[numbers, 0] = 1
    used = numpy.flatnonzero(table[:, 0])
    colours = numpy.stack([used >> 16, used >> 8 & 255, used & 255], -1) / 255
    table[used] = numpy.rint(255 * in_the_dark(colours))
    Image.fromarray(numpy.where(kept[..., None], pixels.astype(numpy.uint8), table[numbers])).save(target)


def photographs(source: Path) -> numpy.ndarray:
    """Which pixels are in the pictures of a figure, (height, width): rows and columns that are not mostly white."""
    inked = numpy.asarray(Image.open(source).convert("L")) < 250
    rows = inked.mean(1) > 0.5
    return rows[:, None] & (inked[rows].mean(0) > 0.5)


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


def _both(match: re.Match[str], page: Any) -> str:
    address, name, attributes = match.groups()
    source, own = FOLDER / name, address
    if page.file.src_uri.endswith(".ko.md"):
        korean = FOLDER / re.sub(r"(\.\w+)$", r".ko\1", name)
        if korean.exists():  # to which the address leads already
            source = korean
        elif name in LABELS:
            own = re.sub(r"(\.\w+)$", r".ko\1", address)
            _want(page, own, source)
    attributes = f"{_size(source)}{attributes.replace(address, own)}"
    _want(page, dark_name(own), source)
    dark = attributes.replace(own, dark_name(own))
    return f'<img class="in-light" loading="lazy" {attributes}><img class="in-dark" loading="lazy" {dark}>'


def _want(page: Any, address: str, source: Path) -> None:
    """Note a figure that a page shows under an address, and the file that it is made of."""
    _wanted[posixpath.normpath(posixpath.join(posixpath.dirname(page.url), address))] = source


def _size(source: Path) -> str:
    """Width and height of a figure in pixels of the page; nothing for one that has its own."""
    if source.suffix == ".svg":
        return ""
    data = source.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    resolution = data.find(b"pHYs", 0, 4096)
    if resolution < 0:
        return ""
    per_metre = struct.unpack(">I", data[resolution + 4 : resolution + 8])[0]
    scale = ENLARGED * CSS_PIXELS_PER_INCH / (per_metre * 0.0254)
    return f'width="{round(width * scale)}" height="{round(height * scale)}" '
