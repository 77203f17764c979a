"""Caches that compute the attention of a step themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self, TypeAlias

from torch import Tensor

from ...attention import Observation
from ...kernels.validation import AttentionOptions
from ...lenses import Lens
from .base import Cache

Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries of a step, and the keys and values that its cache has."""


class AttendingCache(Cache, ABC):
    """A cache of keys and values that computes the attention of a step, where one call of `regard.attention` does not.

    heads, options: the arguments of `regard.attention` for a step whose keys were appended.
    """

    @abstractmethod
    def attend(self, heads: Heads, options: AttentionOptions) -> tuple[Tensor, Self]:
        """The output (batch, heads, M, value dim), and the cache after the step."""

    @abstractmethod
    def observe(self, heads: Heads, options: AttentionOptions, *lenses: Lens) -> tuple[Observation, Self]:
        """The same, with lenses on the weights."""
