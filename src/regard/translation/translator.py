"""A trained translator in use: lines in, translations out, each with where it looked.

Shapes: B sentences, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import CorpusError, DeviceError
from regard.plots import heatmap
from regard.translation.batches import EncodedText, IdSequences, collate
from regard.translation.build_model import build_model
from regard.translation.checkpoint import LONGEST_SOURCE, restore
from regard.translation.experiment import Experiment
from regard.translation.pharaoh import Link, one_map, word_links
from regard.translation.run_folder import RunFolder, Which
from regard.translation.search import Hypothesis, TranslationModel, beam_search
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import END, UNKNOWN, Readable, Vocabulary, readable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Candidate:
    """One of the n best translations of a line: its text, and a row of `weights` [T, ..., S] for each of `tokens`.

    `weights` is [T, S], or [T, layers, heads, S] of a model that has several maps; `self_weights` [T, layers, heads, T]
    is where each step looked at the words so far, BEGIN the first. What was not observed, or is not there, has no
    layers. The last token is "</s>" where the translation is `finished`; one cut at the longest length has none.
    """

    text: str
    tokens: tuple[str, ...]
    score: float
    log_probability: float
    weights: Tensor
    self_weights: Tensor
    finished: bool


@dataclass(frozen=True, eq=False)
class Translation:
    """What became of one line: its n best candidates, the best first; none for an empty line."""

    source: str
    source_tokens: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The best translation; empty for an empty line."""
        return self.candidates[0].text if self.candidates else ""

    def heatmap(self, rank: int = 0, *, layer: int | None = None, head: int | None = None) -> Figure:
        """Where one candidate looked, as a matplotlib figure; the mean over layers or heads that are not chosen.

        Raises:
            CorpusError: there is no such candidate, as of an empty line.
            ConfigurationError: there is no such layer or head, or the translation was not observed.
            MissingExtra: matplotlib is not installed.
        """
        if not 0 <= rank < len(self.candidates):
            raise CorpusError(
                f"there is no candidate {rank} to draw: {self.source!r} has {len(self.candidates)} candidates, "
                "counted from 0"
            )
        candidate = self.candidates[rank]
        return heatmap(one_map(candidate.weights.float(), layer, head), candidate.tokens, self.source_tokens)


@dataclass(frozen=True, eq=False)
class AlignedPair:
    """Where a given translation looks: `weights` [T, S] by token, and the links (source word, target word)."""

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    weights: Tensor
    links: tuple[Link, ...]


