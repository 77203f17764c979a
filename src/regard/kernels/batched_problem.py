"""A problem in four dimensions, (batch, heads, length, dim), whatever it came in: what tile-wise kernels compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..core.grid import WHOLE, Grid
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, PairForm, at_least_float32


@dataclass(frozen=True, eq=False, slots=True)
class Saved:
    """What a backward pass knows: the forward's results, and the gradients that come from above.

    Shapes: output, grad_output (B, H, M, Dv); lse, grad_lse (B, H, M). lse is +inf where a row takes no part: its
    weights, exp(score - lse), are then 0. wants_bias: whether the gradient of the bias is asked for.
    """

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor
    wants_bias: bool = False

    def part(self, batch: slice = WHOLE, rows: slice = WHOLE) -> Saved:
        """Of some batches, and of some of their rows."""
        tensors = (self.output, self.lse, self.grad_output, self.grad_lse)
        return Saved(*(tensor[batch, :, rows] for tensor in tensors), wants_bias=self.wants_bias)

    def delta(self) -> Tensor:
        """Σ grad_output · output - grad_lse for each row: the gradient of a score is weight · (grad_weight - delta)."""
        return (at_least_float32(self.grad_output) * at_least_float32(self.output)).sum(-1) - self.grad_lse

    @property
    def from_lse(self) -> bool:
        """Whether any gradient comes from the log-sum-exp."""
        return bool(self.grad_lse.any())


@dataclass(frozen=True, eq=False, slots=True)
class Gradients:
    """Gradients of a flat problem's tensors, each in its tensor's shape; of the bias one for each parameter."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None = None
    bias: tuple[Tensor, ...] = ()

    def part(self, batch: slice) -> Gradients:
        """Those of some batches, as views to add to."""
        return replace(self, query=self.query[batch], key=self.key[batch], value=self.value[batch])


