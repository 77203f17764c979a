"""Every kernel agrees with the formula, forward and backward, on every case that it admits."""

import pytest
import torch

from regard.kernels import KERNELS
from regard.testing import Case, assert_agrees, suite

KERNEL_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
ADMITTED = [(kernel.name, case) for kernel, case in suite()]


@pytest.mark.parametrize(("kernel", "case"), ADMITTED, ids=[f"{name}-{case.id}" for name, case in ADMITTED])
def test_a_kernel_agrees_with_the_formula(kernel: str, case: Case):
    assert_agrees(KERNEL_BY_NAME[kernel], case)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kernel", KERNEL_BY_NAME)
def test_a_kernel_agrees_with_the_formula_on_a_gpu(kernel: str):
    wrong = []
    for admitted, case in suite([KERNEL_BY_NAME[kernel]], device="cuda"):
        try:
            assert_agrees(admitted, case, "cuda")
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_every_kernel_is_in_the_suite():
    assert {name for name, _ in ADMITTED} == set(KERNEL_BY_NAME)
