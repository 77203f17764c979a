"""The backend of torch's own operators, for any device and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, dtype

from ..base import NormalizerTiles
from .gathered_rows import GatheredByTorch
from .key_parts import KeyParts
from .tile_weights import WeightsByTorch
from .torch_flash_timing import TimedFlashOfTorch


class TorchBackend:
    """Torch's operators: they compute whatever no other backend does."""

    name = "torch"
    nan_safe = False
    flash = None
    paged = None
    short = None
    additive = None
    normalizer_tiles: Mapping[str, NormalizerTiles] = MappingProxyType({})
    recurrences = None  # torch's operators compute them in linear/chunks.py, where gradients have gradients too

    def __init__(self) -> None:
        self.few_queries, self.gathered, self.weights = KeyParts(), GatheredByTorch(), WeightsByTorch()
        self.timed_flash = TimedFlashOfTorch()

    def arithmetic(self, dtype: dtype) -> None:
        """Nothing to tell."""

    def why_not(self, value: Tensor) -> list[str]:
        """No reasons."""
        return []

    def runs(self, *tensors: Tensor) -> bool:
        """Of any device and dtype."""
        return True


TORCH = TorchBackend()
