"""Attention to keys and values as a cache of fewer bits would give them back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention import run_problem
from ..core.cache_format import CacheFormat
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..errors import ConfigurationError, RegardError
from .methods import Method, TiledWeights


@dataclass(frozen=True)
class Stored(Method):
    """Exact attention to the keys and values that a cache of a format reads: what `KVCache.packed` would cost.

    Args:
        formats: a `regard.nn.CacheFormat`, or one for each key head.

    Over a whole sequence at once every block of 64 tokens is read as codes, also where a step of decoding would still
    have had some of them as they were: with keys by channel the error is that of a prompt.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> 0 < regard.approximation(q, k, v, regard.nn.CacheFormat(), causal=True, lengths=()).error < 0.02
    True
    """

    formats: tuple[CacheFormat, ...]

    def __post_init__(self) -> None:
        if not self.formats or not all(isinstance(each, CacheFormat) for each in self.formats):
            raise ConfigurationError(
                f"formats are {self.formats!r}; they need one CacheFormat, or one for each key head"
            )

    def __str__(self) -> str:
        if len(self.formats) == 1:
            return f"a cache of {describe(self.formats[0])}"
        return f"a cache of {sum(each.bits for each in self.formats) / len(self.formats):.3g} bits on average"

    def why_not(self, problem: Problem) -> str:
        if not isinstance(problem.pairs, DotPairs):
            return "its score is additive, and its keys are hidden layers: codes are read by dot products alone"
        heads = problem.value.shape[-3] if problem.heads else 1
        if len(self.formats) not in (1, heads):
            return f"it has {heads} key heads, and there are {len(self.formats)} formats: give one, or one for each"
        try:
            self._read(problem)
        except RegardError as error:
            return str(error)
        return ""

    def run(self, problem: Problem) -> Tensor:
        return run_problem(self._read(problem)).output

    def weights(self, problem: Problem) -> TiledWeights:
        return TiledWeights(self._read(problem))

    def _read(self, problem: Problem) -> Problem:
        """The problem with the keys and values that are read."""
        key, value = (_with_heads(rows.detach(), problem) for rows in (problem.pairs.key, problem.value))
        if len(self.formats) == 1:
            self.formats[0].check(key, value)
            read = self.formats[0].read(key, value)
        else:
            parts = []
            for head, format_ in enumerate(self.formats):
                own = key[:, head : head + 1], value[:, head : head + 1]
                format_.check(*own)
                parts.append(format_.read(*own))
            read = tuple(torch.cat(each, 1) for each in zip(*parts, strict=True))
        pairs = replace(problem.pairs, key=read[0].reshape(problem.pairs.key.shape))
        return replace(problem, pairs=pairs, value=read[1].reshape(problem.value.shape))


def _with_heads(rows: Tensor, problem: Problem) -> Tensor:
    """Keys or values as (B, H, N, ·)."""
    return rows.reshape(-1, *rows.shape[-3:]) if problem.heads else rows.reshape(-1, 1, *rows.shape[-2:])


def describe(format_: CacheFormat) -> str:
    """A format in words."""
    if format_.keys is None or format_.values is None:
        return "numbers as they are"
    told = []
    for name, packing in (("keys", format_.keys), ("values", format_.values)):
        how = " by channel" if packing.by_channel else " rotated" if packing.rotated else ""
        told.append(f"{name} {packing.code}{how}")
    return ", ".join(told)
