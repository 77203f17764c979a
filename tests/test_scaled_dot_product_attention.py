"""torch's twin against torch itself, for every combination of arguments."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import bias as causal_biases
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import regard
from regard.errors import DtypeError, MaskError, ShapeError


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def agree(tensors: list[torch.Tensor], **arguments: Any) -> None:
    """Forward and gradients, also into a float mask, are torch's."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        leaves = [*leaves, mask.requires_grad_()]
    results = []
    query, key, value = tensors
    for function in (regard.scaled_dot_product_attention, torch_sdpa):
        output = function(query, key, value, **arguments)
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        results.append([output, *torch.autograd.grad((output * weight).sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def mask_of(kind: str, leading: tuple[int, ...], m: int, n: int) -> torch.Tensor | None:
    match kind:
        case "none":
            return None
        case "bool":
            return torch.rand(m, n) < 0.7
        case "float":
            return rand(m, n)
        case "bool whole":
            return torch.rand(*leading, m, n) < 0.7
        case "float whole":
            return rand(*leading, m, n)
        case _:
            return torch.rand(m, n).log2().masked_fill(torch.rand(m, n) < 0.3, -math.inf).double()


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 5)], ids=["2d", "3d", "4d", "5d"])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5), (1, 7)])
@pytest.mark.parametrize("kind", ["none", "bool", "float", "bool whole", "float whole", "float with -inf"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_masks(leading, lengths, kind, scale):
    m, n = lengths
    mask = mask_of(kind, leading, m, n)
    agree([rand(*leading, m, 4), rand(*leading, n, 4), rand(*leading, n, 6)], attn_mask=mask, scale=scale)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 3, 5)], ids=["2d", "3d", "4d", "5d"])
@pytest.mark.parametrize(("m", "n"), list(itertools.product([1, 5, 7], repeat=2)))
@pytest.mark.parametrize("scale", [None, 0.3])
def test_causal_is_aligned_to_the_start(leading, m, n, scale):
    agree([rand(*leading, m, 4), rand(*leading, n, 4), rand(*leading, n, 6)], is_causal=True, scale=scale)


@pytest.mark.parametrize("leading", [(), (2,)], ids=["4d", "5d"])
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 3), (6, 2), (6, 1), (6, 6)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads(leading, heads, key_heads, is_causal, masked):
    tensors = [rand(*leading, 3, h, m, 4) for h, m in ((heads, 5), (key_heads, 7), (key_heads, 7))]
    mask = torch.rand(5, 7) < 0.7 if masked and not is_causal else None
    agree(tensors, is_causal=is_causal, attn_mask=mask, enable_gqa=True)


def test_one_key_head_broadcasts_without_enable_gqa():
    agree([rand(2, 3, 5, 4), rand(2, 1, 7, 4), rand(2, 1, 7, 6)])


def test_a_causal_mask_and_a_mask_mean_both():
    query, key, value = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)
    early = torch.ones(5, 7, dtype=torch.bool).tril()
    keep, bias = torch.rand(2, 1, 5, 7) < 0.7, rand(5, 7)
    for ours, both in ((keep, keep & early), (bias, bias.masked_fill(~early, -math.inf))):
        output = regard.scaled_dot_product_attention(query, key, value, ours, is_causal=True)
        torch.testing.assert_close(output, torch_sdpa(query, key, value, both), atol=1e-10, rtol=1e-10)


def test_a_row_that_attends_to_nothing_is_zero():
    query = rand(2, 3, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    output = regard.scaled_dot_product_attention(query, query, query, mask)
    assert output[..., 2, :].eq(0).all()
    torch.testing.assert_close(output, torch_sdpa(query, query, query, mask), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    query, key, value = (rand(2, 3, m, 4).to(dtype) for m in (5, 7, 7))
    ours = regard.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert ours.dtype == dtype
    exact = torch_sdpa(query.double(), key.double(), value.double(), is_causal=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), exact, atol=8 * eps, rtol=8 * eps)


def test_autocast():
    query = rand(2, 3, 5, 4).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = regard.scaled_dot_product_attention(query, query, query, is_causal=True)
        theirs = torch_sdpa(query, query, query, is_causal=True)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1.6e-2)  # theirs rounds weights to bfloat16, too


