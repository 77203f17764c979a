"""Frequencies and angles of sinusoidal and rotary positions, and RoPE scalings, which modify them for longer sequences.

θ denotes the unscaled frequencies base^(-2i/dim), i = 0..dim/2 - 1, in radians per position, the highest first. YaRN
and Llama 3 scale only low frequencies; those with many periods within the original length are unchanged. All are
computed in double precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigurationError, DtypeError
from ..utils.numbers import lies_between


def geometric(dim: int, base: float | Tensor, device: torch.device) -> Tensor:
    """The frequencies base^(-2i/dim), i = 0..dim/2 - 1, in radians per position: (dim/2,).

    >>> geometric(4, 100.0, torch.device("cpu"))
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    return torch.pow(base, -torch.arange(0, dim, 2, dtype=precise(device), device=device) / dim)


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Angles position · frequency in radians: positions (...) of any shape and frequencies (F,) to (..., F)."""
    return positions.unsqueeze(-1).to(frequencies.dtype) * frequencies


def precise(device: torch.device) -> torch.dtype:
    """The dtype of angles: float64, as in float32 they are off by up to 0.004 at position 100,000; float32 on Metal.

    >>> precise(torch.device("cpu")), precise(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64


def is_whole(number: object) -> bool:
    """Whether a value is an int and not a bool."""
    return isinstance(number, int) and not isinstance(number, bool)


def check_dim(owner: str, dim: int) -> None:
    """Raise a ConfigurationError unless dim is an even number of at least 2."""
    if not is_whole(dim) or dim < 2 or dim % 2:
        raise ConfigurationError(f"{owner} needs an even dim of 2 or more, as features come in pairs; it is {dim!r}")


def check_base(owner: str, base: float) -> None:
    """Raise a ConfigurationError unless the base is finite and above 1."""
    if not lies_between(1, base, math.inf):
        raise ConfigurationError(f"{owner} needs a finite base above 1, published is 10000; it is {base!r}")


def check_positions(owner: object, positions: Tensor) -> None:
    """Raise a DtypeError unless positions are a tensor of whole numbers."""
    if not isinstance(positions, Tensor):
        raise DtypeError(
            f"{owner} needs positions as a torch.Tensor of whole numbers; they are a {type(positions).__name__}: "
            "torch.as_tensor makes one"
        )
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise DtypeError(f"{owner} needs positions that are whole numbers; they are {positions.dtype}: call .long()")


class Scaling(ABC):
    """Rotary frequencies for longer sequences. Subclasses are frozen dataclasses that implement `frequencies`."""

    reads_length: ClassVar[bool] = False
    """Whether frequencies depend on the length of the sequence: then a part is rotated differently from the whole."""

    @abstractmethod
    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        """The frequency of each pair: (dim/2,), radians per position, on the device of the positions.

        `positions` (...) are all positions of this call; there is no state between calls.
        """

    @property
    def magnitude(self) -> float:
        """The factor that multiplies rotated features."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """θ / factor: position interpolation, which maps a longer sequence into the range of positions in training.

    Raises:
        ConfigurationError: a factor below 1.

    Source: Chen et al. 2023 (arXiv 2306.15595), "position interpolation"; "linear" in transformers.

    >>> LinearScaling(factor=2.0).frequencies(4, 100.0, torch.arange(3))
    tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        check_factor(self, self.factor)

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        return geometric(dim, base, positions.device) / self.factor


@dataclass(frozen=True)
class Proportional(Scaling):
    """θ / factor of the first `share` of all pairs; the other pairs do not turn, and carry no position.

    Unlike a `Rotary` of fewer features, pairs are those of all features (i and i + dim/2), and their frequencies too.

    Raises:
        ConfigurationError: a share that is not in 0..1, a factor below 1.

    Source: the full layers of Gemma 4, share 0.25; "proportional" in transformers.

    >>> Proportional(share=0.5).frequencies(8, 10000.0, torch.arange(3))
    tensor([1.0000, 0.1000, 0.0000, 0.0000], dtype=torch.float64)
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        if not (self.share == 0 or self.share == 1 or lies_between(0.0, self.share, 1.0)):
            raise ConfigurationError(f"{self} needs a share in 0..1: of the pairs of features, those that turn")

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        frequencies = geometric(dim, base, positions.device) / self.factor
        turning = torch.arange(dim // 2, device=frequencies.device) < int(self.share * dim // 2)
        return torch.where(turning, frequencies, 0.0)


@dataclass(frozen=True)
class NTK(Scaling):
    """θ with the base · factor^(dim/(dim-2)): the highest frequency is unchanged, the lowest divided by the factor.

    Raises:
        ConfigurationError: a factor below 1; with a `Rotary`, a dim below 4.

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.1, "NTK-aware" interpolation.

    >>> NTK(factor=4.0).frequencies(4, 100.0, torch.arange(3))
    tensor([1.0000, 0.0250], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        check_factor(self, self.factor)

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        return geometric(dim, base * self.factor ** _ntk_exponent(self, dim), positions.device)


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """`NTK(1 + factor · (length/original_length - 1))` for a length above `original_length`, and none below.

    The length is the largest position of the call plus 1, over all sequences of a batch. Cached keys that were rotated
    when the sequence was shorter retain their frequencies; if the final length is known, `for_length(length)` is a
    scaling with constant frequencies.

    Raises:
        ConfigurationError: a factor or an original_length below 1; with a `Rotary`, a dim below 4.

    Source: "dynamic" in transformers. Peng et al. 2023 (arXiv 2309.00071), section 3.3, is the same with factor 1.

    >>> DynamicNTK(factor=2.0, original_length=4).frequencies(4, 100.0, torch.arange(8))
    tensor([1.0000, 0.0333], dtype=torch.float64)
    >>> DynamicNTK(factor=2.0, original_length=4).for_length(8)
    NTK(factor=3.0)
    """

    reads_length: ClassVar[bool] = True

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_length(self, self.original_length)

    def for_length(self, length: int) -> NTK:
        """The scaling for sequences of one length."""
        return NTK(1 + self.factor * (max(length, self.original_length) / self.original_length - 1))

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        exponent = _ntk_exponent(self, dim)
        length = _length(positions).to(precise(positions.device)).clamp(min=self.original_length)
        longer = length / self.original_length - 1
        return geometric(dim, base * (1 + self.factor * longer) ** exponent, positions.device)


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """θ_i / long_factors[i] if the sequence is longer than `original_length`, else θ_i / short_factors[i].

    Each list has one factor per pair. The length is the largest position of the call plus 1, over all sequences of a
    batch. `factor` is the maximum length divided by `original_length`; rotated features are multiplied by
    `attention_factor`, by default √(1 + ln factor / ln original_length).

    Raises:
        ConfigurationError: a factor below 1, an original_length below 2, an attention_factor or a factor of a pair
            that is not above 0; with a `Rotary`, lists that do not have dim/2 numbers.

    Source: Ding et al. 2024 (arXiv 2402.13753), in the form of the code released with it and of "longrope" in
    transformers; the paper also leaves the first positions unscaled.

    >>> scaling = LongRoPE((1.0, 1.0), (2.0, 5.0), original_length=4, factor=2.0)
    >>> scaling.frequencies(4, 100.0, torch.arange(5))
    tensor([0.5000, 0.0200], dtype=torch.float64)
    """

    reads_length: ClassVar[bool] = True

    short_factors: Sequence[float]
    long_factors: Sequence[float]
    original_length: int
    factor: float
    attention_factor: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_length(self, self.original_length, least=2)
        check_attention_factor(self, self.attention_factor)
        for name in ("short_factors", "long_factors"):
            factors = tuple(getattr(self, name))  # configurations have lists, which are not hashable
            object.__setattr__(self, name, factors)
            if not all(lies_between(0.0, factor, math.inf) for factor in factors):
                raise ConfigurationError(f"LongRoPE needs {name} that are all above 0; they are {factors}")

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length)) if self.factor > 1 else 1.0

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            if len(factors) != dim // 2:
                raise ConfigurationError(
                    f"LongRoPE needs a factor for each pair of features, {dim // 2} where the dim is {dim}; "
                    f"{name} has {len(factors)}"
                )
        unscaled = geometric(dim, base, positions.device)
        short, long = (unscaled / unscaled.new_tensor(factors) for factors in (self.short_factors, self.long_factors))
        return torch.where(_length(positions) > self.original_length, long, short)


