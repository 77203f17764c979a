"""The step of generation: from the last tokens the next ones; on CUDA also as a graph, captured once and replayed.

A step of a small model or a small batch takes less time than Python takes to launch its kernels. A replayed graph
launches them all at once; for that every step has to be the same calls over the same memory, so that the keys are in
caches that are written in place, whose lengths are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigurationError
from ...masks import Mask
from ...nn import BlockCache
from ...nn.caches import InPlaceCache, KVCache
from .language_model_cache import LanguageModelCache, Steps

WARM_UPS = 2
"""Steps before a capture: in the first one kernels are compiled, and libraries loaded."""


@dataclass(eq=False)
class NextTokens:
    """The state of generation: the last tokens (batch,), the cache of all before them, and which sequences have ended.

    choose: tokens (batch,) from logits (batch, vocabulary). stops (·,): the tokens that end a sequence, which repeats
    its last one from then on.
    """

    model: Steps
    cache: LanguageModelCache
    tokens: Tensor
    stops: Tensor
    mask: Mask | None
    choose: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        self.done = torch.isin(self.tokens, self.stops)

    def all_done(self) -> bool:
        """Whether all sequences have ended. Without tokens that end one it is known, and no device is waited for."""
        return bool(len(self.stops)) and bool(self.done.all())

    def step(self) -> None:
        """Compute the next tokens; tokens and `done` stay where they are in memory."""
        features, self.cache = self.model.next_features(self.tokens.unsqueeze(1), self.cache, mask=self.mask)
        drawn = self.choose(self.model.logits(features)[:, 0])
        self.tokens.copy_(torch.where(self.done, self.tokens, drawn))
        self.done.logical_or_(torch.isin(self.tokens, self.stops))


class CapturedStep:
    """`NextTokens.step` for so many tokens more, over caches in place; as a CUDA graph where the tokens are on CUDA.

    Raises:
        ConfigurationError: a layer whose cache has no keys and values, as that of linear attention.
    """

    def __init__(self, state: NextTokens, count: int, generator: torch.Generator | None) -> None:
        state.cache = LanguageModelCache(tuple(_in_place(layer, count) for layer in state.cache.layers))
        self.state, self.generator = state, generator
        self._graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """Compute the next tokens."""
        if not self.state.tokens.is_cuda:
            self.state.step()
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """A graph of one step. Warming up writes a key after the last one, which the first step overwrites."""
        numbers = self._numbers()
        before = [number.clone() for number in numbers]
        drawn = None if self.generator is None else self.generator.get_state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.state.step()
                for number, value in zip(numbers, before, strict=True):
                    number.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if self.generator is not None and drawn is not None:
            self.generator.set_state(drawn)
            graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self.state.step()
        return graph

    def _numbers(self) -> list[Tensor]:
        """All that a step changes but keys and values."""
        caches = [layer.attention for layer in self.state.cache.layers if isinstance(layer.attention, InPlaceCache)]
        lengths = [number for cache in caches for number in (cache.filled, cache.next_position)]
        return [self.state.tokens, self.state.done, *lengths, *(cache.positions for cache in caches)]


def _in_place(layer: BlockCache, spare: int) -> BlockCache:
    """The cache of a layer in memory for `spare` more tokens."""
    if not isinstance(layer.attention, KVCache):
        raise ConfigurationError(
            f"a layer has a {type(layer.attention).__name__}, and captured steps need a KVCache in each layer: "
            "leave captured out"
        )
    return BlockCache(InPlaceCache.after(layer.attention, spare), layer.memory)
