"""The state of tiles, against the values of all their pairs."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from regard import masks
from regard.core.grid import Grid
from regard.core.intervals import EMPTY, FULL, PARTIAL
from regard.errors import MaskError, ShapeError
from regard.masks import Mask

BATCH, HEADS, LONGEST, TOKENS = 2, 3, 40, 64

generator = torch.Generator().manual_seed(0)
IDS = torch.randint(4, (BATCH, TOKENS), generator=generator).cumsum(-1) // 3
FLAGS = torch.rand(TOKENS, generator=generator) < 0.5
OF_HEADS = torch.tensor([1, 2, 5])[:, None]
LAYOUT = torch.rand(HEADS, TOKENS // 8, TOKENS // 8, generator=generator) < 0.5
WIDTHS = torch.tensor([1, 6, 20])
YES = torch.tensor(True)
ANCHORS = torch.tensor([3, 17, 18])

# Functions of any position; of the positions 0..TOKENS-1; and of these, some that interval arithmetic knows nothing of.
ANYWHERE = [
    masks.from_mod(lambda b, h, q, k: k <= q),
    masks.from_mod(lambda b, h, q, k: (q >= k) & (q - k < 9)),
    masks.from_mod(lambda b, h, q, k: torch.abs(q - k) <= 5),
    masks.from_mod(lambda b, h, q, k: ~(q // 8 == k // 8) | (k < 0)),
    masks.from_mod(lambda b, h, q, k: 3 - (-k) * 2 > q % 7),
    masks.from_mod(lambda b, h, q, k: torch.where(q < 9, k < 4, k >= 4)),
    masks.from_mod(lambda b, h, q, k: torch.where(k % 2 == 0, k, q) - 3 <= q),
    masks.from_mod(lambda b, h, q, k: (q.clamp(4, 30) - k).abs() <= 4),
    masks.from_mod(lambda b, h, q, k: torch.minimum(q, k) * torch.maximum(q, k) < 100),
    masks.from_mod(lambda b, h, q, k: q - k <= WIDTHS[h], heads=HEADS),
    masks.from_mod(lambda b, h, q, k: torch.logical_or(k < 9 * (b + 1), h == 1), batch=BATCH, heads=HEADS),
    masks.from_mod(lambda b, h, q, k: (k <= q) == (k % 2 == 0)),
    masks.from_mod(lambda b, h, q, k: (k // 4 != q // 4) ^ (k <= q)),
    masks.from_mod(lambda b, h, q, k: torch.tensor(True) == (k <= q)),
    masks.from_mod(lambda b, h, q, k: (k <= q) == YES),
    masks.from_mod(lambda b, h, q, k: q / 2 <= k),
    masks.from_mod(lambda b, h, q, k: (q == ANCHORS).any() | (k <= q)),
    masks.from_mod(lambda b, h, q, k: torch.ones((), dtype=torch.bool)),
]
TOKENS_ONLY = [
    masks.from_mod(lambda b, h, q, k: IDS[b, q] == IDS[b, k], batch=BATCH),
    masks.from_mod(lambda b, h, q, k: FLAGS[k] | ~FLAGS[q]),
    masks.from_mod(lambda b, h, q, k: LAYOUT[h, q // 8, k // 8], heads=HEADS),
    masks.from_mod(lambda b, h, q, k: (q == ANCHORS[:2]).any() & FLAGS[k]),
]

few = st.integers(0, 12)
steps = st.integers(1, 12)
lengths = st.lists(st.integers(0, LONGEST), min_size=BATCH, max_size=BATCH)
anywhere: st.SearchStrategy[Mask] = st.one_of(
    st.just(masks.causal()),
    st.builds(masks.window, few | st.none(), few | st.none()),
    lengths.map(lambda lengths: masks.padding(lengths=lengths)),
    (lengths | st.integers(0, LONGEST)).map(masks.prefix),
    steps.map(masks.strided),
    steps.flatmap(lambda block: st.integers(0, block).map(lambda summary: masks.fixed(block, summary))),
    st.builds(masks.dilated, few, steps, few),
    st.lists(st.integers(0, LONGEST), max_size=3).map(masks.global_tokens),
    st.sampled_from(ANYWHERE),
)
tokens_only: st.SearchStrategy[Mask] = st.one_of(
    st.sampled_from([masks.documents(IDS), masks.documents(IDS[0]), masks.documents(IDS[1] % 3), *TOKENS_ONLY]),
    st.sampled_from([masks.documents(torch.stack([IDS] * HEADS, 1) // OF_HEADS), masks.documents(IDS[1] // 2, IDS)]),
    st.builds(
        lambda block, count, seed, heads: masks.random_blocks(TOKENS, block, count, seed=seed, heads=heads),
        st.sampled_from([4, 7, 16]),
        st.integers(0, 4),
        st.integers(0, 9),
        st.sampled_from([None, HEADS]),
    ),
)


@dataclass(frozen=True)
class Booleans:
    """A mask made of a tensor, whose shape waits for the number of queries and keys."""

    axes: str
    share: float
    seed: int

    def mask(self, queries: int, keys: int) -> Mask:
        sizes = {"b": BATCH, "h": HEADS, "m": queries, "n": keys, "1": 1}
        drawing = torch.Generator().manual_seed(self.seed)
        return masks.where(keep=torch.rand([sizes[axis] for axis in self.axes], generator=drawing) < self.share)


booleans = st.builds(
    Booleans, st.sampled_from(["mn", "1n", "b1m1", "hmn"]), st.sampled_from([0.02, 0.5, 0.98]), st.integers(0, 99)
)


def expressions(leaves: st.SearchStrategy) -> st.SearchStrategy:
    """Masks, and how they are joined: ("&", left, right), ("|", left, right) or ("~", mask)."""
    return st.recursive(
        leaves | booleans,
        lambda inner: st.tuples(st.sampled_from("&|"), inner, inner) | st.tuples(st.just("~"), inner),
        max_leaves=4,
    )


def joined(expression: Any, queries: int, keys: int) -> Mask:
    match expression:
        case ("&", left, right):
            return joined(left, queries, keys) & joined(right, queries, keys)
        case ("|", left, right):
            return joined(left, queries, keys) | joined(right, queries, keys)
        case ("~", mask):
            return ~joined(mask, queries, keys)
        case Booleans():
            return expression.mask(queries, keys)
        case _:
            return expression


EXPRESSIONS = {0: expressions(anywhere | tokens_only), -9: expressions(anywhere)}  # by their least position
KINDS = st.sampled_from(["start", "later", "scattered", "batch"])


def positions(kind: str, length: int, least: int, seed: int) -> torch.Tensor:
    """At the start, in a stretch elsewhere, in any order, or different for each of the batch."""
    if kind == "start":
        return torch.arange(length)
    if kind == "later":
        return torch.arange(length) + least + seed % (TOKENS - LONGEST)
    shape = (length,) if kind == "scattered" else (BATCH, length)
    drawing = torch.Generator().manual_seed(seed)
    return torch.randint(least, TOKENS, shape, generator=drawing)


@dataclass(frozen=True)
class Question:
    """A mask, how many queries and keys, where they sit, and the size of the tiles."""

    mask: Mask
    queries: int
    keys: int
    at: dict[str, torch.Tensor]
    size: int | tuple[int, int]


@st.composite
def questions(draw: st.DrawFn) -> Question:
    queries, keys, seed = draw(st.tuples(st.integers(0, LONGEST), st.integers(0, LONGEST), st.integers(0, 99)))
    at, least = {}, 0
    if queries > keys or draw(st.booleans()):
        least = draw(st.sampled_from([0, -9]))
        at = {
            "query_positions": positions(draw(KINDS), queries, least, seed),
            "key_positions": positions(draw(KINDS), keys, least, seed + 1),
        }
    size = draw(st.integers(1, 45) | st.tuples(st.integers(1, 20), st.integers(1, 20)))
    return Question(joined(draw(EXPRESSIONS[least]), queries, keys), queries, keys, at, size)


def per_tile(dense: torch.Tensor, size: int | tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether every pair of each tile exists, and whether some pair does."""
    rows, columns = size if isinstance(size, tuple) else (size, size)
    below, right = -dense.shape[-2] % rows, -dense.shape[-1] % columns

    def cut(value: bool) -> torch.Tensor:
        whole = pad(dense, (0, right, 0, below), value=value)
        down, across = whole.shape[-2] // rows, whole.shape[-1] // columns
        return whole.unflatten(-1, (across, columns)).unflatten(-3, (down, rows))

    return cut(True).all(-1).all(-2), cut(False).any(-1).any(-2)


