"""Random problems under a fixed seed: each through every kernel that admits it, forward and backward.

`make conformance` draws ten thousand, `make test-all` the first of them.
"""

import math
from itertools import islice

import pytest

from regard.kernels import KERNELS
from regard.kernels.additive import AdditiveKernel
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.decode import DecodeKernel
from regard.kernels.tiled import TiledKernel
from regard.testing import Case, assert_agrees, random_cases, suite
from regard.tiles import mask_tiles

COUNT, CHUNK, SEED = 10_000, 100, 20_170_612
FEW = 1
"""Chunks in `make test-all`."""
# Tiles so small that few queries and keys lie in several of them.
SMALL = (
    *KERNELS,
    BlockSparseKernel((3, 2), 3),
    DecodeKernel(2),
    AdditiveKernel(16),
    TiledKernel(16),
)
MIDDLE = (
    *KERNELS,
    BlockSparseKernel((8, 4), 8),
    DecodeKernel(8),
    AdditiveKernel(2**9),
    TiledKernel(2**9),
)


def chunk(number: int) -> list[Case]:
    return list(islice(random_cases(COUNT, SEED), number * CHUNK, (number + 1) * CHUNK))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, marks=pytest.mark.slow if number < FEW else pytest.mark.conformance, id=f"{number * CHUNK}"
        )
        for number in range(COUNT // CHUNK)
    ],
)
def test_random_problems(number: int, record_property, monkeypatch):
    monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)  # batches that differ are computed apart, however small
    checks, faults = 0, []
    for case in chunk(number):
        for kernel, _ in suite(SMALL if math.prod(case.sizes) <= 64 else MIDDLE, among=[case]):
            checks += 1
            try:
                assert_agrees(kernel, case)
            except AssertionError as error:
                faults.append(str(error))
            except Exception as error:  # a kernel that fails is wrong, too; the others go on
                faults.append(f"kernel {kernel.name!r} failed on the case {case.id}: {type(error).__name__}: {error}")
    for name, count in (("random problems", CHUNK), ("computed", checks), ("wrong", len(faults))):
        record_property(name, count)  # conftest.py reports the sums of all chunks
    assert not faults, f"{len(faults)} faults in {CHUNK} random problems:\n" + "\n".join(faults)


def test_chunks_are_all_of_the_problems():
    drawn = list(random_cases(COUNT, SEED))
    assert len(drawn) == COUNT
    assert chunk(3) == drawn[3 * CHUNK : 4 * CHUNK]
    assert len(set(drawn)) > 0.99 * COUNT
