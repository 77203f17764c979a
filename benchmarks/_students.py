"""Models as large as Bergamot's students, of random weights, and a short list and sentences for them.

Words are as frequent as in a text, 1 / rank, and so are the 50 words that each source word may become.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.models.transformer import Transformer
from regard.models.transformer.short_list import ShortList
from regard.translation.build_model import build_model
from regard.translation.settings import TransformerSettings

WORDS, FIRST, BEST, LENGTH = 32_000, 100, 50, 20
"""Words of the vocabulary, those that are always listed, those of each source word; tokens of a sentence."""
FREQUENCIES = 1 / (torch.arange(WORDS) + 20.0)


def student(decoder_attention: str) -> Transformer:
    """A student: 6 layers of the encoder and 2 of the decoder, one table of embeddings."""
    told = {"dim": 256, "hidden_dim": 1536, "num_heads": 8, "encoder_layers": 6, "decoder_layers": 2}
    more = {"shared_embeddings": "all", "decoder_attention": decoder_attention}
    model = build_model(TransformerSettings.model_validate({**told, **more}), WORDS, WORDS).eval()
    assert isinstance(model, Transformer)
    return model


def short_list() -> ShortList:
    words = torch.multinomial(FREQUENCIES, WORDS * BEST, replacement=True)
    return ShortList(torch.arange(FIRST), torch.arange(0, WORDS * BEST + 1, BEST), words, WORDS)


def sentences(count: int) -> Tensor:
    return (torch.multinomial(FREQUENCIES[4:], count * LENGTH, replacement=True) + 4).view(count, LENGTH)
