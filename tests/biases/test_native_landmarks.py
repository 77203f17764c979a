"""Landmark attention in C against its two softmaxes in float64, and which calls are computed there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, native, selection
from regard.biases.landmarks import BlockWeights
from regard.errors import KernelError
from regard.kernels.flash import FlashKernel
from regard.kernels.validation import make_problem
from regard.testing.tolerance import Expected, fault

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="no native code")

HEADS, KEY_HEADS, DIM = 4, 2, 8
CAUSAL = masks.causal()
IN_C = "cpu_flash", "short"


def drawn(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value as numbers of a dtype, in float64."""
    generator = torch.Generator().manual_seed(queries * keys)
    sizes = (HEADS, queries, DIM), (KEY_HEADS, keys, DIM), (KEY_HEADS, keys, DIM + 1)
    return [torch.randn(2, *size, generator=generator).to(dtype).double() for size in sizes]


def formula(tensors: Sequence[Tensor], keep: Tensor, size: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, by logarithms; keep (..., M, N). Queries are at the last keys, which begin at `first`."""
    query, key, value = tensors
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
    has = torch.arange(first, first + key.shape[-2])
    own, landmark = has[-query.shape[-2] :, None] // size == has // size, has % size == size - 1
    scores = (query @ key.mT / DIM**0.5).masked_fill(~keep, -torch.inf)
    logs = scores.masked_fill(~own | landmark, -torch.inf)
    for start in range(0, len(has), size):
        block = slice(start, start + size - 1)
        if start + size > len(has):
            break
        inside, gate = scores[..., block], scores[..., start + size - 1 : start + size]
        seen = (inside > -torch.inf).any(-1, keepdim=True) & (gate > -torch.inf) & ~own[:, start : start + 1]
        inside = inside.masked_fill(~seen, 0.0)
        whole = inside - inside.logsumexp(-1, keepdim=True) + gate.masked_fill(~seen, 0.0)
        logs = logs.clone()
        logs[..., block] = torch.where(seen, whole, logs[..., block])
    some = (logs > -torch.inf).any(-1)
    lse = logs.masked_fill(~some[..., None], 0.0).logsumexp(-1)
    weights = (logs - lse[..., None]).exp()
    return weights @ value, lse.masked_fill(~some, -torch.inf)


def results(output: Tensor, leaves: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def check(tensors: Sequence[Tensor], keep: Tensor, size: int, mask: Any, *, first: int = 0, **options: Any) -> None:
    """Output and gradients are as near to the formula in float64 as that in float32, of inputs rounded anew."""
    upstream = torch.randn(tensors[0].shape[:-1] + tensors[2].shape[-1:]).double()

    def by_formula(tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = [each.requires_grad_() for each in tensors]
        return results(formula(leaves, keep, size, first)[0], leaves, upstream)

    half = torch.finfo(torch.float32).eps / 2
    rounded = [[(each * (1 + half * torch.randn_like(each))).float() for each in tensors] for _ in range(3)]
    truth = by_formula([each.clone() for each in tensors])
    near = [by_formula(each) for each in ([each.float() for each in tensors], *rounded)]
    for kernel in IN_C:
        ours = [each.float().requires_grad_() for each in tensors]
        output = regard.attention(*ours, mask=mask, bias=biases.landmarks(size), kernel=kernel, **options)
        names = "output", "query", "key", "value"
        for name, mine, true, *others in zip(names, results(output, ours, upstream), truth, *near, strict=True):
            assert (text := fault(mine, Expected(true, torch.float32, others))) is None, f"{kernel}, {name}: {text}"


@pytest.mark.parametrize("size", [2, 3, 5, 7, 8, 9, 16, 31, 32, 33, 50, 63, 64, 65, 67, 100, 128, 129])
@pytest.mark.parametrize(("queries", "keys"), [(37, 53), (67, 131), (131, 131), (1, 67), (89, 331)])
def test_blocks_of_any_size(size, queries, keys):
    keep = torch.ones(queries, keys).tril(keys - queries).bool()
    check(drawn(queries, keys), keep, size, CAUSAL)


@pytest.mark.parametrize(("size", "keys"), [(3, 131), (7, 131), (16, 131), (64, 131), (67, 331), (100, 331)])
def test_any_mask_of_pairs_with_empty_rows_and_hidden_landmarks(size, keys):
    keep = torch.rand(2, HEADS, 67, keys) > 0.4
    keep[..., 3, :], keep[..., size - 1], keep[..., 2 * size : 3 * size - 1] = False, False, False
    check(drawn(67, keys), keep, size, masks.where(keep=keep))


MASKS = {
    "no mask": (None, lambda i, j: j >= 0),
    "window": (CAUSAL & masks.window(before=21), lambda i, j: (j <= i) & (j >= i - 21)),
    "padding": (
        CAUSAL & masks.padding([131, 90]),
        lambda i, j: (j <= i) & (j < torch.tensor([131, 90])[:, None, None, None]),
    ),
    "documents": (
        CAUSAL & masks.documents([0] * 40 + [1] * 91),
        lambda i, j: (j <= i) & ((i < 40) == (j < 40)),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [7, 16, 70])
def test_masks_by_formula(name, size):
    mask, keeps = MASKS[name]
    at = torch.arange(131)
    keep = keeps(at[:, None], at).expand(2 if name == "padding" else 1, 1, 131, 131)
    check(drawn(131, 131), keep, size, mask)


def test_blocks_that_are_retrieved():
    tensors = drawn(131, 131)
    found = selection.landmark_blocks(tensors[0].float(), tensors[1].float(), size=16, count=3)
    mask = CAUSAL & masks.blocks(found, (1, 16))
    chosen = (found[..., None] == torch.arange(9)).any(-2)
    keep = chosen.repeat_interleave(16, -1)[..., :131] & torch.ones(131, 131).tril().bool()
    check(tensors, keep, 16, mask)


@pytest.mark.parametrize("first", [0, 15, 1005])
def test_keys_from_the_start_of_any_block(first):
    at = range(first, first + 67)
    keep = torch.ones(23, 67).tril(44).bool()
    check(drawn(23, 67), keep, 5, CAUSAL, first=first, query_positions=at[-23:], key_positions=at)


def test_keys_that_begin_within_a_block_are_not_for_c():
    tensors = [each.float() for each in drawn(307, 307)]
    options: dict[str, Any] = {"mask": CAUSAL, "bias": biases.landmarks(5)}
    for at in (range(10, 317), range(11, 318), range(10, 317)):  # of one signature but for where blocks begin
        places = {"query_positions": at, "key_positions": at}
        expected = regard.attention(*tensors, **places, **options, kernel="reference")
        torch.testing.assert_close(regard.attention(*tensors, **places, **options), expected)
        problem = make_problem(*tensors, **places, **options)
        assert (not FlashKernel().why_not(problem)) == (at.start % 5 == 0)


def test_what_c_does_not_compute_is_named():
    tensors = [each.float() for each in drawn(67, 67)]
    places = range(11, 78)
    with pytest.raises(KernelError, match="and landmarks, of consecutive positions"):
        regard.attention(
            *tensors,
            mask=CAUSAL,
            bias=biases.landmarks(5),
            kernel="cpu_flash",
            query_positions=places,
            key_positions=places,
        )


@pytest.mark.parametrize(("size", "length"), [(7, 131), (67, 331)])
def test_scores_far_apart_from_block_to_block(size, length):
    """A block whose scores are far below those beside it in the tile may have most of the weight: by its landmark."""
    tensors = drawn(length, length)
    tensors[1].zero_()
    tensors[0].zero_()
    tensors[0][..., 0] = 1.0
    tensors[1][..., 0] = DIM**0.5 * torch.randn(length)
    low, gates = torch.arange(length) // size % 3 == 1, torch.arange(length) % size == size - 1
    tensors[1][..., low & ~gates, 0] -= DIM**0.5 * 150.0
    tensors[1][..., low & gates, 0] += DIM**0.5 * 30.0
    keep = torch.ones(length, length).tril().bool()
    check(tensors, keep, size, CAUSAL)


def test_scores_that_rise_from_tile_to_tile_of_a_block():
    """What was summed up of the first tiles vanishes beside the last ones, and the other way round."""
    tensors = drawn(67, 331)
    tensors[0].zero_()
    tensors[0][..., 0] = torch.linspace(-1, 1, 67)
    tensors[1][..., 0] = 40 * torch.linspace(-1, 1, 331)
    check(tensors, torch.ones(67, 331).tril(264).bool(), 150, CAUSAL)


@pytest.mark.parametrize("kernel", IN_C)
def test_nan_behind_a_mask_reaches_nothing(kernel):
    tensors = drawn(67, 131)
    keep = torch.ones(67, 131).tril(64).bool()
    keep[:, 70:78] = False
    ours = [each.float() for each in tensors]
    for number, bad in ((1, torch.nan), (1, torch.inf), (2, torch.nan), (2, -torch.inf)):
        ours[number] = ours[number].clone()
        ours[number][..., 70:78, :] = bad
    leaves = [each.requires_grad_() for each in ours]
    output = regard.attention(*leaves, mask=masks.where(keep=keep), bias=biases.landmarks(8), kernel=kernel)
    exact = [each.requires_grad_() for each in tensors]
    true = formula(exact, keep, 8)[0]
    upstream = torch.randn_like(true)
    for mine, other in zip(results(output, leaves, upstream), results(true, exact, upstream), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 32, 70])
@pytest.mark.parametrize("kernel", IN_C)
def test_sixteen_bits(kernel, dtype, size):
    tensors = drawn(67, 131, dtype)
    keep = torch.ones(67, 131).tril(64).bool()
    exact, ours = [each.requires_grad_() for each in tensors], [each.to(dtype).requires_grad_() for each in tensors]
    true = formula(exact, keep, size)[0]
    output = regard.attention(*ours, mask=CAUSAL, bias=biases.landmarks(size), kernel=kernel)
    upstream = torch.randn_like(true).to(dtype).double()
    for mine, other in zip(results(output, ours, upstream), results(true, exact, upstream), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("size", [7, 64, 70])
def test_dropped_weights_sinks_and_two_threads(size):
    tensors, sinks = [each.float() for each in drawn(131, 131)], torch.randn(HEADS)

    def attend(kernel: str, batch: slice, dropout: float) -> list[Tensor]:
        own = [each[batch].clone().requires_grad_() for each in (*tensors,)] + [sinks.clone().requires_grad_()]
        torch.manual_seed(5)  # of the weights that are dropped
        options = {"mask": CAUSAL, "bias": biases.landmarks(size), "sinks": own[3], "dropout_p": dropout}
        output = regard.attention(*own[:3], **options, kernel=kernel)
        return results(output, own, torch.linspace(-1, 1, output.numel()).view(output.shape))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for batch, dropout in ((slice(0, 2), 0.3), (slice(0, 1), 0.0)):
            for mine, other in zip(attend("cpu_flash", batch, dropout), attend("tiled", batch, dropout), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [7, 150])
def test_one_head_in_parts_of_the_keys(size):
    """Two threads share the keys of one head, in whole tiles of whole blocks, or of wider ones."""
    tensors = [each[:1, :1].contiguous().float() for each in drawn(1031, 1031)]

    def attend(kernel: str) -> list[Tensor]:
        own = [each.clone().requires_grad_() for each in tensors]
        output = regard.attention(*own, mask=CAUSAL, bias=biases.landmarks(size), kernel=kernel)
        return results(output, own, torch.linspace(-1, 1, output.numel()).view(output.shape))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for mine, other in zip(attend("cpu_flash"), attend("tiled"), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", IN_C)
def test_log_sum_exps_and_lenses_are_those_of_the_formula(kernel):
    tensors = drawn(67, 131)
    keep = torch.ones(67, 131).tril(64).bool()
    _, lse = formula(tensors, keep, 8)
    ours = [each.float() for each in tensors]
    options: Any = {"mask": CAUSAL, "bias": biases.landmarks(8)}
    found = regard.attention_with_lse(*ours, **options, kernel=kernel)[1]
    assert (text := fault(found, Expected(lse, torch.float32, [formula(ours, keep, 8)[1]]))) is None, text
    asked: list[Any] = [lenses.Entropy(), lenses.Weights(rows=slice(60, 67))]
    seen, other = (
        regard.observe(ours[0], ours[1], ours[2], *asked, **options, kernel=each) for each in (kernel, "reference")
    )
    for lens in asked:
        torch.testing.assert_close(seen[lens], other[lens], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [16, 67, 1031])
@pytest.mark.parametrize("learned", [False, True])
def test_it_is_chosen_at_any_length(length, learned):
    tensors = [torch.randn(1, 2, length, 16, requires_grad=learned) for _ in range(3)]
    plan = regard.explain(*tensors, mask=CAUSAL, bias=biases.landmarks(16))
    assert plan.kernel.name == ("short" if length <= 256 else "cpu_flash")


def test_a_compiled_call_takes_it_too(monkeypatch):
    tensors = [torch.randn(1, 2, 531, 16, requires_grad=True) for _ in range(3)]
    ran = []
    forward = FlashKernel.forward
    monkeypatch.setattr(FlashKernel, "forward", lambda self, batched: (ran.append(1), forward(self, batched))[1])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = CAUSAL & masks.padding(torch.tensor([490]))
        return regard.attention(query, key, value, mask=mask, bias=biases.landmarks(16))

    expected = attend(*tensors)
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors)
    assert len(ran) == 2
    torch.testing.assert_close(compiled, expected)
    for mine, other in zip(
        *(torch.autograd.grad(each.square().sum(), tensors) for each in (compiled, expected)), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_a_mask_that_is_replaced_once_the_bias_is_bound_is_another_kernel():
    """As in a what-if: shares stay those of the call's own mask."""
    tensors = [each.float() for each in drawn(67, 67)]
    problem = make_problem(*tensors, mask=CAUSAL, bias=biases.landmarks(5))
    assert not FlashKernel().why_not(problem)
    assert FlashKernel().why_not(replace(problem, mask=CAUSAL & masks.window(before=9)))


def test_short_sequences_evaluate_no_bias_where_gradients_are_needed(monkeypatch):
    monkeypatch.setattr(BlockWeights, "values", lambda *_: pytest.fail("the bias was evaluated over pairs"))
    tensors = [torch.randn(1, 2, 67, 16, requires_grad=True) for _ in range(3)]
    output = regard.attention(*tensors, mask=CAUSAL, bias=biases.landmarks(7), kernel="short")
    assert all(each.isfinite().all() for each in torch.autograd.grad(output.square().sum(), tensors))
