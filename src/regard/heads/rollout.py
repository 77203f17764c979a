"""What an output attends to through all layers: rollout, as short text's matrices and at any length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from ..attention import attention
from ..errors import ConfigurationError, ShapeError
from ..pose import Options


def attention_rollout(layers: Sequence[Tensor], *, residual: float = 0.5) -> Tensor:
    """Â_L · ... · Â_2 · Â_1 with Â = (1 - r) · mean over heads of A + r · I: (..., N, N), outputs × inputs.

    Shapes: the weights of each layer (..., heads, N, N), from the first layer to the last. The residual connection
    keeps a share r of each token. Rows that sum to less than 1, where a sink took a part, stay so.

    Raises:
        ShapeError: no layers, or weights that are not of self-attention and of one length.
        ConfigurationError: a residual outside 0 to 1.

    Source: Abnar and Zuidema 2020 (arXiv 2005.00928), section 3: r = 0.5, and the mean of the heads.

    >>> import torch
    >>> look_back = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    >>> attention_rollout([look_back, look_back])
    tensor([[1.0000, 0.0000],
            [0.7500, 0.2500]])
    """
    mixed = mixed_layers(layers, residual)
    total = mixed[0]
    for layer in mixed[1:]:
        total = layer @ total
    return total


def mixed_layers(layers: Sequence[Tensor], residual: float) -> list[Tensor]:
    """Â = (1 - r) · mean over heads of A + r · I of each layer: what rollout and flow are made of."""
    residual = checked_residual(residual)
    layers = list(layers)
    if not layers or any(layer.ndim < 3 or layer.shape[-2:] != (layers[0].shape[-1],) * 2 for layer in layers):
        raise ShapeError(
            f"the layers have the shapes {[tuple(layer.shape) for layer in layers]}; they need to be (..., heads, N, "
            "N), at least one and all of one N: rollout and flow are of self-attention"
        )
    token = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device)
    return [(1 - residual) * layer.mean(-3) + residual * token for layer in layers]


def checked_residual(residual: float) -> float:
    """A share between 0 and 1.

    Raises:
        ConfigurationError: it is not that.
    """
    if not 0.0 <= residual <= 1.0:
        raise ConfigurationError(
            f"residual is {residual}; it needs a share from 0 to 1, such as 0.5 where a layer adds its input to its "
            "attention, 0 where it does not"
        )
    return residual


def rollout_of(
    sources: Tensor, layers: Iterable[tuple[Tensor, Tensor]], *, residual: float = 0.5, **options: Unpack[Options]
) -> Tensor:
    """Rollout of any length: how much each output takes from each source, (..., N, S), without a matrix N × N.

    X_l = (1 - r) · mean over heads of A_l · X_(l-1) + r · X_(l-1), by `regard.attention` with X as the values. X_0, the
    sources, is (..., N, S): columns of ones and zeros for single tokens or whole segments of them; the identity gives
    `attention_rollout` itself.

    Args:
        sources: (..., N, S), of the dtype of the queries.
        layers: query (..., heads, N, D) and key (..., key heads, N, D) of each layer, from the first to the last.
        residual: r, the share of each token that the residual connection keeps.
        options: what `regard.attention` takes beside, the same for all layers, such as `mask`.

    Raises:
        ConfigurationError: a residual outside 0 to 1; and what `regard.attention` raises.

    >>> import torch, regard
    >>> q = torch.zeros(1, 3, 4)
    >>> rollout_of(torch.eye(3)[:, :1], [(q, q), (q, q)], mask=regard.masks.causal())
    tensor([[1.0000],
            [0.4375],
            [0.3194]])
    """
    residual = checked_residual(residual)
    for query, key in layers:
        values = sources.unsqueeze(-3).expand(*sources.shape[:-2], key.shape[-3], *sources.shape[-2:])
        lead = (1,) * (4 - query.ndim)
        query, key, values = (x.reshape(*lead, *x.shape) if lead else x for x in (query, key, values))
        attended = attention(query, key, values, **options).mean(-3)
        sources = (1 - residual) * attended.reshape(*attended.shape[len(lead) :]) + residual * sources
    return sources
