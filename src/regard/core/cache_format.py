"""How a cache stores the keys and values of a head."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..utils.numbers import whole_number
from .packing import BLOCK, Packing


@dataclass(frozen=True)
class CacheFormat:
    """How a `KVCache` stores the keys and values of a head: as codes of 8 or 4 bits, or as they are.

    keys, values: a `Packing` each, or None for both: as they are. newest: at least so many of the last tokens stay as
    they are. With keys by channel up to 63 more do, as such codes are made for 64 tokens at once; with `newest` too.

    Raises:
        ConfigurationError: what is no packing, or one of the two alone; values by channel; a newest below 0.

    >>> CacheFormat(Packing("int4", by_channel=True), Packing("int4")).bits
    4.0
    """

    keys: Packing | None = field(default_factory=Packing)
    values: Packing | None = field(default_factory=Packing)
    newest: int = 0

    def __post_init__(self) -> None:
        for name, packing in (("keys", self.keys), ("values", self.values)):
            if packing is not None and not isinstance(packing, Packing):
                raise ConfigurationError(
                    f"{name} need a Packing, such as Packing('int8'), or None for as they are; this is {packing!r}"
                )
        if (self.keys is None) != (self.values is None):
            raise ConfigurationError(
                f"keys={self.keys!r} and values={self.values!r}: both are stored as codes, or both as they are (None)"
            )
        if self.values is not None and self.values.by_channel:
            raise ConfigurationError(
                "values by channel would be read by 64 tokens at a time for each of their weights: give keys alone "
                "by_channel=True"
            )
        whole_number("newest", self.newest, least=0)

    @property
    def bits(self) -> float:
        """Bits of an entry on average, without scales and offsets; 16 of what stays as it is."""
        if self.keys is None or self.values is None:
            return 16.0
        return (self.keys.bits + self.values.bits) / 2

    @property
    def by_blocks(self) -> bool:
        """Whether tokens become codes by 64 at once."""
        return self.keys is not None and (self.keys.by_channel or self.newest > 0)

    def check(self, keys: Tensor, values: Tensor) -> None:
        """Check that heads can be stored so.

        Raises:
            ConfigurationError: they have gradients.
            DtypeError, ShapeError: as `Packing.check`.
        """
        for name, packing, rows in (("keys", self.keys, keys), ("values", self.values, values)):
            if packing is None:
                continue
            packing.check(name, rows)
            if rows.requires_grad and torch.is_grad_enabled():
                raise ConfigurationError(
                    f"{name} have a gradient, which codes do not pass on: decode under torch.no_grad() or "
                    "torch.inference_mode(), or with a cache that stores numbers"
                )

    def codes_of(self, length: int) -> int:
        """How many of the first tokens of a text are codes once it has so many; the others are as they are."""
        if self.keys is None:
            return 0
        return max(length - self.newest, 0) // BLOCK * BLOCK if self.by_blocks else length

    def read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of the keys and values (B, H, N, ·) of a text that are stored so, in their dtype.

        >>> keys = torch.randn(1, 1, 5, 8)
        >>> error = CacheFormat().read(keys, keys)[0] - keys
        >>> bool(error.abs().max() < 0.05)
        True
        """
        count = self.codes_of(keys.shape[2])
        if self.keys is None or self.values is None or not count:
            return keys, values
        rows = keys[:, :, :count]
        if self.keys.by_channel:
            read = self.keys.read(rows.unflatten(2, (-1, BLOCK))).flatten(2, 3)
        else:
            read = self.keys.read(rows)
        of_values = self.values.read(values[:, :, :count])
        return torch.cat([read, keys[:, :, count:]], 2), torch.cat([of_values, values[:, :, count:]], 2)
