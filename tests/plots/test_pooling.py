"""Weights pooled for a figure: the values of cells, and their tokens."""

import numpy
import pytest
import torch

import regard
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.plots import Pooling, heatmap
from regard.plots.pooling import CellAxis, pool_weights


def tokens(count):
    return [f"t{number}" for number in range(count)]


@pytest.mark.parametrize("reduce", ["max", "mean", "sum"])
@pytest.mark.parametrize(("shape", "size"), [((7, 11), (3, 4)), ((7, 11), (1, 2)), ((13, 5), (13, 5)), ((1, 1), 3)])
def test_each_cell_is_reduced(reduce, shape, size):
    weights = numpy.random.default_rng(0).random(shape)
    values = pool_weights(weights, tokens(shape[0]), tokens(shape[1]), pooling=Pooling(reduce, size)).values
    height, width = size if isinstance(size, tuple) else (size, size)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            cell = weights[row * height : (row + 1) * height, column * width : (column + 1) * width]
            assert values[row, column] == pytest.approx(getattr(cell, reduce)())
    assert values.shape == (-(-shape[0] // height), -(-shape[1] // width))


def test_long_sides_are_pooled_and_short_ones_are_not():
    weights = torch.zeros(1025, 3)
    weights[1024, 2] = 1.0
    shown = pool_weights(weights, tokens(1025), tokens(3))
    assert shown.values.shape == (342, 3)
    assert shown.values[341, 2] == 1.0
    assert shown.values.sum() == 1.0
    assert shown.pooling_note == "each cell: max of 3 × 1 weights"
    assert pool_weights(weights[:512], tokens(512), tokens(3)).pooling_note == ""


def test_blocks_of_rows_make_the_same_cells(monkeypatch):
    weights = numpy.random.default_rng(1).random((23, 9))
    whole = pool_weights(weights, tokens(23), tokens(9), mask=weights > 0.5, pooling=Pooling("mean", size=(4, 2)))
    monkeypatch.setattr("regard.plots.pooling._AT_ONCE", 1)
    parts = pool_weights(weights, tokens(23), tokens(9), mask=weights > 0.5, pooling=Pooling("mean", size=(4, 2)))
    numpy.testing.assert_array_equal(parts.values, whole.values)
    numpy.testing.assert_array_equal(parts.hidden, whole.hidden)


def test_what_a_lens_has_pooled():
    """The cells of the lens, and the place of each token in them."""
    lens, weights = regard.lenses.Pooled((3, 4), reduce="sum"), regard.lenses.Weights()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 8, generator=generator) for n in (7, 11))
    view = regard.observe(q, k, k, lens, weights)
    shown = pool_weights(view[lens], tokens(7), tokens(11), pooling=Pooling("sum"))
    whole = view[weights].double().numpy()
    for row in range(3):
        for column in range(4):
            down, across = (slice(*side.edges[c : c + 2]) for side, c in ((shown.down, row), (shown.across, column)))
            assert shown.values[row, column] == pytest.approx(whole[down, across].sum(), abs=1e-6)
    assert shown.pooling_note == "each cell: sum of 2–3 × 2–3 weights"


def test_a_level_of_an_atlas():
    shown = pool_weights(torch.rand(3, 2), tokens(250), tokens(196), pooling=Pooling(size=98))
    assert shown.pooling_note == "each cell: max of 98 × 98 weights"
    assert shown.down.edges.tolist() == [0, 98, 196, 250]


def test_where_tokens_lie():
    side = CellAxis.uniform(tokens(10), 4)
    assert [side.place(position) for position in (0, 3, 4, 8, 9)] == pytest.approx([-0.375, 0.375, 0.625, 1.75, 2.25])
    assert [CellAxis.uniform(tokens(3)).place(position) for position in range(3)] == [0, 1, 2]


def test_masked_pairs_count_as_nothing():
    weights = [[0.5, float("nan"), 0.25], [0.1, 9.0, 9.0]]
    exists = [[True, False, True], [True, False, False]]
    shown = pool_weights(weights, tokens(2), tokens(3), mask=exists, pooling=Pooling("sum", size=(1, 2)))
    assert shown.values.tolist() == [[0.5, 0.25], [0.1, None]]
    assert shown.hidden.tolist() == [[False, False], [False, True]]
    assert shown.notes == ["each cell: sum of 1 × 2 weights", "hatched: left out by the mask"]


def test_nan_makes_its_cell_grey_and_is_said():
    shown = pool_weights([[0.5, float("nan"), 0.25, float("inf")]], tokens(1), tokens(4), pooling=Pooling(size=(1, 2)))
    assert shown.values.mask.tolist() == [[True, True]]
    assert shown.notes[-1] == "grey: 2 cells have NaN or infinity"


@pytest.mark.parametrize(
    ("weights", "shape", "cells", "message"),
    [
        (torch.rand(3, 4), (5, 9), None, "weights is 3 × 4, but there are 5 rows and 9 columns; it needs a row per"),
        (
            *(torch.rand(3, 4), (500, 900), Pooling(size=98)),
            r"weights is 3 × 4; 500 rows and 900 columns in cells of 98 × 98 are 6 × 10: give these, or all 500 × 900",
        ),
        (torch.rand(3, 4), (5, 2), Pooling(), "so many cells cannot have a token each of 5 rows and 2 columns"),
        (torch.rand(0, 4), (5, 9), Pooling(), "weights is 0 × 4: so many cells cannot"),
        (torch.rand(0, 0), (0, 0), Pooling(), "weights is 0 × 0: there is nothing to draw"),
        (
            [[1.0], [1.0, 2.0]],
            (2, 2),
            None,
            "weights needs to be a tensor or rectangular array of real numbers; .* list",
        ),
        (torch.ones(2, 2) * 1j, (2, 2), None, "array of real numbers; it is a Tensor"),
    ],
)
def test_weights_that_fit_neither_tokens_nor_cells(weights, shape, cells, message):
    with pytest.raises(ShapeError, match=message):
        heatmap(weights, tokens(shape[0]), tokens(shape[1]), pooling=cells)


def test_masks_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"mask is \[2, 3\] and weights is \[2, 2\]; a mask needs a place for each"):
        heatmap(torch.rand(2, 2), ["a", "b"], ["c", "d"], mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(DtypeError, match=r"mask is torch.float32; it needs to be bool, True where a query may attend"):
        heatmap(torch.rand(2, 2), ["a", "b"], ["c", "d"], mask=torch.ones(2, 2))


def test_arrays_of_every_kind_are_read_as_they_are(tmp_path):
    weights = numpy.random.default_rng(0).random((3, 4))
    weights.tofile(tmp_path / "weights")
    for same in (
        weights[::-1, ::-1][::-1, ::-1],
        numpy.flip(numpy.flip(weights).copy()),
        weights.astype(">f8"),
        numpy.memmap(tmp_path / "weights", numpy.float64, "r", shape=(3, 4)),
        weights.tolist(),
        torch.tensor(weights, requires_grad=True),
    ):
        numpy.testing.assert_array_equal(pool_weights(same, tokens(3), tokens(4)).values, weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduce": "min"}, "Pooling needs reduce as 'max', 'mean' or 'sum'; it is 'min'"),
        ({"size": 0}, r"Pooling needs size as a whole number of at least 1, .* it is \(0, 0\)"),
        ({"size": (1, 2, 3)}, r"or two of them for rows and columns; it is \(1, 2, 3\)"),
        ({"size": 1.5}, r"it is \(1.5, 1.5\)"),
        ({"size": True}, r"it is \(True, True\)"),
    ],
)
def test_cells_that_are_none(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Pooling(**settings)
