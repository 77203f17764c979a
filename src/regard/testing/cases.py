"""What the agreement suite varies: every choice by its name, and the cases that bring the choices together.

Combinations of choices, few of them, among which every few choices meet.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import prod

import torch

Choices = dict[str, str]


def covering(
    axes: Mapping[str, Sequence[str]],
    strength: int,
    possible: Callable[[Choices], bool] = lambda choices: True,
    *,
    most: int | None = None,
) -> list[Choices]:
    """Rows with one value for each axis, so that any `strength` values of different axes stand together in some row.

    A fault that needs `strength` circumstances to come together is then met, at the cost of hundreds of rows where all
    combinations are millions. Greedy and deterministic. `possible` is asked about part of a row, too: once it refuses,
    it has to refuse every row that holds these choices, and each axis needs a value that it never refuses. Axes with
    more than `most` combinations need not all meet: of these, any one value less stands together.

    >>> rows = covering({"sky": ["clear", "rain"], "day": ["work", "rest"], "place": ["in", "out"]}, strength=2)
    >>> len(rows)
    4
    """
    chosen = _sets_of_axes(axes, strength, most)
    open_targets = dict.fromkeys(
        target
        for names in chosen
        for values in product(*(axes[name] for name in names))
        if possible(dict(target := tuple(zip(names, values, strict=True))))
    )
    sets_with = {name: [names for names in chosen if name in names] for name in axes}
    rows = []
    while open_targets:
        row = dict(next(iter(open_targets)))
        for name in axes:
            if name not in row:
                options = [value for value in axes[name] if possible({**row, name: value})]
                known = [names for names in sets_with[name] if all(other in row or other == name for other in names)]
                row[name] = max(options, key=lambda value: _gain(open_targets, {**row, name: value}, known))
        rows.append({name: row[name] for name in axes})
        for names in chosen:
            open_targets.pop(tuple([(name, row[name]) for name in names]), None)
    return rows


def _sets_of_axes(axes: Mapping[str, Sequence[str]], strength: int, most: int | None) -> list[tuple[str, ...]]:
    """The axes whose values have to meet, `strength` of them at a time, or fewer where they have too many values."""
    few: dict[tuple[str, ...], None] = {}
    for names in combinations(axes, strength):
        if most is None or strength == 1 or prod(len(axes[name]) for name in names) <= most:
            few[names] = None
        else:
            few |= dict.fromkeys(combinations(names, strength - 1))
    held = {inner for names in few for inner in combinations(names, strength - 1) if len(names) == strength}
    return [names for names in few if names not in held]


def _gain(open_targets: Mapping, row: Choices, sets: Sequence[tuple[str, ...]]) -> int:
    """How many open targets a choice closes, with what the row holds already."""
    return sum(tuple([(name, row[name]) for name in names]) in open_targets for names in sets)


# The first value of an axis is its plain one. Prime sizes, and no two axes of one tensor alike wherever that can be, so
# that no transposed axis slips through.
SCORES = ("default", "dot", "scaled", "general", "additive", "concat", "location")
EVERYWHERE = (  # masks of any positions, any batch and any heads
    *("all", "causal", "padding", "keep", "ignore", "causal&padding", "padding|keep", "~causal", "nothing"),
    *("window", "causal&window", "causal|prefix", "strided", "fixed", "dilated", "window|global", "mod"),
    "~(fixed|padding)",
)
OF_TOKENS = ("documents", "causal&documents", "blocks")  # masks that know positions from 0 on
OF_HEADS = ("head-mod", "head-blocks&causal")  # masks that differ between heads
MASKS = (*EVERYWHERE, *OF_TOKENS, *OF_HEADS)
CONSTANT = ("given", "given-table", "alibi")  # biases without a gradient
BIASES = (
    *("unbiased", "pairs", "heads", "blocked", "gaussian", "slopes", "relative", "clipped", "mod", "pairs+relative"),
    *CONSTANT,
)
VARIANTS = ("as-is", "scale", "softcap", "sinks", "softcap&sinks")
DROPOUTS = ("whole", "dropout")
LENGTHS = {"5x7": (5, 7), "7x5": (7, 5), "5x5": (5, 5), "1x7": (1, 7), "0x7": (0, 7), "5x0": (5, 0)}
DIMS = ("unequal", "equal-dims")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MEMORIES = ("contiguous", "strided", "expanded", "broadcast")
POSITIONS = ("tail", "start", "scattered")
POISONS = ("clean", "masked", "query", "key", "value")

LARGE = 2**12
"""Above so many pairs of one head, the truth is computed for all rows at once, and no row attends to NaN."""


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

    lengths: queries × keys, any two numbers. memory: how the tensors lie, `broadcast` has key and value without a
    batch. poison: NaN and infinity, in what is `masked` from everything, or in one entry of query, key or value that
    something attends to.

    >>> Case(score="dot", layout="3d", poison="masked").id
    'dot-3d-5x7-float32-masked'
    """

    score: str = "default"
    mask: str = "all"
    bias: str = "unbiased"
    variant: str = "as-is"
    dropout: str = "whole"
    layout: str = "4d"
    lengths: str = "5x7"
    dims: str = "unequal"
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

    @property
    def sizes(self) -> tuple[int, int]:
        """How many queries, and how many keys."""
        return sizes(self.lengths)


