"""What goes from block to block of a language model, and what is computed around each block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn


class ResidualStream(nn.Module, ABC):
    """From embeddings through all blocks to the features of the last norm: `begin`, `around` each block, `end`.

    A stream holds parameters of all layers, and nothing of a call: what `begin` computes for the layers is passed to
    `around`.
    """

    @abstractmethod
    def begin(self, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor | None]:
        """What enters the first layer, and the inputs of all layers, if there are some.

        Shapes: tokens (batch, length), embedded (batch, length, dim), inputs (batch, length, layers, ·).
        """

    @abstractmethod
    def around(self, number: int, x: Tensor, inputs: Tensor | None, block: Callable[[Tensor], Tensor]) -> Tensor:
        """What leaves layer `number`, from what enters it; `block` maps (batch, length, dim) to the same."""

    @abstractmethod
    def end(self, x: Tensor) -> Tensor:
        """The features (batch, length, dim), from what leaves the last layer."""


class PlainStream(ResidualStream):
    """x goes from block to block, and nothing is computed around them."""

    def begin(self, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor | None]:
        return embedded, None

    def around(self, number: int, x: Tensor, inputs: Tensor | None, block: Callable[[Tensor], Tensor]) -> Tensor:
        return block(x)

    def end(self, x: Tensor) -> Tensor:
        return x
