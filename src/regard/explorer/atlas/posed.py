"""What a record keeps of a call, posed as problems again, in no memory but the file's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ...biases import Bias
from ...masks import Mask
from ...pairs import AdditivePairs, DotPairs
from ...problem import Problem
from .forms import read_bias, read_mask
from .one import Axes, BiasOf, MaskOf, OneHead, OneSequence


@dataclass(frozen=True, eq=False)
class Posed:
    """The problems of one sequence of a record that has queries and keys."""

    record: Mapping[str, Any]
    arrays: Mapping[str, Tensor]
    sequence: int

    def head(self, head: int) -> Problem:
        """One head as a problem of its own, over all rows and columns."""
        group = self.record["heads"] // self.record["key_heads"]
        return self._problem(
            self._array("query")[self.sequence, head],
            self._array("key")[self.sequence, head // group],
            OneHead(self._axes, self.sequence, head),
        )

    def whole(self) -> Problem:
        """All heads together."""
        return self._problem(
            self._axes.of(self._array("query"), self.sequence),
            self._axes.of(self._array("key"), self.sequence),
            OneSequence(self._axes, self.sequence),
        )

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the rows, (heads, M)."""
        return self._array("lse")[self.sequence]

    def of_sequence(self, name: str) -> Tensor:
        """What the sequence has of positions, which all may have in common."""
        held = self._array(name)
        return held[self.sequence if len(held) > 1 else 0]

    def _problem(self, query: Tensor, key: Tensor, part: OneHead | OneSequence) -> Problem:
        mask, bias = self._rules
        additive = self.record["score"] == "additive"
        placed = "query_positions" in self.record["arrays"]
        return Problem(
            pairs=AdditivePairs(query, key, self._array("weight"))
            if additive
            else DotPairs(query, key, self.record["scale"]),
            value=key[..., :0],
            mask=None if mask is None else MaskOf(mask, part),
            bias=None if bias is None else BiasOf(bias, part),
            softcap=self.record["softcap"],
            query_positions=self.of_sequence("query_positions") if placed else None,
            key_positions=self.of_sequence("key_positions") if placed else None,
        )

    @cached_property
    def _rules(self) -> tuple[Mask | None, Bias | None]:
        mask, bias = self.record["mask"], self.record["bias"]
        return (
            None if mask is None else read_mask(mask, self.arrays),
            None if bias is None else read_bias(bias, self.arrays),
        )

    @property
    def _axes(self) -> Axes:
        return Axes(tuple(self.record["leading"]), self.record["head_axis"], self.record["heads"])

    def _array(self, name: str) -> Tensor:
        return self.arrays[self.record["arrays"][name]]