AXES: Mapping[str, Sequence[str]] = {
    "score": SCORES,
    "mask": MASKS,
    "bias": BIASES,
    "variant": VARIANTS,
    "dropout": DROPOUTS,
    "layout": tuple(LAYOUTS),
    "lengths": tuple(LENGTHS),
    "dims": DIMS,
    "dtype": tuple(DTYPES),
    "memory": MEMORIES,
    "positions": POSITIONS,
    "poison": POISONS,
}

# What few kernels compute: dense ones nothing that is dropped or learned, native ones additive scores in float32 alone.
DENSE_AXES: Mapping[str, Sequence[str]] = {
    **AXES,
    "score": ("default", "general"),
    "bias": ("unbiased", *CONSTANT),
    "variant": ("as-is", "sinks"),
    "dropout": ("whole",),
}
ADDITIVE_AXES: Mapping[str, Sequence[str]] = {
    **AXES,
    "score": ("additive", "concat"),
    "variant": tuple(variant for variant in VARIANTS if variant != "scale"),
    "dtype": ("float32",),
}

# Lengths that cross the borders of the kernels' own tiles, of some hundred rows and columns; the scores that keep a
# number for each feature of each pair are left to shorter ones.
LONG_AXES: Mapping[str, Sequence[str]] = {
    **AXES,
    "score": ("default", "general", "additive"),
    "layout": ("2d", "3d", "grouped"),
    "lengths": ("131x257", "257x131", "3x1031"),
    "dtype": ("float32", "bfloat16"),
    "poison": ("clean", "masked"),
}

MOST_TRIPLES = 120
"""Three axes whose choices have more combinations than these would take thousands of cases: any two of them meet."""
MOST_PAIRS = 30
"""The same for two axes, in long cases."""


def sizes(lengths: str) -> tuple[int, int]:
    """Queries and keys of "5x7".

    >>> sizes("5x7")
    (5, 7)
    """
    queries, keys = lengths.split("x")
    return int(queries), int(keys)


@cache
def cases(strength: int = 3) -> tuple[Case, ...]:
    """Cases in which any `strength` choices meet somewhere: some 300 for two, some 800 for three.

    From three on, axes with many choices meet two at a time, and there are as many cases again of what few kernels
    compute: dot products with nothing dropped or learned, additive scores in float32.

    >>> len({case.id for case in cases(2)}) == len(cases(2))
    True
    """
    if strength < 3:
        rows = covering(AXES, strength, possible)
    else:
        rows = covering(AXES, strength, possible, most=MOST_TRIPLES)
        rows += [row for axes in (DENSE_AXES, ADDITIVE_AXES) for row in covering(axes, 2, possible, most=MOST_TRIPLES)]
    return tuple(dict.fromkeys(Case(**row) for row in rows))


@cache
def long_cases() -> tuple[Case, ...]:
    """Cases with some hundred queries and keys, which every kernel computes in several tiles."""
    return tuple(Case(**choices) for choices in covering(LONG_AXES, 2, possible, most=MOST_PAIRS))


def sampled(count: int, seed: int = 0) -> Iterator[Case]:
    """Cases at random: every axis a choice of its own, and any lengths, most of them small. The same ones for a seed.

    >>> [case.id for case in sampled(2)] == [case.id for case in sampled(2)]
    True
    """
    drawing = random.Random(seed)
    while count:
        choices = {name: drawing.choice(values) for name, values in AXES.items()}
        longest = drawing.choice((3, 7, 7, 7, 11, 30))
        choices["lengths"] = f"{drawing.randint(0, longest)}x{drawing.randint(0, longest)}"
        for name in ("mask", "bias", "variant", "dropout", "poison"):  # each of these shuts some kernel out
            if drawing.random() < 0.3:
                choices[name] = AXES[name][0]
        if possible(choices):
            count -= 1
            yield Case(**choices)


def possible(choices: Choices) -> bool:
    """Whether choices make sense together."""
    plain = {name: values[0] for name, values in AXES.items()}
    score, mask, bias, variant, poison = (
        {**plain, **choices}[n] for n in ("score", "mask", "bias", "variant", "poison")
    )
    if variant == "scale" and score != "default":
        return False  # `scale` belongs to the default score; scores.ScaledDot has its own
    if choices.get("layout") in ("2d", "3d") and (variant in ("sinks", "softcap&sinks") or mask in OF_HEADS):
        return False  # a sink is one logit for each head
    if "lengths" in choices:
        queries, keys = sizes(choices["lengths"])
        before_0 = queries > keys and choices.get("positions") == "tail"  # the first queries sit there
        if before_0 and (mask in OF_TOKENS or mask == "head-blocks&causal"):
            return False
        if queries * keys > LARGE and poison in ("query", "key", "value"):
            return False
    # A bias of -inf takes the weight away but leaves the pair there: what NaN does behind it, the contract leaves open.
    return not (bias == "blocked" and poison in ("query", "key", "value"))
