"""Attention of a recurrent decoder to the source: global, or local in a window around a centre.

Source: Luong et al. 2015 (arXiv 1508.04025), section 3.2, local attention. Windows are closed intervals
[centre - radius, centre + radius] of source positions, counted from 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ...attention import attention, observe
from ...biases import Bias, gaussian
from ...lenses import Weights
from ...masks import Mask, where
from ...scores import Score
from .recurrent_state import Encoded, RecurrentMemory


class SourceWindow(Protocol):
    """The part of the source that queries [B, T, H] attend to; the first query is at target step `first`."""

    def __call__(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """The mask, padding included, and the bias if there is one."""
        ...


class GlobalWindow(nn.Module):
    """Global attention: every word of the source."""

    def forward(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """The padding mask alone."""
        return memory.mask, None


class MonotonicWindow(nn.Module):
    """local-m: the centre is the target step itself, p_t = t.

    A target that runs past the source by more than the radius has no position in its window: weights and context 0.
    """

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """A band around the diagonal."""
        steps = torch.arange(first, first + query.shape[1], device=query.device)
        return memory.mask & where(keep=_near(steps, memory, self.radius)), None

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class PredictiveWindow(nn.Module):
    """local-p: the centre is predicted, p_t = S · sigmoid(v_pᵀ tanh(W_p h_t)), with a Gaussian of σ = radius / 2 on it.

    Equations 9 and 10. There the Gaussian multiplies the weights after the softmax, here it is a bias before it, so
    that the weights sum to 1; gradients reach the centre through it.
    """

    def __init__(self, query_dim: int, radius: int) -> None:
        super().__init__()
        self.radius = radius
        self.hidden = nn.Linear(query_dim, query_dim, bias=False)
        self.centre = nn.Linear(query_dim, 1, bias=False)

    def forward(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """The mask of a window around each predicted centre, and the Gaussian bias."""
        share = torch.sigmoid(self.centre(torch.tanh(self.hidden(query)))).squeeze(-1)  # [B, T]
        centre = share.float() * memory.lengths.unsqueeze(-1)
        keep = _near(centre.detach(), memory, self.radius)
        return memory.mask & where(keep=keep), gaussian(centre, self.radius / 2)

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


def _near(centre: Tensor, memory: RecurrentMemory, radius: int) -> Tensor:
    """Which source positions lie within `radius` of each centre: [..., T, S]."""
    positions = torch.arange(memory.values.shape[1], device=memory.values.device)
    return (positions - centre.unsqueeze(-1)).abs() <= radius


class SourceAttention(nn.Module):
    """context_t = attention(query_t, keys, annotations): any score, within a window."""

    def __init__(self, score: Score, window: nn.Module | None = None) -> None:
        super().__init__()
        self.score = score
        self.window = window if window is not None else GlobalWindow()

    def project_memory(self, encoded: Encoded) -> RecurrentMemory:
        """The source with its keys projected for the score, once for all steps."""
        return RecurrentMemory(encoded, self.score.project_key(encoded.annotations))

    def forward(self, query: Tensor, memory: RecurrentMemory, *, first: int = 0) -> Tensor:
        """The contexts [B, T, A] of queries [B, T, H]; the first query is at target step `first`."""
        return attention(query, memory.keys, memory.values, **self._options(query, memory, first))

    def with_weights(self, query: Tensor, memory: RecurrentMemory, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """The contexts, and the attention weights [B, T, S]."""
        lens = Weights()
        seen = observe(query, memory.keys, memory.values, lens, **self._options(query, memory, first))
        return seen.output, seen[lens]

    def _options(self, query: Tensor, memory: RecurrentMemory, first: int) -> dict:
        mask, bias = self.window(query, first, memory)
        return {"score": self.score.over_projected_keys(), "mask": mask, "bias": bias}
