"""Layers that attend to the keys that an earlier layer's indexer has chosen: which they are, and one selection each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import ConfigurationError
from ...nn import KeySelection

if TYPE_CHECKING:
    from .config import LayerConfig


def check_choices(layers: Sequence[LayerConfig], indexed: Sequence[bool]) -> None:
    """Check that each layer with `chosen_by` can attend to the keys that that one chooses.

    indexed: whether the attention of each layer has an indexer, which those with `chosen_by` do without.

    Raises:
        ConfigurationError: it is no earlier layer, or has no indexer, or attends to other tokens.
    """
    for number, layer in enumerate(layers):
        source = layer.chosen_by
        if source is None:
            continue
        if type(source) is not int or not 0 <= source < number:
            raise ConfigurationError(
                f"layer {number} has chosen_by={source!r}; it needs the number of an earlier layer, whose indexer "
                "chooses its keys"
            )
        if not indexed[source] or not indexed[number] or layers[source].chosen_by is not None:
            raise ConfigurationError(
                f"layer {number} has chosen_by={source}, but layer {source} has no indexer of its own: name one that "
                "has, of a model with LatentAttentionConfig(indexer=...)"
            )
        if layers[source].mask != layer.mask:
            raise ConfigurationError(
                f"layer {number} attends to {layer.mask!r}, but the keys that layer {source} chooses are of "
                f"{layers[source].mask!r}: give both the same before and prefix"
            )


def new_selections(layers: Sequence[LayerConfig]) -> list[KeySelection | None]:
    """For each layer the selection of one pass, the same object for a layer and those that it chooses for, or None."""
    shared = {layer.chosen_by: KeySelection() for layer in layers if layer.chosen_by is not None}
    return [shared.get(number if layer.chosen_by is None else layer.chosen_by) for number, layer in enumerate(layers)]
