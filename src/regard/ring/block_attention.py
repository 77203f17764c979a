"""Attention of one block of pairs, merged into the rows of a shard; its gradients, added to those of the shard.

Rows are merged by log-sum-exp in float32 at least. Where a score beside 10⁴ would be too coarse in float32, the block
is computed in float64, and the log-sum-exp of the shard is float64 from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.finite import all_finite
from ..core.log_sum_exp import LARGEST_LSE, coarse_rows, in_float64, merge_softmax
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs, at_least_float32, with_rows
from ..errors import KernelError
from ..kernels import choose, zero_nonfinite_inputs
from ..kernels.base import InPlaceKernel, OwnGradient
from ..kernels.custom_op import compute_forward, compute_gradients
from ..kernels.planning.choice import fastest_own_gradient
from ..kernels.planning.signature import exact_signature, memoize_choice
from ..utils.pytree import tree_tensors
from .hops import PairBlock


@dataclass(eq=False)
class ShardRows:
    """Running results of a shard's rows: output (..., heads, M, Dv), lse (..., heads, M).

    met_nonfinite: whether NaN or infinity was in an input of a block whose output is not finite.
    """

    output: Tensor
    lse: Tensor
    met_nonfinite: bool = False

    @classmethod
    def from_problem(cls, problem: Problem) -> ShardRows:
        """Rows that have attended to nothing yet."""
        rows = problem.weights_shape[:-1]
        output = problem.value.new_zeros(*rows, problem.value.shape[-1])
        return cls(output, output.new_full(rows, float("-inf")))

    def merge(self, problem: Problem, rows: slice, heads: slice | None, kernel: str | None, *, in_place: bool) -> None:
        """Merge the result of a block with that of other keys.

        rows, heads: those of the block; None for all heads.
        in_place: whether all inputs are finite and no score is large, so that a kernel may write into the rows.
        """
        computation = block_kernel(problem, kernel)
        output, lse = block_rows(self.output, rows, heads), block_rows(self.lse.unsqueeze(-1), rows, heads).squeeze(-1)
        if in_place and isinstance(computation, InPlaceKernel) and lse.dtype == torch.float32:
            own = BatchedProblem.from_problem(problem)
            computation.forward_into(own, own.flatten_batch(output), own.flatten_batch(lse), accumulate=True)
            return
        merged = self._merged(problem, computation, output, lse) if lse.dtype == problem.value.dtype else None
        if merged is None or coarse_rows(problem, merged[1]) is not None:
            wide = in_float64(problem)
            self.lse = self.lse.double()
            lse = block_rows(self.lse.unsqueeze(-1), rows, heads).squeeze(-1)
            merged = self._merged(wide, block_kernel(wide, kernel), output, lse)
        output.copy_(merged[0])
        lse.copy_(merged[1])

    def _merged(self, problem: Problem, computation: OwnGradient, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        own_output, own_lse = compute_forward(problem, computation.name)
        if not all_finite(own_output):
            self.met_nonfinite |= zero_nonfinite_inputs(problem) is not problem
        return merge_softmax(
            torch.stack([output, own_output.to(output.dtype)]), torch.stack([lse, own_lse.to(lse.dtype)]), dim=0
        )


@dataclass(eq=False)
class ShardGradients:
    """Running gradients of a shard: of its query, and of the tensors that all processes have (weights and biases).

    output, lse, grad_output, grad_lse: the final results of the rows, and their upstream gradients.
    """

    problem: Problem
    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor
    needs_bias: bool
    kernel: str | None
    query: Tensor
    shared: list[Tensor]

    @classmethod
    def from_results(
        cls,
        problem: Problem,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor,
        *,
        needs_bias: bool,
        kernel: str | None,
        met_nonfinite: bool,
    ) -> ShardGradients:
        """Gradients of 0, and results without NaN of rows that attend to NaN, from which no gradient comes."""
        if lse.dtype == torch.float64:
            problem = in_float64(problem)
        if met_nonfinite:
            bad = output.isnan()
            grad_output, output = grad_output.masked_fill(bad, 0.0), output.masked_fill(bad, 0.0)
            bad = lse.isnan()
            grad_lse, lse = grad_lse.masked_fill(bad, 0.0), lse.masked_fill(bad, float("inf"))
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        grad_lse = grad_lse.to(lse.dtype).masked_fill(lse == float("inf"), 0.0)
        query, dtype = problem.pairs.query, problem.value.dtype
        shared = [torch.zeros_like(tensor) for tensor in shared_tensors(problem, bias=needs_bias)]
        return cls(
            problem,
            output.to(dtype),
            lse,
            grad_output.to(dtype),
            grad_lse,
            needs_bias,
            kernel,
            query.new_zeros(query.shape),  # contiguous: blocks add to views of it
            shared,
        )

    def add(
        self, problem: Problem, block: PairBlock, heads: slice | None, key: Tensor, value: Tensor, *, in_place: bool
    ) -> None:
        """Add the gradients of a block; key and value are those of all received keys, heads the block's query heads."""
        computation = block_kernel(problem, self.kernel, bias=self.needs_bias)
        key, value = key[..., block.columns, :], value[..., block.columns, :]
        query, output, grad_output = (
            block_rows(tensor, block.rows, heads) for tensor in (self.query, self.output, self.grad_output)
        )
        lse, grad_lse = (
            block_rows(tensor.unsqueeze(-1), block.rows, heads).squeeze(-1) for tensor in (self.lse, self.grad_lse)
        )
        if in_place and not self.needs_bias and isinstance(computation, InPlaceKernel) and lse.dtype == torch.float32:
            own = BatchedProblem.from_problem(problem)
            flat = own.flatten_batch
            has_lse_grad = bool(grad_lse.any())
            saved = Saved(flat(output), flat(lse), flat(grad_output), flat(grad_lse), has_lse_grad=has_lse_grad)
            into = ProblemGradients(flat(query), flat(key), flat(value))
            computation.backward_into(own, saved, into, accumulate=True)
            return
        # A tensor may occur twice, as in a sum of two biases: each occurrence has a gradient of its own.
        targets: dict[int, list[Tensor]] = {}
        own = (problem.pairs.query, problem.pairs.key, problem.value, *shared_tensors(problem, bias=self.needs_bias))
        for tensor, target in zip(own, (query, key, value, *self.shared), strict=True):
            targets.setdefault(id(tensor), []).append(target)
        tensors = tree_tensors(problem)
        needed = [id(tensor) in targets for tensor in tensors]
        found = compute_gradients(grad_output, grad_lse, output, lse, problem, needed, computation.name)
        for tensor, gradient, need in zip(tensors, found, needed, strict=True):
            if need:
                targets[id(tensor)].pop(0).add_(gradient)


