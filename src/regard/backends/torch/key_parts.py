"""Few queries over many keys by torch's dense kernel: equal parts of the keys as heads, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...core.log_sum_exp import RunningMerge, lse_dtype, merge_softmax
from .dense_block import Rectangle

PART = 1024
"""The keys of a part: two parts fit into a core's own cache."""
LARGEST_MERGED = 2.0**10
"""The largest log-sum-exp by which parts are merged: float32 rounds it by 2^-14, and so the share of each part."""


class KeyParts:
    """Flash decoding: equal parts of `part` keys at once, as heads of one call, and what is left as one more."""

    fused = False
    most_rows = 64
    """Products of more are large enough by themselves."""

    def __init__(self, part: int = PART) -> None:
        self.part = part

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        added: Tensor | None = None,
        limits: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output (B, Hk, R, Dv) and log-sum-exp (B, Hk, R); limits are in `added` here."""
        rectangle, merged, keys = Rectangle(query, key, value, scale, added), RunningMerge(), key.shape[2]
        if parts := keys // self.part:
            merged.add(*_parts_as_heads(rectangle.columns(slice(0, parts * self.part)), parts))
        if keys % self.part:
            merged.add(*rectangle.columns(slice(parts * self.part, keys)).forward())
        output = value.new_empty(*query.shape[:3], value.shape[-1])
        lse = value.new_empty(query.shape[:3], dtype=lse_dtype(value))
        merged.write(output, lse)
        # Elsewhere than on the CPU no value is read back.
        if keys > self.part and lse.is_cpu and (lse.isfinite() & (lse.abs() > LARGEST_MERGED)).any():
            return rectangle.forward()
        return output, lse

    def prepare_step(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """None: the calls of torch's operators take longer than what is known of them."""


def _parts_as_heads(rectangle: Rectangle, parts: int) -> tuple[Tensor, Tensor]:
    """Compute equal parts of the keys as separate heads, and merge them by their log-sum-exps."""
    batch, heads, rows = rectangle.query.shape[:3]

    def split(tensor: Tensor, axis: int) -> Tensor:
        return tensor.unflatten(axis, (parts, -1)).movedim(axis, 2).flatten(1, 2)

    added = rectangle.added
    if added is not None:
        added = split(added.expand(-1, heads, -1, -1), 3)
    output, lse = replace(
        rectangle,
        query=rectangle.query.unsqueeze(2).expand(-1, -1, parts, -1, -1).flatten(1, 2),
        key=split(rectangle.key, 2),
        value=split(rectangle.value, 2),
        added=added,
    ).forward()
    if parts == 1:
        return output, lse
    output = output.reshape(batch, heads, parts, rows, output.shape[-1])
    return merge_softmax(output, lse.reshape(batch, heads, parts, rows), dim=2)
