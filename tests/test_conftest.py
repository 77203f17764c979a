"""The guard in conftest.py is at work: memory that regard allocates is NaN until something is written to it."""

import itertools
from pathlib import Path

import pytest
import torch

import regard
from regard import native

INSIDE = str(Path(regard.__file__).parent / "made_up.py")
OUTSIDE = str(Path(regard.__file__).parent.parent / "made_up.py")


def evaluate(expression: str, filename: str) -> torch.Tensor:
    """The value of an expression, as if it stood in that file."""
    return eval(compile(expression, filename, "eval"), {"torch": torch})


@pytest.mark.parametrize(
    "expression",
    [
        "torch.empty(3)",
        "torch.empty(3, dtype=torch.bfloat16, requires_grad=True)",
        "torch.empty_like(torch.zeros(3))",
        "torch.empty_strided((3,), (2,))",
        "torch.zeros(()).new_empty((3,))",
        "torch.empty(3, dtype=torch.complex64)",
    ],
)
def test_memory_that_regard_allocates_is_nan(expression):
    assert evaluate(expression, INSIDE).isnan().all()


def test_memory_that_others_allocate_is_left_alone():
    # With out= the content is known, so that a NaN can only come from the guard.
    expression = "torch.empty(3, out=torch.zeros(3))"
    assert evaluate(expression, INSIDE).isnan().all()
    assert evaluate(expression, OUTSIDE).equal(torch.zeros(3))


def test_integers_cannot_be_poisoned_and_still_work():
    assert evaluate("torch.empty(3, dtype=torch.int64)", INSIDE).shape == (3,)


def test_threads_are_limited():
    assert torch.get_num_threads() <= 2


@pytest.mark.parametrize("attempt", [1, 2])
def test_every_test_starts_from_the_same_seed(attempt):
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


def held_together(rows, strength):
    return {choices for row in rows for choices in itertools.combinations(row.items(), strength)}


def test_a_variant_that_does_not_run_is_refused(pytestconfig, monkeypatch):
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))
    assert conftest is not None
    monkeypatch.setattr(native, "why_not", lambda: "REGARD_NATIVE is 'avx9'")
    monkeypatch.setattr(native, "available", lambda: False)
    for allowed in ("", "off"):
        monkeypatch.setenv("REGARD_NATIVE", allowed)
        conftest.check_variant()
    monkeypatch.setenv("REGARD_NATIVE", "avx9")
    with pytest.raises(pytest.UsageError, match="is 'avx9'"):
        conftest.check_variant()


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_few_combinations_hold_what_all_hold_together(pytestconfig, strength):
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parent / "conftest.py"))
    assert conftest is not None
    rows = [dict(zip("abcd", row, strict=True)) for row in itertools.product(range(3), repeat=4) if sum(row) != 4]
    chosen = conftest.covering_rows(rows, strength)
    assert held_together([rows[index] for index in chosen], strength) == held_together(rows, strength)
    assert len(chosen) < {1: 6, 2: 18, 3: 45}[strength]  # of 62; 3, 9 and 27 at least
    assert conftest.covering_rows([], strength) == set()


@pytest.mark.covering(strength=1, within=["kernel"])
@pytest.mark.parametrize("first", "abc")
@pytest.mark.parametrize("second", "de")
@pytest.mark.parametrize("kernel", "xy")
def test_combinations_that_hold_nothing_new_are_slow(request, kernel, second, first):
    """Of each kernel three of six are run, and all by `-m ""`."""
    name = request.node.originalname  # doctests have none
    items = [item for item in request.session.items if getattr(item, "originalname", None) == name]
    assert request.node in items
    fast = [item.callspec.params for item in items if item.get_closest_marker("slow") is None]
    if len(items) == 12 or (fast and len(items) == 6):  # else a part was asked for: by name, or the slow alone
        for other in "xy":
            of_kernel = [params for params in fast if params["kernel"] == other]
            assert len(of_kernel) == 3
            assert {params["first"] for params in of_kernel} == {*"abc"}
            assert {params["second"] for params in of_kernel} == {*"de"}
