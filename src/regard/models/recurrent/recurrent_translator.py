"""The recurrent translator: embeddings, an encoder, a decoder that attends to it, and an output layer."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ...errors import ConfigurationError
from ..decoded_target import DecodedTarget, SourceHead
from .decoders import BahdanauDecoder, LuongDecoder
from .encoder import BidirectionalEncoder, LastStates
from .pointer import PointerGenerator
from .recurrent_state import ObservedRecurrentStep, RecurrentMemory, RecurrentState, RecurrentStep


class RecurrentTranslator(nn.Module):
    """P(y_t | y_<t, x) = softmax(W features_t), with the features of a decoder that attends to an encoded source.

    Letters: B sentences, S source tokens, T target tokens, V target vocabulary. Token 0 is padding. `model(...)`
    gives the logits of a known target; `encode`, `start` and `step` go word by word, with all state passed in and
    returned, so that a search can reorder it. `observe_step` does the same and shows the weights. With a `pointer`
    source tokens can be copied (`PointerGenerator`): the logits are then log P(y_t | y_<t, x) of both, and tokens from
    V on, in sources and targets, are words of a source that the vocabulary lacks.

    Raises:
        ConfigurationError: a pointer, and vocabularies of different sizes.

    >>> import torch
    >>> from regard.models import recurrent
    >>> from regard.scores import Additive
    >>> encoder = recurrent.BidirectionalEncoder(8, 6)
    >>> decoder = recurrent.BahdanauDecoder(8, 12, 10, score=Additive(10, 12, 10), cell="gru", readout_dim=8)
    >>> model = recurrent.RecurrentTranslator(20, 30, embedding_dim=8, encoder=encoder, decoder=decoder)
    >>> source, lengths, target = torch.ones(2, 5).long(), torch.tensor([5, 3]), torch.ones(2, 4).long()
    >>> model(source, lengths, target).shape
    torch.Size([2, 4, 30])
    >>> model.attention_weights(source, lengths, target).shape
    torch.Size([2, 4, 5])
    """

    def __init__(
        self,
        source_size: int,
        target_size: int,
        *,
        embedding_dim: int,
        encoder: BidirectionalEncoder | LastStates,
        decoder: BahdanauDecoder | LuongDecoder,
        pointer: PointerGenerator | None = None,
        dropout: float = 0.0,
        max_source_length: int | None = None,
    ) -> None:
        super().__init__()
        if pointer is not None and source_size != target_size:
            raise ConfigurationError(
                f"source_size is {source_size:,} and target_size {target_size:,}: a pointer says source tokens as "
                "words of the target, and needs one vocabulary of both"
            )
        self.max_source_length = max_source_length
        self.max_target_length = None
        self.source_embedding = nn.Embedding(source_size, embedding_dim, padding_idx=0)
        self.target_embedding = nn.Embedding(target_size, embedding_dim, padding_idx=0)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=embedding_dim**-0.5)
            nn.init.zeros_(embedding.weight[0])
        self.encoder = encoder
        self.decoder = decoder
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(decoder.feature_dim, target_size)
        self.pointer = pointer

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, V] of each next word, for source [B, S], lengths [B] and the target so far [B, T]."""
        return self.logits(self.decode_target(source, source_lengths, target), source)

    def features(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """The inputs of the output layer: [B, T, F]."""
        return self.decode_target(source, source_lengths, target).features

    def decode_target(
        self, source: Tensor, source_lengths: Tensor, target: Tensor, *, observe: SourceHead | None = None
    ) -> DecodedTarget:
        """What predicts each word of a known target, with the attention weights, and their gradients, if observed.

        A pointer, and coverage, compute the weights in any case.

        Raises:
            ConfigurationError: a layer or head, of which there is one alone.
        """
        if observe is not None and (observe.layer is not None or observe.head):
            raise ConfigurationError(
                f"there is no layer {observe.layer} or head {observe.head}: a recurrent translator has one attention "
                "to the source, SourceHead()"
            )
        memory, embedded = self.encode(source, source_lengths), self._embed_target(target)
        seen = self.decoder.unroll(embedded, memory)
        weights, gate = seen.weights, None
        if weights is None and (observe is not None or self.pointer is not None):
            weights = self.decoder.attend.with_weights(seen.queries, memory)[1]
        if self.pointer is not None:
            gate = self.pointer(seen.contexts, seen.outputs, embedded)
        return DecodedTarget(self.dropout(seen.features), weights, gate)

    def logits(self, decoded: DecodedTarget, source: Tensor | None) -> Tensor:
        """Logits [B, T, V] of what was decoded; with a pointer log-probabilities, and it reads the source [B, S].

        Those of words that the vocabulary lacks are behind, [B, T, V + E], where the source has any.
        """
        logits = self.output(decoded.features)
        if self.pointer is None or decoded.gate is None or decoded.weights is None or source is None:
            return logits
        return self.pointer.mix(logits, decoded.gate, decoded.weights, source)

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """The attention weights [B, T, S] over the source at each step of a known target."""
        weights = self.decode_target(source, source_lengths, target, observe=SourceHead()).weights
        if weights is None:
            raise AssertionError("weights that are asked for are computed")
        return weights

    def encode(self, source: Tensor, source_lengths: Tensor) -> RecurrentMemory:
        """Encode the source and project the keys of the decoder's attention, once for all steps."""
        embedded = self.dropout(self.source_embedding(self._embeddable(source)))
        memory = self.decoder.project_memory(self.encoder(embedded, source_lengths))
        return memory if self.pointer is None else replace(memory, tokens=source)

    def start(self, memory: RecurrentMemory) -> RecurrentState:
        """The state before the first word."""
        return self.decoder.start(memory)

    def step(self, tokens: Tensor, state: RecurrentState, memory: RecurrentMemory) -> RecurrentStep:
        """Predict the next word after tokens [B], the previous words; at first the token that starts a sentence."""
        if self.pointer is not None:
            seen = self.observe_step(tokens, state, memory)
            return RecurrentStep(seen.logits, seen.state)
        seen, state = self.decoder.step(self._embed_target(tokens.unsqueeze(1)), state, memory)
        return RecurrentStep(self.output(self.dropout(seen.features)).squeeze(1), state)

    def observe_step(self, tokens: Tensor, state: RecurrentState, memory: RecurrentMemory) -> ObservedRecurrentStep:
        """`step`, and the attention weights over the source, computed in a second pass."""
        embedded = self._embed_target(tokens.unsqueeze(1))
        seen, state, weights = self.decoder.observe_step(embedded, state, memory)
        gate = None if self.pointer is None else self.pointer(seen.contexts, seen.outputs, embedded)
        decoded = DecodedTarget(self.dropout(seen.features), weights, gate)
        return ObservedRecurrentStep(self.logits(decoded, memory.tokens).squeeze(1), state, weights.squeeze(1))

    def _embed_target(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.target_embedding(self._embeddable(tokens)))

    def _embeddable(self, tokens: Tensor) -> Tensor:
        return tokens if self.pointer is None else self.pointer.embeddable(tokens, self.output.out_features)


def copies_words(model: object) -> bool:
    """Whether a model is a translator that copies words of its source."""
    return isinstance(model, RecurrentTranslator) and model.pointer is not None
