"""The ways through the blocks of a language model: over whole sequences or in steps, with lenses or without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from ...attention import Observation
from ...lenses import Lens
from ...nn import BlockCache, ProjectedMemory, TransformerBlock
from ...nn.attention_layer import CallKwargs, SharedCallKwargs


class BlockPass(ABC):
    """One pass through all blocks, in their order: where keys that layers share come from, and what a block gives."""

    @abstractmethod
    def keys(self, number: int, block: TransformerBlock, x: Tensor, call: CallKwargs) -> ProjectedMemory:
        """Keys and values of a block for its input x, which it shares with others."""

    @abstractmethod
    def output(self, number: int, block: TransformerBlock, x: Tensor, call: SharedCallKwargs) -> Tensor:
        """The output of a block for its input x; with `keys` in the call, from those."""


class SequencePass(BlockPass):
    """Over whole sequences; `call_block(block, x, **arguments)` calls each block."""

    def __init__(self, call_block: Callable[..., Tensor] | None = None) -> None:
        self.call_block = call_block

    def keys(self, number: int, block: TransformerBlock, x: Tensor, call: CallKwargs) -> ProjectedMemory:
        return block.project_keys(x, positions=call.get("positions"), rotation=call.get("rotation"))

    def output(self, number: int, block: TransformerBlock, x: Tensor, call: SharedCallKwargs) -> Tensor:
        return block(x, **call) if self.call_block is None else self.call_block(block, x, **call)


class ObservedPass(SequencePass):
    """Over whole sequences, with lenses; `seen` has what each layer's attention gave."""

    def __init__(self, lenses: Sequence[Lens]) -> None:
        super().__init__()
        self.lenses = lenses
        self.seen: list[Observation] = []

    def output(self, number: int, block: TransformerBlock, x: Tensor, call: SharedCallKwargs) -> Tensor:
        seen = block.observe(x, *self.lenses, **call)
        self.seen.append(seen.attention)
        return seen.output


class StepPass(BlockPass):
    """A step over the next tokens; `extended()` are the caches after it.

    caches: by the number of the layer, of those that have keys of their own.
    """

    def __init__(self, numbers: Iterable[int], caches: Sequence[BlockCache]) -> None:
        self.caches = dict(zip(numbers, caches, strict=True))
        self.shared: set[int] = set()

    def keys(self, number: int, block: TransformerBlock, x: Tensor, call: CallKwargs) -> ProjectedMemory:
        positions, rotation = call.get("positions"), call.get("rotation")
        extended = block.extend_cache(x, self.caches[number], positions=positions, rotation=rotation)
        self.caches[number] = extended
        self.shared.add(number)
        return ProjectedMemory.of_cache(extended.attention)  # type: ignore[arg-type]  # `extend_cache` checked it

    def output(self, number: int, block: TransformerBlock, x: Tensor, call: SharedCallKwargs) -> Tensor:
        if "keys" in call:
            return block(x, **call)
        output, self.caches[number] = block.step(x, self.caches[number], **cast(CallKwargs, call))
        return output

    def extended(self) -> tuple[BlockCache, ...]:
        """The caches after the step: shared keys are evicted now that every layer has read them."""
        for number in self.shared:
            self.caches[number] = replace(self.caches[number], attention=self.caches[number].attention.evict())
        return tuple(self.caches.values())


class ObservedStepPass(StepPass):
    """A step over the next tokens, with lenses; `seen` has what each layer's attention gave."""

    def __init__(self, numbers: Iterable[int], caches: Sequence[BlockCache], lenses: Sequence[Lens]) -> None:
        super().__init__(numbers, caches)
        self.lenses = lenses
        self.seen: list[Observation] = []

    def output(self, number: int, block: TransformerBlock, x: Tensor, call: SharedCallKwargs) -> Tensor:
        if "keys" in call:
            seen = block.observe(x, *self.lenses, **call)
        else:
            seen, self.caches[number] = block.observe_step(
                x, self.caches[number], *self.lenses, **cast(CallKwargs, call)
            )
        self.seen.append(seen.attention)
        return seen.output
