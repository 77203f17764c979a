from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from regard import native
from regard.backends.cpu.gemv import FewRowsLayout
from regard.nn import Linear
from regard.nn import linear as module


@pytest.fixture
def counted(monkeypatch):
    """Layers of any size count as large; the list has an entry for each product by native code."""
    if not native.available():
        pytest.skip(str(native.why_not()))
    products, product = [], FewRowsLayout.multiply
    monkeypatch.setattr(module, "MIN_NATIVE_WEIGHTS", 1)
    monkeypatch.setattr(module, "_layouts", {})
    monkeypatch.setattr(
        FewRowsLayout, "multiply", lambda layout, *given: products.append(given) or product(layout, *given)
    )
    return products


@pytest.mark.parametrize("shape", [(24,), (1, 24), (3, 24), (2, 5, 24), (2, 1, 3, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_few_positions_are_the_same_as_with_torch(counted, shape, biased):
    layer, x = Linear(24, 17, bias=biased), torch.randn(shape)
    with torch.no_grad():
        assert torch.allclose(layer(x), functional.linear(x, layer.weight, layer.bias), atol=1e-6)
    assert len(counted) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_memoized_of_a_layout_holds_no_numbers(counted, dtype):
    for strided in (False, True, False):
        layer, x = Linear(24, 17).to(dtype), torch.randn(3, 24).to(dtype)
        x = x.mT.contiguous().mT if strided else x
        with torch.no_grad():
            truth = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
            within = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps * truth.abs().amax().item()
            assert (layer(x) - truth).abs().amax() <= within
    assert len(counted) == 3


def test_a_gradient_many_positions_and_transforms_are_torchs(counted):
    layer, x = Linear(24, 17), torch.randn(3, 24)
    layer(x).sum().backward()
    expected = torch.ones(3, 17).T @ x
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, expected)
    with torch.no_grad():
        layer(torch.randn(module.MAX_NATIVE_ROWS[torch.float32] + 1, 24))
        layer(torch.zeros(0, 24))
        layer.double()(x.double())
        layer.float()
        torch.func.vmap(layer)(x)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * x.numel() * 17
        torch.compile(layer, backend="eager", fullgraph=True)(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    assert not counted


@pytest.mark.parametrize("biased", [False, True])
def test_between_few_and_many_it_is_who_is_faster(counted, monkeypatch, biased):
    taken = []
    monkeypatch.setattr(module, "batched_linear", lambda *given: taken.append(given[0].shape[0]) or given[0])
    monkeypatch.setattr(module, "uses_onednn", lambda x, *_: x.shape[0] >= 32)
    layer = Linear(24, 24, bias=biased)
    with torch.no_grad():
        for rows in (23, 24, 25, 31, 32, 64, 65):
            layer(torch.randn(rows, 24))
    assert taken == [32, 64, 65]
    assert [given[0].shape[0] for given in counted] == [23, 24, 25, 31]


def test_a_bias_alone_has_its_gradient(counted):
    layer = Linear(24, 17)
    layer.weight.requires_grad_(False)
    layer(torch.randn(3, 24)).sum().backward()
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((17,), 3.0))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_computes_what_it_is_given(counted):
    layer, x = Linear(24, 17), torch.randn(3, 24)
    with torch.no_grad():
        traced: Any = torch.jit.trace(layer, x, check_trace=False)
        assert torch.allclose(traced(2 * x), functional.linear(2 * x, layer.weight, layer.bias))
    assert not counted


def test_tensors_with_a_meaning_of_their_own_are_not_read(counted):
    class Wrapped(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            return torch.full((3, 17), 7.0)

    empty = torch.Tensor._make_wrapper_subclass(Wrapped, (3, 24))
    with torch.no_grad():
        assert Linear(24, 17, bias=False)(empty).eq(7).all()
    assert not counted


def test_frozen_weights_let_a_gradient_through(counted):
    layer, x = Linear(24, 17).requires_grad_(False), torch.randn(3, 24, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(3, 24), atol=1e-6)


def test_a_small_layer_is_torchs(monkeypatch):
    monkeypatch.setattr(FewRowsLayout, "multiply", lambda *_: pytest.fail("too small to be worth a call"))
    with torch.no_grad():
        Linear(64, 64)(torch.randn(1, 64))


def test_what_does_not_fit_is_torchs_error(counted):
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(24, 17)(torch.randn(3, 23))


def test_its_state_is_that_of_torchs(counted):
    layer, other = Linear(24, 17), torch.nn.Linear(24, 17)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_it_can_be_scripted():
    model, x = torch.nn.Sequential(Linear(5, 3), torch.nn.ReLU()), torch.randn(2, 5)
    assert torch.jit.script(model)(x).equal(model(x))
    assert type(model[0]) is Linear
