"""Roles that a head can have in a text: each says which pairs it counts, and how much weight on them is enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..utils.numbers import whole_number


@dataclass(frozen=True, eq=False, slots=True)
class Pairs:
    """The queries and keys of a tile, as roles see them: those of queries (b, m, 1), those of keys (b, 1, n).

    Positions and ids are whole numbers; a token that takes no part has the id -1, and is in none of a role's pairs.
    follows: the id of the token before each key, -1 where there is none.
    """

    query_positions: Tensor
    key_positions: Tensor
    query_ids: Tensor
    key_ids: Tensor
    follows: Tensor
    first: Tensor
    delimiter: Tensor
    rarest: Tensor


class Role(Protocol):
    """What a head may do: its score is the mean, over the rows that have such a key, of the weight on such keys."""

    @property
    def name(self) -> str:
        """What the role is called."""
        ...

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        ...

    def targets(self, pairs: Pairs) -> Tensor:
        """Which pairs are counted, bool (b, m, n)."""
        ...

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough; chance is the score of a head that attends to all keys alike."""
        ...


@dataclass(frozen=True)
class AtOffset:
    """Attends to the token at a fixed offset: -1 the one before, 1 the next, 0 itself, any other k.

    >>> AtOffset(-1).rule, AtOffset(3).name
    ('mean weight on the token before, at least 0.5', 'offset +3')
    """

    offset: int
    threshold: float = 0.5

    @property
    def name(self) -> str:
        """Previous token, next token, self, or the offset."""
        return {-1: "previous token", 0: "self", 1: "next token"}.get(self.offset, f"offset {self.offset:+d}")

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        far = f"the token {abs(self.offset)} {'before' if self.offset < 0 else 'after'}"
        which = {-1: "the token before", 0: "the token itself", 1: "the next token"}.get(self.offset, far)
        best = "" if abs(self.offset) <= 1 else ", the best of the offsets that half of the rows have"
        return f"mean weight on {which}, at least {self.threshold:g}{best}"

    def targets(self, pairs: Pairs) -> Tensor:
        """Keys at query position + offset."""
        return pairs.key_positions - pairs.query_positions == self.offset

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= self.threshold


@dataclass(frozen=True)
class Sink:
    """Attends to the first token, which often has weight that has nowhere else to go (Xiao et al. 2024)."""

    threshold: float = 0.5
    name = "sink"

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        return f"mean weight of the tokens after the first on the first, at least {self.threshold:g}"

    def targets(self, pairs: Pairs) -> Tensor:
        """The first key, for every other query."""
        return pairs.first & (pairs.key_positions != pairs.query_positions)

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= self.threshold


@dataclass(frozen=True)
class Delimiter:
    """Attends to separators and punctuation (Clark et al. 2019, section 3.2)."""

    threshold: float = 0.5
    name = "delimiter"

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        return f"mean weight on separators and punctuation, at least {self.threshold:g} and twice the share by chance"

    def targets(self, pairs: Pairs) -> Tensor:
        """Separators and punctuation."""
        return pairs.delimiter

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= max(self.threshold, 2 * chance)


@dataclass(frozen=True)
class DuplicateToken:
    """Attends to where its own token has been before (Wang et al. 2023, arXiv 2211.00593, section 3)."""

    threshold: float = 0.4
    name = "duplicate token"

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        return f"mean weight on earlier occurrences of the query's own token, at least {self.threshold:g}"

    def targets(self, pairs: Pairs) -> Tensor:
        """Earlier keys of the same token."""
        return (pairs.key_ids == pairs.query_ids) & (pairs.key_positions < pairs.query_positions)

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= self.threshold


@dataclass(frozen=True)
class Induction:
    """Attends to what came after its token the last time; to be seen on a `repeat_probe` (Olsson et al. 2022)."""

    threshold: float = 0.4
    name = "induction"

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        return (
            f"mean weight on the tokens that followed earlier occurrences of the query's, at least {self.threshold:g}"
        )

    def targets(self, pairs: Pairs) -> Tensor:
        """Keys, up to the query's own, whose predecessor is an earlier occurrence of the query's token."""
        return (pairs.follows == pairs.query_ids) & (pairs.key_positions <= pairs.query_positions)

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= self.threshold


@dataclass(frozen=True)
class RareWord:
    """Attends to the rarest word of the sentence (Voita et al. 2019, arXiv 1905.09418, section 5.3)."""

    threshold: float = 0.3
    name = "rare word"

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        return (
            f"mean weight on the rarest word of the sequence, at least {self.threshold:g} and three times the share by "
            "chance"
        )

    def targets(self, pairs: Pairs) -> Tensor:
        """The rarest words."""
        return pairs.rarest

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= max(self.threshold, 3 * chance)


@dataclass(frozen=True)
class Diffuse:
    """Attends to all keys about alike: its score is each row's entropy over the logarithm of how many keys it has."""

    threshold: float = 0.9
    name = "diffuse"

    @property
    def rule(self) -> str:
        """What is counted, and how much is enough."""
        return f"mean entropy over ln(keys), of rows with two keys and more, at least {self.threshold:g}"

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score is enough."""
        return score >= self.threshold


AnyRole = Role | Diffuse
"""Roles that count pairs, and the one that looks at the whole row."""


def text_roles(farthest: int = 8) -> tuple[AnyRole, ...]:
    """The roles that a text shows: previous and next token, self, other offsets up to `farthest`, and the rest.

    Raises:
        ConfigurationError: `farthest` is no whole number of at least 1.

    >>> [role.name for role in text_roles(2)][:5]
    ['previous token', 'next token', 'self', 'offset -2', 'offset +2']
    """
    farthest = whole_number("farthest", farthest)
    others = [AtOffset(sign * far) for far in range(2, farthest + 1) for sign in (-1, 1)]
    marks = Sink(), Delimiter(), DuplicateToken(), RareWord(), Diffuse()
    return (AtOffset(-1), AtOffset(1), AtOffset(0), *others, *marks)


def probe_roles() -> tuple[AnyRole, ...]:
    """The roles that a `repeat_probe` shows: induction and duplicate token.

    >>> [role.name for role in probe_roles()]
    ['induction', 'duplicate token']
    """
    return (Induction(), DuplicateToken())
