"""Where what is kept of a line goes in its translation: tags around the words that theirs became, signs behind them.

Words are what white space separates. The translation is cut into atoms: its words, and the punctuation at their edges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.heads.word_alignment import diagonal_links
from regard.translation.kept_text import CLOSING_MARKS, OPENING_MARKS, KeptPart

_EDGES = re.compile(rf"([{re.escape(OPENING_MARKS)}]*)(.*?)([{re.escape(CLOSING_MARKS)}]*)", re.DOTALL)


def put_back(translation: str, parts: Sequence[KeptPart], weights: Tensor) -> str:
    """Put the parts of a source into its translation, by the attention weights between words, [T', S'].

    With m_t the share of its attention that word t pays to the words in an element, a pair of tags, the element is the
    run of words with the greatest Σ (m_t - 1/2), one word at least, inside the element that is around it and beside the
    others in there: tags that were well-formed are again. Other parts stand behind the word that looks most at the word
    before them, or before it, where they touch the next one; at the beginning and the end of the line, or of an
    element, they stay there. Punctuation is outside of an element, and behind a part, where it was.

    >>> tags = KeptPart("<b>", 1, (False, True), 0), KeptPart("</b>", 2, (True, False), 0)
    >>> put_back("la voiture rouge", tags, torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.1, 0.8], [0.0, 0.9, 0.1]]))
    'la voiture <b>rouge</b>'
    """
    if not parts:
        return translation
    atoms = _atoms(translation)
    shares = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    top = _Node(0, weights.shape[1], start=0, end=len(atoms), children=_nodes(parts, weights.shape[1]))
    _Placement(atoms, shares).place(top)
    return _spelled(list(_items(top, atoms)))


def diagonal_weights(source_words: int, target_words: int) -> Tensor:
    """Weights [T', S'] of links by position alone."""
    weights = torch.zeros(target_words, source_words)
    for source, target in diagonal_links(source_words, target_words):
        weights[target, source] = 1
    return weights


class _Atom(NamedTuple):
    """A word without the punctuation at its edges, or such punctuation: whether it touches what is beside it."""

    text: str
    word: int
    kind: str
    glued: tuple[bool, bool]


def _atoms(text: str) -> list[_Atom]:
    atoms: list[_Atom] = []
    for number, word in enumerate(text.split()):
        found = _EDGES.fullmatch(word)
        groups = ("", word, "") if found is None else found.groups()
        pieces = [(piece, kind) for piece, kind in zip(groups, ("opening", "word", "closing"), strict=True) if piece]
        for place, (piece, kind) in enumerate(pieces):
            atoms.append(
                _Atom(
                    piece,
                    number,
                    kind,
                    (kind == "closing" and place > 0, kind == "opening" and place < len(pieces) - 1),
                )
            )
    return atoms


@dataclass
class _Node:
    """An element, or one part: it was around the words first <= word < last, and goes around atoms start to end."""

    first: int
    last: int
    opening: KeptPart | None = None
    closing: KeptPart | None = None
    point: KeptPart | None = None
    start: int = 0
    end: int = 0
    children: list[_Node] = field(default_factory=list)


def _nodes(parts: Sequence[KeptPart], words: int) -> list[_Node]:
    """The parts as a tree; tags of an element that begins before this text, or ends behind it, have one side open."""
    nodes: list[_Node] = []
    around: list[tuple[_Node, list[_Node]]] = []
    for part in parts:
        if part.element is None:
            nodes.append(_Node(part.word, part.word, point=part))
        elif not part.closes:
            node = _Node(part.word, words, opening=part)
            around.append((node, nodes))
            nodes.append(node)
            nodes = node.children
        elif around:
            node, nodes = around.pop()
            node.last, node.closing = max(part.word, node.first), part
        else:
            nodes = [_Node(0, part.word, closing=part, children=nodes)]
    return around[0][1] if around else nodes


@dataclass
class _Placement:
    """Finds the atoms of each node."""

    atoms: Sequence[_Atom]
    shares: Tensor
    """[T', S'], of the attention of each word of the translation."""

    def place(self, parent: _Node) -> None:
        """Place what is in a node that is placed."""
        elements = [node for node in parent.children if node.point is None]
        taken: list[_Node] = []
        for node in sorted(elements, key=lambda node: (not self._is_bound(node, parent), -self._best(node, parent))):
            self._place_element(node, parent, taken)
            taken.append(node)
        for node in elements:
            self.place(node)
        for node in parent.children:
            if node.point is not None:
                node.start = node.end = self._beside(node.point, node.point.word, node.point.opens, parent, taken)

    @staticmethod
    def _is_bound(node: _Node, parent: _Node) -> bool:
        """Whether an edge of the node is that of its parent, whatever the weights say."""
        whole = node.first <= parent.first and node.last >= parent.last
        return whole or node.opening is None or node.closing is None

    def _gains(self, node: _Node) -> list[float]:
        """m_t - 1/2 of each atom, by its word."""
        shares = self.shares[:, node.first : node.last].sum(1).tolist()
        return [shares[atom.word] - 0.5 for atom in self.atoms]

    def _best(self, node: _Node, parent: _Node) -> float:
        return _greatest_run(self._gains(node), parent.start, parent.end)[0]

    def _place_element(self, node: _Node, parent: _Node, taken: Sequence[_Node]) -> None:
        free = _free_runs(parent, taken)
        if node.first >= node.last or not free:  # of no words, or without room for one
            node.start = node.end = self._beside(node.closing or node.opening, node.first, True, parent, taken)
            return
        gains = self._gains(node)
        if self._is_bound(node, parent):
            low, high = free[-1] if node.opening is not None else free[0]
            if node.first <= parent.first and node.last >= parent.last:
                node.start, node.end = low, high
            elif node.closing is None:
                node.start, node.end = max(range(low, high), key=lambda start: sum(gains[start:high])), high
            else:
                node.start, node.end = low, max(range(low + 1, high + 1), key=lambda end: sum(gains[low:end]))
        else:
            _, node.start, node.end = max(_greatest_run(gains, *run) for run in free)
        self._trim(node)

    def _trim(self, node: _Node) -> None:
        """Leave punctuation at the edges outside where it was."""
        if node.closing is not None and not node.closing.beside_marks[0]:
            node.end = self._before_marks(node.end, node.start + 1)
        if node.opening is not None and not node.opening.beside_marks[1]:
            while node.start < node.end - 1 and self.atoms[node.start].kind == "opening":
                node.start += 1

    def _before_marks(self, place: int, lowest: int) -> int:
        while place > lowest and self.atoms[place - 1].kind == "closing":
            place -= 1
        return place

    def _beside(self, part: KeptPart | None, word: int, before: bool, parent: _Node, taken: Sequence[_Node]) -> int:
        """The place of a part without words, which stood before a word: behind the last one if not `before`."""
        place = self._between(word, parent, taken, before=before)
        if part is None or part.beside_marks[0] or part.ends or (before and place < parent.end):
            return place
        return self._before_marks(place, max([parent.start, *(one.end for one in taken if one.end <= place)]))

    def _between(self, word: int, parent: _Node, taken: Sequence[_Node], *, before: bool) -> int:
        """The place of what stood before this word of the source, outside of the elements that are there."""
        if word <= parent.first:
            return parent.start
        if word >= parent.last:
            return parent.end
        inside = range(parent.start, parent.end)
        if not inside:
            return parent.start
        looked = self.shares[:, word if before else word - 1].tolist()
        best = max(inside, key=lambda place: looked[self.atoms[place].word])
        same = [place for place in inside if self.atoms[place].word == self.atoms[best].word]
        place = same[0] if before else same[-1] + 1
        for other in taken:
            if other.start < place < other.end:
                return other.start if before else other.end
        return place


def _free_runs(parent: _Node, taken: Sequence[_Node]) -> list[tuple[int, int]]:
    """The runs of atoms in a node that no element has taken."""
    edges = sorted((node.start, node.end) for node in taken if node.start < node.end)
    starts, ends = [parent.start, *(end for _, end in edges)], [*(start for start, _ in edges), parent.end]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _greatest_run(gains: Sequence[float], low: int, high: int) -> tuple[float, int, int]:
    """The greatest sum of a run of at least one between two places, and the run.

    >>> _greatest_run([-1.0, 2.0, -0.5, 1.0, -3.0], 0, 5)
    (2.5, 1, 4)
    """
    best = (-float("inf"), low, low)
    total, start = 0.0, low
    for place in range(low, high):
        if total < 0:
            total, start = 0.0, place
        total += gains[place]
        best = max(best, (total, start, place + 1), key=lambda run: run[0])
    return best


def _items(node: _Node, atoms: Sequence[_Atom]) -> Iterator[_Atom | KeptPart]:
    """The atoms and parts of a node, in their order."""
    yield from filter(None, [node.opening])
    at = node.start
    for child in sorted(node.children, key=lambda child: (child.start, child.end)):
        yield from atoms[at : child.start]
        yield from filter(None, [child.point])
        if child.point is None:
            yield from _items(child, atoms)
        at = child.end
    yield from atoms[at : node.end]
    yield from filter(None, [node.closing])


def _spelled(items: Sequence[_Atom | KeptPart]) -> str:
    """Atoms and parts with spaces between them, but where one touches the other; none right inside of an element."""
    text, waiting, before = "", "", None  # what waits are tags behind the space that may be here
    for item in items:
        if isinstance(item, KeptPart) and item.element is not None:
            waiting, text = (waiting, text + item.text) if item.closes and not waiting else (waiting + item.text, text)
            continue
        spaced = before is not None and not (before.glued[1] or item.glued[0])
        text += (" " if spaced else "") + waiting + item.text
        before, waiting = item, ""
    return text + waiting
