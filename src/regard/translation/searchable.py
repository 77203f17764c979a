"""What a model offers to be searched, and to be used by a `Translator`.

Shapes: R rows, one per beam, B sentences, S source tokens, T target tokens, V target words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self

from torch import Tensor, nn


class Selectable(Protocol):
    """What a model knows of its rows: one row per beam."""

    def select(self, rows: Tensor) -> Any:
        """The same, its rows reordered, repeated or dropped."""
        ...


class Step(Protocol):
    """What one decoding step gives."""

    @property
    def logits(self) -> Tensor:
        """[R, V]."""
        ...

    @property
    def state(self) -> Any:
        """What the next step starts from."""
        ...


class SeenStep(Step, Protocol):
    """The same, and where it looked."""

    @property
    def weights(self) -> Tensor:
        """At the source: [R, ..., S], with any dims between, as layers and heads."""
        ...

    @property
    def self_weights(self) -> Tensor | None:
        """At the target so far, this step's token the last: [R, ..., T]; None of a model that does not look there."""
        ...


class Searchable(Protocol):
    """A model that can be searched: state goes in and comes out, nothing is kept on the model."""

    @property
    def max_target_length(self) -> int | None:
        """The most tokens that it can say, END counted; None: any number."""
        ...

    def encode(self, source: Tensor, source_lengths: Tensor) -> Any:
        """What there is to know of the sources: a `Selectable`."""
        ...

    def start(self, memory: Any) -> Any:
        """The state before BEGIN: a `Selectable`."""
        ...

    def step(self, tokens: Tensor, state: Any, memory: Any) -> Step:
        """The next words behind one more token [R] of every row."""
        ...

    def observe_step(self, tokens: Tensor, state: Any, memory: Any) -> SeenStep:
        """The same, and where the step looked."""
        ...


class TranslationModel(Searchable, Protocol):
    """A model that a `Translator` can use: it is searched, and gives the weights of a translation that is known."""

    @property
    def max_source_length(self) -> int | None:
        """The most source tokens it takes; None: any number."""
        ...

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """[B, T, ..., S]: where each step of target [B, T] (BEGIN y1 ...) looks in source [B, S]."""
        ...

    def eval(self) -> Self:
        """The model without dropout."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights; it computes where they are."""
        ...
