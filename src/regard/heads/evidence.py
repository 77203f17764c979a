"""Evidence for roles: sums over the rows of a text, which add up over a corpus, and what they amount to.

Evidence of many sentences that is to be added up.
"""

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
    """What a head was found to do: the role's name and rule, its score, and how many rows were counted.

    chance is the score of a head that attends to all keys of each row alike; holds says whether the rule is met.

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
        """Name, score, n and rule, for JSON."""
        return {"name": self.name, "score": self.score, "n": self.n, "rule": self.rule}


@dataclass(frozen=True, eq=False)
class Evidence:
    """Sums over rows, for each role and head: of scores, of rows counted, of scores by chance; all (roles, heads).

    Evidence of other sentences is added to it, `first + second`, or all at once by `Evidence.total(parts)`; that of
    other roles of the same heads, as from a probe, is put beside it.
    """

    roles: tuple[AnyRole, ...]
    scores: Tensor
    rows: Tensor
    chances: Tensor
    queries: int
    """How many rows there were."""

    def __add__(self, other: Evidence) -> Evidence:
        if not isinstance(other, Evidence):
            return NotImplemented
        if self.roles != other.roles or self.scores.shape != other.scores.shape:
            raise ShapeError(
                f"evidence on {len(self.roles)} roles of {self.scores.shape[1]} heads, and on {len(other.roles)} roles "
                f"of {other.scores.shape[1]} heads: only evidence of the same roles and heads adds up; other roles of "
                "the same heads go beside(it)"
            )
        return Evidence(
            self.roles,
            self.scores + other.scores,
            self.rows + other.rows,
            self.chances + other.chances,
            self.queries + other.queries,
        )

    @staticmethod
    def total(parts: Iterable[Evidence]) -> Evidence:
        """All evidence together.

        Raises:
            ConfigurationError: there is none.
        """
        whole = None
        for part in parts:
            whole = part if whole is None else whole + part
        if whole is None:
            raise ConfigurationError("there is no evidence to add up: give at least one part")
        return whole

    def findings(self) -> list[list[Finding]]:
        """For each head what was measured, those that hold first, and of these the largest score.

        Of the offsets beyond one only the best is there, among those that at least half of the rows have. A role that
        no row could show, since no token came twice or no counts were given, is not there.
        """
        return [self._of_head(head) for head in range(self.scores.shape[1])]

    def holding(self) -> list[list[Finding]]:
        """For each head the roles whose rule is met, the largest score first; it may be none, or several."""
        return [[finding for finding in found if finding.holds] for found in self.findings()]

    def _of_head(self, head: int) -> list[Finding]:
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

    def beside(self, other: Evidence) -> Evidence:
        """The same heads' evidence on other roles too; of a role that both have, that of `other`.

        Raises:
            ShapeError: it is of another number of heads.
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
    """The roles of every head of every module, a line each; heads without one are left out.

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


def of_the_same_heads(parts: Iterable[Part], shape: Callable[[Part], tuple[int, ...]]) -> list[Part]:
    """The parts, one at least, all of heads of one shape.

    Raises:
        ConfigurationError: there is none.
        ShapeError: they are not of the same heads.

    >>> of_the_same_heads([3, 4], lambda part: (6, 12))
    [3, 4]
    """
    parts = list(parts)
    if not parts:
        raise ConfigurationError("there is no evidence to add up: give at least one part")
    shapes = {shape(part) for part in parts}
    if len(shapes) > 1:
        raise ShapeError(f"evidence of heads of the shapes {sorted(shapes)} does not add up: they need to be one")
    return parts
