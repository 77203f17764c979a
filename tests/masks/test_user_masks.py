"""Masks defined by users: errors name the mask; tiles that interval arithmetic cannot decide are partial."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.core.grid import Blocks, Grid
from regard.core.intervals import PARTIAL
from regard.errors import MaskError
from regard.masks import Mask


@dataclass(frozen=True)
class Divides(Mask):
    """query position mod key position == 0, which fails at key position 0."""

    first: int = 0

    def keep(self, grid):
        return (grid.query + self.first) % (grid.key + self.first) == 0


@dataclass(frozen=True, repr=False)
class Returns(Mask):
    """What `keep` returns on pairs, whatever it is."""

    result: Any

    def keep(self, grid):
        return self.result

    def __repr__(self):
        return "Returns()"


@dataclass(frozen=True)
class Compares(Mask):
    """A comparison that is neither true nor false of many pairs."""

    def keep(self, grid):
        return grid.key <= 3 if grid.query > 3 else grid.key <= grid.query


KERNELS = [None, "reference", "tiled", "sdpa"]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("length", [5, 200])
def test_a_mask_that_fails_names_itself(kernel, length):
    query = rand(1, 2, length, 4)
    for mask in (Divides(), masks.causal() & Divides(), ~(Divides() | masks.causal())):
        with pytest.raises(MaskError) as caught:
            regard.attention(query, query, query, mask=mask, kernel=kernel)
        assert str(caught.value).startswith("Divides(first=0) cannot be evaluated: RuntimeError: ZeroDivision")


@pytest.mark.parametrize(
    ("result", "has"),
    [
        (torch.zeros(5, 5), r"torch.float32 of shape \(5, 5\)"),
        (torch.zeros(5, 5, dtype=torch.int64), r"torch.int64 of shape \(5, 5\)"),
        (torch.zeros(4, 5, dtype=torch.bool), r"torch.bool of shape \(4, 5\)"),
        (torch.zeros(3, dtype=torch.bool), r"torch.bool of shape \(3,\)"),
        (True, "a bool"),
        (None, "a NoneType"),
    ],
)
def test_a_wrong_result_names_the_mask(result, has):
    for mask in (Returns(result), ~Returns(result), Returns(result) & masks.causal()):
        with pytest.raises(
            MaskError, match=rf"Returns\(.*keep returned {has} for 5 queries and 5 keys; it needs a bool"
        ):
            mask.dense(5, 5)


def test_a_result_without_axes_is_for_all_pairs():
    assert Returns(torch.tensor(True)).dense(2, 3).all()
    assert Returns(torch.tensor([True, False])).dense(3, 2).tolist() == [[True, False]] * 3


def test_an_undecided_comparison_names_the_mask():
    with pytest.raises(MaskError, match=r"Compares\(\) cannot be evaluated: RuntimeError: Boolean value of Tensor"):
        Compares().dense(5, 5)


@pytest.mark.parametrize("mask", [Divides(), Compares(), Returns(None)], ids=repr)
def test_undecided_tiles_are_partial(mask):
    blocks = Blocks.from_grid(Grid.from_lengths(6, 6), 2)
    assert mask.tiles(6, 6, 2).eq(PARTIAL).all()
    assert mask.evaluate(blocks).verdicts.eq(PARTIAL).all()
    assert (masks.causal() & mask).tiles(6, 6, 2).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (~masks.causal() | mask).tiles(6, 6, 2).tolist() == [[1, 2, 2], [1, 1, 2], [1, 1, 1]]


@dataclass(frozen=True)
class Formula(Mask):
    """A formula of query and key positions."""

    formula: Callable[[Any, Any], Any]

    def keep(self, grid):
        return self.formula(grid.query, grid.key)


def test_only_tiles_with_an_undefined_operation_are_undecided():
    def tiles(formula):
        return Formula(formula).tiles(8, 8, 2, query_positions=range(-2, 6), key_positions=range(-2, 6)).tolist()

    # Keys -2 to 1 may be 0 or below, the other two columns of tiles are decided.
    assert tiles(lambda q, k: (k <= q) & (q % k == 0)) == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert tiles(lambda q, k: (k <= q) | (q // k < 1)) == [[1, 1, 2, 2]] * 2 + [[1, 1, 1, 2], [1, 1, 2, 1]]
    table = torch.ones(3, dtype=torch.bool)
    assert tiles(lambda q, k: table[k]) == [[1, 2, 1, 1]] * 4


@pytest.mark.parametrize("kernel", KERNELS)
def test_partial_tiles_are_computed_pair_by_pair(kernel):
    at = torch.arange(1, 151)
    keep = (at[:, None] % at == 0) & (at <= at[:, None])
    query = rand(1, 2, 150, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, keep)
    for mask in (Divides(1) & masks.causal(), Divides(1)):
        torch.testing.assert_close(regard.attention(query, query, query, mask=mask, kernel=kernel), expected)
    assert Divides(1).density(150, 150) == keep.double().mean().item()


def test_a_mask_mod_that_fails_names_itself():
    def divides(b, h, q, k):
        return q % k == 0

    mask = masks.from_mod(divides)
    assert mask.tiles(6, 6, 2).eq(PARTIAL).all()
    with pytest.raises(MaskError, match=r"from_mod\(divides\) cannot be evaluated: RuntimeError: ZeroDivisionError"):
        regard.attention(rand(6, 4), rand(6, 4), rand(6, 4), mask=mask)


def test_positions_beyond_a_mask_are_no_undecided_tiles():
    with pytest.raises(MaskError, match="is for 3 positions"):
        (Divides() & masks.documents([1, 1, 2])).tiles(4, 4, 2)


@dataclass(frozen=True)
class DividesNumber(Mask):
    """A number and a tensor divided by positions: 60 mod (key position + 1) == 0, and likewise for queries."""

    def keep(self, grid):
        return (60 % (grid.key + 1) == 0) & (torch.tensor(60) // (grid.query + 1) >= 12)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_numbers_divided_by_positions_are_decided_on_tiles(size):
    mask = DividesNumber()
    dense, tiles = mask.dense(21, 21), mask.tiles(21, 21, size)
    for (row, column), state in zip(
        torch.cartesian_prod(*map(torch.arange, tiles.shape)), tiles.flatten(), strict=True
    ):
        tile = dense[row * size : (row + 1) * size, column * size : (column + 1) * size]
        assert state == PARTIAL or tile.eq(bool(state)).all()
    assert size > 1 or not tiles.eq(PARTIAL).any()
    assert tiles[-1].eq(0).all()
