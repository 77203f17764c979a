"""The cases of the agreement suite: covering arrays over score, mask, bias, layout, lengths, dtype and so on.

A covering array is a small set of combinations in which any few choices occur together. A case draws its sizes and
tensors from its own seed.
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
from torch import Tensor

from .mask_and_bias_cases import MASK_CASES, MASKS_FROM_ZERO, MASKS_OF_HEADS

Choices = dict[str, str]


def covering_array(
    axes: Mapping[str, Sequence[str]],
    strength: int,
    consistent: Callable[[Choices], bool] = lambda choices: True,
    *,
    most: int | None = None,
) -> list[Choices]:
    """Rows with one value per axis, such that any `strength` values of different axes occur together in some row.

    They find every fault that needs `strength` circumstances at once, by hundreds of rows instead of millions. Greedy
    and deterministic. `consistent` is called with partial rows, too: if it rejects one, it must reject every row that
    contains it, and each axis needs a value that it never rejects. Of axes with more than `most` combinations only any
    `strength` - 1 values occur together.

    >>> rows = covering_array({"sky": ["clear", "rain"], "day": ["work", "rest"], "place": ["in", "out"]}, strength=2)
    >>> len(rows)
    4
    """
    chosen = _sets_of_axes(axes, strength, most)
    uncovered = dict.fromkeys(
        target
        for names in chosen
        for values in product(*(axes[name] for name in names))
        if consistent(dict(target := tuple(zip(names, values, strict=True))))
    )
    sets_with = {name: [names for names in chosen if name in names] for name in axes}
    rows = []
    while uncovered:
        row = dict(next(iter(uncovered)))
        for name in axes:
            if name not in row:
                options = [value for value in axes[name] if consistent({**row, name: value})]
                known = [names for names in sets_with[name] if all(other in row or other == name for other in names)]
                row[name] = max(options, key=lambda value: _gain(uncovered, {**row, name: value}, known))
        rows.append({name: row[name] for name in axes})
        for names in chosen:
            uncovered.pop(tuple([(name, row[name]) for name in names]), None)
    return rows


def _sets_of_axes(axes: Mapping[str, Sequence[str]], strength: int, most: int | None) -> list[tuple[str, ...]]:
    """The sets of axes whose combinations are to be covered: `strength` axes, or one less if these have too many."""
    chosen: dict[tuple[str, ...], None] = {}
    for names in combinations(axes, strength):
        if most is None or strength == 1 or prod(len(axes[name]) for name in names) <= most:
            chosen[names] = None
        else:
            chosen |= dict.fromkeys(combinations(names, strength - 1))
    implied = {inner for names in chosen for inner in combinations(names, strength - 1) if len(names) == strength}
    return [names for names in chosen if names not in implied]


def _gain(uncovered: Mapping, row: Choices, sets: Sequence[tuple[str, ...]]) -> int:
    """How many uncovered combinations a partial row covers."""
    return sum(tuple([(name, row[name]) for name in names]) in uncovered for names in sets)


# The first value of an axis is its plain one. Prime sizes, and no two axes of one tensor alike wherever that can be, so
# that no transposed axis slips through.
SCORES = ("default", "dot", "scaled", "general", "additive", "concat", "location")
MASKS = ("all", *MASK_CASES)
CONSTANT_BIASES = ("given", "given-table", "alibi")  # biases without a gradient
BIASES = (
    *("unbiased", "pairs", "heads", "blocked", "gaussian", "slopes", "relative", "clipped", "mod", "pairs+relative"),
    *CONSTANT_BIASES,
)
VARIANTS = ("as-is", "scale", "softcap", "sinks", "softcap&sinks")
DROPOUTS = ("no-dropout", "dropout")
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

MAX_ROWWISE_PAIRS = 2**12
"""The most pairs per head up to which the oracle computes row by row, and rows may attend to NaN."""


@dataclass(frozen=True)
class LeadingAxes:
    """The axes before (length, dim); `heads` None means that there is no head axis."""

    batch: tuple[int, ...] = ()
    heads: int | None = None
    key_heads: int | None = None


LAYOUTS = {
    "2d": LeadingAxes(),
    "3d": LeadingAxes((3,)),
    "4d": LeadingAxes((2,), 3, 3),
    "grouped": LeadingAxes((2,), 6, 3),
    "multiquery": LeadingAxes((3,), 2, 1),
    "5d": LeadingAxes((2, 3), 4, 2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call of attention, by the names of its choices; a case always has the same numbers.

    lengths: queries × keys, any two numbers. memory: the strides of the tensors; `broadcast` is a batch of size 1 for
    key and value. poison: NaN and infinity, in all `masked` entries or in one entry of query, key or value.

    >>> Case(score="dot", layout="3d", poison="masked").id
    'dot-3d-5x7-float32-masked'
    """

    score: str = "default"
    mask: str = "all"
    bias: str = "unbiased"
    variant: str = "as-is"
    dropout: str = "no-dropout"
    layout: str = "4d"
    lengths: str = "5x7"
    dims: str = "unequal"
    dtype: str = "float32"
    memory: str = "contiguous"
    positions: str = "tail"
    poison: str = "clean"

    @property
    def id(self) -> str:
        """The choices without the default ones, joined by hyphens: unique for each case."""
        always = ("score", "layout", "lengths", "dtype")
        plain = Case()
        choices = {name: getattr(self, name) for name in AXES}
        return "-".join(value for name, value in choices.items() if name in always or value != getattr(plain, name))

    @property
    def seed(self) -> int:
        """The seed of the numbers of this case."""
        return zlib.crc32(self.id.encode())

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return parse_lengths(self.lengths)


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

