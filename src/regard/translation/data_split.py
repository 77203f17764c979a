"""Training, validation and test text of an experiment: from files, or split off one text without shared sentences.

A sentence with several translations is in several pairs. Split by pair, its other translations would be in the training
text; so pairs that share a sentence, directly or through others, stay together.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace

from regard.errors import CorpusError
from regard.heads.word_alignment import Link
from regard.translation.corpus import ParallelText
from regard.translation.settings import DataSettings, SplitSettings
from regard.translation.tokenization import words_of

_FINAL_MARKS = ".!?…。！？"


def training_text(data: DataSettings) -> tuple[ParallelText, ParallelText | None]:
    """The training text with its casual copies and extra pairs, and the validation text or None.

    Raises:
        CorpusError: a file cannot be read, or holds too little for the split.
    """
    text = ParallelText.read(data.train, data.folder, alignments=data.alignments)
    held_out: dict[str, ParallelText] = {}
    if data.validation is not None:
        held_out["validation"] = ParallelText.read(data.validation, data.folder)
    if data.split is not None:
        held_out |= split(text, data.split)
        text = held_out.pop("train")
    if data.casual_copies:
        text = with_casual_copies(text, data.casual_copies)
    if data.extra is not None:
        tested = [] if data.test is None else [ParallelText.read(data.test, data.folder)]
        extra = unseen(ParallelText.read(data.extra, data.folder), [*held_out.values(), *tested])
        text = _joined(text, extra * data.extra_times)
    return text, held_out.get("validation")


def evaluation_text(data: DataSettings) -> ParallelText | None:
    """The test text: `data.test`, or the split's; None without either.

    Raises:
        CorpusError: as `training_text`.
    """
    if data.test is not None:
        return ParallelText.read(data.test, data.folder)
    if data.split is None or not data.split.test:
        return None
    return split(ParallelText.read(data.train, data.folder), data.split)["test"]


def split(text: ParallelText, settings: SplitSettings) -> dict[str, ParallelText]:
    """The parts "train", "validation" and "test" of a text, of which no two share a sentence of either language.

    Sentences that differ in nothing but case, punctuation and white space are taken for one. Pairs that share a
    sentence make a group, also through pairs between them, and a group stays whole. Groups come in the order of a hash
    of the seed and of their first pair by alphabet: each is as likely as any other to be held out, and no order of the
    lines matters. The first that fit fill the test text to its number of pairs, the next the validation text, and
    training has the rest. Within a part the lines keep their order. A part of no pairs is not there.

    Raises:
        CorpusError: there are too few pairs, or the groups are too large to come out at those numbers.

    >>> text = ParallelText.pair(["Go.", "Go!", "Hi.", "Run."], ["Va !", "Allez !", "Salut !", "allez"])
    >>> parts = split(text, SplitSettings(test=1))
    >>> parts["test"].sources, parts["train"].sources
    (['Hi.'], ['Go.', 'Go!', 'Run.'])
    """
    held_out = {name: pairs for name, pairs in (("test", settings.test), ("validation", settings.validation)) if pairs}
    if sum(held_out.values()) >= len(text):
        raise CorpusError(
            f"data.split holds out {sum(held_out.values()):,} pairs, and {text.source_name} has {len(text):,}: "
            "lower split.validation or split.test, or give more text"
        )
    pairs_of = list(zip(text.sources, text.targets, strict=True))
    groups = sorted(_groups(text), key=lambda rows: _hash(min(pairs_of[row] for row in rows), settings.seed))
    parts: dict[str, ParallelText] = {}
    for name, pairs in held_out.items():
        chosen, groups = _fill(groups, pairs, name, text)
        parts[name] = _part(text, chosen, name)
    return {**parts, "train": _part(text, groups, "training")}


def with_casual_copies(text: ParallelText, share: float) -> ParallelText:
    """Add copies of a share of the pairs, with the source typed carelessly and the target unchanged.

    In a third of the copies the source has no final mark, in a third it is in lower case, in a third both. A hash of
    the pair decides, so that the same pairs have the same copies in any text.

    >>> with_casual_copies(ParallelText.pair(["It's Tom."], ["C'est Tom."]), 0.99).sources
    ["It's Tom.", "it's tom"]
    """
    copies, links = [], []
    for row, pair in enumerate(zip(text.sources, text.targets, strict=True)):
        if _hash(pair, "copied") >= share:
            continue
        source = _careless_copy(pair[0], int(_hash(pair, "kind") * 3))
        if source != pair[0]:
            copies.append((source, pair[1]))
            words = len(words_of(source))  # a mark that stood alone is gone with its links
            links.append(frozenset(link for link in (text.links[row] if text.links else ()) if link[0] < words))
    return _joined(text, copies, links)


def unseen(text: ParallelText, held_out: Iterable[ParallelText]) -> list[tuple[str, str]]:
    """Pairs of a text that share no sentence with the held-out texts, compared without case and punctuation.

    Raises:
        CorpusError: none is left.

    >>> held_out = ParallelText.pair(["Go."], ["Va !"])
    >>> unseen(ParallelText.pair(["go", "Hi."], ["Pars !", "Salut !"]), [held_out])
    [('Hi.', 'Salut !')]
    """
    parts = list(held_out)
    sources = {_bare_text(line) for part in parts for line in part.sources}
    targets = {_bare_text(line) for part in parts for line in part.targets}
    pairs = list(zip(text.sources, text.targets, strict=True))
    pairs = [pair for pair in pairs if _bare_text(pair[0]) not in sources and _bare_text(pair[1]) not in targets]
    if not pairs:
        raise CorpusError(
            f"each of the {len(text):,} pairs of {text.source_name} shares a sentence with what is held out, and none "
            "is left to train on: leave out data.extra, or give it pairs of its own"
        )
    return pairs


def _joined(
    text: ParallelText, pairs: Sequence[tuple[str, str]], links: Sequence[frozenset[Link]] | None = None
) -> ParallelText:
    """A text with more pairs appended; without links of their own they have none."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    more = [frozenset()] * len(pairs) if links is None else links
    joined = None if text.links is None else [*text.links, *more]
    return replace(text, sources=[*text.sources, *sources], targets=[*text.targets, *targets], links=joined)


