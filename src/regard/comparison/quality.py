"""Measures of quality as statistics of each sentence, so that test sets can be resampled, and their sums scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor, nn

from regard.comparison.bootstrap import Numbers
from regard.comparison.recipe import MeasureName
from regard.language.sequence_training import sequence_loss
from regard.models import LanguageModel
from regard.translation.batches import EncodedText, collate
from regard.translation.vocabulary import PAD

HIGHER_IS_BETTER: Final = ("bleu", "exact")

HEADINGS: dict[str, str] = {
    "bleu": "BLEU",
    "exact": "exact, %",
    "cross-entropy": "nats per token",
    "bits-per-byte": "bits per byte",
}
"""What a column of each measure is called."""

BLEU_ORDER = 4
SENTENCES_AT_ONCE = 32


def score_of_sums(measure: MeasureName, sums: Numbers) -> float:
    """The quality of a test set, from the sum of its sentences' statistics, (k,).

    bleu, 0 to 100: corpus BLEU, smoothed as sacreBLEU does by default. exact, 0 to 100: percent of sentences.
    cross-entropy: nats per target token, END included. bits-per-byte. NaN of a test set without sentences.

    >>> score_of_sums("exact", np.array([3.0, 4.0]))
    75.0
    """
    if not sums[1]:
        return math.nan
    if measure == "bleu":
        lengths, counts = sums[:2], sums[2:]
        return BLEU.compute_bleu(
            correct=[int(count) for count in counts[:BLEU_ORDER]],
            total=[int(count) for count in counts[BLEU_ORDER:]],
            sys_len=int(lengths[0]),
            ref_len=int(lengths[1]),
            smooth_method="exp",
        ).score
    return float(sums[0] / sums[1]) * (100.0 if measure == "exact" else 1.0)


def bleu_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> list[list[float]]:
    """Lengths of hypothesis and reference, matching n-grams and all n-grams of each sentence, n from 1 to 4.

    Tokens are those of sacreBLEU's 13a.

    >>> bleu_statistics(["the cat sat"], ["the cat sits"])
    [[3, 3, 2, 1, 0, 0, 3, 2, 1, 0]]
    """
    bleu = BLEU(effective_order=True)  # which counts alike, and does not warn of single sentences
    scores = (bleu.sentence_score(*pair) for pair in zip(hypotheses, ([one] for one in references), strict=True))
    return [[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in scores]


def exact_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> list[list[float]]:
    """Whether each sentence is its reference letter for letter, 0 or 1, and 1."""
    return [[float(one == other), 1.0] for one, other in zip(hypotheses, references, strict=True)]


def cross_entropy_statistics(model: Callable[[Tensor, Tensor, Tensor], Tensor], text: EncodedText) -> list[list[float]]:
    """-Σ log p of the target tokens of each pair, END included, in nats, and how many tokens these are.

    `model` is in eval mode: from source (B, S), lengths (B,) and target so far (B, T) to logits (B, T, V).
    """
    found = np.zeros((len(text), 2))
    order = np.argsort(text.lengths, kind="stable")
    with torch.inference_mode():
        for start in range(0, len(order), SENTENCES_AT_ONCE):
            rows = order[start : start + SENTENCES_AT_ONCE]
            batch = collate(text, rows)
            logits = model(batch.source, batch.source_lengths, batch.target_input)  # (B, T, V)
            entropies = nn.functional.cross_entropy(
                logits.transpose(1, 2), batch.target_output, ignore_index=PAD, reduction="none"
            )
            found[rows, 0] = entropies.double().sum(1).numpy()
            found[rows, 1] = (batch.target_output != PAD).sum(1).numpy()
    return found.tolist()


def byte_statistics(model: LanguageModel, sequences: Sequence[Tensor]) -> list[list[float]]:
    """-Σ log₂ p of the bytes of each sequence but its first, in bits, and how many bytes these are."""
    with torch.inference_mode():
        bits = [float(sequence_loss(model, sequence)) / math.log(2) for sequence in sequences]
    return [[one, float(len(sequence) - 1)] for one, sequence in zip(bits, sequences, strict=True)]
