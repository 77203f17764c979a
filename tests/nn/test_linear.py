import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from regard import native
from regard.nn import Linear
from regard.nn import linear as module


@pytest.fixture
def counted(monkeypatch):
    """Layers of any size count as large; the list has an entry for each product by native code."""
    if not native.available():
        pytest.skip(str(native.why_not()))
    products, product = [], native.times_matrix
    monkeypatch.setattr(module, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(native, "times_matrix", lambda *given: products.append(given) or product(*given))
    return products


@pytest.mark.parametrize("shape", [(24,), (1, 24), (3, 24), (2, 5, 24), (2, 1, 3, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_few_positions_are_the_same_as_with_torch(counted, shape, biased):
    layer, x = Linear(24, 17, bias=biased), torch.randn(shape)
    with torch.no_grad():
        assert torch.allclose(layer(x), functional.linear(x, layer.weight, layer.bias), atol=1e-6)
    assert len(counted) == 1


def test_a_gradient_many_positions_and_transforms_are_torchs(counted):
    layer, x = Linear(24, 17), torch.randn(3, 24)
    layer(x).sum().backward()
    expected = torch.ones(3, 17).T @ x
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, expected)
    with torch.no_grad():
        layer(torch.randn(module._most_rows(torch.float32) + 1, 24))
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


def test_frozen_weights_let_a_gradient_through(counted):
    layer, x = Linear(24, 17).requires_grad_(False), torch.randn(3, 24, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(3, 24), atol=1e-6)


def test_a_small_layer_is_torchs(monkeypatch):
    monkeypatch.setattr(native, "times_matrix", lambda *_: pytest.fail("too small to be worth a call"))
    with torch.no_grad():
        Linear(64, 64)(torch.randn(1, 64))


def test_what_does_not_fit_is_torchs_error(counted):
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(24, 17)(torch.randn(3, 23))


def test_its_state_is_that_of_torchs(counted):
    layer, other = Linear(24, 17), torch.nn.Linear(24, 17)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