def test_dropout_is_applied():
    weights = regard.scaled_dot_product_attention(
        torch.zeros(50, 1, 20, 4), torch.zeros(50, 1, 20, 4), torch.eye(20).expand(50, 1, 20, 20), dropout_p=0.3
    )
    assert abs((weights == 0).float().mean() - 0.3) < 0.02


def test_arguments_by_place():
    query, mask = rand(2, 3, 5, 4), torch.rand(5, 5) < 0.7
    ours = regard.scaled_dot_product_attention(query, query, query, mask, 0.0, False, 0.5, True)
    torch.testing.assert_close(ours, torch_sdpa(query, query, query, mask, 0.0, False, scale=0.5, enable_gqa=True))


def test_heads_that_differ_need_enable_gqa():
    with pytest.raises(ShapeError, match="query has 6 heads and key 3, value 3: pass enable_gqa=True"):
        regard.scaled_dot_product_attention(rand(2, 6, 5, 4), rand(2, 3, 5, 4), rand(2, 3, 5, 4))


def test_a_mask_that_fits_nothing():
    query = rand(2, 3, 5, 4)
    with pytest.raises(DtypeError, match=r"a bias needs a floating-point tensor; this is torch.int64"):
        regard.scaled_dot_product_attention(query, query, query, torch.zeros(5, 5, dtype=torch.int64))
    with pytest.raises(MaskError, match=r"where\(keep=<bool \(4, 5\)>\) does not fit"):
        regard.scaled_dot_product_attention(query, query, query, torch.zeros(4, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("heads", "key_heads", "value_heads", "enable_gqa"),
    [(1, 4, 4, False), (4, 1, 4, False), (1, 4, 1, False), (1, 1, 4, False), (4, 2, 4, True), (4, 1, 2, True)],
)
def test_heads_broadcast(heads, key_heads, value_heads, enable_gqa):
    tensors = [rand(2, h, m, 4) for h, m in ((heads, 5), (key_heads, 7), (value_heads, 7))]
    agree(tensors, enable_gqa=enable_gqa)


@pytest.mark.parametrize("shapes", [((5, 4), (2, 7, 4), (2, 7, 4)), ((3, 5, 4), (2, 3, 7, 4), (7, 4))])
def test_missing_axes_broadcast(shapes):
    agree([rand(*shape) for shape in shapes])


@pytest.mark.parametrize(("heads", "key_heads", "value_heads"), [(2, 4, 4), (6, 3, 2), (4, 3, 3)])
def test_heads_that_neither_broadcast_nor_divide(heads, key_heads, value_heads):
    tensors = [rand(2, h, 5, 4) for h in (heads, key_heads, value_heads)]
    match = f"query has {heads} heads and key {key_heads}, value {value_heads}: they need to be the same, or 1"
    with pytest.raises(ShapeError, match=match):
        regard.scaled_dot_product_attention(*tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [None, torch.eye(5, 7).bool()])
def test_all_weights_dropped(mask):
    agree([rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 6)], attn_mask=mask, dropout_p=1.0)


def test_one_axis_is_too_few():
    with pytest.raises(ShapeError, match=r"query \(4,\), key \(7, 4\).* two at least"):
        regard.scaled_dot_product_attention(rand(4), rand(7, 4), rand(7, 4))
    with pytest.raises(ShapeError, match=r"query \(4,\), key \(4,\).* two at least"):
        regard.scaled_dot_product_attention(rand(4), rand(4), rand(4), is_causal=True)


def causal_bias(variant: str, m: int, n: int) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of NaN where there are more queries than keys
        warnings.simplefilter("ignore")
        return getattr(causal_biases, f"causal_{variant}")(m, n)


