"""What the scores of a row have beside products: numbers added to them, which pairs exist, and a sink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError
from .landmark_blocks import LandmarkBlocks


@dataclass(eq=False, slots=True)  # never changed, but not frozen: small calls would feel what that takes
class PairTerms:
    """A bias over pairs or by distance, of which at most one is there, a mask over pairs, and sinks.

    Shapes: bias (B or 1, H or 1, M or 1, N) float32; along (H or 1, M + N - 1) float32, number j - i + M - 1 of which
    is added to the score of pair (i, j); keep (B or 1, H or 1, M or 1, N) bool, False where there is no pair. Last axes
    are contiguous: `for_weights` sees to it. landmarks: the blocks of landmark attention, which has no bias beside.
    sinks: (H,) float32, contiguous, one more score in each row of a head, without a value; of softmax alone.
    """

    bias: Tensor | None
    along: Tensor | None
    keep: Tensor | None
    landmarks: LandmarkBlocks | None = None
    sinks: Tensor | None = None

    @classmethod
    def for_weights(
        cls,
        shape: tuple[int, int, int, int],
        bias: Tensor | None,
        along: Tensor | None,
        keep: Tensor | None,
        landmarks: LandmarkBlocks | None = None,
    ) -> PairTerms:
        """Terms of weights of this shape, (B, H, M, N), checked; bias and keep may have 1 as their last axis too.

        Raises:
            ShapeError: a tensor is of another shape or dtype.
        """
        if along is not None:
            wanted = shape[1], shape[2] + shape[3] - 1
            if along.dtype is not torch.float32 or along.shape[0] not in (1, shape[1]) or along.shape[1:] != wanted[1:]:
                raise ShapeError(
                    f"along is {along.dtype} {tuple(along.shape)}; it needs torch.float32 {wanted}, or 1 in place of "
                    "the heads"
                )
            along = along.contiguous()
        bias = None if bias is None else _over_pairs("bias", bias, torch.float32, shape)
        keep = None if keep is None else _over_pairs("keep", keep, torch.bool, shape)
        return cls(bias, along, keep, landmarks)

    @classmethod
    def over_pairs(cls, bias: Tensor, keys: int, keep: Tensor | None) -> PairTerms:
        """A bias that broadcasts to the weights, as is known, of any dtype, beside a mask of other terms."""
        if bias.dtype is not torch.float32:
            bias = bias.float()
        while bias.ndim < 4:
            bias = bias.unsqueeze(0)
        if bias.shape[3] != keys:
            bias = bias.expand(*bias.shape[:3], keys)
        if bias.stride(3) != 1 < keys:
            bias = bias.contiguous()
        return cls(bias, None, keep)

    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [tensor for tensor in (self.bias, self.along, self.keep, self.sinks) if tensor is not None]

    @classmethod
    def with_sinks(cls, terms: PairTerms | None, sinks: Tensor) -> PairTerms:
        """These terms, or none, and sinks (H,) of any dtype."""
        if sinks.dtype is not torch.float32 or not sinks.is_contiguous():
            sinks = sinks.detach().float().contiguous()
        if terms is None:
            return cls(None, None, None, None, sinks)
        return cls(terms.bias, terms.along, terms.keep, terms.landmarks, sinks)

    @classmethod
    def with_line(cls, terms: PairTerms | None, line: Tensor) -> PairTerms:
        """The pairs of these terms, or all, and a bias by distance (H or 1, M + N - 1) of any dtype."""
        line = line.detach() if line.requires_grad else line
        if line.dtype is not torch.float32 or not line.is_contiguous():
            line = line.float().contiguous()
        return cls(None, line, None if terms is None else terms.keep)

    @property
    def bias_by_batch(self) -> bool:
        """Whether the bias differs between batches."""
        return self.bias is not None and self.bias.shape[0] > 1


def _over_pairs(name: str, pairs: Tensor, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Tensor:
    """A tensor over pairs with a contiguous last axis of N."""
    if (
        pairs.dtype is not dtype
        or pairs.ndim != 4
        or any(size not in (1, whole) for size, whole in zip(pairs.shape, shape, strict=True))
    ):
        raise ShapeError(
            f"{name} is {pairs.dtype} {tuple(pairs.shape)}; it needs {dtype} {shape}, or 1 in place of any of the axes"
        )
    if pairs.shape[3] != shape[3]:
        pairs = pairs.expand(*pairs.shape[:3], shape[3])
    return pairs if pairs.stride(3) == 1 or pairs.shape[3] == 1 else pairs.contiguous()
