"""Stored tensors of a checkpoint under the names of single parameters: fused split, experts stacked, MXFP4 unpacked.

Phi 3 stores the query, key and value projections as one matrix, and the gate and up projections as another; DeepSeek
stores those from latents to keys and values as one, in which the rows of each head stand together; mixtures of experts
store each expert's matrices separately; gpt-oss stores its experts in MXFP4, blocks of 32 numbers of 4 bits with an
exponent for each block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import GatedExpertsConfig, LanguageModelConfig, LatentAttentionConfig

FUSED_ATTENTION, FUSED_GATE = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
FUSED_LATENT = "self_attn.kv_b_proj.weight"
EXPERT = re.compile(r"(.+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")
GATE, UP, DOWN = ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")
"""The matrices of an expert, by their names in Mixtral and in the mixtures of Qwen 2 and 3."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, and a function that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def without_unread_keys(tensors: Mapping[str, StoredTensor], config: LanguageModelConfig) -> dict[str, StoredTensor]:
    """The tensors without key and value projections of layers that read those of another, which some files hold."""
    readers = [number for number, layer in enumerate(config.layers) if layer.keys_from is not None]
    unread = tuple(
        f"model.layers.{number}.self_attn.{part}."
        for number in readers
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(unread)}


def split_fused(tensors: Mapping[str, StoredTensor], config: LanguageModelConfig) -> dict[str, StoredTensor]:
    """Split each fused projection into its parts by rows; projections of another height are unchanged."""
    attention = config.attention
    if isinstance(attention, LatentAttentionConfig):
        return _split_latent(tensors, attention)
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


def _split_latent(tensors: Mapping[str, StoredTensor], attention: LatentAttentionConfig) -> dict[str, StoredTensor]:
    """Split the matrix that maps latents to keys and values, head by head, into those of keys and of values."""
    heads, sizes = attention.num_heads, {"k_b_proj": attention.head_dim or 0, "v_b_proj": attention.value_dim or 0}
    shape, found = (heads * sum(sizes.values()), attention.latent_dim), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(FUSED_LATENT) or tensor.shape != shape:
            continue
        del found[name]
        start = 0
        for part, size in sizes.items():
            rows = slice(start, start + size)
            found[f"{name.removesuffix('kv_b_proj.weight')}{part}.weight"] = StoredTensor(
                (heads * size, shape[1]),
                lambda tensor=tensor, rows=rows: tensor.read().unflatten(0, (heads, -1))[:, rows].flatten(0, 1),
            )
            start += size
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
    for stored, tensor in tensors.items():
        name = stored.replace(".block_sparse_moe.", ".mlp.")  # of Mixtral, and of all layers of Kimi Linear
        if match := EXPERT.fullmatch(name):
            layers.setdefault(match[1], {})[int(match[2]), match[3]] = name
        found[re.sub(r"\.mlp\.gate\.weight$", ".mlp.router.weight", name)] = tensor
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


MXFP4 = ("_blocks", "_scales")
"""Ends of the names of the two tensors that hold one parameter."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1: a sign bit, two of exponent, one of mantissa."""
BIAS = 127
"""The number subtracted from the stored exponent of a block, a byte of the format E8M0."""


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack MXFP4 numbers to another dtype: (experts, in, out), the layout of `MixtureOfExperts`.

    Shapes: blocks (experts, out, in/32, 16) and scales (experts, out, in/32), both of bytes.

    A byte holds two numbers, the first in its lower half. Each number is exact in float32, and in bfloat16.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.

    >>> unpacked(torch.tensor([[[[0x21, 0xF0]]]], dtype=torch.uint8), torch.tensor([[[128]]], dtype=torch.uint8))
    tensor([[[  1.],
             [  2.],
             [  0.],
             [-12.]]])
    """
    experts, out, groups, half = blocks.shape
    result = torch.empty(experts, groups * half * 2, out, dtype=dtype)
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    for expert in range(experts):  # one at a time: what lies between takes many times the memory of the result
        pairs = torch.stack([blocks[expert] & 0x0F, blocks[expert] >> 4], dim=-1).flatten(-2)
        numbers = torch.ldexp(values[pairs.int()], (scales[expert].int() - BIAS).unsqueeze(-1))
        result[expert] = numbers.flatten(-2).T
    return result


def packed_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of stored tensors, with the unpacked shape for each packed parameter.

    >>> packed_shapes({"down_blocks": (2, 5, 3, 16), "down_scales": (2, 5, 3), "bias": (5,)})
    {'down': (2, 96, 5), 'bias': (5,)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        base = name.removesuffix(MXFP4[0])
        if base != name and shapes.get(base + MXFP4[1]) == shape[:-1] and len(shape) == 4:
            found[base] = (shape[0], shape[2] * shape[3] * 2, shape[1])
        elif not (name.endswith(MXFP4[1]) and name.removesuffix(MXFP4[1]) + MXFP4[0] in shapes):
            found[name] = shape
    return found
