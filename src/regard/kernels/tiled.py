"""The tiled kernel: any problem in plain torch, in memory linear in the lengths."""

from __future__ import annotations

from torch import Tensor

from ..backends.torch.ordered_rows import OrderedRowAttention
from ..backends.torch.row_loop import RowAttention
from ..backends.torch.tile_loop import TiledAttention
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.normalizer import OrderedNormalizer
from ..core.problem import Problem
from ..tiles.tile_size import scores_per_tile
from .base import EVERY_GRADIENT, Cost, Result
from .custom_op import apply_kernel, register
from .one_tile import StoredTile, prepared_tile
from .planning.unit_costs import add_feature_cost, tilewise_cost
from .planning.unit_prices import price

TORCH_FEATURE = price("tiled.torch_feature")


class TiledKernel:
    """Tiles or whole rows in torch, for any mask, bias, softcap, sinks, dropout, dims, pair form and normalizer.

    Quotients, as of softmax, by tiles with a running sum; other normalizers by a few whole rows at a time, in their
    order where each follows from the one before.

    tile: the number of scores in a tile; by default that of the device.
    """

    def __init__(self, tile: int | None = None) -> None:
        self.name = "tiled" if tile is None else f"tiled({tile})"
        self._tile = tile
        register(self, exact_lse=True)

    def why_not(self, problem: Problem) -> list[str]:
        """Normalizers whose rows depend on one another; it computes every other problem."""
        normalizer = problem.normalizer
        if normalizer is not None and normalizer.rows_before is None and not isinstance(normalizer, OrderedNormalizer):
            return [f"it computes some rows at a time, and those of {problem.normalizer_name} attention depend on all"]
        return []

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs."""
        return add_feature_cost(tilewise_cost(problem, self._scores(problem.value)), problem, TORCH_FEATURE)

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def prepare_call(self, problem: Problem) -> StoredTile | None:
        """What computes a problem and all of its kind, where its pairs are one tile; None where they are not."""
        return prepared_tile(problem, self.name)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem, or what its normalizer says of each row."""
        return self._computation(batched).forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return self._computation(batched).backward(batched, saved)

    def _computation(self, batched: BatchedProblem) -> TiledAttention | RowAttention | OrderedRowAttention:
        tile = self._scores(batched.value)
        if batched.problem.has_lse:
            return TiledAttention(tile)
        ordered = isinstance(batched.problem.normalizer, OrderedNormalizer)
        return OrderedRowAttention(tile) if ordered else RowAttention(tile)

    def _scores(self, value: Tensor) -> int:
        """The number of scores in a tile."""
        return scores_per_tile(value.device) if self._tile is None else self._tile
