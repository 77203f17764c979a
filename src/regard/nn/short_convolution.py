"""The short causal convolution of queries, keys and values before linear attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError
from ..utils.numbers import whole_number
from .projections import Projections


class ShortConvolution(nn.Module):
    """y_t = a(Σ_{i=0..width-1} w_i ⊙ x_{t-i} + b): each feature of queries, keys and values over `width` tokens.

    Before the first token there are zeros. A layer of linear attention applies it to what is projected, before heads
    are split, normed and rotated; a masked token counts as zeros, and each document is convolved by itself.

    Shapes: rows (batch, length, features), the query, key and value features beside one another; weight (features,
    width), whose last column is of the token itself, as in `torch.nn.Conv1d`; bias (features).

    Args:
        projections: those of the layer, which say how many features there are, or that number itself.
        width: tokens that are read, the own among them.
        activation: a, any function of a tensor; SiLU by default, None for none.
        bias: whether there is a b.

    Weights start uniform within ±1/√width, as those of `torch.nn.Conv1d`, biases at 0.

    Raises:
        ConfigurationError: a width below 1.

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; Gu and Dao 2023, Mamba (arXiv 2312.00752), section 3.4.

    >>> import torch, regard
    >>> convolution = ShortConvolution(regard.nn.Projections(2, num_heads=1), width=2, activation=None)
    >>> _ = nn.init.ones_(convolution.weight)
    >>> convolution(torch.tensor([1.0, 2.0, 4.0])[None, :, None].expand(1, 3, 6))[0, :, 0].tolist()
    [1.0, 3.0, 6.0]
    """

    def __init__(
        self,
        projections: Projections | int,
        width: int = 4,
        *,
        activation: Callable[[Tensor], Tensor] | None = functional.silu,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.width, self.activation = whole_number("width", width), activation
        if isinstance(projections, int):
            features = whole_number("projections", projections)
        elif isinstance(projections, nn.Module) and hasattr(projections, "value_map"):
            features = _features(projections)
        else:
            raise ConfigurationError(
                f"projections is {projections!r}; it needs nn.Projections(dim, num_heads), or the number of features"
            )
        self.weight = nn.Parameter(torch.empty(features, self.width))
        self.bias = nn.Parameter(torch.zeros(features)) if bias else None
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def forward(self, rows: Tensor, before: Tensor | None = None) -> Tensor:
        """The rows (batch, length, features) convolved; before: the last rows before them, as `tail` returns them."""
        length = rows.shape[1]
        padded = self._with_rows_before(rows, before)
        taps = self.weight.to(rows.dtype).unbind(1)
        total = padded[:, :length] * taps[0]
        for number, tap in enumerate(taps[1:], 1):
            total = torch.addcmul(total, padded[:, number : number + length], tap)
        total = total if self.bias is None else total + self.bias
        return total if self.activation is None else self.activation(total)

    def tail(self, rows: Tensor, before: Tensor | None = None) -> Tensor:
        """The last width - 1 rows up to the end of these, which those after them read: (batch, width - 1, features)."""
        padded = self._with_rows_before(rows, before)
        return padded[:, padded.shape[1] - (self.width - 1) :].clone()

    def _with_rows_before(self, rows: Tensor, before: Tensor | None) -> Tensor:
        if before is None:
            return functional.pad(rows, (0, 0, self.width - 1, 0))
        if before.shape[1:] != (self.width - 1, rows.shape[-1]):
            raise ConfigurationError(
                f"the cache has {tuple(before.shape[1:])} rows and features for a convolution, and this one needs "
                f"{(self.width - 1, rows.shape[-1])}: continue with the cache of this layer"
            )
        return torch.cat([before.to(rows.dtype), rows], 1)

    def extra_repr(self) -> str:
        activation = getattr(self.activation, "__name__", repr(self.activation))
        return f"features={self.weight.shape[0]}, width={self.width}, activation={activation}"


def _features(projections: Projections) -> int:
    """How many features queries, keys and values have together."""
    maps = projections.query, projections.key, projections.value_map()
    return sum(projected.weight.shape[0] for projected in maps)
