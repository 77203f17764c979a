"""Settings of single layers in config.json: their kinds, their heads, and the layers whose keys they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import CheckpointError
from .config_reader import ModelSettings

SLIDING, FULL = "sliding_attention", "full_attention"


def layer_kinds(settings: ModelSettings, every: int) -> list[str]:
    """The kind of each layer: `layer_types`, or one full layer after every - 1 with a window.

    Raises:
        CheckpointError: another kind, or another number of layers.
    """
    count, kinds = settings.need("num_hidden_layers"), settings.get("layer_types")
    if kinds is None:
        kinds = [FULL if (number + 1) % every == 0 else SLIDING for number in range(count)]
    other = next((kind for kind in kinds if kind not in (SLIDING, FULL)), None)
    if other is not None or len(kinds) != count:
        said = f"has {other!r}" if other is not None else f"names {len(kinds)} layers"
        raise CheckpointError(
            f"config.json's layer_types {said}; it needs {SLIDING!r} or {FULL!r} for each of the {count} layers"
        )
    return list(kinds)


def key_layers(settings: ModelSettings, kinds: Sequence[str]) -> list[int | None]:
    """For each layer the one whose keys it reads: of the last `num_kv_shared_layers` the last of its kind before them.

    Raises:
        CheckpointError: a number that leaves no layer of some kind with keys.
    """
    shared = settings.get("num_kv_shared_layers") or 0
    if type(shared) is not int or not 0 <= shared < len(kinds):
        raise CheckpointError(
            f"config.json says num_kv_shared_layers={shared!r}; it needs a whole number in 0..{len(kinds) - 1}"
        )
    owners = {kind: number for number, kind in enumerate(kinds[: len(kinds) - shared])}
    missing = sorted(set(kinds) - owners.keys())
    if missing:
        raise CheckpointError(
            f"config.json says num_kv_shared_layers={shared} of {len(kinds)} layers, which leaves no layer of "
            f"{missing[0]!r} before them, whose keys those of its kind could read"
        )
    return [None if number < len(kinds) - shared else owners[kind] for number, kind in enumerate(kinds)]


def layer_heads(settings: ModelSettings, kinds: Sequence[str]) -> list[tuple[int, int]]:
    """The number of key heads of each layer of Gemma 4, and their dim.

    `per_layer_config`, by the number of a layer; in older files `global_head_dim`, and with `attention_k_eq_v`
    `num_global_key_value_heads`, of all full layers.

    Raises:
        CheckpointError: a layer that there is not, a setting that is unknown for single layers.
    """
    heads, dim = settings.need("num_key_value_heads"), settings.need("head_dim")
    own: dict[str, Any] | None = settings.get("per_layer_config")
    full_dim, full_heads = settings.get("global_head_dim", 512), settings.get("num_global_key_value_heads")
    if own is None:
        full_heads = full_heads if settings.get("attention_k_eq_v") and full_heads is not None else heads
        return [(full_heads, full_dim) if kind == FULL else (heads, dim) for kind in kinds]
    for number, changes in own.items():
        unknown = sorted(set(changes) - {"head_dim", "num_key_value_heads"})
        if not number.isdecimal() or int(number) >= len(kinds) or unknown:
            said = f"{unknown[0]}={changes[unknown[0]]!r} of layer {number}" if unknown else f"a layer {number!r}"
            raise CheckpointError(
                f"config.json's per_layer_config has {said}; it needs head_dim or num_key_value_heads of layers in "
                f"0..{len(kinds) - 1}"
            )
    changed = [own.get(str(number), {}) for number in range(len(kinds))]
    return [(change.get("num_key_value_heads", heads), change.get("head_dim", dim)) for change in changed]


def layer_sparsities(settings: ModelSettings, count: int) -> list[float | None]:
    """`activation_sparsity_pattern` of each layer; without one the first 10 of more than 10 layers have 0.95.

    Raises:
        CheckpointError: another number of layers.
    """
    sparse = 10 if count > 10 else 0
    shares = [0.95] * sparse + [0.0] * (count - sparse)
    if settings.get("activation_sparsity_pattern") is not None:
        shares = settings.of_layers("activation_sparsity_pattern", count)
    return [share or None for share in shares]
