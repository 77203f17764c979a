"""A decoder's attention to the source."""

from __future__ import annotations

from torch import Tensor, nn

from ...attention import attention, observe
from ...lenses import Weights
from ...scores import Score
from .memory import Encoded, Memory
from .windows import GlobalWindow


class SourceAttention(nn.Module):
    """context_t = attention(query_t, keys, annotations): any score, within a window."""

    def __init__(self, score: Score, window: nn.Module | None = None) -> None:
        super().__init__()
        self.score = score
        self.window = window if window is not None else GlobalWindow()

    def remember(self, encoded: Encoded) -> Memory:
        """The source with its keys projected, once for all steps."""
        return Memory.of(encoded, self.score.project_key(encoded.annotations))

    def forward(self, query: Tensor, memory: Memory, *, first: int = 0) -> Tensor:
        """The contexts [B, T, A] of queries [B, T, H], the first of which stands at target step `first`."""
        return attention(query, memory.keys, memory.values, **self._options(query, memory, first))

    def look(self, query: Tensor, memory: Memory, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """The contexts, and the weights [B, T, S] that made them."""
        lens = Weights()
        seen = observe(query, memory.keys, memory.values, lens, **self._options(query, memory, first))
        return seen.output, seen[lens]

    def _options(self, query: Tensor, memory: Memory, first: int) -> dict:
        mask, bias = self.window(query, first, memory)
        return {"score": self.score.over_projected_keys(), "mask": mask, "bias": bias}
