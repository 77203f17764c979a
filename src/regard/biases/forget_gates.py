"""Forget gates: each token's own decay of all that came before it, as differences of one sum along the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.finite import waits
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.torch_modes import under_transform
from ..errors import DtypeError, ShapeError
from .all_pairs import AllPairs
from .base import Bias, describe_tensor, is_floating
from .distance_tables import CallBias, ContentBias


@dataclass(frozen=True, eq=False, repr=False)
class GateSums(CallBias):
    """c_i - c_j of query i and key j: the sum of the logarithms of the gates of the tokens after j, up to i.

    rows (..., heads, M, 1) and columns (..., heads, N, 1) are c in float64. exact: differences are taken in float64
    too; else of two float32 numbers each, which add up to c: one alone would be too coarse far down a sequence.
    side: the keys whose pairs have it, "all", "before" (and at) or "after" the query; the others have 0.
    """

    rows: Tensor
    columns: Tensor
    exact: bool
    side: str = "all"

    def values(self, grid: Grid) -> Tensor:
        rows, columns = self.rows[..., grid.rows, :], self.columns[..., grid.columns, :].mT
        if self.exact:
            differences = rows - columns  # [..., H, m, n]
        else:
            (high, low), (column_high, column_low) = two_terms(rows), two_terms(columns)
            differences = (high - column_high).add_(low - column_low)
        return differences if self.side == "all" else differences * self._has_sums(grid)

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        if self.side != "all":
            upstream = upstream * self._has_sums(grid)
        of_rows, of_columns = into
        if of_rows is not None:
            target = of_rows[..., grid.rows, :]
            target += upstream.sum(-1, keepdim=True).sum_to_size(target.shape)
        if of_columns is not None:
            target = of_columns[..., grid.columns, :]
            target -= upstream.sum(-2).unsqueeze(-1).sum_to_size(target.shape)

    def _has_sums(self, grid: Grid) -> Tensor:
        return grid.key > grid.query if self.side == "after" else grid.key <= grid.query

    def __repr__(self) -> str:
        return f"sums of gates {describe_tensor(self.columns)}"


def two_terms(sums: Tensor) -> tuple[Tensor, Tensor]:
    """float64 numbers as two float32 ones that add up to them."""
    high = sums.float()
    return high, (sums - high).float()


@dataclass(frozen=True, eq=False, repr=False)
class ForgetGates(ContentBias, AllPairs):
    """c of all keys, (..., heads, N) in float64, and of the gates for keys after the query; see `forget_gates`."""

    sums: Tensor
    exact: bool
    sums_after: Tensor | None = None

    def bound(self, problem: Problem) -> Bias:
        before = _rows_and_columns(problem, "log_gates", self.sums)
        if self.sums_after is None:
            return GateSums(*before, self.exact)
        rows, columns = _rows_and_columns(problem, "log_gates_after", self.sums_after)
        return GateSums(*before, self.exact, side="before") + GateSums(-rows, -columns, self.exact, side="after")

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        before = _differences(self.sums, problem)
        if self.sums_after is None:
            return before.float()
        after, first = _differences(self.sums_after, problem), problem.keys - problem.queries
        return (before.tril(first) - after.triu(first + 1)).float()

    def __repr__(self) -> str:
        return f"forget_gates({tuple(self.sums.shape)})"


def forget_gates(log_gates: Tensor, log_gates_after: Tensor | None = None) -> Bias:
    """Σ log f_l over the tokens l after the key, up to the query: each token's gate f decays all that is before it.

    B_ij = c_i - c_j with c_i = Σ_{l <= i} log f_l, which is data-dependent ALiBi too: constant gates e^-m are ALiBi
    with the slope m. The sums are taken in float64 and stay exact over long sequences: at 131,072 tokens the output is
    as near to float64 as that of float32 scores without a bias.

    Gates are those of the keys, and a query has the sum of the key at its own position: by default the last M of N, as
    in a step of decoding, for which the gates of all N tokens are given.

    log_gates: usually logsigmoid of a projection of the tokens. A causal mask is the caller's: without one, keys after
    the query have c_i - c_j > 0. log_gates_after: the gates for keys after the query, c'_j - c'_i, of an encoder.

    Shapes: (..., heads, N), or (..., N) without a head axis, broadcastable to the batch; gradients flow into both.
    Finite numbers: after a gate of 0, log f = -inf, all sums are NaN.

    Raises:
        DtypeError: not floating point.
        ShapeError: not one for each key; a query whose position no key has.

    Source: Lin et al. 2025, Forgetting Transformer (arXiv 2503.02130), Eq. 3; data-dependent ALiBi is its equal, for
    encoders with gates of both directions.

    >>> import torch, regard
    >>> q = torch.zeros(1, 1, 3, 4)
    >>> gates = torch.tensor([0.9, 0.5, 0.2]).log()[None, None]
    >>> weights = regard.lenses.Weights()
    >>> bias = regard.biases.forget_gates(gates)
    >>> regard.observe(q, q, q, weights, bias=bias, mask=regard.masks.causal())[weights][0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.3333, 0.6667, 0.0000],
            [0.0769, 0.1538, 0.7692]])
    """
    for name, gates in (("log_gates", log_gates), ("log_gates_after", log_gates_after)):
        if gates is not None and (not is_floating(gates) or gates.ndim < 1):
            has = gates.dtype if isinstance(gates, Tensor) else f"a {type(gates).__name__}"
            raise DtypeError(f"{name} needs floating-point logarithms of gates, (..., heads, keys); it is {has}")
    after = None if log_gates_after is None else log_gates_after.double().cumsum(-1)
    return ForgetGates(log_gates.double().cumsum(-1), log_gates.dtype == torch.float64, after)


def _differences(sums: Tensor, problem: Problem) -> Tensor:
    """c_i - c_j of all pairs, whose queries are at the last M keys: (..., heads, M, N), in float64."""
    return sums[..., problem.keys - problem.queries :, None] - sums[..., None, :]


def _rows_and_columns(problem: Problem, name: str, sums: Tensor) -> tuple[Tensor, Tensor]:
    """C of the queries, (..., heads, M, 1), and of the keys, (..., heads, N, 1)."""
    leading, whole = sums.shape[:-1], problem.weights_shape[:-2]
    fits = len(leading) <= len(whole) and all(
        size in (1, of) for size, of in zip(reversed(leading), reversed(whole), strict=False)
    )
    if sums.shape[-1] != problem.keys or not fits:
        raise ShapeError(
            f"{name} has the shape {tuple(sums.shape)}; it needs the logarithm of one gate for each key, "
            f"{(*whole, problem.keys)}, or 1 in place of an axis but the last"
        )
    return _at_queries(problem, sums).unsqueeze(-1), sums.unsqueeze(-1)


def _at_queries(problem: Problem, sums: Tensor) -> Tensor:
    """Of numbers of the keys, (..., heads, N), those at the positions of the queries: (..., heads, M)."""
    queries, keys = problem.queries, problem.keys
    if problem.shift is not None:
        first = keys - queries - problem.shift
        if not 0 <= first <= keys - queries:
            raise ShapeError(_no_key(problem))
        return sums[..., first : first + queries]
    grid = problem.grid()
    at, has = grid.query_positions.long(), grid.key_positions.long()
    batch = broadcast_shapes(at.shape[:-1], has.shape[:-1])
    has, order = has.expand(*batch, -1).sort(-1)
    at = at.expand(*batch, -1).contiguous()
    found = torch.searchsorted(has, at).clamp(max=max(keys - 1, 0))
    if not (under_transform() or waits(found)) and not torch.equal(has.gather(-1, found), at):
        raise ShapeError(_no_key(problem))
    numbers = order.gather(-1, found)  # [*batch, M]
    if problem.heads and batch:
        numbers = numbers.unsqueeze(-2)
    leading = broadcast_shapes(sums.shape[:-1], numbers.shape[:-1])
    return sums.expand(*leading, -1).gather(-1, numbers.expand(*leading, -1))


def _no_key(problem: Problem) -> str:
    return (
        f"forget gates are those of the keys, and some of the {problem.queries} queries are at positions that none of "
        f"the {problem.keys} keys has: in self-attention the keys of the queries' own tokens are among the keys"
    )
