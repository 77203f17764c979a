"""The state of causal linear attention: what decoding continues from, of constant size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ShapeError


@dataclass(frozen=True, eq=False)
class LinearState:
    """S = Σ_j e^{decay} φ(k_j) v_jᵀ and, where weights are normalised, z = Σ_j e^{decay} φ(k_j): an immutable value.

    Shapes: sums (..., key heads, D, Dv), with z as one more column where `normalized`; log_scale
    (..., key heads, 1, 1).

    Args:
        sums: S, and z beside it.
        normalized: whether there is a z.
        log_scale: S and z are e^log_scale times what `sums` has, for feature maps that are stabilised by a maximum.

    >>> LinearState.from_parts(torch.zeros(2, 3, 5), torch.ones(2, 3)).total
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """

    sums: Tensor
    normalized: bool = False
    log_scale: Tensor | None = None

    @classmethod
    def from_parts(cls, matrix: Tensor, total: Tensor | None = None) -> LinearState:
        """The state of a matrix (..., key heads, D, Dv) and, where weights are normalised, a total (..., key heads, D).

        Raises:
            ShapeError: they do not fit.
        """
        if matrix.ndim < 2 or (total is not None and total.shape != matrix.shape[:-1]):
            has = "" if total is None else f", total {tuple(total.shape)}"
            raise ShapeError(
                f"matrix has the shape {tuple(matrix.shape)}{has}; a state needs a matrix (..., key heads, D, Dv) and "
                "a total (..., key heads, D)"
            )
        sums = matrix if total is None else torch.cat([matrix, total.unsqueeze(-1)], -1)
        return cls(sums, normalized=total is not None)

    @property
    def matrix(self) -> Tensor:
        """S: (..., key heads, D, Dv)."""
        return self.sums[..., :-1] if self.normalized else self.sums

    @property
    def total(self) -> Tensor | None:
        """z: (..., key heads, D); None where weights are not normalised."""
        return self.sums[..., -1] if self.normalized else None

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.sums.nbytes

    def reorder(self, rows: Tensor) -> LinearState:
        """The state for these rows of the first axis, in this order; rows may repeat, as in beam search."""
        scale = None if self.log_scale is None else self.log_scale[rows]
        return replace(self, sums=self.sums[rows], log_scale=scale)
