"""The reversal task: a random digit string in, the same string backwards out."""

import random

import pytest
import torch

from regard.translation.batches import encode
from regard.translation.build_model import build_model
from regard.translation.corpus import ParallelText
from regard.translation.settings import (
    InverseSquareRootDecay,
    LuongSettings,
    PlainScoreSettings,
    RecurrentSettings,
    SearchSettings,
    TrainingSettings,
)
from regard.translation.training import fit
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings


def digit_strings(count, seed):
    draw = random.Random(seed)
    return ["".join(draw.choices("0123456789", k=draw.randint(4, 10))) for _ in range(count)]


@pytest.mark.slow
def test_reversal_is_learned_and_looks_backwards():
    train, held_out = digit_strings(10_000, seed=1), digit_strings(500, seed=2)
    vocabulary = Vocabulary.train(train, VocabularySettings(kind="characters", size=20))
    text = encode(ParallelText.pair(train, [line[::-1] for line in train]), vocabulary, vocabulary)
    torch.manual_seed(1)
    decoder = LuongSettings(score=PlainScoreSettings(kind="general"), input_feeding=False)
    settings = RecurrentSettings(cell="lstm", embedding_dim=32, hidden_dim=64, dropout=0.0, decoder=decoder)
    model = build_model(settings, len(vocabulary), len(vocabulary))
    fit(
        model,
        text,
        TrainingSettings(
            batch_tokens=1000, max_epochs=6, learning_rate=0.01, decay=InverseSquareRootDecay(), warmup_steps=50
        ),
    )
    translator = Translator(model, vocabulary, vocabulary, SearchSettings(beam=1))
    translations = translator.translate(held_out, batch_size=250)
    right = sum(translation.text == line[::-1] for translation, line in zip(translations, held_out, strict=True))
    assert right / len(held_out) >= 0.99
    mass = []
    for translation, line in zip(translations, held_out, strict=True):
        if translation.text == line[::-1]:
            weights = translation.candidates[0].weights[: len(line), : len(line)]
            mass.append(weights.fliplr().diagonal().mean())
    assert torch.stack(mass).mean() > 0.9
