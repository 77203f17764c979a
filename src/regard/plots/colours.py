"""Which colours stand for which numbers: one map for weights, one for differences, and colours for heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy

from regard.errors import ConfigurationError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap, Normalize

Scale = Literal["linear", "log", "sqrt"]

WEIGHTS = "viridis"
"""For weights: it rises evenly in lightness, for every kind of colour vision and in grey."""

DIFFERENCES = "RdBu_r"
"""For what has a sign: white is 0, red is more, blue is less; told apart by every kind of colour vision."""

HEADS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by every kind of colour vision on white: Okabe and Ito 2008 (Color Universal Design), less the yellow."""

_DEEPEST = 1e-6  # of the greatest weight: what a logarithmic scale goes down to


@dataclass(frozen=True)
class Colouring:
    """The colours from `low` to `high` on a scale; `unit` says what they measure."""

    low: float
    high: float
    scale: Scale = "linear"
    unit: str = "weight"
    colours: str = WEIGHTS

    @classmethod
    def of_weights(cls, values: numpy.ma.MaskedArray, scale: Scale, maximum: float | None, unit: str) -> Colouring:
        """From 0, or the least value if that is negative, to `maximum` or else the greatest value.

        A logarithmic scale begins at the least positive value, between a millionth and a tenth of its end.

        Raises:
            ConfigurationError: an unknown scale, one that has no place for negative values, or a maximum below the
                least value.

        >>> Colouring.of_weights(numpy.ma.array([0.0, 0.001, 0.25]), "log", None, "weight").low
        0.001
        """
        if scale not in get_args(Scale):
            raise ConfigurationError(f"scale is {scale!r}; it needs to be 'linear', 'log' or 'sqrt'")
        low = min(0.0, float(values.min())) if values.count() else 0.0
        if low < 0 and scale != "linear":
            raise ConfigurationError(
                f"weights go down to {low:.6g}, and a scale {scale!r} has no place below 0: use scale='linear'"
            )
        high = greatest(values) if maximum is None else maximum
        if not math.isfinite(high) or high <= low:
            raise ConfigurationError(f"maximum is {maximum}; it needs to be a finite number above {low:.6g}")
        if scale == "log":
            positive = values.compressed()[values.compressed() > 0]
            low = min(max(float(positive.min(initial=high)), high * _DEEPEST), high / 10)
        return cls(low, high, scale, unit)

    @classmethod
    def of_differences(cls, values: numpy.ma.MaskedArray, maximum: float | None, unit: str) -> Colouring:
        """As far below 0 as above."""
        high = greatest(abs(values)) if maximum is None else maximum
        if not math.isfinite(high) or high <= 0:
            raise ConfigurationError(f"maximum is {maximum}; it needs to be a finite number above 0")
        return cls(-high, high, "linear", unit, DIFFERENCES)

    def notes(self, values: numpy.ma.MaskedArray) -> list[str]:
        """Which numbers share the colour of an end.

        >>> Colouring(0.0, 0.5).notes(numpy.ma.array([0.25, 0.75]))
        ['0.75 is the greatest, drawn as 0.5']
        """
        low, high = (float(values.min()), float(values.max())) if values.count() else (self.low, self.high)
        return [
            *([f"{written(low, 3)} is the least, drawn as {written(self.low, 3)}"] if low < self.low else []),
            *([f"{written(high, 3)} is the greatest, drawn as {written(self.high, 3)}"] if high > self.high else []),
        ]

    @property
    def map(self) -> Colormap:
        """Grey where there is no number."""
        return require("matplotlib", extra="plots").colormaps[self.colours].with_extremes(bad="0.8")

    @property
    def norm(self) -> Normalize:
        """From numbers to 0..1; what lies outside gets the colour of the nearer end."""
        colors = require("matplotlib.colors", extra="plots")
        if self.scale == "log":
            return colors.LogNorm(self.low, self.high, clip=True)
        if self.scale == "sqrt":
            return colors.PowerNorm(0.5, self.low, self.high, clip=True)
        return colors.Normalize(self.low, self.high)


def greatest(values: numpy.ndarray) -> float:
    """The greatest value; 1 where all are 0 or less, so that nothing is not drawn as if it were the most.

    >>> greatest(numpy.ma.zeros(3))
    1.0
    """
    known = numpy.ma.compressed(values)
    high = float(known.max()) if known.size else 0.0
    return high if high > 0 else 1.0


def written(number: float, digits: int = 6) -> str:
    """A number as plain text, with so many digits.

    >>> written(-0.25), written(1e-6)
    ('−0.25', '1e−06')
    """
    return f"{number:.{digits}g}".replace("-", "−")


def add_bar(axes: Axes, image: ScalarMappable, colouring: Colouring, place: tuple[float, float, float, float]) -> None:
    """A colour bar at `place` (left, bottom, width, height) in parts of the axes, made of lines and not of pixels."""
    figure: Any = axes.figure
    bar = figure.colorbar(image, cax=axes.inset_axes(place))
    # Seen as vectors, neighbouring colours would have hairs of white between them without edges of their own.
    bar.solids.set(rasterized=False, edgecolor="face")
    bar.outline.set_visible(False)
    ticker = require("matplotlib.ticker", extra="plots")
    # Plain text in place of formulas: it stays text in every file.
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: written(value)))
    bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    bar.ax.tick_params(labelsize=8, length=2)
    unit = colouring.unit if colouring.scale == "linear" else f"{colouring.unit} ({colouring.scale} scale)"
    bar.set_label(unit, fontsize=8, color="0.35", parse_math=False, usetex=False)
