"""Interval arithmetic against every number in the intervals, and tiles of a grid against its pairs."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.core.grid import Blocks, Grid
from regard.core.intervals import EMPTY, FULL, PARTIAL, Interval, Ternary, Undecided, look_up

ends = st.tuples(st.integers(-7, 7), st.integers(0, 5)).map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))
above_0 = st.tuples(st.integers(1, 6), st.integers(0, 5)).map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))
thorough = settings(max_examples=200, deadline=None, derandomize=True)


def interval(ends: tuple[int, int]) -> Interval:
    return Interval(torch.tensor(ends[0]), torch.tensor(ends[1]))


def numbers(ends: tuple[int, int]) -> range:
    return range(ends[0], ends[1] + 1)


def holds(found: Any, results: list[int]) -> bool:
    return int(found.low) <= min(results) and max(results) <= int(found.high)


def exact(found: Any, results: list[int]) -> bool:
    return (int(found.low), int(found.high)) == (min(results), max(results))


def right(verdict: Any, results: list[bool]) -> bool:
    return int(verdict.verdicts) == (FULL if all(results) else PARTIAL if any(results) else EMPTY)


@thorough
@given(a=ends, b=ends, number=st.integers(-5, 5))
def test_arithmetic_is_exact(a, b, number):
    for operation in (operator.add, operator.sub, operator.mul):
        results = [operation(x, y) for x in numbers(a) for y in numbers(b)]
        assert exact(operation(interval(a), interval(b)), results)
        assert exact(operation(interval(a), number), [operation(x, number) for x in numbers(a)])
        assert exact(operation(number, interval(a)), [operation(number, x) for x in numbers(a)])
        assert exact(operation(torch.tensor(number), interval(a)), [operation(number, x) for x in numbers(a)])
    assert exact(-interval(a), [-x for x in numbers(a)])
    assert exact(abs(interval(a)), [abs(x) for x in numbers(a)])
    assert exact(interval(a).minimum(interval(b)), [min(x, y) for x in numbers(a) for y in numbers(b)])
    assert exact(interval(a).maximum(interval(b)), [max(x, y) for x in numbers(a) for y in numbers(b)])
    assert exact(interval(a).clamp(-2, 3), [min(max(x, -2), 3) for x in numbers(a)])
    assert exact(interval(a).clamp(max=1), [min(x, 1) for x in numbers(a)])


@thorough
@given(a=ends, b=above_0)
def test_division(a, b):
    assert exact(interval(a) // interval(b), [x // y for x in numbers(a) for y in numbers(b)])
    assert holds(interval(a) % interval(b), [x % y for x in numbers(a) for y in numbers(b)])
    assert exact(interval(a) // b[0], [x // b[0] for x in numbers(a)])
    remainders = [x % b[0] for x in numbers(a)]
    assert holds(interval(a) % b[0], remainders)
    if a[0] // b[0] == a[1] // b[0]:
        assert exact(interval(a) % b[0], remainders)


@thorough
@given(a=ends, b=ends, number=st.integers(-5, 5))
def test_comparisons_are_exact(a, b, number):
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        assert right(compare(interval(a), interval(b)), [compare(x, y) for x in numbers(a) for y in numbers(b)])
        assert right(compare(interval(a), number), [compare(x, number) for x in numbers(a)])
        assert right(compare(number, interval(a)), [compare(number, x) for x in numbers(a)])
        assert right(compare(torch.tensor(number), interval(a)), [compare(number, x) for x in numbers(a)])


def ternary(*verdicts: int) -> Ternary:
    return Ternary(torch.tensor(verdicts, dtype=torch.int8))


def test_logic_of_three_values():
    left, right = ternary(0, 0, 0, 1, 1, 1, 2, 2, 2), ternary(0, 1, 2, 0, 1, 2, 0, 1, 2)
    assert (left & right).verdicts.tolist() == [0, 0, 0, 0, 1, 1, 0, 1, 2]
    assert (left | right).verdicts.tolist() == [0, 1, 2, 1, 1, 2, 2, 2, 2]
    assert (left ^ right).verdicts.tolist() == [0, 1, 2, 1, 1, 1, 2, 1, 0]
    assert (left != right).verdicts.tolist() == [0, 1, 2, 1, 1, 1, 2, 1, 0]
    assert (left == right).verdicts.tolist() == [2, 1, 0, 1, 1, 1, 0, 1, 2]
    assert (~ternary(0, 1, 2)).verdicts.tolist() == [2, 1, 0]
    booleans = torch.tensor([True, False, True])
    for joined in (ternary(0, 1, 2) & booleans, booleans & ternary(0, 1, 2)):
        assert joined.verdicts.tolist() == [0, 0, 2]
    everything: Any = True | ternary(0, 1, 2)
    assert everything.verdicts.tolist() == [2, 2, 2]


def test_torch_functions():
    some, condition = Interval(torch.tensor([0, 2, 5]), torch.tensor([1, 7, 6])), ternary(2, 1, 0)
    chosen: Any = torch.where(condition, some, 100)  # type: ignore[call-overload]
    assert (chosen.low.tolist(), chosen.high.tolist()) == ([0, 2, 100], [1, 100, 100])
    kept: Any = torch.where(condition, ternary(0, 2, 2), ternary(1, 2, 1))  # type: ignore[call-overload]
    assert kept.verdicts.tolist() == [0, 2, 1]
    with pytest.raises(TypeError, match="torch.sin"):
        torch.sin(some)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda some: bool(some < 1),
        lambda some: bool(some),
        lambda some: some < 0.5,
        lambda some: some < torch.tensor(0.5),
        lambda some: some == None,  # noqa: E711
        lambda some: some // 0,
        lambda some: some % -2,
        lambda some: some // some,
        lambda some: (some < 1) & torch.tensor(1),
        lambda some: torch.arange(3.0)[some],
        lambda some: torch.arange(3)[some],
        lambda some: torch.arange(9)[some],
        lambda some: torch.zeros(9, 9, dtype=torch.bool)[some],
        lambda some: torch.zeros(9, 9, dtype=torch.int64)[some + 1, some + 1],
    ],
)
def test_undecided(wrong):
    with pytest.raises(Undecided):
        wrong(interval((-1, 4)))


@thorough
@given(data=st.data())
def test_look_ups(data):
    table = torch.tensor(data.draw(st.lists(st.integers(-9, 9), min_size=14, max_size=14))).view(2, 7)
    low = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=4, max_size=4)))
    high = torch.tensor([data.draw(st.integers(least, 6)) for least in low.tolist()])
    stretch, rows = Interval(low, high), torch.tensor([[0], [1]])
    stretches = list(zip(low.tolist(), high.tolist(), strict=True))
    found: Any = look_up(table, (rows, stretch))
    assert found.low.tolist() == [[int(line[a : b + 1].min()) for a, b in stretches] for line in table]
    assert found.high.tolist() == [[int(line[a : b + 1].max()) for a, b in stretches] for line in table]
    down: Any = look_up(table, (Interval(torch.tensor(0), torch.tensor(1)), low))
    assert down.low.equal(table.amin(0)[low])
    flags = table > 0
    known: Any = look_up(flags, (1, stretch))
    assert known.verdicts.tolist() == [
        int(flags[1, a : b + 1].any()) + int(flags[1, a : b + 1].all()) for a, b in stretches
    ]
    both: Any = look_up(flags, (Interval(rows * 0, rows), stretch))
    parts = [[flags[: row + 1, a : b + 1] for a, b in stretches] for row in range(2)]
    assert both.verdicts.tolist() == [[int(part.any()) + int(part.all()) for part in line] for line in parts]
    assert look_up(table, (0, low)).equal(table[0, low])  # type: ignore[union-attr]


class TestBlocks:
    def test_positions(self):
        at = torch.tensor([[5, 1, 9, 0, 3], [2, 2, 2, 8, 1]])
        blocks = Blocks.from_grid(Grid.from_lengths(5, 4, query_positions=at), (2, 3))
        assert blocks.query.low.tolist() == [[[[1], [0], [3]]], [[[2], [2], [1]]]]
        assert blocks.query.high.tolist() == [[[[5], [9], [3]]], [[[2], [8], [1]]]]
        assert (blocks.key.low.tolist(), blocks.key.high.tolist()) == ([[0, 3]], [[2, 3]])
        assert blocks.shape == (3, 2)

    def test_of_a_function_and_of_pairs(self):
        blocks = Blocks.from_grid(Grid.from_lengths(4, 5), 2)
        assert blocks.by_key(lambda at: at % 3).high.tolist() == [[1, 2, 1]]
        assert blocks.by_query(lambda at: at > 1).verdicts.tolist() == [[1], [2]]
        pairs = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]).bool()
        assert blocks.cut(pairs).verdicts.tolist() == [[2, 0, 1], [0, 1, 2]]
        assert blocks.cut(pairs[:1]).verdicts.tolist() == [[2, 0, 2]]
        assert blocks.cut(pairs[:, :1]).verdicts.tolist() == [[2], [0]]

    def test_areas_and_tiles(self):
        blocks = Blocks.from_grid(Grid.from_lengths(5, 7), (2, 3))
        assert blocks.areas.tolist() == [[6, 6, 2], [6, 6, 2], [3, 3, 1]]
        tiles = [[blocks.tile(row, column) for column in range(3)] for row in range(3)]
        assert [[tile.shape[0] * tile.shape[1] for tile in row] for row in tiles] == blocks.areas.tolist()
        assert tiles[1][2].query.tolist() == [[4], [5]]
        assert tiles[1][2].key.tolist() == [[6]]

    def test_of_a_part_of_a_grid(self):
        part = Blocks.from_grid(Grid.from_lengths(9, 9).tile(slice(1, 6), slice(2, None)), (2, 4))
        assert part.shape == (3, 2)
        assert part.areas.sum() == 5 * 7
        assert part.query.low.flatten().tolist() == [1, 3, 5]
        assert part.tile(2, 1).query.tolist() == [[5]]
        assert part.tile(2, 1).key.tolist() == [[6, 7, 8]]
