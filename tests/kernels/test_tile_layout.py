"""Verdicts on tiles as block rows and runs of columns: held against what each pair's verdict says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.core.intervals import EMPTY, FULL, PARTIAL
from regard.tiles.mask_tiles import BlockRow, Run, TileLayout, split_slice


def layout_of(line: str, *, width: int = 2, apart: int = 1, keys: int | None = None) -> tuple[Run, ...]:
    """The runs of one block row of one query, from a word of E, P and F."""
    verdicts = np.array([["EPF".index(letter) for letter in line]], dtype=np.int8).reshape(1, len(line))
    shape = 1, width * len(line) if keys is None else keys
    return TileLayout.from_verdicts(verdicts, (1, width), shape, min_full_width=apart).rows[0].runs


def runs(*spans: tuple[int, int, bool]) -> tuple[Run, ...]:
    return tuple(Run(slice(start, stop), masked) for start, stop, masked in spans)


@pytest.mark.parametrize(
    ("line", "apart", "expected"),
    [
        ("", 1, ()),
        ("EEE", 1, ()),
        ("FFF", 1, runs((0, 6, False))),
        ("PPP", 1, runs((0, 6, True))),
        ("EFFE", 1, runs((2, 6, False))),
        ("FEF", 1, runs((0, 2, False), (4, 6, False))),
        ("PFP", 1, runs((0, 2, True), (2, 4, False), (4, 6, True))),
        # a short stretch without masked pairs goes with the masked ones beside it
        ("PFP", 3, runs((0, 6, True))),
        ("PFFP", 4, runs((0, 2, True), (2, 6, False), (6, 8, True))),
        ("PFFP", 5, runs((0, 8, True))),
        ("FPF", 3, runs((0, 6, True))),
        # but not where none is beside it
        ("FEP", 100, runs((0, 2, False), (4, 6, True))),
        ("F", 100, runs((0, 2, False))),
        ("FFPE", 4, runs((0, 4, False), (4, 6, True))),
    ],
)
def test_runs(line, apart, expected):
    assert layout_of(line, apart=apart) == expected


def test_the_last_tile_ends_with_the_keys():
    assert layout_of("EPF", width=4, keys=9) == runs((4, 8, True), (8, 9, False))


def test_rows_end_with_the_queries():
    layout = TileLayout.from_verdicts(
        np.array([[FULL], [PARTIAL], [EMPTY]], dtype=np.int8), (4, 3), (9, 2), min_full_width=1
    )
    assert layout.rows == (
        BlockRow(slice(0, 4), runs((0, 2, False))),
        BlockRow(slice(4, 8), runs((0, 2, True))),
        BlockRow(slice(8, 9), ()),
    )
    assert (layout.visited_pairs, layout.masked_pairs) == (16, 8)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    lines=st.integers(1, 7).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0, 1, 2]), min_size=columns, max_size=columns), min_size=1, max_size=4
        )
    ),
    size=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    short=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    apart=st.integers(1, 12),
)
def test_every_pair_is_visited_once_or_does_not_exist(lines, size, short, apart):
    verdicts = np.array(lines, dtype=np.int8).reshape(len(lines), -1)
    queries = max(len(lines) * size[0] - min(short[0], size[0] - 1), 0)
    keys = max(verdicts.shape[1] * size[1] - min(short[1], size[1] - 1), 0)
    each = verdicts.repeat(size[0], 0).repeat(size[1], 1)[:queries, :keys]
    layout = TileLayout.from_verdicts(verdicts, size, (queries, keys), min_full_width=apart)
    visits, unmasked = np.zeros((queries, keys), dtype=int), np.zeros((queries, keys), dtype=bool)
    for row in layout.rows:
        ends = [run.columns.stop for run in row.runs]
        assert ends == sorted(ends)
        for run in row.runs:
            assert run.columns.stop > run.columns.start
            visits[row.rows, run.columns] += 1
            unmasked[row.rows, run.columns] |= not run.masked
    assert ((visits == 1) == (each != EMPTY)).all()
    assert visits.max(initial=0) <= 1
    assert (each[unmasked] == FULL).all()
    assert layout.visited_pairs == int((each != EMPTY).sum())
    assert layout.masked_pairs == int(((each != EMPTY) & ~unmasked).sum())


@pytest.mark.parametrize(
    ("columns", "width", "expected"),
    [
        (slice(0, 0), 3, []),
        (slice(2, 5), 3, [slice(2, 5)]),
        (slice(2, 9), 3, [slice(2, 5), slice(5, 8), slice(8, 9)]),
    ],
)
def test_cut(columns, width, expected):
    assert list(split_slice(columns, width)) == expected