@dataclass(frozen=True, eq=False)
class Flat:
    """The tensors of a problem as (B, H, M, ·) and (B, Hk, N, ·); mask and bias are asked through it, and follow."""

    problem: Problem
    pairs: PairForm
    value: Tensor
    batch: slice = field(default_factory=lambda: WHOLE)

    @classmethod
    def of(cls, problem: Problem) -> Flat:
        """Leading axes become one batch axis; a missing head axis becomes one of size 1. Views wherever possible."""
        batch = problem.batch

        def four(tensor: Tensor) -> Tensor:
            if tensor.stride(-1) != 1:
                tensor = tensor.contiguous()  # torch's own kernels read each row as one piece
            if tensor.ndim == 4 and problem.heads and tensor.shape[0] == batch.numel():
                return tensor
            if not problem.heads:
                tensor = tensor.unsqueeze(-3)
            return tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:])

        pairs = replace(problem.pairs, query=four(problem.pairs.query), key=four(problem.pairs.key))
        return cls(problem, pairs, four(problem.value))

    @cached_property
    def grid(self) -> Grid:
        """The pairs of the problem and their positions, made when they are first asked for."""
        return self.problem.grid()

    def part(self, batch: slice) -> Flat:
        """Some of the batches."""
        key = self.pairs.key[batch]
        pairs = replace(self.pairs, query=self.pairs.query[batch], key=key)
        return replace(self, pairs=pairs, value=self.value[batch], batch=batch)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, M, N)."""
        batch, heads, queries = self.pairs.query.shape[:3]
        return batch, heads, queries, self.value.shape[-2]

    def keep(self, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor | None:
        """Which pairs of a tile exist, (B or 1, H or 1, m, n); None means all."""
        if self.problem.mask is None:
            return None
        keep = self.problem.keep(self.grid.tile(rows, columns))
        return None if keep is None else self.four(keep)

    def bias(self, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor | None:
        """What is added to the scores of a tile, (B or 1, H or 1, m or 1, n or 1); None means nothing."""
        if self.problem.bias is None:
            return None
        values = self.problem.bias_values(self.grid.tile(rows, columns))
        return None if values is None else self.four(values)

    def added(self, rows: slice, columns: slice, *, masked: bool = True) -> Tensor | None:
        """Mask and bias of a tile as the numbers that are added to its scores, in float32 at least; None for all 0.

        Shapes: (B or 1, H or 1, m, n), not always in memory of its own; -inf where nothing is kept.
        """
        keep, added = self.keep(rows, columns) if masked else None, self.bias(rows, columns)
        if keep is None and added is None:
            return None
        dtype = torch.promote_types(self.value.dtype, torch.float32)
        added = torch.zeros((), dtype=dtype, device=self.value.device) if added is None else added.to(dtype)
        if keep is not None:
            added = torch.where(keep, added, float("-inf"))
        size = rows.stop - rows.start, columns.stop - columns.start
        return added.expand(*added.shape[:2], *size)

    def empty_results(self) -> tuple[Tensor, Tensor]:
        """Memory for an output (B, H, M, Dv) and a log-sum-exp (B, H, M), to be filled."""
        batch, heads, queries, _ = self.shape
        lse = torch.promote_types(self.value.dtype, torch.float32)
        return (
            self.value.new_empty(batch, heads, queries, self.value.shape[-1]),
            self.value.new_empty(batch, heads, queries, dtype=lse),
        )

    def joined(self, parts: Iterable[tuple[slice, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps of some batches after others, together as those of all."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0][1]
        output, lse = self.empty_results()
        for batch, (own_output, own_lse) in parts:
            output[batch], lse[batch] = own_output, own_lse
        return output, lse

    def zero_gradients(self, *, bias: bool = False) -> Gradients:
        """Zeros to add gradients to, in float32 at least; of the bias only if that is wanted."""
        pairs = self.pairs
        return Gradients(
            *(torch.zeros_like(at_least_float32(tensor)) for tensor in (pairs.query, pairs.key, self.value)),
            weight=torch.zeros_like(at_least_float32(pairs.weight)) if isinstance(pairs, AdditivePairs) else None,
            bias=self.zero_bias_gradients() if bias else (),
        )

    def zero_bias_gradients(self) -> tuple[Tensor, ...]:
        """Zeros to add the gradients of the bias to, one for each parameter."""
        bias = self.problem.bias
        held = () if bias is None else bias.parameters()
        return tuple(torch.zeros_like(at_least_float32(tensor)) for tensor in held)

    def four(self, pairs: Tensor) -> Tensor:
        """A tensor over the weights' axes, in their order, as (B or 1, H or 1, m, n), of the batches of this part."""
        pairs = self._four(pairs)
        return pairs if pairs.shape[0] == 1 else pairs[self.batch]

    def _four(self, pairs: Tensor) -> Tensor:
        if not self.problem.heads and pairs.ndim > 2:
            pairs = pairs.unsqueeze(-3)
        batch = self.problem.batch
        if pairs.ndim <= (4 if len(batch) <= 1 else 3):
            return pairs[(None,) * (4 - pairs.ndim)]
        return pairs.expand(*batch, *pairs.shape[-3:]).reshape(batch.numel(), *pairs.shape[-3:])

    def fold(self, tensor: Tensor) -> Tensor:
        """A tensor over (*batch, heads, ...), as the problem has them, as (B, H, ...)."""
        batch = self.problem.batch
        tensor = tensor.flatten(0, len(batch) - 1) if len(batch) else tensor.unsqueeze(0)
        return tensor if self.problem.heads else tensor.unsqueeze(1)

    def unfold(self, tensor: Tensor) -> Tensor:
        """(B, H, ...) with the leading axes of the problem again: (*batch, heads, ...)."""
        batch = self.problem.batch
        if len(batch) != 1:
            tensor = tensor.unflatten(0, batch) if len(batch) else tensor.squeeze(0)
        return tensor if self.problem.heads else tensor.squeeze(len(batch))
