"""NaN and infinity behind a mask, where native code finds by itself whether its results are finite."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, native
from regard.backends.torch.tile_loop import TiledAttention
from regard.core.batched_problem import BatchedProblem, ProblemGradients, Saved
from regard.core.finite import CheckedRows
from regard.core.problem import Problem
from regard.kernels import Result, custom_op, nan_safety
from regard.kernels.base import EVERY_GRADIENT
from regard.kernels.reference import ReferenceKernel
from regard.kernels.validation import make_problem
from regard.masks import Mask

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

N, HEADS, DIM, LENGTH = 400, 2, 16, 350
CAUSAL, PADDING = masks.causal(), masks.padding([LENGTH])
"""No row attends to keys from LENGTH on; the last rows of a window attend to nothing."""
PATTERNS: dict[str, tuple[str, Mask]] = {
    "few keys": ("cpu_flash", CAUSAL & masks.window(before=20)),
    "many keys": ("cpu_flash", CAUSAL),
    "documents": ("cpu_flash", masks.documents([0] * 100 + [1] * (N - 100))),
    "residue classes": ("decomposed", masks.dilated(8, step=4)),
    "window and residue classes": ("decomposed", CAUSAL & (masks.window(before=16) | masks.strided(16))),
    "window and columns": ("decomposed", CAUSAL & masks.fixed(32, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": biases.alibi(HEADS)},
    "sinks": {"sinks": torch.tensor([0.5, -0.5])},
    "dropout": {"dropout_p": 0.3},
}
BAD = (math.nan, math.inf, -math.inf)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, N, DIM).to(dtype) for _ in range(4)]


def results(kernel: str, inputs: list[Tensor], mask: Mask, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of query, key and value."""
    torch.manual_seed(1)  # of dropout
    *leaves, above = inputs
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    output, lse = regard.attention_with_lse(*leaves, mask=mask, kernel=kernel, **options)
    return [output, lse, *torch.autograd.grad([output, lse], leaves, [above, torch.ones_like(lse)])]


def agree(has: list[Tensor], wanted: list[Tensor]) -> None:
    tolerance = 3e-4 if has[0].dtype == torch.float32 else 5e-2
    for one, other in zip(has, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_masked_for_all_rows_changes_nothing(pattern, option, dtype):
    kernel, mask = PATTERNS[pattern]
    clean, options = tensors(dtype), OPTIONS[option]
    expected = results(kernel, clean, mask & PADDING, **options)
    for bad in BAD:
        query, key, value, above = (tensor.clone() for tensor in clean)
        key[..., LENGTH + 10, 3], value[..., LENGTH + 20 :, :] = bad, bad
        found = results(kernel, [query, key, value, above], mask & PADDING, **options)
        assert all(tensor.isfinite().all() for number, tensor in enumerate(found) if number != 1)
        agree(found, expected)
        agree(found, results("reference", clean, mask & PADDING, **options))


@pytest.mark.parametrize("number", range(3), ids=("query", "key", "value"))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_attended_to_changes_its_rows_alone(threads, pattern, number):
    """As in the reference, whatever thread and block of rows it is in."""
    kernel, mask = PATTERNS[pattern]
    for place in (0, 70, 203, LENGTH - 1):
        inputs = [tensor.clone() for tensor in tensors()]
        inputs[number][0, 1, place, DIM - 1] = math.nan
        agree(results(kernel, inputs, mask & PADDING), results("reference", inputs, mask & PADDING))


@pytest.mark.parametrize("option", ["plain", "dropout"])
@pytest.mark.parametrize("pattern", [name for name in PATTERNS if "columns" not in name])  # their gradients are copied
def test_finite_results_are_not_read_for_nan(monkeypatch, pattern, option):
    def refuse(*read: Tensor) -> bool:
        raise AssertionError("results are read")

    monkeypatch.setattr(nan_safety, "all_finite", refuse)
    monkeypatch.setattr(custom_op, "all_finite", refuse)
    kernel, mask = PATTERNS[pattern]
    query, key, value, above = tensors()
    leaves = [leaf.requires_grad_() for leaf in (query, key, value)]
    output = regard.attention(*leaves, mask=mask & PADDING, kernel=kernel, **OPTIONS[option])
    torch.autograd.grad(output, leaves, above)
    inputs = [query, key, value.detach().index_fill(-2, torch.tensor(3), math.nan)]
    with torch.no_grad(), pytest.raises(AssertionError, match="results are read"):
        regard.attention(*inputs, mask=mask & PADDING, kernel=kernel)
    with pytest.raises(AssertionError, match="results are read"):
        torch.autograd.grad(
            regard.attention(*leaves, mask=mask & PADDING, kernel=kernel),
            leaves,
            above.index_fill(-2, torch.tensor(3), math.nan),
        )


class NeverMultiplied:
    """A kernel that says it never multiplies what is masked; in truth its inputs are made finite before."""

    name = "nan-safe for a test"

    def __init__(self) -> None:
        self.tiles = TiledAttention(64)
        custom_op.register(self)

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def gradients(self, problem: Problem) -> frozenset[str]:
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        return True

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        def compute(clean: Problem) -> Result:
            return Result(*self.tiles.forward(BatchedProblem.from_problem(clean)))

        problem = replace(batched.problem, sinks=None, wants_lse=True)
        result = nan_safety.run_nan_safe(problem, compute)
        return CheckedRows((result.output, custom_op.require_lse(result.lse)))

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        bad, bad_row = saved.output.isnan(), saved.lse.isnan()
        saved = replace(
            saved,
            output=saved.output.masked_fill(bad, 0.0),
            grad_output=saved.grad_output.masked_fill(bad, 0.0),
            lse=saved.lse.masked_fill(bad_row | saved.lse.isinf(), math.inf),
            grad_lse=saved.grad_lse.masked_fill(bad_row, 0.0),
        )
        clean = BatchedProblem.from_problem(nan_safety.zero_nonfinite_inputs(batched.problem))
        return self.tiles.backward(clean, saved)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_nobody_looks_at_results_of_a_kernel_that_is_safe(monkeypatch, sinks):
    """Neither at its output nor at gradients and log-sum-exps, and rows with NaN have no part in those of the sinks."""
    seen = []
    monkeypatch.setattr(custom_op, "some_nan_safe", lambda device, dtype: True)
    monkeypatch.setattr(custom_op, "all_finite", lambda *read: seen.append(read))
    monkeypatch.setattr(custom_op, "within_float32", lambda lse: seen.append(lse))
    mask, (query, key, value, above) = masks.causal() & masks.window(before=9), tensors()
    key[0, 0, 40, 3], value[0, 1, 90, 5] = math.nan, math.nan
    found = []
    for name in ("safe", "reference"):
        leaves = [leaf.clone().requires_grad_() for leaf in (query, key, value)]
        if sinks:
            leaves.append(torch.linspace(-1, 1, query.shape[1]).requires_grad_())
        problem = make_problem(*leaves[:3], mask=mask, sinks=leaves[3] if sinks else None)
        result = (
            custom_op.apply_kernel(problem, NeverMultiplied()) if name == "safe" else ReferenceKernel().run(problem)
        )
        found.append([result.output.detach(), *torch.autograd.grad(result.output, leaves, above)])
        assert seen == []
    assert found[1][0].isnan().any()
    agree(*found)
