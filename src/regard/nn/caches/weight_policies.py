"""Which keys of a cache stay, by the weights that queries gave them: H2O, SnapKV and TOVA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from ...errors import ConfigurationError
from ...utils.numbers import whole_number

ALWAYS = float("inf")
"""The rank of a key that stays in any case."""


class WeightPolicy(ABC):
    """The keys that a `WeighedCache` keeps after a step: those with the largest ranks; of equal ranks the later ones.

    A subclass is a frozen dataclass.
    """

    per_head: ClassVar[bool]
    """Whether each key head keeps keys of its own; else all heads keep the same, by the sum of their weights."""
    accumulates: ClassVar[bool]
    """Whether the weights of all steps are added up; else those of the last step count alone."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many keys stay, at most."""

    @abstractmethod
    def queries(self, count: int) -> int:
        """How many of the last queries of a step are asked, whose weights are added up; of `count`."""

    @abstractmethod
    def ranks(self, weights: Tensor, count: int) -> Tensor | None:
        """The rank of each key (..., N) by its weights (..., N) after a step of `count` queries; None to keep all."""


@dataclass(frozen=True)
class H2O(WeightPolicy):
    """The `recent` last keys, and of the others the `heavy` ones with the largest sums of weights in all steps so far.

    Each key head has its own; weights of its query heads are added. The paper gives both the same number. A prompt that
    is read in one step is attended to as a whole, and then evicted from.

    Raises:
        ConfigurationError: numbers below 1.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (arXiv 2306.14048), Algorithm 1.

    >>> import torch
    >>> H2O(heavy=1, recent=1).ranks(torch.tensor([0.5, 1.5, 0.4, 0.1]), 1)
    tensor([0.5000, 1.5000, 0.4000,    inf])
    """

    heavy: int
    recent: int
    per_head: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole_number("heavy", self.heavy)
        whole_number("recent", self.recent)

    @property
    def capacity(self) -> int:
        return self.heavy + self.recent

    def queries(self, count: int) -> int:
        return count

    def ranks(self, weights: Tensor, count: int) -> Tensor | None:
        return _with_last(weights[..., : -self.recent], self.recent)


@dataclass(frozen=True)
class SnapKV(WeightPolicy):
    """The last `window` keys of a prompt, and of those before the ones with most weight from the last `window` queries.

    `size` keys stay in all. Weights are averaged over `kernel` neighbouring keys first, so that what surrounds a key
    stays with it. Each key head has its own; weights of its query heads are added. Steps of fewer tokens than `window`,
    as those of generation, evict nothing: memory is that of `size` keys and of the generated ones. A prompt in parts
    of `window` tokens at least is compressed after each.

    Raises:
        ConfigurationError: numbers below 1; an even kernel; a window that leaves no key of `size`.

    Source: Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469);
    average pooling is that of the code released with it.

    >>> import torch
    >>> SnapKV(size=2, window=1, kernel=3).ranks(torch.tensor([0.3, 0.0, 0.0, 0.6, 0.1]), 5)
    tensor([0.1000, 0.1000, 0.2000, 0.2000,    inf])
    """

    size: int
    window: int = 32
    kernel: int = 5
    per_head: ClassVar[bool] = True
    accumulates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("size", "window", "kernel"):
            whole_number(name, getattr(self, name))
        if self.kernel % 2 == 0:
            raise ConfigurationError(f"kernel is {self.kernel}; it needs an odd number, of a key and those beside it")
        if self.window >= self.size:
            raise ConfigurationError(
                f"window is {self.window} of size={self.size} keys, which leaves none of those before: make size larger"
            )

    @property
    def capacity(self) -> int:
        return self.size

    def queries(self, count: int) -> int:
        return min(self.window, count)

    def ranks(self, weights: Tensor, count: int) -> Tensor | None:
        if count < self.window:
            return None
        before = weights[..., : -self.window]
        rows = before.reshape(-1, 1, before.shape[-1])
        pooled = functional.avg_pool1d(rows, self.kernel, stride=1, padding=self.kernel // 2)
        return _with_last(pooled.view_as(before), self.window)


@dataclass(frozen=True)
class TOVA(WeightPolicy):
    """The `size` keys to which the last query gave most weight, the mean over all heads: the same keys for all of them.

    In steps of one token the key with the least weight is dropped, which may be any, the newest too.

    Raises:
        ConfigurationError: a size below 1.

    Source: Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv 2401.06104).

    >>> import torch
    >>> TOVA(size=2).ranks(torch.tensor([0.5, 0.1, 0.4]), 1)
    tensor([0.5000, 0.1000, 0.4000])
    """

    size: int
    per_head: ClassVar[bool] = False
    accumulates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("size", self.size)

    @property
    def capacity(self) -> int:
        return self.size

    def queries(self, count: int) -> int:
        return 1

    def ranks(self, weights: Tensor, count: int) -> Tensor | None:
        return weights


def _with_last(ranks: Tensor, count: int) -> Tensor:
    """Ranks (..., N - count) and those of the last `count` keys, which stay in any case."""
    return functional.pad(ranks, (0, count), value=ALWAYS)
