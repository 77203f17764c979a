"""Roles of heads: each defines which pairs count, and the least mean weight on them; the evidence summed over texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigurationError, ShapeError
from ..utils.numbers import whole_number


@dataclass(frozen=True, eq=False, slots=True)
class TokenPairs:
    """Features of the queries (b, m, 1) and keys (b, 1, n) of a tile, on which roles are evaluated.

    Positions and ids are whole numbers; padding has the id -1 and belongs to no pair. follows: the id of the token
    before each key, -1 where there is none. first, delimiter and rarest: bool, of keys.
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
    """A role that counts pairs. Its score is the mean weight on the counted keys, over the rows that have any."""

    @property
    def name(self) -> str:
        """The name of the role."""
        ...

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        ...

    def targets(self, pairs: TokenPairs) -> Tensor:
        """The pairs that count, bool (b, m, n)."""
        ...

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score meets the rule; chance is the score of a head with uniform weights."""
        ...


class ThresholdRule:
    """Base class of the roles of this module: a score of at least `threshold`, and of a multiple of that by chance."""

    threshold: float
    times_chance: ClassVar[float] = 0.0

    def holds(self, score: float, chance: float) -> bool:
        """Whether a score meets the rule; chance is the score of a head with uniform weights."""
        return score >= max(self.threshold, self.times_chance * chance)


@dataclass(frozen=True)
class AtOffset(ThresholdRule):
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
        """The rule in words: what is counted, and the threshold."""
        far = f"the token {abs(self.offset)} {'before' if self.offset < 0 else 'after'}"
        which = {-1: "the token before", 0: "the token itself", 1: "the next token"}.get(self.offset, far)
        best = "" if abs(self.offset) <= 1 else ", the best of the offsets that half of the rows have"
        return f"mean weight on {which}, at least {self.threshold:g}{best}"

    def targets(self, pairs: TokenPairs) -> Tensor:
        """Keys at query position + offset."""
        return pairs.key_positions - pairs.query_positions == self.offset


@dataclass(frozen=True)
class Sink(ThresholdRule):
    """Attends to the first token: an attention sink (Xiao et al. 2024, arXiv 2309.17453)."""

    threshold: float = 0.5
    name = "sink"

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        return f"mean weight of the tokens after the first on the first, at least {self.threshold:g}"

    def targets(self, pairs: TokenPairs) -> Tensor:
        """The first key, for every other query."""
        return pairs.first & (pairs.key_positions != pairs.query_positions)


@dataclass(frozen=True)
class Delimiter(ThresholdRule):
    """Attends to separators and punctuation (Clark et al. 2019, section 3.2)."""

    threshold: float = 0.5
    name = "delimiter"
    times_chance = 2.0

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        return f"mean weight on separators and punctuation, at least {self.threshold:g} and twice the share by chance"

    def targets(self, pairs: TokenPairs) -> Tensor:
        """Separators and punctuation."""
        return pairs.delimiter


@dataclass(frozen=True)
class DuplicateToken(ThresholdRule):
    """Attends to earlier occurrences of the query's own token (Wang et al. 2023, arXiv 2211.00593, section 3)."""

    threshold: float = 0.4
    name = "duplicate token"

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        return f"mean weight on earlier occurrences of the query's own token, at least {self.threshold:g}"

    def targets(self, pairs: TokenPairs) -> Tensor:
        """Earlier keys of the same token."""
        return (pairs.key_ids == pairs.query_ids) & (pairs.key_positions < pairs.query_positions)


@dataclass(frozen=True)
class Induction(ThresholdRule):
    """Attends to the tokens after earlier occurrences of the query's own (Olsson et al. 2022); see `repeat_probe`."""

    threshold: float = 0.4
    name = "induction"

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        return (
            f"mean weight on the tokens that followed earlier occurrences of the query's, at least {self.threshold:g}"
        )

    def targets(self, pairs: TokenPairs) -> Tensor:
        """Keys, up to the query's own, whose predecessor is an earlier occurrence of the query's token."""
        return (pairs.follows == pairs.query_ids) & (pairs.key_positions <= pairs.query_positions)


@dataclass(frozen=True)
class RareWord(ThresholdRule):
    """Attends to the rarest word of the sentence (Voita et al. 2019, arXiv 1905.09418, section 5.3)."""

    threshold: float = 0.3
    name = "rare word"
    times_chance = 3.0

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        return (
            f"mean weight on the rarest word of the sequence, at least {self.threshold:g} and three times the share by "
            "chance"
        )

    def targets(self, pairs: TokenPairs) -> Tensor:
        """The rarest words."""
        return pairs.rarest


@dataclass(frozen=True)
class Diffuse(ThresholdRule):
    """Attends uniformly: the score is the mean of each row's entropy over the logarithm of its number of keys."""

    threshold: float = 0.9
    name = "diffuse"

    @property
    def rule(self) -> str:
        """The rule in words: what is counted, and the threshold."""
        return f"mean entropy over ln(keys), of rows with two keys and more, at least {self.threshold:g}"


AnyRole = Role | Diffuse
"""The roles that count pairs, and the one that is computed from whole rows."""


