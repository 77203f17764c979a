"""Continuous batching of transformers, `generate_batch`, of models whose attention is regard's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise, starmap
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ..errors import ConfigurationError, require
from .attention_function import NAME, attention_forward

PAGED = "paged|eager"
"""The name of the one implementation that transformers' continuous batching takes and that is no kernel of others."""
OF_BATCH = (
    *("block_table", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "logits_indices", "logits_processor_args"),
    *("max_length_k", "max_length_q", "read_index", "write_index"),
)
"""Keywords of continuous batching: where sequences begin, and where their keys are; the mask has the rest."""
BATCHED: WeakSet[nn.Module] = WeakSet()
"""The modules of models that have "regard" and were given to a manager of batches, under the name of another."""


def take_batches() -> None:
    """Let managers of continuous batching take models that have "regard"; calling it again has no effect.

    transformers refuses all names but a few for its batches, and removes a prefix "paged|" from any other. So a manager
    is shown "paged|eager" for a model that has "regard", and gives the model its name back when it stops; the function
    of that name computes by regard for the modules of such models, and for all others as before.

    Raises:
        MissingExtra: transformers is not installed.
    """
    modeling = require("transformers.modeling_utils", extra="huggingface")
    batching = require("transformers.generation.continuous_batching.continuous_api", extra="huggingface")
    managers = batching.ContinuousBatchingManager
    if getattr(managers, "takes_regard", False):
        return
    managers.takes_regard = True
    managers.switch_to_cb_friendly_attn = _under_another_name(managers.switch_to_cb_friendly_attn)
    modeling.AttentionInterface.register(PAGED, _by_module(modeling.ALL_ATTENTION_FUNCTIONS[PAGED]))


def _under_another_name(switch: Callable[..., None]) -> Callable[..., None]:
    """`switch_to_cb_friendly_attn` of a manager, which sets the implementation that a model has in a batch."""

    @functools.wraps(switch)
    def switch_attention(manager: Any, model: Any, *options: Any, **named: Any) -> None:
        ours = model.config._attn_implementation == NAME
        (BATCHED.update if ours else BATCHED.difference_update)(model.modules())
        if ours:
            model.set_attn_implementation(PAGED)
        switch(manager, model, *options, **named)
        if ours:
            manager._original_attn_impl = NAME  # which it sets when it stops

    return switch_attention


def _by_module(others: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function of modules in `BATCHED`, and of all others the one that was there."""

    @functools.wraps(others)
    def choose(module: nn.Module, *tensors: Tensor, **keywords: Any) -> tuple[Tensor, Tensor | None]:
        return (paged_attention_forward if module in BATCHED else others)(module, *tensors, **keywords)

    return choose


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    cache: Any = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of the tokens of several sequences, one after another, each to its own keys in the cache.

    Shapes: query (1, heads, T, D), key and value (1, key heads, T, ·), the T tokens of a step; attention_mask (1, 1, T,
    N) with the N keys of all sequences; output (1, T, heads, Dv).

    Raises:
        ConfigurationError: there is no cache; an unknown keyword, as `attention_forward`.
    """
    if cache is None:
        raise ConfigurationError(
            f"{PAGED!r} is for continuous batching, which passes a cache: set_attn_implementation({NAME!r}) first"
        )
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=keywords)
    row_ends, key_ends = (keywords[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    plain = {name: value for name, value in keywords.items() if name not in OF_BATCH}
    output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for rows, columns in zip(starmap(slice, pairwise(row_ends)), starmap(slice, pairwise(key_ends)), strict=False):
        if rows.start < rows.stop:
            own = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            output[:, rows], _ = attention_forward(module, *own, attention_mask[..., rows, columns], **plain)
    return output, None
