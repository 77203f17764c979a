"""Convert torch's Transformer layers to `TransformerBlock`s with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import type_before_parametrizations

from ..errors import ConfigurationError
from ..masks import Mask
from .attention_layer import Attention
from .feedforward import FeedForward
from .linear import Linear
from .multihead import MultiheadAttention
from .projections import Projections
from .transformer_block import PostNorm, PreNorm, Residual, TransformerBlock


def block_from_torch(
    layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, *, mask: Mask | None = None
) -> TransformerBlock:
    """A `TransformerBlock` with copies of the weights of one of torch's layers, which computes the same.

    An encoder layer becomes a block without cross-attention, a decoder layer one with it. Dims, heads, pre- or
    post-norm, activation, biases, dropouts, dtype, device and `training` are those of the layer. What differs is the
    call: `block(x)` and `block(x, memory)` take (batch, length, dim), whatever `batch_first` was, and masks from
    `regard.masks` or bool with True = attend, where torch's masks have True = leave out: `masks.from_multihead` reads
    those.

    Args:
        layer: one of torch's layers; its attention may have been replaced by `regard.nn.swap`.
        mask: of the block's self-attention in every call: `causal()` for a decoder, whose steps need it. torch's layers
            have none, and get it with every call.

    Raises:
        ConfigurationError: another module, or a subclass, whose forward may compute something else; such a module as
            attention, linear layer or dropout of the layer.

    >>> import torch, regard
    >>> layer = torch.nn.TransformerEncoderLayer(8, nhead=2, norm_first=True, batch_first=True).eval()
    >>> block, x = regard.nn.block_from_torch(layer), torch.randn(2, 5, 8)
    >>> torch.allclose(block(x), layer(x), atol=1e-6)
    True
    """
    if type(layer) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        raise ConfigurationError(
            f"block_from_torch needs a torch.nn.TransformerEncoderLayer or TransformerDecoderLayer; this is a "
            f"{type(layer).__module__}.{type(layer).__qualname__}. For a stack of layers there is blocks_from_torch; a "
            "subclass may compute something else: make the TransformerBlock yourself, and copy its weights"
        )
    cross = layer.multihead_attn if isinstance(layer, nn.TransformerDecoderLayer) else None
    residuals = _residuals(layer)
    with torch.no_grad():
        block = TransformerBlock(
            _attention(layer.self_attn, mask),
            _feed_forward(layer),
            lambda: next(residuals),
            cross_attention=None if cross is None else _attention(cross, None),
        )
    weight = layer.linear1.weight
    return block.to(weight.device, weight.dtype).train(layer.training)


def blocks_from_torch(
    stack: nn.TransformerEncoder | nn.TransformerDecoder, *, mask: Mask | None = None
) -> tuple[list[TransformerBlock], nn.Module | None]:
    """The layers of torch's encoder or decoder as `TransformerBlock`s, and a copy of its final norm if it has one.

    These are the arguments of `Encoder` and `Decoder` of `regard.models.transformer`. A `torch.nn.Transformer` has one
    of each, `model.encoder` and `model.decoder`. `mask` as in `block_from_torch`.

    Raises:
        ConfigurationError: another module; a layer that `block_from_torch` refuses.

    >>> import torch, regard
    >>> from regard.models.transformer import Decoder, Encoder
    >>> model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    >>> encoder = Encoder(*regard.nn.blocks_from_torch(model.encoder))
    >>> decoder = Decoder(*regard.nn.blocks_from_torch(model.decoder, mask=regard.masks.causal()))
    >>> source, target = torch.randn(1, 4, 8), torch.randn(1, 3, 8)
    >>> causal = model.generate_square_subsequent_mask(3)
    >>> output = decoder(target, decoder.project_memory(encoder(source)))
    >>> torch.allclose(output, model(source, target, tgt_mask=causal), atol=1e-5)
    True
    """
    if type(stack) not in (nn.TransformerEncoder, nn.TransformerDecoder):
        hint = ": convert its encoder and its decoder" if isinstance(stack, nn.Transformer) else ""
        raise ConfigurationError(
            f"blocks_from_torch needs a torch.nn.TransformerEncoder or TransformerDecoder; this is a "
            f"{type(stack).__module__}.{type(stack).__qualname__}{hint}"
        )
    return [block_from_torch(layer, mask=mask) for layer in stack.layers], copy.deepcopy(stack.norm)  # type: ignore[arg-type]


def _attention(theirs: nn.MultiheadAttention, mask: Mask | None) -> Attention:
    """An `Attention` with the weights of torch's layer, whose query, key and value matrices are stacked in one."""
    _check_plain("attention", theirs, nn.MultiheadAttention, MultiheadAttention)
    _check_plain("output projection", theirs.out_proj, NonDynamicallyQuantizableLinear, nn.Linear, Linear)
    if theirs.in_proj_weight is None or theirs.bias_k is not None or theirs.add_zero_attn:
        raise ConfigurationError(
            "the attention of this layer has kdim, vdim, add_bias_kv or add_zero_attn, which nn.Attention has not: keep"
            " torch's layer, and use regard.nn.swap for its attention"
        )
    biased = theirs.in_proj_bias is not None
    projections = Projections(theirs.embed_dim, theirs.num_heads, bias=biased)
    ours = projections.query, projections.key, projections.value
    biases = theirs.in_proj_bias.chunk(3) if biased else (None,) * 3
    for linear, weight, bias in zip(ours, theirs.in_proj_weight.chunk(3), biases, strict=True):
        _copy(linear, weight, bias)
    _copy(projections.output, theirs.out_proj.weight, theirs.out_proj.bias)
    return Attention(projections, mask=mask, dropout=theirs.dropout)


def _feed_forward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> FeedForward:
    """A `FeedForward` with the weights, the activation and the dropout of torch's layer."""
    up, down = layer.linear1, layer.linear2
    for linear in (up, down):
        _check_plain("feed-forward layer", linear, nn.Linear, Linear)
    _check_plain("dropout", layer.dropout, nn.Dropout)
    feed_forward = FeedForward(
        up.in_features,
        up.out_features,
        activation=copy.deepcopy(layer.activation),
        bias=up.bias is not None,
        dropout=layer.dropout.p,
    )
    _copy(feed_forward.up, up.weight, up.bias)
    _copy(feed_forward.down, down.weight, down.bias)
    return feed_forward


def _residuals(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Iterator[Residual]:
    """The residual connections of torch's layer in the order of its sublayers, each with its norm and dropout."""
    kind = PreNorm if layer.norm_first else PostNorm
    parts = [(layer.norm1, layer.dropout1), (layer.norm2, layer.dropout2)]
    if isinstance(layer, nn.TransformerDecoderLayer):
        parts.append((layer.norm3, layer.dropout3))
    for norm, dropout in parts:
        _check_plain("dropout", dropout, nn.Dropout)
        yield kind(copy.deepcopy(norm), dropout.p)


def _check_plain(name: str, module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Check that a part of a layer is of torch's own class, or regard's, of which weights and probabilities say all.

    Raises:
        ConfigurationError: another class, such as an adapter around a linear layer, or a forward of its own.
    """
    kind = type_before_parametrizations(module)
    if kind not in kinds or "forward" in vars(module):
        has = f"{kind.__module__}.{kind.__qualname__}" if kind not in kinds else f"{kind.__name__} with another forward"
        raise ConfigurationError(
            f"the {name} of this layer is a {has}, which may compute something else than a {kinds[0].__name__}: merge "
            "it into its weights, or make the TransformerBlock yourself"
        )


def _copy(linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    linear.to(weight.device, weight.dtype)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
