"""Text prepared for training: cleaned, held out, varied, joined, mixed, with placeholders; docs/yaml-preparation.md.

`python -m regard.translation.preparation > docs/yaml-preparation.md` writes the page of its keys anew.
"""

from __future__ import annotations

import gzip
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from regard.errors import CheckpointError, CorpusError
from regard.translation.corpus import ParallelText
from regard.translation.data_split import split, unseen, with_casual_copies
from regard.translation.experiment import YAMLExperiment, settings_tables
from regard.translation.pair_variations import Pair, PairVariations, clean, joined
from regard.translation.placeholders import Placeholders
from regard.translation.settings import Count, Positive, Section, Share, SplitSettings, TextSettings, WholeNumber
from regard.utils.atomic_files import atomic_write

TASK = "preparation"
FIRST_SIGNS = 14
"""A quarter of the pairs begins with another placeholder than ①, one of the next 13, so that all are learned."""


class MixedText(Section):
    """One of the texts that are mixed."""

    text: TextSettings
    """Its pairs: two files, or a table."""
    validation: TextSettings | None = None
    """More pairs to validate on."""
    split: SplitSettings | None = None
    """Pairs of it to validate or test on, which are not trained on."""
    times: Count = 1
    """How often each pair is in the prepared text."""
    left_out: Share = 0.0
    """Share of its pairs that are not in the prepared text, drawn; the words of all are known to be translated."""
    joined: Share = 0.0
    """For which share of its pairs two or three are joined to a longer one as well, half of them neighbours, and half
    drawn from the whole text."""
    casual_copies: Share = 0.0
    """Share of its pairs that are there a second time without the source's final mark, in lower case, or both."""
    varied_copies: Share = 0.0
    """Share of its pairs that are there a second time with other names, or with digits for the words of `numbers`,
    where they have any."""


class Preparation(YAMLExperiment):
    """All settings of a prepared text.

    >>> texts = [{"text": "pairs.tsv", "split": {"test": 100}}]
    >>> preparation = Preparation.from_mapping({"name": "toy", "task": "preparation", "texts": texts})
    >>> preparation.texts[0].times, preparation.placeholders
    (1, True)
    """

    name: Annotated[str, Field(min_length=1)]
    """Name of the text; its folder is data/NAME unless `--folder` names another."""
    task: Literal["preparation"] = TASK
    """What the file is for."""
    seed: WholeNumber = 1
    """Seed of what is drawn."""
    folder: Path = Path()
    """Folder that the files are relative to."""
    texts: list[MixedText] = Field(min_length=1)
    """The texts that are mixed."""
    held_out: list[TextSettings] = Field(default=[])
    """Texts of which no sentence may be trained on, compared without case and punctuation, such as those that are
    tested on."""
    longest: Count = 80
    """Most words of a side; longer pairs are left out."""
    length_ratio: Positive = 3.0
    """Most characters of a side, as a multiple of those of the other, and 20."""
    numbers: dict[str, str] = Field(default={})
    """Words of numbers and their translations, for which `varied_copies` has digits."""
    placeholders: bool = True
    """Whether numbers, addresses, quoted words and names that both sides have are replaced by placeholders."""
    unknown_words: bool = False
    """Whether a translator copies every word that is not in the text, as it does names; its text then needs some words
    that are placeholders and no names."""


