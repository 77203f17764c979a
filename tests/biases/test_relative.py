import math

import pytest
import torch

import regard
from regard import biases
from regard.biases.relative import bucket, bucket_starts
from regard.core.grid import Grid
from regard.errors import ConfigurationError, DtypeError, ShapeError

FAR = torch.arange(-5000, 5001)


def buckets_of(distances, buckets, max_distance, *, bidirectional):
    starts = bucket_starts(buckets // 2 if bidirectional else buckets, max_distance)
    return bucket(distances, starts, bidirectional=bidirectional)


def published_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """The rule of the T5 release (mesh-tensorflow and transformers, Apache-2.0), its logarithm in float32."""
    first = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        first = (relative_position > 0).long() * num_buckets
        n = relative_position.abs()
    else:
        n = (-relative_position).clamp(min=0)
    exact = num_buckets // 2
    scaled = torch.log(n.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    return first + torch.where(n < exact, n, (exact + scaled.long()).clamp(max=num_buckets - 1))


def exact_bucket(n, buckets, max_distance):
    """The bucket of a distance n on one side, by whole numbers alone."""
    exact = buckets // 2
    others = buckets - exact
    if n < exact:
        return n
    fits = [k for k in range(others) if n**others * exact**k >= max_distance**k * exact**others]
    return exact + max(fits)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 20), (8, 16), (64, 1000), (320, 800)])
def test_buckets_are_those_of_t5(buckets, max_distance, bidirectional):
    ours = buckets_of(FAR, buckets, max_distance, bidirectional=bidirectional)
    assert ours.equal(published_bucket(FAR, bidirectional, buckets, max_distance))


@pytest.mark.parametrize(("side", "max_distance"), [(16, 128), (32, 128), (2, 5), (3, 7), (7, 129), (16, 9)])
def test_buckets_begin_where_whole_numbers_say(side, max_distance):
    ours = buckets_of(-torch.arange(600), side, max_distance, bidirectional=False)
    assert ours.tolist() == [exact_bucket(n, side, max_distance) for n in range(600)]


# 8, 16, 32, 64 and 128 lie on the very edge of a bucket: 8 · log(n/8) / log(16) is a whole number there.
@pytest.mark.parametrize(("distance", "expected"), [(7, 7), (8, 8), (15, 9), (16, 10), (32, 12), (64, 14), (128, 15)])
def test_edges_of_buckets(distance, expected):
    found = buckets_of(torch.tensor([-distance, distance]), 32, 128, bidirectional=True)
    assert found.tolist() == [expected, 16 + expected]


def test_relative_is_the_formula():
    table = torch.randn(3, 8)
    bias = biases.relative(table, max_distance=6)
    grid = Grid.from_lengths(4, 9)
    distances = grid.key - grid.query
    expected = table[:, published_bucket(distances, True, 8, 6)]
    assert bias.values(grid).equal(expected)


def test_a_decoder_keeps_later_keys_in_bucket_0():
    values = biases.relative(torch.arange(4.0)[None], max_distance=4, bidirectional=False).values(
        Grid.from_lengths(3, 3)
    )
    assert values.tolist() == [[[0, 0, 0], [1, 0, 0], [2, 1, 0]]]


# CTranslate2, layers_test / relative positions (MIT)
@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [(2, 2, ["2344", "1234", "0123", "0012"]), (3, 2, ["3455", "2345", "1234", "0123"])],
)
def test_clipped_rows(before, after, rows):
    table = torch.arange(before + 1.0 + after)[None]
    values = biases.clipped(table, before=before, after=after).values(Grid.from_lengths(4, 4))
    assert [["".join(str(int(entry)) for entry in row) for row in head] for head in values.tolist()] == [rows]


POSITIONS = {
    "runs": {},
    "shifted": {"query_positions": torch.arange(5) + 3, "key_positions": torch.arange(7) - 40},
    "gaps": {"query_positions": torch.tensor([0, 1, 2, 9, 10]), "key_positions": torch.arange(7)},
    "backwards": {"query_positions": torch.arange(5), "key_positions": torch.arange(7).flip(0)},
    "per batch": {"query_positions": torch.randint(0, 9, (2, 5)), "key_positions": torch.randint(0, 9, (2, 7))},
    "queries per batch": {"query_positions": torch.randint(0, 9, (2, 5)), "key_positions": torch.arange(7)},
}


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("rows", "columns"), [((0, 5), (0, 7)), ((1, 2), (0, 7)), ((2, 5), (3, 4)), ((0, 0), (2, 6))])
def test_tiles_are_parts_of_the_formula_at_any_positions(heads, positions, rows, columns):
    table = torch.randn(3 if heads else 1, 9)
    given = POSITIONS[positions]
    grid = Grid.from_lengths(5, 7, heads=heads, **given)
    distances = grid.key - grid.query
    index = distances.clamp(-4, 4) + 4
    expected = table[0][index] if not heads else torch.stack([row[index] for row in table], -3)
    expected = expected.squeeze(-4) if heads and distances.ndim > 2 else expected
    tile = grid.tile(slice(*rows), slice(*columns))
    values = biases.clipped(table, before=4, after=4).values(tile)
    assert values.equal(expected[..., slice(*rows), slice(*columns)])


