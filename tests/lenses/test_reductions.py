"""Lenses against results computed by hand, and their errors."""

import math

import pytest
import torch

import regard
from regard import lenses, masks
from regard.errors import ConfigurationError, ShapeError
from regard.kernels import lens_pass
from regard.lenses import weights as weights_module
from regard.nn import Attention, Projections

CAUSAL = masks.causal()


def show(lens: lenses.Lens, queries: int = 4, keys: int | None = None, **options):
    """The result of a lens where all keys of a row have the same weight."""
    key = torch.zeros(queries if keys is None else keys, 4)
    return regard.observe(torch.zeros(queries, 4), key, key, lens, **options)[lens]


# Pooled


def test_cells_differ_by_one_at_the_most():
    pooled = show(lenses.Pooled((2, 3), "sum"), 5, 7)
    # Rows 0-1 and 2-4, columns 0-1, 2-3 and 4-6, a seventh each.
    torch.testing.assert_close(pooled, torch.tensor([[4.0, 4.0, 6.0], [6.0, 6.0, 9.0]]) / 7)


def test_the_mean_times_the_cell_is_the_sum_and_all_sums_are_the_rows():
    query, key = torch.randn(2, 6, 13, 5), torch.randn(2, 3, 17, 5)
    mean, total = lenses.Pooled((4, 5)), lenses.Pooled((4, 5), "sum")
    seen = regard.observe(query, key, key, mean, total, mask=CAUSAL)
    heights, widths = torch.tensor([3, 3, 3, 4]), torch.tensor([3, 3, 4, 3, 4])
    torch.testing.assert_close(seen[mean] * (heights[:, None] * widths), seen[total])
    torch.testing.assert_close(seen[total].sum(-1), heights.float().expand(2, 6, 4))


def test_a_mean_counts_masked_pairs_and_a_largest_is_one_of_the_weights():
    assert show(lenses.Pooled(1), 2, mask=CAUSAL).item() == pytest.approx(0.5)
    torch.testing.assert_close(show(lenses.Pooled(2, "max"), 4, mask=CAUSAL), torch.tensor([[1, 0], [1 / 3, 1 / 3]]))


def test_as_many_cells_as_pairs_are_the_weights():
    query, key = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 9, 4)
    whole = lenses.Weights()
    looks = [lenses.Pooled((7, 9), reduce) for reduce in ("mean", "max", "sum")]  # type: ignore[arg-type]
    seen = regard.observe(query, key, key, whole, *looks, mask=CAUSAL)
    for look in looks:
        torch.testing.assert_close(seen[look], seen[whole])


@pytest.mark.parametrize("cells", [0, -1, True, 2.0, (3,), (2, 0), (1, 2, 3), "4"])
def test_cells_are_whole_numbers(cells):
    with pytest.raises(ConfigurationError, match=r"Pooled needs cells as a whole number of at least 1, or two of them"):
        lenses.Pooled(cells)


def test_no_more_cells_than_rows_and_columns():
    with pytest.raises(ConfigurationError, match=r"256 cells for 4 rows.*ask for at most 4, or for the Weights"):
        show(lenses.Pooled(256))
    with pytest.raises(ConfigurationError, match="Pooled has 5 cells for 4 columns"):
        show(lenses.Pooled((1, 5)))
    with pytest.raises(ConfigurationError, match="1 cells for 0 rows.*there is nothing to pool"):
        show(lenses.Pooled(1), 0, 3)


def test_reduce_is_one_of_three():
    with pytest.raises(ConfigurationError, match="reduce as 'mean', 'max' or 'sum'; it is 'median'"):
        lenses.Pooled(4, "median")  # type: ignore[arg-type]


# TopK


def test_more_than_there_are_is_filled_up():
    seen = show(lenses.TopK(5), 3, mask=CAUSAL)
    assert seen.columns.sort(-1).values.tolist() == [[-1, -1, -1, -1, 0], [-1, -1, -1, 0, 1], [-1, -1, 0, 1, 2]]
    torch.testing.assert_close(seen.weights[2], torch.tensor([1, 1, 1, 0, 0]) / 3)
    assert show(lenses.TopK(2), 3, 0).columns.eq(-1).all()


