"""The attention function of "regard": from what a module of transformers hands over to `regard.attention`.

The keywords that models hand to their attention: what is acted on, what changes nothing there, what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import masks
from ..attention import attention, observe
from ..errors import ConfigurationError, MaskError
from ..kernels.validation import AttentionOptions
from ..lenses import Weights
from ..masks import Mask
from .mask_functions import EVERYTHING, both
from .mask_tensor import SymbolicMask
from .observe_model import watched

ACTED_ON = frozenset(
    (
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",
        "output_attentions",
        "position_bias",
        "s_aux",
        "seq_idx",
        "sliding_window",
        "softcap",
    )
)
"""What this attention reads."""

WITHOUT_EFFECT = frozenset(
    (
        "block_sequence_ids",  # the mask has it
        "cache_position",  # the mask has it
        "deterministic",  # of flash-attn's backward
        "encoder_attention_mask",  # the mask of the cross-attention has it
        "encoder_hidden_states",  # the keys and values have them
        "input_ids",
        "inputs_embeds",
        "kernel_options",  # of FlexAttention
        "labels",
        "logits_to_keep",
        "max_length_k",  # cu_seq_lens_k has it
        "max_length_q",
        "mm_token_type_ids",  # the mask has them
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",  # the keys and values have it
        "past_key_values",
        "position_embeddings",  # the query and the keys have them
        "position_ids",
        "return_dict",
        "token_type_ids",  # the mask has them
        "use_cache",
    )
)
"""What changes nothing once query, keys, values and mask are there."""

UNSUPPORTED_KEYWORDS = frozenset(
    (
        "block_indices",  # keys that an indexer chose, in blocks
        "indices",  # keys that an indexer chose
        "sinks",  # a sink of its own for each query
    )
)
"""What modules of transformers hand over that changes the result and is not read here: so it is refused, if it is not
None."""


def refuse_unknown(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise for a keyword that may change the result in a way that is not known here; None and False ask for nothing.

    Raises:
        ConfigurationError: there is one; the message names it.
    """
    for name, value in keywords.items():
        if name in ACTED_ON or name in WITHOUT_EFFECT or value is None or value is False:
            continue
        raise ConfigurationError(
            f"{type(module).__name__} gives its attention {name}={_short(value)}, which may change the result, and "
            f"attn_implementation='regard' does not know it: call the model without {name}, or choose "
            "attn_implementation='eager'"
        )


def _short(value: Any) -> str:
    """A value in few words."""
    if hasattr(value, "shape"):
        return f"<{type(value).__name__} {tuple(value.shape)}>"
    word = repr(value)
    return word if len(word) <= 40 else f"<{type(value).__name__}>"


@dataclass(frozen=True)
class Pairs:
    """Which pairs exist and what is added to their scores; no query attends to a key from `reach` on."""

    reach: int
    mask: Mask
    bias: Tensor | None = None
    query_positions: Tensor | None = None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """softmax( softcap(Q · Kᵀ · scaling) + position_bias + attention_mask ) · V, as eager attention has it.

    Shapes: query (B, H, M, D), key (B, H', N, D) and value (B, H', N, Dv) with H' a divisor of H, nothing repeated;
    the output is (B, M, H, Dv), contiguous. The weights, (B, H, M, N) in the query's dtype, come where
    `output_attentions` asks for them, else None; they are those before dropout, and a row that attends to nothing has
    zeros (eager gives such a row the mean of all values, a padded position that no one reads).

    A `SymbolicMask` is all there is to say of the pairs, and so is a tensor of four axes: bool, True = attend, or
    floats, which are added. Without a mask, a module that is causal attends causally.

    Raises:
        ConfigurationError: a keyword that is not known.
        MaskError: a mask that is none of these; or none, where it is not clear which pairs exist.
    """
    refuse_unknown(module, keywords)
    pairs = _pairs(module, query, key, attention_mask, keywords)
    sinks = keywords.get("s_aux")
    options: AttentionOptions = {  # a literal, for torch.compile does not trace a call of it
        "mask": None if pairs.mask == EVERYTHING else pairs.mask,
        "bias": _added(pairs.bias, keywords.get("position_bias"), pairs.reach),
        "scale": scaling,
        "softcap": keywords.get("softcap"),
        "sinks": None if sinks is None else sinks.reshape(-1),
        "dropout_p": dropout if module.training else 0.0,
        "query_positions": pairs.query_positions,
    }
    within = query, key[..., : pairs.reach, :], value[..., : pairs.reach, :]
    watch, wanted = watched(module), _wants_weights(module, keywords)
    if watch is None and not wanted:
        return attention(*within, **options).transpose(1, 2).contiguous(), None
    whole = Weights()
    looked_for = () if watch is None else watch.lenses
    seen = observe(*within, *dict.fromkeys((*looked_for, whole) if wanted else looked_for), **options)
    if watch is not None:
        watch.note(module, {lens: seen[lens] for lens in looked_for})
    weights = _beyond_reach(seen[whole].to(query.dtype), key.shape[-2]) if wanted else None
    return seen.output.transpose(1, 2).contiguous(), weights


