"""Keys and values of the encoder output, projected once for all decoding steps of a cross-attention layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .base import check_rows


@dataclass(frozen=True, eq=False)
class ProjectedMemory:
    """Keys and values of a memory, as `Attention.project_memory` returns them; layers accept it in place of the memory.

    Shapes: keys (batch, key heads, N, ·), values (batch, key heads, N, value dim), positions (N,) or (batch, N), or
    None where they are 0..N-1.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[2]

    def __bool__(self) -> bool:
        return True  # so that a memory of length 0 is not mistaken for None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def reorder(self, rows: Tensor) -> ProjectedMemory:
        """The memory for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows that are not integers in 0..batch-1, or bool for each row of the batch.
        """
        check_rows(rows, self.values.shape[0])
        positions = self.positions
        if positions is not None and positions.ndim == 2 and len(positions) > 1:
            positions = positions[rows]
        return replace(self, keys=self.keys[rows], values=self.values[rows], positions=positions)
