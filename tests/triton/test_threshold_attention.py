"""Sparsemax and entmax in Triton, by its interpreter: held to their oracles, and to the formula in float64."""

import pytest
import torch

import regard
from regard import biases, masks, normalizers
from regard.backends.triton.triton_backend import TRITON
from regard.core.batched_problem import BatchedProblem, Saved
from regard.kernels import make_problem
from regard.kernels.normalizer_tiles import THRESHOLD
from regard.testing import Case, assert_agrees, suite

from ..normalizers.oracles import ORACLES

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of NaN, where a device has none
]

NORMALIZERS = normalizers.Sparsemax(), normalizers.Entmax(1.5), normalizers.Entmax(1.3)
LONGER = (
    ("sparsemax", Case(mask="causal", bias="relative", variant="softcap", layout="2d", lengths="67x131")),
    ("entmax 1.5", Case(mask="keep", bias="pairs", layout="3d", lengths="37x131", dropout="dropout", poison="masked")),
    ("entmax 1.3", Case(mask="causal", bias="relative", variant="softcap", layout="grouped", lengths="5x67")),
    ("entmax 1.3", Case(mask="keep", layout="3d", lengths="37x67", dropout="dropout", poison="masked")),
    ("entmax 1.3", Case(mask="documents", layout="2d", lengths="37x67", dtype="bfloat16", poison="value")),
    ("entmax 1.5", Case(mask="documents", layout="2d", lengths="37x67", dtype="bfloat16", poison="value")),
)


def test_the_agreement_suite():
    """Each normalizer has every third case: what differs between them is one line of a kernel."""
    oracles = ORACLES["sparsemax"], ORACLES["entmax 1.5"], ORACLES["entmax 1.3"]
    # Infinity in a query or key may be a score of -inf, which counts for nothing; here rows that attend to it are NaN.
    pairs = suite([THRESHOLD], strength=1, oracle=oracles[0])
    found = [(kernel, case) for kernel, case in pairs if case.poison not in ("query", "key")]
    assert len(found) > 10
    for number, (kernel, case) in enumerate(found):
        assert_agrees(kernel, case, oracle=oracles[number % 3])


@pytest.mark.parametrize(("name", "case"), LONGER, ids=lambda each: getattr(each, "id", each))
def test_several_tiles(name, case):
    assert_agrees(THRESHOLD, case, oracle=ORACLES[name])


@pytest.mark.parametrize(("normalizer", "dropout_p"), list(zip(NORMALIZERS, (0.25, 0.0, 0.0), strict=True)), ids=repr)
def test_gradients_of_grouped_heads_and_a_bias(normalizer, dropout_p):
    query, key, value = 2 * torch.randn(1, 2, 67, 16), torch.randn(1, 1, 131, 16), torch.randn(1, 1, 131, 24)
    above, table = torch.randn(1, 2, 67, 24), torch.randn(2, 32)
    results = []
    for kernel, dtype in (("threshold", torch.float32), ("reference", torch.float64), ("reference", torch.float32)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (query, key, value, table)]
        options = {"mask": masks.causal(), "softcap": 5.0, "dropout_p": dropout_p, "kernel": kernel}
        torch.manual_seed(5)
        output = regard.attention(*leaves[:3], bias=biases.relative(leaves[3]), normalizer=normalizer, **options)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, above.to(dtype))])
    for ours, exact, plain in zip(*results, strict=True):
        budget = 8 * (plain - exact).abs().max() + 2.0**-22 * exact.abs().max()
        assert (ours - exact).abs().max() <= budget
    assert results[0][4].abs().max() > 0.1


