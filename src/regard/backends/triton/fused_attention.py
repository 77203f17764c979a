"""The group `flash` of the backend in Triton: attention over the tiles of a mask, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...biases import RelativeBias
from ...biases.base import TensorBias
from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.finite import CheckedRows
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...normalizers import Sigmoid
from ...tiles.mask_tiles import distinct_matrices, sampled_layouts
from ...tiles.row_spans import has_spans
from ...tiles.tile_bits import MIN_FULL_RUN, TILE_SIZE, masked_pairs

MAX_DIM = 256
"""The largest head dim with gradients: a tile of rows and one of keys have to fit into shared memory, and their sums
into registers."""
WIDEST_KEY, WIDEST_VALUE = 576, 512
"""The largest head dims without: those of latent attention, whose queries attend to the latents themselves."""
MAX_BITS = 2**31
"""Masked pairs for which bits are kept: 256 MiB of them."""
MAX_BIAS = 2**24
"""Numbers that a bias other than a tensor, or one by distance, is evaluated to: 64 MiB."""


class FlashInTriton:
    """Attention over tiles in Triton, without waiting for the device.

    What the caller need not do, and so need not read back:

    - Results need no check. NaN and infinity reach the rows that attend to them, forward, and no others. Backward,
      numbers of the output that are not finite have gradient 0, and rows whose log-sum-exp is not finite take no part;
      gradients are NaN only where `grad_output` or `grad_lse` is. Results are `CheckedRows`, gradients `checked`.
    - Rows have exact weights whatever their log-sum-exp, -inf too: one that float32 rounds by too much is computed
      again from the scores, with the sinks of the problem, as a sum of two numbers. One of more keys than the problem
      has, as of a ring, is taken as it is.
    - `grad_lse` is always read: whether it is 0 makes no difference.

    Gradients have the dtypes of their tensors, or float32 where a tensor is broadcast over batches.
    """

    normalizers: tuple[type[Normalizer], ...] = (Sigmoid,)

    def why_not(self, problem: Problem) -> list[str]:
        """Large head dims, masks of too many bits, and biases that would be too large a tensor."""
        reasons = []
        dims = problem.pairs.query.shape[-1], problem.value.shape[-1]
        if min(dims) < 1 or dims[0] > WIDEST_KEY or dims[1] > WIDEST_VALUE:
            reasons.append(
                f"its code takes head dims from 1 to {WIDEST_KEY} of keys and {WIDEST_VALUE} of values; these are "
                f"{dims[0]} and {dims[1]}"
            )
        elif max(dims) > MAX_DIM and problem.requires_grad():
            reasons.append(
                f"its code has gradients for head dims up to {MAX_DIM}; these are {dims[0]} and {dims[1]}, and a "
                "tensor requires a gradient"
            )
        if problem.mask is not None and not has_spans(problem.mask, problem):
            pairs = masked_pairs(problem)
            if pairs > MAX_BITS:
                reasons.append(f"the mask cuts tiles of {pairs:,} pairs, each of which would be kept as a bit")
        bias = problem.bias
        by_distance = isinstance(bias, RelativeBias) and problem.shift is not None
        if bias is not None and not by_distance and not isinstance(bias, TensorBias):
            numbers = distinct_matrices(problem)[1] * problem.queries * problem.keys
            if numbers > MAX_BIAS:
                reasons.append(
                    f"the bias has up to {numbers:,} numbers over pairs; of those that are neither a tensor nor by "
                    f"distance its code evaluates up to {MAX_BIAS:,}"
                )
        return reasons

    def forward(self, batched: BatchedProblem) -> CheckedRows:
        """Output and log-sum-exp."""
        output, lse = batched.empty_results()
        self.forward_into(batched, output, lse, accumulate=False)
        return CheckedRows((output, lse))

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of query, key and value, and of bias and normalizer where `saved` asks for it."""
        problem, pairs = batched.problem, batched.pairs
        whole = batched.batch.indices(problem.batch.numel()) == (0, problem.batch.numel(), 1)

        def new(own: Tensor, given: Tensor) -> Tensor:
            """Of a tensor that is broadcast over batches, the gradients are yet to be summed up."""
            dtype = own.dtype if whole and own.numel() == given.numel() else torch.float32
            return own.new_empty(own.shape, dtype=dtype)

        gradients = ProblemGradients(
            new(pairs.query, problem.pairs.query),
            new(pairs.key, problem.pairs.key),
            new(batched.value, problem.value),
            bias=batched.zero_bias_gradients() if saved.needs_bias_grad else (),
            checked=True,
            normalizer=batched.zero_normalizer_gradients() if saved.needs_normalizer_grad else (),
        )
        self.backward_into(batched, saved, gradients, accumulate=False)
        return gradients

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write into output and log-sum-exp, or merge with those of other keys that stand there."""
        from .flash_launches import FlashLaunches  # imports Triton, which a process without CUDA need not load

        with torch.cuda.device_of(batched.value):
            FlashLaunches(batched).forward(output, lse, merge=accumulate)
        return True

    def backward_into(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients, *, accumulate: bool) -> bool:
        """Write the gradients, or add them to those that stand there; of bias and normalizer, always add."""
        from .flash_launches import FlashLaunches

        # A repair writes again what another launch has written: adding comes after both.
        others = {"bias": into.bias, "normalizer": into.normalizer}
        written = replace(batched.new_gradients(zero=False), **others) if accumulate else into
        with torch.cuda.device_of(batched.value):
            FlashLaunches(batched).backward(saved, written)
            if accumulate:
                into.query.add_(written.query)
                into.key.add_(written.key)
                into.value.add_(written.value)
        return True

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs of the tiles that are not empty, over batches and heads."""
        share, found = sampled_layouts(problem, TILE_SIZE, MIN_FULL_RUN)
        heads = problem.weights_shape[-3] if problem.heads else 1
        pairs = sum((part.batch.stop - part.batch.start) * part.layout.visited_pairs for part in found)
        return share * heads * pairs
