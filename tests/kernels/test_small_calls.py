"""Repeated small calls: what is memoized for one call never decides another that differs in anything that counts."""

import copy
import gc
import math
import pickle
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, native, normalizers, scores, small_calls
from regard.errors import ConfigurationError, ShapeError
from regard.kernels.hooks import attention_hook
from regard.kernels.planning.rates import ZEN_4
from regard.masks.padding import Padding
from regard.tiles.memo import memo_of, memo_of_bias

pytestmark = pytest.mark.skipif(not native.available(), reason="without native code no call is small")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, priced_as):
    """Nor is what is chosen left to the machine."""
    priced_as(ZEN_4, "avx512")
    monkeypatch.setattr(small_calls, "_calls", {})


def inputs(*sizes: int, keys: int | None = None) -> list[Tensor]:
    batch, heads, rows, dim = sizes
    return [torch.randn(batch, heads, length, dim) for length in (rows, keys or rows, keys or rows)]


def known() -> list[bool]:
    """Of each memoized call, whether it takes the short way."""
    return [call is not None for call in small_calls._calls.values()]


def agrees(tensors: list[Tensor], **options) -> None:
    for _ in range(3):  # the first is remembered, others are repeated
        expected = regard.attention(*(tensor.double() for tensor in tensors), kernel="reference", **options)
        torch.testing.assert_close(regard.attention(*tensors, **options).double(), expected, rtol=1e-5, atol=1e-5)


