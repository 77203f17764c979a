"""A Gaussian bias around a predicted position per query (Luong's local attention)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.grid import Grid
from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from ..utils.numbers import lies_between
from .base import Bias, to_float


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(Bias):
    """-(key position - center)² / (2 sigma²)."""

    center: Tensor
    sigma: Tensor

    @property
    def by_position(self) -> bool:
        return not self.center.ndim and not self.sigma.ndim  # others are those of rows

    def values(self, grid: Grid) -> Tensor:
        distance = grid.key - self._column(self.center, grid)
        return -(distance**2) / (2 * self._column(self.sigma, grid) ** 2)

    def _column(self, per_query: Tensor, grid: Grid) -> Tensor:
        """Slice (..., M), or a scalar, to the tile's rows, (..., M, 1), in float32 at least to represent positions."""
        per_query = at_least_float32(per_query)
        if per_query.ndim == 0:
            return per_query
        return grid.cut(per_query.unsqueeze(-1))

    def __repr__(self) -> str:
        return f"gaussian(center=<{tuple(self.center.shape)}>, sigma=<{tuple(self.sigma.shape)}>)"


def gaussian(center: Tensor | float, sigma: Tensor | float) -> Bias:
    """-(s - center)² / (2 sigma²) for a key at position s: the log of a Gaussian that multiplies each weight.

    Shapes: center and sigma are numbers or (..., M), one per query (with heads: (..., heads, M)); gradients flow into
    both. Units: positions.

    Raises:
        ConfigurationError: a number that is none, or not finite; sigma is not above 0 everywhere.

    Source: Luong et al. 2015 (arXiv 1508.04025), Eq. 10, whose Gaussian multiplies the weights *after* the softmax
    so that they sum to less than 1; as a bias it applies before the softmax, and the weights sum to 1.

    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.gaussian(1.0, 0.5).values(Grid.from_lengths(1, 3))
    tensor([[-2., -0., -2.]])
    """
    for name, number in (("center", center), ("sigma", sigma)):
        if not isinstance(number, Tensor) and not lies_between(-math.inf, number, math.inf):
            raise ConfigurationError(
                f"{name} is {number!r}; gaussian needs a finite number, or a tensor for the queries"
            )
    center, sigma = to_float(center), to_float(sigma)
    if not bool((sigma > 0).all()):
        raise ConfigurationError(f"gaussian needs sigma above 0; its smallest here is {float(sigma.min())}")
    return Gaussian(center, sigma)
