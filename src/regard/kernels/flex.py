"""The flex kernel: FlexAttention, compiled, over the blocks that the mask leaves; for CUDA."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..backends.torch.flex_tiles import (
    BLOCK,
    MOST_NUMBERS,
    BiasTables,
    bias_parts,
    bias_reasons,
    compute_by_flex,
    differentiates,
    has_triton,
)
from ..biases.base import leaves
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs, at_least_float32
from ..tiles.mask_tiles import count_visited_pairs
from ..utils.pytree import tree_tensors
from .base import EVERY_GRADIENT, INPUT_GRADIENTS, Cost, Result
from .custom_op import apply_kernel, register
from .planning.self_check import SelfCheck, check_file
from .planning.unit_costs import CAP, MASK, OPERATOR, bytes_read, torch_flash_work
from .planning.unit_prices import price

CALLS = price("flex.calls")
LOOK_UP = price("flex.look_up")


class FlexKernel:
    """FlexAttention (Dong et al. 2024, arXiv 2412.05496) with the mask's tiles as blocks and the bias as score_mod.

    The blocks come from interval arithmetic, no pair is evaluated; pairs of partial blocks are masked by the mask's own
    formula over tables of positions, so that code which was compiled for one mask runs another of the same structure,
    and a bias by distance is a table with a number for each diagonal. Backward computes the forward pass once more, as
    FlexAttention has no public operator of its gradient alone.

    backend: of torch.compile; None for the unfused formula, which holds all weights in memory. devices: the types of
    devices that it admits.
    """

    name = "flex"

    def __init__(self, backend: str | None = "inductor", devices: tuple[str, ...] = ("cuda",)) -> None:
        self.backend, self.devices = backend, devices
        if (backend, devices) != ("inductor", ("cuda",)):
            self.name = f"flex({backend}, {'+'.join(devices)})"
        self.self_check = SelfCheck(self.run, check_file)
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """What FlexAttention has no form for, and the self-check's reason, where it disagreed."""
        device, tensors = problem.value.device.type, (problem.pairs.query, problem.pairs.key, problem.value)
        reasons = []
        if device not in self.devices:
            reasons.append(f"FlexAttention is compiled for {' and '.join(self.devices)} devices alone")
        elif device == "cuda" and self.backend == "inductor" and not has_triton():
            reasons.append("FlexAttention is compiled by Triton, which is not installed")
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("FlexAttention takes finished dot products; this score is additive")
        if problem.dropout is not None:
            reasons.append("FlexAttention drops no weights")
        if any(not tensor.numel() for tensor in tensors):
            reasons.append("FlexAttention takes no empty tensors")
        if problem.value.dtype == torch.float64 and self.backend == "inductor":
            reasons.append("FlexAttention's kernels have no float64")
        if any(tensor.numel() > MOST_NUMBERS for tensor in tree_tensors((problem.mask, problem.bias))):
            reasons.append(f"FlexAttention's kernels index no tensor of more than {MOST_NUMBERS:,} numbers")
        if problem.bias is not None:
            reasons += bias_reasons(problem.bias, problem)
        if not reasons and (reason := self.self_check.reason(problem)):
            reasons.append(reason)
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The pairs of all blocks that are not empty, and the lists of blocks in memory."""
        leading = problem.weights_shape[:-2].numel()
        blocks = -(-problem.queries // BLOCK) * -(-problem.keys // BLOCK)
        visited = count_visited_pairs(problem, (BLOCK, BLOCK)) / max(problem.batch.numel(), 1)
        parts = len(bias_parts(problem.bias))
        each = LOOK_UP * parts + CAP / MASK * (problem.softcap is not None)
        return Cost(
            flops=0.0,
            flash={"torch": torch_flash_work(problem, leading * visited, BLOCK)},
            bytes=16.0 * blocks * (problem.mask is not None),
            passes=each * leading * visited,
            moved=bytes_read(problem),
            calls=OPERATOR + CALLS,
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """All but those of a bias from a function, which may index a tensor twice."""
        return EVERY_GRADIENT if differentiates(problem.bias) else INPUT_GRADIENTS

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def agrees(self, problem: Problem) -> bool:
        """Whether results here agree with the reference, compared at the first use; fake tensors are not compared."""
        from torch._subclasses.fake_tensor import FakeTensor

        return isinstance(problem.value, FakeTensor) or self.self_check.passes(problem)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        pairs = cast(DotPairs, batched.pairs)
        return compute_by_flex(
            (pairs.query, pairs.key, batched.value), BiasTables(batched), batched.problem.bias, self.backend
        )

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem, by autograd through the forward pass.

        The saved log-sum-exp may have a sink, and be infinite where a row takes no part: with r = exp(lse of the keys
        alone - saved lse), the share of the keys, the row is r times that without the sink.
        """
        pairs, bias = cast(DotPairs, batched.pairs), batched.problem.bias
        inputs = [tensor.detach().requires_grad_() for tensor in (pairs.query, pairs.key, batched.value)]
        parameters: list[Tensor] = []
        if bias is not None and saved.needs_bias_grad:
            parameters = leaves(bias, list(bias.parameters()))
            bias = bias.with_parameters(parameters)
        tables = BiasTables(batched)
        with torch.enable_grad():
            output, lse = compute_by_flex((inputs[0], inputs[1], inputs[2]), tables, bias, self.backend)
        share = (lse.detach() - saved.lse).exp()
        along = (at_least_float32(saved.grad_output) * at_least_float32(output.detach())).sum(-1)
        upstream = (
            (saved.grad_output * share.unsqueeze(-1)).to(output.dtype),
            (share * (along * (1 - share) + saved.grad_lse)).to(lse.dtype),
        )
        query, key, value, *into_tables = torch.autograd.grad((output, lse), [*inputs, *tables.leaves], upstream)
        return ProblemGradients(query, key, value, bias=tables.gradients(into_tables, parameters))
