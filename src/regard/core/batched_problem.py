"""A problem with its leading axes merged: tensors (batch, heads, length, dim), as tile-wise kernels compute it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from .grid import WHOLE, Grid
from .large_results import new_large, new_large_like
from .problem import Problem
from .score_forms import AdditivePairs, PairForm, at_least_float32


@dataclass(frozen=True, eq=False, slots=True)
class Saved:
    """Forward results and upstream gradients, as passed to a kernel's backward.

    Shapes: output, grad_output (B, H, M, Dv); lse, grad_lse (B, H, M). lse is +inf where a row takes no part: its
    weights, exp(score - lse), are then 0; of a normalizer without log-sum-exp it has that normalizer's numbers of the
    rows. needs_bias_grad, needs_normalizer_grad: whether the gradients of the parameters of these are required.
    has_lse_grad: whether the gradient of the log-sum-exp may have an entry other than 0.
    """

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor
    needs_bias_grad: bool = False
    has_lse_grad: bool = True
    needs_normalizer_grad: bool = False

    def part(self, batch: slice = WHOLE, rows: slice = WHOLE) -> Saved:
        """The same of some batches and some of their rows."""
        tensors = (self.output, self.lse, self.grad_output, self.grad_lse)
        output, lse, grad_output, grad_lse = (tensor[batch, :, rows] for tensor in tensors)
        return replace(self, output=output, lse=lse, grad_output=grad_output, grad_lse=grad_lse)

    def delta(self) -> Tensor:
        """Σ grad_output · output - grad_lse per row: the gradient of a score is weight · (grad_weight - delta)."""
        return (at_least_float32(self.grad_output) * at_least_float32(self.output)).sum(-1) - self.grad_lse


@dataclass(frozen=True, eq=False, slots=True)
class ProblemGradients:
    """Gradients of a batched problem's tensors, each in its tensor's shape; one per parameter of bias and normalizer.

    sinks: of normalizers without log-sum-exp alone; of the others they are the operator's.
    checked: whether those of query, key and value need no check for NaN, as `core.finite.CheckedGradients`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None = None
    bias: tuple[Tensor, ...] = ()
    checked: bool = False
    normalizer: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None

    @property
    def others(self) -> bool:
        """Whether there are gradients of other tensors than query, key and value, and the weight of a score."""
        return bool(self.bias or self.normalizer) or self.sinks is not None

    def part(self, batch: slice) -> ProblemGradients:
        """Views of the gradients of some batches, to add to."""
        return replace(self, query=self.query[batch], key=self.key[batch], value=self.value[batch])


