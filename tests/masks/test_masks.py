"""Single masks as bool tensors."""

import pytest
import torch

import regard
from regard import masks
from regard.core.grid import Grid
from regard.errors import MaskError, ShapeError


def rows(keep: torch.Tensor) -> list[str]:
    return ["".join("x" if kept else "." for kept in row) for row in keep.tolist()]


class TestCausal:
    def test_aligned_to_the_end(self):
        assert rows(masks.causal().dense(3, 3)) == ["x..", "xx.", "xxx"]
        assert rows(masks.causal().dense(2, 4)) == ["xxx.", "xxxx"]
        assert rows(masks.causal().dense(4, 2)) == ["..", "..", "x.", "xx"]
        assert masks.causal().dense(0, 3).shape == (0, 3)
        assert masks.causal().dense(3, 0).shape == (3, 0)

    def test_positions(self):
        at = torch.tensor([1, 0, 3])
        assert rows(masks.causal().dense(3, 4, query_positions=at)) == ["xx..", "x...", "xxxx"]
        assert rows(masks.causal().dense(2, 3, key_positions=torch.tensor([7, 5, 6]))) == [".x.", ".xx"]

    def test_positions_per_batch(self):
        at = torch.tensor([[0], [2]])
        dense = masks.causal().dense(1, 3, query_positions=at)
        assert dense.shape == (2, 1, 1, 3)
        assert [rows(batch[0]) for batch in dense] == [["x.."], ["xxx"]]


class TestPadding:
    def test_lengths(self):
        dense = masks.padding(lengths=[0, 2, 5]).dense(2, 3)
        assert dense.shape == (3, 1, 2, 3)
        assert [rows(batch[0])[0] for batch in dense] == ["...", "xx.", "xxx"]

    def test_any_batch(self):
        lengths = torch.tensor([[1, 2], [3, 0]])
        dense = masks.padding(lengths=lengths).dense(1, 3)
        assert dense.shape == (2, 2, 1, 1, 3)
        assert dense.sum(-1).squeeze().equal(lengths)
        assert rows(masks.padding(lengths=torch.tensor(2)).dense(1, 3)) == ["xx."]
        assert masks.padding(lengths=[]).dense(1, 3).shape == (0, 1, 1, 3)

    def test_without_heads(self):
        assert masks.padding(lengths=[1, 2]).keep(Grid.from_lengths(2, 3, heads=False)).shape == (2, 1, 3)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_whole_numbers(self, dtype):
        assert masks.padding(lengths=torch.tensor([2], dtype=dtype)).dense(1, 3).sum() == 2

    @pytest.mark.parametrize(
        ("lengths", "match"),
        [
            ([1.0, 2.0], "padding needs whole numbers as lengths; these are torch.float32"),
            (torch.tensor([True, False]), r"these are torch.bool.*masks.where\(keep=tensor\[..., None, None, :\]\)"),
            ([3, -1], "padding needs lengths of at least 0; the smallest here is -1"),
            (["3"], r"padding needs whole numbers as lengths; it was given \['3'\]"),
            (None, "it was given None"),
            ([[1], [1, 2]], "it was given"),
        ],
    )
    def test_what_is_no_length(self, lengths, match):
        with pytest.raises(MaskError, match=match):
            masks.padding(lengths=lengths)


class TestWhere:
    def test_polarity(self):
        pairs = torch.tensor([[True, False], [False, False]])
        assert masks.where(keep=pairs).dense(2, 2).equal(pairs)
        assert masks.where(ignore=pairs).dense(2, 2).equal(~pairs)

    @pytest.mark.parametrize(
        ("shape", "dense"),
        [
            ((3,), (2, 3)),
            ((), (2, 3)),
            ((1, 3), (2, 3)),
            ((2, 1), (2, 3)),
            ((2, 3), (2, 3)),
            ((5, 2, 3), (5, 2, 3)),
            ((4, 1, 1, 3), (4, 1, 2, 3)),
            ((4, 5, 2, 1), (4, 5, 2, 3)),
        ],
    )
    def test_shapes(self, shape, dense):
        keep = torch.rand(shape) < 0.5
        assert masks.where(keep=keep).dense(2, 3).equal(keep.expand(dense))

    def test_a_tile(self):
        keep = torch.rand(2, 1, 5, 7) < 0.5
        grid = Grid.from_lengths(5, 7).tile(slice(1, 3), slice(2, 7))
        assert masks.where(keep=keep).evaluate(grid).equal(keep[..., 1:3, 2:7])
        assert (
            (masks.causal() & masks.where(keep=keep))
            .evaluate(grid)
            .equal((masks.causal() & masks.where(keep=keep)).dense(5, 7)[..., 1:3, 2:7])
        )

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({}, "exactly one of keep .* and ignore .*; it was given neither"),
            ({"keep": torch.ones(2).bool(), "ignore": torch.ones(2).bool()}, "it was given both"),
            ({"keep": torch.ones(2)}, r"keep needs a bool tensor; it is torch.float32.*keep=tensor.bool\(\)"),
            ({"ignore": torch.ones(2).int()}, r"ignore needs a bool tensor; it is torch.int32.*ignore=tensor.bool\(\)"),
            ({"keep": [True]}, "keep needs a bool tensor; it is a list"),
        ],
    )
    def test_refused(self, arguments, match):
        with pytest.raises(MaskError, match=match):
            masks.where(**arguments)

    def test_of_other_lengths(self):
        with pytest.raises(ShapeError, match=r"the shape \(2, 3\), but there are 2 queries and 4 keys"):
            masks.where(keep=torch.ones(2, 3).bool()).dense(2, 4)


class TestLargeNumbers:
    """Positions are int64: greater numbers are refused, the greatest of them work in every kernel."""

    @pytest.mark.parametrize("number", [2**63, 10**30])
    @pytest.mark.parametrize(
        "make",
        [
            lambda n: masks.window(n),
            lambda n: masks.window(after=n),
            lambda n: masks.prefix(n),
            lambda n: masks.strided(n),
            lambda n: masks.dilated(n, 1),
            lambda n: masks.dilated(1, n),
            lambda n: masks.dilated(0, 1, n),
            lambda n: masks.fixed(n, 1),
        ],
    )
    def test_too_large(self, make, number):
        with pytest.raises(MaskError, match=rf"is {number}; it needs at most 2\*\*63 - 1, as positions are 64-bit"):
            make(number)

    def test_a_product_that_is_too_large(self):
        with pytest.raises(MaskError, match=r"step times before and after is 9223372036854775808; it needs at most"):
            masks.dilated(2**62, 2)

    @pytest.mark.parametrize("kernel", [None, "reference", "tiled", "sdpa"])
    def test_largest(self, kernel):
        query = torch.randn(1, 1, 150, 4)
        for mask in (masks.window(2**63 - 1, 2**63 - 1), masks.prefix(2**63 - 1), masks.fixed(2**63 - 1, 0)):
            everything = regard.attention(query, query, query, mask=mask, kernel=kernel)
            torch.testing.assert_close(everything, regard.attention(query, query, query))


def test_padding_by_place():
    assert masks.padding([1, 3]).dense(1, 3).equal(masks.padding(lengths=torch.tensor([1, 3])).dense(1, 3))
    with pytest.raises(MaskError, match="padding needs lengths of at least 0; the smallest here is -1"):
        masks.padding([-1])
