"""The parts that sparse masks list are disjoint, and their union is the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import masks
from regard.errors import MaskError
from regard.masks import Mask
from regard.masks.parts import Part, PeriodicPositions
from regard.masks.sparse_patterns import Strided
from regard.testing import assert_parts

LEAVES = st.one_of(
    st.just(masks.causal()),
    st.integers(0, 6).map(lambda before: masks.window(before=before)),
    st.integers(1, 7).map(masks.strided),
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)).map(lambda sizes: masks.dilated(*sizes)),
    st.tuples(st.integers(1, 8), st.integers(0, 8)).map(lambda sizes: masks.fixed(sizes[0], min(sizes))),
    st.lists(st.integers(0, 20), max_size=3).map(masks.global_tokens),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=5,
)


@given(mask=EXPRESSIONS, queries=st.integers(0, 17), keys=st.integers(0, 23), first=st.integers(0, 9))
def test_parts_are_disjoint_and_make_up_the_mask(mask: Mask, queries: int, keys: int, first: int):
    assert_parts(mask, range(first, first + queries), range(keys))


def test_a_mask_without_parts_lists_none():
    for mask in (masks.causal(), masks.window(before=3), masks.causal() & masks.window(before=3), ~masks.strided(3)):
        assert mask.parts == ()


def test_the_parts_of_the_sparse_transformer():
    mask = masks.causal() & (masks.window(before=128) | masks.strided(128))
    assert [str(part) for part in mask.parts] == [
        "causal() & window(before=128)",
        "residues mod 128 of causal() & ~window(before=128)",
    ]


def test_a_claim_that_does_not_hold_is_found():
    class Wrong(Strided):
        @property
        def parts(self):
            return masks.strided(4).parts

    with pytest.raises(AssertionError, match="query position 0 and key position 3"):
        assert_parts(Wrong(3), range(4), range(4))


def test_overlapping_parts_are_found():
    class Doubled(Strided):
        @property
        def parts(self):
            return (*masks.strided(3).parts, *masks.strided(3).parts)

    with pytest.raises(AssertionError, match="in 2 of its parts"):
        assert_parts(Doubled(3), range(4), range(4))


@pytest.mark.parametrize(("step", "columns"), [(0, None), (3, PeriodicPositions(4, 3))])
def test_parts_that_no_kernel_selects_are_refused(step: int, columns: PeriodicPositions | None):
    with pytest.raises(MaskError, match=f"has step={step}, .* above 1 neither rows nor columns"):
        Part(None, step=step, columns=columns)


def test_a_tensor_over_pairs_keeps_its_order():
    mask = masks.strided(2) & masks.where(keep=torch.ones(4, 4, dtype=torch.bool))
    assert mask.parts
    assert not mask.by_position
