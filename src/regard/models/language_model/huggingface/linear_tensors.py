"""Stored tensors of models with layers of linear attention, under the names of single parameters.

Qwen3-Next stores queries, keys, values and gates of a linear layer as one matrix, in which the rows of each key head
stand together, its two gates for each head as another, and queries and gates of its softmax attention head by head;
Qwen3.5 stores queries, keys and values as one matrix. The names of linear layers become those that softmax attention
has, where they are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..config import AttentionConfig, LanguageModelConfig
from ..linear_parts import LinearHeadsConfig
from .stored_tensors import StoredTensor

NAMES = {
    "out_proj.weight": "o_proj.weight",
    "norm.weight": "gate_norm.weight",
    "o_norm.weight": "gate_norm.weight",
    "g_proj.weight": "gate_proj.weight",
    "dt_bias": "a_proj.bias",
    "in_proj_a.weight": "a_proj.weight",
    "in_proj_b.weight": "b_proj.weight",
    "in_proj_z.weight": "gate_proj.weight",
}
"""Parameters of Gated DeltaNet that have another name here."""

KIMI = {
    "self_attn.f_a_proj.weight": "self_attn.a_proj.0.weight",
    "self_attn.f_b_proj.weight": "self_attn.a_proj.1.weight",
    "self_attn.dt_bias": "self_attn.a_proj.1.bias",
    "self_attn.g_a_proj.weight": "self_attn.gate_proj.0.weight",
    "self_attn.g_b_proj.weight": "self_attn.gate_proj.1.weight",
    "self_attn.o_norm.weight": "self_attn.gate_norm.weight",
}
"""Parameters of Kimi Delta Attention, whose decay and gate are products of two matrices."""

OLMO = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
"""Names in the files of OLMo-hybrid, and those of the parameters."""

Tensors = dict[str, StoredTensor]


def without_fused_heads(tensors: Mapping[str, StoredTensor], config: LanguageModelConfig) -> Tensors:
    """The tensors of a model with linear layers of their own heads, split and renamed; those of others as they are."""
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    linear = {
        number: layer.linear.heads
        for number, layer in enumerate(config.layers)
        if layer.linear is not None and layer.linear.heads is not None
    }
    if not linear:
        return dict(tensors)
    for old, new in OLMO.items():
        found = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in found.items()}
    for number in range(len(config.layers)):
        prefix = f"model.layers.{number}."
        own = {name.removeprefix(prefix): found.pop(name) for name in [*found] if name.startswith(prefix)}
        heads = linear.get(number)
        own = _of_linear(own, heads) if heads is not None else _of_full(own, config)
        found |= {prefix + name: tensor for name, tensor in own.items()}
    return found


def _of_linear(tensors: Tensors, heads: LinearHeadsConfig) -> Tensors:
    """The parameters of a layer of Gated DeltaNet; tensors of other shapes as they are."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith("linear_attn."):
            found[KIMI.get(name, name)] = tensor
            continue
        part = name.removeprefix("linear_attn.")
        found["self_attn." + NAMES.get(part, part)] = tensor
    key_heads = heads.num_key_heads or heads.num_heads
    groups = heads.num_heads // key_heads  # value heads of each key head
    features, values = heads.head_dim or 0, groups * (heads.value_dim or 0)
    _split(found, "in_proj_qkvz.weight", heads, {"q": features, "k": features, "v": values, "gate": values})
    _split(found, "in_proj_ba.weight", heads, {"b": groups, "a": groups})
    rows = {"q": key_heads * features, "k": key_heads * features, "v": key_heads * values}
    _split_rows(found, "in_proj_qkv.weight", rows)
    _join_convolutions(found)
    rates = found.get("self_attn.A_log")
    if rates is not None and rates.shape == (1, 1, heads.num_heads, 1):
        found["self_attn.A_log"] = StoredTensor((heads.num_heads,), lambda: rates.read().flatten())
    taps = found.get("self_attn.conv1d.weight")
    if taps is not None and len(taps.shape) == 3 and taps.shape[1] == 1:
        found["self_attn.conv1d.weight"] = StoredTensor(taps.shape[::2], lambda: taps.read().squeeze(1))
    beta = found.get("self_attn.b_proj.weight")
    if beta is not None and "self_attn.b_proj.bias" not in found:  # there is none in transformers
        count = beta.shape[0]
        found["self_attn.b_proj.bias"] = StoredTensor((count,), lambda: torch.zeros(count))
    return found


def _split(tensors: Tensors, name: str, heads: LinearHeadsConfig, sizes: dict[str, int]) -> None:
    """Split a matrix whose rows stand together for each key head."""
    key_heads, fused = heads.num_key_heads or heads.num_heads, tensors.get(f"self_attn.{name}")
    if fused is None or len(fused.shape) != 2 or fused.shape[0] != key_heads * sum(sizes.values()):
        return
    del tensors[f"self_attn.{name}"]
    start = 0
    for part, size in sizes.items():
        rows = slice(start, start + size)
        tensors[f"self_attn.{part}_proj.weight"] = StoredTensor(
            (key_heads * size, fused.shape[1]),
            lambda rows=rows: fused.read().unflatten(0, (key_heads, -1))[:, rows].flatten(0, 1),
        )
        start += size


def _split_rows(tensors: Tensors, name: str, sizes: dict[str, int]) -> None:
    """Split a matrix of consecutive rows."""
    fused = tensors.get(f"self_attn.{name}")
    if fused is None or len(fused.shape) != 2 or fused.shape[0] != sum(sizes.values()):
        return
    del tensors[f"self_attn.{name}"]
    start = 0
    for part, size in sizes.items():
        rows = slice(start, start + size)
        tensors[f"self_attn.{part}_proj.weight"] = StoredTensor(
            (size, fused.shape[1]), lambda rows=rows: fused.read()[rows].clone()
        )
        start += size


def _join_convolutions(tensors: Tensors) -> None:
    """Put the convolutions of queries, keys and values together, which files of OLMo-hybrid have apart."""
    names = [f"self_attn.{part}_conv1d.weight" for part in "qkv"]
    if not all(name in tensors for name in names):
        return
    parts = [tensors.pop(name) for name in names]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    tensors["self_attn.conv1d.weight"] = StoredTensor(shape, lambda: torch.cat([part.read() for part in parts]))


def _of_full(tensors: Tensors, config: LanguageModelConfig) -> Tensors:
    """The parameters of a layer of softmax attention: queries and gates of each head apart, where there are gates."""
    name, attention = "self_attn.q_proj.weight", config.attention
    fused = tensors.get(name)
    if not isinstance(attention, AttentionConfig) or attention.gate is None or fused is None:
        return tensors
    heads, rows = attention.num_heads, fused.shape[0]
    if rows != 2 * heads * (attention.head_dim or config.dim // heads):
        return tensors
    for number, part in enumerate(("q_proj", "gate_proj")):
        tensors[f"self_attn.{part}.weight"] = StoredTensor(
            (rows // 2, fused.shape[1]),
            lambda number=number: fused.read().unflatten(0, (heads, 2, -1))[:, number].flatten(0, 1),
        )
    return tensors