def _length(positions: Tensor) -> Tensor:
    """The length of the sequences as a scalar tensor: the largest position plus 1; 0 without positions."""
    positions = positions.long()
    return positions.amax() + 1 if positions.numel() else positions.new_zeros(())


def _ntk_exponent(scaling: Scaling, dim: int) -> float:
    if dim < 4:
        raise ConfigurationError(
            f"{scaling} needs a dim of 4 or more: it scales the lowest frequency and not the highest, and a dim of "
            f"{dim} has only one; LinearScaling scales any"
        )
    return dim / (dim - 2)


def check_factor(scaling: Scaling, factor: float) -> None:
    """Raise a ConfigurationError unless the factor is finite and at least 1."""
    if not (lies_between(0.0, factor, math.inf) and factor >= 1):
        raise ConfigurationError(
            f"{type(scaling).__name__} needs a factor of 1 or more, how many times longer sequences become; it is "
            f"{factor!r}"
        )


def check_length(scaling: Scaling, length: int, *, least: int = 1) -> None:
    """Raise a ConfigurationError unless the original length is a whole number of at least `least`."""
    if not is_whole(length) or length < least:
        raise ConfigurationError(
            f"{type(scaling).__name__} needs an original_length of {least} or more, the length in training; it is "
            f"{length!r}"
        )


