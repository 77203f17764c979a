"""Settings of layers whose positions are learned vectors or reflections, in place of a rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from ...masks import Mask
from ...nn import PathAttention, Projections, Reflections, RelativeAttention


@dataclass(frozen=True)
class PathPositionsConfig:
    """`regard.nn.PathAttention`: each token reflects what is before it.

    - `rank`: of the map from tokens to directions; None for a matrix that is no product.
    - `width`: tokens that the convolution of directions reads; 1 for none.
    """

    rank: int | None = 32
    width: int = 3

    def make(self, projections: Projections, mask: Mask, *, forget_gate: bool, dropout: float) -> PathAttention:
        """Build the attention of one layer."""
        reflections = Reflections(projections, rank=self.rank, width=self.width)
        return PathAttention(projections, reflections=reflections, forget_gate=forget_gate, mask=mask, dropout=dropout)


@dataclass(frozen=True)
class RelativePositionsConfig:
    """`regard.nn.RelativeAttention`: a learned vector for each distance, added to keys and values.

    - `before`: the distance from which on tokens share a vector.
    - `values`: whether values have vectors too.
    - `shared`: whether all heads have the same vectors.
    """

    before: int = 16
    values: bool = True
    shared: bool = True

    def make(self, projections: Projections, mask: Mask, *, dropout: float) -> RelativeAttention:
        """Build the attention of one layer."""
        return RelativeAttention(
            projections,
            before=self.before,
            after=0,
            values=self.values,
            shared=self.shared,
            mask=mask,
            dropout=dropout,
        )


LayerPositions = PathPositionsConfig | RelativePositionsConfig
