"""The Transformer as a translator: two embeddings, an encoder, a decoder, an output layer; and the values it returns.

Letters: B sentences, S source positions, T target positions, V target vocabulary, L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...backends.cpu.panels import bytes_are_faster, rounded_to_bytes
from ...backends.cpu.top_entries import top_entries
from ...errors import ConfigurationError, ShapeError
from ...lenses import Lens, Weights
from ...masks import padding
from ...nn import BlockObservation
from ..decoded_target import DecodedTarget, SourceHead
from .encoder_decoder import Decoder, Embedding, Encoder, TiedOutput
from .native_decoder import NativeDecoder, NativeState, NativeStep
from .short_list import ListedWords, ShortList
from .transformer_state import TransformerMemory, TransformerState


@dataclass(frozen=True, eq=False)
class TransformerStep:
    """The output of one decoding step: features [B, dim], the next state, and logits, computed when they are read."""

    features: Tensor
    state: TransformerState | NativeState
    output: nn.Linear | TiedOutput
    listed: ListedWords | None

    @property
    def logits(self) -> Tensor:
        """Logits of the next token: [B, V]."""
        return self.output(self.features)

    def best_tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` largest logits of each row, or all, largest first, their tokens, and the log-sum-exp [B, 1].

        Where the model has a short list they are those of listed words.
        """
        if self.listed is not None:
            return self.listed.best_tokens(self.features, count)
        logits = self.logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return top_entries(logits, min(count, logits.shape[-1]))


@dataclass(frozen=True, eq=False)
class ObservedTransformerStep(TransformerStep):
    """A `TransformerStep` with attention weights: `weights` [B, L, H, S] to the source, `self_weights` [B, L, H, T].

    The T columns are the target tokens so far, this step's own the last; a cache that evicts tokens has the latest. A
    decoder with `SSRU` has none to itself: H is 0 there.
    """

    weights: Tensor
    self_weights: Tensor


@dataclass(frozen=True, eq=False)
class TransformerObservation:
    """The output of `Transformer.observe`: logits [B, T, V], and the lenses' results for each layer."""

    logits: Tensor
    encoder: tuple[BlockObservation, ...]
    decoder: tuple[BlockObservation, ...]


WEIGHTS = Weights()


