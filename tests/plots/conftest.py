import re
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.text import Text

from regard.plots import save

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def vector(tmp_path):
    """A function that saves a figure as SVG, and returns its texts and its number of images."""

    def written(figure):
        save(figure, tmp_path / "figure.svg", dpi=72)
        tree = ElementTree.parse(tmp_path / "figure.svg")
        texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
        return texts, len([*tree.iter(f"{SVG}image")])

    return written


@pytest.fixture
def inside(monkeypatch):
    """A function that checks that every text is on the page and legible, and returns the texts."""
    drawn = []
    draw = Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, renderer: drawn.append(text) or draw(text, renderer))

    def texts(figure):
        drawn.clear()
        figure.draw_without_rendering()
        shown = [text for text in drawn if text.get_visible() and text.get_text().strip()]
        for text in shown:
            box = text.get_window_extent()
            assert box.x0 >= figure.bbox.x0 - 1, text
            assert box.x1 <= figure.bbox.x1 + 1, text
            assert box.y0 >= figure.bbox.y0 - 1, text
            assert box.y1 <= figure.bbox.y1 + 1, text
            assert text.get_fontsize() >= 7
        return [text.get_text() for text in shown]

    return texts


@pytest.fixture
def notes():
    """The notes below a map, as one line."""
    return lambda figure: re.sub(r"\s+", " ", figure.axes[0].get_xlabel())