@pytest.mark.parametrize("k", [0, -3, 1.5, True])
def test_k_is_a_whole_number(k):
    with pytest.raises(ConfigurationError, match="TopK needs k as a whole number of at least 1"):
        lenses.TopK(k)


# Entropy


@pytest.mark.parametrize("using", ["native", "tiles"])
def test_no_entropy_is_minus_zero(monkeypatch, using):
    if using == "tiles":
        monkeypatch.setattr(lens_pass, "pass_over", lambda problem: None)
    entropy = show(lenses.Entropy(), 5, mask=torch.eye(5, dtype=torch.bool))
    assert entropy.eq(0).all()
    assert not entropy.signbit().any()
    assert not show(lenses.Entropy(), 5, mask=torch.zeros(5, 5, dtype=torch.bool)).signbit().any()


def test_entropy_is_of_no_key_one_key_and_all_keys():
    keep = torch.tensor([[False, False], [True, False], [True, True]])
    torch.testing.assert_close(show(lenses.Entropy(), 3, 2, mask=keep), torch.tensor([0, 0, math.log(2)]))


def test_entropy_survives_biases_of_the_least_number():
    """Biases of the least float32 as masks: where a row has nothing else, its keys keep their weights."""
    bias = torch.zeros(2, 3)
    bias[0, 1:], bias[1] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    query, key = torch.zeros(2, 4), torch.zeros(3, 4)
    entropy, whole = lenses.Entropy(), lenses.Weights()
    seen = regard.observe(query, key, key, entropy, whole, bias=bias, kernel="reference")
    torch.testing.assert_close(seen[entropy], torch.special.entr(seen[whole]).sum(-1))
    assert seen[entropy].isfinite().all()


# Mass


def test_segments_of_keys_are_those_of_the_last_queries():
    mass = show(lenses.Mass([0, 0, 1]), 2, 3, mask=CAUSAL)
    torch.testing.assert_close(mass, torch.tensor([[1.0, 0.0], [2 / 3, 1 / 3]]))


def test_segments_of_queries_and_keys_apart_and_in_batches():
    query, key = torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 3, 4)
    mass = lenses.Mass(torch.tensor([[0, 1], [1, 1]]), torch.tensor([0, 0, 2]))
    shown = regard.observe(query, key, key, mass)[mass]
    row = torch.tensor([2, 0, 1]) / 3
    torch.testing.assert_close(shown, torch.stack([torch.stack([row, row]), torch.stack([0 * row, 2 * row])])[:, None])


def test_who_is_in_no_segment_is_not_counted():
    torch.testing.assert_close(show(lenses.Mass([-1, 0], [0, -1, 0]), 2, 3), torch.tensor([[2 / 3]]))


def test_segments_fit():
    with pytest.raises(ShapeError, match=r"Mass has 3 segments for 4 queries and 4 keys: it needs one for each key"):
        show(lenses.Mass([0, 0, 1]))
    with pytest.raises(ShapeError, match="Mass has 4 segments for 4 queries and 3 keys.*key_segments"):
        show(lenses.Mass([0, 0, 1, 1]), 4, 3)
    with pytest.raises(ShapeError, match="Mass has 3 segments for 4 queries: it needs one for each"):
        show(lenses.Mass([0, 0, 1], [0, 0, 1, 1]))
    with pytest.raises(ShapeError, match="Mass has 5 key_segments for 4 keys"):
        show(lenses.Mass([0, 0, 1, 1], [0] * 5))
    lens, q = lenses.Mass(torch.zeros(3, 4, dtype=torch.long)), torch.zeros(2, 1, 4, 4)
    with pytest.raises(ShapeError, match=r"of the shape \(3, 4\) for the batch \(2,\): they need the shape \(2, 4\)"):
        regard.observe(q, q, q, lens)


