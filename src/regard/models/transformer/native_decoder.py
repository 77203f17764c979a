"""The step of a Transformer's decoder in native code: which decoders have one, and the state between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
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
    SSRU,
    Attention,
    FeedForward,
    Linear,
    PostNorm,
    PreNorm,
    Projections,
    SSRUCache,
    TransformerBlock,
)
from ...nn.caches.base import check_rows
from ...nn.transformer_block import SelfAttention
from ..watched_modules import WatchedModules
from .encoder_decoder import Decoder, TiedOutput
from .short_list import ListedWords
from .transformer_state import TransformerMemory, TransformerState


@dataclass(frozen=True, eq=False)
class NativeDecoder:
    """A decoder, packed for native steps, its output layer, and the modules of both, which may be watched."""

    packed: TransformerDecoder
    output_module: nn.Linear | TiedOutput
    modules: WatchedModules
    in_bytes: bool

    @classmethod
    def of(cls, decoder: Decoder, output: nn.Linear | TiedOutput, *, in_bytes: bool = False) -> NativeDecoder | None:
        """The native steps of a decoder as it is now; None where its modules are to run.

        Native code has softmax attention by scaled dot products, to the target under a causal mask or an SSRU in its
        place, layer norms before or after each sublayer, a feed-forward network with ReLU or SiLU, and float32 on a
        CPU; no gradients, and no modules with hooks.
        """
        modules = *decoder.modules(), *output.modules()
        watched = WatchedModules(modules)
        if torch.is_grad_enabled() or not native.available() or watched.are_watched():
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
        return cls(packed, output, watched, in_bytes)

    @cached_property
    def output(self) -> PackedMatrix:
        """The output layer, packed when the first token is sought among all words: not where there is a short list."""
        output = self.output_module
        return PackedMatrix.of(output.weight, output.bias, in_bytes=self.in_bytes)

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
    """The state between two native steps: what a token's step has written stays where it is.

    length: the number of target tokens so far. past: keys and values of each, (L, 2, rows of that step, key heads ·
    head dim), or of an SSRU the states after the last, (L, 1, rows of that step, dim). table: the row of each of these
    steps that each row continues, (R, steps) int32. Nothing is copied when a search moves, repeats or drops rows.
    """

    decoder: NativeDecoder
    length: int = 0
    past: tuple[Tensor, ...] = ()
    table: Tensor | None = None

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
        rows, before = len(x), self.table
        if source is None or rows != len(memory.lengths) * memory.beams or not _is_plain(x):
            return None
        if torch.is_grad_enabled() or not native.available() or self.decoder.modules.are_watched():
            return None
        if before is None:
            before = torch.zeros(rows, 0, dtype=torch.int32)
        if len(before) != rows:
            return None  # the modules say what is wrong
        result = self.decoder.packed.step(x, self.past, before, source, observe=observe)
        past, table = (result.own,), torch.arange(rows, dtype=torch.int32).unsqueeze(1)
        if not self.decoder.packed.shape.recurrent:
            past, table = (*self.past, *past), torch.cat([before, table], dim=1)
        after = NativeState(self.decoder, self.length + 1, past, table)
        return NativeStep(result, after, memory.listed)

    def in_caches(self, decoder: Decoder) -> TransformerState:
        """The state as the decoder's modules have it: a cache of each layer."""
        caches, shape = decoder.make_caches(), self.decoder.packed.shape
        if self.table is not None:
            rows = [one[:, :, of_step] for one, of_step in zip(self.past, self.table.unbind(1), strict=True)]
            if shape.recurrent:
                caches = tuple(SSRUCache(state, self.length) for (state,) in rows[0])
            else:
                heads = torch.stack(rows, dim=3).unflatten(-1, (shape.key_heads, -1))  # [L, 2, R, tokens, H, d]
                written = zip(caches, heads.transpose(3, 4), strict=True)
                caches = tuple(cache.append(*layer) for cache, layer in written)
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
        """The weights to the target so far, [B, L, H, T], likewise; of an SSRU those of no heads, H is 0."""
        if self.result.self_weights is None:
            features = self.result.features
            return features.new_empty(len(features), len(self.result.own), 0, self.state.length)
        return self.result.self_weights

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
    if cross is None or not isinstance(feed_forward, FeedForward) or not _is_softmax(cross) or cross.mask is not None:
        return None
    read, theirs = _read_target(own, cross), cross.projections
    if read is None:
        return None
    activation = _activation(feed_forward)
    residuals = block.attention_residual, block.cross_residual, block.feed_forward_residual
    norms = [_norm(residual.norm) for residual in residuals if isinstance(residual, PreNorm | PostNorm)]
    kinds = {type(residual) for residual in residuals}
    if activation is None or None in norms or kinds not in ({PreNorm}, {PostNorm}):
        return None
    others = _maps(theirs.query, theirs.output, feed_forward.up, feed_forward.down)
    if others is None:
        return None
    weights = LayerWeights(*read, *others, *norms)  # type: ignore[arg-type]
    shape = DecoderShape(*_heads(cross), kinds == {PreNorm}, activation, type(own) is SSRU)
    return _Block(weights, shape, (theirs.dim, feed_forward.hidden_dim))


def _read_target(own: SelfAttention, cross: Attention) -> tuple[Affine, Affine | None] | None:
    """The maps of what reads the target so far, and of its output; None of what native code does not have."""
    if type(own) is SSRU:
        maps = _maps(own.value, own.forget)
        return None if maps is None else (Affine.joined(*maps), None)
    if not isinstance(own, Attention) or not _is_softmax(own) or type(own.mask) is not Causal:
        return None
    mine = own.projections
    maps = _maps(mine.query, mine.key, mine.value_map(), mine.output)
    if maps is None or _heads(own) != _heads(cross):
        return None
    return Affine.joined(*maps[:3]), maps[3]


def _maps(*modules: nn.Module) -> list[Affine] | None:
    """The weights of linear maps; None where one is of another kind."""
    plain = [one for one in modules if isinstance(one, nn.Linear) and type(one) in (Linear, nn.Linear)]
    return [Affine(one.weight, one.bias) for one in plain] if len(plain) == len(modules) else None


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
