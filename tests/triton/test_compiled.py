"""Every launch of the kernels in Triton, compiled for each kind of card: no GPU is needed.

A table of problems stands for the configurations that are used. No kernel spills registers to local memory, takes more
shared memory than a block may have, or is launched by no problem of the table.
"""

import re

import pytest
import torch

from regard.backends.triton import jit_runtime

triton = pytest.importorskip("triton")
tl = triton.language

from launched_problems import launched_problems  # noqa: E402
from recorded_launches import CAPABILITIES, SHARED_MEMORY, Launch, distinct, entries, faults, recorded  # noqa: E402

pytestmark = pytest.mark.skipif(jit_runtime.INTERPRETED, reason="kernels are interpreted here, not compiled")


PROBLEMS = [
    pytest.param(problem, capability, marks=[pytest.mark.cards] * (capability not in problem.quick))
    for problem in launched_problems()
    for capability in CAPABILITIES
]


@pytest.mark.parametrize(("problem", "capability"), PROBLEMS, ids=lambda value: getattr(value, "name", None))
def test_what_is_launched_fits_its_card(problem, capability, monkeypatch):
    with recorded(capability, monkeypatch) as launches:
        problem.call()
    assert launches
    wrong = [fault for launch in distinct(launches, capability) for fault in faults(launch, capability)]
    assert not wrong, "\n".join(wrong)


def test_each_kernel_is_launched_by_a_problem(monkeypatch):
    seen = set()
    for problem in launched_problems():
        with recorded(90, monkeypatch) as launches:
            problem.call()
        seen |= {launch.kernel for launch in launches}
    missing = {kernel.__name__ for kernel in entries() - seen}
    assert not missing, f"no problem of launched_problems.py launches {', '.join(sorted(missing))}"


@triton.jit
def _sums(NUMBERS, WEIGHTS, OUT, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    numbers = tl.load(NUMBERS + at)
    if WEIGHTS is not None:
        numbers *= tl.load(WEIGHTS + at)
    tl.store(OUT, tl.sum(numbers))


@triton.jit
def _product(A, B, OUT, blocks, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for block in range(blocks):
        total = tl.dot(tl.load(A + block * SIZE * SIZE + at), tl.load(B + block * SIZE * SIZE + at), total)
    tl.store(OUT + at, total)


def sums(dtype: torch.dtype, size: int) -> Launch:
    return Launch(_sums, (torch.zeros(size, dtype=dtype), None, torch.zeros(1)), {"SIZE": size, "num_warps": 1})


def product(size: int, **options: int) -> Launch:
    factors = [torch.zeros(2, size, size, dtype=torch.float16) for _ in range(2)]
    return Launch(_product, (*factors, torch.zeros(size, size), 2), {"SIZE": size, **options})


class TestFigures:
    """What is measured of compiled kernels, some of which are wrong on purpose."""

    @pytest.mark.parametrize("capability", CAPABILITIES)
    def test_kernels_without_faults(self, capability, capsys):
        assert not faults(sums(torch.bfloat16, 64), capability)
        expected = rf"_sums on sm_{capability}: 1 warps, \d stages, SIZE=64, \*bf16, \*fp32 without WEIGHTS"
        assert re.match(rf" +\d+ registers, +0 bytes local, +\d+ bytes shared  {expected}\n$", capsys.readouterr().out)
        assert not faults(product(64, num_warps=4), capability)

    def test_spilled_registers(self):
        found, *_ = faults(product(128, num_warps=1, num_stages=1), 80)
        assert re.match(r"_product on sm_80: 1 warps, .*: \d+ bytes of local memory a thread, beside \d+ reg", found)

    @pytest.mark.parametrize(("capability", "used"), [(80, 196608), (90, 262144)])
    def test_shared_memory(self, capability, used):
        assert not faults(product(128, num_warps=8, num_stages=3), capability)
        (found,) = faults(product(128, num_warps=8, num_stages=4), capability)
        assert found.endswith(f": {used} bytes of shared memory; a block may have {SHARED_MEMORY[capability]}")

    def test_what_does_not_compile(self):
        (found,) = faults(sums(torch.float32, 48), 90)
        assert re.match("_sums on sm_90: .*: it does not compile: CompilationError", found)

    def test_launches_are_compiled_once(self):
        twice = [sums(torch.float32, 64), sums(torch.float32, 64), sums(torch.float32, 128), sums(torch.float16, 64)]
        assert len(distinct(twice, 90)) == 3

    def test_what_is_recorded(self, monkeypatch):
        with recorded(90, monkeypatch) as launches:
            assert torch.cuda.get_device_capability() == (9, 0)
            _sums[(1,)](torch.zeros(64), None, torch.zeros(1), SIZE=64, num_warps=1)
        assert [each.kernel for each in launches] == [_sums]
        assert not faults(launches[0], 90)
