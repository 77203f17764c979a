"""The attention function registered with transformers: it translates a module's arguments for `regard.attention`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import masks
from ..attention import attention, observe
from ..errors import ConfigurationError, MaskError
from ..kernels.validation import AttentionOptions
from ..lenses import Weights
from ..masks import Mask
from .mask_functions import EVERYTHING, intersection
from .mask_tensor import LazyMaskTensor
from .observe_model import active_observer

NAME = "regard"
"""Name of this attention in transformers: `attn_implementation="regard"`."""
SUPPORTED_KEYWORDS = frozenset(
    (
        "block_indices",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "indices",
        "is_causal",
        "output_attentions",
        "position_bias",
        "s_aux",
        "seq_idx",
        "sliding_window",
        "softcap",
    )
)
"""Keywords that this attention applies."""

IGNORED_KEYWORDS = frozenset(
    (
        "block_sequence_ids",  # contained in the mask
        "cache_position",  # contained in the mask
        "deterministic",  # of flash-attn's backward
        "encoder_attention_mask",  # contained in the mask of the cross-attention
        "encoder_hidden_states",  # contained in keys and values
        "input_ids",
        "inputs_embeds",
        "kernel_options",  # of FlexAttention
        "labels",
        "logits_to_keep",
        "max_length_k",  # contained in cu_seq_lens_k
        "max_length_q",
        "mm_token_type_ids",  # contained in the mask
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",  # contained in keys and values
        "past_key_values",
        "position_embeddings",  # contained in query and keys
        "position_ids",
        "return_dict",
        "token_type_ids",  # contained in the mask
        "use_cache",
    )
)
"""Keywords without effect on the result, given query, keys, values and mask."""

UNSUPPORTED_KEYWORDS = {
    "sinks": "a sink of its own for each query",
}
"""Keywords that change the result and are not supported, and what they are: refused unless they are None."""


def refuse_unknown(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse unknown keywords, which may change the result; None and False count as not passed.

    Raises:
        ConfigurationError: an unknown keyword; the message names it.
    """
    for name, value in keywords.items():
        if name in SUPPORTED_KEYWORDS or name in IGNORED_KEYWORDS or value is None or value is False:
            continue
        raise ConfigurationError(
            f"{type(module).__name__} gives its attention {name}={_short(value)}, which may change the result, and "
            f"attn_implementation='regard' does not know it: call the model without {name}, or choose "
            "attn_implementation='eager'"
        )


def _short(value: Any) -> str:
    """A short description of a value, for messages."""
    if hasattr(value, "shape"):
        return f"<{type(value).__name__} {tuple(value.shape)}>"
    word = repr(value)
    return word if len(word) <= 40 else f"<{type(value).__name__}>"


class MaskAndBias(NamedTuple):
    """Mask and additive bias of one call; no query attends to a key from `reachable_keys` on."""

    reachable_keys: int
    mask: Mask
    bias: Tensor | None = None
    query_positions: range | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """softmax( softcap(Q · Kᵀ · scaling) + position_bias + attention_mask ) · V, equal to eager attention.

    Shapes: query (B, H, M, D), key (B, H', N, D) and value (B, H', N, Dv) with H' a divisor of H, not repeated;
    the output is (B, M, H, Dv), contiguous. The weights, (B, H, M, N) in the query's dtype, are returned where
    `output_attentions` requests them, else None; they are those before dropout, and 0 in a row that attends to nothing
    (eager returns the mean of all values there, at padded positions, which are not used).

    The mask is a `LazyMaskTensor` or a tensor of four axes: bool, True = attend, or floats, which are added to the
    scores. Without a mask, a module that is causal attends causally. Of its keys a query attends to those alone that
    an indexer has selected: `indices`, (B, M, K), as of DeepSeek V3.2 and GLM-MoE-DSA, or `block_indices`, blocks of
    keys for each group of heads, (B, groups, M, K), as of MiniMax M3; -1 selects none.

    Raises:
        ConfigurationError: an unknown keyword; blocks of keys of a module that does not say how large they are.
        MaskError: another kind of mask; no mask where it is ambiguous which pairs exist.
    """
    refuse_unknown(module, keywords)
    pairs = _mask_and_bias(module, query, key, attention_mask, keywords)
    sinks = keywords.get("s_aux")
    options: AttentionOptions = {  # a dict literal: torch.compile does not trace the constructor of a TypedDict
        "mask": None if pairs.mask == EVERYTHING else pairs.mask,
        "bias": _summed_bias(pairs.bias, keywords.get("position_bias"), pairs.reachable_keys),
        "scale": scaling,
        "softcap": keywords.get("softcap"),
        "sinks": None if sinks is None else sinks.reshape(-1),
        "dropout_p": dropout if module.training else 0.0,
        "query_positions": pairs.query_positions,
    }
    keys = key.shape[-2]
    if pairs.reachable_keys != keys:
        key, value = key[..., : pairs.reachable_keys, :], value[..., : pairs.reachable_keys, :]
    output, weights = attend_observed(module, query, key, value, options, _weights_requested(module, keywords))
    return output, None if weights is None else _padded_weights(weights, keys)


