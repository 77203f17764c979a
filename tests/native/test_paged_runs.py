"""Tokens of many sequences over keys in pages, in C, against the formula in float64."""

import math
from itertools import product

import pytest
import torch

from regard import native
from regard.backends.base import TokenRuns
from regard.backends.cpu import library, paged_runs
from regard.backends.cpu.paged_runs import PagedInC

HEADS, KEY_HEADS, DIM, VALUE_DIM, ROWS = 6, 2, 37, 53, 1500
GROUPS = (
    TokenRuns(0, 1, 700, ((3, 500), (1000, 200))),
    TokenRuns(1, 4, 97, ((700, 100),)),  # causal: each next token sees one more
    TokenRuns(6, 3, 131, ((1300, 67), (800, 66))),
    TokenRuns(9, 2, 2, ((40, 1), (60, 1), (50, 1))),
)
TOKENS = 12  # of which 5 and 11 are in no group
needs_native = pytest.mark.skipif(bool(native.why_not()), reason="no native code")


def oracle(query, key, value, scale, groups):
    """Output (T, H, Dv) and log-sum-exp (T, H) in float64, one token at a time."""
    output = torch.zeros(query.shape[1], HEADS, value.shape[2], dtype=torch.float64)
    lse = torch.full(output.shape[:2], -math.inf, dtype=torch.float64)
    for group in groups:
        rows = torch.cat([torch.arange(first, first + count) for first, count in group.runs])
        for token, head in product(range(group.tokens), range(HEADS)):
            seen, own = rows[: group.limit + token], head // (HEADS // KEY_HEADS)
            at = group.token + token
            scores = scale * key[own, seen].double() @ query[head, at].double()
            lse[at, head] = scores.logsumexp(0)
            output[at, head] = (scores - lse[at, head]).exp() @ value[own, seen].double()
    return output, lse


def drawn(dtype=torch.float32, dim=DIM, value_dim=VALUE_DIM):
    generator = torch.Generator().manual_seed(1)
    shapes = (HEADS, TOKENS, dim), (KEY_HEADS, ROWS, dim), (KEY_HEADS, ROWS, value_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("variant", library.variants())
@pytest.mark.parametrize("dtype", library.DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), [(DIM, VALUE_DIM), (64, 64)])
def test_each_token_attends_to_its_keys(variant, dtype, dim, value_dim):
    query, key, value = drawn(dtype, dim, value_dim)
    expected, expected_lse = oracle(query, key, value, 0.3, GROUPS)
    with library.using(variant):
        output, lse = PagedInC().forward(query, key, value, 0.3, GROUPS)
    # Terms of a sum are rounded to the dtype where it is multiplied in pairs: a unit in the last place of the largest.
    budget = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    assert (output.transpose(0, 1) - expected).abs().max() < budget * value.abs().max()
    known = expected_lse.isfinite()
    assert (lse.transpose(0, 1)[known] - expected_lse[known]).abs().max() < budget * 0.3 * dim
    assert torch.equal(lse.transpose(0, 1).isinf(), ~known)
    assert not output[:, [5, 11]].any()


@needs_native
def test_cut_runs_are_merged(monkeypatch):
    query, key, value = drawn()
    whole = PagedInC().forward(query, key, value, 0.3, GROUPS)
    paged_runs._runs.cache_clear()
    monkeypatch.setattr(paged_runs, "LEAST_KEYS", 7)
    monkeypatch.setattr(paged_runs, "LEAST_WORK", 1)
    monkeypatch.setattr(paged_runs, "UNITS", 10_000)
    table, rows = paged_runs._runs(GROUPS, 3, KEY_HEADS, 2)
    assert len(table) > 100
    assert rows > 100 * 3
    for result, expected in zip(PagedInC().forward(query, key, value, 0.3, GROUPS), whole, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    paged_runs._runs.cache_clear()


@needs_native
def test_a_memory_of_any_strides():
    query, key, value = drawn()
    padded_key, padded_value = torch.zeros(KEY_HEADS, ROWS, DIM + 3), torch.zeros(ROWS, KEY_HEADS, VALUE_DIM)
    padded_key[..., :DIM], padded_value[:] = key, value.transpose(0, 1)
    found = PagedInC().forward(query, padded_key[..., :DIM], padded_value.transpose(0, 1), 0.3, GROUPS)
    for result, expected in zip(found, PagedInC().forward(query, key, value, 0.3, GROUPS), strict=True):
        assert torch.equal(result, expected)


@needs_native
def test_no_groups():
    query, key, value = drawn()
    output, lse = PagedInC().forward(query, key, value, 0.3, ())
    assert not output.any()
    assert lse.isinf().all()
