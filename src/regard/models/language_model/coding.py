"""A configuration as JSON and back: each value by the name of its kind, and its fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...errors import CheckpointError, RegardError, nearest
from ...positions import NTK, DynamicNTK, Linear, Llama3, LongRoPE, Rotary, YaRN
from .config import (
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    LanguageModelConfig,
    LayerConfig,
    LayerNormConfig,
    RMSNormConfig,
)

KINDS = {
    kind.__name__: kind
    for kind in (
        AttentionConfig,
        DynamicNTK,
        ExpertsConfig,
        FeedForwardConfig,
        GatedFeedForwardConfig,
        LanguageModelConfig,
        LayerConfig,
        LayerNormConfig,
        Linear,
        Llama3,
        LongRoPE,
        NTK,
        RMSNormConfig,
        Rotary,
        YaRN,
    )
}


def encoded(value: Any) -> Any:
    """What JSON can hold.

    >>> encoded(LayerConfig(before=3))
    {'kind': 'LayerConfig', 'before': 3, 'prefix': 0, 'rotary': None}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if KINDS.get(name) is not type(value):
            raise CheckpointError(
                f"the configuration holds a {name}, which is none of regard's own: a checkpoint cannot name it; "
                f"{nearest(name, KINDS)}"
            )
        fields = {field.name: encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": name, **fields}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    return value


def decoded(value: Any) -> Any:
    """The value that was encoded.

    Raises:
        CheckpointError: a kind or a field that is unknown here.

    >>> decoded({"kind": "LayerConfig", "before": 3})
    LayerConfig(before=3, prefix=0, rotary=None)
    """
    if isinstance(value, list):
        return tuple(decoded(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {name: decoded(item) for name, item in value.items() if name != "kind"}
    name = str(value.get("kind"))
    if name not in KINDS:
        raise CheckpointError(f"the configuration names {name!r}, which is unknown here; {nearest(name, KINDS)}")
    try:
        return KINDS[name](**fields)
    except (TypeError, RegardError) as error:
        raise CheckpointError(f"the configuration of {name} cannot be read: {error}") from None
