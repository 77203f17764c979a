"""A drawing in SVG that takes its colours from the page: boxes, matrices, arrows and texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

Point = tuple[float, float]
LINE = 15.0
"""From one line of a box to the next."""
BELOW = re.compile(r"_\{([^}]*)\}|_([A-Za-z0-9])")
"""What stands below the line: s_t, h_{t−1}."""
EM = 17.0
"""Units of a drawing in one em of the page: two panels of 350 are side by side in its column."""


class Canvas:
    """A drawing of `width` × `height`; kinds of boxes and cells are classes of site.css: query, key, value, weight."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, lines: str | Sequence[str], kind: str = "") -> None:
        """A box with lines of text, the first of them in the letters of the others, centred."""
        self._rectangle(x, y, width, height, kind, radius=5)
        texts = [lines] if isinstance(lines, str) else list(lines)
        top = y + height / 2 - LINE * (len(texts) - 1) / 2
        for number, line in enumerate(texts):
            self.text(x + width / 2, top + LINE * number, line)

    def matrix(self, x: float, y: float, cells: Sequence[Sequence[str]], size: Point, kind: str) -> None:
        """A cell for each text; of weights the share of 1 is the strength of the colour."""
        wide, high = size
        for row, texts in enumerate(cells):
            for column, text in enumerate(texts):
                strength = f' fill-opacity="{0.1 + 0.8 * float(text):.2f}"' if kind == "weight" else ""
                self._rectangle(x + column * wide, y + row * high, wide, high, kind, more=strength)
                self.text(x + (column + 0.5) * wide, y + (row + 0.5) * high, text, "small")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """A line of text around a point, or beginning ("start") or ending ("end") there."""
        look = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}>{_with_subscripts(text)}</text>')

    def arrow(self, *points: Point, label: str = "") -> None:
        """A line through points with a head at the last, and a label beside its middle."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="M{path}" marker-end="url(#arrow-head)"/>')
        if label:
            (x0, y0), (x1, y1) = points[len(points) // 2 - 1], points[len(points) // 2]
            self.text((x0 + x1) / 2 + 5, (y0 + y1) / 2, label, "small", anchor="start")

    def line(self, start: Point, end: Point) -> None:
        """A line without a head."""
        self._parts.append(
            f'<path class="arrow" d="M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}"/>',
        )

    def mark(self, x: float, y: float, shape: str, kind: str) -> None:
        """A mark around a point: a circle, a square or a diamond."""
        if shape == "circle":
            self._parts.append(f'<circle class="mark {kind}" cx="{x:g}" cy="{y:g}" r="4"/>')
            return
        turn = f' transform="rotate(45 {x:g} {y:g})"' if shape == "diamond" else ""
        self._parts.append(f'<rect class="mark {kind}" x="{x - 3.5:g}" y="{y - 3.5:g}" width="7" height="7"{turn}/>')

    def svg(self) -> str:
        """The drawing as an element of a page."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" style="width: {self.width / EM:.2f}em">'
            f"<title>{escape(BELOW.sub(lambda match: match[1] or match[2], self.title))}</title>"
            '<defs><marker id="arrow-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 Z"/></marker></defs>'
            f"{''.join(self._parts)}</svg>"
        )

    def _rectangle(
        self, x: float, y: float, width: float, height: float, kind: str, *, radius: float = 0, more: str = ""
    ) -> None:
        self._parts.append(
            f'<rect class="{kind or "plain"}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"{more}/>'
        )


def _with_subscripts(text: str) -> str:
    """Letters below the line, and what follows on it again: by a space without width, as a shift needs a letter."""

    def lowered(match: re.Match[str]) -> str:
        return f'<tspan dy="3" class="sub">{match[1] or match[2]}</tspan><tspan dy="-3">&#8203;</tspan>'

    return BELOW.sub(lowered, escape(text))
