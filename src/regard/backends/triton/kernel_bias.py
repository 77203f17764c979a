"""The bias of a problem as kernels get it: a line by distance, or a tensor over pairs; and the gradient of either."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...biases import RelativeBias
from ...core.batched_problem import BatchedProblem
from ...tiles.diagonals import bias_along, distances
from .jit_runtime import DTYPES
from .kernel_arguments import LOG2E, BiasArgument, pair_strides

PADDING = 128
"""Numbers at both ends of a line: no tile has more rows or columns."""


class KernelBias:
    """The bias of a batched problem, and its gradient.

    The middle of a line is where 16 bytes begin, whatever the number of queries: else kernels would be compiled twice.
    """

    def __init__(self, batched: BatchedProblem) -> None:
        self.batched, self.problem = batched, batched.problem
        _, _, self.queries, self.keys = batched.shape

    @cached_property
    def argument(self) -> BiasArgument:
        """The bias, without its gradient."""
        bias = self.problem.bias
        if bias is None or not self.queries or not self.keys:
            return BiasArgument()
        if isinstance(bias, RelativeBias) and self.problem.shift is not None:
            line = bias_along(self.problem, bias).detach().float()
            left, right = PADDING + (1 - self.queries) % 4, PADDING + (1 - self.keys) % 4
            padded = pad(line * LOG2E, (left, right))
            return BiasArgument(padded[:, left + self.queries - 1 :], padded.shape[1] if len(line) > 1 else 0)
        pairs = self.batched.bias()
        if pairs is None:
            return BiasArgument()
        pairs = pairs.detach() if pairs.dtype in DTYPES else pairs.detach().float()
        return BiasArgument(pairs=pairs, pairs_strides=pair_strides(pairs))

    def zero_gradient(self) -> Tensor | None:
        """Zeros in the shape of the line or of the pairs, to add the gradient to; None where there is no bias."""
        line, pairs = self.argument.line, self.argument.pairs
        if pairs is not None:
            return torch.zeros(pairs.shape, dtype=torch.float32, device=pairs.device)
        if line is None:
            return None
        length, left = self.queries + self.keys - 1, (1 - self.queries) % 4
        padded = torch.zeros(len(line), -(-(left + length) // 4) * 4, dtype=torch.float32, device=line.device)
        return padded[:, left : left + length]

    def with_gradient(self, gradient: Tensor | None) -> BiasArgument:
        """The bias with what its gradient is added to."""
        if gradient is None:
            return self.argument
        if self.argument.line is not None:
            head = gradient.stride(0) if len(gradient) > 1 else 0
            return self.argument._replace(line_gradient=gradient[:, self.queries - 1 :], line_gradient_head=head)
        return self.argument._replace(pairs_gradient=gradient, pairs_gradient_strides=pair_strides(gradient))

    def add_gradient(self, gradient: Tensor, into: tuple[Tensor, ...]) -> None:
        """Add the gradient of line or pairs to those of the parameters of the bias."""
        bias = self.problem.bias
        if self.argument.line is not None and isinstance(bias, RelativeBias):
            bias.accumulate_at(distances(self.problem), gradient, into)
        elif bias is not None:
            bias.accumulate(self.batched.grid, self._in_own_axes(gradient), into)

    def _in_own_axes(self, pairs: Tensor) -> Tensor:
        """Numbers (B or 1, H or 1, M or 1, N or 1) in the axes of the problem, without batch where that is 1."""
        batches = self.problem.batch.numel()
        if len(pairs) == 1:
            pairs = pairs[0]
        else:
            if len(pairs) < batches:  # some of the batches of the problem
                own, pairs = pairs, pairs.new_zeros(batches, *pairs.shape[1:])
                pairs[self.batched.batch] = own
            pairs = self.batched.split_batch(pairs)
        return pairs if self.problem.heads else pairs.squeeze(-3)
