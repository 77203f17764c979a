import pytest
import torch

from regard.core.grid import Grid, broadcast_together
from regard.errors import ShapeError


def test_positions_of_a_grid():
    grid = Grid.from_lengths(2, 5)
    assert grid.query.tolist() == [[3], [4]]
    assert grid.key.tolist() == [[0, 1, 2, 3, 4]]
    assert Grid.from_lengths(3, 1).query.flatten().tolist() == [-2, -1, 0]
    assert Grid.from_lengths(2, 3, key_positions=torch.tensor([5, 9, 7])).query.flatten().tolist() == [9, 7]


def test_positions_of_a_tile():
    tile = Grid.from_lengths(4, 6).tile(slice(1, 3), slice(2, None))
    assert tile.query.tolist() == [[3], [4]]
    assert tile.key.tolist() == [[2, 3, 4, 5]]


def test_shapes():
    assert Grid.from_lengths(4, 6).shape == (4, 6)
    assert Grid.from_lengths(4, 6).tile(slice(1, 3), slice(2, 99)).shape == (2, 4)
    assert Grid.from_lengths(0, 6).shape == (0, 6)


def test_functions_of_positions():
    grid = Grid.from_lengths(2, 5).tile(slice(None), slice(1, 4))
    assert grid.by_query(lambda at: at * 2).tolist() == [[6], [8]]
    assert grid.by_key(lambda at: at > 1).tolist() == [[False, True, True]]
    per_batch = grid.by_key(lambda at: torch.stack([at, at + 1]))
    assert per_batch.tolist() == [[[[1, 2, 3]]], [[[2, 3, 4]]]]
    small = Grid.from_lengths(1, 2, query_positions=torch.tensor([0], dtype=torch.uint8))
    assert (small.query - small.key).tolist() == [[0, -1]]


def test_a_batch_gets_the_axis_of_heads():
    at = torch.zeros(2, 4, dtype=torch.int64)
    assert Grid.from_lengths(4, 6, query_positions=at).query.shape == (2, 1, 4, 1)
    assert Grid.from_lengths(4, 6, query_positions=at, heads=False).query.shape == (2, 4, 1)
    assert Grid.from_lengths(4, 6, key_positions=at[:, :1].expand(2, 6)).key.shape == (2, 1, 1, 6)


def test_cut():
    pairs = torch.randn(3, 4, 6)
    grid = Grid.from_lengths(4, 6).tile(slice(1, 3), slice(2, 5))
    assert grid.cut(pairs).equal(pairs[:, 1:3, 2:5])
    assert grid.cut(pairs[:, :1]).equal(pairs[:, :1, 2:5])
    assert grid.cut(pairs[..., :1]).equal(pairs[:, 1:3, :1])


@pytest.mark.parametrize("shape", [(3, 6), (4, 5), (2, 4, 7)])
def test_cut_of_another_size(shape):
    with pytest.raises(ShapeError, match="its last two axes need the sizes 4 or 1, and 6 or 1"):
        Grid.from_lengths(4, 6).cut(torch.zeros(shape))


def test_broadcast_together():
    assert broadcast_together(torch.zeros(2, 1, 5), torch.zeros(3, 1))
    assert not broadcast_together(torch.zeros(2, 1, 5), torch.zeros(3, 1, 5))
