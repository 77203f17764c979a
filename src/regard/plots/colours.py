"""Colour scales for weights and differences, and colours of heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy

from regard.errors import ConfigurationError, require
from regard.plots.labels import font_families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap, Normalize

Scale = Literal["linear", "log", "sqrt"]

WEIGHTS = "viridis"
"""For weights: perceptually uniform, also in greyscale and for colour-blind readers."""

DIFFERENCES = "RdBu_r"
"""For signed values: white is 0, red is positive, blue negative; safe for colour-blind readers."""

HEADS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Safe for colour-blind readers, on white: Okabe and Ito 2008 (Color Universal Design), without the yellow."""

_DEEPEST = 1e-6  # of the greatest weight: the lower end of a logarithmic scale


@dataclass(frozen=True)
class ColourScale:
    """The range `low` to `high`, the scale and the colour map; `unit` labels the colour bar."""

    low: float
    high: float
    scale: Scale = "linear"
    unit: str = "weight"
    colours: str = WEIGHTS

    @classmethod
    def for_weights(cls, values: numpy.ma.MaskedArray, scale: Scale, maximum: float | None, unit: str) -> ColourScale:
        """From 0, or the least value if that is negative, to `maximum` or else the greatest value.

        A logarithmic scale starts at the least positive value, limited to 1e-6 to 0.1 of its end.

        Raises:
            ConfigurationError: an unknown scale, negative values on another than the linear scale, or a maximum
                below the least value.

        >>> ColourScale.for_weights(numpy.ma.array([0.0, 0.001, 0.25]), "log", None, "weight").low
        0.001
        """
        if scale not in get_args(Scale):
            raise ConfigurationError(f"scale is {scale!r}; it needs to be 'linear', 'log' or 'sqrt'")
        low = min(0.0, float(values.min())) if values.count() else 0.0
        if low < 0 and scale != "linear":
            raise ConfigurationError(
                f"weights go down to {low:.6g}, and a scale {scale!r} has no place below 0: use scale='linear'"
            )
        high = colour_maximum(values) if maximum is None else maximum
        if not math.isfinite(high) or high <= low:
            raise ConfigurationError(f"maximum is {maximum}; it needs to be a finite number above {low:.6g}")
        if scale == "log":
            positive = values.compressed()[values.compressed() > 0]
            low = min(max(float(positive.min(initial=high)), high * _DEEPEST), high / 10)
        return cls(low, high, scale, unit)

    @classmethod
    def for_differences(cls, values: numpy.ma.MaskedArray, maximum: float | None, unit: str) -> ColourScale:
        """Symmetric around 0."""
        high = colour_maximum(abs(values)) if maximum is None else maximum
        if not math.isfinite(high) or high <= 0:
            raise ConfigurationError(f"maximum is {maximum}; it needs to be a finite number above 0")
        return cls(-high, high, "linear", unit, DIFFERENCES)

    def notes(self, values: numpy.ma.MaskedArray) -> list[str]:
        """Notes on values outside the range, which get the colour of its end.

        >>> ColourScale(0.0, 0.5).notes(numpy.ma.array([0.25, 0.75]))
        ['0.75 is the greatest, drawn as 0.5']
        """
        low, high = (float(values.min()), float(values.max())) if values.count() else (self.low, self.high)
        notes = []
        if low < self.low:
            notes.append(f"{format_number(low, 3)} is the least, drawn as {format_number(self.low, 3)}")
        if high > self.high:
            notes.append(f"{format_number(high, 3)} is the greatest, drawn as {format_number(self.high, 3)}")
        return notes

    @property
    def map(self) -> Colormap:
        """The colour map, grey for NaN and infinity."""
        return require("matplotlib", extra="plots").colormaps[self.colours].with_extremes(bad="0.8")

    @property
    def norm(self) -> Normalize:
        """The normalisation of values to 0..1, clipped to the range."""
        colors = require("matplotlib.colors", extra="plots")
        if self.scale == "log":
            return colors.LogNorm(self.low, self.high, clip=True)
        if self.scale == "sqrt":
            return colors.PowerNorm(0.5, self.low, self.high, clip=True)
        return colors.Normalize(self.low, self.high)


def colour_maximum(values: numpy.ndarray) -> float:
    """The greatest value, or 1 where none is positive, so that 0 does not get the darkest colour.

    >>> colour_maximum(numpy.ma.zeros(3))
    1.0
    """
    known = numpy.ma.compressed(values)
    high = float(known.max()) if known.size else 0.0
    return high if high > 0 else 1.0


def format_number(number: float, digits: int = 6) -> str:
    """A number as plain text with that many significant digits.

    >>> format_number(-0.25), format_number(1e-6)
    ('−0.25', '1e−06')
    """
    return f"{number:.{digits}g}".replace("-", "−")


def add_colour_bar(
    axes: Axes, image: ScalarMappable, colouring: ColourScale, bounds: tuple[float, float, float, float]
) -> None:
    """Add a vector colour bar at `bounds` (left, bottom, width, height), in fractions of the axes."""
    figure: Any = axes.figure
    bar = figure.colorbar(image, cax=axes.inset_axes(bounds))
    # Without edges, vector viewers show thin white lines between neighbouring colours.
    bar.solids.set(rasterized=False, edgecolor="face")
    bar.outline.set_visible(False)
    ticker = require("matplotlib.ticker", extra="plots")
    # Plain text instead of formulas stays text in every file format.
    bar.ax.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_number(value)))
    bar.ax.yaxis.set_minor_formatter(ticker.NullFormatter())
    bar.ax.tick_params(labelsize=8, length=2)
    unit = colouring.unit if colouring.scale == "linear" else f"{colouring.unit} ({colouring.scale} scale)"
    family = font_families(unit)
    bar.set_label(unit, fontsize=8, color="0.35", fontfamily=family, parse_math=False, usetex=False)