def text_roles(farthest: int = 8) -> tuple[AnyRole, ...]:
    """The roles to test on natural text: previous and next token, self, other offsets up to `farthest`, and the rest.

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
    """The roles to test on a `repeat_probe`: induction and duplicate token.

    >>> [role.name for role in probe_roles()]
    ['induction', 'duplicate token']
    """
    return (Induction(), DuplicateToken())


@dataclass(frozen=True)
class Finding:
    """One role of one head: the role's name and rule, its score, and n, the number of rows counted.

    chance: the score of a head with uniform weights. holds: whether the rule is met.

    >>> print(Finding("previous token", 0.9712, 511, "mean weight on the token before, at least 0.5", 0.01, True))
    previous token 0.97 (n = 511): mean weight on the token before, at least 0.5
    """

    name: str
    score: float
    n: int
    rule: str
    chance: float
    holds: bool

    def __str__(self) -> str:
        chance = f", by chance {self.chance:.2f}" if "chance" in self.rule else ""
        return f"{self.name} {self.score:.2f} (n = {self.n:,}{chance}): {self.rule}"

    def to_dict(self) -> dict[str, str | float | int]:
        """The name, score, n and rule as a dict, for JSON."""
        return {"name": self.name, "score": self.score, "n": self.n, "rule": self.rule}


@dataclass(frozen=True, eq=False)
class RoleEvidence:
    """Sums over rows for each role and head, (roles, heads): scores, the number of rows, scores by chance.

    Evidence of several texts adds up: `first + second`, or `RoleEvidence.total(parts)`. `with_roles` adds other roles
    of the same heads, for instance from a probe.
    """

    roles: tuple[AnyRole, ...]
    scores: Tensor
    rows: Tensor
    chances: Tensor
    queries: int
    """The number of rows in all."""

    def __add__(self, other: RoleEvidence) -> RoleEvidence:
        if not isinstance(other, RoleEvidence):
            return NotImplemented
        if self.roles != other.roles or self.scores.shape != other.scores.shape:
            raise ShapeError(
                f"evidence on {len(self.roles)} roles of {self.scores.shape[1]} heads, and on {len(other.roles)} roles "
                f"of {other.scores.shape[1]} heads: only evidence of the same roles and heads adds up; for other roles "
                "of the same heads use with_roles"
            )
        return RoleEvidence(
            self.roles,
            self.scores + other.scores,
            self.rows + other.rows,
            self.chances + other.chances,
            self.queries + other.queries,
        )

    @staticmethod
    def total(parts: Iterable[RoleEvidence]) -> RoleEvidence:
        """The sum of several parts.

        Raises:
            ConfigurationError: no parts.
        """
        total = None
        for part in parts:
            total = part if total is None else total + part
        if total is None:
            raise ConfigurationError("there is no evidence to add up: give at least one part")
        return total

    def findings(self) -> list[list[Finding]]:
        """All findings for each head: those whose rule is met first, sorted by score.

        Of the offsets beyond one only the best is listed, among those that at least half of the rows have. A role that
        no row counts, such as duplicate token where no token repeats, is not listed.
        """
        return [self._head_findings(head) for head in range(self.scores.shape[1])]

    def holding(self) -> list[list[Finding]]:
        """The findings for each head whose rule is met, the largest score first: none, one or several."""
        return [[finding for finding in found if finding.holds] for found in self.findings()]

    def _head_findings(self, head: int) -> list[Finding]:
        found, far = [], []
        for number, role in enumerate(self.roles):
            n = int(self.rows[number, head])
            if n == 0:
                continue
            score, chance = float(self.scores[number, head]) / n, float(self.chances[number, head]) / n
            finding = Finding(role.name, score, n, role.rule, chance, role.holds(score, chance))
            if not isinstance(role, AtOffset) or abs(role.offset) <= 1:
                found.append(finding)
            elif 2 * n >= self.queries and not math.isnan(score):
                far.append(finding)
        if far:
            found.append(max(far, key=lambda finding: finding.score))
        return sorted(found, key=lambda finding: (not finding.holds, -finding.score))

    def with_roles(self, other: RoleEvidence) -> RoleEvidence:
        """The evidence of both for the same heads; where both have a role, that of `other`.

        Raises:
            ShapeError: `other` has another number of heads.
        """
        if self.scores.shape[1] != other.scores.shape[1]:
            raise ShapeError(
                f"evidence of {self.scores.shape[1]} heads and of {other.scores.shape[1]}: both need the same heads"
            )
        kept = [number for number, role in enumerate(self.roles) if role not in other.roles]
        scores, rows, chances = (
            torch.cat([own[kept], others])
            for own, others in (
                (self.scores, other.scores),
                (self.rows, other.rows),
                (self.chances, other.chances),
            )
        )
        roles = (*(self.roles[number] for number in kept), *other.roles)
        return replace(self, roles=roles, scores=scores, rows=rows, chances=chances)


def report(findings: Mapping[str, Sequence[Sequence[Finding]]]) -> str:
    """A text with one line for each finding of each head of each module.

    >>> finding = Finding("self", 0.8, 40, "mean weight on the token itself, at least 0.5", 0.1, True)
    >>> print(report({"layer.0": [[], [finding]]}))
    layer.0 head 1: self 0.80 (n = 40): mean weight on the token itself, at least 0.5
    """
    return "\n".join(
        f"{name} head {head}: {finding}"
        for name, heads in findings.items()
        for head, found in enumerate(heads)
        for finding in found
    )


Part = TypeVar("Part")


def checked_same_heads(parts: Iterable[Part], shape: Callable[[Part], tuple[int, ...]]) -> list[Part]:
    """The parts as a list, after a check that there is one, and that all have the same shape of heads.

    Raises:
        ConfigurationError: no parts.
        ShapeError: the shapes differ.

    >>> checked_same_heads([3, 4], lambda part: (6, 12))
    [3, 4]
    """
    parts = list(parts)
    if not parts:
        raise ConfigurationError("there is no evidence to add up: give at least one part")
    shapes = {shape(part) for part in parts}
    if len(shapes) > 1:
        raise ShapeError(f"evidence of heads of the shapes {sorted(shapes)} does not add up: they need to be one")
    return parts
