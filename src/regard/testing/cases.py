"""What the agreement suite varies: every choice by its name, and the cases that bring the choices together."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import torch

from .covering import Choices, covering

# The first value of an axis is its plain one. Prime sizes, and no two axes of one tensor alike wherever that can be, so
# that no transposed axis slips through.
SCORES = ("default", "dot", "scaled", "general", "additive", "concat", "location")
MASKS = ("all", "causal", "padding", "keep", "ignore", "causal&padding", "padding|keep", "~causal", "nothing")
BIASES = ("unbiased", "pairs", "heads", "blocked", "gaussian")
VARIANTS = ("as-is", "scale", "softcap", "sinks")
LENGTHS = {"5x7": (5, 7), "7x5": (7, 5), "5x5": (5, 5), "1x7": (1, 7), "0x7": (0, 7), "5x0": (5, 0)}
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MEMORIES = ("contiguous", "strided", "expanded", "broadcast")
POSITIONS = ("tail", "start", "scattered")
POISONS = ("clean", "masked", "query", "key", "value")


@dataclass(frozen=True)
class Layout:
    """The axes in front of (length, dim); no heads means that there is no head axis."""

    batch: tuple[int, ...] = ()
    heads: int | None = None
    key_heads: int | None = None


LAYOUTS = {
    "2d": Layout(),
    "3d": Layout((3,)),
    "4d": Layout((2,), 3, 3),
    "grouped": Layout((2,), 6, 3),
    "multiquery": Layout((3,), 2, 1),
    "5d": Layout((2, 3), 4, 2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of attention, by the names of its choices; the same case always has the same numbers in it.

    memory: how the tensors lie, `broadcast` has key and value without a batch. poison: NaN and infinity, in what is
    `masked` from everything, or in one entry of query, key or value that something attends to.

    >>> Case(score="dot", layout="3d", poison="masked").id
    'dot-3d-5x7-float32-masked'
    """

    score: str = "default"
    mask: str = "all"
    bias: str = "unbiased"
    variant: str = "as-is"
    layout: str = "4d"
    lengths: str = "5x7"
    dtype: str = "float32"
    memory: str = "contiguous"
    positions: str = "tail"
    poison: str = "clean"

    @property
    def id(self) -> str:
        """The choices in one word, the plain ones left out: readable, and different for different cases."""
        always = ("score", "layout", "lengths", "dtype")
        plain = Case()
        choices = {name: getattr(self, name) for name in AXES}
        return "-".join(value for name, value in choices.items() if name in always or value != getattr(plain, name))

    @property
    def seed(self) -> int:
        """What the numbers of this case are drawn from."""
        return zlib.crc32(self.id.encode())


AXES = {
    "score": SCORES,
    "mask": MASKS,
    "bias": BIASES,
    "variant": VARIANTS,
    "layout": tuple(LAYOUTS),
    "lengths": tuple(LENGTHS),
    "dtype": tuple(DTYPES),
    "memory": MEMORIES,
    "positions": POSITIONS,
    "poison": POISONS,
}


@cache
def cases(strength: int = 3) -> tuple[Case, ...]:
    """Cases in which any `strength` choices meet somewhere: some 70 for two, some 500 for three.

    >>> len({case.id for case in cases(2)}) == len(cases(2))
    True
    """
    return tuple(Case(**choices) for choices in covering(AXES, strength, _possible))


def _possible(choices: Choices) -> bool:
    """Whether choices make sense together."""
    if choices.get("variant") == "scale" and choices.get("score", "default") != "default":
        return False  # `scale` belongs to the default score; scores.ScaledDot has its own
    if choices.get("variant") == "sinks" and choices.get("layout") in ("2d", "3d"):
        return False  # a sink is one logit for each head
    # A bias of -inf takes the weight away but leaves the pair there: what NaN does behind it, the contract leaves open.
    return not (choices.get("bias") == "blocked" and choices.get("poison") in ("query", "key", "value"))
