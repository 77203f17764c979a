"""What self-attention layers share that compute with heads of their own: the calls, positions, rotation and options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, Unpack

import torch
from torch import Tensor, nn

from ..biases import Bias
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..masks import Mask, as_mask
from ..positions import Rotary, Rotation
from .attention_layer import CallKwargs
from .caches import Cache
from .input_checks import check_positions
from .layer_arguments import BiasModule, check_no_rotation, checked_rotary, combine_biases, combine_masks
from .projections import Projections

HeadTensors = TypeVar("HeadTensors")
Seen = TypeVar("Seen")
History = TypeVar("History", bound=Cache)


class SelfAttentionLayer(nn.Module, ABC, Generic[HeadTensors, Seen, History]):
    """Base class of self-attention layers of one sequence: projections, a mask, a bias, a rotary embedding and a cache.

    A subclass computes what its heads read, of whole sequences and of the next tokens after a cache, and the output.
    """

    def __init__(
        self, projections: Projections, mask: Mask | None, bias: Bias | Tensor | None, rotary: Rotary | None
    ) -> None:
        super().__init__()
        self.projections = projections
        self.mask = None if mask is None else as_mask(mask)
        self.bias = None if bias is None else BiasModule(bias)
        self.rotary = checked_rotary(rotary, projections.head_dim)

    def forward(
        self,
        query: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Self-attention of a sequence: (batch, length, dim) to (batch, length, dim).

        mask and bias are combined with the layer's own; positions, (length,) or (batch, length), are 0, 1, ... by
        default; rotation: as in `Attention.forward`.
        """
        call: CallKwargs = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        return self._attend(query, *self._sequence_inputs(query, call))

    def observe(self, query: Tensor, *lenses: Lens, **call: Unpack[CallKwargs]) -> Seen:
        """`forward` with lenses on the weights: `seen.output`, `seen[lens]`."""
        return self._observe(query, *self._sequence_inputs(query, call), lenses)

    def step(
        self,
        query: Tensor,
        cache: History,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, History]:
        """One decoding step: attention of the next M tokens to themselves and the cached ones, and the extended cache.

        Under a causal mask steps of any size equal `forward` on the whole sequence. Arguments are those of `forward`,
        of the M tokens; positions are those that follow the cache's by default.
        """
        call: CallKwargs = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options, cache = self._step_inputs(query, cache, call)
        return self._attend(query, heads, options), cache.evict()

    def observe_step(
        self, query: Tensor, cache: History, *lenses: Lens, **call: Unpack[CallKwargs]
    ) -> tuple[Seen, History]:
        """`step` with lenses on the weights, whose columns are the keys in the cache."""
        heads, options, cache = self._step_inputs(query, cache, call)
        return self._observe(query, heads, options, lenses), cache.evict()

    def _sequence_inputs(self, query: Tensor, call: CallKwargs) -> tuple[HeadTensors, AttentionOptions]:
        """What the heads of a whole sequence read, and the options of attention."""
        positions = call.get("positions")
        if positions is not None:
            check_positions("positions", positions, query.shape[0], query.shape[1])
        projected = self._projected(query, positions, call.get("rotation"))
        return self._heads(query, call, *projected), self._options(call, positions, positions)

    def _new_positions(self, query: Tensor, cache: Cache, call: CallKwargs) -> Tensor:
        """The positions of the next tokens: those of the call, or those that follow the cache's."""
        given = call.get("positions")
        new = cache.next_positions(query.shape[1], query.device) if given is None else given
        check_positions("positions", new, query.shape[0], query.shape[1])
        return new

    def _projected(
        self, query: Tensor, positions: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, the first two rotated."""
        queries, (keys, values) = self.projections.queries(query), self.projections.keys_and_values(query)
        if self.rotary is None:
            check_no_rotation(rotation)
            return queries, keys, values
        if rotation is None:
            at = torch.arange(query.shape[1], device=query.device) if positions is None else positions
            rotation = self.rotary.rotation(at, dtype=torch.promote_types(queries.dtype, torch.float32))
        return rotation.rotate(queries), rotation.rotate(keys), values

    def _options(
        self, call: CallKwargs, query_positions: Tensor | None, key_positions: Tensor | range | None
    ) -> AttentionOptions:
        return {
            "mask": combine_masks(self.mask, call.get("mask")),
            "bias": combine_biases(self.bias, call.get("bias")),
            "query_positions": query_positions,
            "key_positions": key_positions,
        }

    @abstractmethod
    def make_cache(self, max_length: int | None = None) -> History:
        """An empty cache for decoding."""

    @abstractmethod
    def _heads(self, query: Tensor, call: CallKwargs, queries: Tensor, keys: Tensor, values: Tensor) -> HeadTensors:
        """What the heads read, of the tokens of a whole sequence and their projections."""

    @abstractmethod
    def _step_inputs(
        self, query: Tensor, cache: History, call: CallKwargs
    ) -> tuple[HeadTensors, AttentionOptions, History]:
        """What the heads of the tokens after a cache read, the options of attention, and the cache extended by them."""

    @abstractmethod
    def _attend(self, query: Tensor, heads: HeadTensors, options: AttentionOptions) -> Tensor:
        """The layer's output for its tokens."""

    @abstractmethod
    def _observe(self, query: Tensor, heads: HeadTensors, options: AttentionOptions, lenses: Sequence[Lens]) -> Seen:
        """The same with lenses."""
