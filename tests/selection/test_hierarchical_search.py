"""The search by halves against the same written out, block by block, with later queries, groups of heads and errors."""

import itertools

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.errors import ConfigurationError, ShapeError
from regard.selection import hierarchical_blocks, hierarchical_search

BATCH, HEADS, KEY_HEADS, DIM = 2, 4, 2, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def by_halves(query: Tensor, key: Tensor, before: int, size: int, count: int) -> list[int]:
    """The blocks of queries at the positions from `before` on, (m, D), among the keys that the last of them sees."""
    end = before + len(query)
    blocks = -(-end // size)
    edges = [c * blocks // (2 * count) for c in range(2 * count + 1)]
    chunks = [chunk for chunk in itertools.pairwise(edges) if chunk[0] < chunk[1]]
    while True:
        scored = []
        for start, stop in chunks:
            middle = (start * size + min(stop * size, end) - 1) // 2
            seen = [float(row @ key[middle]) for i, row in enumerate(query) if before + i >= middle]
            scored.append((max(seen), start, stop))
        best = [(start, stop) for _, start, stop in sorted(scored, reverse=True)[:count]]
        if all(stop - start == 1 for start, stop in best):
            return [start for start, _ in best]
        cut = [(start, (start + stop) // 2, stop) for start, stop in best]
        chunks = [half for a, b, c in cut for half in ((a, b), (b, c)) if half[0] < half[1]]


@pytest.mark.parametrize(("queries", "keys"), [(131, 131), (37, 53), (1, 67), (7, 7)])
@pytest.mark.parametrize(("size", "count"), [(4, 3), (5, 1), (1, 6), (64, 2)])
def test_it_is_the_search_written_out(queries, keys, size, count):
    query, key = drawn(BATCH, HEADS, queries, DIM), drawn(BATCH, KEY_HEADS, keys, DIM)
    found = hierarchical_blocks(query, key, size=size, count=count)
    assert found.shape == (BATCH, HEADS, -(-queries // size), count)
    for batch, head, row in itertools.product(range(BATCH), range(HEADS), range(found.shape[2])):
        own = query[batch, head, row * size : (row + 1) * size]
        expected = by_halves(own, key[batch, head // 2], keys - queries + row * size, size, count)
        assert found[batch, head, row].tolist() == expected + [-1] * (count - len(expected))


@pytest.mark.parametrize("at_once", [1, 5000])
def test_some_rows_at_a_time_find_the_same(at_once, monkeypatch):
    query, key = drawn(BATCH, HEADS, 131, DIM), drawn(BATCH, KEY_HEADS, 131, DIM)
    whole = hierarchical_blocks(query, key, size=4, count=3)
    monkeypatch.setattr(hierarchical_search, "SCORES_AT_ONCE", at_once)
    assert torch.equal(hierarchical_blocks(query, key, size=4, count=3), whole)


@pytest.mark.parametrize("count", [17, 40])
def test_with_as_many_blocks_as_there_are_it_is_causal_attention(count):
    query, key, value = drawn(1, HEADS, 131, DIM), drawn(1, KEY_HEADS, 131, DIM), drawn(1, KEY_HEADS, 131, 5)
    found = hierarchical_blocks(query, key, size=8, count=count)
    chosen = regard.attention(query, key, value, mask=masks.causal() & masks.blocks(found, 8))
    torch.testing.assert_close(chosen, regard.attention(query, key, value, mask=masks.causal()))


def test_a_needle_is_found_far_away():
    """A block whose keys, and those near it the less, point to where the last queries look."""
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 4096, 64), torch.randn(1, 1, 4096, 64)
    needle = torch.randn(64)
    near = (1 - (torch.arange(4096) - 1000).abs() / 500).clamp(min=0)
    key, query = key + 2 * near[:, None] * needle, query.clone()
    query[..., -64:, :] += needle
    found = hierarchical_blocks(query, key, size=16, count=8)
    assert (found[0, 0, -4:] == 1000 // 16).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_of_few_bits(dtype):
    query, key = (drawn(1, 2, 64, DIM).to(dtype) for _ in range(2))
    wide = hierarchical_blocks(query.double(), key.double(), size=4, count=3)
    assert (hierarchical_blocks(query, key, size=4, count=3) == wide).float().mean() > 0.9


def test_no_queries_and_errors():
    query = torch.randn(1, 2, 13, DIM)
    assert hierarchical_blocks(query[:, :, :0], query, size=4, count=3).shape == (1, 2, 0, 3)
    for options, message in (
        ({"size": 0, "count": 1}, "hierarchical_blocks's size is 0"),
        ({"size": 4, "count": 0}, "hierarchical_blocks's count is 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            hierarchical_blocks(query, query, **options)
    with pytest.raises(ShapeError, match=r"hierarchical_blocks has query \(1, 2, 13, 3\)"):
        hierarchical_blocks(query[..., :3], query, size=4, count=1)
