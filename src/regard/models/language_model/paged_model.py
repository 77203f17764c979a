"""A language model that reads the next tokens of many sequences at once, whose keys are in pages of one memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...attention import Observation
from ...errors import ConfigurationError
from ...lenses import Lens
from ...nn import Attention, BlockCache
from ...nn.caches import CacheFormat, LayerHeads, PagedMemory, PagedSequence, RaggedStep
from ...nn.caches.paged_memory import PAGE
from .language_model_cache import LanguageModelCache

if TYPE_CHECKING:
    from .language_model import LanguageModel


class PagedModel:
    """A model and the memory of its sequences: `read` is a step of any of them together.

    Equal to each sequence alone: all but attention is computed for each token by itself, and attention for each
    sequence over its own keys. Sequences that begin alike share pages (`PagedSequence.adopt`).

    Args:
        model: of layers that are `regard.nn.Attention` with keys of their own.
        pages: of the memory; `size` tokens in each.
        cache_format: how keys and values are stored there, as codes of each token; without it as they are.

    Raises:
        ConfigurationError: no LanguageModel, or no CacheFormat; a layer whose state is no keys and values in pages, by
            its number; a rotary whose frequencies depend on the length of the text; numbers that are no integers of at
            least 1.

    >>> from regard.models import language_model as lm
    >>> attention, feed_forward = lm.AttentionConfig(num_heads=2), lm.FeedForwardConfig(16)
    >>> model = lm.LanguageModel(lm.LanguageModelConfig(9, 8, (lm.LayerConfig(),), attention, feed_forward)).eval()
    >>> paged = PagedModel(model, pages=8, size=4)
    >>> first, second = paged.sequence("first"), paged.sequence("second")
    >>> features = paged.read([(first, [3, 1, 4]), (second, [1, 5])])
    >>> alone = model.features(torch.tensor([[1, 5]]))
    >>> torch.allclose(features[3:], alone[0], atol=1e-6)
    True
    """

    def __init__(
        self, model: LanguageModel, pages: int, size: int = PAGE, *, cache_format: CacheFormat | None = None
    ) -> None:
        if not isinstance(cache_format, CacheFormat | None):
            raise ConfigurationError(
                f"cache_format is {cache_format!r}; it needs an nn.CacheFormat, or None for numbers as they are"
            )
        _check_states(model)
        self.model = model
        weight = model.embedding.weight
        layers = [_heads(block.attention) for block in model.blocks]  # type: ignore[arg-type]
        self.memory = PagedMemory(
            layers, pages, size, dtype=weight.dtype, device=weight.device, cache_format=cache_format
        )
        self.observed: dict[int, tuple[Observation, ...]] = {}

    def sequence(self, name: object) -> PagedSequence:
        """A sequence without tokens; errors tell how many pages it holds, by its name."""
        return self.memory.sequence(name)

    def read(
        self,
        parts: Sequence[tuple[PagedSequence, Sequence[int]]],
        lenses: Mapping[int, Sequence[Lens]] | None = None,
    ) -> Tensor:
        """The inputs of the output layer for the next tokens of sequences, one part after another: (tokens, dim).

        lenses: by the number of a part, those on its weights; `observed` has what each layer's attention gave then.

        Raises:
            PagesExhausted: the memory is too small; all sequences are as they were.
            ShapeError: tokens that the vocabulary does not have.
        """
        before = [(sequence, len(sequence)) for sequence, _ in parts]
        try:
            for sequence, tokens in parts:
                sequence.extend(tokens)
            step = RaggedStep.of(self.memory, [(sequence, len(tokens)) for sequence, tokens in parts], lenses)
            caches = tuple(BlockCache(step.layer(number)) for number in range(len(self.model.blocks)))
            row = torch.tensor([[token for _, tokens in parts for token in tokens]], device=self.memory.device).long()
            with torch.no_grad():
                features, _ = self.model.next_features(row, LanguageModelCache(caches), positions=step.positions)
        except BaseException:
            for sequence, length in before:
                sequence.truncate(length)
            raise
        self.observed = {number: tuple(seen) for number, seen in step.seen.items()}
        return features[0]


def _heads(attention: Attention) -> LayerHeads:
    projections = attention.projections
    return LayerHeads(projections.num_kv_heads, projections.head_dim, projections.value_dim)


def _check_states(model: LanguageModel) -> None:
    """Check that all the state of a model between tokens is keys and values, each layer's own.

    Raises:
        ConfigurationError: it is not.
    """
    if not hasattr(model, "prompt_chunk"):
        raise ConfigurationError(f"model is {model!r}; it needs a regard.models.LanguageModel")
    if model.prompt_chunk() is None:
        raise ConfigurationError(
            "the frequencies of this model's rotary depend on the length of its text, and a step of many sequences has "
            "texts of many lengths: generate each alone"
        )
    for number, block in enumerate(model.blocks):
        reason = None
        layer = block.attention
        if model.config.key_sources[number] is not None:
            reason = "shares keys with another layer"
        elif not isinstance(layer, Attention):
            reason = f"is a {type(layer).__name__}, whose state is not keys and values of heads"
        elif layer.forget_gate is not None:
            reason = "has a forget gate, whose sums go with its keys"
        if reason is not None:
            raise ConfigurationError(
                f"layer {number} {reason}: sequences of this model cannot share a memory of pages; generate each alone"
            )