@dataclass(frozen=True, eq=False)
class BatchedProblem:
    """The tensors of a problem as (B, H, M, ·) and (B, Hk, N, ·), with mask and bias evaluated in the same axes.

    batch: which of the problem's batches these tensors are.
    """

    problem: Problem
    pairs: PairForm
    value: Tensor
    batch: slice = field(default_factory=lambda: WHOLE)

    @classmethod
    def from_problem(cls, problem: Problem) -> BatchedProblem:
        """Merge leading axes into one batch axis, and add a missing head axis of size 1; views wherever possible."""
        batch = problem.batch
        batches = math.prod(batch)  # `batch.numel()` would fix sizes that vary under torch.export

        def to_4d(tensor: Tensor) -> Tensor:
            tensor = separate_rows(tensor)  # torch's own kernels read and write each row as one piece
            if tensor.ndim == 4 and tensor.shape[0] == batches:
                return tensor
            if not problem.heads:
                tensor = tensor.unsqueeze(-3)
            return tensor.expand(*batch, *tensor.shape[-3:]).reshape(batches, *tensor.shape[-3:])

        pairs, query, key = problem.pairs, to_4d(problem.pairs.query), to_4d(problem.pairs.key)
        if query is not pairs.query or key is not pairs.key:
            pairs = replace(pairs, query=query, key=key)
        return cls(problem, pairs, to_4d(problem.value))

    @cached_property
    def leading(self) -> torch.Size:
        """The problem's axes in front of heads and lengths, cached."""
        return self.problem.batch

    @cached_property
    def grid(self) -> Grid:
        """The pairs of the problem and their positions, cached."""
        return self.problem.grid()

    def part(self, batch: slice) -> BatchedProblem:
        """The same for some of the batches."""
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
        return None if keep is None else self.as_4d(keep)

    def bias(self, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor | None:
        """The bias of a tile, (B or 1, H or 1, m or 1, n or 1); None without a bias."""
        if self.problem.bias is None:
            return None
        values = self.problem.bias_values(self.grid.tile(rows, columns))
        return None if values is None else self.as_4d(values)

    def added(self, rows: slice, columns: slice, *, masked: bool = True) -> Tensor | None:
        """Mask and bias of a tile as one additive mask, in float32 at least; None for neither.

        Shapes: (B or 1, H or 1, m, n), possibly an expanded view; -inf where the mask forbids the pair.
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

    def empty_results(self, lse_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Uninitialised tensors for an output (B, H, M, Dv) and a log-sum-exp (B, H, M), in float32 at least."""
        batch, heads, queries, _ = self.shape
        lse_dtype = lse_dtype or torch.promote_types(self.value.dtype, torch.float32)
        return (
            self.value.new_empty(batch, heads, queries, self.value.shape[-1]),
            self.value.new_empty(batch, heads, queries, dtype=lse_dtype),
        )

    def join_batches(self, parts: Iterable[tuple[slice, tuple[Tensor, Tensor]]]) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps of all batches from those of slices of them."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0][1]
        output, lse = self.empty_results()
        for batch, (own_output, own_lse) in parts:
            output[batch], lse[batch] = own_output, own_lse
        return output, lse

    def zero_gradients(self, *, bias: bool = False, normalizer: bool = False) -> ProblemGradients:
        """Zero gradients to add to, in float32 at least; of bias and normalizer only if these are true."""
        gradients = self.new_gradients(zero=True, bias=bias)
        of = self.problem.normalizer
        if of is None:
            return gradients
        parameters = self.zero_normalizer_gradients() if normalizer else ()
        sinks = None if self.problem.sinks is None or of.has_lse else torch.zeros_like(self.problem.sinks)
        return replace(gradients, normalizer=parameters, sinks=sinks)

    def new_gradients(self, *, zero: bool, bias: bool = False) -> ProblemGradients:
        """`zero_gradients`, or those of query, key and value uninitialised."""
        pairs = self.pairs

        def new(tensor: Tensor) -> Tensor:
            wide = at_least_float32(tensor)
            return torch.zeros_like(wide) if zero else new_large(wide, *wide.shape)

        return ProblemGradients(
            *(new(tensor) for tensor in (pairs.query, pairs.key, self.value)),
            weight=torch.zeros_like(at_least_float32(pairs.weight)) if isinstance(pairs, AdditivePairs) else None,
            bias=self.zero_bias_gradients() if bias else (),
        )

    def zero_normalizer_gradients(self) -> tuple[Tensor, ...]:
        """Zeros to add the gradients of the normalizer's parameters to, in float32 at least."""
        of = self.problem.normalizer
        return () if of is None else tuple(torch.zeros_like(at_least_float32(each)) for each in of.parameters())

    def zero_bias_gradients(self) -> tuple[Tensor, ...]:
        """Zero gradients of the bias to add to, one for each parameter."""
        bias = self.problem.bias
        parameters = () if bias is None else bias.parameters()
        return tuple(new_large_like(at_least_float32(tensor)).zero_() for tensor in parameters)

    def as_4d(self, pairs: Tensor) -> Tensor:
        """A tensor that broadcasts to the weights as (B or 1, H or 1, m, n), for the batches of this problem."""
        pairs = self._all_as_4d(pairs)
        return pairs if pairs.shape[0] == 1 else pairs[self.batch]

    def _all_as_4d(self, pairs: Tensor) -> Tensor:
        if not self.problem.heads and pairs.ndim > 2:
            pairs = pairs.unsqueeze(-3)
        batch = self.problem.batch
        if pairs.ndim <= (4 if len(batch) <= 1 else 3):
            return pairs[(None,) * (4 - pairs.ndim)]
        return pairs.expand(*batch, *pairs.shape[-3:]).reshape(batch.numel(), *pairs.shape[-3:])

    def flatten_batch(self, tensor: Tensor) -> Tensor:
        """Merge the leading axes of a tensor: (*batch, heads, ...) to (B, H, ...)."""
        if len(self.leading) != 1:
            tensor = tensor.flatten(0, len(self.leading) - 1) if self.leading else tensor.unsqueeze(0)
        return tensor if self.problem.heads else tensor.unsqueeze(1)

    def unflatten_batch(self, tensor: Tensor) -> Tensor:
        """Restore the problem's leading axes: (B, H, ...) to (*batch, heads, ...)."""
        tensor = self.split_batch(tensor)
        return tensor if self.problem.heads else tensor.squeeze(len(self.leading))

    def split_batch(self, tensor: Tensor) -> Tensor:
        """A view (*batch, H, ...) of a tensor (B, H, ...), with its head axis."""
        if len(self.leading) == 1:
            return tensor
        return tensor.unflatten(0, self.leading) if self.leading else tensor.squeeze(0)


def separate_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied unless the numbers of a row (its last axis) are neighbours and rows are not one number apart.

    Rows one number apart are the windows of `signal.unfold(-1, dim, 1)`. Torch makes a result like them with the axes
    of equal strides in the order of their sizes, and its flash kernel for CPUs writes such results as if the last came
    last.

    >>> import torch
    >>> windows = torch.arange(6.0).unfold(0, 4, 1)  # (3, 4)
    >>> windows.stride(), torch.empty_like(windows).stride(), separate_rows(windows).stride()
    ((1, 1), (1, 3), (4, 1))
    """
    *others, last = tensor.stride()
    return tensor if last == 1 and 1 not in others else tensor.contiguous()