class Translator:
    """A trained model with its vocabularies: translates lines, and aligns lines with their translations.

    Made with `load` from the folder of a training run, or from the parts. The model is put into eval mode.

    longest_trained: how many tokens the longest sentences had that the model was trained on, at most; None where that
    is not known.
    """

    def __init__(
        self,
        model: TranslationModel,
        source_vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
        search: SearchSettings,
        *,
        longest_trained: int | None = None,
    ) -> None:
        self.model = model.eval()
        self.source_vocabulary = source_vocabulary
        self.target_vocabulary = target_vocabulary
        self.search = search
        self.longest_trained = longest_trained

    @classmethod
    def load(cls, folder: str | Path, which: Which = "best", device: str | torch.device = "cpu") -> Self:
        """The translator that a training run, or `export`, left in a folder; it computes in single precision.

        Raises:
            CheckpointError: the folder or one of its files is missing, or the weights are truncated or of another
                model than its experiment.yaml says.
            DeviceError: there is no such device.
            ConfigurationError: `which` is neither, or the experiment.yaml was damaged.
            VocabularyError: a vocabulary was damaged.
        """
        run = RunFolder(Path(folder))
        weights = run.weights(which)
        experiment = Experiment.load(run.experiment)
        source, target = run.vocabularies()
        model = build_model(experiment.model, len(source), len(target))
        longest = restore(model, weights).get(LONGEST_SOURCE, experiment.data.max_length)
        return cls(model.to(_device(device)), source, target, experiment.search, longest_trained=longest)

    def translate(
        self,
        lines: Sequence[str],
        *,
        search: SearchSettings | None = None,
        batch_size: int = 64,
        first_line: int = 1,
        observe: bool = True,
    ) -> list[Translation]:
        """Translate lines, in their order; sentences of like length are computed together.

        A line of white space has an empty translation. Signs that the vocabulary does not know, such as emoji, are
        made plain or left out, and words of unknown letters are translated as far as that goes; the `warnings` of the
        line say so, and also where it has more tokens than any that the model was trained on. `first_line` is the
        number of the first line in messages. Without `observe` there are no weights, and a model of many layers and
        heads is faster.

        A source longer than the model allows is refused, not cut: the translation of half a sentence looks like that
        of a whole one.

        Raises:
            CorpusError: a line has more tokens than the model allows.
        """
        read = [readable(line, self.source_vocabulary) for line in _several(lines)]
        sources = self._encode([line.text for line in read], first_line)
        packed, settings = IdSequences.pack(sources), search or self.search
        found: list[list[Hypothesis]] = [[] for _ in lines]
        for rows in _batches_by_length(sources, batch_size):
            source, lengths = (torch.from_numpy(array).to(self._device) for array in packed.pad(np.array(rows)))
            best = beam_search(self.model, source, lengths, settings, observe=observe)
            for row, hypotheses in zip(rows, best, strict=True):
                found[row] = hypotheses
        return [
            self._translation(*line, number)
            for number, line in enumerate(zip(lines, read, sources, found, strict=True), start=first_line)
        ]

    @torch.no_grad()
    def align(
        self,
        source_lines: Sequence[str],
        target_lines: Sequence[str],
        *,
        batch_size: int = 64,
        first_line: int = 1,
        layer: int | None = None,
        head: int | None = None,
    ) -> list[AlignedPair]:
        """Where the model looks when it is made to say the given translations, and the word links that follow.

        The weights of a token are those of the step that says it, and have no row for END. A pair with an empty side
        has no links. Of several layers and heads the weights are those of the chosen ones, counted from 0, and the mean
        over all where none is chosen.

        Raises:
            ConfigurationError: there is no such layer or head.
            CorpusError: the sides differ in length, or a source has more tokens than the model allows.
        """
        if len(source_lines) != len(target_lines):
            raise CorpusError(
                f"the sides do not line up: there are {len(source_lines):,} source lines and {len(target_lines):,} "
                "target lines; line i of one needs to translate line i of the other"
            )
        sources = self._encode(source_lines, first_line)
        targets = self.target_vocabulary.encode_batch(target_lines)
        text = EncodedText(IdSequences.pack(sources), IdSequences.pack(targets))
        weights = [torch.zeros(len(target), len(source)) for source, target in zip(sources, targets, strict=True)]
        for rows in _batches_by_length(sources, batch_size):
            batch = collate(text, np.array(rows)).to(self._device)
            seen = self.model.attention_weights(batch.source, batch.source_lengths, batch.target_input).cpu()
            for row, one in zip(rows, seen, strict=True):
                weights[row] = one_map(one[: len(targets[row]), ..., : len(sources[row])], layer, head).clone()
        return [self._aligned_pair(*pair) for pair in zip(sources, targets, weights, strict=True)]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _encode(self, lines: Sequence[str], first_line: int) -> list[list[int]]:
        """The ids of each line, all short enough for the model; none for a line of white space."""
        sources = [self.source_vocabulary.encode(line) for line in _several(lines)]
        most = self.model.max_source_length
        for number, ids in enumerate(sources, start=first_line):
            if most is not None and len(ids) > most:
                raise CorpusError(
                    f"line {number} has {len(ids)} tokens and this model allows {most}; split it into shorter "
                    "sentences, or train with a larger model.max_source_length"
                )
        return sources

    def _translation(
        self, line: str, read: Readable, ids: list[int], hypotheses: list[Hypothesis], number: int
    ) -> Translation:
        warnings = _warnings(line, read, ids, hypotheses, self.longest_trained)
        return Translation(
            source=line,
            source_tokens=tuple(self.source_vocabulary.tokens(ids)),
            candidates=tuple(map(self._candidate, hypotheses)),
            warnings=tuple(f"line {number}: {warning}" for warning in warnings),
        )

    def _candidate(self, hypothesis: Hypothesis) -> Candidate:
        ids = [*hypothesis.ids, END] if hypothesis.finished else hypothesis.ids
        return Candidate(
            text=self.target_vocabulary.decode(hypothesis.ids),
            tokens=tuple(self.target_vocabulary.tokens(ids)),
            score=hypothesis.score,
            log_probability=hypothesis.log_probability,
            weights=hypothesis.weights,
            self_weights=hypothesis.self_weights,
            finished=hypothesis.finished,
        )

    def _aligned_pair(self, source: list[int], target: list[int], weights: Tensor) -> AlignedPair:
        words = self.source_vocabulary.words(source), self.target_vocabulary.words(target)
        return AlignedPair(
            source_tokens=tuple(self.source_vocabulary.tokens(source)),
            target_tokens=tuple(self.target_vocabulary.tokens(target)),
            weights=weights,
            links=tuple(word_links(weights, *words)),
        )


def _several(lines: Sequence[str]) -> Sequence[str]:
    if isinstance(lines, str):
        raise CorpusError(f"lines is one text, {lines[:40]!r}; it needs to be a list of lines")
    return lines


def _warnings(
    line: str, read: Readable, ids: list[int], hypotheses: list[Hypothesis], longest_trained: int | None
) -> Iterator[str]:
    """What is to be known of a line's translation, a sentence each."""
    if ids and (set(ids) == {UNKNOWN} or set("".join(read.text.split())) == set(read.guessed)):
        yield f"the source vocabulary knows nothing of {line.strip()!r}; the translation is a guess"
    else:
        yield from read.warnings()
    if longest_trained is not None and len(ids) > longest_trained:
        yield (
            f"it has {len(ids):,} tokens, and the model was trained on sentences of {longest_trained:,} at most: the "
            "translation may leave out much of it; give one sentence a line"
        )
    if hypotheses and not hypotheses[0].finished:
        yield f"the translation did not end within {len(hypotheses[0].ids)} tokens and was cut"


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"the device {str(name)!r} cannot be used here: {reason}; cpu always can") from None
    return device


def _batches_by_length(sources: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """The rows of the sentences that have tokens, the longest first, in batches."""
    rows = sorted((row for row, ids in enumerate(sources) if ids), key=lambda row: -len(sources[row]))
    for start in range(0, len(rows), batch_size):
        yield rows[start : start + batch_size]