# Further cases of kernels that admit few: torch's operator (no dropout, no learned bias), native additive scores
# (float32).
DENSE_AXES: Mapping[str, Sequence[str]] = {
    **AXES,
    "score": ("default", "general"),
    "bias": ("unbiased", *CONSTANT_BIASES),
    "variant": ("as-is", "sinks"),
    "dropout": ("no-dropout",),
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
    "dtype": ("float32", "bfloat16", "float16"),
    "poison": ("clean", "masked"),
}

MAX_TRIPLES = 120
"""The most combinations of three axes that are all covered; of more, only pairs: all would take thousands of cases."""
MAX_PAIRS = 30
"""The same for two axes, in long cases."""


def parse_lengths(lengths: str) -> tuple[int, int]:
    """The numbers of queries and keys of "5x7".

    >>> parse_lengths("5x7")
    (5, 7)
    """
    queries, keys = lengths.split("x")
    return int(queries), int(keys)


@cache
def cases(strength: int = 3) -> tuple[Case, ...]:
    """Cases in which any `strength` choices occur together: some 300 for two, some 800 for three.

    From three on, axes with many choices are covered in pairs, and there are as many cases again for kernels that admit
    few: dot products without dropout and learned bias, additive scores in float32.

    >>> len({case.id for case in cases(2)}) == len(cases(2))
    True
    """
    if strength < 3:
        rows = covering_array(AXES, strength, consistent)
    else:
        rows = covering_array(AXES, strength, consistent, most=MAX_TRIPLES)
        rows += [
            row for axes in (DENSE_AXES, ADDITIVE_AXES) for row in covering_array(axes, 2, consistent, most=MAX_TRIPLES)
        ]
    return tuple(dict.fromkeys(Case(**row) for row in rows))


@cache
def long_cases() -> tuple[Case, ...]:
    """Cases of some hundred queries and keys, which every kernel computes in several tiles."""
    return tuple(Case(**choices) for choices in covering_array(LONG_AXES, 2, consistent, most=MAX_PAIRS))


