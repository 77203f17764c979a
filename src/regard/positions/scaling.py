"""How rotary frequencies change for sequences longer than those a model was trained on.

θ stands for the unscaled frequencies base^(-2i/dim), i = 0..dim/2 - 1, in radians a position, the fastest first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .angles import geometric, is_whole, precise


class Scaling(ABC):
    """Frequencies for longer sequences. Subclasses are frozen dataclasses, and say `frequencies`."""

    reads_length: ClassVar[bool] = False
    """Whether frequencies depend on how long the sequence is: a part of one is turned otherwise than the whole then."""

    @abstractmethod
    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        """The angle from one position to the next of each pair: (dim/2,), radians, on the device of the positions.

        The positions (...) are those that are turned in this call. Nothing is remembered from call to call.
        """

    @property
    def magnitude(self) -> float:
        """What turned features are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class Linear(Scaling):
    """θ / factor: the positions of a longer sequence are squeezed into the range that was trained on.

    Raises:
        ConfigurationError: a factor below 1.

    Source: Chen et al. 2023 (arXiv 2306.15595), "position interpolation"; "linear" in transformers.

    >>> Linear(factor=2.0).frequencies(4, 100.0, torch.arange(3))
    tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        check_factor(self, self.factor)

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        return geometric(dim, base, positions.device) / self.factor


@dataclass(frozen=True)
class NTK(Scaling):
    """θ with the base · factor^(dim/(dim-2)): the fastest frequency stays, the slowest is divided by the factor.

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
    """`NTK(1 + factor · (length/original_length - 1))`, from where the sequence is longer than `original_length`.

    The length is the largest position of the call plus 1, over all sequences of a batch. Keys that were turned when
    the sequence was shorter, and wait in a cache, keep the frequencies of then; where it is known how long the
    sequence will be, `at(length)` is the scaling that stays the same.

    Raises:
        ConfigurationError: a factor or an original_length below 1; with a `Rotary`, a dim below 4.

    Source: "dynamic" in transformers. Peng et al. 2023 (arXiv 2309.00071), section 3.3, is the same with factor 1.

    >>> DynamicNTK(factor=2.0, original_length=4).frequencies(4, 100.0, torch.arange(8))
    tensor([1.0000, 0.0333], dtype=torch.float64)
    >>> DynamicNTK(factor=2.0, original_length=4).at(8)
    NTK(factor=3.0)
    """

    reads_length: ClassVar[bool] = True

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_length(self, self.original_length)

    def at(self, length: int) -> NTK:
        """The scaling of all sequences of one length."""
        return NTK(1 + self.factor * (max(length, self.original_length) / self.original_length - 1))

    def frequencies(self, dim: int, base: float, positions: Tensor) -> Tensor:
        exponent = _ntk_exponent(self, dim)
        length = _length(positions).to(precise(positions.device)).clamp(min=self.original_length)
        longer = length / self.original_length - 1
        return geometric(dim, base * (1 + self.factor * longer) ** exponent, positions.device)


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """θ_i / long_factors[i] where the sequence is longer than `original_length`, else θ_i / short_factors[i].

    Each list has a factor for each pair. The length is the largest position of the call plus 1, over all sequences of
    a batch. `factor` is how many times longer than `original_length` sequences may become; turned features are
    multiplied by `attention_factor`, unless it is given by √(1 + ln factor / ln original_length).

    Raises:
        ConfigurationError: a factor below 1, an original_length below 2, an attention_factor or a factor of a pair
            that is not above 0; with a `Rotary`, lists that do not have dim/2 numbers.

    Source: Ding et al. 2024 (arXiv 2402.13753), in the form of the code released with it and of "longrope" in
    transformers: the paper also keeps the first positions unscaled.

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
            factors = tuple(getattr(self, name))  # lists, as configurations have them, become part of a value
            object.__setattr__(self, name, factors)
            if not all(0 < factor < math.inf for factor in factors):
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
    """How long the sequences are, as a number without axes: the largest position plus 1, and 0 where there is none."""
    positions = positions.long()
    return positions.amax() + 1 if positions.numel() else positions.new_zeros(())


def _ntk_exponent(scaling: Scaling, dim: int) -> float:
    if dim < 4:
        raise ConfigurationError(
            f"{scaling} needs a dim of 4 or more: it keeps the fastest frequency and slows the slowest, and a dim of "
            f"{dim} has only one; Linear divides any"
        )
    return dim / (dim - 2)


def check_factor(scaling: Scaling, factor: float) -> None:
    """Refuse a factor that makes sequences shorter."""
    if not 1 <= factor < math.inf:
        raise ConfigurationError(
            f"{type(scaling).__name__} needs a factor of 1 or more, how many times longer sequences become; it is "
            f"{factor!r}"
        )


def check_length(scaling: Scaling, length: int, *, least: int = 1) -> None:
    """Refuse an original length that is no number of positions."""
    if not is_whole(length) or length < least:
        raise ConfigurationError(
            f"{type(scaling).__name__} needs an original_length of {least} or more, the positions trained on; it is "
            f"{length!r}"
        )


def check_attention_factor(scaling: Scaling, factor: float | None) -> None:
    """Refuse a factor that turned features cannot be multiplied by."""
    if factor is not None and not 0 < factor < math.inf:
        raise ConfigurationError(
            f"{type(scaling).__name__} needs an attention_factor above 0, or None for the published one; it is "
            f"{factor!r}"
        )