def attend_observed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, weights_requested: bool
) -> tuple[Tensor, Tensor | None]:
    """Output (B, M, H, Dv), contiguous, with the lenses of an observer; and the weights where they are requested."""
    observer = active_observer(module)
    if observer is None and not weights_requested:
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    all_weights = Weights()
    lenses = () if observer is None else observer.lenses(module)
    seen = observe(
        query, key, value, *dict.fromkeys((*lenses, all_weights) if weights_requested else lenses), **options
    )
    if observer is not None:
        observer.add(module, {lens: seen[lens] for lens in lenses})
    weights = seen[all_weights].to(query.dtype) if weights_requested else None
    return seen.output.transpose(1, 2).contiguous(), weights


def _mask_and_bias(
    module: nn.Module, query: Tensor, key: Tensor, mask: Any, keywords: Mapping[str, Any]
) -> MaskAndBias:
    """Mask and bias of one call: those of the mask argument, intersected with packed documents."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None:
        pairs = MaskAndBias(keys, _unmasked(module, queries, keys, keywords))
    elif isinstance(mask, LazyMaskTensor) and (symbol := mask.symbol) is not None:
        extent = mask.contents.extent
        if extent.queries != queries or extent.keys != keys:
            raise MaskError(
                f"{type(module).__name__} has {queries} queries and {keys} keys, but its mask {mask!r} was made for "
                f"{extent.queries} and {extent.keys}: its layer does not use the cache that the mask was made for"
            )
        pairs = MaskAndBias(mask.reachable_keys, symbol, query_positions=mask.query_positions)
    else:
        pairs = _from_tensor(module, mask.dense() if isinstance(mask, LazyMaskTensor) else mask, queries, keys)
    others = _documents(module, query, keys, keywords) + _selected(module, query, pairs.reachable_keys, keywords)
    if not others:
        return pairs
    return MaskAndBias(pairs.reachable_keys, intersection([pairs.mask, *others]), pairs.bias, pairs.query_positions)


def _from_tensor(module: nn.Module, mask: Any, queries: int, keys: int) -> MaskAndBias:
    """Mask and bias from a tensor of four axes, bool or additive, or from a BlockMask of FlexAttention."""
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.bool:
        return MaskAndBias(keys, masks.where(keep=mask))
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.is_floating_point():
        return MaskAndBias(keys, EVERYTHING, mask)
    if type(mask).__name__ == "BlockMask":
        blocks: Any = mask
        return MaskAndBias(keys, masks.from_block_mask(blocks))
    has = f"a {mask.dtype} tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    mend = ". Where 1 = attend, give mask.bool()" if isinstance(mask, Tensor) and mask.ndim == 4 else ""
    raise MaskError(
        f"{type(module).__name__} gives its attention {has} as attention_mask; it needs (batch, heads or 1, {queries}, "
        f"{keys}) of bool, where True = attend, or of floats, which are added to the scores{mend}"
    )


def _unmasked(module: nn.Module, queries: int, keys: int, keywords: Mapping[str, Any]) -> Mask:
    """The mask of a module that passes none: causal or everything, by its `is_causal` and `sliding_window`.

    `symbolic_mask` never returns None, so this is a module called on its own, or a model that makes no mask.
    """
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", None) if causal is None else causal
    window = keywords.get("sliding_window")
    if window is not None and keys <= window:
        window = None  # it covers all keys
    if window is None and (queries <= 1 or causal is False):
        return EVERYTHING
    if causal and queries == keys:
        return masks.causal() if window is None else masks.causal() & masks.window(before=window - 1)
    name = type(module).__name__
    if causal is None:
        reason = "it has no is_causal to say whether it is causal"
    elif window is not None:
        reason = f"its sliding_window={window} does not say where the {queries} queries and {keys} keys sit"
    else:
        reason = f"it is causal, with {queries} queries and {keys} keys, which may sit at the first or the last of them"
    raise MaskError(
        f"{name} gives its attention no mask, and {reason}: give an attention_mask of four axes, or is_causal=False "
        "where every query attends to every key"
    )


def _selected(module: nn.Module, query: Tensor, reachable_keys: int, keywords: Mapping[str, Any]) -> list[Mask]:
    """Masks of the keys, and of the blocks of keys, that an indexer has selected for each query."""
    selected = []
    if (indices := keywords.get("indices")) is not None:
        selected.append(masks.chosen(_reachable(indices.unsqueeze(1), reachable_keys)))
    if (blocks := keywords.get("block_indices")) is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise ConfigurationError(
                f"{type(module).__name__} gives its attention block_indices={_short(blocks)}, and has no "
                "indexer.block_size that says how many keys a block has: choose attn_implementation='eager'"
            )
        blocks = _reachable(blocks, -(-reachable_keys // size))
        selected.append(masks.blocks(blocks.repeat_interleave(query.shape[1] // blocks.shape[1], 1), (1, size)))
    return selected


def _reachable(indices: Tensor, end: int) -> Tensor:
    """Indices of keys with -1 for those that no query attends to, such as the free places of a cache."""
    return indices.masked_fill(indices >= end, -1)


def _documents(module: nn.Module, query: Tensor, keys: int, keywords: Mapping[str, Any]) -> list[Mask]:
    """Masks of the documents packed into one sequence, from flash-attn's cu_seq_lens or from seq_idx."""
    documents = []
    ends, key_ends = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    if ends is not None or key_ends is not None:
        unbatched = query.shape[0] == 1 and query.shape[-2] == keys
        if ends is None or key_ends is None or not torch.equal(ends, key_ends) or not unbatched:
            raise MaskError(
                f"{type(module).__name__} gives cu_seq_lens_q and cu_seq_lens_k for a batch of {query.shape[0]}, "
                f"{query.shape[-2]} queries and {keys} keys; they need to be equal, for a batch of 1 and as many "
                "queries as keys: a cache of packed sequences is not known here, so call the model with use_cache=False"
            )
        documents.append(masks.from_cu_seqlens(ends))
    if (ids := keywords.get("seq_idx")) is not None:
        if query.shape[-2] != keys:
            raise MaskError(
                f"{type(module).__name__} gives seq_idx for {query.shape[-2]} queries and {keys} keys; it needs as "
                "many queries as keys: call the model with use_cache=False"
            )
        documents.append(masks.documents(ids))
    return documents


def _summed_bias(first: Tensor | None, second: Tensor | None, reachable_keys: int) -> Tensor | None:
    """The sum of both biases over the reachable keys; None where there is none."""
    parts = [
        part if part.shape[-1] == 1 else part[..., :reachable_keys] for part in (first, second) if part is not None
    ]
    return reduce(add, parts) if parts else None


def _padded_weights(weights: Tensor, keys: int) -> Tensor:
    """Weights padded with zeros for unreachable keys; not copied where there are none."""
    missing = keys - weights.shape[-1]
    return pad(weights, (0, missing)) if missing else weights


def _weights_requested(module: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether the model returns its weights: by `output_attentions`, or by transformers' output collector."""
    if keywords.get("output_attentions"):
        return True
    import transformers.utils.output_capturing as output_capturing  # "from" would take as long as all the rest

    collector = getattr(output_capturing, "_active_collector", None)
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False) and not module._forward_hooks:
        return False  # a compiled submodule cannot read the collector of its model, which collects by hooks
    collected = collector.get() if collector is not None else None
    return bool(collected) and any("attentions" in name for name in collected)
