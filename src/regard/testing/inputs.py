"""The tensors of a case: seeded, of prime sizes, and for each mask and bias its meaning in plain index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import regard

from ..masks import Mask
from ..problem import Problem
from ..scores import Score
from .cases import DTYPES, LAYOUTS, LENGTHS, Case, Layout

QUERY_DIM, KEY_DIM, VALUE_DIM, HIDDEN_DIM, MAX_LENGTH = 11, 13, 17, 19, 23
SCALE, SOFTCAP = 0.3, 2.0
NON_FINITE = (math.nan, math.inf, -math.inf)

SCORES: dict[str, Callable[[], Score | None]] = {
    "default": lambda: None,
    "dot": regard.scores.Dot,
    "scaled": lambda: regard.scores.ScaledDot(SCALE),
    "general": lambda: regard.scores.General(QUERY_DIM, KEY_DIM),
    "additive": lambda: regard.scores.Additive(QUERY_DIM, KEY_DIM, HIDDEN_DIM),
    "concat": lambda: regard.scores.Concat(QUERY_DIM, KEY_DIM, HIDDEN_DIM),
    "location": lambda: regard.scores.Location(QUERY_DIM, MAX_LENGTH),
}
EQUAL_DIMS = ("default", "dot", "scaled")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one case, on one device.

    `leaves` are all tensors that have a gradient, by name; a score's parameters are under "score.". `keep` says which
    pairs exist, found without the library's masks: (*batch, heads or 1, M, N). `query_at` and `key_at` are the
    positions, (*batch, 1, M, 1) and (*batch, 1, 1, N).
    """

    case: Case
    leaves: dict[str, Tensor]
    score: Score | None
    mask: Mask | None
    keep: Tensor
    query_at: Tensor
    key_at: Tensor
    query_positions: Tensor | None
    key_positions: Tensor | None

    @property
    def layout(self) -> Layout:
        """The axes in front of (length, dim)."""
        return LAYOUTS[self.case.layout]

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
        bias = leaves.get("bias")
        if case.bias == "gaussian":
            bias = regard.biases.gaussian(leaves["center"], leaves["sigma"])
        plan = regard.explain(
            *(self.arranged(name, leaves[name]) for name in ("query", "key", "value")),
            score=self.score,
            mask=self.mask,
            bias=bias,
            scale=SCALE if case.variant == "scale" else None,
            softcap=SOFTCAP if case.variant == "softcap" else None,
            sinks=leaves.get("sinks"),
            query_positions=self.query_positions,
            key_positions=self.key_positions,
        )
        return replace(plan.problem, wants_lse=wants_lse)


def make_inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """The tensors of a case: drawn on the CPU from the case's own seed, so the same on every device.

    >>> make_inputs(Case(layout="grouped")).problem().weights_shape
    torch.Size([2, 6, 5, 7])
    """
    draw = _Draw(case)
    query_positions, key_positions = draw.positions()
    mask, keep = _MASKS[case.mask](draw)
    score = draw.score()
    leaves = {name: draw.tensor(*draw.leaf_shape(name)) for name in ("query", "key", "value")}
    leaves |= draw.bias() | draw.sinks()
    inputs = Inputs(
        case, leaves, score, mask, draw.whole(keep), draw.query_at, draw.key_at, query_positions, key_positions
    )
    _poison(inputs, draw)
    return _on(inputs, torch.device(device))


