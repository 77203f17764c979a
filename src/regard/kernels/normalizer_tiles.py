"""The kernels of a backend's own code for other normalizers than softmax, over the tiles that a mask leaves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..backends.base import NormalizerTiles
from ..backends.registry import BACKENDS, is_nan_safe, reasons_against
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from .base import EVERY_GRADIENT, Cost, FlashWork, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import OPERATOR, RESULT, bytes_read


class NormalizerTilesKernel:
    """Attention with a normalizer that a backend has code for, tile by tile: no weights are in memory.

    name: that of the kernel, and of the code in `Backend.normalizer_tiles`. work: what so many visited pairs take.
    passes: over the tiles, each of which begins anew.
    """

    def __init__(self, name: str, work: Callable[[Problem, float], FlashWork], passes: int) -> None:
        self.name, self._work, self._passes = name, work, passes
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores that are no dot products, and what no backend has such code for."""
        if not isinstance(problem.pairs, DotPairs):
            return ["its code computes dot products; this score is additive"]
        reasons = reasons_against([each for each in BACKENDS if self.name in each.normalizer_tiles], problem.value)
        return reasons or self._maker(problem.value)[1].why_not(problem)

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs."""
        backend, tiles = self._maker(problem.value)
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        return Cost(
            flops=0.0,
            flash={backend: self._work(problem, tiles.visited_pairs(problem))},
            bytes=0.0,
            passes=RESULT * numbers,
            moved=bytes_read(problem),
            calls=self._passes * OPERATOR,
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes a problem is."""
        return is_nan_safe(self._maker(problem.value)[0])

    def run(self, problem: Problem) -> Result:
        """Output, and the normalizer's numbers of rows."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output, and the normalizer's numbers of rows, of a batched problem."""
        return self._maker(batched.value)[1].forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return self._maker(batched.value)[1].backward(batched, saved)

    def _maker(self, value: Tensor) -> tuple[str, NormalizerTiles]:
        """Who has such code for tensors of this device and dtype: the backend's name and its methods."""
        makers = (each for each in BACKENDS if self.name in each.normalizer_tiles and each.runs(value))
        return next((each.name, each.normalizer_tiles[self.name]) for each in makers)


def _one_product(problem: Problem, pairs: float) -> FlashWork:
    """One product of each pair; what follows is less, as few keys have weight."""
    return FlashWork(2.0 * pairs * problem.pairs.query.shape[-1], pairs)


def _scores_twice(problem: Problem, pairs: float) -> FlashWork:
    """Scores twice and outputs once for each pair, and three mixtures of the heads."""
    heads = problem.pairs.query.shape[-3] if problem.heads else 1
    width = 2 * problem.pairs.query.shape[-1] + problem.value.shape[-1] + 3 * heads
    return FlashWork(2.0 * pairs * width, 2.0 * pairs)


THRESHOLD = NormalizerTilesKernel("threshold", _one_product, passes=1)
"""Sparsemax and entmax: a threshold of some of the keys is at most that of all of them.

So in C keys below it are left out at once; output and gradients are sums over the few keys above. Backward these are
found again, and nothing is stored but the thresholds. Where nearly all keys have weight, it takes up to twice the time
of softmax. That is the code of sparsemax and entmax-1.5. In Triton, with any α, tiles are swept until the thresholds
stand: no list of keys is kept."""

MIXED_HEADS = NormalizerTilesKernel("mixed_heads", _scores_twice, passes=4)
"""Talking heads: all heads of a tile are mixed while it is in a core's cache. Two passes over the tiles, and two more
backward: `normalizers.TalkingHeads` says why."""
