"""Alignments with gold links: marks, outlines, the caption, and words without a link."""

from typing import Any

import numpy
import pytest
from matplotlib.collections import PatchCollection

from regard.errors import ConfigurationError, ShapeError
from regard.heads import SentenceLinks, alignment_error_rate
from regard.plots import alignment

SOURCE = ["das", "alte", "Haus", "da"]
TARGET = ["the", "old", "house"]
LINKS = [(0, 0), (1, 1), (2, 1)]
GOLD = SentenceLinks(sure=frozenset({(0, 0), (2, 2)}), possible=frozenset({(0, 0), (1, 1), (2, 2)}))


def marks(figure):
    """The drawn links, by the kind of mark."""
    return {
        line.get_marker(): [tuple(point) for point in line.get_xydata().round().astype(int).tolist()]
        for line in figure.axes[0].lines
    }


def outlines(figure):
    """The links with a square around them, by its label."""
    return {
        squares.get_label(): sorted(
            tuple(path.get_extents().get_points().mean(0).round().astype(int).tolist()) for path in squares.get_paths()
        )
        for squares in figure.axes[0].collections
        if isinstance(squares, PatchCollection) and not str(squares.get_label()).startswith("_")
    }


def labels(axis):
    return {label.get_text(): label.get_color() for label in axis.get_ticklabels()}


def test_links_with_gold_beside_them(inside, vector):
    figure = alignment(LINKS, SOURCE, TARGET, gold=GOLD, title="title")
    assert marks(figure) == {"o": [(0, 0), (1, 1)], "X": [(2, 1)]}
    assert outlines(figure) == {"sure link": [(0, 0), (2, 2)], "possible link": [(1, 1)]}
    axes: Any = figure.axes[0]
    dashed = {squares.get_label(): squares.get_linestyle()[0][1] is not None for squares in axes.collections}
    assert not dashed["sure link"]
    assert dashed["possible link"]
    legend = {"sure link", "possible link", "link", "link that is not possible", "∅  word without a link"}
    assert legend | {"title"} <= {*inside(figure)}
    texts, images = vector(figure)
    assert images == 0
    assert {*SOURCE, *TARGET} <= {*texts}


def test_words_without_a_link_are_grey_and_marked():
    figure = alignment(LINKS, SOURCE, TARGET)
    assert labels(figure.axes[0].xaxis) == {"das": "black", "alte": "black", "Haus": "black", "da": "0.55"}
    assert labels(figure.axes[0].yaxis) == {"the": "black", "old": "black", "house": "0.55"}
    axes: Any = figure.axes[0]
    signs = [(text.get_text(), text.xy) for text in axes.texts]
    assert signs == [("∅", (3, 2.5)), ("∅", (3.5, 2))]
    assert marks(figure) == {"o": LINKS}
    whole: Any = alignment([(0, 0)], ["a"], ["b"]).axes[0]
    assert not whole.texts
    assert [text.get_text() for text in whole.get_legend().get_texts()] == ["link"]


def test_the_caption_has_the_rates(notes):
    rate = alignment_error_rate([LINKS], [GOLD.sure], [GOLD.possible])
    assert rate == pytest.approx(1 - (1 + 2) / (3 + 2))
    figure = alignment(LINKS, SOURCE, TARGET, gold=GOLD, error_rate=rate)
    assert notes(figure) == "AER 40.0%; precision 66.7% (2 of 3); recall 50.0% (1 of 2)"
    assert notes(alignment(LINKS, SOURCE, TARGET, gold=GOLD)) == "precision 66.7% (2 of 3); recall 50.0% (1 of 2)"
    assert notes(alignment(LINKS, SOURCE, TARGET)) == ""
    assert notes(alignment([], SOURCE, TARGET, gold=GOLD)) == "no precision: no links; recall 0.0% (0 of 2)"


def test_what_is_sure_is_possible_too(notes):
    gold = SentenceLinks(sure=frozenset({(0, 0)}), possible=frozenset())
    assert notes(alignment([(0, 0)], SOURCE, TARGET, gold=gold)) == "precision 100.0% (1 of 1); recall 100.0% (1 of 1)"


def test_weights_are_one_raster_below_the_links(vector, notes):
    weights = numpy.random.default_rng(0).random((3, 4))
    weights[1, 1] = float("nan")
    figure = alignment(LINKS, SOURCE, TARGET, weights=weights, gold=GOLD)
    (image,) = figure.axes[0].images
    shown = numpy.ma.filled(numpy.ma.asarray(image.get_array()), numpy.nan)
    numpy.testing.assert_array_equal(shown, weights)
    assert vector(figure)[1] == 1
    assert notes(figure).startswith("grey: 1 cell has NaN or infinity; precision")
    assert all(line.get_zorder() > image.get_zorder() for line in figure.axes[0].lines)


@pytest.mark.parametrize("size", [(1, 1), (40, 25), (200, 200)])
def test_every_length_is_on_the_page(size, inside):
    source, target = (["단어"] * count for count in size)
    figure = alignment([(0, 0)], source, target, gold=SentenceLinks(frozenset({(0, 0)}), frozenset()))
    assert (figure.get_size_inches() <= 13).all()
    inside(figure)


@pytest.mark.parametrize(
    ("links", "source", "target", "message"),
    [
        (
            [(0, 3)],
            SOURCE,
            TARGET,
            r"links has \(0, 3\), but there are 4 source words and 3 target words, counted from 0",
        ),
        ([(2, 3)], SOURCE, TARGET, r"counted from 0: a link has its source word first"),
        ([(-1, 0)], SOURCE, TARGET, r"links has \(-1, 0\)"),
        ([], "das", TARGET, "source is one text, 'das'; it needs to be a list of tokens"),
        ([], SOURCE, [], "target has 0 words; an alignment needs at least one word on each side"),
        ([], ["a"] * 201, TARGET, "source has 201 words; .* a page holds 200 at most: draw longer texts as a heatmap"),
    ],
)
def test_links_that_do_not_fit(links, source, target, message):
    with pytest.raises(ShapeError, match=message):
        alignment(links, source, target)


@pytest.mark.parametrize(
    ("links", "settings", "message"),
    [
        ([(0, 1, 2)], {}, r"links has \(0, 1, 2\); a link is \(source word, target word\), counted from 0"),
        (["0-0"], {}, "links has '0-0'; a link is"),
        ([3], {}, "links has 3; a link is"),
        ([(0.0, 1.0)], {}, r"links has \(0.0, 1.0\); a link is"),
        (
            [],
            {"gold": [(0, 0)]},
            "gold is a list; it needs links as gold.sure and gold.possible, as regard.heads",
        ),
        ([], {"error_rate": 40.0}, "error_rate is 40.0; it needs to be in 0..1, 0 where all is right"),
        ([], {"weights": -numpy.ones((3, 4))}, "weights go down to -1; weights are not negative"),
    ],
)
def test_what_is_no_link_or_rate(links, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        alignment(links, SOURCE, TARGET, **settings)


def test_gold_and_weights_that_do_not_fit():
    with pytest.raises(ShapeError, match=r"gold.sure has \(9, 0\), but there are 4 source words"):
        alignment([], SOURCE, TARGET, gold=SentenceLinks(frozenset({(9, 0)}), frozenset()))
    with pytest.raises(ShapeError, match="weights is 4 × 3, but there are 3 rows and 4 columns; .* transpose it"):
        alignment([], SOURCE, TARGET, weights=numpy.ones((4, 3)))
