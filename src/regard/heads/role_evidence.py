"""Evidence for roles: scores summed over the rows of texts, and the findings that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import ConfigurationError, ShapeError
from .roles import AnyRole, AtOffset


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
