"""Small models, texts and experiments that the tests of training share."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.translation.batches import EncodedText, IdSequences
from regard.translation.experiment import Experiment
from regard.translation.vocabulary import PAD

SIZE = 11


class Copier(nn.Module):
    """Sees the words of the source in no order, and the word before: the least that can be trained and has dropout."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.embed = nn.Embedding(SIZE, 8, padding_idx=PAD)
        self.dropout = nn.Dropout(dropout)
        self.predict = nn.Linear(8, SIZE)

    def forward(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        bag = self.embed(source).sum(1) / source_lengths.unsqueeze(-1)  # [B, 8]
        return self.predict(self.dropout(self.embed(target) + bag.unsqueeze(1)))  # [B, T, V]


def copier(dropout: float = 0.2) -> Copier:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Copier(dropout)


def text(pairs: int, seed: int = 1) -> EncodedText:
    generator = random.Random(seed)
    lines = [generator.choices(range(4, SIZE), k=generator.randrange(1, 6)) for _ in range(pairs)]
    return EncodedText(IdSequences.pack(lines), IdSequences.pack(lines))


def write_text(folder: Path) -> None:
    generator = random.Random(1)
    for name, count in (("train", 60), ("dev", 20)):
        words = ["".join(generator.choices("abcdef", k=generator.randrange(1, 9))) for _ in range(count)]
        (folder / f"{name}.src").write_text("\n".join(words))
        (folder / f"{name}.trg").write_text("\n".join(word[::-1] for word in words))


def experiment(folder: Path, **training: Any) -> Experiment:
    return Experiment.from_mapping(
        {
            "name": "toy",
            "data": {
                "folder": str(folder),
                "train": {"source": "train.src", "target": "train.trg"},
                "validation": {"source": "dev.src", "target": "dev.trg"},
            },
            "vocabulary": "characters",
            "model": {"embedding_dim": 6, "hidden_dim": 8, "dropout": 0.3},
            "training": {"batch_tokens": 60, "max_epochs": 2, "accelerator": "cpu", **training},
        }
    )
