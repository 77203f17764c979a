"""The flash kernel: attention over the tiles with unmasked pairs in one pass, forward and backward."""

from __future__ import annotations

from torch import Tensor

from ..backends.base import FlashTiles
from ..backends.registry import BACKENDS, is_nan_safe, reasons_against
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..tiles.key_lists import chosen_keys
from ..tiles.mask_tiles import distinct_matrices, sampled_layouts
from ..tiles.tile_bits import MIN_FULL_RUN, TILE_SIZE
from .base import EVERY_GRADIENT, Cost, FlashWork, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import MASK, OPERATOR, RESULT, bytes_read, evaluated, total_width
from .planning.unit_prices import price

EXTRA = price("flash.extra")
BIAS_CALLS = price("flash.bias_calls")


class FlashKernel:
    """Flash attention (Dao et al. 2022, arXiv 2205.14135): one pass over the tiles, no weights in memory."""

    name = "cpu_flash"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores that are no dot products, and what no backend computes over tiles."""
        reasons = []
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("its code computes dot products; this score is additive")
        reasons += reasons_against([each for each in BACKENDS if each.flash is not None], problem.value)
        if reasons:
            return reasons
        backend, tiles = _maker(problem.value)
        if problem.normalizer is not None and type(problem.normalizer) not in tiles.normalizers:
            return [f"the backend {backend} computes no {problem.normalizer_name} attention over tiles"]
        return tiles.why_not(problem)

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs."""
        share, found = sampled_layouts(problem, TILE_SIZE, MIN_FULL_RUN)
        backend, tiles = _maker(problem.value)
        pairs = tiles.visited_pairs(problem)
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        rows = min(problem.queries, 4 * TILE_SIZE[0])
        width = total_width(problem)
        masked, masks = share * sum(part.layout.masked_pairs for part in found), distinct_matrices(problem)[0]
        # Of lists, which are others in each call, nothing is memoized: their pairs are evaluated for the bits of tiles.
        bits = MASK * masked * masks if chosen_keys(problem.mask) is not None else 0.0
        extras = 2 * (problem.softcap is not None) + (problem.dropout is not None) + (problem.bias is not None)
        return Cost(
            flops=0.0,
            flash={backend: FlashWork(2.0 * pairs * width, pairs, packed=pairs / max(rows, 1) * width)},
            bytes=masked / 8 * max(masks, 1),
            passes=EXTRA * extras * pairs + RESULT * numbers + evaluated(problem, bits),
            moved=bytes_read(problem),
            calls=OPERATOR + BIAS_CALLS * (problem.bias is not None),
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes a problem is."""
        return is_nan_safe(_maker(problem.value)[0])

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        return _maker(batched.value)[1].forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return _maker(batched.value)[1].backward(batched, saved)

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write the result of a batched problem, or merge it with that of other keys, which stands there."""
        return _maker(batched.value)[1].forward_into(batched, output, lse, accumulate=accumulate)

    def backward_into(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients, *, accumulate: bool) -> bool:
        """Write the gradients of a batched problem, or add them to those that stand there; of the bias, always add."""
        return _maker(batched.value)[1].backward_into(batched, saved, into, accumulate=accumulate)


def _maker(value: Tensor) -> tuple[str, FlashTiles]:
    """Who computes tensors of this device and dtype over tiles: the backend's name and its methods."""
    return next((each.name, each.flash) for each in BACKENDS if each.flash is not None and each.runs(value))
