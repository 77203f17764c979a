"""Detect the roles of self-attention heads on the recorded texts, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.problem import Problem
from ...heads import RoleEvidence, Roles, observe_weights
from ...kernels.lens_pass import run_reductions
from ...lenses import LensState, WeightTile
from ...lenses.base import Reduction
from .attention_map import AttentionMap
from .captured_call import CapturedCall
from .recorded_problem import RecordAxes, RecordErrors, SequenceSlice, SlicedMask
from .tokenized_text import TokenLists

HeadRoles = list[list[dict[str, Any]]]
"""The roles of each head of a map."""
MAX_DETECTION_ROWS = 512
"""The most rows of a text whose weights are read for its roles; of a longer one strips all along it."""


@dataclass(frozen=True, slots=True)
class _SequenceRoles:
    """One sequence of a call with its problem, log-sum-exp and the running state of the role lens."""

    problem: Problem
    lse: Tensor
    look: LensState[RoleEvidence]


class RoleDetector:
    """Role lenses for all sequences of a call, as reductions for a pass over its weights.

    Of a call without words, of cross-attention, or whose queries are not the last of the keys, nothing is looked for.
    """

    def __init__(self, sequences: Sequence[_SequenceRoles]) -> None:
        self._sequences = sequences

    @classmethod
    def for_call(cls, call: CapturedCall, words: TokenLists | None) -> RoleDetector:
        """Start a role lens for each sequence of a call whose keys have these tokens."""
        if words is None or call.kind != "self" or not queries_are_last(*call.positions):
            return cls(())
        axes, sequences = RecordAxes(call.leading, call.has_heads, call.query.shape[1]), []
        for at, pieces in enumerate(words):
            query, key = (axes.select(tensor, at) for tensor in (call.query, call.key))
            problem = Problem(
                pairs=call.form_of(query, key),
                value=key[..., :0],
                mask=None if call.mask is None else SlicedMask(call.mask, SequenceSlice(axes, at)),
                normalizer=call.normalizer,
                query_positions=_positions_of_sequence(call.positions[0], at),
                key_positions=_positions_of_sequence(call.positions[1], at),
            )
            sequences.append(_SequenceRoles(problem, call.lse[at], _lens(tuple(pieces.tokens)).start(problem)))
        return cls(sequences)

    @property
    def reductions(self) -> list[Reduction]:
        """Reductions that receive the tiles of all sequences."""
        return [
            _SequenceReduction(_SampledRows(of, one.problem.queries), at)
            for at, one in enumerate(self._sequences)
            for of in one.look.reductions
        ]

    def found(self) -> dict[str, list[HeadRoles]]:
        """The record's field "roles", computed after all weights were added; {} where roles do not apply."""
        roles = [_role_dicts(one.look.finish(one.problem, one.lse)) for one in self._sequences]
        return {"roles": roles} if roles else {}


@lru_cache(maxsize=4)
def _lens(words: tuple[str, ...]) -> Roles:
    """The role lens of a text, cached for all layers."""
    return Roles(list(words))


class _SampledRows:
    """A reduction that receives evenly spaced strips of some MAX_DETECTION_ROWS rows of a long text."""

    def __init__(self, reduction: Reduction, queries: int) -> None:
        self.reduction, self.queries = reduction, queries

    @property
    def needs_entropy_terms(self) -> bool:
        return self.reduction.needs_entropy_terms

    def add(self, tile: WeightTile) -> None:
        """Add a tile if the middle of one of the evenly spaced strips lies in its rows."""
        start, stop = tile.rows.start, tile.rows.stop
        strips = -(-MAX_DETECTION_ROWS // (stop - start))
        first = -(-(2 * start * strips - self.queries) // (2 * self.queries))  # (first + 1/2) queries / strips >= start
        if self.queries <= MAX_DETECTION_ROWS or (2 * first + 1) * self.queries < 2 * stop * strips:
            self.reduction.add(tile)


class _SequenceReduction:
    """A reduction that receives the weights of one sequence out of tiles of all sequences."""

    def __init__(self, reduction: Reduction, sequence: int) -> None:
        self.reduction, self.sequence = reduction, sequence

    @property
    def needs_entropy_terms(self) -> bool:
        return self.reduction.needs_entropy_terms

    def add(self, tile: WeightTile) -> None:
        """Add the sequence's part of a tile, if it has one."""
        if tile.batch.start <= self.sequence < tile.batch.stop:
            at = slice(self.sequence - tile.batch.start, self.sequence - tile.batch.start + 1)
            terms = None if tile.entropy_terms is None else tile.entropy_terms[at]
            self.reduction.add(WeightTile(tile.weights[at], terms, slice(0, 1), tile.rows, tile.columns))


def detect_map_roles(of: AttentionMap) -> HeadRoles | None:
    """Detect the roles of the heads of a stored map; None where roles do not apply, as in cross-attention."""
    placed = (torch.from_numpy(positions)[None] for positions in (of.query_positions, of.key_positions))
    if of.kind != "self" or not queries_are_last(*placed):
        return None
    lens = _lens(tuple(of.key_tokens))
    if of.record["score"] != "weights":
        with torch.no_grad(), RecordErrors(of.name):
            problem, lse = of.recorded_problem.whole(), of.recorded_problem.lse
            found = lens.start(problem)
            run_reductions(problem, lse, [_SampledRows(reduction, of.queries) for reduction in found.reductions])
            return _role_dicts(found.finish(problem, lse))
    everything = slice(0, of.queries), slice(0, of.keys)
    heads = (torch.from_numpy(of.weights(head, *everything))[None, None] for head in range(of.heads))
    return [_role_dicts(observe_weights(weights, lens)[lens])[0] for weights in heads]


def queries_are_last(queries: Tensor, keys: Tensor) -> bool:
    """Whether the query positions (B or 1, M) are the last of the key positions (B or 1, N)."""
    last = keys[:, keys.shape[1] - queries.shape[1] :] if queries.shape[1] <= keys.shape[1] else None
    return last is not None and bool((last == queries).all())


def _role_dicts(evidence: RoleEvidence) -> HeadRoles:
    return [[finding.to_dict() for finding in found] for found in evidence.holding()]


def _positions_of_sequence(positions: Tensor, sequence: int) -> Tensor:
    return positions[sequence if len(positions) > 1 else 0]
