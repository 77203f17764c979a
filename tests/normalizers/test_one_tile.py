"""Calls whose pairs are one tile, repeated: against formulas in float64, at both sides of what is one tile."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, native, normalizers, small_calls
from regard.core.normalizer import Normalizer
from regard.errors import MaskError, ShapeError
from regard.kernels import one_tile
from regard.kernels.one_tile import StoredTile
from regard.kernels.planning import choice

from .mixed_formulas import multi_token_weights, talking_weights
from .test_ordered_rows import by_hand

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 3, 13, 17, 8


class Kind(NamedTuple):
    """A normalizer: the shapes of its parameters, how it is made of them, and its formula."""

    shapes: Sequence[tuple[int, ...]]
    make: Callable[..., Normalizer]
    weights: Callable[..., Tensor]


def monotonic_weights(query: Tensor, key: Tensor, keep: Tensor, bias: Tensor, *, width: int = 0) -> Tensor:
    scores = (query @ key.mT / DIM**0.5).masked_fill(~keep, -torch.inf)
    normalizer = normalizers.MoChA(bias, width=width) if width else normalizers.Monotonic(bias)
    return by_hand(normalizer, scores, bias)


def mocha_weights(query: Tensor, key: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
    return monotonic_weights(query, key, keep, bias, width=3)


SQUARE = (HEADS, HEADS)
KINDS = {
    "talking": Kind([SQUARE, SQUARE], normalizers.TalkingHeads, talking_weights),
    "multi-token": Kind([(HEADS, 4, 5), (HEADS, 3, 3), SQUARE, SQUARE], normalizers.MultiToken, multi_token_weights),
    "monotonic": Kind([(HEADS,)], normalizers.Monotonic, monotonic_weights),
    "mocha": Kind([(HEADS,)], lambda bias: normalizers.MoChA(bias, width=3), mocha_weights),
}
every_kind = pytest.mark.parametrize("name", KINDS)


def drawn(keep: str) -> tuple[Tensor | masks.Mask | None, Tensor]:
    """A mask, and which pairs it keeps."""
    everywhere = torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool)
    if keep == "all":
        return None, everywhere
    if keep == "causal":
        return masks.causal(), masks.causal().dense(QUERIES, KEYS)[None, None]
    some = torch.rand(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.1
    some[:, :, 5], some[..., 7] = False, False  # a row without any pair, and a key that none attends to
    return masks.where(keep=some), some


def leaves_of(kind: Kind, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCH, HEADS, QUERIES, DIM), (BATCH, HEADS, KEYS, DIM), (BATCH, HEADS, KEYS, 5), *kind.shapes]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def prepared() -> list[StoredTile]:
    known = [*small_calls._calls.values()]
    return [call for call in known if type(call) is StoredTile]


@pytest.fixture(autouse=True)
def nothing_known():
    if native.why_not() is not None or native.variant_in_use() == "plain":
        pytest.skip("without native code, or vectors in it, kernels are compared, and none is known by its sizes")
    small_calls._calls.clear()


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Within the roundings of sums over pairs, heads, dims and places, each of numbers up to the largest."""
    roundings = 4 * (BATCH * QUERIES + KEYS + HEADS + DIM + 20)
    for has, needs in zip(found, expected, strict=True):
        most = roundings * torch.finfo(has.dtype).eps / 2 * max(float(needs.detach().abs().amax()), 1.0)
        torch.testing.assert_close(has.double(), needs, rtol=0.0, atol=most)


@every_kind
@pytest.mark.parametrize("keep", ["all", "causal", "drawn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_repeated_calls_are_the_formula_with_all_gradients(name, keep, dtype):
    kind, (mask, pairs) = KINDS[name], drawn(keep)
    for seed in range(3):  # other numbers, and a normalizer that is made anew
        leaves = leaves_of(kind, dtype, seed)
        exact = [each.detach().double().requires_grad_() for each in leaves]
        expected = kind.weights(*exact[:2], pairs, *exact[3:]) @ exact[2]
        above = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        found = regard.attention(*leaves[:3], mask=mask, normalizer=kind.make(*leaves[3:]))
        plain = [each.detach() for each in leaves]
        alone = regard.attention(*plain[:3], mask=mask, normalizer=kind.make(*plain[3:]))
        close((found, alone), (expected, expected))
        close(torch.autograd.grad(found, leaves, above.to(dtype)), torch.autograd.grad(expected, exact, above))
    if keep != "drawn":  # what is known of a mask of tensors is known with it
        assert len(prepared()) == 2  # with gradients, and without


@every_kind
@pytest.mark.parametrize("more", [0, 1], ids=["one tile", "more than one"])
def test_both_sides_of_what_is_one_tile(name, more, monkeypatch):
    monkeypatch.setattr(one_tile, "MOST_PAIRS", BATCH * HEADS * QUERIES * KEYS - more)
    kind, leaves = KINDS[name], leaves_of(KINDS[name], torch.float32)
    outputs = [
        regard.attention(*leaves[:3], mask=masks.causal(), normalizer=kind.make(*leaves[3:]), kernel=kernel)
        for kernel in (None, None, "reference")
    ]
    assert len(prepared()) == 1 - more
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = kind.weights(*exact[:2], drawn("causal")[1], *exact[3:]) @ exact[2]
    close(outputs, [expected] * 3)
    wanted = torch.autograd.grad(expected.sum(), exact)
    for output in outputs:
        close(torch.autograd.grad(output.sum(), leaves), wanted)


@every_kind
def test_pairs_that_are_too_many_to_be_kept_are_found_by_each_call(name, monkeypatch):
    monkeypatch.setattr(one_tile, "MAX_MEMO_PAIRS", QUERIES * KEYS - 1)
    kind = KINDS[name]
    for seed in range(3):
        leaves = leaves_of(kind, torch.float32, seed)
        exact = [each.detach().double().requires_grad_() for each in leaves]
        expected = kind.weights(*exact[:2], drawn("causal")[1], *exact[3:]) @ exact[2]
        found = regard.attention(*leaves[:3], mask=masks.causal(), normalizer=kind.make(*leaves[3:]))
        with torch.no_grad():
            alone = regard.attention(*leaves[:3], mask=masks.causal(), normalizer=kind.make(*leaves[3:]))
        close((found, alone), (expected, expected))
        close(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), exact))
    assert [call.mask for call in prepared()] == [None, None]
    assert not any(call.kept for call in prepared())


