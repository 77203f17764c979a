"""FIRE: a learned function of the distance, relative to how far the query is from the start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from ..core.grid import Grid
from ..core.problem import Problem
from ..core.score_forms import at_least_float32
from ..errors import DtypeError, ShapeError
from .all_pairs import MAX_TABLES, AllPairs
from .base import Bias, describe_tensor, is_floating

SMALLEST_LOG = 1e-6
"""Added to the logarithm that is divided by: 0 where query position and threshold are 0."""
MOST_HIDDEN = 2**22
"""The most numbers of hidden features, over all pairs of a tile, that are in memory at once."""


@dataclass(frozen=True, eq=False, repr=False)
class Fire(Bias, AllPairs):
    """f(ψ(|i - j|) / ψ(max(i, threshold))) with ψ(x) = log(1 + |rate| · x) and f of one hidden layer; see `fire`."""

    hidden_weight: Tensor
    hidden_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    rate: Tensor
    threshold: Tensor

    def values(self, grid: Grid) -> Tensor:
        away = (grid.key - grid.query).abs()  # [m, n] or [*batch, 1, m, n]
        dtype = at_least_float32(self.rate).dtype
        share = self._share(away.to(dtype), grid.query.to(dtype))
        share = share.squeeze(-3) if share.ndim > 2 and grid.heads else share  # [..., m, n]
        values = self._of_shares(share).movedim(0, -3)
        return values if grid.heads or values.shape[-3] != 1 else values.squeeze(-3)

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the fields."""
        hidden = self.hidden_weight, self.hidden_bias
        return *hidden, self.output_weight, self.output_bias, self.rate, self.threshold

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        for code in _codes:
            if code.takes(self, problem.queries, problem.keys):
                return code.of_pairs(self, problem.queries, problem.keys)
        return self._of_shares(self._share(*_places(problem.queries, problem.keys, at_least_float32(self.rate).dtype)))

    def _share(self, away: Tensor, query: Tensor) -> Tensor:
        """The distances as shares of the positions of the queries."""
        rate, threshold = at_least_float32(self.rate).abs(), at_least_float32(self.threshold).abs()
        most = torch.log1p(rate * torch.maximum(query, threshold))
        return torch.log1p(rate * away) / (most + SMALLEST_LOG)

    def _of_shares(self, share: Tensor) -> Tensor:
        """The function f of shares of any shape, (H, *share.shape)."""
        into, offset = (at_least_float32(each).unsqueeze(-1) for each in (self.hidden_weight, self.hidden_bias))
        out = at_least_float32(self.output_weight)
        values = self.output_bias.to(out.dtype).unsqueeze(-1)
        row = share.reshape(1, -1)
        # Some hidden features at a time: all of them for many pairs would take as many times the memory.
        together = max(MOST_HIDDEN // max(share.numel(), 1), 1)
        parts = [(into, offset, out)]
        if together < len(into):
            parts = zip(into.split(together), offset.split(together), out.split(together, 1), strict=True)
        for some_into, some_offset, some_out in parts:
            hidden = torch.addcmul(some_offset, some_into, row).relu_()  # [F, pairs]
            values = torch.addmm(values, some_out, hidden)  # [H, pairs]
        return values.view(-1, *share.shape)

    def __repr__(self) -> str:
        return f"fire({describe_tensor(self.output_weight)})"


def fire(
    hidden_weight: Tensor,
    hidden_bias: Tensor,
    output_weight: Tensor,
    output_bias: Tensor,
    *,
    rate: Tensor,
    threshold: Tensor,
) -> Bias:
    """f(ψ(|i - j|) / ψ(max(i, L))): a learned function of the distance as a share of the query's position i.

    ψ(x) = log(1 + |c| x) with c the `rate` and L the `threshold`, both learned, and f(x) = W₂ relu(W₁ x + b₁) + b₂ with
    one output for each head. Positions below L share the denominator ψ(L), so that there it is a function of the
    distance; beyond, the farthest key is always at 1, in training and at longer lengths.

    Shapes: hidden_weight and hidden_bias (features,), output_weight (heads, features), output_bias (heads,), rate and
    threshold (); gradients flow into all. Positions are from 0 on. It is computed tile by tile: time grows with the
    pairs times features times heads.

    Raises:
        DtypeError, ShapeError: tensors that are not as above.

    Source: Li et al. 2024 (arXiv 2310.04418), Eq. 4 to 7. The published code has 32 features, c = 0.1 and L = 512 to
    start with.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> one = torch.ones(1)
    >>> bias = biases.fire(one, 0 * one, one[None], 0 * one, rate=torch.tensor(1.0), threshold=torch.tensor(1.0))
    >>> bias.values(Grid.from_lengths(4, 4))[0, 3]
    tensor([1.0000, 0.7925, 0.5000, 0.0000])
    """
    given = hidden_weight, hidden_bias, output_weight, output_bias, rate, threshold
    if not _fits(given):
        _refuse(Fire(*given))
    return Fire(*given)


def _fits(given: tuple[Tensor, ...]) -> bool:
    """Whether tensors, in the order of `Fire`, are as it needs them, in few steps of Python."""
    if not all(map(is_floating, given)):
        return False
    (features, _, _, heads, _, _) = shapes = [each.shape for each in given]
    return len(features) == len(heads) == 1 and shapes == [features, features, (*heads, *features), heads, (), ()]


def _refuse(bias: Fire) -> None:
    """Name the first tensor that is not as `fire` needs it.

    Raises:
        DtypeError, ShapeError: as `fire`.
    """
    features, heads = (getattr(each, "shape", ()) for each in (bias.hidden_weight, bias.output_bias))
    named: dict[str, tuple[int | str, ...]] = {
        "hidden_weight": (*features,) if len(features) == 1 else ("features",),
        "hidden_bias": (*features,),
        "output_weight": (*heads, *features),
        "output_bias": (*heads,) if len(heads) == 1 else ("heads",),
        "rate": (),
        "threshold": (),
    }
    for name, wanted in named.items():
        tensor = getattr(bias, name)
        if not is_floating(tensor):
            has = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise DtypeError(f"fire needs a floating-point {name}; it is {has}")
        if tuple(tensor.shape) != wanted:
            raise ShapeError(f"fire needs a {name} of the shape {wanted}; it has {tuple(tensor.shape)}")


class FirePairs(Protocol):
    """A backend's code for all of few pairs at default positions, without gradients."""

    def takes(self, bias: Fire, queries: int, keys: int) -> bool:
        """Whether it computes with the tensors of a bias."""
        ...

    def of_pairs(self, bias: Fire, queries: int, keys: int) -> Tensor:
        """As `Fire.of_pairs`."""
        ...


_codes: list[FirePairs] = []


def register_pairs(code: FirePairs) -> None:
    """Have a backend compute the pairs that it takes."""
    _codes.append(code)


@lru_cache(MAX_TABLES)
def _places(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The distances of pairs at default positions, (M, N), and the positions of the queries, (M, 1)."""
    with torch.inference_mode(False):
        query = torch.arange(keys - queries, keys).unsqueeze(-1)
        return (torch.arange(keys) - query).abs().to(dtype), query.to(dtype)