def gradients_agree(tensors: list[Tensor], learned: list[Tensor], make: Callable[[], dict[str, Any]]) -> None:
    """The gradients of the tensors, and of what the options read; options are made anew for each call."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    above = torch.randn_like(tensors[2][..., :1, :]).expand(*tensors[0].shape[:-1], -1)
    for _ in range(3):
        found, expected = (
            torch.autograd.grad(regard.attention(*leaves, kernel=kernel, **make()), [*leaves, *learned], above)
            for kernel in (None, "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(3)])
def test_repeated_calls_are_exact(mask):
    agrees(inputs(2, 3, 11, 5), mask=mask)
    agrees(inputs(2, 3, 13, 16), mask=mask, scale=0.3)
    assert known() == [True, True]


@pytest.mark.parametrize("mask", [None, masks.causal() & masks.window(3)])
@pytest.mark.parametrize("leading", [(), (3,)])
def test_repeated_calls_without_an_axis_of_heads(leading, mask):
    tensors = [torch.randn(*leading, 11, 5).requires_grad_() for _ in range(3)]
    agrees([tensor.detach() for tensor in tensors], mask=mask)
    expected = torch.autograd.grad(regard.attention(*tensors, mask=mask, kernel="reference").square().sum(), tensors)
    for _ in range(2):
        found = torch.autograd.grad(regard.attention(*tensors, mask=mask).square().sum(), tensors)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert known() == [True, True]  # without gradients, and with


def test_masks_with_tensors_keep_the_axes_that_the_tensors_have():
    keep = torch.rand(3, 11, 11) < 0.5  # of (batch, length, dim): for each sequence its own
    agrees([torch.randn(3, 11, 5) for _ in range(3)], mask=masks.where(keep=keep))
    assert known() == []


def test_refusals_speak_of_the_axes_that_the_tensors_have():
    with pytest.raises(ShapeError, match=re.escape("(3, 11, 5)")):
        regard.attention(torch.randn(3, 11, 5), torch.randn(3, 11, 7), torch.randn(3, 11, 7))
    with pytest.raises(ShapeError):
        regard.attention(torch.randn(3, 11, 5), torch.randn(11, 5), torch.randn(11, 5))


@pytest.mark.parametrize(
    "make", [normalizers.Sigmoid, partial(normalizers.Sigmoid, -2), normalizers.Sparsemax, normalizers.Entmax]
)
def test_calls_with_a_normalizer_that_is_made_anew_each_time(make):
    for mask in (None, masks.causal()):
        tensors = [3.0 * tensor for tensor in inputs(2, 3, 11, 5)]
        for _ in range(3):
            expected = regard.attention(*(each.double() for each in tensors), mask=mask, normalizer=make())
            found = regard.attention(*tensors, mask=mask, normalizer=make())
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert known() == [False, True] * 2  # float64, and float32


def test_numbers_of_a_normalizer_are_told_apart_and_tensors_take_the_long_way():
    tensors = inputs(1, 2, 16, 8)
    for normalizer in (None, *map(normalizers.Sigmoid, (-1.0, -2.0)), *map(normalizers.Entmax, (1.5, 2.0))):
        agrees(tensors, normalizer=normalizer)
    assert known() == [True] * 5
    agrees(tensors, normalizer=normalizers.Sigmoid(torch.tensor([-1.0, 2.0])))
    assert len(known()) == 5
    agrees(tensors, normalizer=normalizers.Entmax(1.3))  # which no call of C computes
    assert known() == [True] * 5 + [False]


@pytest.mark.parametrize("normalizer", [normalizers.Sigmoid(), normalizers.Sparsemax(), normalizers.Entmax(1.5)])
def test_nan_and_gradients_of_a_normalizer_are_as_in_the_formula(normalizer):
    mask, row = masks.causal(), 9
    leaves = [tensor.requires_grad_() for tensor in inputs(1, 2, 13, 8)]
    for place in range(3):
        poisoned = [tensor.detach().clone() for tensor in leaves]
        poisoned[place][0, 1, row, 3] = torch.nan
        for given in (poisoned, [tensor.requires_grad_() for tensor in poisoned]):
            output = regard.attention(*given, mask=mask, normalizer=normalizer)
            rows = slice(row, row + 1) if place == 0 else slice(row, None)  # those that attend to it
            assert output[0, 1, rows].isnan().any(-1).all()
            clean = regard.attention(*leaves, mask=mask, normalizer=normalizer)
            torch.testing.assert_close(output[0, 1, :row], clean[0, 1, :row], rtol=1e-5, atol=1e-6)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    weights = torch.randn(1, 2, 13, 8)
    results = [
        torch.autograd.grad((regard.attention(*each, mask=mask, normalizer=normalizer) * weights).sum(), each)
        for each in (leaves, exact)
    ]
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match="normalizer needs one from regard.normalizers"):
        regard.attention(*leaves, normalizer="sparsemax")  # type: ignore[arg-type]


def test_what_differs_is_another_call():
    tensors = inputs(1, 2, 16, 8)
    agrees(tensors)
    agrees(tensors, mask=masks.causal())
    agrees(tensors, mask=masks.window(2))
    agrees(tensors, scale=2.0)
    agrees([tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors])
    agrees(inputs(1, 2, 9, 8, keys=16))
    assert known() == [True] * 6


def test_what_is_known_of_a_mask_with_tensors_is_of_these_numbers():
    lengths = torch.tensor([3, 16])
    tensors, mask = inputs(2, 2, 16, 8), Padding(lengths)
    agrees(tensors, mask=mask)
    agrees(tensors, mask=masks.causal() & mask)
    (before,) = memo_of(mask).calls.values()
    lengths.fill_(5)
    agrees(tensors, mask=mask)
    (after,) = memo_of(mask).calls.values()
    assert not torch.equal(before.spans, after.spans)
    agrees(tensors, mask=torch.rand(16, 16) > 0.5)
    assert known() == []


def test_a_mask_with_tensors_is_forgotten_with_it():
    mask = masks.padding([3, 16])
    agrees(inputs(2, 2, 16, 8), mask=mask)
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


def test_a_mask_of_inference_tensors_is_read_in_every_call():
    tensors = inputs(2, 2, 16, 8)
    with torch.inference_mode():
        lengths = torch.tensor([3, 16])
        mask = Padding(lengths)
        agrees(tensors, mask=mask)
        lengths.fill_(5)
        agrees(tensors, mask=mask)
    assert not memo_of(mask).calls


@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_steps_of_a_growing_cache_are_one_call_up_to_each_power_of_two(mask):
    for length in range(1, 20):
        agrees(inputs(1, 2, 1, 8, keys=length), mask=mask)
    assert known() == [True] * 6  # 1, 2, 4, 8, 16 and 32
    agrees(inputs(1, 2, 1, 8, keys=600), mask=mask)
    assert len(known()) == 6


def test_steps_of_groups_and_of_any_strides():
    for length in (7, 64, 65, 300):
        query = torch.randn(2, 1, 6, 24).transpose(1, 2)
        key, value = torch.randn(2, 3, length, 24), torch.randn(2, length, 3, 40).transpose(1, 2)
        agrees([query, key, value])
        agrees([query[..., ::2], key[..., ::2], value])
        agrees([query, key[:, :, ::2], value[:, :, ::2]])
    assert known() == [True, False, True, True, False, True, True, False, True, False, True]  # 33 keys are as 64


WINDOWS = [
    masks.causal() & masks.window(before=3),
    masks.window(before=4, after=0),
    masks.window(before=6, after=2) & masks.causal(),
    masks.window(before=0),
]


@pytest.mark.parametrize("mask", WINDOWS, ids=repr)
def test_steps_with_a_window_are_those_over_its_keys(mask):
    """Shorter and longer than the window, of groups of heads, and wherever the keys stand."""
    for length in range(1, 20):
        query, key, value = *inputs(2, 6, 1, 8)[:1], *inputs(2, 3, length, 8)[1:]
        agrees([query, key, value], mask=mask)
        agrees([query, key, value], mask=mask, key_positions=range(977, 977 + length))
    assert known() == [True] * 12  # up to 1, 2, 4, 8, 16 and 32 keys, at the default positions and at others


def test_what_is_not_finite_before_the_window_of_a_step_is_not_read():
    query, key, value = inputs(1, 2, 1, 8, keys=13)
    key[:, :, :9], value[:, :, :9] = torch.nan, torch.inf
    for mask in (masks.causal() & masks.window(before=3), masks.window(3, 0)):
        expected = regard.attention(query, key[:, :, 9:], value[:, :, 9:])
        for positions in (None, range(-5, 8)):
            for _ in range(2):
                assert torch.equal(regard.attention(query, key, value, mask=mask, key_positions=positions), expected)
    value[:, :, 9, 1] = torch.nan
    assert regard.attention(query, key, value, mask=mask).isnan().sum() == 2


def test_steps_under_masks_that_leave_other_keys_are_not_those_of_the_last():
    """Not the last keys, or by more than distance: of where they stand nothing is known."""
    for mask in (
        masks.window(before=9) & ~masks.window(before=2),
        masks.dilated(3, 2),
        masks.causal() & masks.strided(3),
        masks.causal() & (masks.window(before=3) | masks.prefix(2)),
        masks.prefix(11),
        masks.causal() & ~masks.causal(),
        masks.causal() & masks.padding([5, 13]),
    ):
        for length in (5, 13, 16):
            agrees(inputs(2, 2, 1, 8, keys=length), mask=mask)
            agrees(inputs(2, 2, 1, 8, keys=length), mask=mask, key_positions=range(2, 2 + length))


def test_true_is_no_scale_after_a_call_with_one():
    """It equals 1, of which a call was remembered."""
    tensors = inputs(1, 2, 5, 8)
    for _ in range(2):
        regard.attention(*tensors, scale=1.0)
    with pytest.raises(ConfigurationError, match="scale is True; it needs a finite number"):
        regard.attention(*tensors, scale=True)


def test_ranges_of_key_positions_that_are_remembered():
    tensors = inputs(2, 3, 5, 8, keys=11)
    for mask in (masks.causal() & masks.window(before=3), masks.prefix(4) & masks.causal()):
        for first in (0, 3, 50, -4):
            agrees(tensors, mask=mask, key_positions=range(first, first + 11))
    bias = biases.gaussian(7.0, 2.0)  # of the key's position
    agrees(tensors, key_positions=range(1, 12), bias=bias)
    agrees(tensors, key_positions=range(2, 13), bias=bias)
    assert known() == [True, False]
    for wrong in (range(10), range(0, 22, 2), range(11, 0, -1)):
        with pytest.raises(ShapeError, match="needs 11 consecutive positions"):
            regard.attention(*tensors, key_positions=wrong)
    with pytest.raises(ConfigurationError, match="need to lie within"):
        regard.attention(*tensors, key_positions=range(2**63, 2**63 + 11))


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(before=3)])
def test_several_queries_of_a_growing_cache_are_remembered_for_each_length(mask):
    """All layers of a model ask for the same lengths."""
    for length in (16, 17, 18):
        for _ in range(2):
            agrees(inputs(1, 2, 5, 8, keys=length), mask=mask)
    assert known() == [True] * 3


def test_what_a_step_leaves_out_of_its_memo_is_checked():
    query, key, value = inputs(1, 2, 1, 8, keys=20)
    regard.attention(query, key, value)
    with pytest.raises(ShapeError):
        regard.attention(query, key[:, :, :19], value)
    with pytest.raises(ShapeError):
        regard.attention(query, key[..., :4], value)
    value[:, :, 3, 2] = float("nan")
    assert regard.attention(query, key, value)[..., 2].isnan().all()
    key[:, :, 5, 1] = float("nan")
    assert regard.attention(query, key, value).isnan().all()


def test_a_hook_sees_the_same_step_bit_for_bit():
    tensors = inputs(1, 4, 1, 16, keys=40)
    plain, seen = regard.attention(*tensors), []
    with attention_hook(lambda problem, lse: seen.append(lse)):
        assert torch.equal(regard.attention(*tensors), plain)
    assert len(seen) == 1


def test_steps_over_padded_sources_are_remembered():
    mask = masks.padding([7, 20])
    agrees(inputs(2, 2, 1, 8, keys=20), mask=mask)
    assert [call is not None for call in memo_of(mask).calls.values()] == [True]


@pytest.mark.parametrize("rows", [1, 11])
def test_gradients_of_repeated_calls(rows):
    tensors = [tensor.requires_grad_() for tensor in inputs(2, 2, rows, 8, keys=11)]
    for _ in range(3):
        expected = torch.autograd.grad(regard.attention(*tensors, kernel="reference").square().sum(), tensors)
        found = torch.autograd.grad(regard.attention(*tensors).square().sum(), tensors)
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert not regard.attention(*tensors).requires_grad
    assert known() == [True] * 2


def test_second_derivatives_of_repeated_calls():
    tensors = [tensor.double().requires_grad_() for tensor in inputs(1, 1, 4, 3)]
    small = [tensor.detach().float().requires_grad_() for tensor in tensors]
    for _ in range(2):
        (first,) = torch.autograd.grad(regard.attention(*small).square().sum(), small[:1], create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), small[:1])
    (first,) = torch.autograd.grad(
        regard.attention(*tensors, kernel="reference").square().sum(), tensors[:1], create_graph=True
    )
    (expected,) = torch.autograd.grad(first.sum(), tensors[:1])
    torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-5)


def test_tensors_that_were_kept_when_their_transform_ended():
    kept, other = [], inputs(1, 2, 8, 4)[0].requires_grad_()
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(other.detach())
    for _ in range(2):
        expected = regard.attention(kept[0], other, other, kernel="reference")
        torch.testing.assert_close(regard.attention(kept[0], other, other), expected)


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_finite_stays_behind_the_mask(where):
    tensors = dict(zip(("query", "key", "value"), inputs(1, 2, 8, 4), strict=True))
    regard.attention(**tensors, mask=masks.causal())
    tensors[where][0, 0, 5] = torch.nan
    output = regard.attention(**tensors, mask=masks.causal())
    assert output[:, :, :5].isfinite().all()
    assert output[:, 0, 5].isnan().all()


def test_hooks_see_repeated_calls():
    tensors, seen = inputs(1, 2, 8, 4), []
    regard.attention(*tensors)
    with attention_hook(lambda problem, lse: seen.append(lse.shape)):
        regard.attention(*tensors)
    assert seen == [(1, 2, 8)]


def test_autocast_of_repeated_calls():
    tensors = inputs(1, 2, 8, 4)
    regard.attention(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.attention(*tensors).dtype is torch.bfloat16


def test_errors_are_those_of_attention():
    query, key, value = inputs(1, 2, 8, 4)
    for _ in range(2):
        with pytest.raises(ShapeError, match="a dot product needs equal dims"):
            regard.attention(query[..., :3], key, value)
        with pytest.raises(ConfigurationError, match="needs a finite number"):
            regard.attention(query, key, value, scale=float("nan"))
    assert known() == []


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() | masks.prefix(4), masks.strided(3)])
def test_a_bias_that_is_kept_is_evaluated_once(mask, monkeypatch):
    bias, evaluated = biases.alibi(3), []
    of = type(bias).values_at
    monkeypatch.setattr(type(bias), "values_at", lambda *given: (evaluated.append(given), of(*given))[1])
    tensors = inputs(2, 3, 37, 5)
    for _ in range(3):
        regard.attention(*tensors, mask=mask, bias=bias)
    before = len(evaluated)
    found = regard.attention(*tensors, mask=mask, bias=bias)
    assert len(evaluated) == before
    expected = regard.attention(*(each.double() for each in tensors), mask=mask, bias=bias, kernel="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_with_a_bias_that_is_kept():
    bias, mask = biases.from_mod(lambda score, b, h, q, k: score - 0.1 * (q - k) ** 2), masks.causal() | masks.prefix(3)
    tensors = [tensor.requires_grad_() for tensor in inputs(2, 3, 13, 5)]
    expected = torch.autograd.grad(
        regard.attention(*tensors, mask=mask, bias=bias, kernel="reference").square().sum(), tensors
    )
    for _ in range(4):
        found = torch.autograd.grad(regard.attention(*tensors, mask=mask, bias=bias).square().sum(), tensors)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_is_known_of_a_bias_is_of_these_numbers():
    slopes, tensors = torch.rand(2), inputs(2, 2, 16, 8)
    bias = biases.alibi(slopes)
    for _ in range(3):
        agrees(tensors, bias=bias)
        slopes.mul_(-2)
    slopes.requires_grad_()
    (found,) = torch.autograd.grad(regard.attention(*tensors, bias=bias).square().sum(), slopes)
    (expected,) = torch.autograd.grad(regard.attention(*tensors, bias=bias, kernel="reference").square().sum(), slopes)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_bias_that_content_decides_is_of_each_call():
    vectors = torch.randn(2, 6, 8)
    bias, wide = (biases.shaw(each, before=3, after=2) for each in (vectors, vectors.double()))
    for _ in range(4):
        tensors = inputs(1, 2, 16, 8)
        expected = regard.attention(*(tensor.double() for tensor in tensors), bias=wide, kernel="reference")
        torch.testing.assert_close(regard.attention(*tensors, bias=bias).double(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_known_of_a_bias_goes_with_it_and_into_no_copy():
    bias = biases.alibi(2)
    agrees(inputs(2, 2, 16, 8), bias=bias)
    memo = memo_of_bias(bias)
    assert memo is not None
    assert len(memo.calls) == 1
    assert vars(copy.deepcopy(bias)).keys() == vars(pickle.loads(pickle.dumps(bias))).keys() == {"slopes"}
    gone = weakref.ref(bias)
    del bias, memo
    gc.collect()
    assert gone() is None


UNIT = torch.nn.functional.normalize(torch.randn(11, 4, 13, 6, generator=torch.Generator().manual_seed(3)), dim=-1)
FIRE = torch.randn(4, 3, generator=torch.Generator().manual_seed(4)), torch.tensor(0.8), torch.tensor(2.5)
CONTENT = {
    "tensor": (lambda t: biases.tensor(t[0]), lambda batch, keys: [torch.randn(batch, 4, 1, keys)]),
    "shaw": (lambda t: biases.shaw(t[0], before=5, after=2), lambda batch, keys: [torch.randn(4, 8, 6)]),
    "shaw of all heads": (lambda t: biases.shaw(t[0], before=2, after=20), lambda batch, keys: [torch.randn(1, 23, 6)]),
    "deberta": (
        lambda t: biases.deberta(t[0], t[1], buckets=8, max_distance=20),
        lambda batch, keys: [torch.randn(4, 16, 6), torch.randn(4, 16, 6)],
    ),
    "deberta of keys": (lambda t: biases.deberta(None, t[0], buckets=4), lambda batch, keys: [torch.randn(1, 8, 6)]),
    "transformer-xl": (
        lambda t: biases.transformer_xl(*t),
        lambda batch, keys: [torch.randn(4, 6, 8), torch.randn(4, 6), torch.randn(4, 6)],
    ),
    "tupe": (
        lambda t: biases.tupe(t[0], t[1], from_first=t[2], to_first=t[3]),
        lambda batch, keys: [torch.randn(1, keys, 6), torch.randn(1, keys + 2, 6), torch.randn(4), torch.randn(4)],
    ),
    "fire": (
        # Each feature is 0 for some pairs, and not for others; what is added to all has a gradient of 0.
        lambda t: biases.fire(t[0], t[1], t[2], t[2][:, 0].detach(), rate=t[3], threshold=t[4]),
        lambda batch, keys: [
            torch.tensor([2.0, -3.0, 3.0]),
            torch.tensor([-0.9, 1.4, -1.9]),
            *(each.clone() for each in FIRE),
        ],
    ),
    "cope": (lambda t: biases.cope(t[0]), lambda batch, keys: [torch.randn(4, 5, 6)]),
    "gates": (lambda t: biases.forget_gates(t[0]), lambda batch, keys: [-torch.rand(batch, 4, keys)]),
    "gates of both directions": (
        lambda t: biases.forget_gates(t[0], t[1]),
        lambda batch, keys: [-torch.rand(4, keys), -torch.rand(batch, 1, keys)],
    ),
    "path": (
        lambda t: biases.path(t[0], t[1]),
        lambda batch, keys: [UNIT[:batch, :2, :keys].clone(), 2 * torch.rand(batch, 2, keys)],
    ),
    "path of heads, gates and a tensor": (
        lambda t: biases.path(t[0], t[1]) + biases.forget_gates(t[2]) + biases.tensor(t[3]),
        lambda batch, keys: [
            *(UNIT[:batch, :, :keys].clone(), 2 * torch.rand(batch, 4, keys)),
            *(-torch.rand(keys), torch.randn(4, 1, keys)),
        ],
    ),
}
"""By name a bias that is made anew for each call from some tensors, and such tensors."""


def content_call(name: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Queries of 4 heads, keys and values of 2, and the tensors of a bias."""
    batch, queries, keys = sizes
    shapes = (batch, 4, queries, 6), (batch, 2, keys, 6), (batch, 2, keys, 7)
    own = CONTENT[name][1](batch, keys)
    return [torch.randn(shape).to(dtype) for shape in shapes], own


