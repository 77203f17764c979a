"""FIRE's numbers of all pairs in C, against the function of each pair in float64."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, native
from regard.backends.cpu import fire_pairs
from regard.backends.cpu.fire_pairs import FirePairsInC
from regard.biases.fire import Fire

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")


def drawn(features: int, heads: int, rate: float = 0.3, threshold: float = 4.5) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (features,), (features,), (heads, features), (heads,)
    return [*(torch.randn(shape) for shape in shapes), torch.tensor(rate), torch.tensor(threshold)]


def numbers(given: list[Tensor], queries: int, keys: int, *, sizes: bool = False) -> Tensor:
    """W₂ relu(W₁ x + b₁) + b₂ of each pair's share x, (H, M, N); or the sum of the sizes of all its terms."""
    into, offset, out, shift, rate, threshold = (tensor.double() for tensor in given)
    position = torch.arange(keys - queries, keys, dtype=torch.float64)[:, None]
    share = torch.log(1 + rate.abs() * (torch.arange(keys) - position).abs())
    share = share / (torch.log(1 + rate.abs() * position.clamp(min=threshold.abs().item())) + 1e-6)
    inner = share[..., None] * into
    hidden = inner.abs() + offset.abs() if sizes else torch.relu(inner + offset)
    return (
        torch.einsum("mnf,hf->hmn", hidden, out.abs() if sizes else out)
        + (shift.abs() if sizes else shift)[:, None, None]
    )


@pytest.mark.parametrize("features", [1, 7, 32])
@pytest.mark.parametrize("sizes", [(1, 1), (11, 11), (7, 13), (13, 7), (1, 37)], ids=str)
@pytest.mark.parametrize(("rate", "threshold"), [(0.3, 4.5), (-2.0, -100.0), (1.0, 0.0)])
def test_numbers_are_those_of_the_function(sizes, features, rate, threshold):
    """A share is rounded once, a feature twice, and a sum of F terms F + 1 times: F + 5 roundings of all sizes."""
    given = drawn(features, 3, rate, threshold)
    found = FirePairsInC().of_pairs(Fire(*given), *sizes)
    bound = (features + 5) * 2**-24 * numbers(given, *sizes, sizes=True)
    assert bool(((found.double() - numbers(given, *sizes)).abs() <= bound).all())


def test_tensors_of_any_strides_and_nan():
    code, given = FirePairsInC(), drawn(8, 3)
    strided = [*(each.repeat_interleave(2)[::2] for each in given[:2]), given[2].T.contiguous().T, *given[3:]]
    assert torch.equal(code.of_pairs(Fire(*strided), 5, 7), code.of_pairs(Fire(*given), 5, 7))
    for place in (1, 5):  # hidden_bias and threshold
        bad = [each * torch.nan if number == place else each for number, each in enumerate(given)]
        assert bool(code.of_pairs(Fire(*bad), 5, 7).isnan().all())


def test_what_it_leaves_to_torch(monkeypatch):
    code, given = FirePairsInC(), drawn(8, 3)
    learned = Fire(*[tensor.clone().requires_grad_() for tensor in given])
    assert code.takes(Fire(*given), 5, 7)
    assert not code.takes(learned, 5, 7)
    with torch.no_grad():
        assert code.takes(learned, 5, 7)
    assert not code.takes(Fire(*(tensor.double() for tensor in given)), 5, 7)
    assert code.takes(Fire(*given), 1, 512)
    assert not code.takes(Fire(*given), 1, 513)
    with torch.autocast("cpu"):
        assert not code.takes(Fire(*given), 5, 7)
    monkeypatch.setattr(fire_pairs, "MOST_PAIRS", 34)
    assert not code.takes(Fire(*given), 5, 7)


def test_repeated_calls_without_gradients_take_it(monkeypatch):
    taken, compute = [], FirePairsInC.of_pairs
    monkeypatch.setattr(FirePairsInC, "of_pairs", lambda *given: (taken.append(1), compute(*given))[1])
    given, inputs = drawn(8, 4), [torch.randn(2, heads, 13, 8) for heads in (4, 2, 2)]

    def fire(tensors: list[Tensor]) -> biases.Bias:
        into, offset, out, shift, rate, threshold = tensors
        return biases.fire(into, offset, out, shift, rate=rate, threshold=threshold)

    wide = [tensor.double() for tensor in inputs], [tensor.double() for tensor in given]
    expected = regard.attention(*wide[0], mask=masks.causal(), bias=fire(wide[1]), kernel="reference")
    for _ in range(3):
        found = regard.attention(*inputs, mask=masks.causal(), bias=fire(given))
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert len(taken) >= 2
