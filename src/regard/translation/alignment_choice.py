"""Which attention of a translator says what a word translates: chosen by links of words, and kept with the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from regard.errors import ConfigurationError
from regard.heads.word_alignment import Link, word_links
from regard.translation.kept_record import load_record, save_record

Step = Literal["says", "reads"]
"""The decoder step whose weights count for a word: the one that says it, or the next one, which reads it."""

FILE = "alignment.json"


@dataclass(frozen=True)
class AlignmentChoice:
    """An attention map of a decoder, as `one_map` takes it: a layer and head, or the mean over those that are None."""

    layer: int | None = None
    head: int | None = None
    step: Step = "says"
    error_rate: float | None = None
    """Its alignment error rate against the links that it was chosen by, 0..1."""
    pairs: int = 0
    """Of so many pairs of sentences."""

    def save(self, folder: Path) -> None:
        """Write alignment.json into the folder of a model, which every later alignment reads.

        Raises:
            CheckpointError: it cannot be written.
        """
        save_record(self, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> AlignmentChoice | None:
        """The choice that is kept in the folder of a model, None where there is none.

        Raises:
            CheckpointError: alignment.json was damaged.
        """
        return load_record(folder / FILE, cls._of_fields, "remove it, or choose anew")

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> AlignmentChoice:
        choice = cls(**fields)
        if choice.step not in get_args(Step):
            raise ValueError(f"step is {choice.step!r}, and needs to be one of {', '.join(get_args(Step))}")
        return choice


class ObservedPair(NamedTuple):
    """A translation that was forced: a row of weights for each step, and the word of each token."""

    weights: Tensor
    """[T + 1, S], or [T + 1, layers, heads, S]: the last step says the end."""
    source_words: Sequence[int]
    target_words: Sequence[int]

    def rows(self, step: Step) -> Tensor:
        """The weights of the T tokens, without the end."""
        return self.weights[1:] if step == "reads" else self.weights[:-1]


@dataclass
class _Tally:
    """Links that were found, those that were right among them, and those that there are."""

    found: int = 0
    right: int = 0
    there: int = 0

    def error_rate(self) -> float:
        """AER of links that are all sure."""
        return 1 - 2 * self.right / max(1, self.found + self.there)


def best_choice(pairs: Iterable[tuple[ObservedPair, frozenset[Link]]]) -> AlignmentChoice:
    """The attention whose links have the lowest error rate against those that are passed.

    Tried are every head, the mean of every layer and the mean of all, each at both steps.
    """
    tallies: dict[tuple[int | None, int | None, Step], _Tally] = {}
    count = 0
    for pair, links in pairs:
        count += 1
        for layer, head in _maps(pair.weights):
            for step in get_args(Step):
                rows = one_map(pair.rows(step), layer, head)
                found = word_links(rows, pair.source_words, pair.target_words)
                tally = tallies.setdefault((layer, head, step), _Tally())
                tally.found += len(found)
                tally.right += len(links.intersection(found))
                tally.there += len(links)
    if not tallies:
        return AlignmentChoice()
    best = min(tallies, key=lambda which: tallies[which].error_rate())
    return AlignmentChoice(*best, error_rate=round(tallies[best].error_rate(), 4), pairs=count)


def _maps(weights: Tensor) -> list[tuple[int | None, int | None]]:
    """Layer and head of all that is tried; the mean over all first, which wins where all are equal."""
    if weights.ndim == 2:
        return [(None, None)]
    layers, heads = weights.shape[1:3]
    every: list[tuple[int | None, int | None]] = [(None, None), *((layer, None) for layer in range(layers))]
    return every + [(layer, head) for layer in range(layers) for head in range(heads)]


def one_map(weights: Tensor, layer: int | None = None, head: int | None = None) -> Tensor:
    """Weights [T, layers, heads, S] as one map [T, S]: of a layer and head, or the mean over those that are not chosen.

    Layers and heads count from 0. Weights that are [T, S] already stay as they are. By default it is the mean over all
    heads of all layers: a distribution that no single head need have, and that needs no choice.

    Raises:
        ConfigurationError: there is no such layer or head, or nothing was observed.

    >>> import torch
    >>> weights = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])  # one token, one layer, two heads, two source tokens
    >>> one_map(weights), one_map(weights, head=1)
    (tensor([[0.5000, 0.5000]]), tensor([[0., 1.]]))
    """
    if weights.ndim == 2 and layer is None and head is None:
        return weights
    if 0 in weights.shape[1:-1]:
        raise ConfigurationError("there are no weights to show: the translation was made with observe=False")
    sizes = (
        {"layer": 0, "head": 0} if weights.ndim == 2 else dict(zip(("layer", "head"), weights.shape[1:3], strict=True))
    )
    for (name, size), chosen in zip(sizes.items(), (layer, head), strict=True):
        if chosen is not None and not 0 <= chosen < size:
            has = f"has {size} {name}s, 0 to {size - 1}" if size else f"has one map of weights and no {name}s"
            raise ConfigurationError(f"there is no {name} {chosen}: the model {has}")
    weights = weights.mean(1) if layer is None else weights[:, layer]  # [T, heads, S]
    return weights.mean(1) if head is None else weights[:, head]
