"""Heat maps of all lengths and their differences: scales, masks, notes, labels, saved files."""

import itertools
import math
from typing import Any

import matplotlib
import numpy
import pytest
import torch
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.patches import PathPatch

from regard.errors import ConfigurationError, ShapeError
from regard.plots import Pooling, difference, heatmap, save
from regard.plots.colours import HEADS
from regard.plots.heatmaps import _rectangles
from regard.plots.labels import phrase, token_label

EVIL = ["$x_1$", "_{", "a\nb", "\u202eabc", "\x00", "x" * 1_000_000, "%&#\\", "<b>&amp;"]
SEEN = ["$x_1$", "_{", "a↵b", "U+202Eabc", "U+0000", "x" * 23 + "…", "%&#\\", "<b>&amp;"]


def spread(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


def tokens(count):
    return [f"t{number}" for number in range(count)]


def image(figure) -> Any:
    (only,) = figure.axes[0].images
    return only


@pytest.mark.parametrize("size", [(1, 1), (5, 5), (2, 300), (60, 60), (512, 512), (2000, 30)])
def test_every_size_is_one_raster_with_its_texts_on_the_page(size, inside, vector):
    figure = heatmap(spread(*size), tokens(size[0]), tokens(size[1]), title="every size")
    assert (figure.get_size_inches() <= 13).all()
    assert {"every size", "weight"} <= {*inside(figure)}
    texts, images = vector(figure)
    assert images == 1
    assert "every size" in texts
    assert any(text.endswith("t0") for text in texts)


@pytest.mark.parametrize("size", [(300, 300), (2000, 2000)])
def test_names_of_long_inputs_do_not_touch(size):
    figure = heatmap(spread(*size), tokens(size[0]), tokens(size[1]))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) >= 10
    assert all(lower.y1 <= upper.y0 + 1 for upper, lower in itertools.pairwise(boxes))


def test_pooled_maps_say_so_and_name_tokens_by_position(notes):
    figure = heatmap(torch.rand(500, 200), ["the"] * 20_000, ["Haus"] * 8_000, pooling=Pooling(size=40))
    assert notes(figure) == "each cell: max of 40 × 40 weights"
    rows, columns = (
        [label.get_text() for label in labels]
        for labels in (figure.axes[0].get_yticklabels(), figure.axes[0].get_xticklabels())
    )
    assert rows[:3] == ["0 the", "1,000 the", "2,000 the"]
    assert columns[1] == "500 Haus"
    assert figure.axes[0].get_yticks()[1] == pytest.approx(1000.5 / 40 - 0.5)


def test_every_nth_token_is_named_and_that_is_said(notes):
    assert notes(heatmap(spread(5, 200), list("abcde"), tokens(200))) == "every 3rd column is named"
    assert notes(heatmap(spread(512, 512), tokens(512), tokens(512))) == "every 8th token is named"
    assert notes(heatmap(spread(5, 5), list("abcde"), tokens(5))) == ""


@pytest.mark.parametrize(("scale", "norm", "middle"), [("log", LogNorm, 0.5), ("sqrt", PowerNorm, 0.1)])
def test_scales(scale, norm, middle, inside, notes):
    figure = heatmap([[0.0, 0.0001, 0.01, 1.0]], ["a"], list("bcde"), scale=scale)
    assert type(image(figure).norm) is norm
    coloured = image(figure).norm(image(figure).get_array())
    assert not numpy.ma.getmaskarray(coloured).any()  # a weight of 0 has a colour, and no grey
    assert coloured[0, 0] == 0
    assert coloured[0, 3] == 1
    assert coloured[0, 2] == pytest.approx(middle)
    assert f"weight ({scale} scale)" in inside(figure)
    assert notes(figure) == ("0 is the least, drawn as 0.0001" if scale == "log" else "")


def test_a_logarithmic_scale_of_one_value_or_none():
    assert image(heatmap([[0.25, 0.25]], ["a"], ["b", "c"], scale="log")).get_clim() == (0.025, 0.25)
    assert image(heatmap([[0.0, 0.0]], ["a"], ["b", "c"], scale="log")).get_clim() == (0.1, 1.0)
    assert image(heatmap([[1e-12, 1.0]], ["a"], ["b", "c"], scale="log")).get_clim() == (1e-6, 1.0)


