"""Layers that read the keys and values of an earlier layer: which they are, and what they have to agree in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import ConfigurationError

if TYPE_CHECKING:
    from .config import LayerConfig


def key_sources(layers: Sequence[LayerConfig]) -> tuple[int | None, ...]:
    """For each layer the number of that whose keys and values several read; None where a layer has them alone."""
    shared = {layer.keys_from for layer in layers}
    own = (number if number in shared else None for number in range(len(layers)))
    return tuple(mine if layer.keys_from is None else layer.keys_from for mine, layer in zip(own, layers, strict=True))


def check_shared_keys(layers: Sequence[LayerConfig], key_heads: Sequence[tuple[int, int] | None]) -> None:
    """Check that each layer with `keys_from` can read the keys and values of that one.

    key_heads: the number of key heads of each layer, and their dim; None of latent attention, which stores no keys.

    Raises:
        ConfigurationError: it is no earlier layer, or has no keys of its own; other heads, another rotary; keys that
            the earlier layer does not keep.
    """
    for number, reader in enumerate(layers):
        if reader.keys_from is not None:
            _check_source(number, reader.keys_from, layers)
            _check_keys_fit(number, reader.keys_from, layers, key_heads)


def check_no_gates(layers: Sequence[LayerConfig], gated: Sequence[bool]) -> None:
    """Check that no layer with a forget gate reads the keys of another, or is read.

    Raises:
        ConfigurationError: one does.
    """
    for number, layer in enumerate(layers):
        if layer.keys_from is not None and (gated[number] or gated[layer.keys_from]):
            raise ConfigurationError(
                f"layer {number} reads the keys of layer {layer.keys_from}, and one of them has a forget_gate, whose "
                "sums are not among the keys: give both an attention= without forget_gate, or leave keys_from out"
            )


def _check_source(number: int, source: int, layers: Sequence[LayerConfig]) -> None:
    """Check that a layer's source is an earlier one with keys of its own."""
    if type(source) is not int or not 0 <= source < number:
        earlier = f"an earlier layer, in 0..{number - 1}" if number else "an earlier layer, and there is none"
        raise ConfigurationError(f"layer {number} has keys_from={source!r}; it needs the number of {earlier}")
    if layers[source].linear is not None:
        raise ConfigurationError(
            f"layer {number} has keys_from={source}, but layer {source} is of linear attention, which has a state and "
            "no keys: name a layer of softmax attention"
        )
    if layers[source].positions is not None:
        raise ConfigurationError(
            f"layer {number} has keys_from={source}, but the keys of layer {source} have positions of their own, "
            f"{layers[source].positions!r}: name a layer with a rotary, or without positions"
        )
    if layers[source].keys_from is not None:
        raise ConfigurationError(
            f"layer {number} has keys_from={source}, but layer {source} has no keys of its own: it reads those of "
            f"layer {layers[source].keys_from}, which this one can name too"
        )


def _check_keys_fit(
    number: int, source: int, layers: Sequence[LayerConfig], key_heads: Sequence[tuple[int, int] | None]
) -> None:
    """Check that the keys of the source are those that the layer asks for."""
    reader, owner, named = layers[number], layers[source], f"layer {number} reads the keys of layer {source}"
    asked, kept = key_heads[number], key_heads[source]
    if asked is None or kept is None:
        raise ConfigurationError(
            f"layer {number} has keys_from={source}, but layer {number if asked is None else source} is of latent "
            "attention, which has no keys that layers share: leave keys_from out"
        )
    if asked != kept:
        (heads, dim), (own_heads, own_dim) = asked, kept
        raise ConfigurationError(
            f"{named}, which has {own_heads} key heads of {own_dim}, but asks for {heads} of {dim}: give both the same "
            "num_kv_heads and head_dim"
        )
    if reader.rotary != owner.rotary:
        raise ConfigurationError(
            f"{named}, which are rotated by {owner.rotary}, but its queries by {reader.rotary}: give both the same "
            "rotary"
        )
    wider = owner.before is not None and (reader.before is None or reader.before > owner.before)
    if wider or (owner.before is not None and reader.prefix > owner.prefix):
        raise ConfigurationError(
            f"{named}, which keeps those of before={owner.before} and prefix={owner.prefix}, but attends to "
            f"before={reader.before} and prefix={reader.prefix}: a layer attends to no more than the one that it reads"
        )
