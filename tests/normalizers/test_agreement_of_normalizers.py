"""Each normalizer, by each kernel that computes it, against its oracle in float64."""

from functools import partial

import pytest
import torch

import regard
from regard import masks, native, normalizers
from regard.core.problem import Problem
from regard.kernels import Result
from regard.kernels.planning.choice import ROW_KERNELS
from regard.testing import assert_agrees, long_cases, suite

from .oracles import ORACLES

KERNELS_BY_NAME = {kernel.name: kernel for kernel in ROW_KERNELS}


class Subject:
    """A kernel; that of tiles stores sums as logarithms, which float32 rounds by 2⁻²², and takes their exponential."""

    def __init__(self, name: str) -> None:
        self.name, self.kernel = name, KERNELS_BY_NAME[name]
        self.exponential = 2.0**-22 if name == "tiled" else 0.0

    def why_not(self, problem: Problem) -> list[str]:
        return self.kernel.why_not(problem)

    def run(self, problem: Problem) -> Result:
        return self.kernel.run(problem)


NATIVE = {"sigmoid": "cpu_flash", "sparsemax": "threshold", "entmax 1.5": "threshold"}
SHORT = (*NATIVE, "softpick", "relu", "squared relu", "stick-breaking", "top scores")
SUBJECTS = [(name, kernel) for name in ORACLES for kernel in ("tiled", "reference")]
if native.available():
    SUBJECTS += [*NATIVE.items(), *((name, "short") for name in SHORT)]


@pytest.mark.parametrize(("name", "kernel"), SUBJECTS)
def test_it_passes_the_agreement_suite(name, kernel, assert_all):
    oracle = ORACLES[name]
    pairs = list(suite([Subject(kernel)], strength=1 if kernel in ("tiled", "reference") else 2, oracle=oracle))
    # Infinity in a query or key may be a score of -inf, which counts for nothing; here rows that attend to it are NaN.
    pairs = [(kernel, case) for kernel, case in pairs if case.poison not in ("query", "key")]
    assert len(pairs) > 10
    assert_all(partial(assert_agrees, oracle=oracle), pairs)


@pytest.mark.skipif(not native.available(), reason="there is no native code")
@pytest.mark.parametrize(("name", "kernel"), NATIVE.items())
def test_it_agrees_over_several_blocks(name, kernel, assert_all):
    oracle = ORACLES[name]
    pairs = list(suite([Subject(kernel)], among=long_cases(), oracle=oracle))
    pairs = [(kernel, case) for kernel, case in pairs if case.poison not in ("query", "key")]
    assert len(pairs) > 3
    assert_all(partial(assert_agrees, oracle=oracle), pairs)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("name", "kernel"), NATIVE.items())
def test_it_agrees_on_a_gpu(name, kernel, assert_all):
    oracle, found = ORACLES[name], []
    for among in (None, long_cases()):
        found += suite([Subject(kernel)], strength=1, among=among, device="cuda", oracle=oracle)
    pairs = [(kernel, case) for kernel, case in found if case.poison not in ("query", "key")]
    assert len(pairs) > 10
    assert_all(partial(assert_agrees, device="cuda", oracle=oracle), pairs)


@pytest.mark.skipif(not native.available(), reason="there is no native code")
@pytest.mark.parametrize("normalizer", [normalizers.Sparsemax(), normalizers.Entmax(1.5)], ids=repr)
@pytest.mark.parametrize("deviation", [0.0, 0.05, 0.3])
def test_nearly_equal_scores_over_many_keys(normalizer, deviation):
    """Most keys have weight, or had it until the row was read to its end: they are kept in another way."""
    torch.manual_seed(3)
    for mask in (None, masks.causal(), masks.window(before=300, after=50), masks.causal() & masks.padding([600])):
        query, key, value, above = torch.randn(4, 1, 2, 733, 24).unbind()
        results = []
        for kernel, dtype in (("threshold", torch.float32), ("reference", torch.float64)):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in (query * deviation, key, value)]
            output = regard.attention(*leaves, mask=mask, normalizer=normalizer, kernel=kernel)
            results.append([output.detach(), *torch.autograd.grad(output, leaves, above.to(dtype))])
        for ours, exact in zip(*results, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-5 * max(1.0, float(exact.abs().max())))
