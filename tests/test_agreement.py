"""Every kernel agrees with the oracle in float64, forward and backward, on every case that it admits."""

from collections.abc import Callable, Sequence

import pytest
import torch

from regard import native
from regard.kernels import KERNELS, Kernel
from regard.kernels.additive import AdditiveKernel
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.decode import DecodeKernel
from regard.kernels.tiled import TiledKernel
from regard.testing import Case, assert_agrees, cases, long_cases, random_cases, suite
from regard.testing.cases import AXES
from regard.tiles import mask_tiles

# Of these `flex` is for CUDA alone: tests/kernels/test_flex.py holds its logic to the oracle on the CPU.
ON_CPU = tuple(kernel for kernel in KERNELS if kernel.name != "flex")
# Small tiles, so that few queries and keys lie in several of them.
SMALL = (
    *ON_CPU,
    BlockSparseKernel((3, 2), 3),
    DecodeKernel(2),
    AdditiveKernel(16),
    TiledKernel(16),
)
MIDDLE = (
    *ON_CPU,
    BlockSparseKernel((64, 64), 64),
    DecodeKernel(64),
    AdditiveKernel(2**12),
    TiledKernel(2**12),
)
IN_ONE_TILE = [kernel for kernel in ON_CPU if kernel.name in ("block_sparse", "additive", "tiled")]
"""Kernels that compute a short case in a single tile: a loop that SMALL runs several times, over the same features."""
KERNEL_BY_NAME = {kernel.name: kernel for kernel in (*KERNELS, *SMALL, *MIDDLE)}
GROUPS, SLOW_GROUPS, LONG_GROUPS = 48, 84, 24
"""Tests that share the cases: neighbours have one case, whose expected results are computed once."""

Pairs = list[tuple[Kernel, Case]]


@pytest.fixture(scope="module")
def short() -> Pairs:
    return list(suite(SMALL, among=cases()))


@pytest.fixture(scope="module")
def chosen(short: Pairs, covering: Callable) -> set[int]:
    """As few cases of each kernel as hold every pair of choices: the others are left to `make test-all`.

    In a single tile every choice by itself: small tiles have the pairs, and the long cases have them in many tiles.
    """
    found: set[int] = set()
    for kernel in SMALL:
        indices = [index for index, (own, _) in enumerate(short) if own is kernel]
        rows = [{axis: getattr(short[index][1], axis) for axis in AXES} for index in indices]
        found |= {indices[row] for row in covering(rows, 1 if kernel in IN_ONE_TILE else 2)}
    return found


@pytest.fixture(scope="module")
def long() -> Pairs:
    return list(suite(MIDDLE, among=long_cases()))


def part(pairs: Sequence[tuple[Kernel, Case]], group: int, groups: int) -> Sequence[tuple[Kernel, Case]]:
    return pairs[group * len(pairs) // groups : (group + 1) * len(pairs) // groups]


@pytest.mark.shorter
@pytest.mark.parametrize("group", range(GROUPS))
def test_kernels_agree_with_the_oracle(group: int, short: Pairs, chosen: set[int], assert_all, monkeypatch):
    monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)  # batches that differ are computed apart, however small
    assert_all(assert_agrees, part([short[index] for index in sorted(chosen)], group, GROUPS))


@pytest.mark.slow
@pytest.mark.parametrize("group", range(SLOW_GROUPS))
def test_kernels_agree_with_the_oracle_on_every_case(group: int, short: Pairs, assert_all, monkeypatch):
    monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)
    assert_all(assert_agrees, part(short, group, SLOW_GROUPS))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("group", range(LONG_GROUPS))
def test_kernels_agree_with_the_oracle_over_many_tiles(group: int, long: Pairs, assert_all):
    assert_all(assert_agrees, part(long, group, LONG_GROUPS))


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


@pytest.mark.skipif(not native.available(), reason="it counts the kernels of native code, too")
@pytest.mark.parametrize("poison", ["clean", "masked"])
def test_a_square_causal_mask_alone(poison: str, assert_all):
    """What torch's kernels call is_causal: three choices that no case of block_sparse has together."""
    pairs = list(suite(SMALL, among=[Case(mask="causal", lengths="5x5", poison=poison)]))
    assert {"sdpa", "cpu_flash", "block_sparse", "tiled"} <= {kernel.name for kernel, _ in pairs}
    assert_all(assert_agrees, pairs)


@pytest.mark.skipif(not native.available(), reason="it counts the kernels of native code, too")
def test_every_kernel_has_cases(short: Pairs, long: Pairs):
    names = [kernel.name for kernel, _ in short]
    # A kernel is held to a hundred at least; those of a few masks to half, and to tests of their own.
    least = {"decomposed": 45, "gathered": 40}
    assert all(names.count(kernel.name) >= least.get(kernel.name, 100) for kernel in SMALL)
    assert {kernel.name for kernel, _ in long} == {kernel.name for kernel in MIDDLE}


@pytest.mark.skipif(not native.available(), reason="it counts the kernels of native code, too")
def test_random_cases_reach_every_kernel():
    assert {kernel.name for kernel, _ in suite(SMALL, among=random_cases(100))} == {kernel.name for kernel in SMALL}
