"""Large products in single precision: within the bound of their rounding, with every derivative, or torch's own."""

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from regard.core import onednn as module
from regard.core.onednn import batched_linear
from regard.nn import Linear


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Any product counts as large; the list has the shape of each x that oneDNN multiplied."""
    if not module.onednn_is_faster():
        pytest.skip("torch has no oneDNN, or the processor no AVX-512")
    shapes: list[tuple[int, ...]] = []
    forward = module._OneDnnLinear.forward
    monkeypatch.setattr(module, "MIN_ONEDNN_PRODUCTS", 1)
    monkeypatch.setattr(
        module._OneDnnLinear,
        "forward",
        staticmethod(lambda ctx, x, *others: shapes.append(tuple(x.shape)) or forward(ctx, x, *others)),
    )
    return shapes


def assert_within_rounding(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """As near to the product in double precision as any order of its sums in single precision is."""
    doubles = [None if one is None else one.detach().double() for one in (x, weight, bias)]
    sizes = [None if one is None else one.abs() for one in doubles]
    terms = weight.shape[1] + (bias is not None)
    bound = terms * torch.finfo(torch.float32).eps * functional.linear(*sizes)  # type: ignore[arg-type]
    assert bool(((found.double() - functional.linear(*doubles)).abs() <= bound).all())  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1, 31), (13, 31), (2, 5, 31), (2, 3, 5, 31)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(counted, shape, biased):
    x, weight = torch.randn(shape), torch.randn(17, 31)
    bias = torch.randn(17) if biased else None
    found = batched_linear(x, weight, bias)
    assert (found.shape, found.is_contiguous()) == ((*shape[:-1], 17), True)
    assert_within_rounding(found, x, weight, bias)
    assert counted == [shape]


@pytest.mark.parametrize("strides", ["x transposed", "weight transposed", "every second", "expanded"])
def test_any_strides(counted, strides):
    x, weight = torch.randn(13, 31), torch.randn(17, 31)
    if strides == "x transposed":
        x = torch.randn(31, 13).T
    elif strides == "weight transposed":
        weight = torch.randn(31, 17).T
    elif strides == "every second":
        x, weight = torch.randn(26, 62)[::2, ::2], torch.randn(17, 62)[:, 1::2]
    else:
        x, weight = torch.randn(1, 31).expand(13, 31), torch.randn(1, 31).expand(17, 31)
    assert_within_rounding(batched_linear(x, weight), x, weight)
    assert counted


def test_nothing_of_a_column_reaches_another(counted):
    x, weight = torch.randn(13, 31), torch.randn(17, 31)
    x[3], weight[5] = torch.nan, torch.inf
    found = batched_linear(x, weight)
    assert found[3].isnan().all()
    assert not found[:, 5].isfinite().any()
    kept = torch.ones(13, 17, dtype=torch.bool)
    kept[3], kept[:, 5] = False, False
    assert found[kept].isfinite().all()


def test_gradients_are_those_of_torch(counted):
    inputs = [torch.randn(size).requires_grad_() for size in ((2, 13, 31), (17, 31), (17,))]
    upstream = torch.randn(2, 13, 17)
    found = torch.autograd.grad(batched_linear(*inputs), inputs, upstream)
    assert counted == [(2, 13, 31), (2, 13, 17), (17, 26)]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = torch.autograd.grad(functional.linear(*exact), exact, upstream.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert_within_rounding(found[0], upstream, inputs[1].detach().T)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_what_is_wanted_has_a_gradient(counted, wanted):
    inputs = [torch.randn(size) for size in ((13, 31), (17, 31), (17,))]
    inputs[wanted].requires_grad_()
    batched_linear(*inputs).sum().backward()
    assert [one.grad is not None for one in inputs] == [at == wanted for at in range(3)]
    assert len(counted) == (1 if wanted == 2 else 2)


def test_what_no_gradient_needs_may_change_and_go(counted):
    x, weight, bias = torch.randn(13, 31, requires_grad=True), torch.randn(17, 31), torch.randn(17)
    output, before = batched_linear(x, weight, bias), weight.clone()
    with torch.no_grad():
        x.add_(1)
    assert torch.autograd.grad(output.sum(), x)[0].allclose(before.sum(0).expand(13, 31), atol=1e-5)
    x, weight = x.detach(), weight.requires_grad_()
    output = batched_linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    assert torch.autograd.grad(output.sum(), weight)[0].allclose(x.sum(0).expand(17, 31), atol=1e-5)
    activations = torch.randn(13, 31, requires_grad=True) * 1
    held, output = weakref.ref(activations), batched_linear(activations, weight.detach(), bias)
    del activations
    assert held() is None
    with torch.inference_mode():
        inference = torch.randn(13, 31)
    batched_linear(inference, weight.detach(), bias.requires_grad_()).sum().backward()
    assert bias.grad is not None
    assert len(counted) == 6


@pytest.mark.parametrize(("dim", "width"), [(5, 40), (40, 5)])
def test_the_gradient_of_the_weight_has_the_wider_side_as_the_matrix(counted, dim, width):
    x, weight = torch.randn(13, dim), torch.randn(width, dim, requires_grad=True)
    upstream = torch.randn(13, width)
    [found] = torch.autograd.grad(batched_linear(x, weight), weight, upstream)
    assert_within_rounding(found, upstream.T, x.T)
    assert found.is_contiguous()
    assert counted[1:] == [(5, 13)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it loads
def test_second_and_forward_derivatives(counted):
    x, weight = torch.randn(13, 31, requires_grad=True), torch.randn(17, 31, requires_grad=True)

    def second(multiply):
        [first] = torch.autograd.grad(multiply(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    for one, other in zip(second(batched_linear), second(functional.linear), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)
    assert counted
    bias, along = torch.randn(17), [torch.randn(size) for size in ((13, 31), (17, 31), (17,))]
    with forward_ad.dual_level():
        given = (x.detach(), weight.detach(), bias)
        dual = [forward_ad.make_dual(*pair) for pair in zip(given, along, strict=True)]
        tangent = forward_ad.unpack_dual(batched_linear(*dual)).tangent
    expected = along[0] @ weight.T + x @ along[1].T + along[2]
    torch.testing.assert_close(tangent, expected.detach(), rtol=1e-4, atol=1e-4)


class Recorded(torch.Tensor):
    """A tensor that has a meaning of its own for each of torch's functions."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, *given: Any) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, *given)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_all_else_is_torchs(counted):
    layer, x = Linear(31, 17), torch.randn(13, 31)
    torch.func.vmap(layer)(x)
    torch.func.grad(lambda x: layer(x).sum())(x)
    torch.compile(layer, backend="eager", fullgraph=True)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    torch._C._set_mkldnn_enabled(False)
    try:
        layer(x)
    finally:
        torch._C._set_mkldnn_enabled(True)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 13 * 31 * 17
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (13, 17)
    traced: Any = torch.jit.trace(layer, x, check_trace=False)
    torch.testing.assert_close(traced(2 * x), functional.linear(2 * x, layer.weight, layer.bias))
    batched_linear(Recorded(x), layer.weight)
    assert functional.linear in Recorded.seen
    sparse = layer.weight.detach().to_sparse()
    assert batched_linear(sparse, torch.eye(31)).shape == (17, 31)
    layer(torch.zeros(0, 31))
    layer(x[0])
    layer.double()(x.double())
    layer.bfloat16()(x.bfloat16())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        batched_linear(x, torch.randn(17, 30))
    with pytest.raises(RuntimeError, match="must match|bias"):
        batched_linear(x, torch.randn(17, 31), torch.randn(16))
    assert counted == []


def test_small_products_and_other_processors_are_torchs(monkeypatch):
    monkeypatch.setattr(module._OneDnnLinear, "forward", lambda *_: pytest.fail("this is for torch itself"))
    batched_linear(torch.randn(64, 64), torch.randn(64, 64))
    monkeypatch.setattr(module, "MIN_ONEDNN_PRODUCTS", 1)
    monkeypatch.setattr(module, "onednn_is_faster", lambda: False)
    batched_linear(torch.randn(64, 64), torch.randn(64, 64))


def test_the_same_call_gives_the_same_bits():
    x, weight = torch.randn(1024, 512), torch.randn(512, 512)
    assert x.numel() * 512 >= module.MIN_ONEDNN_PRODUCTS
    assert torch.equal(batched_linear(x, weight), batched_linear(x.clone(), weight.clone()))
