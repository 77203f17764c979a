"""Forward-mode derivatives: jvp, jacfwd, hessian and dual numbers go through the reference kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import regard
from regard import biases, masks, scores
from regard.errors import KernelError

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(before=2), "bias": biases.alibi(4)},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)},
    "additive": {"score": scores.Additive(3, 3, 5).double()},
    "an empty row": {"mask": masks.where(keep=torch.arange(5)[:, None] > 1)},
}


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it loads


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 3, generator=generator).double() for heads in (4, 2, 2))
    return query, key, value


def tangents(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for tensor in inputs)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("call", CALLS)
class TestEqualsReverseMode:
    def test_jvp(self, inputs, call):
        def attention(*tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, **CALLS[call])

        output, tangent = jvp(attention, inputs, tangents(inputs))  # type: ignore[misc]
        close(output, attention(*inputs))
        jacobians = jacrev(attention, (0, 1, 2))(*inputs)
        pairs = zip(jacobians, tangents(inputs), strict=True)
        close(tangent, sum(torch.tensordot(jacobian, tangent, 4) for jacobian, tangent in pairs))

    def test_jacfwd(self, inputs, call):
        query, key, value = inputs

        def attention(query: Tensor) -> Tensor:
            return regard.attention(query, key, value, **CALLS[call])

        close(jacfwd(attention)(query), jacrev(attention)(query))

    def test_hessian(self, inputs, call):
        query, key, value = (tensor[:1, :, :3] for tensor in inputs)
        options: dict[str, Any] = (
            CALLS[call] if call != "an empty row" else {"mask": masks.where(keep=torch.arange(3)[:, None] > 0)}
        )

        def loss(query: Tensor) -> Tensor:
            return regard.attention(query, key, value, **options).sin().sum()

        close(hessian(loss)(query), jacrev(jacrev(loss))(query))

    def test_dual_numbers(self, inputs, call):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(*pair) for pair in zip(inputs, tangents(inputs), strict=True)]
            output = forward_ad.unpack_dual(regard.attention(*duals, **CALLS[call]))
        expected = jvp(lambda *tensors: regard.attention(*tensors, **CALLS[call]), inputs, tangents(inputs))
        close((output.primal, output.tangent), expected)


def test_the_log_sum_exp_and_torchs_function(inputs):
    functions: list[Any] = [
        regard.attention_with_lse,
        lambda *tensors: regard.scaled_dot_product_attention(*tensors, enable_gqa=True),
    ]
    for function in functions:
        found: Any = jvp(function, inputs, tangents(inputs))[1]
        step = 1e-6
        ahead = function(*(t + step * dt for t, dt in zip(inputs, tangents(inputs), strict=True)))
        behind = function(*(t - step * dt for t, dt in zip(inputs, tangents(inputs), strict=True)))
        pairs = [(ahead, behind, found)] if isinstance(found, Tensor) else list(zip(ahead, behind, found, strict=True))
        for after, before, tangent in pairs:
            torch.testing.assert_close((after - before) / (2 * step), tangent, atol=1e-7, rtol=1e-6)


def test_over_a_batch(inputs):
    one = tuple(tensor[:1] for tensor in inputs)
    directions = [tangent.unsqueeze(1) for tangent in tangents(inputs)]
    found = vmap(lambda *direction: jvp(regard.attention, one, direction)[1])(*directions)
    for row in range(2):
        close(found[row], jvp(regard.attention, one, tuple(direction[row] for direction in directions))[1])


def test_a_layer(inputs):
    layer = regard.nn.Attention(regard.nn.Projections(8, 2), mask=masks.causal()).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    close(jacfwd(layer)(x), jacrev(layer)(x))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_large_linear_layer_without_gradients(rows):
    layer = regard.nn.Linear(1024, 1024, bias=False)
    x, dx = torch.randn(2, rows, 1024)
    with torch.no_grad(), forward_ad.dual_level():
        output = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, dx)))
    torch.testing.assert_close(output.tangent, nn.functional.linear(dx, layer.weight.detach()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["sdpa", "tiled"])
def test_another_kernel_by_name_is_refused(inputs, kernel):
    with pytest.raises(KernelError, match="only kernel='reference' has forward-mode derivatives"):
        jvp(lambda *t: regard.attention(*t, kernel=kernel), inputs, tangents(inputs))
    close(
        jvp(lambda *t: regard.attention(*t, kernel="reference"), inputs, tangents(inputs)),
        jvp(regard.attention, inputs, tangents(inputs)),
    )


def test_the_weights_of_a_lens_have_a_tangent():
    query, key, tangent = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    weights = regard.lenses.Weights()

    def look(query):
        return regard.observe(query, key, key, weights)[weights]

    with torch.autograd.forward_ad.dual_level():
        dual = look(torch.autograd.forward_ad.make_dual(query, tangent))
        found = torch.autograd.forward_ad.unpack_dual(dual).tangent
    expected = torch.func.jvp(look, (query,), (tangent,))[1]
    torch.testing.assert_close(found, expected)