def assert_right_verdicts(asked):
    verdicts = asked.mask.tiles(asked.queries, asked.keys, asked.size, **asked.at)
    dense = asked.mask.dense(asked.queries, asked.keys, **asked.at)
    every, some = per_tile(dense, asked.size)
    assert verdicts.dtype == torch.int8
    assert verdicts.shape[-2:] == every.shape[-2:]
    assert not (some & (verdicts == EMPTY)).any()
    assert not (~every & (verdicts == FULL)).any()
    tile = Grid.from_lengths(asked.queries, asked.keys, **asked.at).tile(slice(3, 20), slice(5, None))
    kept = asked.mask.keep(tile)
    assert kept.expand(*kept.shape[:-2], *tile.shape).equal(dense[..., 3:20, 5:])


@pytest.mark.shorter
@settings(max_examples=500, deadline=None, derandomize=True)
@given(asked=questions())
def test_verdicts_are_never_wrong(asked):
    assert_right_verdicts(asked)


@pytest.mark.slow
@settings(max_examples=2500, deadline=None, derandomize=True)
@given(asked=questions())
def test_verdicts_are_never_wrong_in_many_questions(asked):
    assert_right_verdicts(asked)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(asked=questions())
def test_density_is_the_share_of_the_pairs(asked):
    dense = asked.mask.dense(asked.queries, asked.keys, **asked.at)
    share = dense.double().mean().item() if dense.numel() else 0.0
    assert asked.mask.density(asked.queries, asked.keys, asked.size, **asked.at) == pytest.approx(share, abs=1e-12)