def _careless_copy(source: str, kind: int) -> str:
    line = source if kind == 0 else source.lower()
    return (line if kind == 1 else line.rstrip().rstrip(_FINAL_MARKS).rstrip()) or source


def _groups(text: ParallelText) -> Iterable[list[int]]:
    """Rows of pairs that share sentences: connected components of the graph whose edges are the pairs."""
    parents: dict[tuple[int, str], tuple[int, str]] = {}

    def root(sentence: tuple[int, str]) -> tuple[int, str]:
        parents.setdefault(sentence, sentence)
        while parents[sentence] != sentence:
            parents[sentence] = parents[parents[sentence]]
            sentence = parents[sentence]
        return sentence

    ends = [
        ((0, _bare_text(source)), (1, _bare_text(target)))
        for source, target in zip(text.sources, text.targets, strict=True)
    ]
    for source, target in ends:
        parents[root(source)] = root(target)
    groups: dict[tuple[int, str], list[int]] = {}
    for row, (source, _) in enumerate(ends):
        groups.setdefault(root(source), []).append(row)
    return groups.values()


def _bare_text(sentence: str) -> str:
    """Letters, marks and digits of a sentence, case-folded: equal for two spellings of it."""
    folded = unicodedata.normalize("NFKC", sentence).casefold()
    return "".join(sign for sign in folded if unicodedata.category(sign)[0] in "LMN") or sentence


def _hash(pair: tuple[str, str], seed: object) -> float:
    """Hash of a pair and a seed, in [0, 1), the same on every machine."""
    digest = hashlib.blake2b("\t".join([str(seed), *pair]).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _fill(
    groups: Sequence[list[int]], pairs: int, name: str, text: ParallelText
) -> tuple[list[list[int]], list[list[int]]]:
    """The first groups that fit into a number of pairs, and the others."""
    chosen, others, missing = [], [], pairs
    for rows in groups:
        fits = len(rows) <= missing
        (chosen if fits else others).append(rows)
        missing -= len(rows) * fits
    if missing:
        raise CorpusError(
            f"split.{name} asks for {pairs:,} pairs, and what shares a sentence stays together: no set of groups of "
            f"{text.source_name} was found that comes out at that number, the nearest has {pairs - missing:,}: ask for "
            "that many"
        )
    return chosen, others


def _part(text: ParallelText, groups: Sequence[list[int]], name: str) -> ParallelText:
    rows = sorted(row for group in groups for row in group)
    return ParallelText(
        sources=[text.sources[row] for row in rows],
        targets=[text.targets[row] for row in rows],
        source_name=f"{text.source_name} ({name} part)",
        target_name=f"{text.target_name} ({name} part)",
        dropped_empty=text.dropped_empty if name == "training" else 0,
        links=None if text.links is None else [text.links[row] for row in rows],
    )
