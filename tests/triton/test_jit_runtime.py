"""Why kernels in Triton do not read a tensor: the words of the plan for a card, a machine or a dtype without them."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.backends.triton import jit_runtime
from regard.backends.triton.triton_backend import TRITON

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(jit_runtime.INTERPRETED, reason="kernels are interpreted here, on any machine")

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch) -> Iterator[Machine]:
    """A function that has the machine look as if it had a card of this capability, and Triton or not."""

    find = importlib.util.find_spec

    def forget() -> None:
        jit_runtime.missing.cache_clear()
        jit_runtime.too_old.cache_clear()
        jit_runtime._usable.cache_clear()

    def look(capability: tuple[int, int], *, triton: bool = True, driver: bool = True) -> None:
        forget()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: driver)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
        if not triton:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))

    yield look
    monkeypatch.undo()
    forget()


def on_a_gpu(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 4, 8, 16, device="cuda", dtype=dtype)


def test_a_card_that_has_them(machine):
    machine((9, 0))
    assert TRITON.why_not(on_a_gpu()) == []
    assert TRITON.runs(on_a_gpu(), on_a_gpu())
    assert not TRITON.runs(on_a_gpu(), torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"capability": (7, 5)},
            "there is no code in Triton: NVIDIA T4 has compute capability 7.5; Triton needs 8.0",
        ),
        (
            {"capability": (9, 0), "triton": False},
            "there is no code in Triton: Triton is not installed; pip install 'regard[triton]' brings it",
        ),
        (
            {"capability": (9, 0), "driver": False},
            "there is no code in Triton: torch finds no NVIDIA card with a driver",
        ),
    ],
    ids=["an old card", "no Triton", "no driver"],
)
def test_a_machine_without_them(machine, options: dict, reason: str):
    machine(**options)
    assert TRITON.why_not(on_a_gpu()) == [reason]
    assert not TRITON.runs(on_a_gpu())


def test_a_dtype_and_a_device_without_them(machine):
    machine((9, 0))
    assert TRITON.why_not(on_a_gpu(torch.float64)) == [
        "its code in Triton reads float32, bfloat16 or float16; this is float64"
    ]
    assert TRITON.why_not(torch.zeros(2)) == ["its code in Triton runs on CUDA devices; this is on cpu"]


def test_torch_for_cpus_alone(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert TRITON.why_not(on_a_gpu()) == ["there is no code in Triton: this build of torch is not for CUDA"]
