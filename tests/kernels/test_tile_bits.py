"""The bits of tiles say what the mask says of each pair, and cover each pair that exists once."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import masks
from regard.core.batched_problem import BatchedProblem
from regard.core.problem import Problem
from regard.core.score_forms import DotPairs
from regard.masks import Mask
from regard.tiles import tile_bits
from regard.tiles.tile_bits import BLOCK, TileBits, masked_pairs, packed_tiles


def problem(mask: Mask | None, queries: int, keys: int, **placed: Any) -> Problem:
    query, key = torch.zeros(2, 3, queries, 4), torch.zeros(2, 3, keys, 4)
    return Problem(DotPairs(query, key, 1.0), key, mask, **placed)


def dense(tiles: TileBits, queries: int, keys: int) -> np.ndarray:
    """(B or 1, H or 1, M, N): how often each pair is in the tiles."""
    seen = np.zeros((*tiles.bits.shape[:2], -(-queries // BLOCK) * BLOCK, -(-keys // BLOCK) * BLOCK), dtype=int)
    for block in range(len(tiles.first) - 1):
        for start, stop, number in tiles.runs[tiles.first[block] : tiles.first[block + 1]].tolist():
            for at, column in enumerate(range(start, stop, BLOCK)):
                here = np.s_[..., block * BLOCK : (block + 1) * BLOCK, column : column + BLOCK]
                if number < 0:
                    seen[here] += 1
                else:
                    words = tiles.bits[:, :, number + at]
                    seen[here] += np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little")
    return seen[..., :queries, :keys]


MASKS = [
    None,
    masks.causal(),
    masks.causal() & masks.window(before=20),
    masks.window(before=3, after=70) & ~masks.window(before=1, after=1),
    masks.strided(5),
    masks.padding(lengths=[150, 3]),
    masks.documents(torch.arange(400) // 70) & masks.causal(),
    masks.where(keep=torch.rand(3, 150, 150) < 0.2) & masks.causal(),
    masks.prefix(64) | masks.causal(),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (64, 64), (130, 150), (1, 150), (150, 70)])
def test_each_pair(mask, queries, keys):
    posed = problem(mask, queries, keys)
    try:
        expected = torch.ones(queries, keys, dtype=torch.bool) if mask is None else mask.dense(queries, keys)
        posed.keep(posed.grid())
    except ValueError:
        pytest.skip("the mask is of other lengths")
    expected = expected.expand(2, 3, queries, keys).numpy()
    for batch, tiles in packed_tiles(BatchedProblem.from_problem(posed)):
        seen = dense(tiles, queries, keys)
        assert np.array_equal(
            np.broadcast_to(seen, (len(expected[batch]), 3, queries, keys)), expected[batch].astype(int)
        )


def test_positions_of_their_own():
    posed = problem(masks.causal(), 70, 90, query_positions=torch.arange(70) * 2, key_positions=torch.arange(90) + 3)
    ((_, tiles),) = packed_tiles(BatchedProblem.from_problem(posed))
    expected = torch.arange(90) + 3 <= (torch.arange(70) * 2)[:, None]
    assert np.array_equal(dense(tiles, 70, 90)[0, 0], expected.numpy().astype(int))


def test_batches_that_see_other_tiles_are_apart():
    posed = problem(masks.padding(lengths=[8192, 64]), 8192, 8192)
    found = packed_tiles(BatchedProblem.from_problem(posed))
    assert [batch for batch, _ in found] == [slice(0, 1), slice(1, 2)]
    assert found[1][1].runs[:, 1].max() == 64


def test_only_tiles_that_the_mask_cuts_have_bits():
    assert masked_pairs(problem(None, 640, 640)) == 0
    assert masked_pairs(problem(masks.causal(), 640, 640)) == 10 * BLOCK * BLOCK


class TestRemembered:
    def test_for_the_same_mask_and_sizes(self):
        mask = masks.causal() & masks.documents(torch.arange(150) // 40)
        first = packed_tiles(BatchedProblem.from_problem(problem(mask, 150, 150)))
        assert packed_tiles(BatchedProblem.from_problem(problem(mask, 150, 150))) is first
        assert packed_tiles(BatchedProblem.from_problem(problem(mask, 149, 150))) is not first

    def test_not_where_they_are_many(self, monkeypatch):
        monkeypatch.setattr(tile_bits, "MAX_MEMO_BYTES", 10)
        mask = masks.causal() & masks.documents(torch.arange(150) // 40)
        assert packed_tiles(BatchedProblem.from_problem(problem(mask, 150, 150))) is not packed_tiles(
            BatchedProblem.from_problem(problem(mask, 150, 150))
        )

    def test_what_is_written_into_the_mask_is_seen(self):
        ids = torch.zeros(150, dtype=torch.int64)
        mask = masks.documents(ids)
        before = packed_tiles(BatchedProblem.from_problem(problem(mask, 150, 150)))[0][1]
        ids[100:] = 1
        after = packed_tiles(BatchedProblem.from_problem(problem(mask, 150, 150)))[0][1]
        assert (before.runs[:, 2] == -1).all()
        assert (after.runs[:, 2] >= 0).any()
