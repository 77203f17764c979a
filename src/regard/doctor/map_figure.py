"""Maps of findings as figures of a page, and as an atlas for the explorer."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .code_excerpt import escaped
from .finding_map import FindingMap

if TYPE_CHECKING:
    from ..explorer import Atlas

HATCH = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><pattern id="hatch" width="6" height="6" '
    'patternUnits="userSpaceOnUse"><rect class="hatch" width="6" height="6"/>'
    '<path class="hatch-line" d="M-1 1L1 -1M0 6L6 0M5 7L7 5"/></pattern></svg>'
)
"""The hatching of pairs without a value, which figures refer to; it stands once in a page."""
SIDE, LEFT, TOP = 280, 52, 8
"""Size of the plot, and its place in the figure."""
WIDTH = LEFT + SIDE + 8
DECADES = 12
"""Influences of so many powers of ten are told apart."""
BARS = 140
"""Height of the plot of differences."""

Matrix = NDArray[np.float64]
Ticks = Sequence[tuple[float, str]]


def figure(map_: FindingMap, state: str | None) -> str:
    """A `<figure>` of a map, with a button that opens the explorer where there is a state for it."""
    label = escaped(map_.title)
    drawing = _bars(map_) if map_.kind == "difference" else _heat_map(map_)
    button = ""
    if state is not None:
        button = (
            f'<button type="button" class="open-map" hidden data-state="{escaped(state)}" data-title="{label}">'
            "Open in the explorer</button>"
        )
    return f"<figure><figcaption>{label}</figcaption>{drawing}{button}</figure>"


def _shaded(map_: FindingMap) -> tuple[Matrix, float, float]:
    """The values of the head as numbers from 0 to 1, NaN for none; and the values that 0 and 1 stand for."""
    values = map_.values[map_.head].double().numpy()
    finite = values[np.isfinite(values)]
    top = float(finite.max(initial=0.0))
    if map_.kind == "attention":
        return np.sqrt(values / top) if top > 0 else np.where(np.isnan(values), np.nan, 0.0), 0.0, top
    top = top or 1.0
    over = finite[finite > max(map_.tolerance, top * 10.0**-DECADES)]
    low = float(over.min(initial=top))
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.log(values / low) / np.log(top / low) if top > low else np.ones_like(values)
    return np.where(values >= low, np.clip(part, 0, 1), np.nan), low, top


def _heat_map(map_: FindingMap) -> str:
    part, low, top = _shaded(map_)
    rows, columns = part.shape
    is_influence, bottom = map_.kind == "influence", TOP + SIDE
    of_rows, of_columns = ("output", "token that changes") if is_influence else ("query", "key")
    place = "" if map_.at is None else f" at {of_rows} {map_.at[0]}, {of_columns.split()[0]} {map_.at[1]}"
    described = f"{map_.title}: {rows} rows by {columns} columns, from {low:.2g} to {top:.2g}{place}"
    down = [(TOP + (row + 0.5) * SIDE / rows + 4, f"{row * map_.cell[0]}") for row in _numbers(rows)]
    across = [(LEFT + (at + 0.5) * SIDE / columns, f"{at * map_.cell[1]}") for at in _numbers(columns)]
    return _plot(
        described,
        SIDE,
        _hatched(LEFT, TOP, SIDE, SIDE) + _image(part, LEFT, TOP, SIDE, SIDE),
        _axes(SIDE, (of_rows, down), (of_columns, across)),
        "" if map_.place is None else _spot(map_.place, rows, columns),
        _image(np.linspace(0, 1, 62)[None], LEFT, bottom + 48, 150, 10),
        _text(LEFT, bottom + 72, f"{low:.1g}", "start"),
        _text(LEFT + 150, bottom + 72, f"{top:.2g}", "end"),
        _text(LEFT + 75, bottom + 72, "logarithmic" if is_influence else "square root"),
        _hatched(LEFT + 172, bottom + 48, 14, 10),
        _text(LEFT + 192, bottom + 57, "no influence" if is_influence else "masked", "start"),
        below=84,
    )


def _bars(map_: FindingMap) -> str:
    """Differences by output as bars on a logarithmic scale, with a line for what rounding explains."""
    values, limit = map_.values[0, 0].double().numpy(), map_.tolerance
    top = float(values[np.isfinite(values)].max(initial=0.0)) or 1.0
    low = max(min(limit / 10 if limit else top, top / 10), top * 10.0 ** (-DECADES - 6))
    heights = BARS * np.log(np.clip(np.append(np.nan_to_num(values, nan=np.inf), limit), low, top) / low)
    heights, step, bottom = heights / np.log(top / low), SIDE / len(values), TOP + BARS
    bars = "".join(
        f'<rect class="bar{" over" if not values[at] <= limit else ""}" x="{LEFT + at * step:.2f}" '
        f'y="{bottom - tall:.1f}" width="{max(step * 0.8, 0.5):.2f}" height="{tall:.1f}"/>'
        for at, tall in enumerate(heights[:-1])
        if tall > 0
    )
    level = f"{bottom - heights[-1]:.1f}"
    line = f'<line class="limit" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{level}" y2="{level}"/>' if limit else ""
    over = f"{int(np.sum(~(values <= limit)))} of {len(values)} outputs differ by more than {limit:.1g}"
    down = [(TOP + 8, f"{top:.1g}"), (bottom, f"{low:.0e}")]
    across = [(LEFT + (at + 0.5) * step, f"{at}") for at in _numbers(len(values))]
    named = "output; above the line: more than rounding"
    axes = _axes(BARS, ("difference", down), (named, across))
    return _plot(f"{map_.title}: {over}, the largest by {top:.2g}", BARS, bars, line, axes, below=40)


def _plot(described: str, height: int, *parts: str, below: int) -> str:
    """A drawing of this height, and so much below it."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {TOP + height + below}" role="img" aria-label="{escaped(described)}">'
        f"{''.join(parts)}</svg>"
    )


