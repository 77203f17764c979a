"""Stored tensors of a checkpoint under the names of single parameters: fused ones split, those of experts stacked.

Phi 3 stores the query, key and value projections as one matrix, and the gate and up projections as another; mixtures of
experts store each expert's matrices separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import GatedExpertsConfig, LanguageModelConfig

FUSED_ATTENTION, FUSED_GATE = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
EXPERT = re.compile(r"(.+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)\.weight")
GATE, UP, DOWN = ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")
"""The matrices of an expert by their names in Mixtral, and in Qwen 3."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def split_fused(tensors: Mapping[str, StoredTensor], config: LanguageModelConfig) -> dict[str, StoredTensor]:
    """Split each fused projection into its parts by rows; projections of another height are unchanged."""
    attention = config.attention
    head_dim = attention.head_dim or config.dim // attention.num_heads
    key_rows = (attention.num_kv_heads or attention.num_heads) * head_dim
    heights = {"q_proj": attention.num_heads * head_dim, "k_proj": key_rows, "v_proj": key_rows}
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(FUSED_ATTENTION) and tensor.shape == (sum(heights.values()), config.dim):
            found |= _rows(tensor, name.removesuffix("qkv_proj.weight"), heights)
        elif name.endswith(FUSED_GATE) and len(tensor.shape) == 2 and tensor.shape[0] % 2 == 0:
            half = tensor.shape[0] // 2
            found |= _rows(tensor, name.removesuffix("gate_up_proj.weight"), {"gate_proj": half, "up_proj": half})
        else:
            found[name] = tensor
    return found


def _rows(tensor: StoredTensor, prefix: str, heights: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Consecutive rows of a matrix under the names of the parts."""
    parts: dict[str, StoredTensor] = {}
    start = 0
    for part, height in heights.items():
        rows = slice(start, start + height)
        parts[f"{prefix}{part}.weight"] = StoredTensor(
            (height, tensor.shape[1]), lambda rows=rows: tensor.read()[rows].clone()
        )
        start += height
    return parts


def stack_experts(tensors: Mapping[str, StoredTensor], config: LanguageModelConfig) -> dict[str, StoredTensor]:
    """Stack the matrices of all experts of a layer; layers that lack an expert are unchanged."""
    experts = config.feed_forward
    if not isinstance(experts, GatedExpertsConfig):
        return dict(tensors)
    found: dict[str, StoredTensor] = {}
    layers: dict[str, dict[tuple[int, str], str]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = name
        found[re.sub(r"\.(?:block_sparse_moe|mlp)\.gate\.weight$", ".mlp.router.weight", name)] = tensor
    wide, tall = (experts.hidden_dim, config.dim), (config.dim, experts.hidden_dim)
    for layer, names in layers.items():
        gates, ups, downs = (
            [names[expert, part] for expert in range(experts.num_experts) for part in kind if (expert, part) in names]
            for kind in (GATE, UP, DOWN)
        )
        complete = len(names) == 3 * experts.num_experts and len(gates) == len(ups) == len(downs)
        shapes = [found[name].shape for name in (*gates, *ups, *downs)]
        if not complete or shapes != [wide] * (len(gates) + len(ups)) + [tall] * len(downs):
            continue
        parts = [[found.pop(name) for name in kind] for kind in (gates, ups, downs)]
        found[f"{layer}.mlp.experts.gate_up_proj"] = StoredTensor(
            (experts.num_experts, config.dim, 2 * experts.hidden_dim), lambda parts=parts: _transposed(*parts[:2])
        )
        found[f"{layer}.mlp.experts.down_proj"] = StoredTensor(
            (experts.num_experts, experts.hidden_dim, config.dim), lambda parts=parts: _transposed(parts[2])
        )
    return found


def _transposed(*kinds: list[StoredTensor]) -> Tensor:
    """The matrices of each expert, one kind after the other, transposed: (experts, in, out)."""
    return torch.stack([torch.cat([tensor.read().T for tensor in expert], -1) for expert in zip(*kinds, strict=True)])
