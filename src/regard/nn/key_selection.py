"""The keys that one layer has chosen, handed on to layers after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class KeySelection:
    """The columns of the keys that a layer's indexer chooses in one call, for later layers that attend to the same.

    A new one is given, as `selection=`, to the call of the layer with the indexer, which writes the columns, and then
    to the calls of the layers with an `EarlierIndexer`, which read them. A call that is computed again, as under
    activation checkpointing, finds and writes what it did before. No gradient passes through the columns.

    Shapes: columns (batch, M, count), numbers of keys, -1 for none; None before the first call.
    """

    columns: Tensor | None = None
