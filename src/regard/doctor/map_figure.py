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
    of_rows, of_columns = ("output", "token that changes") if map_.kind == "influence" else ("query", "key")
    bottom = TOP + SIDE
    spot = ""
    if map_.place is not None:
        row, column = map_.place
        spot = _spot(row * SIDE / rows, column * SIDE / columns, SIDE / columns, SIDE / rows)
    none = "no influence" if map_.kind == "influence" else "masked"
    scale = "logarithmic" if map_.kind == "influence" else "square root"
    place = "" if map_.at is None else f" at {of_rows} {map_.at[0]}, {of_columns.split()[0]} {map_.at[1]}"
    described = f"{map_.title}: {rows} rows by {columns} columns, from {low:.2g} to {top:.2g}{place}"
    ramp = np.linspace(0, 1, 62)[None]
    return (
        f'<svg viewBox="0 0 {WIDTH} {bottom + 84}" role="img" aria-label="{escaped(described)}">'
        f'<rect fill="url(#hatch)" x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>'
        f"{_image(part, LEFT, TOP, SIDE, SIDE)}"
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>{spot}'
        f"{_ticks(rows, columns, map_.cell)}{_axis_names(of_rows, of_columns, bottom)}"
        f"{_image(ramp, LEFT, bottom + 48, 150, 10)}"
        f'<text x="{LEFT}" y="{bottom + 72}">{low:.1g}</text>'
        f'<text x="{LEFT + 150}" y="{bottom + 72}" text-anchor="end">{top:.2g}</text>'
        f'<text x="{LEFT + 75}" y="{bottom + 72}" text-anchor="middle">{scale}</text>'
        f'<rect fill="url(#hatch)" x="{LEFT + 172}" y="{bottom + 48}" width="14" height="10"/>'
        f'<text x="{LEFT + 192}" y="{bottom + 57}">{none}</text></svg>'
    )


def _image(part: Matrix, left: int, top: int, width: int, height: int) -> str:
    from ..explorer.preview import matrix_png

    data = b64encode(matrix_png(part)).decode()
    return (
        f'<image href="data:image/png;base64,{data}" x="{left}" y="{top}" width="{width}" height="{height}" '
        'preserveAspectRatio="none"/>'
    )


def _spot(top: float, left: float, width: float, height: float) -> str:
    """A frame around one cell, of at least eight units, twice: a wide one of paper below."""
    side_x, side_y = max(width, 8.0), max(height, 8.0)
    x, y = LEFT + left + (width - side_x) / 2, TOP + top + (height - side_y) / 2
    return 2 * f'<rect class="spot" x="{x:.1f}" y="{y:.1f}" width="{side_x:.1f}" height="{side_y:.1f}"/>'


def _numbers(count: int) -> list[int]:
    return sorted({0, (count - 1) // 2, count - 1})


def _ticks(rows: int, columns: int, cell: tuple[int, int]) -> str:
    down = "".join(
        f'<text x="{LEFT - 6}" y="{TOP + (row + 0.5) * SIDE / rows + 4:.1f}" text-anchor="end">{row * cell[0]}</text>'
        for row in _numbers(rows)
    )
    across = "".join(
        f'<text x="{LEFT + (column + 0.5) * SIDE / columns:.1f}" y="{TOP + SIDE + 15}" text-anchor="middle">'
        f"{column * cell[1]}</text>"
        for column in _numbers(columns)
    )
    return down + across


def _axis_names(of_rows: str, of_columns: str, bottom: int, middle: float = TOP + SIDE / 2) -> str:
    return (
        f'<text x="{LEFT + SIDE / 2:.0f}" y="{bottom + 32}" text-anchor="middle">{of_columns}</text>'
        f'<text transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">{of_rows}</text>'
    )


def _bars(map_: FindingMap) -> str:
    """Differences by output as bars on a logarithmic scale, with a line for what rounding explains."""
    values = map_.values[0, 0].double().numpy()
    top = float(values[np.isfinite(values)].max(initial=0.0)) or 1.0
    limit = map_.tolerance
    low = max(min(limit / 10 if limit else top, top / 10), top * 10.0 ** (-DECADES - 6))

    def height(value: float) -> float:
        return float(np.clip(np.log(max(value, low) / low) / np.log(top / low), 0, 1)) * BARS

    step, bottom = SIDE / len(values), TOP + BARS
    bars = "".join(
        f'<rect class="bar{" over" if not value <= limit else ""}" x="{LEFT + at * step:.2f}" '
        f'y="{bottom - tall:.1f}" width="{max(step * 0.8, 0.5):.2f}" height="{tall:.1f}"/>'
        for at, value in enumerate(np.nan_to_num(values, nan=np.inf))
        if (tall := height(min(float(value), top))) > 0
    )
    level = f"{bottom - height(limit):.1f}"
    line = f'<line class="limit" x1="{LEFT}" x2="{LEFT + SIDE}" y1="{level}" y2="{level}"/>'
    ticks = "".join(
        f'<text x="{LEFT + (at + 0.5) * step:.1f}" y="{bottom + 15}" text-anchor="middle">{at}</text>'
        for at in _numbers(len(values))
    )
    over = int(np.sum(~(values <= limit)))
    described = (
        f"{map_.title}: {over} of {len(values)} outputs differ by more than {limit:.1g}, the largest by {top:.2g}"
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {bottom + 40}" role="img" aria-label="{escaped(described)}">'
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{SIDE}" height="{BARS}"/>{bars}{line if limit else ""}{ticks}'
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{top:.1g}</text>'
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">{low:.0e}</text>'
        f"{_axis_names('difference', 'output; above the line: more than rounding', bottom, TOP + BARS / 2)}</svg>"
    )


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
