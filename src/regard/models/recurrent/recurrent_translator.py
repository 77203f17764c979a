"""The recurrent translator: embeddings, an encoder, a decoder that attends to it, and an output layer."""

from __future__ import annotations

from torch import Tensor, nn

from .decoders import BahdanauDecoder, LuongDecoder
from .encoder import BidirectionalEncoder
from .recurrent_state import ObservedRecurrentStep, RecurrentMemory, RecurrentState, RecurrentStep


class RecurrentTranslator(nn.Module):
    """P(y_t | y_<t, x) = softmax(W features_t), with the features of a decoder that attends to an encoded source.

    Letters: B sentences, S source tokens, T target tokens, V target vocabulary. Token 0 is padding. `model(...)`
    gives the logits of a known target; `encode`, `start` and `step` go word by word, with all state passed in and
    returned, so that a search can reorder it. `observe_step` does the same and shows the weights.

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
        encoder: BidirectionalEncoder,
        decoder: BahdanauDecoder | LuongDecoder,
        dropout: float = 0.0,
        max_source_length: int | None = None,
    ) -> None:
        super().__init__()
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

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Logits [B, T, V] of each next word, for source [B, S], lengths [B] and the target so far [B, T]."""
        return self.output(self.features(source, source_lengths, target))

    def features(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """The inputs of the output layer: [B, T, F]."""
        memory = self.encode(source, source_lengths)
        unrolled = self.decoder.unroll(self._embed_target(target), memory)
        return self.dropout(unrolled.features)

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """The attention weights [B, T, S] over the source at each step of a known target."""
        memory = self.encode(source, source_lengths)
        unrolled = self.decoder.unroll(self._embed_target(target), memory)
        return self.decoder.attend.with_weights(unrolled.queries, memory)[1]

    def encode(self, source: Tensor, source_lengths: Tensor) -> RecurrentMemory:
        """Encode the source and project the keys of the decoder's attention, once for all steps."""
        embedded = self.dropout(self.source_embedding(source))
        encoded = self.encoder(embedded, source_lengths)
        return self.decoder.project_memory(encoded)

    def start(self, memory: RecurrentMemory) -> RecurrentState:
        """The state before the first word."""
        return self.decoder.start(memory)

    def step(self, tokens: Tensor, state: RecurrentState, memory: RecurrentMemory) -> RecurrentStep:
        """Predict the next word after tokens [B], the previous words; at first the token that starts a sentence."""
        features, state = self.decoder.step(self._embed_target(tokens), state, memory)
        return RecurrentStep(self.output(self.dropout(features)), state)

    def observe_step(self, tokens: Tensor, state: RecurrentState, memory: RecurrentMemory) -> ObservedRecurrentStep:
        """`step`, and the attention weights over the source, computed in a second pass."""
        features, state, weights = self.decoder.observe_step(self._embed_target(tokens), state, memory)
        return ObservedRecurrentStep(self.output(self.dropout(features)), state, weights)

    def _embed_target(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.target_embedding(tokens))
