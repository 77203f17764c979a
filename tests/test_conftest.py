"""The guard in conftest.py is at work: memory that regard allocates is NaN until something is written to it."""

from pathlib import Path

import pytest
import torch

import regard

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