def through(function: Callable, variant: str, m: int, n: int) -> None:
    """Forward and gradients of a function of query, key, value and a CausalBias are those of its booleans."""
    bias = causal_bias(variant, m, n)
    tensors = [rand(2, 3, m, 4).requires_grad_(), rand(2, 3, n, 4).requires_grad_(), rand(2, 3, n, 6).requires_grad_()]
    keep = torch.ones(m, n, dtype=torch.bool).tril(0 if variant == "upper_left" else n - m)
    results = []
    for output in (function(*tensors, bias), torch_sdpa(*tensors, keep)):  # type: ignore[call-arg]
        results.append([output, *torch.autograd.grad(output.cos().sum(), tensors)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


TAKE_A_CAUSAL_BIAS = {
    "attn_mask": lambda q, k, v, b: regard.scaled_dot_product_attention(q, k, v, attn_mask=b),
    "mask": lambda q, k, v, b: regard.attention(q, k, v, mask=b),
    "bias": lambda q, k, v, b: regard.attention(q, k, v, bias=b),
    "from_sdpa": lambda q, k, v, b: regard.attention(q, k, v, mask=regard.masks.from_sdpa(b)),
}


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("m", "n"), [(3, 5), (5, 5), (5, 3), (1, 4)])
@pytest.mark.parametrize("argument", TAKE_A_CAUSAL_BIAS)
def test_causal_bias(argument, variant, m, n):
    through(TAKE_A_CAUSAL_BIAS[argument], variant, m, n)


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize("argument", TAKE_A_CAUSAL_BIAS)
def test_causal_bias_compiled(argument, variant):
    through(torch.compile(TAKE_A_CAUSAL_BIAS[argument], backend="eager", fullgraph=True), variant, 3, 5)


@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("m", "n"), [(3, 5), (5, 5), (5, 3)])
def test_causal_bias_and_is_causal_mean_both(variant, m, n):
    query, key = rand(2, 3, m, 4), rand(2, 3, n, 4)
    keep = torch.ones(m, n, dtype=torch.bool).tril()
    if variant == "lower_right":
        keep &= torch.ones(m, n, dtype=torch.bool).tril(n - m)
    ours = regard.scaled_dot_product_attention(query, key, key, causal_bias(variant, m, n), is_causal=True)
    torch.testing.assert_close(ours, torch_sdpa(query, key, key, keep), atol=1e-10, rtol=1e-10)


def test_causal_bias_beside_a_mask_and_a_bias():
    query, key, bias = rand(2, 3, 5, 4), rand(2, 3, 7, 4), causal_bias("upper_left", 5, 7)
    keep, added = torch.rand(5, 7) < 0.7, rand(5, 7)
    early = torch.ones(5, 7, dtype=torch.bool).tril()
    with_mask = regard.attention(query, key, key, mask=keep, bias=bias)
    torch.testing.assert_close(with_mask, torch_sdpa(query, key, key, keep & early), atol=1e-10, rtol=1e-10)
    with_bias = regard.attention(query, key, key, mask=bias, bias=added)
    expected = torch_sdpa(query, key, key, added.masked_fill(~early, -math.inf))
    torch.testing.assert_close(with_bias, expected, atol=1e-10, rtol=1e-10)


def test_causal_bias_that_does_not_fit():
    query, bias = rand(2, 3, 5, 4), causal_bias("lower_right", 3, 5)
    match = "this CausalBias is for 3 queries and 5 keys, but there are 5 queries and 5 keys"
    with pytest.raises(MaskError, match=match):
        regard.scaled_dot_product_attention(query, query, query, bias)
    with pytest.raises(MaskError, match=match):
        regard.attention(query, query, query, bias=bias)
    with pytest.raises(MaskError, match="counts rows and columns, not positions: leave query_positions"):
        regard.attention(query[..., :3, :], query, query, mask=bias, query_positions=torch.arange(3))
    with pytest.raises(DtypeError, match="CausalBias has no numbers to add: it is a mask"):
        regard.biases.tensor(bias)
    for read in (regard.masks.from_multihead, regard.masks.from_huggingface):
        with pytest.raises(
            MaskError, match=r"is a CausalBias of torch, which has no numbers: masks.from_sdpa reads it"
        ):
            read(bias)
    with pytest.raises(MaskError, match=r"keep needs a bool tensor; a CausalBias of torch is read by masks.from_sdpa"):
        regard.masks.where(keep=bias)
    with pytest.raises(MaskError, match=r"joins a mask through masks.from_sdpa"):
        regard.masks.causal() & bias  # type: ignore[operator]
