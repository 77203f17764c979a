"""Calls of additive scores whose pairs are one tile, repeated: against the formula in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, native, scores, small_calls
from regard.kernels import additive
from regard.kernels.additive import AdditiveTile
from regard.kernels.hooks import attention_hook
from regard.kernels.planning.rates import ZEN_4
from regard.masks import Mask

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM, HIDDEN = 2, 6, 3, 13, 19, 5, 7
SCORES: dict[str, Callable[[], scores.Score]] = {
    "additive": lambda: scores.Additive(DIM, DIM, HIDDEN),
    "concat": lambda: scores.Concat(DIM, DIM, HIDDEN),
}
every_score = pytest.mark.parametrize("name", SCORES)


pytestmark = pytest.mark.skipif(not native.available(), reason="without native code no call is small")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, priced_as):
    """Nor is what is chosen left to the machine."""
    priced_as(ZEN_4, "avx512")
    monkeypatch.setattr(small_calls, "_calls", {})


def prepared() -> list[AdditiveTile]:
    return [call for call in small_calls._calls.values() if isinstance(call, AdditiveTile)]


def drawn() -> Tensor:
    """Pairs of each head, with a row that has none, and a key that none attends to."""
    keep = torch.rand(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.3
    keep[:, :, 5], keep[..., 7] = False, False
    return keep


MASKS: dict[str, Callable[[], Mask | None]] = {
    "all": lambda: None,
    "causal": masks.causal,
    "padding": lambda: masks.padding([11, 0]),
    "drawn": lambda: masks.where(keep=drawn()),
}


def leaves(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (BATCH, HEADS, QUERIES, DIM), (BATCH, KEY_HEADS, KEYS, DIM), (BATCH, KEY_HEADS, KEYS, 4)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def close(found: Tensor, expected: Tensor, eps: float = 2.0**-24) -> None:
    """Within the roundings of sums over pairs, features and dims, each of numbers up to the largest."""
    most = 4 * (BATCH * QUERIES * 2 + KEYS + HIDDEN + DIM + 20) * eps * max(float(expected.detach().abs().amax()), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=most)


@every_score
@pytest.mark.parametrize("keep", MASKS)
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_repeated_calls_are_the_formula_with_all_gradients(name, keep, softcap):
    score, mask = SCORES[name](), MASKS[keep]()
    exact_score = SCORES[name]().double()
    exact_score.load_state_dict(score.state_dict())
    for seed in range(3):
        tensors = leaves(seed)
        exact = [each.detach().double().requires_grad_() for each in tensors]
        options = {"mask": mask, "softcap": softcap}
        expected = regard.attention(*exact, score=exact_score, kernel="reference", **options)
        found = regard.attention(*tensors, score=score, **options)
        with torch.no_grad():
            close(regard.attention(*tensors, score=score, **options), expected)
        close(found, expected)
        above = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
        gradients = torch.autograd.grad(found, [*tensors, *score.parameters()], above)
        wanted = torch.autograd.grad(expected, [*exact, *exact_score.parameters()], above.double())
        for has, needs in zip(gradients, wanted, strict=True):
            close(has, needs)
    if keep in ("all", "causal"):  # what is known of a mask of tensors is known with it
        assert len(prepared()) == 2  # with gradients, and without


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_once(dtype):
    score = SCORES["additive"]().to(dtype)
    for seed in range(2):
        tensors = leaves(seed, dtype)
        found = regard.attention(*tensors, score=score, mask=masks.causal())
        pairs = score.pairs(*tensors[:2])
        weights = pairs.scores().double().masked_fill(~masks.causal().dense(QUERIES, KEYS), -torch.inf).softmax(-1)
        expected = weights @ tensors[2].double().repeat_interleave(HEADS // KEY_HEADS, 1)
        torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
        gradients = torch.autograd.grad(found.sum(), [*tensors, *score.parameters()])
        assert all(each.dtype == dtype and each.isfinite().all() for each in gradients)
    assert len(prepared()) == 1


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("learned", [False, True])
def test_what_is_not_finite_stays_behind_the_mask(place, number, learned):
    score, tensors, mask = SCORES["additive"](), leaves(0), masks.causal() & masks.padding([KEYS - 4, KEYS])
    clean = regard.attention(*tensors, score=score, mask=mask)
    poisoned = [each.detach().clone() for each in tensors]
    at = ("query", "key", "value").index(place)
    poisoned[at][0, :, -2] = number  # behind the padding; of a query: its own row
    for _ in range(2):
        given = [each.requires_grad_(learned) for each in poisoned]
        with torch.set_grad_enabled(learned):
            output = regard.attention(*given, score=score, mask=mask)
        rows = slice(0, -2) if place == "query" else slice(None)
        torch.testing.assert_close(output[:, :, rows], clean[:, :, rows])
        if place == "query":
            assert output[0, :, -2].isnan().all()
        if learned:
            (weight,) = torch.autograd.grad(output[:, :, rows].sum(), list(score.parameters())[-1:])
            assert weight.isfinite().all()


def test_second_derivatives_are_those_of_all_kernels():
    score, tensors = SCORES["additive"](), leaves(0)
    exact_score = SCORES["additive"]().double()
    exact_score.load_state_dict(score.state_dict())
    exact = [each.detach().double().requires_grad_() for each in tensors]

    def second(inputs: list[Tensor], module: scores.Score, kernel: str | None) -> tuple[Tensor, ...]:
        output = regard.attention(*inputs, score=module, mask=masks.causal(), kernel=kernel)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(
            torch.cat([each.flatten() for each in first]).square().sum(), [*inputs, *module.parameters()]
        )

    for _ in range(2):
        found, expected = second(tensors, score, None), second(exact, exact_score, "reference")
        for has, needs in zip(found, expected, strict=True):
            torch.testing.assert_close(has.double(), needs, rtol=1e-3, atol=1e-4 * float(needs.abs().amax()))


def test_both_sides_of_what_is_one_tile(monkeypatch):
    score, tensors = SCORES["additive"](), leaves(0)
    results = []
    for most in (BATCH * HEADS * QUERIES * KEYS, BATCH * HEADS * QUERIES * KEYS - 1):
        monkeypatch.setattr(additive, "MOST_PAIRS", most)
        small_calls._calls.clear()
        results += [regard.attention(*tensors, score=score, mask=masks.causal()) for _ in range(2)]
        assert len(prepared()) == (most == BATCH * HEADS * QUERIES * KEYS)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-6)


def test_scores_whose_weight_or_projections_differ_are_not_those_that_were_prepared():
    tensors = leaves(0)
    for hidden in (HIDDEN, 3, HIDDEN, 40):
        score = scores.Additive(DIM, DIM, hidden)
        for _ in range(2):
            found = regard.attention(*tensors, score=score)
            torch.testing.assert_close(found, regard.attention(*tensors, score=score, kernel="reference"))


def test_a_hook_sees_the_same_output():
    score, tensors, seen = SCORES["additive"](), leaves(0), []
    with torch.no_grad():
        plain = [regard.attention(*tensors, score=score, mask=masks.causal()) for _ in range(2)]
        with attention_hook(lambda problem, lse: seen.append(lse)):
            hooked = regard.attention(*tensors, score=score, mask=masks.causal())
    assert len(seen) == 1
    assert torch.equal(plain[0], plain[1])
    assert torch.equal(plain[0], hooked)


def test_a_mask_that_is_changed_before_the_gradient_is_an_error():
    keep, score, tensors = drawn(), SCORES["additive"](), leaves(0)
    mask = masks.where(keep=keep)
    outputs = [regard.attention(*tensors, score=score, mask=mask) for _ in range(2)]
    keep.logical_not_()
    first = torch.autograd.grad(outputs[1].sum(), tensors, create_graph=False)
    assert all(each.isfinite().all() for each in first)  # of the pairs of the forward pass
