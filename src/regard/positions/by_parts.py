"""Scalings that treat fast and slow frequencies apart: those that turn often within the original length stay.

θ stands for the unscaled frequencies base^(-2i/dim), i = 0..dim/2 - 1, in radians a position, the fastest first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .angles import geometric, precise
from .scaling import Scaling, check_attention_factor, check_factor, check_length


@dataclass(frozen=True)
class YaRN(Scaling):
    """(1 - r) θ + r θ/factor, r rising from 0 for fast to 1 for slow frequencies; cosines and sines are scaled too.

    Frequencies with more than `beta_fast` full turns within `original_length` stay, those with fewer than `beta_slow`
    are divided by the factor. Between them r is linear in the number of the pair; `truncate` first widens the stretch
    to whole pairs. Turned queries and keys are both multiplied by `attention_factor`, so that the scores grow by its
    square: unless it is given, by `yarn_attention_factor(factor)`.

    Raises:
        ConfigurationError: a factor or an original_length below 1, a beta_fast that is not above beta_slow, a
            beta_slow or an attention_factor that is not above 0.

    Source: Peng et al. 2023 (arXiv 2309.00071), sections 3.2 and 3.4. There r is linear in the number of turns; in the
    code released with it, in transformers and so here, in the number of the pair. `truncate=False` is gpt-oss's.

    >>> scaling = YaRN(factor=4.0, original_length=1000)
    >>> scaling.frequencies(4, 100.0, torch.arange(3))
    tensor([1.0000, 0.0750], dtype=torch.float64)
    >>> round(scaling.magnitude, 4)
    1.1386
    """

    factor: float
    original_length: int
    beta_fast: float = field(default=32.0, kw_only=True)
    beta_slow: float = field(default=1.0, kw_only=True)
    attention_factor: float | None = field(default=None, kw_only=True)
    truncate: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_length(self, self.original_length)
        check_attention_factor(self, self.attention_factor)
        _check_order(self, "beta_slow", self.beta_slow, "beta_fast", self.beta_fast)

    @property
    def magnitude(self) -> float:
        return yarn_attention_factor(self.factor) if self.attention_factor is None else self.attention_factor

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        first, last = (self._pair(turns, dim, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The bounds are those of the released code, also where it lets the stretch end beyond the last pair.
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last = first + 1  # a step, from one pair to the next
        pairs = torch.arange(dim // 2, dtype=precise(positions.device), device=positions.device)
        slow = ((pairs - first) / (last - first)).clamp(0, 1)
        return _blended(geometric(dim, base, positions.device), self.factor, slow)

    def _pair(self, turns: float, dim: int, base: float) -> float:
        """The number of the pair, as if there were pairs between, that makes so many turns in the original length."""
        return dim * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3(Scaling):
    """(1 - r) θ + r θ/factor, r from 0 to 1 between high_frequency_factor and low_frequency_factor turns.

    A frequency makes original_length · θ / 2π full turns within `original_length`. With `high_frequency_factor` turns
    or more it stays, with `low_frequency_factor` or fewer it is divided by the factor; between these r is linear in
    the number of turns.

    Raises:
        ConfigurationError: a factor or an original_length below 1, a high_frequency_factor that is not above
            low_frequency_factor, a low_frequency_factor that is not above 0.

    Source: the code released with Llama 3.1; "llama3" in transformers. The defaults are those of Llama 3.1.

    >>> Llama3(factor=4.0, original_length=400).frequencies(4, 10000.0, torch.arange(3))
    tensor([1.0000, 0.0025], dtype=torch.float64)
    """

    factor: float = 8.0
    original_length: int = 8192
    low_frequency_factor: float = field(default=1.0, kw_only=True)
    high_frequency_factor: float = field(default=4.0, kw_only=True)

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_length(self, self.original_length)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        _check_order(self, "low_frequency_factor", low, "high_frequency_factor", high)

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        unscaled = geometric(dim, base, positions.device)
        turns = self.original_length / (2 * math.pi) * unscaled
        low, high = self.low_frequency_factor, self.high_frequency_factor
        return _blended(unscaled, self.factor, ((high - turns) / (high - low)).clamp(0, 1))


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1: what YaRN multiplies turned queries and keys by.

    DeepSeek's checkpoints name two weights, `mscale` and `mscale_all_dim`: theirs is the quotient of the two results.

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.4.

    >>> round(yarn_attention_factor(40.0), 4)
    1.3689
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _blended(unscaled: Tensor, factor: float, slow: Tensor) -> Tensor:
    return (1 - slow) * unscaled + slow * unscaled / factor


def _check_order(scaling: Scaling, low_name: str, low: float, high_name: str, high: float) -> None:
    if not 0 < low < high < math.inf:
        raise ConfigurationError(
            f"{type(scaling).__name__} needs 0 < {low_name} < {high_name}; {low_name} is {low!r} and {high_name} "
            f"{high!r}"
        )
