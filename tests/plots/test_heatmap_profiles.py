"""Row and column profiles of a heat map."""

import numpy
import pytest
import torch
from matplotlib.patches import StepPatch

import regard
from regard.errors import ShapeError
from regard.plots import Pooling, profiles


def tokens(count):
    return [f"t{number}" for number in range(count)]


def sides(figure):
    """The axes beside and below the map; the first child axes are the colour bar."""
    return figure.axes[0].child_axes[1:]


def steps(axes):
    return [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]


def test_each_token_has_its_step(inside, vector):
    q = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    weights, entropy, received = regard.lenses.Weights(), regard.lenses.Entropy(), regard.lenses.Received()
    view = regard.observe(q, q, q, weights, entropy, received, mask=regard.masks.causal())
    figure = profiles(view[weights], tokens(5), tokens(5), entropy=view[entropy], received=view[received], title="both")
    beside, below = sides(figure)
    for axes, lens in ((beside, entropy), (below, received)):
        ((values, edges, _),) = steps(axes)
        numpy.testing.assert_allclose(values, view[lens])
        assert edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert beside.get_ylim() == figure.axes[0].get_ylim()
    assert below.get_xlim() == figure.axes[0].get_xlim()
    assert {"entropy (nats)", "received\n(column sum)", "both", "weight"} <= {*inside(figure)}
    texts, images = vector(figure)
    assert images == 1
    assert "entropy (nats)" in texts


def test_the_profiles_lie_along_the_map():
    figure = profiles(torch.rand(4, 9), tokens(4), tokens(9), entropy=torch.rand(4), received=torch.rand(9))
    figure.draw_without_rendering()
    box = figure.axes[0].get_window_extent()
    beside, below = (axes.get_window_extent() for axes in sides(figure))
    assert (beside.y0, beside.y1) == pytest.approx((box.y0, box.y1))
    assert (below.x0, below.x1) == pytest.approx((box.x0, box.x1))
    assert beside.x0 > box.x1
    assert below.y1 < box.y0
    bar = figure.axes[0].child_axes[0].get_window_extent()
    assert bar.x0 > beside.x1


def test_pooled_maps_have_bands(notes):
    entropy, received = torch.arange(10.0), torch.ones(6)
    entropy[1], entropy[8:] = float("nan"), float("nan")
    figure = profiles(
        torch.rand(5, 3), tokens(10), tokens(6), entropy=entropy, received=received, pooling=Pooling(size=2)
    )
    (high, _, low), (mean, _, _) = steps(sides(figure)[0])
    numpy.testing.assert_array_equal(low, [0, 2, 4, 6, numpy.nan])
    numpy.testing.assert_array_equal(high, [0, 3, 5, 7, numpy.nan])
    numpy.testing.assert_array_equal(mean, [0, 2.5, 4.5, 6.5, numpy.nan])
    assert notes(figure) == (
        "each cell: max of 2 × 2 weights; profiles: mean of a cell's tokens, least to greatest; "
        "entropy: 3 NaN or infinite"
    )


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (60, 5), (3, 512)])
def test_every_size_is_on_the_page(size, inside):
    figure = profiles(
        torch.rand(size),
        *(tokens(size[0]), tokens(size[1])),
        entropy=torch.zeros(size[0]),
        received=torch.rand(size[1]),
    )
    assert (figure.get_size_inches() <= 14).all()
    inside(figure)


@pytest.mark.parametrize(
    ("entropy", "received", "message"),
    [
        (torch.rand(3), torch.rand(3), r"entropy is \[3\], but there are 2 rows; it needs one number for each row"),
        (torch.rand(2), torch.rand(4, 3), r"received is \[4, 3\], but there are 3 columns; .* choose one head"),
        (torch.rand(2), "abc", "received needs to be a tensor or rectangular array of real numbers; it is a str"),
    ],
)
def test_profiles_that_do_not_fit(entropy, received, message):
    with pytest.raises(ShapeError, match=message):
        profiles(torch.rand(2, 3), tokens(2), tokens(3), entropy=entropy, received=received)
