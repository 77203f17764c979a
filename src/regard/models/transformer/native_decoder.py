"""The step of a Transformer's decoder in native code: which decoders have one, and the state between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import native
from ...backends.cpu.library import last_contiguous
from ...backends.cpu.panels import PackedMatrix
from ...backends.cpu.top_products import top_products
from ...backends.cpu.transformer_step import (
    Activation,
    Affine,
    DecoderShape,
    LayerNormWeights,
    LayerWeights,
    Source,
    StepResult,
    TransformerDecoder,
)
from ...masks.causal import Causal
from ...masks.padding import Padding
from ...nn import (
    Attention,
    FeedForward,
    Linear,
    PostNorm,
    PreNorm,
    Projections,
    TransformerBlock,
)
from ...nn.caches.base import check_rows
from ..watched_modules import are_watched
from .encoder_decoder import Decoder, TiedOutput
from .short_list import ListedWords
from .transformer_state import TransformerMemory, TransformerState


@dataclass(frozen=True, eq=False)
class NativeDecoder:
    """A decoder and its output layer, packed for native steps, and their modules, which may be watched."""

    packed: TransformerDecoder
    output: PackedMatrix
    output_module: nn.Linear | TiedOutput
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(cls, decoder: Decoder, output: nn.Linear | TiedOutput, *, in_bytes: bool = False) -> NativeDecoder | None:
        """The native steps of a decoder as it is now; None where its modules are to run.

        Native code has softmax attention by scaled dot products under a causal mask, layer norms before or after each
        sublayer, a feed-forward network with ReLU or SiLU, and float32 on a CPU; no gradients, and no modules with
        hooks.
        """
        modules = *decoder.modules(), *output.modules()
        if torch.is_grad_enabled() or not native.available() or are_watched(modules):
            return None
        if any(module.training for module in modules) or type(output) not in (TiedOutput, Linear, nn.Linear):
            return None
        blocks = [_block(block) for block in decoder.blocks]
        last = None if type(decoder.norm) is nn.Identity else _norm(decoder.norm)
        if (last is None) != (type(decoder.norm) is nn.Identity):
            return None
        shapes, layers = {None if block is None else block.shape for block in blocks}, [*filter(None, blocks)]
        if len(shapes) != 1 or len(layers) < len(blocks) or len({layer.sizes for layer in layers}) != 1:
            return None
        weights = [layer.weights for layer in layers]
        if not all(map(_is_plain, (*decoder.parameters(), *output.parameters()))):
            return None
        packed = TransformerDecoder.pack_weights(layers[0].shape, weights, last, in_bytes=in_bytes)
        return cls(packed, PackedMatrix.of(output.weight, output.bias, in_bytes=in_bytes), output, modules)

    def source(self, memory: TransformerMemory) -> Source | None:
        """The keys and values of a memory as C reads them; None of one that it does not read."""
        mask, lengths, shape = memory.mask, memory.lengths, self.packed.shape
        if type(mask) is not Padding or mask.lengths is not lengths or len(memory.layers) != len(self.packed.layers):
            return None
        layers = [(last_contiguous(layer.keys), last_contiguous(layer.values)) for layer in memory.layers]
        expected = len(lengths), shape.key_heads, len(memory.layers[0]), shape.head_dim
        fits = all(_is_plain(one) and one.shape == expected for layer in layers for one in layer)
        counted = type(lengths) is Tensor and lengths.is_cpu and lengths.dtype is torch.int64
        return Source(layers, lengths.contiguous()) if fits and counted else None


@dataclass(frozen=True, eq=False)
class NativeState:
    """The state between two native steps: keys and values stay where their token's step has written them.

    past: those of each token so far, (L, 2, rows of that step, key heads · head dim). table: the row of each earlier
    step that each row continues, (R, tokens) int32. Nothing is copied when a search moves, repeats or drops rows.
    """

    decoder: NativeDecoder
    past: tuple[Tensor, ...] = ()
    table: Tensor | None = None

    @property
    def length(self) -> int:
        """The number of target tokens so far."""
        return len(self.past)

    def reorder(self, rows: Tensor) -> NativeState:
        """The state for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        if self.table is None:
            return self
        check_rows(rows, len(self.table))
        return replace(self, table=self.table[rows])

    def step(self, x: Tensor, memory: TransformerMemory, *, observe: bool) -> NativeStep | None:
        """The step for the next tokens x (R, dim); None where modules are to run."""
        source = self.decoder.source(memory)
        rows, table = len(x), self.table
        if source is None or rows != len(memory.lengths) * memory.beams or not _is_plain(x):
            return None
        if torch.is_grad_enabled() or not native.available() or are_watched(self.decoder.modules):
            return None
        if table is None:
            table = torch.zeros(rows, 0, dtype=torch.int32)
        if len(table) != rows:
            return None  # the modules say what is wrong
        result = self.decoder.packed.step(x, self.past, table, source, observe=observe)
        own = torch.arange(rows, dtype=torch.int32).unsqueeze(1)
        after = replace(self, past=(*self.past, result.own), table=torch.cat([table, own], dim=1))
        return NativeStep(result, after, memory.listed)

    def in_caches(self, decoder: Decoder) -> TransformerState:
        """The state as the decoder's modules have it: a cache of each layer."""
        caches = decoder.make_caches()
        if self.table is not None:
            rows = [one[:, :, of_step] for one, of_step in zip(self.past, self.table.unbind(1), strict=True)]
            heads = self.decoder.packed.shape.key_heads
            written = torch.stack(rows, dim=3).unflatten(-1, (heads, -1)).transpose(3, 4)  # [L, 2, R, H, tokens, d]
            caches = tuple(cache.append(*layer) for cache, layer in zip(caches, written, strict=True))
        return TransformerState(caches, self.length)


