"""Every kernel agrees with the oracle in float64, forward and backward, on every case that it admits."""

from collections.abc import Sequence

import pytest
import torch

from regard.kernels import KERNELS, Kernel, mask_tiles
from regard.kernels.additive import AdditiveKernel
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.decode import DecodeKernel
from regard.kernels.tiled import TiledKernel
from regard.testing import Case, assert_agrees, cases, long_cases, random_cases, suite

# Of these `flex` is for CUDA alone: tests/kernels/test_flex.py holds its logic to the oracle on the CPU.
ON_CPU = tuple(kernel for kernel in KERNELS if kernel.name != "flex")
# Small tiles, so that few queries and keys lie in several of them.
SMALL = (
    *ON_CPU,
    BlockSparseKernel((3, 2), 3),
    DecodeKernel(2),
    DecodeKernel(min_native_keys=1),
    AdditiveKernel(16),
    TiledKernel(16),
)
MIDDLE = (
    *ON_CPU,
    BlockSparseKernel((64, 64), 64),
    DecodeKernel(64),
    DecodeKernel(min_native_keys=1),
    AdditiveKernel(2**12),
    TiledKernel(2**12),
)
KERNEL_BY_NAME = {kernel.name: kernel for kernel in (*KERNELS, *SMALL, *MIDDLE)}


SHORT = list(suite(SMALL, among=cases()))
LONG = list(suite(MIDDLE, among=long_cases()))


def parameters(admitted: Sequence[tuple[Kernel, Case]]) -> list:
    return [pytest.param(kernel.name, case, id=f"{kernel.name}-{case.id}") for kernel, case in admitted]


@pytest.mark.covering(strength=2, within=["kernel"])
@pytest.mark.parametrize(("kernel", "case"), parameters(SHORT))
def test_a_kernel_agrees_with_the_oracle(kernel: str, case: Case, monkeypatch):
    monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)  # batches that differ are computed apart, however small
    assert_agrees(KERNEL_BY_NAME[kernel], case)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("kernel", "case"), parameters(LONG))
def test_a_kernel_agrees_with_the_oracle_over_many_tiles(kernel: str, case: Case):
    assert_agrees(KERNEL_BY_NAME[kernel], case)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kernel", KERNEL_BY_NAME)
def test_a_kernel_agrees_with_the_oracle_on_a_gpu(kernel: str):
    wrong = []
    for own, case in suite([KERNEL_BY_NAME[kernel]], among=[*cases(), *long_cases()], device="cuda"):
        try:
            assert_agrees(own, case, "cuda")
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_every_kernel_has_cases():
    names = [kernel.name for kernel, _ in SHORT]
    # One that few problems suit is held to a hundred at least; that of a few masks to half, and to test_decomposed.py.
    least = {"decomposed": 50}
    assert all(names.count(kernel.name) >= least.get(kernel.name, 100) for kernel in SMALL)
    assert {kernel.name for kernel, _ in LONG} == {kernel.name for kernel in MIDDLE}


def test_random_cases_reach_every_kernel():
    assert {kernel.name for kernel, _ in suite(SMALL, among=random_cases(100))} == {kernel.name for kernel in SMALL}
