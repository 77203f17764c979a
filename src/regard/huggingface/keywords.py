"""The keywords that models hand to their attention: what is acted on, what changes nothing there, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ConfigurationError

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

NOT_KNOWN = frozenset(
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
