"""Tokens of many sequences over keys in pages, in Triton, by its interpreter: against the formula in float64."""

import math
from itertools import product

import pytest
import torch

import regard
from regard import masks
from regard.backends.base import TokenRuns
from regard.backends.triton.paged_tiles import PagedInTriton, page_tables
from regard.backends.triton.triton_backend import TRITON
from regard.nn.caches import LayerHeads, PagedMemory, RaggedStep
from regard.testing import Expected, assert_close

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of log2(0) and of NaN, where a device has none
]

HEADS, KEY_HEADS, DIM, VALUE_DIM, ROWS, TOKENS, SCALE = 6, 2, 37, 53, 997, 12, 0.3
GROUPS = (
    TokenRuns(0, 1, 431, ((3, 300), (700, 131))),
    TokenRuns(1, 4, 97, ((600, 100),)),  # causal: each next token sees one more
    TokenRuns(6, 3, 131, ((400, 67), (500, 66))),
    TokenRuns(9, 2, 2, ((40, 1), (60, 1), (50, 1))),
)
"""Of 12 tokens, of which 5 and 11 are in no group."""


def formula(inputs, dtype):
    """Output (H, T, Dv) and log-sum-exp (H, T), one token at a time."""
    query, key, value = inputs
    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=dtype)
    lse = torch.full(output.shape[:2], -math.inf, dtype=dtype)
    for group in GROUPS:
        rows = torch.cat([torch.arange(first, first + count) for first, count in group.runs])
        for token, head in product(range(group.tokens), range(HEADS)):
            seen, own, at = rows[: group.limit + token], head // (HEADS // KEY_HEADS), group.token + token
            scores = SCALE * key[own, seen].to(dtype) @ query[head, at].to(dtype)
            lse[head, at] = scores.logsumexp(0)
            output[head, at] = (scores - lse[head, at]).exp() @ value[own, seen].to(dtype)
    return output, lse


def drawn(dtype=torch.float32, dim=DIM, value_dim=VALUE_DIM):
    shapes = (HEADS, TOKENS, dim), (KEY_HEADS, ROWS, dim), (KEY_HEADS, ROWS, value_dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def attended(inputs, groups=GROUPS):
    query, key, value = inputs
    assert isinstance(TRITON.paged, PagedInTriton)
    return TRITON.paged.forward(query, key, value, SCALE, groups)


def assert_near(found, inputs):
    """Float64, within what the same formula in float32 is off; weights are rounded to the dtype of values."""
    true, plain = (formula(inputs, dtype) for dtype in (torch.float64, torch.float32))
    assert found[0].dtype == torch.float32
    assert_close(found[0].to(inputs[2].dtype), Expected(true[0], inputs[2].dtype, [plain[0]]), "output")
    assert_close(found[1], Expected(true[1], torch.float32, [plain[1]], magnitude=1.0), "lse")
    assert not found[0][:, [5, 11]].any()
    assert found[1][:, [5, 11]].eq(-math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_token_attends_to_its_keys(dtype):
    inputs = drawn(dtype)
    assert_near(attended(inputs), inputs)


def test_a_memory_of_any_strides_and_a_query_of_another_dtype():
    query, key, value = drawn(torch.float16)
    query = torch.randn(TOKENS, HEADS, DIM).transpose(0, 1)
    wide = torch.full((ROWS, KEY_HEADS, VALUE_DIM + 3), math.nan, dtype=torch.float16)
    wide[..., :VALUE_DIM] = value.transpose(0, 1)
    value = wide[..., :VALUE_DIM].transpose(0, 1)
    assert_near(attended((query, key, value)), (query, key, value))


def test_what_no_token_attends_to_reaches_none():
    """NaN in rows of no run, and in the keys that only later tokens of a group see."""
    inputs = drawn()
    read = torch.zeros(ROWS, dtype=torch.bool)
    for group in GROUPS:
        for first, count in group.runs:
            read[first : first + count] = True
    dirty = [inputs[0], *(each.masked_fill(~read[:, None], math.nan) for each in inputs[1:])]
    dirty[2][:, 600 + 98] = math.inf  # the last tokens of the second group, 3 and 4, attend to it
    found = attended(dirty)
    seen = [3, 4]
    assert not found[0][:, seen].isfinite().any()
    true, plain = (formula(inputs, dtype) for dtype in (torch.float64, torch.float32))
    for each in (found, true, plain):
        each[0][:, seen] = 0.0
    assert_close(found[0], Expected(true[0], torch.float32, [plain[0]]), "output")


def test_parts_of_long_sequences():
    """Every piece of a run is read once, and no program has more tiles than its share."""
    tables = page_tables(GROUPS, TOKENS, 3, 16, 5, torch.device("cpu"))
    rows = torch.cat([torch.arange(first, first + count) for first, count, _ in tables.tiles.tolist()])
    assert rows.tolist() == [
        row for group in GROUPS for first, count in group.runs for row in range(first, first + count)
    ]
    longest = -(-len(tables.tiles) // 5)
    starts, stops = tables.units[:, 3], tables.units[:, 4]
    assert starts.tolist() == [0, *stops[:-1].tolist()]
    assert stops[-1] == len(tables.tiles)
    assert 0 < (stops - starts).min() <= (stops - starts).max() <= longest
    sums = sorted(
        first + head * step + part
        for first, step, parts in tables.spans.tolist()
        for head in range(3)
        for part in range(parts)
    )
    assert sums == list(range(tables.sums))


def test_no_groups():
    output, lse = attended(drawn(), ())
    assert not output.any()
    assert lse.eq(-math.inf).all()
    query, key, value = drawn()
    assert attended((query[:, :0], key, value), ())[0].shape == (HEADS, 0, VALUE_DIM)


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal() & masks.window(before=20)], ids=str)
def test_a_step_of_sequences_in_pages(mask, monkeypatch):
    """Each attends to the keys in its own pages, which are not neighbours, as by a call for it alone."""
    memory = PagedMemory([LayerHeads(2, 16, 24)], pages=14, size=16)
    texts = memory.sequence("first"), memory.sequence("second")
    for _ in range(3):  # in turn, so that pages of the two alternate
        for text, more in zip(texts, (21, 30), strict=True):
            text.extend(range(more))
    key, value = (torch.randn(1, 2, 153, dim) for dim in (16, 24))
    whole = {0: slice(0, 63), 1: slice(63, 153)}
    for number, text in enumerate(texts):
        slots = torch.tensor(list(text.slots(range(len(text)))))
        memory.layers[0].write(slots, key[:, :, whole[number]], value[:, :, whole[number]], {})
    query, sinks = torch.randn(1, 4, 6, 16), torch.randn(4)
    called = []
    forward = PagedInTriton.forward
    monkeypatch.setattr(PagedInTriton, "forward", lambda *given: called.append(0) or forward(*given))
    step = RaggedStep.of(memory, [(texts[0], 1), (texts[1], 5)])
    found, _ = step.layer(0).attend((query, key, value), {"mask": mask, "sinks": sinks})
    assert called
    for rows, own in ((slice(0, 1), whole[0]), (slice(1, 6), whole[1])):
        true, plain = (
            regard.attention(
                *(each.to(dtype) for each in (query[:, :, rows], key[:, :, own], value[:, :, own])),
                mask=mask,
                sinks=sinks.to(dtype),
                kernel="reference",
            )
            for dtype in (torch.float64, torch.float32)
        )
        assert_close(found[:, :, rows].contiguous(), Expected(true, torch.float32, [plain]))