def random_cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Independent random choices on every axis, and random lengths, most of them small; a function of the seed.

    >>> [case.id for case in random_cases(2)] == [case.id for case in random_cases(2)]
    True
    """
    drawing = random.Random(seed)
    while count:
        choices = {name: drawing.choice(values) for name, values in AXES.items()}
        longest = drawing.choice((3, 7, 7, 7, 11, 30))
        choices["lengths"] = f"{drawing.randint(0, longest)}x{drawing.randint(0, longest)}"
        for name in ("mask", "bias", "variant", "dropout", "poison"):  # each of these excludes some kernel
            if drawing.random() < 0.3:
                choices[name] = AXES[name][0]
        if consistent(choices):
            count -= 1
            yield Case(**choices)


def consistent(choices: Choices) -> bool:
    """Whether choices can be combined."""
    plain = {name: values[0] for name, values in AXES.items()}
    score, mask, bias, variant, poison = (
        {**plain, **choices}[n] for n in ("score", "mask", "bias", "variant", "poison")
    )
    if variant == "scale" and score != "default":
        return False  # `scale` belongs to the default score; scores.ScaledDot has its own
    if choices.get("layout") in ("2d", "3d") and (variant in ("sinks", "softcap&sinks") or mask in MASKS_OF_HEADS):
        return False  # a sink is one logit for each head
    if "lengths" in choices:
        queries, keys = parse_lengths(choices["lengths"])
        before_0 = queries > keys and choices.get("positions") == "tail"  # the first queries have negative positions
        if before_0 and mask in MASKS_FROM_ZERO:
            return False
        if queries * keys > MAX_ROWWISE_PAIRS and poison in ("query", "key", "value"):
            return False
    # A bias of -inf sets a weight to 0 but keeps the pair: the contract does not say what NaN does there.
    return not (bias == "blocked" and poison in ("query", "key", "value"))


QUERY_DIM, KEY_DIM, VALUE_DIM = 11, 13, 17
EQUAL_DIMS = ("default", "dot", "scaled")


class CaseGenerator:
    """Sizes of a case, and random tensors from its seed; the same calls in the same order draw the same numbers.

    `row_positions` (*batch, 1, M, 1) and `column_positions` (*batch, 1, 1, N) are the positions of queries and keys,
    without the leading axes where all batches share them.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, LAYOUTS[case.layout]
        self.queries, self.keys = case.sizes
        self.dtype = DTYPES[case.dtype]
        self.generator = torch.Generator().manual_seed(case.seed)
        self.row_positions = torch.arange(self.keys - self.queries, self.keys)[:, None]
        self.column_positions = torch.arange(self.keys)[None, :]

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in the dtype of the case."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Uniform integers from 0 to below - 1."""
        return torch.randint(below, shape, generator=self.generator)

    def booleans(self, *shape: int) -> Tensor:
        """Booleans, true with probability 0.6."""
        return torch.rand(shape, generator=self.generator) < 0.6

    @property
    def heads(self) -> int:
        """The number of query heads, 1 where there is no head axis."""
        return self.layout.heads or 1

    @property
    def near_distance(self) -> int:
        """The size of windows, blocks and buckets: a quarter of the keys, 2 at least."""
        return max(self.keys // 4, 2)

    @property
    def positions_end(self) -> int:
        """A bound above all positions."""
        return max(self.queries, self.keys) + 1

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """(*batch, heads, M, N), without heads where the layout has none."""
        heads = () if self.layout.heads is None else (self.layout.heads,)
        return (*self.layout.batch, *heads, self.queries, self.keys)

    def expand_pairs(self, pairs: Tensor) -> Tensor:
        """Booleans over pairs, expanded to (*batch, heads or 1, M, N)."""
        return pairs.expand(*self.layout.batch, self.heads, self.queries, self.keys)

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the leaf of query, key or value, of which `Inputs.argument` is a view."""
        key_dim = QUERY_DIM if self.case.score in EQUAL_DIMS else KEY_DIM
        length = self.queries if name == "query" else self.keys
        value_dim = VALUE_DIM if self.case.dims == "unequal" else key_dim
        dim = {"query": QUERY_DIM, "key": key_dim, "value": value_dim}[name]
        shared = self.case.memory in ("expanded", "broadcast") and name != "query"
        batch = (1,) * len(self.layout.batch) if shared else self.layout.batch
        if self.layout.heads is None:
            return (*batch, dim, length) if self.case.memory == "strided" else (*batch, length, dim)
        heads = (self.layout.heads if name == "query" else self.layout.key_heads) or 1
        return (*batch, length, heads, dim) if self.case.memory == "strided" else (*batch, heads, length, dim)

    def call_positions(self) -> tuple[Tensor | None, Tensor | None]:
        """The position arguments of the call; sets `row_positions` and `column_positions` to the same positions."""
        if self.case.positions == "start":
            self.row_positions = torch.arange(self.queries)[:, None]
            return torch.arange(self.queries), None
        if self.case.positions == "scattered":
            queries = self.integers(self.keys + 1, *self.layout.batch, self.queries)
            keys = torch.rand(*self.layout.batch, self.keys, generator=self.generator).argsort(-1)
            self.row_positions, self.column_positions = queries[..., None, :, None], keys[..., None, None, :]
            return queries, keys
        return None, None
