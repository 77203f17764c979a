"""The tensors of a case: seeded, of prime sizes, with the mask as booleans computed without the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import regard

from ..core.dropout import Dropout
from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..kernels import make_problem
from ..masks import Mask
from ..scores import Score
from .cases import CONSTANT_BIASES, KEY_DIM, LAYOUTS, QUERY_DIM, Case, CaseGenerator, LeadingAxes
from .mask_and_bias_cases import BIAS_CASES, PairPositions, draw_mask

HIDDEN_DIM, MAX_LENGTH = 19, 23
SCALE, SOFTCAP, DROPOUT = 0.3, 2.0, 0.3
NON_FINITE = (math.nan, math.inf, -math.inf)

SCORES: dict[str, Callable[[int], Score | None]] = {
    "default": lambda keys: None,
    "dot": lambda keys: regard.scores.Dot(),
    "scaled": lambda keys: regard.scores.ScaledDot(SCALE),
    "general": lambda keys: regard.scores.General(QUERY_DIM, KEY_DIM),
    "additive": lambda keys: regard.scores.Additive(QUERY_DIM, KEY_DIM, HIDDEN_DIM),
    "concat": lambda keys: regard.scores.Concat(QUERY_DIM, KEY_DIM, HIDDEN_DIM),
    "location": lambda keys: regard.scores.Location(QUERY_DIM, max(keys, MAX_LENGTH)),
}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one case, on one device.

    `leaves` are all tensors that have a gradient, by name; a score's parameters start with "score.". `constants` are
    the tensors of a bias without gradient. `keep` (*batch, heads or 1, M, N) is the mask, True = attend, computed
    without the library's masks. `row_positions` (*batch, 1, M, 1) and `column_positions` (*batch, 1, 1, N) are the
    positions of queries and keys; `query_positions` and `key_positions` the arguments of the call. `seed` is dropout's.
    """

    case: Case
    leaves: dict[str, Tensor]
    constants: dict[str, Tensor]
    score: Score | None
    mask: Mask | None
    keep: Tensor
    row_positions: Tensor
    column_positions: Tensor
    query_positions: Tensor | None
    key_positions: Tensor | None
    seed: int

    @property
    def layout(self) -> LeadingAxes:
        """The axes in front of (length, dim)."""
        return LAYOUTS[self.case.layout]

    @property
    def pair_positions(self) -> PairPositions:
        """The positions that biases are functions of."""
        return PairPositions(self.row_positions, self.column_positions, self.layout.heads is None)

    def argument(self, name: str, leaf: Tensor) -> Tensor:
        """Query, key or value of the call: a view of its leaf, strided or expanded as the case specifies."""
        if self.case.memory == "strided":
            return leaf.mT if self.layout.heads is None else leaf.transpose(-3, -2)
        if self.case.memory == "expanded" and name != "query":
            return leaf.expand(*self.layout.batch, *leaf.shape[len(self.layout.batch) :])
        return leaf

    def attended_entries(self, name: str) -> Tensor:
        """Entries of the leaf of query, key or value that belong to some unmasked pair: bool."""
        keep, heads = self.keep, self.layout.heads
        if name == "query":
            rows = keep.any(-1)
        elif heads is None:
            rows = keep.any(-2)
        else:
            rows = keep.any(-2).unflatten(-2, (self.layout.key_heads or 1, -1)).any(-2)  # [*batch, Hk, N]
        return self.entries_of_rows(name, rows.squeeze(-2) if heads is None else rows)

    def entries_of_rows(self, name: str, rows: Tensor) -> Tensor:
        """Which entries of a leaf belong to marked rows (..., length) of query, key or value."""
        # Autograd inverts the views of `argument`: an entry belongs to a marked row if its gradient is not 0.
        leaf = torch.zeros(self.leaves[name].shape, requires_grad=True)
        (gradient,) = torch.autograd.grad((self.argument(name, leaf) * rows.unsqueeze(-1)).sum(), leaf)
        return gradient > 0

    def problem(self, *, wants_lse: bool = False, normalizer: Normalizer | None = None) -> Problem:
        """The `Problem` that kernels compute, of softmax attention or with a normalizer."""
        case, leaves = self.case, self.leaves
        bias = None
        if case.bias != "unbiased":
            bias = BIAS_CASES[case.bias].build({**leaves, **self.constants}, self.layout.heads is None)
        problem = make_problem(
            *(self.argument(name, leaves[name]) for name in ("query", "key", "value")),
            score=self.score,
            mask=self.mask,
            bias=bias,
            scale=SCALE if case.variant == "scale" else None,
            softcap=SOFTCAP if "softcap" in case.variant else None,
            sinks=leaves.get("sinks"),
            query_positions=self.query_positions,
            key_positions=self.key_positions,
            wants_lse=wants_lse,
        )
        dropout = None
        if case.dropout == "dropout":
            dropout = Dropout(DROPOUT, torch.tensor(self.seed, device=leaves["value"].device))
        problem = replace(problem, dropout=dropout)
        return problem if normalizer is None else normalizer.for_problem(problem)