class _Draw:
    """The sizes of a case, and numbers from its seed, always in the same order."""

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, LAYOUTS[case.layout]
        self.queries, self.keys = LENGTHS[case.lengths]
        self.dtype = DTYPES[case.dtype]
        self.generator = torch.Generator().manual_seed(case.seed)
        self.query_at = torch.arange(self.keys - self.queries, self.keys)[:, None]
        self.key_at = torch.arange(self.keys)[None, :]

    def tensor(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def coins(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """(*batch, heads, M, N), without heads where the layout has none."""
        heads = () if self.layout.heads is None else (self.layout.heads,)
        return (*self.layout.batch, *heads, self.queries, self.keys)

    def whole(self, pairs: Tensor) -> Tensor:
        """Booleans over pairs, as (*batch, heads or 1, M, N)."""
        return pairs.expand(*self.layout.batch, self.layout.heads or 1, self.queries, self.keys)

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        """The shape of query's, key's or value's leaf, before `Inputs.arranged`."""
        key_dim = QUERY_DIM if self.case.score in EQUAL_DIMS else KEY_DIM
        length = self.queries if name == "query" else self.keys
        dim = {"query": QUERY_DIM, "key": key_dim, "value": VALUE_DIM}[name]
        shared = self.case.memory in ("expanded", "broadcast") and name != "query"
        batch = (1,) * len(self.layout.batch) if shared else self.layout.batch
        if self.layout.heads is None:
            return (*batch, dim, length) if self.case.memory == "strided" else (*batch, length, dim)
        heads = (self.layout.heads if name == "query" else self.layout.key_heads) or 1
        return (*batch, length, heads, dim) if self.case.memory == "strided" else (*batch, heads, length, dim)

    def positions(self) -> tuple[Tensor | None, Tensor | None]:
        """What the call is told of positions; `query_at` and `key_at` become what that means."""
        if self.case.positions == "start":
            self.query_at = torch.arange(self.queries)[:, None]
            return torch.arange(self.queries), None
        if self.case.positions == "scattered":
            queries = self.integers(self.keys + 1, *self.layout.batch, self.queries)
            keys = torch.rand(*self.layout.batch, self.keys, generator=self.generator).argsort(-1)
            self.query_at, self.key_at = queries[..., None, :, None], keys[..., None, None, :]
            return queries, keys
        return None, None

    def score(self) -> Score | None:
        """The score, its parameters drawn from the case's seed and not from torch's."""
        with torch.random.fork_rng(devices=[]):
            score = SCORES[self.case.score]()
        if score is None:
            return None
        for parameter in score.parameters():
            parameter.data = self.tensor(*parameter.shape) * parameter.shape[-1] ** -0.5
        return score

    def bias(self) -> dict[str, Tensor]:
        """The leaves of the bias."""
        shape = self.weights_shape
        match self.case.bias:
            case "pairs":
                return {"bias": self.tensor(*shape[-2:])}
            case "heads":
                return {"bias": self.tensor(*shape[-3:-2][: self.layout.heads], 1, self.keys)}
            case "blocked":
                blocked = ~self.coins(*shape)
                blocked[..., :1, :] = True
                return {"bias": self.tensor(*shape).masked_fill(blocked, -math.inf)}
            case "gaussian":
                return {"center": self.tensor(*shape[:-1]) + self.keys / 2, "sigma": self.tensor().abs() + 1}
            case _:
                return {}

    def sinks(self) -> dict[str, Tensor]:
        return {"sinks": self.tensor(self.layout.heads or 1)} if self.case.variant == "sinks" else {}


def _all(draw: _Draw) -> tuple[Mask | None, Tensor]:
    return None, torch.ones(1, 1, dtype=torch.bool)


def _causal(draw: _Draw) -> tuple[Mask, Tensor]:
    return regard.masks.causal(), draw.key_at <= draw.query_at


def _padding(draw: _Draw) -> tuple[Mask, Tensor]:
    lengths = draw.integers(draw.keys + 1, *draw.layout.batch)
    return regard.masks.padding(lengths=lengths), draw.key_at < lengths[..., None, None, None]


def _keep(draw: _Draw) -> tuple[Mask, Tensor]:
    pairs = draw.coins(*draw.weights_shape)
    pairs[..., :1, :] = False  # the first row attends to nothing
    return regard.masks.where(keep=pairs), pairs if draw.layout.heads else pairs.unsqueeze(-3)


def _ignore(draw: _Draw) -> tuple[Mask, Tensor]:
    ignored = draw.coins(draw.keys)
    return regard.masks.where(ignore=ignored), ~ignored


def _causal_and_padding(draw: _Draw) -> tuple[Mask, Tensor]:
    (causal, earlier), (padding, inside) = _causal(draw), _padding(draw)
    return causal & padding, earlier & inside


def _padding_or_keep(draw: _Draw) -> tuple[Mask, Tensor]:
    (padding, inside), (keep, pairs) = _padding(draw), _keep(draw)
    return padding | keep, inside | pairs


def _not_causal(draw: _Draw) -> tuple[Mask, Tensor]:
    return ~regard.masks.causal(), draw.key_at > draw.query_at


def _nothing(draw: _Draw) -> tuple[Mask, Tensor]:
    nothing = torch.zeros(draw.queries, draw.keys, dtype=torch.bool)
    return regard.masks.where(keep=nothing), nothing


_MASKS: dict[str, Callable[[_Draw], tuple[Mask | None, Tensor]]] = {
    "all": _all,
    "causal": _causal,
    "padding": _padding,
    "keep": _keep,
    "ignore": _ignore,
    "causal&padding": _causal_and_padding,
    "padding|keep": _padding_or_keep,
    "~causal": _not_causal,
    "nothing": _nothing,
}


def _poison(inputs: Inputs, draw: _Draw) -> None:
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
        query_positions=None if inputs.query_positions is None else inputs.query_positions.to(device),
        key_positions=None if inputs.key_positions is None else inputs.key_positions.to(device),
    )
