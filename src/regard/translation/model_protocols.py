"""Protocols of translation models, as `beam_search` and `Translator` use them.

Shapes: R rows, one per beam, B sentences, S source tokens, T target tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

from torch import Tensor, nn


class Reorderable(Protocol):
    """State of a model with one row per beam."""

    def reorder(self, rows: Tensor) -> Any:
        """The state with rows reordered, repeated or dropped."""
        ...


class DecodingStep(Protocol):
    """Result of one decoding step."""

    @property
    def logits(self) -> Tensor:
        """Logits of the next token: [R, V]."""
        ...

    @property
    def state(self) -> Any:
        """Decoder state for the next step."""
        ...


class ObservedDecodingStep(DecodingStep, Protocol):
    """Result of one decoding step with its attention weights."""

    @property
    def weights(self) -> Tensor:
        """Attention weights to the source: [R, ..., S], with any dims between, such as layers and heads."""
        ...

    @property
    def self_weights(self) -> Tensor | None:
        """Weights to the target so far, this step's token the last: [R, ..., T]; None without self-attention."""
        ...


class SearchableModel(Protocol):
    """A model that beam search can decode; its decoder state is passed in and returned, never stored on the model."""

    @property
    def max_target_length(self) -> int | None:
        """Most target tokens, END included; None: any number."""
        ...

    def encode(self, source: Tensor, source_lengths: Tensor) -> Any:
        """Encoded sources: a `Reorderable`."""
        ...

    def start(self, memory: Any) -> Any:
        """Decoder state before BEGIN: a `Reorderable`."""
        ...

    def step(self, tokens: Tensor, state: Any, memory: Any) -> DecodingStep:
        """Decode one more token [R] of every row."""
        ...

    def observe_step(self, tokens: Tensor, state: Any, memory: Any) -> ObservedDecodingStep:
        """Decode one more token, with attention weights."""
        ...


class TranslationModel(SearchableModel, Protocol):
    """A model that a `Translator` can use: searchable, and with the attention weights of a known translation."""

    @property
    def max_source_length(self) -> int | None:
        """Most source tokens; None: any number."""
        ...

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Attention weights [B, T, ..., S] of target [B, T] (BEGIN y1 ...) to source [B, S]."""
        ...

    def eval(self) -> Self:
        """Switch dropout off, and return the model."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters; the model computes on their device."""
        ...
