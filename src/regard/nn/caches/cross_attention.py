"""Another sequence as a layer of cross-attention sees it, projected once for all steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .kv_cache import check_rows


@dataclass(frozen=True, eq=False)
class MemoryCache:
    """Keys and values of a memory, made by `Attention.remember`; a layer takes it in the place of the memory itself.

    Shapes: keys (batch, key heads, N, ·), values (batch, key heads, N, value dim), positions (N,) or (batch, N), or
    None where they are 0..N-1.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[2]

    def __bool__(self) -> bool:
        return True  # a memory without positions is a memory

    @property
    def nbytes(self) -> int:
        """The memory that keys and values take."""
        return self.keys.nbytes + self.values.nbytes

    def select(self, rows: Tensor) -> MemoryCache:
        """The memory of these rows of the batch, in this order; a row may come more than once.

        Raises:
            ShapeError, DtypeError: rows that are not whole numbers in 0..batch-1, or bool for each of the batch.
        """
        check_rows(rows, self.values.shape[0])
        positions = self.positions
        if positions is not None and positions.ndim == 2 and len(positions) > 1:
            positions = positions[rows]
        return replace(self, keys=self.keys[rows], values=self.values[rows], positions=positions)