def test_segments_are_whole_numbers_and_not_too_many():
    with pytest.raises(ConfigurationError, match=r"Mass needs segments as whole numbers.*torch.float32"):
        lenses.Mass([0.5, 1.0])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="Mass needs key_segments as whole numbers"):
        lenses.Mass([0], torch.tensor(3))
    with pytest.raises(ConfigurationError, match="at most 8,192 segments, and the largest of segments is 8,192"):
        lenses.Mass([8192])
    for given in (["a"] * 7, [[0], [0, 1]], "abc", [None]):
        with pytest.raises(ConfigurationError, match=r"Mass needs segments as whole numbers, .* which is no such list"):
            lenses.Mass(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Mass needs segments as whole numbers.*they are None"):
        lenses.Mass(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Mass needs key_segments as whole numbers.*they are \['a'\]"):
        lenses.Mass([0], ["a"])  # type: ignore[list-item]


def test_equal_segments_are_equal_lenses():
    given = torch.tensor([0, 1, 1, 0])
    one = lenses.Mass(given)
    assert one == lenses.Mass([0, 1, 1, 0])
    assert show(one).equal(show(lenses.Mass((0, 1, 1, 0))))
    query = torch.zeros(4, 4)
    seen = regard.observe(query, query, query, one, lenses.Mass([0, 1, 1, 0]))
    assert len(seen.results) == 1
    assert seen[lenses.Mass([0, 1, 1, 0])].equal(seen[one])
    others = [
        lenses.Mass([0, 1, 1, 1]),
        lenses.Mass(torch.tensor([[0, 1, 1, 0]])),
        lenses.Mass([0, 1, 1, 0], [0, 1, 1, 0]),
    ]
    assert len({one, *others}) == 4
    given[0] = 5  # which is no longer the lens's
    assert one == lenses.Mass([0, 1, 1, 0])
    assert show(one).shape == (2, 2)


# Distance


def test_distances_are_of_positions():
    lens = lenses.Distance()
    at = torch.tensor([0, 1, 10, 100])
    shown = show(lens, mask=CAUSAL, query_positions=at, key_positions=at)
    torch.testing.assert_close(shown.mean, torch.tensor([0, 0.5, 19 / 3, (100 + 99 + 90) / 4]))
    assert shown.edges.tolist() == [1, 2, 4, 8, 16, 32, 64]
    torch.testing.assert_close(shown.histogram.sum(), torch.tensor(4.0))
    torch.testing.assert_close(shown.histogram[-1], torch.tensor(0.75))


def test_distances_count_in_both_directions():
    shown = show(lenses.Distance((1, 2)), 3)
    torch.testing.assert_close(shown.mean, torch.tensor([1, 2 / 3, 1]))
    torch.testing.assert_close(shown.histogram, torch.tensor([1, 4 / 3, 2 / 3]))


@pytest.mark.parametrize("edges", [(), (0, 1), (2, 2), (4, 1), (1.5,), (True, 2)])
def test_edges_grow(edges):
    with pytest.raises(ConfigurationError, match="Distance needs edges as whole numbers of at least 1, each larger"):
        lenses.Distance(edges)


# Alignment


def test_the_path_is_the_cheapest():
    """Compared with all monotone paths of a small matrix."""

    def paths(row: int, column: int, rows: int, columns: int):
        if (row, column) == (rows - 1, columns - 1):
            yield [(row, column)]
            return
        for down, right in ((1, 1), (1, 0), (0, 1)):
            if row + down < rows and column + right < columns:
                for rest in paths(row + down, column + right, rows, columns):
                    yield [(row, column), *rest]

    for shape in ((4, 5), (5, 3), (1, 4), (4, 1), (1, 1)):
        weights = torch.rand(2, 3, *shape)
        found = lenses.warping_path(weights)
        assert found.shape == (2, 3, sum(shape) - 1, 2)
        for table, path in zip(weights.flatten(0, 1), found.flatten(0, 1), strict=True):
            walked = [tuple(step) for step in path.tolist() if step != [-1, -1]]
            best = min(paths(0, 0, *shape), key=lambda steps: sum(1 - table[at].item() for at in steps))
            assert walked == best


def test_an_alignment_of_nothing():
    shown = show(lenses.Alignment(), 2, 0)
    assert shown.columns.tolist() == [-1, -1]
    assert shown.path.shape == (0, 2)
    keep = torch.tensor([[True, False], [False, False]])
    assert show(lenses.Alignment(), 2, mask=keep).columns.tolist() == [0, -1]


# Weights


@pytest.mark.parametrize(
    ("rectangle", "said"),
    [
        ((slice(3, 9), slice(None)), "rows 3 to 9, and there are 4"),
        ((slice(-5, None), slice(None)), "rows -5 to the end, and there are 4"),
        ((slice(None), slice(7, None)), "columns 7 to the end, and there are 6"),
        ((slice(None, 9), slice(None)), "rows up to 9, and there are 4"),
    ],
)
def test_rows_and_columns_are_there(rectangle, said):
    with pytest.raises(ConfigurationError, match=f"Weights was asked for {said}: the ends of the slice need to lie in"):
        show(lenses.Weights(*rectangle), 4, 6)


def test_steps_are_taken_in_blocks_too(monkeypatch):
    monkeypatch.setattr(weights_module, "MAX_WEIGHTS_AT_ONCE", 10)
    query, key = torch.randn(2, 11, 4), torch.randn(2, 7, 4)
    whole, part = lenses.Weights(), lenses.Weights(slice(9, None, 3), slice(None, None, 2))
    seen = regard.observe(query, key, key, whole, part, mask=CAUSAL)
    torch.testing.assert_close(seen[part], seen[whole][..., 9::3, ::2])
    torch.testing.assert_close(seen[whole] @ key, seen.output)


# All of them


ALL = [
    lenses.Pooled((2, 2)),
    lenses.Pooled((2, 2), "max"),
    lenses.TopK(2),
    lenses.Entropy(),
    lenses.Received(),
    lenses.Distance(),
    lenses.Mass([0, 0, 1, 1, 1]),
    lenses.Alignment(),
]


@pytest.mark.parametrize("lens", ALL, ids=lambda lens: repr(lens)[:24])
def test_weights_before_dropout(lens):
    query = torch.randn(1, 2, 5, 4)
    kept = regard.observe(query, query, query, lens)[lens]
    dropped = regard.observe(query, query, query, lens, dropout_p=0.5)[lens]
    torch.testing.assert_close(dropped, kept)


@pytest.mark.parametrize("lens", ALL, ids=lambda lens: repr(lens)[:24])
def test_through_a_layer_and_without_autograd(lens):
    layer = Attention(Projections(8, num_heads=2))
    x = torch.randn(3, 5, 8)
    seen = layer.observe(x, lens, lenses.Weights())
    torch.testing.assert_close(seen.output, layer(x))
    shown = seen[lens]
    assert not any(part.requires_grad for part in (shown if isinstance(shown, tuple) else [shown]))
    assert seen[lenses.Weights()].requires_grad


@pytest.mark.parametrize("other", ["entropy", lenses.Entropy, 3])
def test_lenses_only(other):
    q = torch.zeros(2, 4)
    with pytest.raises(ConfigurationError, match=r"observe needs lenses from regard.lenses, such as Entropy\(\); one"):
        regard.observe(q, q, q, other)


def test_under_a_transform():
    entropy = lenses.Entropy()
    with pytest.raises(ConfigurationError, match=r"only Weights works under torch.compile"):
        torch.func.vmap(lambda q: regard.observe(q, q, q, entropy)[entropy])(torch.zeros(2, 3, 4))


def test_rows_that_see_nan_are_nan_and_no_other():
    query = torch.randn(1, 2, 6, 4)
    key = query.clone()
    key[:, :, 3] = math.nan
    spread, top, mass = lenses.Entropy(), lenses.TopK(1), lenses.Mass([0, 0, 0, 1, 1, 1])
    received = lenses.Received()
    seen = regard.observe(query, key, query, spread, top, mass, received, mask=CAUSAL)
    assert seen[spread].isnan().equal(torch.tensor([0, 0, 0, 1, 1, 1]).bool().expand(1, 2, 6))
    assert seen[top].columns[..., 0].eq(-1).equal(seen[spread].isnan())
    assert seen[mass][..., 0, :].isfinite().all()
    assert seen[mass][..., 1, :].isnan().all()
    assert seen[received].isnan().all()
