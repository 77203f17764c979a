"""The tensors of a case: seeded, of prime sizes, and what mask and bias mean for them in plain index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import regard

from ..core.dropout import Dropout
from ..core.problem import Problem
from ..masks import Mask
from ..scores import Score
from .bias_cases import ADDING, Places
from .cases import CONSTANT, LAYOUTS, Case, Layout
from .mask_cases import mask_of
from .random_tensors import KEY_DIM, QUERY_DIM, Draw

HIDDEN_DIM, MAX_LENGTH = 19, 23
SCALE, SOFTCAP, DROPPED = 0.3, 2.0, 0.3
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

    `leaves` are all tensors that have a gradient, by name; a score's parameters are under "score.". `constants` are
    those of a bias that has none. `keep` says which pairs exist, found without the library's masks: (*batch, heads or
    1, M, N). `query_at` and `key_at` are the positions, (*batch, 1, M, 1) and (*batch, 1, 1, N). `seed` is what
    dropout is a function of.
    """

    case: Case
    leaves: dict[str, Tensor]
    constants: dict[str, Tensor]
    score: Score | None
    mask: Mask | None
    keep: Tensor
    query_at: Tensor
    key_at: Tensor
    query_positions: Tensor | None
    key_positions: Tensor | None
    seed: int

    @property
    def layout(self) -> Layout:
        """The axes in front of (length, dim)."""
        return LAYOUTS[self.case.layout]

    @property
    def places(self) -> Places:
        """What a bias has to know of where queries and keys sit."""
        return Places(self.query_at, self.key_at, self.layout.heads is None)

    def arranged(self, name: str, leaf: Tensor) -> Tensor:
        """Query, key or value as the call gets it: a view of its leaf, strided or expanded as the case has it."""
        if self.case.memory == "strided":
            return leaf.mT if self.layout.heads is None else leaf.transpose(-3, -2)
        if self.case.memory == "expanded" and name != "query":
            return leaf.expand(*self.layout.batch, *leaf.shape[len(self.layout.batch) :])
        return leaf

    def reached(self, name: str) -> Tensor:
        """Which entries of query's, key's or value's leaf stand in some pair that exists."""
        keep, heads = self.keep, self.layout.heads
        if name == "query":
            rows = keep.any(-1)
        elif heads is None:
            rows = keep.any(-2)
        else:
            rows = keep.any(-2).unflatten(-2, (self.layout.key_heads or 1, -1)).any(-2)  # [*batch, Hk, N]
        return self.entries(name, rows.squeeze(-2) if heads is None else rows)

    def entries(self, name: str, rows: Tensor) -> Tensor:
        """Which entries of a leaf belong to rows of query, key or value that are marked, (..., length)."""
        # The views of `arranged`, followed backwards: an entry belongs to a marked row where anything flows into it.
        leaf = torch.zeros(self.leaves[name].shape, requires_grad=True)
        (flow,) = torch.autograd.grad((self.arranged(name, leaf) * rows.unsqueeze(-1)).sum(), leaf)
        return flow > 0

    def problem(self, *, wants_lse: bool = False) -> Problem:
        """The case as kernels get it."""
        case, leaves = self.case, self.leaves
        bias = None
        if case.bias != "unbiased":
            bias = ADDING[case.bias].say({**leaves, **self.constants}, self.layout.heads is None)
        plan = regard.explain(
            *(self.arranged(name, leaves[name]) for name in ("query", "key", "value")),
            score=self.score,
            mask=self.mask,
            bias=bias,
            scale=SCALE if case.variant == "scale" else None,
            softcap=SOFTCAP if "softcap" in case.variant else None,
            sinks=leaves.get("sinks"),
            query_positions=self.query_positions,
            key_positions=self.key_positions,
        )
        dropout = None
        if case.dropout == "dropout":
            dropout = Dropout(DROPPED, torch.tensor(self.seed, device=leaves["value"].device))
        return replace(plan.problem, wants_lse=wants_lse, dropout=dropout)


def make_inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """The tensors of a case: drawn on the CPU from the case's own seed, so the same on every device.

    >>> make_inputs(Case(layout="grouped")).problem().weights_shape
    torch.Size([2, 6, 5, 7])
    """
    draw = Draw(case)
    query_positions, key_positions = draw.positions()
    mask, keep = mask_of(draw)
    score = _score(draw)
    leaves = {name: draw.tensor(*draw.leaf_shape(name)) for name in ("query", "key", "value")}
    added = {} if case.bias == "unbiased" else ADDING[case.bias].hold(draw)
    learned = case.bias not in CONSTANT
    sinks = {"sinks": draw.tensor(draw.heads)} if "sinks" in case.variant else {}
    inputs = Inputs(
        case=case,
        leaves=leaves | (added if learned else {}) | sinks,
        constants={} if learned else added,
        score=score,
        mask=mask,
        keep=draw.whole(keep),
        query_at=draw.query_at,
        key_at=draw.key_at,
        query_positions=query_positions,
        key_positions=key_positions,
        seed=int(torch.randint(-(2**63), 2**63 - 1, (), generator=draw.generator)),
    )
    _poison(inputs, draw)
    return _on(inputs, torch.device(device))


def _score(draw: Draw) -> Score | None:
    """The score, its parameters drawn from the case's seed and not from torch's."""
    with torch.random.fork_rng(devices=[]):
        score = SCORES[draw.case.score](draw.keys)
    if score is None:
        return None
    for parameter in score.parameters():
        parameter.data = draw.tensor(*parameter.shape) * parameter.shape[-1] ** -0.5
    return score


def _poison(inputs: Inputs, draw: Draw) -> None:
    """Put NaN and infinity where the case wants them."""
    poison = inputs.case.poison
    if poison == "masked":
        for name in ("query", "key", "value"):
            unreached = ~inputs.reached(name)
            bad = torch.tensor(NON_FINITE, dtype=draw.dtype).repeat(unreached.numel() // 3 + 1)
            inputs.leaves[name][unreached] = bad[: int(unreached.sum())]
    elif poison != "clean":
        leaf = inputs.leaves[poison].view(-1)
        if leaf.numel():
            leaf[int(draw.integers(leaf.numel()))] = math.inf if poison == "value" else math.nan


def _on(inputs: Inputs, device: torch.device) -> Inputs:
    """The same inputs on a device, every leaf with a gradient."""
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