@dataclass
class PreparedText:
    """The pairs of each part, and the placeholders in them; test pairs have none, as a translator reads them.

    counts tells, of each step, how many pairs it left out or added.
    """

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    placeholders: Placeholders | None
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Preparation) -> PreparedText:
        """Read, clean, vary and mix the texts of the settings.

        Raises:
            CorpusError: a text cannot be read, is too small for its split, or nothing of it is left.
        """
        texts = [_read(one, settings) for one in settings.texts]
        held_out = [ParallelText.read(one, settings.folder) for one in settings.held_out]
        held_out += [part for _, *parts in texts for part in parts if part is not None]
        counts = {"read": sum(len(train) for train, *_ in texts)}
        trained: list[list[Pair]] = []
        for train, *_ in texts:
            kept = clean(zip(train.sources, train.targets, strict=True), settings.longest, settings.length_ratio)
            if not kept:
                raise CorpusError(f"no pair of {train.source_name} is left: raise longest or length_ratio")
            sources, targets = ([pair[side] for pair in kept] for side in (0, 1))
            text = ParallelText.pair(sources, targets, source_name=train.source_name)
            trained.append(unseen(text, held_out) if held_out else kept)
        every = [pair for pairs in trained for pair in pairs]
        counts["clean and not held out"] = len(every)
        variations = PairVariations.of_pairs(every, settings.numbers, settings.seed)
        draw = random.Random(settings.seed)
        mixed = [
            pair
            for pairs, one in zip(trained, settings.texts, strict=True)
            for pair in _mixed(pairs, one, settings, variations, draw)
        ]
        counts["mixed"] = len(mixed)
        validation = _pairs([one for _, one, _ in texts if one is not None])
        test = _pairs([one for _, _, one in texts if one is not None])
        placeholders = None
        if settings.placeholders:
            placeholders = replace(variations.placeholders, unknown_words=settings.unknown_words)
            firsts = (0 if draw.random() < 0.75 else draw.randrange(1, FIRST_SIGNS) for _ in mixed)
            placed = [placeholders.pair(*pair, first) for pair, first in zip(mixed, firsts, strict=True)]
            counts["with placeholders"] = sum(a != b for a, b in zip(placed, mixed, strict=True))
            mixed, validation = placed, [placeholders.pair(*pair) for pair in validation]
        return cls(mixed, validation, test, placeholders, counts)

    def write(self, folder: Path) -> None:
        """Write train.tsv.gz, validation.tsv.gz and test.tsv.gz where there are such pairs, and placeholders.json.

        Raises:
            CheckpointError: a file cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {folder} ({error.strerror})") from None
        for name, pairs in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            if pairs:
                table = "".join(f"{source}\t{target}\n" for source, target in pairs).encode()
                with atomic_write(folder / f"{name}.tsv.gz") as partial:
                    partial.write_bytes(gzip.compress(table, mtime=0))
        if self.placeholders is not None:
            self.placeholders.save(folder)


def _read(one: MixedText, settings: Preparation) -> tuple[ParallelText, ParallelText | None, ParallelText | None]:
    """The pairs of a text to train on, to validate on and to test on."""
    text = ParallelText.read(one.text, settings.folder)
    parts = split(text, one.split) if one.split else {"train": text}
    validation = parts.get("validation")
    if one.validation is not None:
        more = ParallelText.read(one.validation, settings.folder)
        if validation is not None:
            more = ParallelText.pair([*validation.sources, *more.sources], [*validation.targets, *more.targets])
        validation = more
    return parts["train"], validation, parts.get("test")


def _mixed(
    pairs: list[Pair], one: MixedText, settings: Preparation, variations: PairVariations, draw: random.Random
) -> list[Pair]:
    """The pairs of a text with their copies, as often as it is mixed in."""
    found: list[Pair] = []
    if one.left_out:
        pairs = [pair for pair in pairs if draw.random() >= one.left_out]
    for _ in range(one.times):
        found += pairs
        chosen = [pair for pair in pairs if draw.random() < one.varied_copies]
        found += [varied for pair in chosen if (varied := variations.varied(pair, draw))]
        found += clean(joined(pairs, one.joined, draw), settings.longest, settings.length_ratio)
    if one.casual_copies:
        text = with_casual_copies(ParallelText.pair(*map(list, zip(*pairs, strict=True))), one.casual_copies)
        found += list(zip(text.sources[len(pairs) :], text.targets[len(pairs) :], strict=True))
    return found


def _pairs(texts: list[ParallelText]) -> list[Pair]:
    return [pair for text in texts for pair in zip(text.sources, text.targets, strict=True)]


HEAD = """\
# The YAML of a prepared text

`regard prepare preparation.yaml` reads parallel texts, holds out what is validated and tested on, cleans, varies and
joins the rest, and mixes it. `name`, `task` and `texts` are needed, every other key has a default; unknown keys are
refused:

    name: mixed
    task: preparation
    texts:
      - {text: pairs.tsv.gz, split: {validation: 1500, test: 1500}}
      - {text: {source: captions.en, target: captions.fr}, times: 2, joined: 0.2}

The folder, data/NAME unless `--folder` names another, gets train.tsv.gz, validation.tsv.gz, test.tsv.gz, which an
experiment names as its data, placeholders.json for its `data.placeholders`, and preparation.yaml, the settings in
effect. The same settings give the same files.

This page is written by `python -m regard.translation.preparation`."""


def preparation_reference() -> str:
    """The page docs/yaml-preparation.md as Markdown."""
    return settings_tables(HEAD, Preparation)


if __name__ == "__main__":
    sys.stdout.write(preparation_reference())
