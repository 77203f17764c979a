"""Attention over several processes equals that of one: outputs, log-sum-exps and gradients, beside float64."""

import pytest
import torch
from processes import MOST, Pool
from ring_cases import RingCase, random_case

import regard.ring as ring
from regard import native

TOLERANCE = {"dot": 1e-6, "additive": 1e-5}
"""Relative errors; the additive kernels compute tanh by exponentials of the tokens, and that with an error of 1e-5."""
EPS = torch.finfo(torch.float32).eps
ROUNDING = 4 * EPS
"""The error of a number that is a sum of terms of size one, as gradients are, however much they cancel."""


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the difference; infinite numbers have to be the same."""
    infinite = truth.isinf()
    assert found[infinite].double().equal(truth[infinite])
    return float((found.double() - truth)[~infinite].norm())


def check(pool: Pool, case: RingCase, processes: int) -> None:
    answers = pool.run("attention", processes, case=case)
    assert isinstance(answers[0], dict), answers[0]
    truth, single = case.expected(torch.float64), case.expected(torch.float32)
    assert answers[0].keys() == truth.keys()
    for name, found in answers[0].items():
        size = float(truth[name][~truth[name].isinf()].norm())
        # Gradients of parameters are sums over all rows, of terms of size one that are rounded independently.
        of_one, rows = 2 * distance(single[name], truth[name]), truth["lse"].numel()
        rounding = ROUNDING if truth[name].ndim > 1 else max(ROUNDING, EPS * rows**0.5)
        budget = max(TOLERANCE[case.score] * size, rounding * truth[name].numel() ** 0.5, of_one)
        error = distance(torch.from_numpy(found), truth[name])
        assert error <= budget, f"{name} of {case}: error {error:.2g} of {size:.2g}, twice that of one is {of_one:.2g}"


def numbers(first: int, count: int) -> list:
    """Numbers of random problems and of processes; those after the first thirty are slow."""
    return [
        pytest.param(number, 1 + number % MOST, marks=[pytest.mark.slow] * (number >= first + 30))
        for number in range(first, first + count)
    ]


@pytest.mark.parametrize(("number", "processes"), numbers(0, 400))
def test_random_problems(pool, number, processes):
    check(pool, random_case(number, processes), processes)


@pytest.mark.parametrize(("processes", "head_parallel"), [(2, 2), (4, 2), (4, 4), (3, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "causal window", "bias": "relative", "sinks": True},
        {"mask": "heads", "bias": "mod", "dropout": 0.3, "batch": (2,)},
        {"mask": "documents", "score": "additive", "dropout": 0.2, "batch": (2, 1)},
        {"mask": "none", "bias": "alibi", "softcap": 2.0, "key_groups": 2},
    ],
    ids=lambda options: options["mask"],
)
def test_heads_over_processes(pool, processes, head_parallel, options):
    heads = 2 * head_parallel
    key_heads = heads // options.get("key_groups", 1)
    options = {name: value for name, value in options.items() if name != "key_groups"}
    layout = ring.Zigzag() if processes == 4 else ring.Contiguous()
    case = RingCase(
        7, 61, layout=layout, heads=heads, key_heads=key_heads, head_parallel=head_parallel, reach=9, **options
    )
    check(pool, case, processes)


@pytest.mark.skipif(not native.available(), reason="the kernel that adds in place is of native code")
@pytest.mark.parametrize("memory", ["windows", "transposed"])
@pytest.mark.parametrize("batch", [(2,), (2, 3)], ids=str)
def test_inputs_of_any_strides(pool, memory, batch):
    """Gradients are made like the inputs and added to in place, by native code too."""
    check(pool, RingCase(17, 11, heads=4, key_heads=2, batch=batch, memory=memory, kernel="cpu_flash"), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(pool, dtype):
    """Half precision is as near to float64 as in one process: partial results are not rounded to it."""
    case = RingCase(13, 150, layout=ring.Zigzag(), bias="relative", sinks=True, heads=4, key_heads=2, precision=dtype)
    found = pool.run("attention", 4, case=case, dtype=dtype)[0]
    truth, single = case.expected(torch.float64), case.expected(dtype)
    whole, _, _ = case.tensors(dtype)
    assert whole["query"].dtype == dtype
    for name in ("output", "query", "key", "value"):
        error = distance(torch.from_numpy(found[name]), truth[name])
        assert error <= 1.5 * distance(single[name], truth[name]) + 1e-12
