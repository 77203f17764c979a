"""How many files of the package one call of `regard.attention` enters: a reader has to open as many to follow it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regard
from regard import native
from regard.kernels.planning.rates import ZEN_4
from regard.linear import Relu
from regard.masks import causal, window

from .test_architecture import depth, module_name, place

PACKAGE = Path(regard.__file__).parent


def entered_files(call: Callable[[], object]) -> list[str]:
    """The files of the package whose functions a call enters, in the order in which it first does."""
    files: dict[str, None] = {}

    def profile(frame, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.setdefault(path.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(files)


def calls_between_files(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The calls that go from one file of the package to another: caller and callee, in their order."""
    found: list[tuple[str, str]] = []

    def profile(frame, event: str, _: object) -> None:
        if event != "call" or frame.f_back is None:
            return
        caller, callee = Path(frame.f_back.f_code.co_filename), Path(frame.f_code.co_filename)
        if caller != callee and caller.is_relative_to(PACKAGE) and callee.is_relative_to(PACKAGE):
            found.append((module_name(caller), module_name(callee)))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def path(*sizes: int, **options) -> list[str]:
    """The files that attention over inputs of these sizes enters once its caches are warm."""
    query, key, value = (torch.randn(*sizes) for _ in range(3))
    for _ in range(2):
        regard.attention(query, key, value, **options)
    files = entered_files(lambda: regard.attention(query, key, value, **options))
    if len(files) > 2 and files[1] == "attention.py":  # the short way had nothing of its like, which is one look
        assert files[0] == "small_calls.py"
        return files[1:]
    return files


MASK = causal() & window(before=127)


@pytest.mark.parametrize(
    ("sizes", "options", "kernel", "most"),
    [
        pytest.param((1, 8, 1024, 64), {"kernel": "reference"}, "kernels/formula.py", 7, id="reference"),
        pytest.param((1, 8, 1024, 64), {}, None, 13, id="default"),
        pytest.param((1, 8, 1024, 64), {"softcap": 30.0}, "kernels/flash.py", 13, id="default, native"),
        pytest.param((1, 8, 16, 64), {}, "small_calls.py", 7, id="default of few pairs"),
        pytest.param((1, 8, 1024, 64), {"mask": MASK}, "kernels/flash.py", 15, id="causal window"),
    ],
)
def test_a_call_enters_few_files(priced_as, sizes, options, kernel, most):
    priced_as(ZEN_4, "avx512")
    if kernel in ("kernels/flash.py", "small_calls.py") and not native.available():
        pytest.skip("without native code other kernels are chosen")
    if kernel is None:  # the fastest, which without native code is another
        module = type(regard.explain(*torch.randn(3, *sizes)).kernel).__module__
        kernel = f"kernels/{module.rpartition('.')[2]}.py"
    files = path(*sizes, **options)
    print(f"{len(files)} files: {' -> '.join(files)}")  # noqa: T201, the path is for a reader: pytest -s
    assert kernel in files
    assert len(files) <= most


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"mask": MASK}], ids=["default", "softcap", "window"])
def test_a_call_goes_down(priced_as, options):
    """From `attention` to the arithmetic: calls that go up to a higher room, and visits to the choice of a kernel."""
    priced_as(ZEN_4, "avx512")
    if options and not native.available():
        pytest.skip("without native code torch computes tile by tile, from Python")
    query, key, value = torch.randn(3, 1, 8, 1024, 64)
    for _ in range(2):
        regard.attention(query, key, value, **options)
    found = calls_between_files(lambda: regard.attention(query, key, value, **options))
    rooms = [(caller, callee) for caller, callee in found if place(caller) != place(callee)]
    climbs = [(caller, callee) for caller, callee in rooms if depth(str(place(callee))) < depth(str(place(caller)))]
    assert len(climbs) <= 3, climbs
    assert sum(callee == "regard.kernels.planning.choice" for _, callee in found) <= 2


@pytest.mark.parametrize(
    ("options", "plan", "most"),
    [
        pytest.param({}, "linear/linear_plans.py", 15, id="all keys"),
        pytest.param({"causal": True}, "linear/recurrence_outputs.py", 6, id="causal"),
        pytest.param({"causal": True, "feature_map": Relu()}, "linear/recurrence_outputs.py", 8, id="causal, relu"),
    ],
)
def test_linear_attention_enters_few_files(options, plan, most):
    if not native.available():
        pytest.skip("without native code the recurrence is computed in chunks")
    query, key, value = torch.randn(3, 1, 4, 64, 16)
    compute = regard.linear_attention
    compute(query, key, value, **options)
    files = entered_files(lambda: compute(query, key, value, **options))
    print(f"{len(files)} files: {' -> '.join(files)}")  # noqa: T201, as above
    assert plan in files
    assert len(files) <= most


def test_files_are_counted_once_and_those_of_others_are_not():
    mask = causal()
    assert entered_files(lambda: [mask.dense(2, 2), mask.dense(2, 2), torch.nn.Linear(1, 1)]) == entered_files(
        lambda: mask.dense(2, 2)
    )
    assert entered_files(lambda: torch.zeros(1)) == []