def _axes(height: int, rows: tuple[str, Ticks], columns: tuple[str, Ticks]) -> str:
    """The frame, and for each axis its name and its ticks, where they are and what they say."""
    down = "".join(_text(LEFT - 6, y, words, "end") for y, words in rows[1])
    across = "".join(_text(x, TOP + height + 15, words) for x, words in columns[1])
    return (
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{SIDE}" height="{height}"/>{down}{across}'
        f"{_text(LEFT + SIDE / 2, TOP + height + 32, columns[0])}"
        f'<text transform="translate(12 {TOP + height / 2:.0f}) rotate(-90)" text-anchor="middle">{rows[0]}</text>'
    )


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _hatched(left: int, top: int, width: int, height: int) -> str:
    return f'<rect fill="url(#hatch)" x="{left}" y="{top}" width="{width}" height="{height}"/>'


def _image(part: Matrix, left: int, top: int, width: int, height: int) -> str:
    from ..explorer.preview import matrix_png

    data = b64encode(matrix_png(part)).decode()
    return (
        f'<image href="data:image/png;base64,{data}" x="{left}" y="{top}" width="{width}" height="{height}" '
        'preserveAspectRatio="none"/>'
    )


def _spot(place: tuple[int, int], rows: int, columns: int) -> str:
    """A frame around one cell, of at least eight units, twice: a wide one of paper below."""
    width, height = max(SIDE / columns, 8.0), max(SIDE / rows, 8.0)
    x = LEFT + (place[1] + 0.5) * SIDE / columns - width / 2
    y = TOP + (place[0] + 0.5) * SIDE / rows - height / 2
    return 2 * f'<rect class="spot" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _numbers(count: int) -> list[int]:
    return sorted({0, (count - 1) // 2, count - 1})


def atlas_of_maps(maps: Sequence[FindingMap], title: str) -> tuple[Atlas | None, list[str | None]]:
    """The maps as an atlas, and for each the permalink of its place in it; none for differences.

    Each row of influences is divided by its sum: a weight is the share of an output's movement that a token has.
    """
    from ..explorer import Atlas, ViewState

    weights: dict[str, Any] = {}
    states: list[str | None] = []
    for map_ in maps:
        if map_.kind == "difference":
            states.append(None)
            continue
        values = map_.values.double().nan_to_num(nan=0.0, posinf=float(map_.values.isfinite().any()))
        if map_.kind == "influence":
            values = values.masked_fill(values <= map_.tolerance, 0.0)
            values = values / values.sum(-1, keepdim=True).clamp(min=1e-300)
        states.append(ViewState(view="head", map=len(weights), head=map_.head, at=map_.place).permalink())
        weights[f"{len(weights) + 1}. {map_.title}"] = values.float()
    if not weights:
        return None, states
    return Atlas.from_weights(weights, title=title), states
