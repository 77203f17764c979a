"""The reversal task: a random digit string in, the same string backwards out."""

import random

import pytest
import torch

from regard.translation.batches import encode
from regard.translation.build_model import build_model
from regard.translation.corpus import ParallelText
from regard.translation.settings import InverseSquareRootDecay, SearchSettings, TrainingSettings, TransformerSettings
from regard.translation.training import fit
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings


def digit_strings(count, seed):
    draw = random.Random(seed)
    return ["".join(draw.choices("0123456789", k=draw.randint(4, 6))) for _ in range(count)]


@pytest.mark.slow
def test_reversal_is_learned_and_a_head_looks_backwards():
    train, held_out = digit_strings(10_000, seed=1), digit_strings(500, seed=2)
    vocabulary = Vocabulary.train(train, VocabularySettings(kind="characters", size=20))
    text = encode(ParallelText.pair(train, [line[::-1] for line in train]), vocabulary, vocabulary)
    torch.manual_seed(1)
    settings = TransformerSettings(
        dim=64, hidden_dim=128, num_heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0, norm="pre",
        shared_embeddings="all",
    )  # fmt: skip
    model = build_model(settings, len(vocabulary), len(vocabulary))
    fit(
        model,
        text,
        TrainingSettings(
            batch_tokens=1000,
            max_epochs=13,
            learning_rate=0.005,
            decay=InverseSquareRootDecay(),
            warmup_steps=100,
            betas=(0.9, 0.98),
        ),
    )
    translations = Translator(model, vocabulary, vocabulary, SearchSettings(beam=1)).translate(held_out, batch_size=250)
    right = [one for one, line in zip(translations, held_out, strict=True) if one.text == line[::-1]]
    assert len(right) / len(held_out) > 0.95
    mass = []
    for translation in right:
        length = len(translation.source)
        weights = translation.candidates[0].weights[:length, ..., :length]  # [T, layers, heads, S]
        mass.append(weights.flip(-1).diagonal(dim1=0, dim2=3).mean(-1))
    assert torch.stack(mass).mean(0).max() > 0.8
