"""Similarity matrices of heads: order, groups and colours."""

import itertools
from typing import Any

import numpy
import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.plots import similarity


def like(count):
    states = torch.rand(count, 5, generator=torch.Generator().manual_seed(0))
    return states @ states.T


def image(figure) -> Any:
    (only,) = figure.axes[0].images
    return only


def names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_heads_in_the_order_that_is_given(inside, vector):
    matrix = like(4)
    figure = similarity(matrix, ["0.0", "0.1", "layer 1", "1.1"], order=[2, 0, 3, 1], title="heads")
    numpy.testing.assert_allclose(image(figure).get_array(), matrix[[2, 0, 3, 1]][:, [2, 0, 3, 1]])
    assert names(figure.axes[0].yaxis) == names(figure.axes[0].xaxis) == ["layer 1", "0.0", "1.1", "0.1"]
    assert {"similarity", "heads"} <= {*inside(figure)}
    assert vector(figure)[1] == 1


def test_groups_are_parted_and_named(inside):
    figure = similarity(like(5), list("abcde"), order=[4, 3, 2, 1, 0], groups=["one", "one", "둘", "둘", "둘"])
    axes: Any = figure.axes[0]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("둘", (4.5, 1.0)), ("one", (4.5, 3.5))]
    across = {tuple(line.get_ydata()) for line in axes.lines if tuple(line.get_xdata()) == (-0.5, 4.5)}
    assert across == {(2.5, 2.5)}
    assert {"one", "둘"} <= {*inside(figure)}
    figure.draw_without_rendering()
    bar = axes.child_axes[0].get_window_extent()
    assert all(text.get_window_extent().x1 < bar.x0 for text in axes.texts)


def test_many_small_groups_do_not_write_over_each_other(inside):
    figure = similarity(like(200), [str(number) for number in range(200)], groups=[str(n) for n in range(200)])
    inside(figure)
    boxes = sorted((text.get_window_extent().y0, text.get_window_extent().y1) for text in figure.axes[0].texts)
    assert len(boxes) > 50
    assert all(lower[1] <= upper[0] + 1 for lower, upper in itertools.pairwise(boxes))


def test_colours_of_what_has_a_sign():
    matrix = torch.tensor([[1.0, -0.5], [-0.5, 1.0]])
    assert image(similarity(matrix, ["a", "b"])).get_clim() == (-1.0, 1.0)
    assert image(similarity(matrix.abs(), ["a", "b"])).get_clim() == (0.0, 1.0)
    assert image(similarity(matrix.abs(), ["a", "b"], maximum=2.0)).get_clim() == (0.0, 2.0)
    assert image(similarity(matrix, ["a", "b"])).get_cmap().name == "RdBu_r"
    assert image(similarity(matrix.abs(), ["a", "b"])).get_cmap().name == "viridis"


def test_heads_not_named_are_said(notes, inside):
    figure = similarity(like(144), [f"{layer}.{head}" for layer in range(12) for head in range(12)], unit="1 - JS")
    assert notes(figure) == "every 3rd head is named"
    assert "1 - JS" in inside(figure)


@pytest.mark.parametrize(
    ("matrix", "settings", "error", "message"),
    [
        (torch.rand(2, 3), {}, ShapeError, r"matrix is \[2, 3\], but there are 2 names; it needs a row and"),
        (torch.rand(0, 0), {"names": []}, ShapeError, "there are 0 names; .* and at least one head"),
        (torch.rand(2, 2), {"names": "ab"}, ShapeError, "names is one text, 'ab'"),
        (torch.rand(2, 2), {"order": [0, 0]}, ConfigurationError, "order has 2 entries and 1 of them differ; it needs"),
        (torch.rand(2, 2), {"order": [0]}, ConfigurationError, "each of the 2 heads once, as numbers from 0 to 1"),
        (torch.rand(2, 2), {"groups": ["x"]}, ShapeError, "groups has 1 entries and names has 2; each head needs its"),
        (
            torch.rand(2, 2),
            {"maximum": -1},
            ConfigurationError,
            "maximum is -1; it needs to be a finite number above 0",
        ),
    ],
)
def test_what_does_not_fit(matrix, settings, error, message):
    with pytest.raises(error, match=message):
        similarity(matrix, **{"names": ["a", "b"], **settings})
