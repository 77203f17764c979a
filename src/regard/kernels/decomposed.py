"""The decomposed kernel: each dense part of a sparse mask as a problem of its own, merged by log-sum-exp.

Strided attention over n tokens has n / stride pairs a row, scattered over all tiles; its residue classes are dense
blocks of n / stride rows and columns (Child et al. 2019, arXiv 1904.10509). `Mask.parts` lists such parts; each is
computed by the fastest kernel for it, over rows and columns selected by their positions, so that mask, bias and dropout
are those of the whole problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..backends.registry import some_nan_safe
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.finite import CheckedRows
from ..core.large_results import new_large
from ..core.log_sum_exp import lse_dtype, merge_softmax
from ..core.problem import Problem
from ..core.score_forms import at_least_float32
from ..tiles.selections import ALL, Axis, ResidueClasses, Selection, reasons_against_parts, selections
from .base import EVERY_GRADIENT, Cost, FlashWork, InPlaceKernel, Kernel, OwnGradient, Result, needs_no_look
from .custom_op import apply_kernel, register
from .planning.rates import predicted_seconds
from .planning.signature import exact_signature, memoize_choice
from .planning.unit_costs import RESULT
from .planning.unit_prices import price

CALLS = price("decomposed.calls")


class PartKernel(Kernel, OwnGradient, Protocol):
    """A kernel of the parts: it predicts its cost, and brings its own gradient."""


class DecomposedKernel:
    """The dense parts of a sparse mask, each by the fastest kernel for it; O(n · √n) for strided and fixed patterns."""

    name = "decomposed"

    def __init__(self, kernels: tuple[PartKernel, ...], without_bias: tuple[PartKernel, ...] = ()) -> None:
        self.kernels, self.without_bias = kernels, without_bias
        register(self, exact_lse=True)

    def why_not(self, problem: Problem) -> list[str]:
        """Masks without parts, and what is not a function of positions."""
        return reasons_against_parts(problem)

    def cost(self, problem: Problem) -> Cost:
        """The work of all parts, and of merging their results."""
        total = Cost(0.0, 0.0, calls=0.0)
        parts = []
        for selection in selections(problem):
            kernel = self._kernel(selection.problem)
            own, rows = kernel.cost(selection.problem), selection.problem.weights_shape[:-1].numel()
            total = Cost(
                total.flops + own.flops,
                max(total.bytes, own.bytes + 4.0 * rows * problem.value.shape[-1]),
                total.passes + own.passes + RESULT * rows * problem.value.shape[-1],
                moved=total.moved + own.moved,
                calls=total.calls + own.calls + CALLS,
                flash={
                    name: total.flash.get(name, FlashWork()) + own.flash.get(name, FlashWork())
                    for name in {*total.flash, *own.flash}
                },
                streamed=total.streamed + own.streamed,
            )
            parts.append(
                f"{selection.part}, {selection.problem.queries:,} × {selection.problem.keys:,}, by {kernel.name}"
            )
        return replace(total, parts=tuple(parts))

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the kernels of all parts are."""
        parts = (each.problem for each in selections(problem))
        return all(needs_no_look(self._kernel(each), each, backward=backward) for each in parts)

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem: those of its parts, merged row by row."""
        problem, (batch, heads, queries, _) = batched.problem, batched.shape
        output = new_large(at_least_float32(batched.value), batch, heads, queries, batched.value.shape[-1])
        value = batched.value
        safe = some_nan_safe(value.device, value.dtype) and self.is_nan_safe(problem, backward=True)
        of_lse = output.dtype if safe else lse_dtype(batched.value)
        lse = output.new_empty(batch, heads, queries, 1, dtype=of_lse)
        found = list(selections(problem))
        first = _count_of_first_part(found, queries)
        if not first:
            output.zero_()
            lse.fill_(float("-inf"))
        into = batched.split_batch(output), batched.split_batch(lse)
        checked = True  # as long as the results of all parts are; what no part writes is 0
        for at, selection in enumerate(found):
            checked = self._forward_part(selection, *into, accumulate=at >= first) and checked
        result = output.to(batched.value.dtype), lse.squeeze(-1)
        return CheckedRows(result) if checked else result

    def _forward_part(self, selection: Selection, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write a part's result into output and lse (*batch, heads, M, ·), or merge it with what stands there.

        Returns whether what was written needs no check for NaN.
        """
        kernel, own = self._kernel(selection.problem), BatchedProblem.from_problem(selection.problem)
        if isinstance(kernel, InPlaceKernel) and own.value.dtype == torch.float32:
            output_view, lse_view = _merged_view(selection.rows, output), _merged_view(selection.rows, lse)
            if output_view is not None and lse_view is not None:
                return kernel.forward_into(own, output_view, lse_view.squeeze(-1), accumulate=accumulate)
        part_output, part_lse = kernel.forward(own)
        part_output = own.split_batch(part_output.to(output.dtype))
        part_lse = own.split_batch(part_lse.unsqueeze(-1).to(lse.dtype))
        if accumulate:
            _merge_into(output, lse, part_output, part_lse, selection.rows)
        else:
            selection.rows.write(output, part_output)
            selection.rows.write(lse, part_lse)
        return False

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of each part, added to those of the whole."""
        problem, (*_, queries, keys) = batched.problem, batched.shape
        found = list(selections(problem))
        first = _count_of_first_part(found, queries, keys)
        gradients = batched.new_gradients(zero=not first, bias=saved.needs_bias_grad)
        whole = [batched.split_batch(tensor) for tensor in (gradients.query, gradients.key, gradients.value)]
        above = saved.output, saved.lse.unsqueeze(-1), saved.grad_output, saved.grad_lse.unsqueeze(-1)
        checked = True
        for at, selection in enumerate(found):
            rows, columns = selection.rows, selection.columns
            output, lse, grad_output, grad_lse = (
                rows.select(batched.split_batch(tensor)).flatten(0, -4) for tensor in above
            )
            part = replace(
                saved, output=output, lse=lse.squeeze(-1), grad_output=grad_output, grad_lse=grad_lse.squeeze(-1)
            )
            kernel, own = self._kernel(selection.problem), BatchedProblem.from_problem(selection.problem)
            query, key, value = (
                _merged_view(axis, tensor) for axis, tensor in zip((rows, columns, columns), whole, strict=True)
            )
            if isinstance(kernel, InPlaceKernel) and query is not None and key is not None and value is not None:
                into = ProblemGradients(query, key, value, bias=gradients.bias)
                checked = kernel.backward_into(own, part, into, accumulate=at >= first) and checked
                continue
            result, checked = kernel.backward(own, part), False
            for axis, target, tensor in zip(
                (rows, columns, columns), whole, (result.query, result.key, result.value), strict=True
            ):
                (axis.add if at >= first else axis.write)(target, own.split_batch(tensor))
            for target, tensor in zip(gradients.bias, result.bias, strict=True):
                target += tensor
            if gradients.weight is not None and result.weight is not None:
                gradients.weight.add_(result.weight)
        return replace(gradients, checked=checked)

    def _kernel(self, problem: Problem) -> PartKernel:
        """The kernel of the lowest predicted time for a part."""

        def compute() -> PartKernel:
            # Whether the gradient of a bias is wanted is not known here: those that have none compute no bias at all.
            kernels = self.kernels if problem.bias is not None else (*self.kernels, *self.without_bias)
            able = [kernel for kernel in kernels if not kernel.why_not(problem)]
            return min(able, key=lambda kernel: predicted_seconds(kernel.cost(problem), problem))

        return memoize_choice(problem, exact_signature, "part of a mask", compute)


def _count_of_first_part(found: Sequence[Selection], queries: int, keys: int = 0) -> int:
    """How many selections are of the first part, if they have all queries and keys, each once; otherwise 0.

    They then are written, and those of other parts are added.
    """
    first = [selection for selection in found if selection.part is found[0].part]
    rows, columns = (sum(each.rows.count(queries) for each in first), sum(each.columns.count(keys) for each in first))
    return len(first) if rows == queries and columns >= keys else 0


def _merge_into(output: Tensor, lse: Tensor, part_output: Tensor, part_lse: Tensor, rows: Axis) -> None:
    """Merge a part's result into the rows that it has."""
    outputs, lses = torch.stack([rows.select(output), part_output]), torch.stack([rows.select(lse), part_lse])
    merged_output, merged_lse = merge_softmax(outputs, lses.squeeze(-1), dim=0)
    rows.write(output, merged_output)
    rows.write(lse, merged_lse.unsqueeze(-1))


def _merged_view(axis: Axis, tensor: Tensor) -> Tensor | None:
    """The selected rows of a tensor (*batch, heads, n, ·) as a view (classes · B, heads, ·, ·); None if it is none."""
    if not isinstance(axis, ResidueClasses) and axis is not ALL:
        return None
    selected = axis.select(tensor)
    try:
        return selected.view(-1, *selected.shape[-3:])
    except RuntimeError:  # batches and classes have no common stride
        return None
