"""Flash attention in Triton, by its interpreter: held to the oracle through the kernel that calls it, and by itself."""

import math
import mmap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.triton import launch_settings
from regard.backends.triton.device_tiles import SpanTiles
from regard.backends.triton.triton_backend import TRITON
from regard.core.batched_problem import BatchedProblem, ProblemGradients, Saved
from regard.core.dropout import Dropout
from regard.core.problem import Problem
from regard.kernels import make_problem
from regard.kernels.custom_op import add_sinks
from regard.kernels.flash import FlashKernel
from regard.testing import Case, Expected, assert_agrees, assert_close, suite

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of log2(0) and of NaN, where a device has none
]

INF, NAN = math.inf, math.nan
QUERIES, KEYS = 67, 131


def test_the_agreement_suite():
    found = list(suite([FlashKernel()], strength=1))
    assert len(found) > 15
    for kernel, case in found:
        assert_agrees(kernel, case)


LONGER = (
    Case(mask="causal", bias="relative", variant="softcap", layout="multiquery", lengths="67x131"),
    Case(mask="window", layout="2d", lengths="131x67", dtype="bfloat16", memory="strided"),
    Case(mask="keep", bias="pairs", layout="3d", lengths="67x131", dropout="dropout", poison="masked"),
    Case(mask="head-blocks&causal", variant="sinks", layout="multiquery", lengths="37x131", dtype="float16"),
    Case(mask="documents", bias="pairs+relative", layout="2d", lengths="67x70", poison="masked"),
    Case(mask="causal&padding", bias="clipped", layout="3d", lengths="37x67", dropout="dropout", poison="value"),
    Case(mask="strided", layout="2d", lengths="37x131", dtype="bfloat16", memory="broadcast", poison="masked"),
    Case(mask="dilated", bias="alibi", layout="2d", lengths="67x67", positions="scattered"),
)


@pytest.mark.parametrize("case", LONGER, ids=lambda case: case.id)
def test_several_tiles(case):
    assert_agrees(FlashKernel(), case)


def drawn(*, batch=1, heads=2, shared=1, queries=QUERIES, keys=KEYS, dim=16, value_dim=16, dtype=torch.float32):
    sizes = (heads, queries, dim), (shared, keys, dim), (shared, keys, value_dim)
    return [torch.randn(batch, *size).to(dtype) for size in sizes]


def problem_of(tensors, *, dropout: Dropout | None = None, **arguments) -> Problem:
    return replace(make_problem(*tensors, **arguments), dropout=dropout)


