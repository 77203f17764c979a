"""The short kernel: which masks it takes, and that gradients, NaN and second derivatives are those of the others."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import masks, native
from regard.errors import KernelError, MaskError
from regard.masks.padding import Padding
from regard.tiles.row_spans import key_spans

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

QUERIES, KEYS = 11, 13


def tensors(dtype: torch.dtype = torch.float32, *, grad: bool = False) -> list[Tensor]:
    shapes = (2, 4, QUERIES, 16), (2, 2, KEYS, 16), (2, 2, KEYS, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(before=3, after=2),
    "padding": masks.padding([4, 13]),
    "shared padding": masks.padding([5]),
    "nothing": masks.padding([0, 13]),
    "causal and padding": masks.causal() & masks.padding([4, 13]),
    "three": masks.causal() & masks.window(before=4) & masks.padding([9, 12]),
    "documents": masks.documents(torch.tensor([0] * 4 + [1] * 9)),
}


@pytest.mark.parametrize("name", MASKS)
def test_spans_are_the_pairs_of_the_mask(name):
    query, key, value = tensors()
    problem = regard.explain(query, key, value, mask=MASKS[name]).problem
    spans = key_spans(problem)
    if MASKS[name] is None:
        assert spans is None
        return
    assert spans is not None
    columns = torch.arange(KEYS)
    pairs = (columns >= spans[:, None, :, :1]) & (columns < spans[:, None, :, 1:])
    kept, shape = problem.keep(), problem.weights_shape
    assert kept is not None
    assert torch.equal(pairs.expand(shape), kept.expand(shape))


@pytest.mark.parametrize("positions", [range(5, 5 + QUERIES), range(-3, QUERIES - 3), range(QUERIES)])
def test_spans_at_other_positions(positions):
    query, key, value = tensors()
    keys = range(2, 2 + KEYS)
    options = {"mask": masks.causal() & masks.window(before=4), "query_positions": positions, "key_positions": keys}
    problem = regard.explain(query, key, value, **options).problem
    spans, columns = key_spans(problem), torch.arange(KEYS)
    assert spans is not None
    pairs = (columns >= spans[:, None, :, :1]) & (columns < spans[:, None, :, 1:])
    kept, shape = problem.keep(), problem.weights_shape
    assert kept is not None
    assert torch.equal(pairs.expand(shape), kept.expand(shape))
    output = regard.attention(query, key, value, kernel="short", **options)
    assert torch.allclose(output, regard.attention(query, key, value, kernel="reference", **options), atol=1e-5)


def test_a_changed_mask_is_read_anew():
    lengths = torch.tensor([4, 13])
    query, key, value = tensors()
    mask = Padding(lengths)
    before = regard.attention(query, key, value, mask=mask, kernel="short")
    mask.lengths[0] = 7
    after = regard.attention(query, key, value, mask=mask, kernel="short")
    assert not torch.equal(before[0], after[0])
    assert torch.allclose(after, regard.attention(query, key, value, mask=mask, kernel="reference"), atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        (masks.strided(3), "no span that its symbols tell"),
        (masks.causal() | masks.window(2, 2), "no span that its symbols tell"),
        (masks.where(keep=torch.ones(QUERIES, KEYS, dtype=torch.bool)), "no span that its symbols tell"),
        (masks.documents(torch.tensor([1] * 4 + [0] * 9)), "no span that its symbols tell"),
    ],
)
def test_other_masks_are_refused(mask, why):
    with pytest.raises(KernelError, match=why):
        regard.attention(*tensors(), mask=mask, kernel="short")


def test_features_are_refused():
    query, key, value = tensors()
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"softcap": 2.0}, "its code has no softcap"),
        ({"bias": torch.zeros(QUERIES, KEYS)}, "its code has no bias"),
        ({"dropout_p": 0.1}, "its code has no dropout"),
    )
    for options, why in refused:
        with pytest.raises(KernelError, match=why):
            regard.attention(query, key, value, kernel="short", **options)
    with pytest.raises(KernelError, match="at most 512 keys"):
        regard.attention(query, key.repeat(1, 1, 40, 1), value.repeat(1, 1, 40, 1), kernel="short")
    with pytest.raises(KernelError, match=r"its code reads float32, bfloat16 or float16; this is float64"):
        regard.attention(query.double(), key.double(), value.double(), kernel="short")


def test_a_mask_that_does_not_fit_is_refused_as_elsewhere():
    query, key, value = tensors()
    with pytest.raises(MaskError, match="padding"):
        regard.attention(query, key, value, mask=masks.padding([3, 4, 5]))
    with pytest.raises(MaskError, match="documents"):
        regard.attention(query, key, value, mask=masks.documents(torch.tensor([0, 0, 1])))


@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if mask is not None])
def test_nan_behind_the_mask_reaches_nothing(name):
    """Poison in keys and values that some rows do not attend to: outputs and gradients of these rows are right."""
    query, key, value = tensors(grad=True)
    with torch.no_grad():
        key[0, :, 12], value[0, :, 3] = math.inf, math.nan
    above = torch.randn(2, 4, QUERIES, 8)
    output = regard.attention(query, key, value, mask=MASKS[name], kernel="short")
    wanted = regard.attention(query, key, value, mask=MASKS[name], kernel="reference")
    assert torch.equal(output.isnan(), wanted.isnan())
    assert torch.allclose(output, wanted, atol=1e-5, equal_nan=True)
    gradients, others = (
        torch.autograd.grad(each, (query, key, value), above.masked_fill(wanted.isnan(), 0.0))
        for each in (output, wanted)
    )
    for mine, other in zip(gradients, others, strict=True):
        assert torch.allclose(mine, other, atol=1e-5, equal_nan=True)


def test_large_scores_have_the_gradients_of_float64():
    """Log-sum-exps above 2¹⁴, which float32 rounds: these rows are computed as for all kernels."""
    query, key, value = tensors(grad=True)
    with torch.no_grad():
        query[0, 0, 5] *= 1e6
    loss = regard.attention(query, key, value, kernel="short").square().sum()
    found = torch.autograd.grad(loss, (query, key, value))
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    loss = regard.attention(*exact, kernel="reference").square().sum()
    for mine, other in zip(found, torch.autograd.grad(loss, exact), strict=True):
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


def test_only_what_needs_a_gradient_gets_one():
    query, key, value = tensors()
    value.requires_grad_()
    regard.attention(query, key, value).sum().backward()
    assert query.grad is None
    assert key.grad is None
    assert value.grad is not None


def test_second_derivatives():
    query, key, value = tensors(grad=True)
    for kernel in ("short", "reference"):
        output = regard.attention(query, key, value, mask=MASKS["causal and padding"], kernel=kernel)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (query, key, value))
        if kernel == "short":
            mine = second
    for one, other in zip(mine, second, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_sinks_and_log_sum_exp():
    query, key, value = tensors(grad=True)
    sinks = torch.randn(4, requires_grad=True)
    found = []
    for kernel in ("short", "reference"):
        output, lse = regard.attention_with_lse(query, key, value, sinks=sinks, kernel=kernel)
        found.append([output, lse, *torch.autograd.grad(output.sum() + lse.square().sum(), (query, key, value, sinks))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_small_problems_are_not_compared():
    query, key, value = tensors()
    assert regard.explain(query, key, value, mask=MASKS["padding"]).kernel.name == "short"
    assert regard.explain(nn.Parameter(query), key, value).kernel.name == "short"
    long = torch.zeros(1, 1, 1, 8).expand(1, 8, 4096, 8)
    assert regard.explain(long, long, long).kernel.name != "short"


def test_a_mode_that_intercepts_operations_sees_torch_s_operator():
    query = torch.randn(1, 2, 8, 16)
    with FlopCounterMode(display=False):
        assert regard.explain(query, query, query).kernel.name == "sdpa"