ids = torch.tensor([0] * 5 + [1] * 11 + [2] + [3] * 13)


@pytest.mark.parametrize("size", [1, 4, (3, 7), 8, (16, 2), 64])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(before=6, after=3),
        masks.causal() & masks.window(before=9),
        masks.prefix([3, 40]),
        masks.causal() | masks.prefix(9),
        masks.padding(lengths=[0, 12, 30]),
        masks.documents(ids),
        masks.documents(torch.stack([ids, ids // 2])),
        masks.causal() & masks.documents(ids),
        masks.global_tokens([0, 17]),
        masks.fixed(8, 8),
        masks.strided(1),
        masks.random_blocks(30, 8, 2, heads=2),
        masks.where(keep=torch.arange(30) < 12),
        masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k < 10)),
        masks.from_mod(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])),
        masks.from_mod(lambda b, h, q, k: torch.where(k < 9, True, k <= q)),
        masks.from_mod(lambda b, h, q, k: (q - k).abs() <= WIDTHS[h], heads=3),
        masks.from_mod(lambda b, h, q, k: LAYOUT[0, q // 8, k // 8]),
    ],
    ids=repr,
)
def test_structured_masks_are_sharp(mask, size):
    """Every tile is told exactly: EMPTY and FULL wherever they are true."""
    every, some = per_tile(mask.dense(30, 30), size)
    assert mask.tiles(30, 30, size).equal(every.to(torch.int8) + some.to(torch.int8))
    assert masks.causal().tiles(30, 30, size).equal((~~masks.causal()).tiles(30, 30, size))


def test_tiles_of_a_long_sequence_look_at_no_pair(monkeypatch):
    """n² pairs would be 17 GB of booleans."""
    mask = masks.causal() & masks.window(before=511) & masks.documents(torch.arange(131_072) // 8_192)
    tiles = mask.tiles(131_072, 131_072)
    assert tiles.shape == (1024, 1024)
    # Within a document: the tile itself and the furthest of a window PARTIAL, three between them FULL.
    assert (tiles == FULL).sum() == 16 * (63 + 62 + 61)
    assert (tiles == PARTIAL).sum() == 16 * (64 + 60)
    share = sum(min(row % 8_192 + 1, 512) for row in range(16_384)) / 16_384**2
    assert mask.density(16_384, 16_384) == pytest.approx(share, rel=1e-12)


def test_shapes():
    assert masks.causal().tiles(200, 300).shape == (2, 3)
    assert masks.causal().tiles(200, 300, (10, 300)).shape == (20, 1)
    assert masks.causal().tiles(0, 300).shape == (0, 3)
    assert masks.causal().tiles(3, 0).shape == (3 // 3, 0)
    assert masks.padding(lengths=[1, 2]).tiles(200, 300).shape == (2, 1, 2, 3)
    assert masks.causal().tiles(2, 2, query_positions=torch.zeros(5, 2).long()).shape == (5, 1, 1, 1)
    heads = masks.random_blocks(8, 4, 1, heads=3)
    assert heads.tiles(8, 8, 4).shape == (3, 2, 2)
    assert (heads & masks.padding(lengths=[1, 2])).tiles(8, 8, 4).shape == (2, 3, 2, 2)
    assert masks.causal().density(0, 3) == masks.padding(lengths=[]).density(2, 2) == 0.0


@pytest.mark.parametrize("size", [0, -1, 1.5, True, (4,), (4, 0), (4, 4, 4), "4", None])
def test_sizes_that_are_none(size):
    for ask in (masks.causal().tiles, masks.causal().density):
        with pytest.raises(ShapeError, match=r"size is .*; tiles need a whole number of rows and columns, at least 1"):
            ask(8, 8, size)


def test_masks_of_different_batches_do_not_join():
    with pytest.raises(MaskError, match=r"\(2, 1, 1, 1\) and padding\(lengths=\[1, 2, 3\]\) \(3, 1, 1, 1\)"):
        (masks.padding(lengths=[1, 2]) & masks.padding(lengths=[1, 2, 3])).tiles(4, 5)


def test_the_density_of_a_function_that_tiles_do_not_know_over_positions_of_each_sequence():
    mask = masks.from_mod(lambda b, h, q, k: (k <= q).logical_xor(~YES))
    queries, keys = torch.arange(4), torch.tensor([[0, 1, 2], [1, 2, 9]])
    assert mask.density(4, 3, 2, query_positions=queries, key_positions=keys) == (9 + 5) / 24
