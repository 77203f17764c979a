"""Heat maps with awkward tokens and sizes: labels, visible characters, fonts."""

import itertools
import subprocess
import sys
import warnings

import matplotlib
import numpy
import pytest
import torch
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font

from regard.errors import MissingExtra, ShapeError
from regard.plots import heatmap, labels
from regard.plots.labels import visible

KOREAN = list("2020년 3월 14일 토요일")
ISO = [*"2020-03-14", "</s>"]


def spread(rows, columns):
    return torch.rand(rows, columns).softmax(-1)


def names(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def shown(figure):
    """The values of a figure's cells, as a masked array."""
    return numpy.ma.asarray(figure.axes[0].images[0].get_array())


def picture_of(text, family):
    """The pixels of a figure with only this text."""
    figure = Figure(figsize=(2, 1))
    figure.text(0.2, 0.4, text, fontfamily=family, fontsize=20)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())


def test_rows_go_down_and_columns_along_the_top():
    figure = heatmap(spread(11, 16), ISO, KOREAN)
    axes = figure.axes[0]
    assert names(axes.yaxis) == ISO
    assert names(axes.xaxis) == [visible(token) for token in KOREAN]
    assert names(axes.xaxis)[5] == "␣"
    low, high = axes.get_ylim()
    assert low > high  # the first row is on top
    assert axes.xaxis.get_tick_params()["labeltop"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_every_dtype(dtype):
    weights = torch.tensor([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    numpy.testing.assert_array_equal(shown(heatmap(weights, ["a", "b"], list("abc"))), weights.detach().double())


def test_arrays_and_lists():
    weights = [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]
    for same in (weights, numpy.array(weights), numpy.array(weights, dtype=numpy.float32)):
        numpy.testing.assert_array_equal(shown(heatmap(same, list("abc"), list("de"))), weights)


def test_nan_and_infinity_are_grey():
    figure = heatmap([[0.5, float("nan")], [float("inf"), 0.25]], ["a", "b"], ["c", "d"])
    assert shown(figure).mask.tolist() == [[False, True], [True, False]]
    image = figure.axes[0].images[0]
    assert image.get_clim() == (0.0, 0.5)
    assert image.cmap(numpy.ma.masked_all(1))[0, :3] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("weights", "limits"),
    [
        ([[0.5, 0.2]], (0.0, 0.5)),
        ([[0.0, 0.0]], (0.0, 1.0)),
        ([[-2.0, 3.0]], (-2.0, 3.0)),
        ([[float("nan"), float("nan")]], (0.0, 1.0)),
    ],
)
def test_the_range_of_the_colours(weights, limits):
    assert heatmap(weights, ["a"], ["b", "c"]).axes[0].images[0].get_clim() == limits


def test_a_common_maximum_makes_pictures_comparable():
    assert heatmap([[0.5, 0.2]], ["a"], ["b", "c"], maximum=1.0).axes[0].images[0].get_clim() == (0.0, 1.0)


def test_there_is_a_colour_bar_and_a_title():
    figure = heatmap(spread(2, 3), ["a", "b"], list("cde"), title="$5 → 5$")
    assert figure.axes[0].get_title() == "$5 → 5$"
    assert len(figure.axes[0].child_axes) == 1


@pytest.mark.parametrize("size", [(1, 1), (5, 5), (11, 16), (60, 60), (5, 200), (200, 5), (150, 150)])
def test_every_size_makes_a_page_of_readable_names(size):
    rows, columns = size
    figure = heatmap(
        spread(*size), [f"row{i}" for i in range(rows)], [f"col{i}" for i in range(columns)], title="title"
    )
    figure.draw_without_rendering()
    assert (figure.get_size_inches() <= 13).all()
    axes = figure.axes[0]
    for axis, lengths in ((axes.yaxis, "height"), (axes.xaxis, "width")):
        labels = axis.get_ticklabels()
        assert min(float(label.get_fontsize()) for label in labels) >= 7
        boxes = [label.get_window_extent() for label in labels]
        assert all(figure.bbox.containsx(b.x0 + 1) and figure.bbox.containsx(b.x1 - 1) for b in boxes)
        assert all(figure.bbox.containsy(b.y0 + 1) and figure.bbox.containsy(b.y1 - 1) for b in boxes)
        if len(boxes) > 1 and labels[0].get_rotation() != 45:  # slanted names overlap as boxes only
            starts = sorted((b.x0, b.x1) if lengths == "width" else (b.y0, b.y1) for b in boxes)
            assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(starts))


@pytest.mark.parametrize(("size", "square"), [((5, 5), True), ((11, 40), True), ((60, 60), True), ((5, 200), False)])
def test_cells_are_square_where_names_allow(size, square):
    axes = heatmap(spread(*size), ["r"] * size[0], ["c"] * size[1]).axes[0]
    assert (axes.get_aspect() == 1) == square


def test_many_tokens_are_named_in_part():
    figure = heatmap(spread(5, 200), list("abcde"), [str(i) for i in range(200)])
    assert names(figure.axes[0].yaxis) == list("abcde")
    assert names(figure.axes[0].xaxis)[:3] == ["0", "3", "6"]


def test_long_column_names_are_turned_and_single_letters_are_not():
    def rotation(columns):
        return heatmap(spread(2, len(columns)), ["a", "b"], columns).axes[0].get_xticklabels()[0].get_rotation()

    assert rotation(KOREAN) == 0
    assert rotation(["Donnerstag", "der", "neunte"]) == 45
    assert rotation(["Donnerstag"] * 40) == 90


def test_very_long_tokens_are_cut():
    assert names(heatmap([[1.0]], ["x" * 100], ["y"]).axes[0].yaxis) == ["x" * 23 + "…"]


def test_a_dollar_is_no_formula():
    figure = heatmap(spread(1, 3), ["$"], [r"$\frac$", "$x$", "_{"])
    figure.draw_without_rendering()
    assert names(figure.axes[0].xaxis) == [r"$\frac$", "$x$", "_{"]
    assert not any(label.get_parse_math() for label in figure.axes[0].get_xticklabels())


@pytest.mark.parametrize(
    ("token", "seen"),
    [
        *[("a", "a"), ("", ""), ("▁the", "▁the"), ("e\u0301", "e\u0301")],
        *[(" ", "␣"), (" b", "␣b"), ("\u00a0", "␣"), ("\n", "↵"), ("\t", "⇥")],
        *[("\u0301", "◌\u0301"), ("\x00", "U+0000"), ("\ue000", "U+E000")],
    ],
)
def test_tokens_are_made_visible(token, seen):
    assert visible(token) == seen


# Fonts.


def test_hangul_and_chinese_characters_are_drawn():
    chosen = labels.font_families("가年")
    boxes = picture_of("\ue000\ue000", [*chosen, "Last Resort High-Efficiency"])
    missing = picture_of("가年", ["Last Resort High-Efficiency"])
    drawn = picture_of("가年", chosen)
    assert (drawn != boxes).any()
    assert (drawn != missing).any()
    assert (picture_of("가가", chosen) != picture_of("나나", chosen)).any()  # each its own glyph


def test_each_character_is_in_a_font_of_its_picture():
    figure = heatmap(spread(11, 16), ISO, KOREAN)
    for label in figure.axes[0].get_xticklabels():
        drawn = set()
        for family in label.get_fontfamily():
            drawn |= FT2Font(findfont(FontProperties(family=[family]))).get_charmap().keys()
        assert {ord(character) for character in label.get_text()} <= drawn


def test_latin_text_keeps_the_font_of_the_user():
    assert labels.font_families("Straße, ελληνικά, українська") == matplotlib.rcParams["font.family"]
    with matplotlib.rc_context({"font.family": ["DejaVu Serif"]}):
        assert labels.font_families("abc") == ["DejaVu Serif"]
        assert labels.font_families("가")[0] == "DejaVu Serif"


def test_the_font_that_draws_most_comes_first(monkeypatch):
    some = {
        "few": frozenset(map(ord, "가")),
        "most": frozenset(map(ord, "나다")),
        "as many": frozenset(map(ord, "나다")),
    }
    monkeypatch.setattr(labels, "_candidates", lambda manager: some)
    assert labels.font_families("가나다")[-2:] == ["most", "few"]
    assert labels.font_families("나")[-1:] == ["most"]


def test_an_installed_font_goes_before_a_packaged_one():
    installed = [font.name for font in font_manager.fontManager.ttflist if labels._is_plain(font)]
    labels.font_families("가")
    order = list(labels._candidates(font_manager))
    assert order[-1] == "NanumGothic" or "NanumGothic" in installed
    assert order[0] in installed


def test_a_character_without_a_font_is_named_with_the_mend(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "_candidates", lambda manager: {})
    message = r"no font has 년 \(U\+B144\) 월 \(U\+C6D4\): boxes are drawn instead. Install a font .* Noto Sans CJK"
    with pytest.warns(UserWarning, match=message) as caught:
        figure = heatmap(spread(1, 3), ["a"], ["년", "월", "b"])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    figure.savefig(tmp_path / "boxes.png")  # and drawing it does not warn again


def test_many_characters_without_a_font_are_counted(monkeypatch):
    monkeypatch.setattr(labels, "_candidates", lambda manager: {})
    with pytest.warns(UserWarning, match="and 3 more: boxes are drawn"):
        labels.font_families("가나다라마바사아자차카타파")


def test_a_file_that_is_no_font_draws_nothing(tmp_path):
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    assert labels._coverage(str(tmp_path / "broken.ttf")) == frozenset()


def test_nothing_global_changes(tmp_path, warm_python):
    script = """
import sys, warnings
warnings.simplefilter("error")
import regard.plots
early = "matplotlib" in sys.modules
import matplotlib
settings = lambda: {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
before = settings()
figure = regard.plots.heatmap([[1.0]], ["가"], ["b"])
pyplot = "matplotlib.pyplot" in sys.modules
figure.savefig(sys.argv[1])
print(early, pyplot, "koreanize_matplotlib" in sys.modules, before == settings())
"""
    command = [*warm_python, "-c", script, str(tmp_path / "attention.png")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "False", "False", "True"], run.stderr


def test_the_picture_is_written(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("attention.png", "attention.svg", "attention.pdf"):
            heatmap(spread(11, 16), ISO, KOREAN, title="대한 → ISO").savefig(tmp_path / name)
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")


# Errors.


@pytest.mark.parametrize(
    ("weights", "rows", "columns", "message"),
    [
        (torch.rand(2, 3), "a", "bc", "rows is one text, 'a'; it needs to be a list of tokens, as list.rows. gives"),
        (
            torch.rand(2, 3),
            ["a"],
            list("bcd"),
            "weights is 2 × 3, but there are 1 rows and 3 columns; it needs a row per",
        ),
        (torch.rand(2, 3), list("abc"), list("de"), "transpose it, or swap rows and columns"),
        (torch.rand(4, 2, 3), list("ab"), list("cde"), r"weights has 3 dims \[4, 2, 3\]; .* weights\[0, 0\]"),
        (torch.rand(0, 3), [], list("abc"), "weights is 0 × 3: there is nothing to draw"),
        (
            torch.rand(2, 3),
            ["a", 1],
            list("cde"),
            r"rows needs tokens as texts, and one is 1: give list\(map\(str, rows",
        ),
        (torch.rand(2, 3), ["a", "b"], range(3), "columns needs tokens as texts, and one is 0"),
        (torch.rand(2, 3), 2, list("cde"), r"rows needs to be a list of tokens, such as \['the', 'house'\]; it is 2"),
    ],
)
def test_weights_that_do_not_fit(weights, rows, columns, message):
    with pytest.raises(ShapeError, match=message):
        heatmap(weights, rows, columns)


def test_matplotlib_is_missing(monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"the package 'matplotlib', which is not installed; pip install 'regard\[plots\]'"
    with pytest.raises(MissingExtra, match=message):
        heatmap([[1.0]], ["a"], ["b"])
