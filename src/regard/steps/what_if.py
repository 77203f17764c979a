"""What-ifs: one head's attention with another score or scale, pairs added or removed, or one score changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ..biases import tensor as tensor_bias
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..errors import ConfigurationError, nearest
from ..masks import where
from ..scores import Dot, ScaledDot, Score

PLAIN_SCORES: dict[str, type[Dot] | type[ScaledDot]] = {"dot": Dot, "scaled_dot": ScaledDot}
"""Scores without parameters, which any queries and keys of equal dims can take."""

Pair = tuple[int, int]
ChangeKind = Literal["score", "scale", "flip", "add", "drop"]
CHANGES: tuple[ChangeKind, ...] = ("score", "scale", "flip", "add")
"""The kinds of changes that softmax attention takes, where keys are masked for one query."""


@dataclass(frozen=True)
class WhatIf:
    """A change to attention before its softmax; pairs are (query, key), counted from 0, and the same in all heads.

    score: another score in place of the one that there is, over the projected queries and keys: "dot", "scaled_dot", or
    a module of `regard.scores`. scale: what dot products are multiplied by; 1 takes out the 1/√d. flip: pairs whose
    mask is reversed. add: what is added to the scores of single pairs. drop: keys that are masked for all queries,
    which linear attention takes as well.

    >>> import torch, regard
    >>> from regard.steps import WhatIf, walkthrough
    >>> query = key = value = torch.eye(2)
    >>> before = walkthrough(query, key, value)
    >>> after = walkthrough(query, key, value, what_if=WhatIf(flip=[(0, 1)])).compared(before)
    >>> print(after["context"])
    Context    c_i = Σ_j a_ij v_j
              1       2
      q1     1*      0*
      q2  0.330   0.670
      by hand: 1 · 1 + 0 · 0 = 1
    """

    score: str | Score | None = None
    scale: float | None = None
    flip: Sequence[Pair] = ()
    add: Mapping[Pair, float] = field(default_factory=dict)
    drop: Sequence[int] = ()

    @classmethod
    def parse(cls, changes: Sequence[str], row: int) -> WhatIf:
        """Read changes NAME=VALUE to the attention of one query: score=NAME, scale=NUMBER, flip=KEY, add=KEY:NUMBER,
        and for all queries drop=KEY.

        Keys are counted from 1.

        Raises:
            ConfigurationError: a change that is none.

        >>> WhatIf.parse(["scale=1", "flip=2"], row=0)
        WhatIf(score=None, scale=1.0, flip=[(0, 1)], add={}, drop=[])
        """
        score, scale, flip, add, drop = None, None, [], {}, []
        for change in changes:
            name, _, value = change.partition("=")
            try:
                match name:
                    case "score":
                        score = value
                    case "scale":
                        scale = _finite(value)
                    case "flip":
                        flip.append((row, int(value) - 1))
                    case "drop":
                        drop.append(int(value) - 1)
                    case "add":
                        key, _, number = value.partition(":")
                        add[row, int(key) - 1] = _finite(number)
                    case _:
                        raise ValueError
            except ValueError:
                raise ConfigurationError(
                    f"--what-if {change!r} is no change; it needs score=NAME, scale=NUMBER, flip=KEY, "
                    "drop=KEY or add=KEY:NUMBER, such as add=2:1.5"
                ) from None
        return cls(score=score, scale=scale, flip=flip, add=add, drop=drop)

    @property
    def kinds(self) -> tuple[ChangeKind, ...]:
        """Which kinds of changes it makes.

        >>> WhatIf(scale=1.0, flip=[(0, 1)]).kinds
        ('scale', 'flip')
        """
        made = (self.score is not None, self.scale is not None, bool(self.flip), bool(self.add), bool(self.drop))
        return tuple(kind for kind, is_made in zip(get_args(ChangeKind), made, strict=True) if is_made)

    def within(self, queries: range, keys: range) -> WhatIf:
        """The change to a block of queries and keys, whose pairs are counted from the beginning of the block."""

        def inside(pair: Pair) -> bool:
            return pair[0] in queries and pair[1] in keys

        def moved(pair: Pair) -> Pair:
            return pair[0] - queries.start, pair[1] - keys.start

        flip = [moved(pair) for pair in self.flip if inside(pair)]
        return replace(self, flip=flip, add={moved(pair): number for pair, number in self.add.items() if inside(pair)})

    def apply(self, problem: Problem) -> Problem:
        """The changed problem.

        Raises:
            ConfigurationError: an unknown score, a scale of a score that has none, a pair that is not there.
        """
        for pair in (*self.flip, *self.add, *((0, key) for key in self.drop)):
            if not (0 <= pair[0] < problem.queries and 0 <= pair[1] < problem.keys):
                raise ConfigurationError(
                    f"a what-if names a query or key that is not there: there are {problem.queries} queries and "
                    f"{problem.keys} keys"
                )
        if self.score is not None:
            pairs = _score(self.score).pairs(problem.pairs.query, problem.pairs.key)
            problem = replace(problem, pairs=pairs)
        if self.scale is not None:
            if not isinstance(problem.pairs, DotPairs):
                raise ConfigurationError(
                    "scale multiplies a dot product, and this score is additive, without a scale: leave scale out"
                )
            problem = replace(problem, pairs=replace(problem.pairs, scale=float(self.scale)))
        if self.flip:
            problem = replace(problem, mask=where(keep=self._flipped(problem)))
        if self.drop:
            kept = where(keep=self._kept_keys(problem))
            problem = replace(problem, mask=kept if problem.mask is None else problem.mask & kept)
        if self.add:
            added = torch.zeros(problem.queries, problem.keys, device=problem.value.device)
            for (query, key), number in self.add.items():
                added[query, key] += number
            bias = tensor_bias(added)
            problem = replace(problem, bias=bias if problem.bias is None else problem.bias + bias)
        return problem

    def _kept_keys(self, problem: Problem) -> Tensor:
        """Which keys are left to all queries, (1, ..., 1, N)."""
        keep = torch.ones(
            *(1 for _ in problem.weights_shape[1:]), problem.keys, dtype=torch.bool, device=problem.value.device
        )
        keep[..., list(self.drop)] = False
        return keep

    def _flipped(self, problem: Problem) -> Tensor:
        """The mask as a tensor, with the chosen pairs reversed."""
        keep, shape = problem.keep(), (problem.queries, problem.keys)
        if keep is None:
            keep = torch.ones(shape, dtype=torch.bool, device=problem.value.device)
        keep = keep.expand(*keep.shape[:-2], *shape).clone()
        for query, key in self.flip:
            keep[..., query, key].logical_not_()
        return keep


def _finite(text: str) -> float:
    """The finite number that a text is; ValueError for any other."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _score(score: str | Score) -> Score:
    if isinstance(score, Score):
        return score
    if score in PLAIN_SCORES:
        return PLAIN_SCORES[score]()
    if score in ("general", "additive", "concat", "location"):
        raise ConfigurationError(
            f"the score {score!r} has weights, and this attention was not trained with them: take a model that was, or "
            f"a module of regard.scores. Without weights there are {', '.join(map(repr, PLAIN_SCORES))}"
        )
    raise ConfigurationError(f"score is {score!r}; {nearest(score, PLAIN_SCORES)}")
