"""Lines between tokens: which are drawn, their opacity, and the notes on the others."""

import re

import matplotlib.colors
import numpy
import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.plots import lines
from regard.plots.colours import HEADS

WEIGHTS = [[0.5, 0.25, 0.25], [0.0, 0.9, 0.1]]


def spread(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


def drawn(figure, head=0):
    """The lines of a head as {(height of the start, height of the end): opacity}, and their colour."""
    collection = figure.axes[0].collections[head]
    found = {}
    for ends, colour in zip(collection.get_segments(), collection.get_colors(), strict=True):
        assert ends[:, 0].tolist() == [0, 1]
        assert colour[:3] == pytest.approx(matplotlib.colors.to_rgb(HEADS[head]))
        found[tuple(ends[:, 1].round(4).tolist())] = float(colour[3])
    return found


def said(figure):
    return re.sub(r"\s+", " ", figure.axes[0].get_xlabel())


def names(figure):
    left, (right,) = figure.axes[0], figure.axes[0].child_axes
    return [[label.get_text() for label in axes.get_yticklabels()] for axes in (left, right)]


def test_a_line_for_each_weight_as_opaque_as_it_is_large():
    figure = lines(WEIGHTS, ["das", "Haus"], ["the", "old", "house"])
    assert names(figure) == [["das", "Haus"], ["the", "old", "house"]]
    first, second = 0.25, 0.75
    expected = {
        (first, 0.1667): 0.5 / 0.9,
        (first, 0.5): 0.25 / 0.9,
        (first, 0.8333): 0.25 / 0.9,
        (second, 0.5): 1.0,
        (second, 0.8333): 0.1 / 0.9,
    }
    assert drawn(figure) == pytest.approx(expected)
    assert said(figure) == "full colour: 0.9"


def test_the_names_are_beside_the_ends_of_their_lines():
    figure = lines(WEIGHTS, ["das", "Haus"], ["the", "old", "house"])
    right = figure.axes[0].child_axes[0]
    assert figure.axes[0].get_yticks().tolist() == [0.25, 0.75]
    assert right.get_yticks().tolist() == pytest.approx([1 / 6, 3 / 6, 5 / 6])
    figure.draw_without_rendering()
    assert right.get_ylim() == figure.axes[0].get_ylim() == (1, 0)


def test_the_faintest_are_drawn_first():
    opacities = [*drawn(lines(spread(5, 7), list("abcde"), list("abcdefg"))).values()]
    assert opacities == sorted(opacities)


def test_thresholds_and_the_largest_of_each_query():
    tokens = ["das", "Haus"], ["the", "old", "house"]
    above = lines(WEIGHTS, *tokens, threshold=0.25)
    assert len(drawn(above)) == 4
    assert said(above) == "full colour: 0.9; weights of at least 0.25; lines have 95% of all weight"
    top = lines(WEIGHTS, *tokens, top=1)
    assert {*drawn(top)} == {(0.25, 0.1667), (0.75, 0.5)}
    assert said(top) == "full colour: 0.9; the largest of each query; lines have 70% of all weight"
    two = lines(WEIGHTS, *tokens, top=2)
    assert {*drawn(two)} == {(0.25, 0.1667), (0.25, 0.5), (0.75, 0.5), (0.75, 0.8333)}  # of equals the first
    assert "the 2 largest of each query" in said(two)


def test_a_common_maximum_makes_figures_comparable():
    figure = lines(WEIGHTS, ["das", "Haus"], ["the", "old", "house"], maximum=0.5)
    assert drawn(figure)[0.25, 0.1667] == drawn(figure)[0.75, 0.5] == 1.0
    assert said(figure) == "full colour: 0.5"


def test_heads_have_colours_dashes_and_names(inside, vector):
    figure = lines(spread(3, 4, 4), list("abcd"), list("wxyz"), heads=["2.0", "$h_1$", "머리"])
    dashes = [str(collection.get_linestyle()) for collection in figure.axes[0].collections]
    assert len(set(dashes)) == 3
    starts = [min(start % 0.25 for start, _ in drawn(figure, head)) for head in range(3)]
    assert len({round(start, 3) for start in starts}) == 3  # beside each other
    assert {"2.0", "$h_1$", "머리"} <= {*inside(figure)}
    texts, images = vector(figure)
    assert images == 0
    assert {"2.0", "$h_1$", "머리", "a", "z"} <= {*texts}


def test_heads_without_names_are_numbered(inside):
    assert {"head 0", "head 6"} <= {*inside(lines(spread(7, 2, 2), ["a", "b"], ["c", "d"]))}
    assert lines(spread(2, 2), ["a", "b"], ["c", "d"]).axes[0].get_legend() is None


@pytest.mark.parametrize("size", [(1, 1), (60, 60), (512, 512), (3, 400)])
def test_every_length_is_a_page_of_readable_names(size, inside):
    figure = lines(spread(*size), ["query"] * size[0], ["الشارع"] * size[1], top=1, title="every length")
    assert (figure.get_size_inches() <= 12).all()
    assert {"every length", "query", "الشارع"} <= {*inside(figure)}
    figure.draw_without_rendering()
    for axes in (figure.axes[0], figure.axes[0].child_axes[0]):
        boxes = sorted(label.get_window_extent().y0 for label in axes.get_yticklabels())
        assert (numpy.diff(boxes) >= 10).all()


def test_every_nth_token_is_named_and_that_is_said():
    figure = lines(spread(3, 400), list("abc"), [f"t{number}" for number in range(400)], top=1)
    assert names(figure)[1][:3] == ["t0", "t6", "t12"]
    assert said(figure).endswith("every 6th token is named")


def test_nan_has_no_line_and_is_counted():
    figure = lines([[float("nan"), 0.5], [float("inf"), 0.25]], ["a", "b"], ["c", "d"])
    assert {*drawn(figure)} == {(0.25, 0.75), (0.75, 0.75)}
    assert said(figure) == "full colour: 0.5; without a line: 2 NaN or infinite"


def test_nothing_but_zeros():
    assert drawn(lines([[0.0, 0.0]], ["a"], ["b", "c"], top=1)) == {}


@pytest.mark.parametrize(
    ("weights", "queries", "keys", "heads", "message"),
    [
        (spread(2, 3), "ab", list("cde"), None, "query_tokens is one text, 'ab'; it needs to be a list of tokens"),
        (spread(2, 3), list("ab"), "cde", None, "key_tokens is one text, 'cde'"),
        (
            spread(2, 3),
            list("abc"),
            list("de"),
            None,
            "weights is 2 × 3, but there are 3 query tokens and 2 key tokens",
        ),
        (spread(1, 2, 2, 3), list("ab"), list("cde"), None, r"weights is \[1, 2, 2, 3\]; .* for instance weights\[0\]"),
        (torch.rand(0, 3), [], list("cde"), None, r"weights is \[0, 3\]; it needs .* with at least one of each"),
        (spread(2, 2, 3), list("ab"), list("cde"), ["x"], "heads has 1 names and weights has 2 heads; each needs one"),
    ],
)
def test_weights_that_do_not_fit(weights, queries, keys, heads, message):
    with pytest.raises(ShapeError, match=message):
        lines(weights, queries, keys, heads=heads)


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        (-spread(2, 2), {}, "weights go down to -0.*; lines are for weights, which are not negative: draw scores as a"),
        (
            spread(8, 2, 2),
            {},
            r"weights has 8 heads, and 7 at most can be told apart by colour: choose .* weights\[:7\]",
        ),
        (spread(2, 2), {"threshold": -1}, "threshold is -1; it needs to be a number of at least 0"),
        (spread(2, 2), {"threshold": float("nan")}, "threshold is nan"),
        (spread(2, 2), {"top": 0}, "top is 0; it needs to be a whole number of at least 1, or None for all"),
        (spread(2, 2), {"top": 1.0}, "top is 1.0; it needs"),
        (spread(2, 2), {"maximum": 0}, "maximum is 0; it needs to be a finite number above 0"),
        (spread(200, 200), {}, "there are 40,000 lines, and 20,000 at most can be drawn: give top=1, a threshold, or"),
    ],
)
def test_settings_that_do_not_fit(weights, settings, message):
    tokens = [str(number) for number in range(weights.shape[-1])]
    with pytest.raises(ConfigurationError, match=message):
        lines(weights, tokens, tokens, **settings)