def test_more_than_the_maximum_is_said(notes):
    assert notes(heatmap([[0.75, 0.2]], ["a"], ["b", "c"], maximum=0.5)) == "0.75 is the greatest, drawn as 0.5"


def test_the_colour_bar_has_the_unit_and_plain_numbers(vector):
    texts, _ = vector(heatmap([[-2.0, 0.5]], ["a"], ["b", "c"], unit="score"))
    assert {"score", "−2"} <= {*texts}


def test_masked_pairs_are_hatched_and_nan_is_grey(notes):
    weights = torch.tensor([[0.5, 0.0, 0.0], [float("nan"), 0.5, 0.0], [0.2, 0.3, 0.5]])
    figure = heatmap(weights, list("abc"), list("abc"), mask=torch.ones(3, 3).tril().bool())
    (hatched,) = [patch for patch in figure.axes[0].patches if isinstance(patch, PathPatch)]
    assert hatched.get_hatch()
    outside = hatched.get_path().contains_points([(x, y) for y in range(3) for x in range(3)])
    assert outside.reshape(3, 3).tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert notes(figure) == "hatched: left out by the mask; grey: 1 cell has NaN or infinity"


def test_rectangles_cover_what_is_hidden_once():
    hidden = numpy.random.default_rng(0).random((17, 13)) < 0.6
    covered = numpy.zeros(hidden.shape, int)
    for left, top, right, bottom in _rectangles(hidden):
        covered[int(top + 0.5) : int(bottom + 0.5), int(left + 0.5) : int(right + 0.5)] += 1
    assert (covered == hidden).all()
    assert len(_rectangles(numpy.ones((500, 500), bool))) == 1


def test_tokens_are_text_whatever_they_hold(vector, inside):
    figure = heatmap(spread(8, 8), EVIL, EVIL, title="$x_1$ of _{")
    inside(figure)
    texts, images = vector(figure)
    assert images == 1
    for seen in SEEN:
        assert texts.count(seen) == 2
    assert "$x_1$ of _{" in texts


@pytest.mark.parametrize(("token", "seen"), [*zip(EVIL, SEEN, strict=True)], ids=range(len(EVIL)))
def test_long_tokens_are_cut_before_they_are_looked_at(token, seen):
    assert token_label(token) == seen


def test_phrases_keep_their_spaces():
    assert phrase(" layer\t0 \u202e") == "layer 0 U+202E"
    assert phrase("word " * 1_000_000, 12) == "word word w…"


def test_titles_are_folded_and_made_visible(inside):
    figure = heatmap(spread(3, 3), list("abc"), list("abc"), title="\u202etitle\x00 " + "of many words " * 1_000_000)
    (title,) = [text for text in inside(figure) if text.startswith("U+202EtitleU+0000 of")]
    assert len(title) == 400
    assert title.endswith("…")
    assert all(len(line) <= 32 for line in title.splitlines())


def test_right_to_left_and_hangul_are_text(vector):
    texts, _ = vector(heatmap(spread(2, 2), ["الشارع", "كان"], ["동물", "길"]))
    assert {"الشارع", "كان", "동물", "길"} <= {*texts}


# Differences.


