"""Figures of the pages in a size that follows from their own: pixels by the dots per inch that the file has.

Without it a browser draws a figure of 300 dots per inch three times as large as a page in print.
"""

import re
import struct
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "pictures"
IMAGE = re.compile(r'<img (?=[^>]*src="[./]*pictures/([^"]+\.png)")(?![^>]*width=)')
CSS_PIXELS_PER_INCH = 96
ENLARGED = 1.4
"""Letters of figures, 7 to 9 points in print, are then about as large as those of tables."""


def on_page_content(content: str, **_: Any) -> str:
    """Give each figure of a page, already in HTML, its width and height."""
    return IMAGE.sub(_with_size, content)


def _with_size(match: re.Match[str]) -> str:
    data = (FOLDER / match.group(1)).read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    resolution = data.find(b"pHYs", 0, 4096)
    if resolution < 0:
        return match.group()
    per_metre = struct.unpack(">I", data[resolution + 4 : resolution + 8])[0]
    scale = ENLARGED * CSS_PIXELS_PER_INCH / (per_metre * 0.0254)
    return f'<img width="{round(width * scale)}" height="{round(height * scale)}" '