@pytest.mark.parametrize(("shape", "dropout_p"), [((), 0.0), ((2,), 0.25)], ids=str)
def test_gradients_of_a_learned_power(shape, dropout_p):
    """α of all heads, and of each: 1.2, where many keys have weight, and 2.5, where Newton's method goes too far."""
    query, key, value = 2 * torch.randn(1, 2, 37, 16), torch.randn(1, 1, 67, 16), torch.randn(1, 1, 67, 24)
    above, alpha = torch.randn(1, 2, 37, 24), torch.tensor([1.2, 2.5]) if shape else torch.tensor(1.3)
    results = []
    for kernel, dtype in (("threshold", torch.float32), ("reference", torch.float64), ("reference", torch.float32)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (query, key, value, alpha)]
        torch.manual_seed(5)
        options = {"mask": masks.causal() & masks.window(before=53), "dropout_p": dropout_p, "kernel": kernel}
        output = regard.attention(*leaves[:3], normalizer=normalizers.Entmax(leaves[3]), **options)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, above.to(dtype))])
    for ours, exact, plain in zip(*results, strict=True):
        budget = 8 * (plain - exact).abs().max() + 2.0**-22 * exact.abs().max()
        assert (ours - exact).abs().max() <= budget
    assert results[0][4].abs().min() > 0.01


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=repr)
@pytest.mark.parametrize(("deviation", "shift"), [(0.0, 1e4), (0.01, 0.0), (0.3, 500.0), (30.0, 0.0)])
def test_thresholds_over_many_keys(normalizer, deviation, shift):
    """Of equal scores all keys have weight, of scores far apart one; thresholds of large scores are as large."""
    query = torch.ones(1, 1, 3, 1)
    key = shift + deviation * torch.randn(1, 1, 997, 1)
    value = torch.randn(1, 1, 997, 4)
    mask = masks.causal() & masks.window(before=995)
    problem = make_problem(query, key, value, mask=mask, scale=1.0, normalizer=normalizer)
    code, batched, above = (
        TRITON.normalizer_tiles["threshold"],
        BatchedProblem.from_problem(problem),
        torch.randn(1, 1, 3, 4),
    )
    output, thresholds = code.forward(batched)
    found = code.backward(batched, Saved(output, thresholds, above, torch.zeros_like(thresholds)))
    keep = problem.keep()
    assert keep is not None
    scores = (query.double() @ key.double().mT).masked_fill(~keep, -torch.inf)
    weights, exact = normalizer.normalize(scores)
    # Thresholds and scores are rounded to float32 numbers; equal scores have equal weights all the same.
    spacing = 2.0**-23 * exact.abs().max().clamp(min=1.0)
    within = 4 * spacing if deviation else 2.0**-20
    assert (thresholds - exact).abs().max() <= 4 * spacing
    assert (output - weights @ value.double()).abs().max() <= within * value.abs().max()
    assert (found.value - weights.mT @ above.double()).abs().max() <= within * above.abs().max()


def test_nan_and_infinity_reach_the_rows_that_attend_to_them():
    query, key, value = (torch.randn(1, 2, 67, 16) for _ in range(3))
    key[0, 0, 40], key[0, 1, 50, 3], value[0, 0, 60] = torch.nan, torch.inf, torch.inf
    leaves = [each.requires_grad_() for each in (query, key, value)]
    output = regard.attention(*leaves, mask=masks.causal(), normalizer=normalizers.Entmax(1.5), kernel="threshold")
    finite = output.isfinite().all(-1)[0]
    assert finite[0, :40].all()
    assert not finite[0, 40:].any()
    assert finite[1, :50].all()
    assert not finite[1, 50:].any()
    gradients = torch.autograd.grad(output, leaves, torch.randn_like(output))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][0, 0, 40:] == 0).all()
    assert (gradients[1][0, 0, 40:] == 0).all()
    assert (gradients[0][0, 0, :40] != 0).any()


def test_rows_whose_norm_is_not_convex():
    """Of α = 4 two steps of Newton's method go to and fro in some of these rows."""
    scores, columns, normalizer = torch.randn(1, 1, 197, 5), torch.eye(5)[None, None], normalizers.Entmax(4.0)
    weights = regard.attention(scores, columns, columns, scale=1.0, normalizer=normalizer, kernel="threshold")
    exact, _ = normalizer.normalize(scores.double())
    # Thresholds are found to 2⁻²⁰, and a cube root at most as far off as that of the difference; sums divide them.
    assert (weights - exact).abs().max() <= 2 * (3 * 2.0**-20) ** (1 / 3)


def test_keys_hardly_above_the_first_threshold():
    """Of α = 10, whose sum they make steep: two equal keys far above it share the weight."""
    first, key = torch.tensor(-1.0 / 9.0), torch.zeros(1, 1, 13, 1)
    for number in range(2, 13):  # float32 numbers around it
        key[..., number, 0] = first + (number - 7) * 2.0**-27
    query, value = torch.ones(1, 1, 1, 1), torch.eye(13)[None, None]
    options = {"normalizer": normalizers.Entmax(10.0), "scale": 1.0}
    weights = regard.attention(query, key, value, kernel="threshold", **options)[0, 0, 0]
    assert (weights[:2] - 0.5).abs().max() <= 2.0**-22
    assert (weights[2:] == 0).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=repr)
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(normalizer, queries, keys):
    leaves = [torch.randn(1, 2, count, 16).requires_grad_() for count in (queries, keys, keys)]
    output = regard.attention(*leaves, normalizer=normalizer, kernel="threshold")
    assert (output == 0).all()
    gradients = torch.autograd.grad(output, leaves, torch.randn_like(output))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"normalizer": normalizers.Softpick()}, "its code computes normalizers.Sparsemax and normalizers.Entmax"),
        ({"normalizer": normalizers.Sparsemax(), "sinks": torch.zeros(2)}, "its code has no sinks"),
    ],
)
def test_what_is_refused(options, reason):
    tensors = torch.randn(3, 1, 2, 5, 8).unbind()
    with pytest.raises(regard.errors.KernelError, match=reason):
        regard.attention(*tensors, kernel="threshold", **options)
