"""Gradients accumulated tile by tile without a graph, against autograd through the values of the whole grid."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from regard import biases
from regard.biases import diagonal_sums, diagonals
from regard.core.grid import Grid
from regard.errors import ConfigurationError

BATCH, HEADS, QUERIES, KEYS = 2, 3, 7, 11


def random_tensor(*shape):
    return torch.randn(shape).double()


def two_tables(score, b, h, q, k):
    return score + FIRST[h, (q - k).clamp(-4, 4) + 4] * SECOND[b]


def a_row_of_a_table(score, b, h, q, k):
    return score + FIRST[h][(q - k).clamp(-4, 4) + 4]


FIRST, SECOND = random_tensor(HEADS, 9), random_tensor(BATCH)

BIASES = {
    "pairs": lambda: biases.tensor(random_tensor(QUERIES, KEYS)),
    "batch, heads and pairs": lambda: biases.tensor(random_tensor(BATCH, HEADS, QUERIES, KEYS)),
    "heads and keys": lambda: biases.tensor(random_tensor(HEADS, 1, KEYS)),
    "batch and queries": lambda: biases.tensor(random_tensor(BATCH, 1, QUERIES, 1)),
    "one number": lambda: biases.tensor(random_tensor(1)),
    "gaussian": lambda: biases.gaussian(3 * random_tensor(BATCH, HEADS, QUERIES), random_tensor().exp()),
    "alibi": lambda: biases.alibi(random_tensor(HEADS)),
    "relative": lambda: biases.relative(random_tensor(HEADS, 8), max_distance=6),
    "relative, shared by the heads": lambda: biases.relative(random_tensor(1, 6), max_distance=6, bidirectional=False),
    "clipped": lambda: biases.clipped(random_tensor(HEADS, 6), before=4, after=1),
    "from_mod": lambda: biases.from_mod(two_tables, batch=BATCH, heads=HEADS),
    "from_mod, mapped": lambda: biases.from_mod(a_row_of_a_table, heads=HEADS),
    "sum": lambda: (
        biases.alibi(random_tensor(HEADS))
        + random_tensor(BATCH, 1, 1, KEYS)
        + biases.clipped(random_tensor(HEADS, 3), before=1, after=1)
    ),
}
POSITIONS = {
    "runs": {},
    "gaps": {"query_positions": torch.tensor([0, 1, 2, 4, 5, 6, 7]), "key_positions": torch.arange(KEYS)},
    "per batch": {
        "query_positions": torch.randint(0, KEYS, (BATCH, QUERIES)),
        "key_positions": torch.arange(BATCH * KEYS).view(BATCH, KEYS),
    },
}


def cuts(length):
    """A range in pieces, some of them empty."""
    ends = [0, *sorted(random.choices(range(length + 1), k=3)), length]
    return [slice(start, stop) for start, stop in pairwise(ends)]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", BIASES)
def test_tiles_accumulate_the_gradient_of_the_whole(name, positions):
    bias = BIASES[name]()
    grid = Grid.from_lengths(QUERIES, KEYS, **POSITIONS[positions])
    upstream = random_tensor(BATCH, HEADS, QUERIES, KEYS)
    held = [tensor.detach().requires_grad_() for tensor in bias.parameters()]
    whole = bias.with_parameters(held).values(grid).expand_as(upstream)
    expected = torch.autograd.grad(whole, held, upstream)
    before = [random_tensor(*tensor.shape) for tensor in held]
    for _ in range(3):
        into = [tensor.clone() for tensor in before]
        rows, columns = cuts(QUERIES), cuts(KEYS)
        with torch.no_grad():
            for row in rows:
                for column in columns:
                    bias.accumulate(grid.tile(row, column), upstream[..., row, column], into)
        for got, start, gradient in zip(into, before, expected, strict=True):
            torch.testing.assert_close(got - start, gradient)


@pytest.mark.parametrize("name", BIASES)
def test_what_is_not_wanted_is_not_computed(name):
    bias = BIASES[name]()
    upstream = random_tensor(BATCH, HEADS, QUERIES, KEYS)
    grid = Grid.from_lengths(QUERIES, KEYS)
    alone = [torch.zeros_like(tensor) for tensor in bias.parameters()]
    bias.accumulate(grid, upstream, alone)
    for chosen, expected in enumerate(alone):
        into = [torch.zeros_like(expected) if number == chosen else None for number in range(len(alone))]
        bias.accumulate(grid, upstream, into)
        torch.testing.assert_close(into[chosen], expected)
    bias.accumulate(grid, upstream, [None] * len(alone))


@pytest.mark.parametrize("name", ["alibi", "relative", "relative, shared by the heads", "clipped"])
def test_diagonals_of_all_tiles_go_through_along_once(name):
    bias = BIASES[name]()
    grid = Grid.from_lengths(QUERIES, KEYS)
    upstream = random_tensor(BATCH, HEADS, QUERIES, KEYS)
    sums = torch.zeros(BATCH, HEADS, QUERIES + KEYS - 1).double()
    for row in cuts(QUERIES):
        for column in cuts(KEYS):
            tile = upstream[..., row, column]
            if tile.numel():
                first = column.start + QUERIES - row.stop
                sums[..., first : first + sum(tile.shape[-2:]) - 1] += diagonal_sums(tile)
    distances = diagonals(grid)
    into, expected = ([torch.zeros_like(tensor) for tensor in bias.parameters()] for _ in range(2))
    bias.accumulate_at(distances, sums, into)
    bias.accumulate(grid, upstream, expected)
    torch.testing.assert_close(into, expected)
    bias.accumulate_at(distances, sums, [None])


def test_a_tensor_that_two_biases_hold():
    table = random_tensor(HEADS, 5)
    bias = biases.clipped(table, before=2, after=2) + biases.clipped(table, before=3, after=1)
    assert [held is table for held in bias.parameters()] == [True, True]


def test_half_precision_is_added_unrounded():
    table = torch.ones(1, 1, dtype=torch.bfloat16)
    upstream = torch.ones(1, 1, 40, 40, dtype=torch.bfloat16)
    for bias in (biases.clipped(table, before=0, after=0), biases.tensor(table)):
        into = torch.zeros(1, 1)
        for _ in range(3):
            bias.accumulate(Grid.from_lengths(40, 40), upstream, [into])
        assert into.item() == 4800  # bfloat16 has no 4800, and stops counting ones at 256


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (9, 1), (5, 8), (8, 5), (300, 7), (129, 140), (0, 4), (4, 0), (0, 0)]
)
def test_diagonal_sums(shape):
    rows, columns = shape
    tile = random_tensor(2, 3, rows, columns)
    sums = diagonal_sums(tile)
    assert sums.shape == (2, 3, max(rows + columns - 1, 0))
    expected = torch.zeros_like(sums)
    for i in range(rows):
        for j in range(columns):
            expected[..., j - i + rows - 1] += tile[..., i, j]
    torch.testing.assert_close(sums, expected)


def test_diagonals_are_distances():
    grid = Grid.from_lengths(3, 6).tile(slice(1, 3), slice(0, 4))
    at = diagonals(grid)
    distances = grid.key - grid.query
    assert at is not None
    assert all(distances[i, j] == at[j - i + 1] for i in range(2) for j in range(4))
    assert diagonals(Grid.from_lengths(2, 3, key_positions=torch.tensor([0, 1, 3]))) is None
    assert diagonals(Grid.from_lengths(0, 3)) is None


@pytest.mark.filterwarnings("ignore")  # torch's tracer warns of itself
@pytest.mark.parametrize("name", ["alibi", "relative", "clipped", "from_mod", "sum"])
def test_values_in_one_graph_and_under_vmap(name):
    bias, grid = BIASES[name](), Grid.from_lengths(QUERIES, KEYS)
    held = bias.parameters()
    expected = bias.values(grid)

    def values(*tensors):
        return bias.with_parameters(tensors).values(grid)

    torch.testing.assert_close(torch.compile(values, fullgraph=True, backend="eager")(*held), expected)
    doubled = torch.vmap(values)(*(torch.stack([tensor, 2 * tensor]) for tensor in held))
    torch.testing.assert_close(doubled[0], expected)


def test_a_bias_of_ones_own():
    @dataclass(frozen=True)
    class Doubled(biases.Bias):
        pairs: torch.Tensor
        times: int

        def values(self, grid):
            return self.times * grid.cut(self.pairs)

    bias = Doubled(random_tensor(2, 3), 2)
    into = torch.zeros(2, 3).double()
    bias.accumulate(Grid.from_lengths(2, 3), torch.ones(2, 3).double(), [into])
    assert into.eq(2).all()
    assert bias.with_parameters([into]).times == 2


def test_a_bias_says_what_it_is_made_from():
    class Bare(biases.Bias):
        def values(self, grid):
            return torch.zeros(1, 1)

    with pytest.raises(ConfigurationError, match=r"Bare is a bias, but not a dataclass: make it .*parameters\(\) and"):
        Bare().parameters()
