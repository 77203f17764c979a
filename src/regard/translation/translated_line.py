"""The translation of one line: its candidates, best first, with the attention weights of each.

Shapes: S source tokens, T target tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from regard.errors import CorpusError
from regard.plots import heatmap
from regard.translation.alignment_choice import one_map
from regard.translation.placeholders import PlacedLine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Candidate:
    """One of the n best translations of a line: its text, and a row of `weights` [T, ..., S] for each of `tokens`.

    `weights` is [T, S], or [T, layers, heads, S] of a model that has several maps; `self_weights` [T, layers, heads, T]
    is where each step looked at the words so far, BEGIN the first. What was not observed, or is not there, has no
    layers or no heads. The last token is "</s>" where the translation is `finished`; one cut at the longest length has
    none.
    """

    text: str
    tokens: tuple[str, ...]
    score: float
    log_probability: float
    weights: Tensor
    self_weights: Tensor
    finished: bool

    def with_parts(self, placed: PlacedLine) -> Candidate:
        """The same with the parts of its line in place of their signs."""
        if not placed.parts and not placed.capitals:
            return self
        return replace(self, text=placed.put_back(self.text), tokens=placed.named(self.tokens))


@dataclass(frozen=True, eq=False)
class Translation:
    """Translation of one line: its n best candidates, best first; none for an empty line.

    kept: what of a line without candidates is its own translation, as a line of emoji. trust: the quality that the
    model's own numbers predict, chrF / 100 in 0..1, where the model was calibrated (see `Trust`); None elsewhere.
    unknown_words: those that are copied because the model does not know them, each once; of a model that copies none,
    none.
    """

    source: str
    source_tokens: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    warnings: tuple[str, ...] = ()
    kept: str = ""
    trust: float | None = None
    unknown_words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The best translation; empty for an empty line."""
        return self.candidates[0].text if self.candidates else self.kept

    def heatmap(self, rank: int = 0, *, layer: int | None = None, head: int | None = None) -> Figure:
        """Heat map of a candidate's attention weights, the mean over layers or heads that are not chosen.

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


def join_candidates(parts: Sequence[Sequence[Candidate]], n_best: int) -> tuple[Candidate, ...]:
    """The n best combinations of one candidate for each part of a line, by the sum of their scores."""
    best: list[tuple[Candidate, ...]] = [()]
    for candidates in parts:
        longer = [(*chosen, one) for chosen in best for one in candidates]
        best = heapq.nlargest(n_best, longer, key=lambda chosen: sum(one.score for one in chosen))
    return tuple(map(_joined_candidate, best))


def _joined_candidate(parts: Sequence[Candidate]) -> Candidate:
    """Concatenate one candidate of each part, with the END of the last part only."""
    inner = [len(part.tokens) - part.finished for part in parts[:-1]] + [len(parts[-1].tokens)]
    return Candidate(
        text=" ".join(part.text for part in parts),
        tokens=tuple(token for part, rows in zip(parts, inner, strict=True) for token in part.tokens[:rows]),
        score=sum(part.score for part in parts),
        log_probability=sum(part.log_probability for part in parts),
        weights=_block_diagonal([part.weights[:rows] for part, rows in zip(parts, inner, strict=True)]),
        self_weights=_block_diagonal(
            [part.self_weights[:rows, ..., :rows] for part, rows in zip(parts, inner, strict=True)]
        ),
        finished=all(part.finished for part in parts),
    )


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """The weights [T, ..., S] of several parts as one block-diagonal tensor."""
    rows, columns = sum(len(block) for block in blocks), sum(block.shape[-1] for block in blocks)
    whole = blocks[0].new_zeros(rows, *blocks[0].shape[1:-1], columns)
    row = column = 0
    for block in blocks:
        whole[row : row + len(block), ..., column : column + block.shape[-1]] = block
        row, column = row + len(block), column + block.shape[-1]
    return whole