@dataclass(frozen=True, eq=False)
class NativeStep:
    """One decoding step: `TransformerStep` and `ObservedTransformerStep`, whose logits are computed when they are read.

    A search reads none: it takes `best_tokens`.
    """

    result: StepResult
    state: NativeState
    listed: ListedWords | None = None

    @property
    def logits(self) -> Tensor:
        """Logits of the next token: [B, V]."""
        return self.state.decoder.output_module(self.result.features)

    @property
    def weights(self) -> Tensor:
        """The weights to the source, [B, L, H, S], of a step that was observed."""
        return cast(Tensor, self.result.weights)

    @property
    def self_weights(self) -> Tensor:
        """The weights to the target so far, [B, L, H, T], likewise."""
        return cast(Tensor, self.result.self_weights)

    def best_tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` largest logits of each row, or all, largest first, their tokens, and the log-sum-exp [B, 1].

        Where the model has a short list they are those of listed words.
        """
        if self.listed is not None:
            return self.listed.best_tokens(self.result.features, count)
        output = self.state.decoder.output
        return top_products(self.result.features, output, min(count, output.columns))


class _Block(NamedTuple):
    """What native code reads of a block."""

    weights: LayerWeights
    shape: DecoderShape
    sizes: tuple[int, int]  # of a token, and of the hidden layer


def _block(block: nn.Module) -> _Block | None:
    """The weights of a block; None of one that native code does not have."""
    if not isinstance(block, TransformerBlock) or type(block) is not TransformerBlock:
        return None
    own, cross, feed_forward = block.attention, block.cross_attention, block.feed_forward
    if not isinstance(own, Attention) or cross is None or not isinstance(feed_forward, FeedForward):
        return None
    if not (_is_softmax(own) and _is_softmax(cross) and type(own.mask) is Causal and cross.mask is None):
        return None
    activation = _activation(feed_forward)
    residuals = block.attention_residual, block.cross_residual, block.feed_forward_residual
    norms = [_norm(residual.norm) for residual in residuals if isinstance(residual, PreNorm | PostNorm)]
    kinds, alike = {type(residual) for residual in residuals}, _heads(own) == _heads(cross)
    if activation is None or not alike or None in norms or kinds not in ({PreNorm}, {PostNorm}):
        return None
    mine, theirs = own.projections, cross.projections
    of_token = mine.query, mine.key, mine.value_map()
    maps = *of_token, mine.output, theirs.query, theirs.output, feed_forward.up, feed_forward.down
    if any(type(one) not in (Linear, nn.Linear) for one in maps):
        return None
    query, key, value, *others = (Affine(one.weight, one.bias) for one in maps)
    weights = LayerWeights(Affine.joined(query, key, value), *others, *norms)  # type: ignore[arg-type]
    shape = DecoderShape(*_heads(own), kinds == {PreNorm}, activation)
    return _Block(weights, shape, (mine.dim, feed_forward.hidden_dim))


def _is_softmax(attention: Attention) -> bool:
    """Whether a layer is softmax attention by scaled dot products and nothing else, but for a mask."""
    parts = (
        *(attention.score, attention.bias, attention.rotary, attention.softcap, attention.sinks, attention.gate),
        *(attention.forget_gate, attention.normalizer),
    )
    projections = attention.projections
    return (
        type(attention) is Attention
        and all(part is None for part in parts)
        and type(projections) is Projections
        and projections.value is not None
        and projections.value_dim == projections.head_dim
        and all(type(norm) is nn.Identity for norm in _projection_norms(projections))
    )


def _projection_norms(projections: Projections) -> tuple[nn.Module, ...]:
    return projections.query_norm, projections.key_norm, projections.value_norm


def _heads(attention: Attention) -> tuple[int, int, int]:
    projections = attention.projections
    return projections.num_heads, projections.num_kv_heads, projections.head_dim


def _activation(feed_forward: FeedForward) -> Activation | None:
    """The activation of a feed-forward network; None of one that native code does not have."""
    function: Any = feed_forward.activation
    if type(feed_forward) is not FeedForward:
        return None
    if function in (functional.relu, torch.relu) or type(function) is nn.ReLU:
        return Activation.RECTIFIED
    return Activation.SILU if function is functional.silu or type(function) is nn.SiLU else None


def _norm(norm: nn.Module) -> LayerNormWeights | None:
    """The weights of a layer norm; None of another norm, or of one without weights."""
    if not isinstance(norm, nn.LayerNorm) or type(norm) is not nn.LayerNorm or not norm.elementwise_affine:
        return None
    return LayerNormWeights(norm.weight, norm.bias, norm.eps) if len(norm.normalized_shape) == 1 else None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.dtype is torch.float32