def test_the_kernel_is_known_up_to_a_number_of_pairs(monkeypatch):
    normalizer, tensors = normalizers.TalkingHeads.learned(HEADS), leaves_of(KINDS["talking"], torch.float32)[:3]
    for most, kernel in ((BATCH * HEADS * QUERIES * KEYS, "tiled"), (1, None)):
        monkeypatch.setattr(choice, "MAX_ONE_TILE", most)
        problem = small_calls.make_problem(*tensors, normalizer=normalizer)
        found = choice.uncompared_kernel(problem)
        assert (found and found.name) == kernel


@every_kind
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_masked_reaches_nothing(name, poison, place):
    kind, leaves = KINDS[name], leaves_of(KINDS[name], torch.float32)
    keep = drawn("drawn")[1].clone()
    keep[:, :, :, 7], keep[:, :, 5] = False, False
    mask = masks.where(keep=keep)
    poisoned = [each.detach().clone() for each in leaves]
    poisoned[place][:, :, 5 if place == 0 else 7] = poison
    for given in (poisoned, [each.requires_grad_() for each in poisoned]):
        for _ in range(2):
            output = regard.attention(*given[:3], mask=mask, normalizer=kind.make(*given[3:]))
            clean = regard.attention(*leaves[:3], mask=mask, normalizer=kind.make(*leaves[3:]))
            close([output], [clean.double()])
    found, expected = (torch.autograd.grad(each.sum(), given) for each, given in ((output, poisoned), (clean, leaves)))
    close(found, [each.double() for each in expected])


@every_kind
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_attended_to_and_no_number_shows(name, place):
    kind, leaves = KINDS[name], leaves_of(KINDS[name], torch.float32)
    leaves[place].data[0, 1, 3] = torch.nan
    for given in (leaves, [each.detach() for each in leaves]):
        for _ in range(2):
            output = regard.attention(*given[:3], mask=masks.causal(), normalizer=kind.make(*given[3:]))
            wanted = regard.attention(
                *given[:3], mask=masks.causal(), normalizer=kind.make(*given[3:]), kernel="reference"
            )
            assert torch.equal(output.isnan(), wanted.isnan())
            assert bool(output.isnan().any())


@every_kind
def test_second_derivatives(name):
    kind, leaves = KINDS[name], [each.detach()[:1] for each in leaves_of(KINDS[name], torch.float64)[:3]]
    leaves += [each.detach() for each in leaves_of(kind, torch.float64)[3:]]
    leaves = [each.requires_grad_() for each in leaves]
    seconds = []
    for kernel in (None, "reference"):
        output = regard.attention(*leaves[:3], mask=masks.causal(), normalizer=kind.make(*leaves[3:]), kernel=kernel)
        firsts = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(torch.stack([each.square().sum() for each in firsts]).sum(), leaves))
    for own, other in zip(*seconds, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)
    assert prepared()


def test_scores_that_are_far_apart_share_no_unit():
    kind, leaves = KINDS["mocha"], leaves_of(KINDS["mocha"], torch.float32)
    leaves[0].data.mul_(60.0)  # their exponentials would leave float32
    exact = [each.detach().double().requires_grad_() for each in leaves]
    expected = kind.weights(*exact[:2], drawn("all")[1], *exact[3:]) @ exact[2]
    for _ in range(2):
        found = regard.attention(*leaves[:3], normalizer=kind.make(*leaves[3:]))
        # A score of some hundreds is off by as many roundings of 1, and so is what follows from it.
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=1e-3)
        gradients = torch.autograd.grad(found.sum(), leaves)
        assert all(bool(each.isfinite().all()) for each in gradients)


def test_what_is_written_to_before_the_gradient_is_an_error():
    kind, leaves = KINDS["talking"], leaves_of(KINDS["talking"], torch.float32)
    for _ in range(2):
        output = regard.attention(*leaves[:3], normalizer=kind.make(*leaves[3:]))
    leaves[3].data.zero_()
    with torch.no_grad():
        leaves[3].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_refusals_are_those_of_attention():
    kind, leaves = KINDS["talking"], leaves_of(KINDS["talking"], torch.float32)
    for _ in range(2):
        regard.attention(*leaves[:3], normalizer=kind.make(*leaves[3:]))
    with pytest.raises(ShapeError, match=r"before is \(5, 5\)"):
        regard.attention(*leaves[:3], normalizer=kind.make(torch.eye(5), torch.eye(3)))
    with pytest.raises(MaskError):
        regard.attention(*leaves[:3], mask=masks.where(keep=torch.ones(4, 4, dtype=torch.bool)), normalizer=kind.make())