class Transformer(nn.Module):
    """P(y_t | y_<t, x) = softmax(W decoder(y_<t, encoder(x))_t), all positions of a known target at once.

    Letters: B sentences, S source tokens, T target tokens, V target vocabulary, L decoder layers, H heads. `model(...)`
    gives the logits of a known target; `encode`, `start` and `step` go token by token, with all state passed in and
    returned, so that a search can reorder it. `observe` and `observe_step` do the same and show the weights of every
    head of every layer, too. Padding is told by the lengths: which token stands there makes no difference.

    Args:
        source_embedding: of the tokens of the source.
        target_embedding: of those of the target; it may share the table of the source, or be the same module.
        encoder: the blocks of the source, whose attention may be of any kind.
        decoder: the blocks of the target, likewise.
        output: features [..., dim] to logits [..., V]: `nn.Linear`, or `TiedOutput` over the target's table.
        max_source_length: the most source tokens it takes, as where positions are learned; None: any number.
        max_target_length: the most tokens of a translation, its end included; learned positions allow no more than
            there are.

    Raises:
        ConfigurationError: a number that is no length.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3. Which norm goes where, which positions and which sharing
    there are, is up to what it is made of.

    >>> import torch
    >>> from regard.masks import causal
    >>> from regard.models import transformer
    >>> from regard.nn import Attention, FeedForward, PostNorm, Projections, TransformerBlock
    >>> from regard.positions import Sinusoidal
    >>> def block(**parts):
    ...     own = Attention(Projections(8, num_heads=2), mask=causal() if parts else None)
    ...     return TransformerBlock(own, FeedForward(8, 16), lambda: PostNorm(nn.LayerNorm(8)), **parts)
    >>> shared = transformer.Embedding(nn.Embedding(20, 8), Sinusoidal(8))
    >>> model = transformer.Transformer(
    ...     shared,
    ...     shared,
    ...     encoder=transformer.Encoder([block()]),
    ...     decoder=transformer.Decoder([block(cross_attention=Attention(Projections(8, num_heads=2)))]),
    ...     output=transformer.TiedOutput(shared.tokens),
    ... )
    >>> source, lengths, target = torch.ones(2, 5).long(), torch.tensor([5, 3]), torch.ones(2, 4).long()
    >>> model(source, lengths, target).shape
    torch.Size([2, 4, 20])
    >>> model.attention_weights(source, lengths, target).shape
    torch.Size([2, 4, 1, 2, 5])
    """

    def __init__(
        self,
        source_embedding: Embedding,
        target_embedding: Embedding,
        *,
        encoder: Encoder,
        decoder: Decoder,
        output: nn.Linear | TiedOutput,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
    ) -> None:
        super().__init__()
        for name, length in (("max_source_length", max_source_length), ("max_target_length", max_target_length)):
            if length is not None and length < 1:
                raise ConfigurationError(f"{name} is {length}; it needs at least 1, or None")
        self.source_embedding, self.target_embedding = source_embedding, target_embedding
        self.encoder, self.decoder = encoder, decoder
        self.output = output
        self.max_source_length = max_source_length
        self._max_target_length = max_target_length
        self.multiplies_bytes = False
        """Whether native steps round their inputs, too: see `quantize_decoder`."""
        self.short_list: ShortList | None = None
        """The words that a search may say of a source; None: all. Logits of a known target are of all words."""

    @property
    def max_target_length(self) -> int | None:
        """The most tokens of a translation, END included; None: any number."""
        limits = self._max_target_length, self.target_embedding.max_length
        return min((limit for limit in limits if limit is not None), default=None)

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, V] of each next token, for source [B, S], lengths [B] and the target so far [B, T].

        Raises:
            ShapeError: batches that differ, or lengths that are not those of the source.
        """
        return self.output(self.features(source, source_lengths, target))

    def features(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """The inputs of the output layer: [B, T, dim]."""
        return self.decode_target(source, source_lengths, target).features

    def decode_target(
        self, source: Tensor, source_lengths: Tensor, target: Tensor, *, observe: SourceHead | None = None
    ) -> DecodedTarget:
        """What predicts each token of a known target, with the weights of one head's cross-attention if observed.

        The weights have gradients; of the other layers none are computed.

        Raises:
            ConfigurationError: a layer or head that is not there.
        """
        _check(source, source_lengths, target)
        memory, x = self._memory(source, source_lengths), self.target_embedding(target)
        if observe is None:
            return DecodedTarget(self.decoder(x, memory.layers, memory.mask))
        layer, head = self.checked_place(observe)
        features, seen = self.decoder.observe_layer(layer, x, memory.layers, WEIGHTS, mask=memory.mask)
        return DecodedTarget(features, seen[WEIGHTS][:, head])

    def observe(self, source: Tensor, source_lengths: Tensor, target: Tensor, *lenses: Lens) -> TransformerObservation:
        """`forward`, and each lens's results for each attention: `seen.decoder[layer].cross_attention[lens]`."""
        _check(source, source_lengths, target)
        mask = padding(lengths=source_lengths)
        encoded, encoder = self.encoder.observe(self.source_embedding(source), *lenses, mask=mask)
        projected = self.decoder.project_memory(encoded)
        features, decoder = self.decoder.observe(self.target_embedding(target), projected, *lenses, mask=mask)
        return TransformerObservation(self.output(features), encoder, decoder)

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """The cross-attention weights [B, T, L, H, S] at each step of a known target."""
        _check(source, source_lengths, target)
        memory = self._memory(source, source_lengths)
        _, decoder = self.decoder.observe(self.target_embedding(target), memory.layers, WEIGHTS, mask=memory.mask)
        return _cross(decoder).permute(0, 3, 1, 2, 4)

    def checked_place(self, observe: SourceHead) -> tuple[int, int]:
        """Layer and head of the decoder's attention to the source.

        Raises:
            ConfigurationError: a layer or head that is not there.
        """
        layers = len(self.decoder.blocks)
        layer = max(layers - 2, 0) if observe.layer is None else observe.layer
        heads = self.decoder.num_heads
        for name, number, count in (("layer", layer, layers), ("head", observe.head, heads)):
            if not 0 <= number < count:
                raise ConfigurationError(f"there is no {name} {number}: the decoder has {count}, 0 to {count - 1}")
        return layer, observe.head

    def encode(self, source: Tensor, source_lengths: Tensor) -> TransformerMemory:
        """Encode the source and project the keys and values of the decoder's cross-attention, once for all steps."""
        memory = self._memory(source, source_lengths)
        if self.short_list is None:
            return memory
        return replace(memory, listed=self.short_list.of(source, source_lengths, self.output))

    def _memory(self, source: Tensor, source_lengths: Tensor) -> TransformerMemory:
        mask = padding(lengths=source_lengths)
        encoded = self.encoder(self.source_embedding(source), mask)
        return TransformerMemory(self.decoder.project_memory(encoded), source_lengths, mask)

    @torch.no_grad()
    def quantize_decoder(self) -> None:
        """Round the weights of the decoder and of the output layer to int8: each w to s · round(w / s), in place.

        s is max |w| / 127 over the weights of one output feature. From then on the native steps of a search round their
        inputs likewise, for each row, and multiply bytes, on processors where that takes less time (AVX-512 VNNI, or
        AVX2 and no AVX-512): with other roundings than the modules, which have the rounded weights, too. A table of
        embeddings that is the output layer's is rounded for both.
        """
        for module in (self.output, *self.decoder.modules()):
            if isinstance(module, TiedOutput | nn.Linear):
                module.weight.copy_(rounded_to_bytes(module.weight))
        self.multiplies_bytes = True

    def start(self, memory: TransformerMemory) -> TransformerState | NativeState:
        """The state before the first token; it has the weights as they are now where native code computes the steps."""
        decoder = NativeDecoder.of(self.decoder, self.output, in_bytes=self.multiplies_bytes and bytes_are_faster())
        if decoder is None or decoder.source(memory) is None:
            return TransformerState(self.decoder.make_caches())
        return NativeState(decoder)

    def step(
        self, tokens: Tensor, state: TransformerState | NativeState, memory: TransformerMemory
    ) -> TransformerStep | NativeStep:
        """Predict the next token after tokens [B], the previous ones; at first the token that starts a sentence."""
        x = self.target_embedding(tokens.unsqueeze(1), state.length)
        if isinstance(state, NativeState):
            done = state.step(x.squeeze(1), memory, observe=False)
            if done is not None:
                return done
            state = state.in_caches(self.decoder)
        features, caches = self.decoder.step(x, state.caches, memory.layers, memory.mask)
        after = TransformerState(caches, state.length + 1)
        return TransformerStep(features[:, -1], after, self.output, memory.listed)

    def observe_step(
        self, tokens: Tensor, state: TransformerState | NativeState, memory: TransformerMemory
    ) -> ObservedTransformerStep | NativeStep:
        """`step`, and the attention weights of every head of every layer of the decoder."""
        x = self.target_embedding(tokens.unsqueeze(1), state.length)
        if isinstance(state, NativeState):
            done = state.step(x.squeeze(1), memory, observe=True)
            if done is not None:
                return done
            state = state.in_caches(self.decoder)
        features, seen, caches = self.decoder.observe_step(x, state.caches, memory.layers, WEIGHTS, mask=memory.mask)
        return ObservedTransformerStep(
            features[:, -1],
            TransformerState(caches, state.length + 1),
            self.output,
            memory.listed,
            weights=_cross(seen).permute(0, 3, 1, 2, 4).flatten(0, 1),  # [N, L, H, beams, S] to [B, L, H, S]
            self_weights=torch.stack([block.attention[WEIGHTS] for block in seen], 1).squeeze(-2),
        )


def _cross(blocks: tuple[BlockObservation, ...]) -> Tensor:
    """The cross-attention weights of all layers, [B, L, H, T, S]."""
    seen = (block.cross_attention for block in blocks)
    return torch.stack([one[WEIGHTS] for one in seen if one is not None], dim=1)


def _check(source: Tensor, source_lengths: Tensor, target: Tensor) -> None:
    if source.ndim != 2 or target.ndim != 2 or not len(source) == len(target) == source_lengths.numel():
        raise ShapeError(
            f"source has the shape {tuple(source.shape)}, source_lengths {tuple(source_lengths.shape)} and target "
            f"{tuple(target.shape)}; they need (batch, source tokens), (batch,) and (batch, target tokens)"
        )