@pytest.mark.covering
@pytest.mark.parametrize("sizes", [(1, 11, 11), (2, 7, 13)], ids=str)
@pytest.mark.parametrize("mask", [masks.causal(), masks.causal() & ~masks.strided(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONTENT)
def test_biases_that_content_decides_are_repeated_with_other_numbers(name, dtype, mask, sizes):
    for learned in (False, True, True):
        inputs, own = content_call(name, sizes, dtype)
        exact = [tensor.double().requires_grad_() for tensor in (*inputs, *own)]
        expected = regard.attention(*exact[:3], mask=mask, bias=CONTENT[name][0](exact[3:]), kernel="reference")
        given = [tensor.requires_grad_(learned) for tensor in (*inputs, *own)]
        found = [regard.attention(*given[:3], mask=mask, bias=CONTENT[name][0](given[3:])) for _ in range(2)]
        tight = 2e-5 if dtype is torch.float32 else 3e-2
        for each in found:
            torch.testing.assert_close(each.double(), expected, rtol=tight, atol=tight)
        if learned:
            above = torch.randn_like(found[1])
            ours = torch.autograd.grad(found[1], given, above)
            exactly = torch.autograd.grad(expected, exact, above.double())
            for mine, other in zip(ours, exactly, strict=True):
                torch.testing.assert_close(
                    mine.double(), other, rtol=2 * tight, atol=2 * tight * float(other.abs().max())
                )
    assert known() == [True, True]  # without gradients, and with


@pytest.mark.parametrize("name", CONTENT)
def test_nan_behind_the_mask_reaches_no_gradient_of_what_content_decides(name):
    (query, key, value), own = content_call(name, (2, 11, 11), torch.float32)
    mask, bad = masks.causal() & masks.window(before=4), key.clone()
    bad[:, :, -1, 2] = torch.nan  # the last row alone attends to it
    upstream = torch.randn(2, 4, 11, 7)
    upstream[:, :, -1] = 0.0
    found = []
    for keys in (key, bad, key, bad):
        given = [tensor.clone().requires_grad_() for tensor in (query, keys, value, *own)]
        output = regard.attention(*given[:3], mask=mask, bias=CONTENT[name][0](given[3:]))
        found.append([output[:, :, :-1], *torch.autograd.grad(output, given, upstream)])
        with torch.no_grad():
            found[-1].append(regard.attention(*given[:3], mask=mask, bias=CONTENT[name][0](given[3:]))[:, :, :-1])
    for others in found[1:]:
        for mine, other in zip(others, found[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)


def test_biases_of_float64_beside_queries_of_float32_are_computed():
    (query, key, value), _ = content_call("shaw", (1, 11, 11), torch.float32)
    wide = torch.randn(4, 8, 6, dtype=torch.float64)
    for make in (lambda each: biases.shaw(each, before=5, after=2), biases.cope):
        expected = regard.attention(
            *(tensor.double() for tensor in (query, key, value)), mask=masks.causal(), bias=make(wide)
        )
        for _ in range(3):
            found = regard.attention(query, key, value, mask=masks.causal(), bias=make(wide))
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_whose_mask_is_by_batch_counts_positions():
    (query, key, value), (vectors,) = content_call("cope", (1, 11, 11), torch.float32)
    mask = masks.causal() & masks.documents(torch.arange(11)[None] // 4)
    for _ in range(3):
        agrees([query, key, value], mask=mask, bias=biases.cope(vectors))


def test_what_a_bias_of_another_kind_refuses_is_refused_after_repeated_calls():
    (query, key, value), own = content_call("shaw", (1, 11, 11), torch.float32)
    for _ in range(2):
        regard.attention(query, key, value, bias=biases.shaw(own[0], before=5, after=2))
    with pytest.raises(ShapeError, match=re.escape("it is for 4 of 5")):
        regard.attention(query, key, value, bias=biases.shaw(own[0][..., :5], before=5, after=2))
    with pytest.raises(ShapeError, match="does not broadcast"):
        regard.attention(query, key, value, bias=torch.zeros(3, 11, 11))


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.strided(3)])
def test_softcaps_and_sinks(mask):
    """Softcaps are told apart; sinks are those of the call, of any dtype and strides, learned or not."""
    tensors = inputs(2, 3, 11, 5)
    for softcap in (None, 0.5, 2.0):
        for sinks in (None, torch.randn(3), torch.randn(3).double(), torch.randn(6)[::2], 9.0 + torch.zeros(3)):
            agrees(tensors, mask=mask, softcap=softcap, sinks=sinks)
    assert known() == [True] * 9  # by softcap, without sinks and by their two dtypes
    learned = torch.randn(3, requires_grad=True)
    gradients_agree(tensors, [learned], lambda: {"mask": mask, "sinks": learned, "softcap": 0.7})
    gradients_agree(tensors, [], lambda: {"mask": mask, "softcap": 0.7})


def test_a_hook_sees_the_same_sinks_bit_for_bit():
    tensors, sinks, seen = inputs(1, 4, 9, 16), torch.randn(4), []
    for options in ({"sinks": sinks}, {"sinks": sinks, "mask": masks.causal(), "softcap": 2.0}):
        plain = [regard.attention(*tensors, **options) for _ in range(2)][-1]
        with attention_hook(lambda problem, lse: seen.append(lse)):
            assert torch.equal(regard.attention(*tensors, **options), plain)
        _, lse = regard.attention_with_lse(*tensors, **options, kernel="reference")
        torch.testing.assert_close(seen[-1], lse)


def test_sinks_alone_have_a_gradient():
    tensors, sinks = inputs(1, 2, 7, 4), torch.randn(2, requires_grad=True)
    for _ in range(3):
        found, expected = (
            torch.autograd.grad(regard.attention(*tensors, sinks=sinks, kernel=kernel).square().sum(), sinks)
            for kernel in (None, "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (first,) = torch.autograd.grad(regard.attention(*tensors, sinks=sinks).square().sum(), sinks, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), sinks)
    output = regard.attention(*tensors, sinks=sinks, kernel="reference")
    (first,) = torch.autograd.grad(output.square().sum(), sinks, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sum(), sinks)[0], rtol=1e-4, atol=1e-5)


def test_sinks_that_are_written_to_before_the_gradient_are_an_error():
    tensors, sinks = [tensor.requires_grad_() for tensor in inputs(1, 2, 7, 4)], torch.randn(2)
    for _ in range(2):
        output = regard.attention(*tensors, sinks=sinks)
        sinks.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_what_is_not_finite_beside_a_softcap_and_sinks(mask, place, value):
    """The tanh makes infinity a finite score, which is no attention to it."""
    tensors, sinks = inputs(1, 2, 9, 4), torch.randn(2)
    regard.attention(*tensors, mask=mask, softcap=1.5, sinks=sinks)
    tensors[place][0, 0, 5, 1] = value
    expected = regard.attention(*tensors, mask=mask, softcap=1.5, sinks=sinks, kernel="reference")
    for _ in range(2):
        found = regard.attention(*tensors, mask=mask, softcap=1.5, sinks=sinks)
        torch.testing.assert_close(found, expected, equal_nan=True)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        found = regard.attention(*leaves, mask=mask, softcap=1.5, sinks=sinks)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_sinks_and_softcaps_that_are_refused():
    query, key, value = inputs(1, 2, 8, 4)
    for _ in range(2):
        with pytest.raises(ShapeError, match=re.escape("sinks is torch.float32 (3,)")):
            regard.attention(query, key, value, sinks=torch.zeros(3))
        with pytest.raises(ConfigurationError, match="softcap is -1"):
            regard.attention(query, key, value, softcap=-1.0)
        with pytest.raises(ShapeError, match="input with a head axis"):
            regard.attention(query[0, :1], key[0, :1], value[0, :1], sinks=torch.zeros(1))


class Angles(scores.Score):
    """The cosine of query and key, times a number."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def project_query(self, query: Tensor) -> Tensor:
        return torch.nn.functional.normalize(query, dim=-1)

    def project_key(self, key: Tensor) -> Tensor:
        return torch.nn.functional.normalize(key, dim=-1)

    def form(self, query: Tensor, key: Tensor) -> scores.DotPairs:
        return scores.DotPairs(query, key, self.times)


@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_scores_that_are_dot_products(mask):
    """What is prepared is of the projected queries and keys; of another scale the call takes the long way."""
    tensors = inputs(2, 3, 11, 5)
    general = [scores.General(5, 5) for _ in range(2)]
    for score in (scores.Dot(), scores.ScaledDot(), scores.ScaledDot(0.3), Angles(3.0), Angles(2.0)):
        agrees(tensors, mask=mask, score=score)
    for score in general:
        with torch.no_grad():
            for _ in range(3):
                expected = regard.attention(*tensors, mask=mask, score=score, kernel="reference")
                torch.testing.assert_close(regard.attention(*tensors, mask=mask, score=score), expected)
    assert known() == [True] * 4  # Dot, ScaledDot, Angles and General
    for score in (*general, scores.Dot(), Angles(3.0)):
        gradients_agree(tensors, list(score.parameters()), lambda score=score: {"mask": mask, "score": score})
    fixed = [tensor.detach() for tensor in tensors]  # of which the projected ones have a gradient all the same
    for _ in range(2):
        output = regard.attention(*fixed, mask=mask, score=general[0])
        assert torch.autograd.grad(output.sum(), general[0].weight)[0].any()


def test_projections_of_other_sizes_are_not_the_prepared_ones():
    query, key, value = inputs(1, 2, 9, 6)
    for _ in range(2):
        for wide in (6, 4):
            with pytest.raises(ShapeError) if wide == 4 else torch.no_grad():
                regard.attention(query, key, value, score=scores.General(6, wide))
    location = scores.Location(6, 12)
    with torch.no_grad():
        for _ in range(3):
            expected = regard.attention(query, key, value, score=location, kernel="reference")
            torch.testing.assert_close(regard.attention(query, key, value, score=location), expected)


def test_refusals_of_scores_are_those_of_attention_after_repeated_calls():
    query, key, value = inputs(1, 2, 8, 4)
    for _ in range(2):
        regard.attention(query, key, value, score=scores.Dot())
        with pytest.raises(ConfigurationError, match="goes with the default score"):
            regard.attention(query, key, value, score=scores.Dot(), scale=2.0)
        with pytest.raises(ConfigurationError, match="score needs a score such as"):
            regard.attention(query, key, value, score=scores.Dot)  # type: ignore[arg-type]


def test_no_gradient_of_a_score_comes_from_behind_the_mask():
    score, tensors = scores.General(4, 4), inputs(1, 2, 9, 4)
    mask = masks.causal() & masks.padding([6])
    for _ in range(3):
        with torch.no_grad():
            tensors[1][:, :, 7] = torch.nan
        output = regard.attention(*tensors, mask=mask, score=score)
        (found,) = torch.autograd.grad(output[:, :, :6].sum(), score.weight)
        assert found.isfinite().all()


BY_DISTANCE: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "relative": (partial(biases.relative, max_distance=7), [torch.randn(3, 8)]),
    "one side": (partial(biases.relative, bidirectional=False), [torch.randn(3, 8)]),
    "clipped": (partial(biases.clipped, before=3, after=2), [torch.randn(3, 6)]),
    "kerple": (biases.kerple_log, [torch.rand(3) + 0.5, torch.rand(3) + 0.5]),
}


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.strided(3), masks.padding([5, 11])])
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_biases_by_distance_that_are_made_anew(name, mask):
    """Of each call its own numbers, for as many keys as it has."""
    make, drawn = BY_DISTANCE[name]
    tensors = inputs(2, 3, 11, 5)
    for factor in (1.0, 2.0, 0.5):
        bias = make(*(factor * each for each in drawn))
        expected = regard.attention(*(each.double() for each in tensors), mask=mask, bias=bias, kernel="reference")
        found = regard.attention(*tensors, mask=mask, bias=bias)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    query, key, value = inputs(2, 3, 11, 5)
    agrees([query[:, :, 7:], key, value], mask=mask, bias=make(*drawn), softcap=1.5, sinks=torch.randn(3))
    leaves = [each.clone().requires_grad_() for each in drawn]
    gradients_agree(tensors, leaves, lambda: {"mask": mask, "bias": make(*leaves)})
    calls = small_calls._calls if mask is None or not isinstance(mask, Padding) else memo_of(mask).calls
    assert [call is not None for call in calls.values()] == [True] * len(calls)
    assert calls


def test_biases_by_distance_that_do_not_fit_are_refused_as_elsewhere():
    tensors = inputs(2, 3, 11, 5)
    for _ in range(2):
        regard.attention(*tensors, bias=biases.clipped(torch.zeros(3, 4), before=2, after=1))
        with pytest.raises(ShapeError, match="does not broadcast to the weights"):
            regard.attention(*tensors, bias=biases.clipped(torch.zeros(2, 4), before=2, after=1))


def test_one_tensor_of_sinks_and_a_bias():
    """A gradient that is the sum of both, by the short way and where scores are too large for it."""
    shared = torch.tensor([0.5, 1.5], requires_grad=True)
    for factor in (1.0, 400.0):
        tensors = [factor * tensor for tensor in inputs(1, 2, 9, 4)]
        gradients_agree(
            tensors[:2] + inputs(1, 2, 9, 4)[:1], [shared], lambda: {"bias": biases.alibi(shared), "sinks": shared}
        )


@pytest.mark.parametrize("factor", [1.0, 400.0])
def test_gradients_of_a_table_by_distance(factor):
    """By the short way, and where scores are too large for it, from sums in float64."""
    table = torch.randn(2, 4, requires_grad=True)
    query, key, _ = (factor * tensor for tensor in inputs(1, 2, 9, 4))
    value = torch.randn(1, 2, 9, 4)
    gradients_agree([query, key, value], [table], lambda: {"bias": biases.clipped(table, before=2, after=1)})


@pytest.mark.parametrize(
    "make",
    [lambda rates: biases.kerple_log(rates, rates), lambda rates: biases.kerple_power(rates, rates.sigmoid())],
    ids=["kerple_log", "kerple_power"],
)
def test_second_derivatives_of_a_bias_by_distance(make):
    """Autograd goes on from the numbers of the diagonals to what they follow from, twice."""
    rates = (torch.rand(2, dtype=torch.float64) + 0.5).float().requires_grad_()
    query, key, value = inputs(1, 2, 7, 4)
    above = torch.randn(1, 2, 7, 4)
    for _ in range(3):
        found = []
        for kernel in (None, "reference"):
            output = regard.attention(query, key, value, bias=make(rates), kernel=kernel)
            (first,) = torch.autograd.grad(output, rates, above, create_graph=True)
            found.append((first, torch.autograd.grad(first.square().sum(), rates)[0]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert known()[-1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it loads forward mode
def test_spans_with_and_without_a_gradient_are_the_same():
    """Beyond the span there is no weight, without a gradient, with one, and in forward mode."""
    spans, distances = torch.tensor([0.5, 3.0]), torch.arange(-9, 10)
    leaf = spans.clone().requires_grad_()
    with_gradient = biases.adaptive_span(leaf, 2.5).values_at(distances)
    without = biases.adaptive_span(spans, 2.5).values_at(distances)
    assert torch.equal(with_gradient, without)
    assert torch.isneginf(without).any()
    within = ~torch.isneginf(without)
    (gradient,) = torch.autograd.grad(with_gradient[within].sum(), leaf)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(spans, torch.ones(2))
        tangent = torch.autograd.forward_ad.unpack_dual(biases.adaptive_span(dual, 2.5).values_at(distances)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent.sum(-1), gradient)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.where(keep=torch.arange(9)[:, None] > 3)])
def test_sinks_that_a_normalizer_stands_for(mask):
    """They are of the kind of call; sinks that are an argument have other numbers each time. Rows may be empty."""
    tensors, options = inputs(2, 2, 9, 4), {"mask": mask, "normalizer": normalizers.Softmax1()}
    agrees(tensors, **options)
    calls = known() or [call is not None for call in memo_of(mask).calls.values()]  # of a mask of tensors its own
    assert calls[-1]
    for number in (0.0, 1.5):
        agrees(tensors, mask=mask, sinks=torch.full((2,), number, dtype=torch.float64).float())
    gradients_agree(tensors, [], lambda: options)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    gradients_agree(inputs(2, 2, 9, 4), [sinks], lambda: {"mask": mask, "sinks": sinks})
    gradients_agree([30 * tensor.detach() for tensor in tensors[:2]] + inputs(2, 2, 9, 4)[:1], [], lambda: options)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(3), masks.strided(3)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("learned", [False, True])
def test_log_sum_exps_of_repeated_calls(mask, softcap, learned):
    tensors = [tensor.requires_grad_(learned) for tensor in inputs(2, 3, 11, 5, keys=13)]
    exact = [tensor.detach().double().requires_grad_(learned) for tensor in tensors]
    above = torch.randn(2, 3, 11, 5), torch.randn(2, 3, 11)
    for _ in range(3):
        found = regard.attention_with_lse(*tensors, mask=mask, softcap=softcap)
        rows = regard.attention_with_lse(*exact, mask=mask, softcap=softcap, kernel="reference")
        for has, needs in zip(found, rows, strict=True):
            torch.testing.assert_close(has.double(), needs, rtol=1e-5, atol=1e-5)
        for wanted in ((0,), (1,), (0, 1)) if learned else ():  # of the output, of the log-sum-exp, of both
            gradients = [
                torch.autograd.grad(
                    [each[at] for at in wanted],
                    leaves[: 3 if 0 in wanted else 2],
                    [above[at].to(each[at].dtype) for at in wanted],
                    retain_graph=True,
                )
                for each, leaves in ((found, tensors), (rows, exact))
            ]
            for has, needs in zip(*gradients, strict=True):
                torch.testing.assert_close(has.double(), needs, rtol=1e-4, atol=1e-5)
    assert known() == [True]


@pytest.mark.parametrize("learned", [False, True])
def test_log_sum_exps_behind_a_mask_and_of_empty_rows(learned):
    mask, tensors = masks.causal(), inputs(1, 2, 11, 5, keys=7)  # the first four queries have no keys
    for _ in range(3):
        output, lse = regard.attention_with_lse(*(each.requires_grad_(learned) for each in tensors), mask=mask)
        assert (output[:, :, :4] == 0).all()
        assert (lse[:, :, :4] == -torch.inf).all()
        assert lse[:, :, 4:].isfinite().all()
        if learned:
            loss = output.sum() + lse[:, :, 4:].sum()
            assert all(found.isfinite().all() for found in torch.autograd.grad(loss, tensors))
    poisoned = [each.detach().clone() for each in tensors]
    poisoned[1][:, :, 5], poisoned[2][:, :, 6, 0] = torch.nan, torch.inf
    for _ in range(2):
        given = [each.requires_grad_(learned) for each in poisoned]
        output, lse = regard.attention_with_lse(*given, mask=mask)
        torch.testing.assert_close(output[:, :, :9], regard.attention(*tensors, mask=mask)[:, :, :9])
        assert lse[:, :, :9].isnan().sum() == 0
        assert lse[:, :, 9:].isnan().all()
        assert not output[:, :, 10].isfinite().any()
        if learned:
            (found,) = torch.autograd.grad(output[:, :, :9].sum() + lse[:, :, 4:9].sum(), given[0])
            assert found[:, :, :9].isfinite().all()


def test_second_derivatives_of_log_sum_exps():
    tensors = [tensor.double().requires_grad_() for tensor in inputs(1, 2, 5, 3)]
    single = [tensor.detach().float().requires_grad_() for tensor in tensors]

    def second(leaves: list[Tensor], kernel: str | None) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"mask": masks.causal(), "kernel": kernel} if kernel else {"mask": masks.causal()}
        output, lse = regard.attention_with_lse(*leaves, **options)
        first = torch.autograd.grad(output.square().sum() + lse.sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.cat([each.flatten() for each in first]).square().sum(), leaves)

    for _ in range(2):
        for has, needs in zip(second(single, None), second(tensors, "reference"), strict=True):
            torch.testing.assert_close(has.double(), needs, rtol=1e-3, atol=1e-4)
    assert known() == [True]


def test_large_log_sum_exps_have_exact_gradients():
    tensors = [tensor.requires_grad_() for tensor in inputs(1, 2, 7, 4)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for _ in range(3):
        results = [
            torch.autograd.grad(regard.attention_with_lse(*each, scale=4e4, kernel=kernel)[0].sum(), each)
            if kernel
            else torch.autograd.grad(regard.attention_with_lse(*each, scale=4e4)[0].sum(), each)
            for each, kernel in ((tensors, None), (exact, "reference"))
        ]
        for has, needs in zip(*results, strict=True):
            torch.testing.assert_close(has.double(), needs, rtol=1e-3, atol=1e-3 * float(needs.abs().amax()) + 1e-6)


def test_a_hook_sees_the_same_log_sum_exp_bit_for_bit():
    tensors = inputs(1, 2, 9, 4)
    with torch.no_grad():
        plain = [regard.attention_with_lse(*tensors, mask=masks.causal()) for _ in range(2)]
        seen = []
        with attention_hook(lambda problem, lse: seen.append(lse)):
            hooked = regard.attention_with_lse(*tensors, mask=masks.causal())
    assert len(seen) == 1
    for has in (*plain, hooked):
        assert all(torch.equal(a, b) for a, b in zip(has, plain[0], strict=True))


def test_log_sum_exps_refuse_what_attention_refuses():
    tensors = inputs(1, 2, 9, 4)
    for _ in range(2):
        regard.attention_with_lse(*tensors)
        with pytest.raises(ConfigurationError, match="scale"):
            regard.attention_with_lse(*tensors, scale="a")  # type: ignore[arg-type]
        with pytest.raises(ShapeError):
            regard.attention_with_lse(tensors[0], tensors[1], tensors[2][:, :, :5])
        with pytest.raises(TypeError, match="causal"):
            regard.attention_with_lse(*tensors, causal=True)  # type: ignore[call-arg]