def _pairs(module: nn.Module, query: Tensor, key: Tensor, mask: Any, keywords: Mapping[str, Any]) -> Pairs:
    """Which pairs exist: what the mask says, and which documents there are."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is None:
        pairs = Pairs(keys, _unmasked(module, queries, keys, keywords))
    elif isinstance(mask, SymbolicMask) and (symbol := mask.symbol) is not None:
        if tuple(mask.shape[-2:]) != (queries, keys):
            raise MaskError(
                f"{type(module).__name__} has {queries} queries and {keys} keys, but its mask {mask!r} was made for "
                f"{mask.shape[-2]} and {mask.shape[-1]}: its layer does not use the cache as the mask function was told"
            )
        pairs = Pairs(mask.reach, symbol, query_positions=mask.query_positions)
    else:
        pairs = _given(module, mask.dense() if isinstance(mask, SymbolicMask) else mask, queries, keys)
    documents = _documents(module, query, keys, keywords)
    if not documents:
        return pairs
    return Pairs(pairs.reach, both([pairs.mask, *documents]), pairs.bias, pairs.query_positions)


def _given(module: nn.Module, mask: Any, queries: int, keys: int) -> Pairs:
    """A mask that is not ours: four axes of booleans, or of numbers that are added; or FlexAttention's."""
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.bool:
        return Pairs(keys, masks.where(keep=mask))
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.is_floating_point():
        return Pairs(keys, EVERYTHING, mask)
    if type(mask).__name__ == "BlockMask":
        blocks: Any = mask
        return Pairs(keys, masks.from_block_mask(blocks))
    has = f"a {mask.dtype} tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    mend = ". Where 1 = attend, give mask.bool()" if isinstance(mask, Tensor) and mask.ndim == 4 else ""
    raise MaskError(
        f"{type(module).__name__} gives its attention {has} as attention_mask; it needs (batch, heads or 1, {queries}, "
        f"{keys}) of bool, where True = attend, or of floats, which are added to the scores{mend}"
    )


def _unmasked(module: nn.Module, queries: int, keys: int, keywords: Mapping[str, Any]) -> Mask:
    """Which pairs exist where a module gives no mask: it says itself whether it is causal.

    Our mask function always gives one, so that this is a module on its own, or a model that makes no mask.
    """
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", None) if causal is None else causal
    window = keywords.get("sliding_window")
    if window is not None and keys <= window:
        window = None  # it leaves nothing out
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


def _documents(module: nn.Module, query: Tensor, keys: int, keywords: Mapping[str, Any]) -> list[Mask]:
    """The documents packed into one sequence, from flash-attn's cu_seq_lens or from seq_idx."""
    found = []
    ends, of_keys = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    if ends is not None or of_keys is not None:
        alone = query.shape[0] == 1 and query.shape[-2] == keys
        if ends is None or of_keys is None or not torch.equal(ends, of_keys) or not alone:
            raise MaskError(
                f"{type(module).__name__} gives cu_seq_lens_q and cu_seq_lens_k for a batch of {query.shape[0]}, "
                f"{query.shape[-2]} queries and {keys} keys; they need to be equal, for a batch of 1 and as many "
                "queries as keys: a cache of packed sequences is not known here, so call the model with use_cache=False"
            )
        found.append(masks.from_cu_seqlens(ends))
    if (ids := keywords.get("seq_idx")) is not None:
        if query.shape[-2] != keys:
            raise MaskError(
                f"{type(module).__name__} gives seq_idx for {query.shape[-2]} queries and {keys} keys; it needs as "
                "many queries as keys: call the model with use_cache=False"
            )
        found.append(masks.documents(ids))
    return found


def _added(first: Tensor | None, second: Tensor | None, reach: int) -> Tensor | None:
    """What is added to the scores, over the keys within reach."""
    parts = [part if part.shape[-1] == 1 else part[..., :reach] for part in (first, second) if part is not None]
    return reduce(add, parts) if parts else None


def _beyond_reach(weights: Tensor, keys: int) -> Tensor:
    """Zeros for the keys that lie beyond those within reach; no copy where none do."""
    missing = keys - weights.shape[-1]
    return pad(weights, (0, missing)) if missing else weights


def _wants_weights(module: nn.Module, keywords: Mapping[str, Any]) -> bool:
    """Whether the model is to return its weights: it says so to its attention, or collects what that returns."""
    if keywords.get("output_attentions"):
        return True
    from transformers.utils import output_capturing

    collector = getattr(output_capturing, "_active_collector", None)
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False) and not module._forward_hooks:
        return False  # a part alone is compiled: who collects from outside cannot be asked, but collects by hooks
    collected = collector.get() if collector is not None else None
    return any("attentions" in name for name in collected or ())