def test_along_takes_any_shape():
    bias = biases.relative(torch.randn(3, 32))
    distances = torch.tensor([[2**62, -(2**62)], [0, 1]])
    assert bias.values_at(distances).shape == (3, 2, 2)
    assert bias.values_at(distances)[:, 0, 0].equal(bias.values_at(torch.tensor(5000)))
    assert bias.values_at(distances[:, :0]).shape == (3, 2, 0)


@pytest.mark.parametrize(
    "make",
    [lambda t: biases.relative(t, max_distance=5), lambda t: biases.clipped(t, before=6, after=1)],
    ids=["relative", "clipped"],
)
def test_gradients_of_first_and_second_order(make):
    query, key, value = (torch.randn(2, 3, length, 4).double() for length in (4, 5, 5))
    table = torch.randn(3, 8).double().requires_grad_()
    attend = lambda t: regard.attention(query, key, value, bias=make(t), kernel="reference")  # noqa: E731
    assert torch.autograd.gradcheck(attend, table)
    assert torch.autograd.gradgradcheck(attend, table)


def test_reprs():
    relative = biases.relative(torch.zeros(2, 32).half(), bidirectional=False)
    assert repr(relative) == "relative(<float16 (2, 32)>, max_distance=128, bidirectional=False)"
    assert repr(biases.clipped(torch.zeros(2, 4), before=1, after=2)) == "clipped(<float32 (2, 4)>, before=1, after=2)"


@pytest.mark.parametrize("wrong", [torch.zeros(32), torch.zeros(1, 2, 32), torch.zeros(0, 32)])
def test_tables_have_two_axes(wrong):
    match = r"relative needs a table of the shape \(heads, buckets\) with at least one head; this one has \("
    with pytest.raises(ShapeError, match=match):
        biases.relative(wrong)
    with pytest.raises(ShapeError, match=r"clipped needs a table of the shape \(heads, before \+ 1 \+ after\) with"):
        biases.clipped(wrong, before=1, after=30)


@pytest.mark.parametrize(("wrong", "has"), [(torch.zeros(2, 32).int(), "torch.int32"), ([[0.0]], "a list")])
def test_tables_are_floating_point(wrong, has):
    with pytest.raises(DtypeError, match=rf"relative needs a floating-point table \(heads, buckets\); this is {has}"):
        biases.relative(wrong)
    with pytest.raises(DtypeError, match=rf"clipped needs a floating-point table .*; this is {has}"):
        biases.clipped(wrong, before=1, after=1)


@pytest.mark.parametrize(("buckets", "bidirectional"), [(2, True), (33, True), (1, False), (0, False)])
def test_enough_buckets(buckets, bidirectional):
    match = (
        rf"relative needs .*buckets.* the last axis of its table; with bidirectional={bidirectional} this has {buckets}"
    )
    with pytest.raises(ConfigurationError, match=match):
        biases.relative(torch.zeros(2, buckets), bidirectional=bidirectional)


@pytest.mark.parametrize(("max_distance", "bidirectional", "above"), [(8, True, 8), (0, True, 8), (16, False, 16)])
def test_max_distance_lies_beyond_single_distances(max_distance, bidirectional, above):
    match = rf"needs a max_distance above {above}, .*; it is {max_distance}. Pass a longer max_distance, or a table"
    with pytest.raises(ConfigurationError, match=match):
        biases.relative(torch.zeros(2, 32), max_distance=max_distance, bidirectional=bidirectional)


@pytest.mark.parametrize(("before", "after"), [(-1, 2), (2, -1)])
def test_clips_are_not_negative(before, after):
    match = f"clipped's {'before' if before < 0 else 'after'} is -1; it needs at least 0"
    with pytest.raises(ConfigurationError, match=match):
        biases.clipped(torch.zeros(2, 2), before=before, after=after)


def test_a_column_for_each_clipped_distance():
    match = r"clipped\(before=2, after=1\) needs a table with 4 columns, .* from -2 to 1; .*the shape \(2, 5\)"
    with pytest.raises(ShapeError, match=match):
        biases.clipped(torch.zeros(2, 5), before=2, after=1)
