"""What transformers calls each of our parameters."""

from __future__ import annotations

import re

EDGES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Within a block: blocks.0.* here, model.layers.0.* there.
PARTS = {
    "attention.projections.query.": "self_attn.q_proj.",
    "attention.projections.key.": "self_attn.k_proj.",
    "attention.projections.value.": "self_attn.v_proj.",
    "attention.projections.output.": "self_attn.o_proj.",
    "attention.projections.query_norm.": "self_attn.q_norm.",
    "attention.projections.key_norm.": "self_attn.k_norm.",
    "attention.sinks": "self_attn.sinks",
    "attention_residual.norm.": "input_layernorm.",
    "attention_residual.norm_before.": "input_layernorm.",
    "attention_residual.norm_after.": "post_attention_layernorm.",
    "feed_forward_residual.norm.": "post_attention_layernorm.",
    "feed_forward_residual.norm_before.": "pre_feedforward_layernorm.",
    "feed_forward_residual.norm_after.": "post_feedforward_layernorm.",
    "feed_forward.gate.": "mlp.gate_proj.",
    "feed_forward.up.": "mlp.up_proj.",
    "feed_forward.down.": "mlp.down_proj.",
    "feed_forward.router.": "mlp.router.",
    "feed_forward.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "feed_forward.gate_up": "mlp.experts.gate_up_proj",
    "feed_forward.down_bias": "mlp.experts.down_proj_bias",
    "feed_forward.down": "mlp.experts.down_proj",
}


def their_name(name: str) -> str:
    """The name in a checkpoint of transformers.

    >>> their_name("blocks.3.attention.projections.query.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in EDGES:
        return EDGES[name]
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    number, rest = (block[1], block[2]) if block else ("", name)
    ours = next(part for part in PARTS if rest == part or (part.endswith(".") and rest.startswith(part)))
    return f"model.layers.{number}.{PARTS[ours]}{rest.removeprefix(ours)}"