def shared_tensors(problem: Problem, *, bias: bool) -> list[Tensor]:
    """The floating-point tensors that all processes have: the weight of a score and, if needed, a bias's parameters."""
    weight = [problem.pairs.weight] if isinstance(problem.pairs, AdditivePairs) else []
    return [*weight, *(problem.bias.parameters() if bias and problem.bias is not None else ())]


def block_rows(tensor: Tensor, rows: slice, heads: slice | None) -> Tensor:
    """Some rows of a tensor (..., heads, M, ·), of some heads; None for all."""
    return tensor[..., rows, :] if heads is None else tensor[..., heads, rows, :]


def block_problem(problem: Problem, block: PairBlock, heads: slice | None, key: Tensor, value: Tensor) -> Problem:
    """The problem of a block, at its global positions; `key` and `value` are all received ones of its heads."""
    query = block_rows(problem.pairs.query, block.rows, heads)
    positions = block.query_positions, block.key_positions
    return replace(
        problem,
        pairs=with_rows(problem.pairs, query, key[..., block.columns, :], *positions),
        value=value[..., block.columns, :],
        mask=None if block.is_full else problem.mask,
        query_positions=block.query_positions,
        key_positions=block.key_positions,
    )


def block_kernel(problem: Problem, name: str | None, *, bias: bool = False) -> OwnGradient:
    """The kernel of that name, or the fastest with a backward of its own, memoized for the sizes and the mask.

    Raises:
        KernelError: the named kernel cannot compute the block.
    """
    if name is not None:
        kernel = choose(problem, name)
        if not isinstance(kernel, OwnGradient):
            raise KernelError(
                f"kernel {name!r} has no backward of its own, as the blocks of a ring need: leave kernel out, or take "
                "'tiled', which computes every problem"
            )
        return kernel
    if problem.mask is None and problem.bias is None:
        problem = replace(problem, query_positions=None, key_positions=None)  # one choice for all such blocks
    what = "block of a ring", bias
    return memoize_choice(problem, exact_signature, what, lambda: fastest_own_gradient(problem, bias=bias))


def with_float32(problem: Problem) -> Problem:
    """The problem over float32 copies of tensors of half precision, so that partial results are not rounded to it."""
    pairs, bias = problem.pairs, problem.bias
    if bias is not None:
        bias = bias.with_parameters([at_least_float32(parameter) for parameter in bias.parameters()])
    widened: dict[str, Tensor] = {name: at_least_float32(getattr(pairs, name)) for name in ("query", "key")}
    if isinstance(pairs, AdditivePairs):
        widened["weight"] = at_least_float32(pairs.weight)
    return replace(problem, pairs=replace(pairs, **widened), value=at_least_float32(problem.value), bias=bias)


def largest_query_norm(problem: Problem) -> float:
    """The largest norm of a query, by which `is_tame` bounds scores; infinite where it cannot bound them."""
    pairs = problem.pairs
    if not isinstance(pairs, DotPairs) or problem.bias is not None or not problem.value.is_cpu:
        return float("inf")
    return float(torch.linalg.vector_norm(pairs.query, dim=-1).amax())


def is_tame(problem: Problem, query_norm: float, key: Tensor, value: Tensor) -> bool:
    """Whether all inputs are finite and no dot product is near where float32 makes a log-sum-exp coarse."""
    if not isinstance(problem.pairs, DotPairs) or query_norm == float("inf") or not value.numel():
        return False
    bound = abs(problem.pairs.scale) * query_norm * float(torch.linalg.vector_norm(key, dim=-1).amax())
    return bound < LARGEST_LSE / 2 and all_finite(value)