def test_a_difference_is_as_far_below_zero_as_above(inside):
    figure = difference([[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [0.0, 1.0]], ["a", "b"], ["c", "d"])
    numpy.testing.assert_allclose(image(figure).get_array(), [[0.25, -0.25], [0.5, -0.5]])
    assert image(figure).get_clim() == (-0.5, 0.5)
    assert image(figure).cmap(0.5)[:3] == pytest.approx((0.97, 0.97, 0.97), abs=0.01)
    assert "difference of weights" in inside(figure)


def test_a_difference_of_equals_and_a_common_maximum():
    assert image(difference([[1.0]], [[1.0]], ["a"], ["b"])).get_clim() == (-1.0, 1.0)
    assert image(difference([[1.0]], [[0.5]], ["a"], ["b"], maximum=2.0)).get_clim() == (-2.0, 2.0)


def test_each_is_pooled_before_they_are_subtracted():
    figure = difference([[1.0, 0.0]], [[0.0, 0.5]], ["a"], ["b", "c"], pooling=Pooling(size=(1, 2)))
    assert image(figure).get_array().tolist() == [[0.5]]


def test_differences_that_do_not_fit():
    message = r"first is \[2, 2\] and second is \[2, 3\]; a difference needs weights of one shape"
    with pytest.raises(ShapeError, match=message):
        difference(spread(2, 2), spread(2, 3), ["a", "b"], ["c", "d"])
    with pytest.raises(ConfigurationError, match="maximum is 0; it needs to be a finite number above 0"):
        difference([[1.0]], [[0.5]], ["a"], ["b"], maximum=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "cubic"}, "scale is 'cubic'; it needs to be 'linear', 'log' or 'sqrt'"),
        ({"scale": "log"}, "weights go down to -0.5, and a scale 'log' has no place below 0: use scale='linear'"),
        ({"maximum": -0.75}, "maximum is -0.75; it needs to be a finite number above -0.5"),
        ({"maximum": float("nan")}, "maximum is nan; it needs to be a finite number"),
    ],
)
def test_scales_that_do_not_fit(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        heatmap([[-0.5, 0.25]], ["a"], ["b", "c"], **settings)


# Files.


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_files_of_each_kind(ending, tmp_path, logged):
    before = {key: matplotlib.rcParams[key] for key in matplotlib.rcParams}
    for name in ("one", "other"):
        save(heatmap(spread(3, 3), ["年", "가", "b"], list("abc")), tmp_path / f"{name}.{ending}", dpi=50)
    written = (tmp_path / f"one.{ending}").read_bytes()
    assert written.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending])
    assert written == (tmp_path / f"other.{ending}").read_bytes()
    if ending == "pdf":
        assert written.count(b"/Subtype /Image") == 1
        assert b"/FontFile2" in written
    assert not logged
    assert before == {key: matplotlib.rcParams[key] for key in matplotlib.rcParams}


def test_colours_of_heads_differ_in_grey_too():
    grey = sorted(sum(w * int(c[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5))) for c in HEADS)
    assert len(set(HEADS)) == 7
    assert grey[-1] < 200  # all stand out from white


def test_cells_have_their_numbers_in_ink_that_is_seen_on_their_colour():
    weights, mask = torch.tensor([[0.0, 1.0], [0.25, math.nan]]), torch.tensor([[True, True], [True, True]])
    axes = heatmap(weights, ["a", "b"], ["c", "d"], mask=mask, annot=True).axes[0]
    assert [(text.get_text(), text.get_position(), text.get_color()) for text in axes.texts] == [
        ("0.00", (0, 0), "white"),  # viridis: dark at 0
        ("1.00", (1, 0), "black"),
        ("0.25", (0, 1), "white"),
    ]
    hidden = heatmap(weights, ["a", "b"], ["c", "d"], mask=~mask | mask.tril(), annot=True).axes[0]
    assert [text.get_text() for text in hidden.texts] == ["0.00", "0.25"]


@pytest.mark.parametrize("shape", [(23, 23), (2, 23), (1, 1)])
def test_numbers_stay_within_their_cells(shape):
    figure = heatmap(-100 * spread(*shape), tokens(shape[0]), tokens(shape[1]), annot=True)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    width = axes.get_window_extent().width / shape[1]
    assert all(text.get_window_extent().width <= width for text in axes.texts)
    assert len(axes.texts) == shape[0] * shape[1]


def test_axes_have_names_in_korean_and_notes_below_them(inside, notes):
    figure = heatmap(spread(3, 3), tokens(3), tokens(3), names=("질의", "키"), unit="가중치", maximum=0.1)
    assert {"질의", "키", "가중치"} <= {*inside(figure)}
    assert "is the greatest, drawn as 0.1" in notes(figure)
    figure.draw_without_rendering()
    (key,) = figure.axes[0].texts
    assert figure.axes[0].xaxis.label.get_window_extent().y1 <= key.get_window_extent().y0 + 1
    fonts = {key.get_fontfamily()[-1], figure.axes[0].yaxis.label.get_fontfamily()[-1]}
    assert not any("DejaVu" in font for font in fonts)


@pytest.mark.parametrize("size", [(24, 24), (600, 2)])
def test_more_cells_than_have_room_for_numbers_say_so(size):
    with pytest.raises(ConfigurationError, match=r"annot writes .* have no room for that: .* at most 23 on a side"):
        heatmap(spread(*size), tokens(size[0]), tokens(size[1]), annot=True)
