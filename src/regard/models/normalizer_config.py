"""The normalizer of a model's attention as data: its name, and its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.normalizer import Normalizer
from ..errors import ConfigurationError, nearest
from ..normalizers import Entmax, ReLU, Sigmoid, Softmax1, Softpick, Sparsemax, StickBreaking, TopScores

NORMALIZERS: dict[str, Callable[..., Normalizer]] = {
    "entmax": Entmax,
    "relu": ReLU,
    "sigmoid": Sigmoid,
    "softmax1": Softmax1,
    "softpick": Softpick,
    "sparsemax": Sparsemax,
    "stick_breaking": StickBreaking,
    "top_scores": TopScores,
}
PLAIN = "softmax1", "softpick", "sparsemax", "stick_breaking"
"""Those without a number."""
NEEDED = {"sigmoid": "its bias, such as -5.0", "top_scores": "how many keys have weight, such as 16"}
"""Those whose number has no default: of a sigmoid it is -log of the number of keys, which grows as a model writes."""


@dataclass(frozen=True)
class NormalizerConfig:
    """A normalizer of `regard.normalizers`, which takes the place of softmax in all attention of a model.

    - `name`: "softmax1", "softpick", "sparsemax" or "stick_breaking", which have no number; "entmax", "relu", "sigmoid"
      or "top_scores".
    - `number`: α of entmax (by default 1.5), the power of relu (1), the bias of sigmoid, how many top_scores.

    Raises:
        ConfigurationError: another name; a number that it does not have, lacks or cannot be.

    >>> NormalizerConfig("entmax").make()
    Entmax(alpha=1.5)
    """

    name: str
    number: float | None = None

    def __post_init__(self) -> None:
        if self.name not in NORMALIZERS:
            raise ConfigurationError(f"there is no normalizer {self.name!r}; {nearest(str(self.name), NORMALIZERS)}")
        if self.name in PLAIN and self.number is not None:
            raise ConfigurationError(f"the normalizer {self.name!r} has no number; it is given {self.number!r}")
        if self.name in NEEDED and self.number is None:
            raise ConfigurationError(f"the normalizer {self.name!r} needs a number: {NEEDED[self.name]}")
        self.make()

    def make(self) -> Normalizer:
        """The normalizer."""
        numbers: tuple[Any, ...] = () if self.number is None else (self.number,)
        return NORMALIZERS[self.name](*numbers)