def make_inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """The tensors of a case, drawn on the CPU from the case's own seed: the same on every device.

    >>> make_inputs(Case(layout="grouped")).problem().weights_shape
    torch.Size([2, 6, 5, 7])
    """
    draw = CaseGenerator(case)
    query_positions, key_positions = draw.call_positions()
    mask, keep = draw_mask(draw)
    score = _score(draw)
    leaves = {name: draw.normal(*draw.leaf_shape(name)) for name in ("query", "key", "value")}
    bias = {} if case.bias == "unbiased" else BIAS_CASES[case.bias].draw(draw)
    learned = case.bias not in CONSTANT_BIASES
    sinks = {"sinks": draw.normal(draw.heads)} if "sinks" in case.variant else {}
    inputs = Inputs(
        case=case,
        leaves=leaves | (bias if learned else {}) | sinks,
        constants={} if learned else bias,
        score=score,
        mask=mask,
        keep=draw.expand_pairs(keep),
        row_positions=draw.row_positions,
        column_positions=draw.column_positions,
        query_positions=query_positions,
        key_positions=key_positions,
        seed=int(torch.randint(-(2**63), 2**63 - 1, (), generator=draw.generator)),
    )
    _poison(inputs, draw)
    return _to_device(inputs, torch.device(device))


def _score(draw: CaseGenerator) -> Score | None:
    """The score, with parameters from the case's seed; torch's generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        score = SCORES[draw.case.score](draw.keys)
    if score is None:
        return None
    for parameter in score.parameters():
        parameter.data = draw.normal(*parameter.shape) * parameter.shape[-1] ** -0.5
    return score


def _poison(inputs: Inputs, draw: CaseGenerator) -> None:
    """Write NaN and infinity into the entries that the case names."""
    poison = inputs.case.poison
    if poison == "masked":
        for name in ("query", "key", "value"):
            unattended = ~inputs.attended_entries(name)
            bad = torch.tensor(NON_FINITE, dtype=draw.dtype).repeat(unattended.numel() // 3 + 1)
            inputs.leaves[name][unattended] = bad[: int(unattended.sum())]
    elif poison != "clean":
        leaf = inputs.leaves[poison].view(-1)
        if leaf.numel():
            leaf[int(draw.integers(leaf.numel()))] = math.inf if poison == "value" else math.nan


def _to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The same inputs on a device; every leaf requires a gradient."""
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in inputs.leaves.items()}
    if inputs.score is not None:
        inputs.score.to(device)
        leaves |= {f"score.{name}": parameter for name, parameter in inputs.score.named_parameters()}
    return replace(
        inputs,
        leaves=leaves,
        constants={name: constant.to(device) for name, constant in inputs.constants.items()},
        query_positions=None if inputs.query_positions is None else inputs.query_positions.to(device),
        key_positions=None if inputs.key_positions is None else inputs.key_positions.to(device),
    )