def formula(problem: Problem, above: Tensor, above_lse: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output, log-sum-exp and gradients of query, key, value and the parameters of a bias, by the formula."""
    tensors = problem.pairs.query, problem.pairs.key, problem.value
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    query, key, value = leaves
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = replace(problem.pairs, query=query, key=key).scores()
    parameters = []
    if problem.bias is not None:
        parameters = [parameter.detach().to(dtype).requires_grad_() for parameter in problem.bias.parameters()]
        scores = scores + problem.bias.with_parameters(parameters).evaluate(problem.grid())
    keep = problem.keep()
    keep = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.expand_as(scores)
    lse = scores.masked_fill(~keep, -INF).logsumexp(-1)
    weights = torch.exp(scores.masked_fill(~keep, -INF) - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1))
    if problem.dropout is not None:
        kept = problem.dropout.dropout_mask(*problem.dropout_indices(problem.grid()))
        weights = weights * kept / (1 - problem.dropout.probability)
    output, some = weights @ value, lse != -INF
    total = (output * above.to(dtype)).sum() + (lse[some] * above_lse.to(dtype)[some]).sum()
    gradients = torch.autograd.grad(total, [*leaves, *parameters])
    return [output.detach(), lse.detach(), *(gradient.nan_to_num(0.0) for gradient in gradients)]


def computed(problem: Problem, above: Tensor, above_lse: Tensor) -> list[Tensor]:
    """The same by the backend, without what kernels add."""
    flash, batched = TRITON.flash, BatchedProblem.from_problem(problem)
    assert flash is not None
    assert not flash.why_not(problem)
    with torch.no_grad():
        output, lse = flash.forward(batched)
        needs_bias = problem.bias is not None
        found = flash.backward(batched, Saved(output, lse, above, above_lse.masked_fill(lse == -INF, 0.0), needs_bias))
    return [output, lse, found.query, found.key, found.value, *found.bias]


def assert_near(problem: Problem) -> list[Tensor]:
    """Compare with float64, within what the same formula in float32 is off."""
    above = torch.randn(*problem.weights_shape[:-1], problem.value.shape[-1])
    above_lse = torch.randn(problem.weights_shape[:-1])
    found = computed(problem, above, above_lse)
    true, plain = (formula(problem, above, above_lse, dtype) for dtype in (torch.float64, torch.float32))
    size = max(float(gradient.abs().mean()) for gradient in true[2:])
    for number, (has, wanted, other) in enumerate(zip(found, true, plain, strict=True)):
        assert_close(
            has, Expected(wanted, torch.float32, [other], (0.0, 1.0)[number] if number < 2 else size), str(number)
        )
    return found


@pytest.mark.parametrize(("dim", "value_dim"), [(40, 24), (1, 3)])
def test_dims_that_are_no_powers_of_two(dim, value_dim):
    assert_near(problem_of(drawn(dim=dim, value_dim=value_dim), mask=masks.causal()))


@pytest.mark.parametrize(("dim", "value_dim"), [(576, 512), (257, 3), (7, 300)])
def test_wide_heads(dim, value_dim):
    """Of queries and keys two tiles, forward alone; a masked key that is NaN reaches no row."""
    query, key, value = drawn(queries=19, keys=67, dim=dim, value_dim=value_dim)
    key[:, :, -1], value[:, :, -1] = NAN, INF
    problem = problem_of((query, key, value), mask=masks.causal() & masks.padding(torch.tensor([66])))
    options = {"mask": masks.causal(), "query_positions": range(48, 67)}
    output, lse = TRITON.flash.forward(BatchedProblem.from_problem(problem))
    inputs = query, key[:, :, :66].repeat_interleave(2, 1), value[:, :, :66].repeat_interleave(2, 1)
    true, plain = (
        regard.attention_with_lse(*(each.to(dtype) for each in inputs), kernel="reference", **options)
        for dtype in (torch.float64, torch.float32)
    )
    assert_close(output, Expected(true[0], torch.float32, [plain[0]]), "output")
    assert_close(lse, Expected(true[1], torch.float32, [plain[1]], magnitude=1.0), "lse")


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale):
    assert_near(problem_of(drawn(shared=2), scale=scale))


def test_large_scores_of_a_negative_scale():
    """The running maximum is that of the scores, not of the products: exponentials do not overflow."""
    query, key, value = drawn()
    problem = problem_of((query, 30 * key, value), scale=-1.0)
    flash, scores = TRITON.flash, problem.pairs.scores()
    assert flash is not None
    output, _ = flash.forward(BatchedProblem.from_problem(problem))
    true = formula(problem, torch.zeros_like(output), torch.zeros(1, 2, QUERIES), torch.float64)[0]
    assert (output - true).abs().max() <= 4 * 2.0**-23 * scores.abs().max() * value.abs().max()


def test_more_queries_than_keys():
    found = assert_near(problem_of(drawn(queries=KEYS, keys=QUERIES), mask=masks.causal()))
    assert (found[0][:, :, : KEYS - QUERIES] == 0).all()
    assert (found[1][:, :, : KEYS - QUERIES] == -INF).all()
    assert (found[2][:, :, : KEYS - QUERIES] == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(queries, keys):
    tensors = drawn(queries=queries, keys=keys)
    output, lse, *gradients = computed(problem_of(tensors), torch.randn(1, 2, queries, 16), torch.randn(1, 2, queries))
    assert (output == 0).all()
    assert (lse == -INF).all()
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("tile", [(128, 32), (32, 16), (16, 128)])
@pytest.mark.parametrize("mask", ["spans", "bits"])
def test_tiles_of_other_sizes(monkeypatch, tile, mask):
    """Blocks of bits have 64 × 64 pairs, whatever the tiles."""
    monkeypatch.setattr(launch_settings, "INTERPRETED", launch_settings.LaunchSettings(tile[0], tile[1], 4, 1))
    allowed = masks.window(before=50, after=20) if mask == "spans" else masks.strided(5)
    bias = biases.clipped(torch.randn(1, KEYS + 20), before=KEYS - 1, after=20)
    problem = problem_of(drawn(heads=1), mask=allowed, bias=bias, dropout=Dropout(0.2, torch.tensor(7)))
    assert_near(problem)


@pytest.mark.parametrize("by", ["rows", "columns"])
def test_ranges_of_tiles_of_any_spans(by):
    """Each pair is in a tile of its range, and full tiles have all their pairs; rows of any order, and empty ones."""
    spans = torch.randint(-40, 171, (2, QUERIES, 2)).clamp(0, KEYS).int()
    spans[1] = spans[1, :1]  # full tiles as well
    keys = torch.arange(KEYS)
    kept = (keys >= spans[..., :1]) & (keys < spans[..., 1:])
    tiles, size = SpanTiles(spans, KEYS), {"rows": 16, "columns": 32}
    argument = tiles.of_rows(**size) if by == "rows" else tiles.of_columns(**size)
    blocks = (
        torch.nn.functional.pad(kept, (0, -KEYS % 32, 0, -QUERIES % 16)).unflatten(2, (-1, 32)).unflatten(1, (-1, 16))
    )
    exists = torch.nn.functional.pad(torch.ones(QUERIES, dtype=torch.bool), (0, -QUERIES % 16)).view(-1, 16)
    some, every = blocks.any(4).any(2), (blocks.all(4) | ~exists[None, :, :, None]).all(2)
    if by == "columns":
        some, every = some.mT, every.mT
    first, full, cut, last = argument.ranges.unsqueeze(-1).unbind(2)  # type: ignore[union-attr]
    at = torch.arange(some.shape[-1])
    assert not (some & ~((at >= first) & (at < last))).any()
    is_full = (at >= full) & (at < cut)
    assert not (is_full & ~every).any()
    assert is_full[1].any() or not every[1].any()
    assert ((first <= full) & (full <= cut) & (cut <= last)).all()


def test_strides_of_any_kind():
    query = torch.randn(QUERIES, 1, 2, 24)[..., 4:20].permute(1, 2, 0, 3)
    key = torch.randn(1, 1, KEYS, 16).expand(2, 2, KEYS, 16)[:1]
    value = torch.randn(1, KEYS, 2, 16).transpose(1, 2)
    assert_near(problem_of((query, key, value), mask=masks.window(before=20)))


def test_more_than_two_billion_numbers():
    """Offsets of batches and rows that do not fit into 32 bits, in memory of which few pages are touched."""
    row, batch = 2**24 - 64, 2**31 + 128
    memory = mmap.mmap(-1, 2 * (KEYS * row + batch), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = torch.frombuffer(memory, dtype=torch.float16)
    query, key, value = drawn(batch=2, heads=1, dtype=torch.float16)
    far = numbers.as_strided(key.shape, (batch, 1, row, 1))
    far.copy_(key)
    above, above_lse = torch.randn(2, 1, QUERIES, 16).half(), torch.randn(2, 1, QUERIES)
    found, wanted = (
        computed(problem_of((query, each, value), mask=masks.causal()), above, above_lse) for each in (far, key)
    )
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


@pytest.mark.parametrize("step", [1, 3])
def test_positions_that_are_ranges(step):
    problem = problem_of(drawn(), mask=masks.window(before=30, after=9), bias=biases.alibi(torch.rand(2)))
    positions = range(40 * step, (40 + QUERIES) * step, step), range(10 * step, (10 + KEYS) * step, step)
    problem = replace(problem, query_positions=positions[0], key_positions=positions[1])
    assert_near(replace(problem, dropout=Dropout(0.2, torch.tensor(7))))


PAIRS = {
    "every pair": (2, 2, QUERIES, KEYS),
    "shared by batches": (2, QUERIES, KEYS),
    "of keys, shared by heads": (2, 1, 1, KEYS),
    "of queries": (2, QUERIES, 1),
}


@pytest.mark.parametrize("shape", PAIRS.values(), ids=PAIRS)
def test_the_gradient_of_a_bias_over_pairs(shape):
    dropout = Dropout(0.2, torch.tensor(3)) if len(shape) == 4 else None
    bias = biases.tensor(torch.randn(shape))
    assert_near(problem_of(drawn(batch=2), mask=masks.causal(), bias=bias, dropout=dropout))


def test_a_bias_that_is_evaluated():
    bias = biases.tensor(torch.randn(KEYS)) + biases.alibi(torch.rand(2))
    assert_near(problem_of(drawn(), bias=bias))


def test_dropout_drops_what_the_library_drops():
    """Values are unit vectors and weights uniform: the output is the mask of dropout itself."""
    queries, keys = 33, 64
    dropout = Dropout(0.3, torch.tensor(-(2**61) - 12345), head_count=5, head_block=(2, 1, 4))
    query, key = torch.zeros(2, 3, queries, 16), torch.zeros(2, 3, keys, 16)
    value = torch.eye(keys).expand(2, 3, keys, keys)
    problem = problem_of((query, key, value), dropout=dropout)
    flash = TRITON.flash
    assert flash is not None
    output, _ = flash.forward(BatchedProblem.from_problem(problem))
    kept = dropout.dropout_mask(*problem.dropout_indices(problem.grid()))
    assert torch.equal(output != 0, kept.bool())
    part = BatchedProblem.from_problem(problem).part(slice(1, 2))
    assert torch.equal(flash.forward(part)[0], output[1:])


def halves(problem: Problem) -> list[Problem]:
    """The problem with the first 60 of its keys, and with the others."""
    found = []
    for keys in (slice(0, 60), slice(60, KEYS)):
        pairs = replace(problem.pairs, key=problem.pairs.key[..., keys, :])
        positions = range(KEYS - QUERIES, KEYS), range(KEYS)[keys]
        found.append(
            replace(
                problem,
                pairs=pairs,
                value=problem.value[..., keys, :],
                query_positions=positions[0],
                key_positions=positions[1],
            )
        )
    return found


@pytest.mark.parametrize("dropout", [None, Dropout(0.2, torch.tensor(11))])
def test_rows_are_merged_with_those_of_other_keys(dropout):
    """Also where the first keys have NaN that some rows attend to, and where a launch is repaired."""
    flash = TRITON.flash
    assert flash is not None
    query, key, value = drawn()
    value[:, :, 128] = NAN
    whole = problem_of((query, key, value), mask=masks.causal(), dropout=dropout)
    expected, expected_lse = flash.forward(BatchedProblem.from_problem(whole))
    output, lse = torch.empty(2, 1, QUERIES, 16).transpose(0, 1), torch.empty(1, QUERIES, 2).transpose(1, 2)
    for number, half in enumerate(halves(whole)):
        flash.forward_into(BatchedProblem.from_problem(half), output, lse, accumulate=number > 0)
    assert output.isnan().any()
    torch.testing.assert_close(output, expected, equal_nan=True, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-6)


def test_gradients_are_added_to_those_of_other_keys():
    flash = TRITON.flash
    assert flash is not None
    tensors, bias = drawn(), biases.clipped(torch.randn(2, 12), before=7, after=4)
    whole = problem_of(tensors, mask=masks.causal(), bias=bias)
    above, above_lse = torch.randn(1, 2, QUERIES, 16), torch.randn(1, 2, QUERIES)
    output, lse, *true = computed(whole, above, above_lse)
    batched = BatchedProblem.from_problem(whole)
    into = replace(batched.zero_gradients(bias=True), query=torch.zeros(1, QUERIES, 2, 16).transpose(1, 2))
    for keys, half in zip((slice(0, 60), slice(60, KEYS)), halves(whole), strict=True):
        own = replace(into, key=into.key[:, :, keys], value=into.value[:, :, keys])
        saved = Saved(output, lse, above, above_lse, needs_bias_grad=True)
        flash.backward_into(BatchedProblem.from_problem(half), saved, own, accumulate=True)
    for has, wanted in zip((into.query, into.key, into.value, *into.bias), true, strict=True):
        torch.testing.assert_close(has, wanted, rtol=0, atol=2e-5)
    again = ProblemGradients(torch.empty(1, 2, QUERIES, 16), torch.empty(1, 1, KEYS, 16), torch.empty(1, 1, KEYS, 16))
    flash.backward_into(batched, Saved(output, lse, above, above_lse), again, accumulate=False)
    for has, wanted in zip((again.query, again.key, again.value), true, strict=False):
        torch.testing.assert_close(has, wanted, rtol=0, atol=2e-6)


MASKS = {
    "spans": lambda: masks.causal(),
    "spans of a batch": lambda: masks.padding(torch.tensor([104, 21])),
    "bits": lambda: masks.causal() & masks.where(keep=torch.rand(2, 1, QUERIES, KEYS) < 0.5),
    "bits of heads": lambda: masks.causal() & masks.where(keep=torch.rand(2, 2, QUERIES, KEYS) < 0.5),
}


@pytest.mark.parametrize(
    ("mask", "heads", "dtype"),
    [
        ("spans", 1, torch.bfloat16),
        ("spans of a batch", 1, torch.float32),
        ("bits", 1, torch.float16),
        ("bits of heads", 2, torch.float32),
    ],
)
def test_nan_and_infinity_reach_what_attends_to_them_alone(mask, heads, dtype):
    """Forward as with 0 in their place, but for the rows that attend to them; backward as if these had no gradient."""
    query, key, value = drawn(batch=2, heads=heads, dtype=dtype)
    query[..., 0].abs_()  # so that infinity in a key is no score of -inf, whose weight is 0
    bad_key, bad_value = torch.zeros(KEYS, dtype=torch.bool), torch.zeros(KEYS, dtype=torch.bool)
    bad_key[[105, 120]], bad_value[[103, 130]] = True, True
    mask, bias = MASKS[mask](), biases.clipped(torch.randn(heads, 12), before=7, after=4)
    clean = problem_of((query, key, value), mask=mask, bias=bias)
    key, value = key.clone(), value.clone()
    key[:, :, 105, 1], key[:, :, 120, 0], value[:, :, 103, 1], value[:, :, 130, 2] = NAN, INF, NAN, -INF
    for number, column in ((105, None), (120, None), (103, 1), (130, 2)):
        if column is None:
            clean.pairs.key[:, :, number] = key[:, :, number].nan_to_num(0.0, 0.0, 0.0)
        else:
            clean.value[:, :, number] = value[:, :, number].nan_to_num(0.0, 0.0, 0.0)
    keep = clean.keep().expand(2, heads, QUERIES, KEYS)  # type: ignore[union-attr]
    rows = (keep & bad_key).any(-1)
    bad = rows.unsqueeze(-1).expand(2, heads, QUERIES, 16).clone()
    bad[..., 1] |= keep[..., 103]
    bad[..., 2] |= keep[..., 130]
    above, above_lse = torch.randn(2, heads, QUERIES, 16).to(dtype), torch.randn(2, heads, QUERIES)
    found = computed(problem_of((query, key, value), mask=mask, bias=bias), above, above_lse)
    assert torch.equal(~found[0].isfinite(), bad)
    assert torch.equal(found[1].isnan(), rows)
    expected = computed(clean, above.masked_fill(bad, 0.0), above_lse.masked_fill(rows, 0.0))
    assert torch.equal(found[0][~bad], expected[0][~bad])
    for has, wanted in zip(found[2:], expected[2:], strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(has, wanted, rtol=0, atol=8 * torch.finfo(has.dtype).eps * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("allowed", "sign"),
    [(None, -1.0), (masks.causal(), 1.0), (masks.strided(2), -1.0)],
    ids=["no mask", "spans", "bits"],
)
def test_a_key_that_infinity_gives_a_score_of_minus_infinity(allowed, sign):
    """It has weight 0 in a row, whose gradients are those without that pair; rows that score it +inf have none."""
    query, key, value = drawn()
    bias = biases.clipped(torch.randn(2, 12), before=7, after=4)
    bad = key.clone()
    bad[:, :, 110, 3], bad[:, :, 125, 2] = sign * INF, -INF
    problem = problem_of((query, bad, value), mask=allowed, bias=bias)
    keep = problem.keep()
    keep = torch.ones(1, 2, QUERIES, KEYS, dtype=torch.bool) if keep is None else keep.expand(1, 2, -1, -1).clone()
    scores = query @ bad.mT
    rows = (keep & (scores == INF)).any(-1)
    keep &= scores.isfinite()
    above, above_lse = torch.randn(1, 2, QUERIES, 16), torch.randn(1, 2, QUERIES)
    found = computed(problem, above, above_lse)
    assert torch.equal(found[0].isfinite().all(-1), ~rows)
    assert rows.any()
    assert not rows.all()
    clean = problem_of((query, key, value), mask=masks.where(keep=keep), bias=bias)
    above, above_lse = above.masked_fill(rows.unsqueeze(-1), 0.0), above_lse.masked_fill(rows, 0.0)
    expected = computed(clean, above, above_lse)
    for has, wanted in zip([each[~rows] for each in found[:2]], [each[~rows] for each in expected[:2]], strict=True):
        torch.testing.assert_close(has, wanted, rtol=0, atol=2e-6)
    for has, wanted in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(has, wanted, rtol=0, atol=8 * 2.0**-23 * float(wanted.abs().max()))


@pytest.mark.parametrize("infinite", ["query", "key"])
def test_a_row_whose_scores_are_all_minus_infinity_has_its_sink(infinite):
    """The whole weight is that of the sink: output and gradients of the row are 0."""
    query, key, value = (each.abs() for each in drawn(keys=5))
    (query if infinite == "query" else key)[:, :, :, 1] = -INF
    if infinite == "query":
        query[:, :, 1:, 1] = 1.0
    rows = torch.arange(QUERIES) < (1 if infinite == "query" else QUERIES)
    problem = problem_of((query, key, value), sinks=torch.tensor([0.5, -1.0]))
    sinks = torch.tensor([0.5, -1.0])[:, None]
    flash = TRITON.flash
    assert flash is not None
    batched = BatchedProblem.from_problem(problem)
    output, lse = add_sinks(*flash.forward(batched), sinks.squeeze(1))
    assert (output[:, :, rows] == 0).all()
    assert torch.equal(lse[0, :, rows], sinks.expand(2, int(rows.sum())))
    above = torch.randn(1, 2, QUERIES, 16)
    found = flash.backward(batched, Saved(output, lse, above, torch.zeros_like(lse)))
    query[:, :, rows] = 0.0
    left = problem_of((query, key.nan_to_num(0.0, 0.0, 0.0), value), sinks=problem.sinks)
    unseen = above.masked_fill(rows[:, None], 0.0)
    expected = flash.backward(
        BatchedProblem.from_problem(left),
        Saved(output, lse.masked_fill(rows, INF), unseen, torch.zeros_like(lse)),
    )
    for has, wanted in zip(
        (found.query, found.key, found.value), (expected.query, expected.key, expected.value), strict=True
    ):
        torch.testing.assert_close(has, wanted, rtol=0, atol=1e-6)
    assert (found.query[:, :, rows] == 0).all()


def test_weights_beside_large_scores():
    """Rows whose best keys tie at a score of 10⁶, where float32 would round the log-sum-exp by 0.06."""
    query, key, value = drawn()
    query[..., :], key[..., :], query[..., 0] = 0, 0, 1024.0
    key[..., 0] = torch.randint(0, 3, (1, 1, KEYS)) * 1024.0  # a third of the keys has the largest score
    problem = problem_of((query, key, value), mask=masks.causal(), scale=1.0)
    assert float(assert_near(problem)[1].min()) > 2.0**14


def test_a_sink_beside_large_scores():
    """Of each row the sink has the weight of one key more."""
    query, key, value = drawn(keys=5)
    query[..., :], key[..., :] = 256.0, 256.0
    sinks = torch.full((2,), 256.0**2 * 16)
    problem = problem_of((query, key, value), scale=1.0, sinks=sinks)
    above, lse = torch.randn(1, 2, QUERIES, 16), torch.full((1, 2, QUERIES), float(sinks[0]) + math.log(6))
    output = (value.sum(2, keepdim=True) / 6).expand(1, 2, QUERIES, 16)
    flash = TRITON.flash
    assert flash is not None
    found = flash.backward(BatchedProblem.from_problem(problem), Saved(output, lse, above, torch.zeros_like(lse)))
    wanted = above.sum((1, 2)).expand(1, 1, 5, 16) / 6
    torch.testing.assert_close(found.value, wanted, rtol=1e-5, atol=1e-5)


def test_a_large_log_sum_exp_of_more_keys_is_taken_as_it_is():
    query, key, value = drawn(keys=4)
    query[..., :], key[..., :] = 64.0, 64.0
    problem = problem_of((query, key, value), scale=1.0)
    above, lse = torch.ones(1, 2, QUERIES, 16), torch.full((1, 2, QUERIES), 64.0**2 * 16 + math.log(1024))
    saved = Saved(torch.zeros(1, 2, QUERIES, 16), lse, above, torch.zeros_like(lse))
    flash = TRITON.flash
    assert flash is not None
    found = flash.backward(BatchedProblem.from_problem(problem), saved)
    torch.testing.assert_close(found.value, torch.full_like(value, 2 * QUERIES / 1024), rtol=2.0**-8, atol=0)


def test_what_it_does_not_compute():
    flash = TRITON.flash
    assert flash is not None
    wide = problem_of(drawn(dim=577, queries=2, keys=2))
    limits = "its code takes head dims from 1 to 576 of keys and 512 of values"
    assert flash.why_not(wide) == [f"{limits}; these are 577 and 16"]
    query, key, value = drawn(dim=257, queries=2, keys=2)
    assert not flash.why_not(problem_of((query, key, value)))
    assert flash.why_not(problem_of((query, key.requires_grad_(), value))) == [
        "its code has gradients for head dims up to 256; these are 257 and 16, and a tensor requires a gradient"
    ]
    many, pairs = torch.zeros(1).expand(1, 2, 4096, 16), torch.zeros(1).expand(2, 4096, 4096)
    bias = biases.tensor(torch.zeros(4096)) + biases.tensor(pairs)
    assert "33,554,432 numbers" in flash.why_not(make_problem(many, many, many, bias=bias))[0]
