"""The pointer-generator: a translator that says a word of its vocabulary, or copies one of the source."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.finite import waits
from ...core.score_forms import at_least_float32
from ...core.tensor_memo import memoize_by_tensors


class PointerGenerator(nn.Module):
    """P(w) = p_gen · softmax(logits)_w + (1 - p_gen) · Σ_{j: x_j = w} a_j, with p_gen = σ(W [c_t; s_t; E y_{t-1}] + b).

    a_j are the attention weights over the source tokens x_j, c_t the context, s_t the state of the decoder, and E y the
    embedded word before. Source and target have one vocabulary, so that x_j is a word that can be said.

    Words of a source that the vocabulary of V words lacks have the tokens V, V + 1, ..., each source its own: their
    P_vocab is 0, and they can be copied. The model reads them as `unknown`, in the source and as the word before.

    Args:
        context_dim: of a context.
        state_dim: of a state of the decoder.
        embedding_dim: of an embedded target word.
        unknown: the token that words which the vocabulary lacks are embedded as.

    Source: See et al. 2017 (arXiv 1704.04368), Eq. 8 and 9, and section 2.2 for the extended vocabulary.

    >>> gate, weights = torch.tensor([[[0.0]]]), torch.tensor([[[0.75, 0.25]]])  # p_gen = σ(0) = 1/2
    >>> source = torch.tensor([[3, 1]])
    >>> PointerGenerator.mix(torch.zeros(1, 1, 4), gate, weights, source).exp()
    tensor([[[0.1250, 0.2500, 0.1250, 0.5000]]])
    >>> PointerGenerator.mix(torch.zeros(1, 1, 4), gate, weights, torch.tensor([[4, 1]])).exp()  # 4: not in it
    tensor([[[0.1250, 0.2500, 0.1250, 0.1250, 0.3750]]])
    """

    def __init__(self, context_dim: int, state_dim: int, embedding_dim: int, *, unknown: int = 1) -> None:
        super().__init__()
        self.gate = nn.Linear(context_dim + state_dim + embedding_dim, 1)
        self.unknown = unknown

    def forward(self, context: Tensor, state: Tensor, embedded: Tensor) -> Tensor:
        """The logit log p_gen / (1 - p_gen), [B, T, 1], of context, state and the word before, [B, T, ·]."""
        return self.gate(torch.cat([context, state, embedded], dim=-1))

    def embeddable(self, tokens: Tensor, words: int) -> Tensor:
        """Tokens of a vocabulary of so many words: `unknown` for those behind it."""
        return tokens.masked_fill(tokens >= words, self.unknown)

    @staticmethod
    def mix(logits: Tensor, gate: Tensor, weights: Tensor, source: Tensor) -> Tensor:
        """All log P(w), [B, T, V], of logits [B, T, V], the gate [B, T, 1], weights [B, T, S], source tokens [B, S].

        With tokens from V on in a source it is [B, T, V + E], up to the largest; -inf for those of another source. How
        many they are is read from a source on a device once, not in each call. In float32 at least. The smallest normal
        number is added to each share, so that its logarithm is finite.
        """
        logits, gate, weights = (at_least_float32(tensor) for tensor in (logits, gate, weights))
        words = logits.shape[-1]
        lacking = _lacking(source, words)
        said = functional.logsigmoid(gate) + logits.log_softmax(-1)
        if lacking:
            said = functional.pad(said, (0, lacking), value=-torch.inf)
        index = source.unsqueeze(-2).expand(weights.shape)
        shares = torch.zeros_like(said).scatter_add(-1, index, weights.to(said.dtype))
        copied = functional.logsigmoid(-gate) + (shares + torch.finfo(said.dtype).tiny).log()
        mixed = torch.logaddexp(said, copied)
        if not lacking:
            return mixed
        numbers = torch.arange(words, words + lacking, device=source.device)
        absent = (source.unsqueeze(-1) != numbers).all(-2)  # [B, E]
        return mixed.masked_fill(functional.pad(absent, (words, 0)).unsqueeze(-2), -torch.inf)


def _lacking(source: Tensor, words: int) -> int:
    """How many tokens from `words` on there are, up to the largest of a source."""
    if not source.numel():
        return 0

    def read() -> int:
        return max(int(source.max()) + 1 - words, 0)

    return memoize_by_tensors((source,), ("tokens from", words), read) if waits(source) else read()
