"""Metadata of translations: gold word links, and which of the n best translations a map belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import AtlasError, CorpusError
from ...heads.word_alignment import Link, SentenceLinks, parse_pharaoh

WordNumbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankedTranslation:
    """One of the n best translations of a sentence: rank from 0, text and score."""

    rank: int
    text: str
    score: float


def parse_gold_links(gold: Any) -> SentenceLinks:
    """Parse gold links: "0-0 1-2 2?3", an object with `sure` and `possible`, or pairs, which are sure.

    Raises:
        AtlasError: they are none of these.
    """
    if isinstance(gold, str):
        try:
            return parse_pharaoh(gold)
        except CorpusError as error:
            raise AtlasError(f"the gold links cannot be read: {error}") from None
    if hasattr(gold, "sure") and hasattr(gold, "possible"):
        sure = _pairs(gold.sure)
        return SentenceLinks(sure, sure | _pairs(gold.possible))
    return SentenceLinks(_pairs(gold), _pairs(gold))


def check_fit(links: SentenceLinks, source: int, target: int) -> None:
    """Check that links are within so many source and target words.

    Raises:
        AtlasError: one is of a word that is not there.
    """
    for link in sorted(links.possible | links.sure):
        if not (0 <= link[0] < source and 0 <= link[1] < target):
            swapped = 0 <= link[1] < source and 0 <= link[0] < target
            raise AtlasError(
                f"the gold links have {link}, but there are {source} source words and {target} target words, counted "
                f"from 0{': a link has its source word first' if swapped else ''}"
            )


def to_json(links: SentenceLinks) -> dict[str, list[list[int]]]:
    """Links as JSON {"sure", "possible"}; sure links are not repeated among the possible ones."""
    sure, possible = sorted(links.sure), sorted(links.possible - links.sure)
    return {"sure": [list(link) for link in sure], "possible": [list(link) for link in possible]}


def from_json(gold: Mapping[str, Any]) -> SentenceLinks:
    """Links from the JSON of `to_json`."""
    sure = frozenset((source, target) for source, target in gold["sure"])
    return SentenceLinks(sure, sure | {(source, target) for source, target in gold["possible"]})


def word_count(numbers: WordNumbers | None, tokens: int) -> int:
    """The number of words; without word numbers each token is a word."""
    return tokens if numbers is None else max(numbers, default=-1) + 1


def read_word_numbers(arrays: Mapping[str, Tensor], name: str) -> WordNumbers | None:
    """The stored word number of each token of a list, -1 for none; None if they are not stored."""
    held = f"{name}.numbers"
    return tuple(arrays[held].tolist()) if held in arrays else None


def validated_hypotheses(given: Any, maps: int) -> list[dict[str, Any] | None]:
    """Validate one hypothesis or None for each map, and return them as JSON.

    Raises:
        AtlasError: they are not one `RankedTranslation`, or what a file has of it, or None for each map.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != maps:
        has = len(given) if isinstance(given, Sequence) else f"a {type(given).__name__}"
        raise AtlasError(f"hypotheses need one entry for each of the {maps} maps; they are {has}")
    found = []
    for one in given:
        entry = {"rank": one.rank, "text": one.text, "score": one.score} if isinstance(one, RankedTranslation) else one
        if entry is not None and not _is_hypothesis(entry):
            raise AtlasError(
                "a hypothesis needs to be {'rank': whole number, 'text': words, 'score': number}, or None; "
                f"one is {str(entry)[:120]}"
            )
        found.append(None if entry is None else dict(entry))
    return found


def check_translation_info(record: Mapping[str, Any], sequences: int) -> None:
    """Check the form of a file's hypotheses and gold links; `check_words` checks that links fit the words.

    Raises:
        AtlasError: they do not.
    """
    if "hypotheses" in record:
        validated_hypotheses(record["hypotheses"], sequences)
    gold = record.get("gold")
    if "gold" not in record:
        return
    if record["kind"] != "cross" or not isinstance(gold, list) or len(gold) != sequences:
        raise AtlasError(f"its gold links need to be those of cross-attention, one entry for each of {sequences}")
    for links in gold:
        if links is not None and not _is_links(links):
            raise AtlasError(
                f"its gold links are {str(links)[:80]}; they need {{'sure': [[0, 0], ...], 'possible': [...]}}"
            )


def check_words(record: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
    """Check that a file's gold links are between words that exist.

    Raises:
        AtlasError: they are not.
    """
    for sequence, gold in enumerate(record.get("gold") or ()):
        if gold is not None:
            counts = [
                word_count(_numbers(record, arrays, side, sequence), record[count])
                for side, count in (("key", "keys"), ("query", "queries"))
            ]
            check_fit(from_json(gold), *counts)


def _numbers(record: Mapping[str, Any], arrays: Mapping[str, Tensor], side: str, sequence: int) -> WordNumbers | None:
    lists = record["tokens"][side]
    return None if lists is None else read_word_numbers(arrays, f"words.{lists[sequence]}")


def _pairs(links: Any) -> frozenset[Link]:
    given = list(links) if isinstance(links, Iterable) and not isinstance(links, str) else None
    if given is None or not all(_is_pair(link) for link in given):
        raise AtlasError(
            f"gold links are {str(links)[:80]!r}; they need to be as '0-0 1-2 2?3', pairs (source word, target word), "
            "or an object with sure and possible, such as SentenceLinks"
        )
    return frozenset((int(source), int(target)) for source, target in given)


def _is_pair(link: Any) -> bool:
    return (
        isinstance(link, Sequence)
        and len(link) == 2
        and all(hasattr(number, "__index__") and not isinstance(number, bool) for number in link)
    )


def _is_links(links: Any) -> bool:
    return (
        isinstance(links, dict)
        and set(links) == {"sure", "possible"}
        and all(
            isinstance(of, list) and all(isinstance(link, list) and _is_pair(link) for link in of)
            for of in links.values()
        )
    )


def _is_hypothesis(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or set(entry) != {"rank", "text", "score"}:
        return False
    rank, text, score = entry["rank"], entry["text"], entry["score"]
    whole = isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31
    number = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 2.0**1000
    return whole and isinstance(text, str) and number and math.isfinite(score)
