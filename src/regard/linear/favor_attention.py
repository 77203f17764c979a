"""Attention by FAVOR+ features, normalised and not causal, in blocks of positions whose features stay in cache.

The features of all positions are m / D times as large as queries and keys. To write them to memory and to read them
back takes longer than their products, so each block's are computed where they are used, and anew in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.torch_modes import under_dispatch_mode, under_forward_mode, under_transform
from .feature_maps import FavorPlus, key_features, query_features
from .sums_over_keys import by_key_head, divide_by_totals, divisor, read_state

BLOCK_FEATURES = 2**20
"""Features of a block, of all heads: 4 MiB."""


def takes_features_in_blocks(feature_map: FavorPlus, *tensors: Tensor) -> bool:
    """Whether `favor_attention` takes these tensors: FAVOR+ of the softmax kernel on a CPU, outside of transforms."""
    return (
        feature_map.kernel == "softmax"
        and feature_map.dim == tensors[0].shape[-1]
        and not feature_map.matrix.requires_grad
        and all(tensor.is_cpu for tensor in tensors)
        and not (under_transform() or under_forward_mode() or under_dispatch_mode())
    )


def favor_attention(query: Tensor, key: Tensor, value: Tensor, features: FavorPlus, keep: Tensor | None) -> Tensor:
    """Σ_j w_ij v_j / Σ_j w_ij with w_ij = φ(q_i) · φ(k_j); differentiable twice.

    Shapes: query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), keep bool that broadcasts to (B, Hk, N);
    output (B, H, M, Dv). A row whose total is 0 is 0.
    """
    return _FavorAttention.apply(query, key, value, features, keep)  # type: ignore[return-value]


def _definition(query: Tensor, key: Tensor, value: Tensor, features: FavorPlus, keep: Tensor | None) -> Tensor:
    """The same by an operation for each step, which can be differentiated twice."""
    key_rows, _ = key_features(features, key, keep)
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    return divide_by_totals(read_state(query_features(features, query)[0], key_rows.mT @ value))


class _FavorAttention(torch.autograd.Function):
    """`favor_attention`, which stores its inputs, the sums over keys, and its output."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, features: FavorPlus, keep: Tensor | None
    ) -> Tensor:
        blocks = _Blocks(features, query, key, keep)
        sums, largest = blocks.sums_over_keys(value)
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        for at in blocks.of(query.shape[2], query.shape[1]):
            products = blocks.query_features(at) @ sums  # (B, Hk, r · block, Dv + 1)
            output[:, :, at] = divide_by_totals(products).view(*query.shape[:2], -1, value.shape[-1])
        ctx.features, ctx.keep = features, keep
        ctx.save_for_backward(query, key, value, sums, largest, output)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sums, largest, output = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated in turn
            inputs = [tensor.view_as(tensor) for tensor in (query, key, value)]
            wanted = [tensor for tensor, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
            defined = _definition(inputs[0], inputs[1], inputs[2], ctx.features, ctx.keep)
            found = iter(torch.autograd.grad(defined, wanted, upstream[0], create_graph=True))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None
        blocks = _Blocks(ctx.features, query, key, ctx.keep)
        grad_query, grad_sums = blocks.query_gradient(upstream[0], output, sums)
        grad_key, grad_value = blocks.key_gradients(value, largest, grad_sums)
        return grad_query, grad_key, grad_value, None, None


class _Blocks:
    """The features of some positions of queries (B, H, M, D) or keys (B, Hk, N, D) at a time.

    φ(q) lacks factors of each row, which cancel; φ(k) has the largest logarithm of a head subtracted.
    """

    def __init__(self, features: FavorPlus, query: Tensor, key: Tensor, keep: Tensor | None) -> None:
        self.query, self.key, self.keep = query, key, keep
        self.rows = (features.matrix * features.dim**-0.25).to(query.device, query.dtype)  # (m, D)
        self.shrink = features.dim**-0.5  # |x'|² = shrink |x|²

    def of(self, length: int, heads: int) -> Iterator[slice]:
        """The blocks of so many positions."""
        size = max(BLOCK_FEATURES // max(self.query.shape[0] * heads * len(self.rows), 1), 16)
        return (slice(start, min(start + size, length)) for start in range(0, length, size))

    def query_features(self, at: slice) -> Tensor:
        """φ(q), the queries of a group after each other: (B, Hk, r · block, m)."""
        features = by_key_head(self.query[:, :, at], self.key.shape[1]).flatten(2, 3) @ self.rows.mT
        return features.sub_(features.amax(-1, keepdim=True)).exp_()

    def key_logarithms(self, at: slice) -> Tensor:
        """Logarithms of φ(k), -infinity where a key is masked: (B, Hk, block, m)."""
        key = self.key[:, :, at]
        logarithms = key @ self.rows.mT
        logarithms.sub_(key.square().sum(-1, keepdim=True), alpha=self.shrink / 2)
        if self.keep is not None:
            logarithms.masked_fill_(~self.keep[..., at].unsqueeze(-1), -torch.inf)
        return logarithms

    def sums_over_keys(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_j φ(k_j) v_jᵀ with the total in one more column, (B, Hk, m, Dv + 1), and the logarithm that φ(k) lacks."""
        batch, key_heads, length = self.key.shape[:3]
        sums = value.new_zeros(batch, key_heads, len(self.rows), value.shape[-1] + 1)
        largest = value.new_full((batch, key_heads, 1, 1), -torch.inf)
        for at in self.of(length, key_heads):
            features = self.key_logarithms(at)
            before, largest = largest, largest.maximum(features.amax((-2, -1), keepdim=True))
            subtracted = largest.masked_fill(largest == -torch.inf, 0.0)  # no key exists so far
            features.sub_(subtracted).exp_()
            sums.mul_((before - subtracted).exp())
            sums[..., :-1] += features.mT @ value[:, :, at]
            sums[..., -1] += features.sum(-2)
        return sums, largest.masked_fill(largest == -torch.inf, 0.0)

    def query_gradient(self, upstream: Tensor, output: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the queries and of the sums over keys, from that of the output."""
        grad_query, grad_sums = torch.empty_like(self.query), torch.zeros_like(sums)
        key_heads, total, matrix_rows = self.key.shape[1], sums[..., -1:], sums.mT.contiguous()
        for at in self.of(self.query.shape[2], self.query.shape[1]):
            features = self.query_features(at)
            own, rows = (by_key_head(tensor[:, :, at], key_heads).flatten(2, 3) for tensor in (upstream, output))
            inverse = divisor(features @ total).reciprocal_()
            of_products = torch.cat([own, -(own * rows).sum(-1, keepdim=True)], -1).mul_(inverse)  # (..., Dv + 1)
            grad_sums += features.mT @ of_products
            # The gradient of a row's factor, which φ(q) lacks, is 0: rows are divided by their totals.
            of_logarithms = (of_products @ matrix_rows).mul_(features)
            grad_query[:, :, at] = (of_logarithms @ self.rows).view_as(grad_query[:, :, at])
        return grad_query, grad_sums

    def key_gradients(self, value: Tensor, largest: Tensor, grad_sums: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of keys and values, from that of the sums over keys."""
        grad_key, grad_value = torch.empty_like(self.key), torch.empty_like(value)
        of_matrix, of_total = grad_sums[..., :-1], grad_sums[..., -1].unsqueeze(-2)  # (B, Hk, m, Dv), (B, Hk, 1, m)
        for at in self.of(*self.key.shape[2:0:-1]):
            key, features = self.key[:, :, at], self.key_logarithms(at).sub_(largest).exp_()
            grad_value[:, :, at] = features @ of_matrix
            of_logarithms = (value[:, :, at] @ of_matrix.mT).add_(of_total).mul_(features)
            of_square = of_logarithms.sum(-1, keepdim=True) * self.shrink
            grad_key[:, :, at] = (of_logarithms @ self.rows).sub_(key * of_square)
        return grad_key, grad_value