def check_attention_factor(scaling: Scaling, factor: float | None) -> None:
    """Raise a ConfigurationError unless the attention factor is None or finite and above 0."""
    if factor is not None and not lies_between(0.0, factor, math.inf):
        raise ConfigurationError(
            f"{type(scaling).__name__} needs an attention_factor above 0, or None for the published one; it is "
            f"{factor!r}"
        )


@dataclass(frozen=True)
class YaRN(Scaling):
    """(1 - r) θ + r θ/factor, with r from 0 for high to 1 for low frequencies; cosines and sines are scaled too.

    Frequencies with more than `beta_fast` periods within `original_length` are unchanged, those with fewer than
    `beta_slow` are divided by the factor. Between them r is linear in the index of the pair; `truncate` first widens
    the range to whole pairs. Rotated queries and keys are both multiplied by `attention_factor`, by default
    `yarn_attention_factor(factor)`, so that scores are multiplied by its square.

    Raises:
        ConfigurationError: a factor or an original_length below 1, a beta_fast that is not above beta_slow, a
            beta_slow or an attention_factor that is not above 0.

    Source: Peng et al. 2023 (arXiv 2309.00071), sections 3.2 and 3.4. There r is linear in the number of periods;
    in the code released with it, in transformers and here, in the index of the pair. `truncate=False` is gpt-oss's.

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
        first, last = (self._pair_index(periods, dim, base) for periods in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The bounds are those of the released code, which lets the range end beyond the last pair.
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last = first + 1  # a step, from one pair to the next
        pairs = torch.arange(dim // 2, dtype=precise(positions.device), device=positions.device)
        slow = ((pairs - first) / (last - first)).clamp(0, 1)
        return _blended(geometric(dim, base, positions.device), self.factor, slow)

    def _pair_index(self, periods: float, dim: int, base: float) -> float:
        """The fractional index of the pair whose frequency has so many periods within the original length."""
        return dim * math.log(self.original_length / (2 * math.pi * periods)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3(Scaling):
    """(1 - r) θ + r θ/factor, with r from 0 to 1 between high_frequency_factor and low_frequency_factor periods.

    A frequency has original_length · θ / 2π periods within `original_length`. With `high_frequency_factor` periods or
    more it is unchanged, with `low_frequency_factor` or fewer it is divided by the factor; between these r is linear in
    the number of periods.

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
        periods = self.original_length / (2 * math.pi) * unscaled
        low, high = self.low_frequency_factor, self.high_frequency_factor
        return _blended(unscaled, self.factor, ((high - periods) / (high - low)).clamp(0, 1))


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """0.1 · weight · ln(factor) + 1: the factor by which YaRN multiplies rotated queries and keys.

    DeepSeek's checkpoints have two weights, `mscale` and `mscale_all_dim`: their factor is the quotient of the results.

    Source: Peng et al. 2023 (arXiv 2309.00071), section 3.4.

    >>> round(yarn_attention_factor(40.0), 4)
    1.3689
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _blended(unscaled: Tensor, factor: float, slow: Tensor) -> Tensor:
    """(1 - r) θ + r θ/factor, for θ = `unscaled` and r = `slow`."""
    return (1 - slow) * unscaled + slow * unscaled / factor


def _check_order(scaling: Scaling, low_name: str, low: float, high_name: str, high: float) -> None:
    """Raise a ConfigurationError unless 0 < low < high and both are finite."""
    if not (lies_between(0.0, low, high) and lies_between(low, high, math.inf)):
        raise ConfigurationError(
            f"{type(scaling).__name__} needs 0 < {low_name} < {high_name}; {low_name} is {low!r} and {high_name} "
            f"{high!r}"
        )
