"""Talking heads in C against their formula in float64: sizes, masks, biases, dropout, grouped heads and threads."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, native, normalizers
from regard.core.grid import Grid
from regard.errors import KernelError
from regard.kernels import choose
from regard.kernels.planning.rates import ZEN_4
from regard.kernels.validation import make_problem

from .mixed_formulas import output_of, talking_weights

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")
EPS = 2.0**-23
# Heads, key heads, queries, keys, dim, value dim: whole blocks and groups of heads, and neither.
SIZES = [
    (8, 8, 128, 192, 64, 64),
    (4, 2, 37, 53, 8, 5),
    (5, 5, 67, 131, 33, 40),
    (12, 4, 131, 67, 16, 48),
    (1, 1, 3, 1, 4, 4),
]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def inputs(heads: int, key_heads: int, queries: int, keys: int, dim: int, value_dim: int) -> list[Tensor]:
    tensors = drawn(2, heads, queries, dim), drawn(2, key_heads, keys, dim), drawn(2, key_heads, keys, value_dim)
    return [*tensors, drawn(heads, heads), drawn(heads, heads)]


def formula(leaves: list[Tensor], keep: Tensor, dtype: torch.dtype, added: Tensor | float = 0.0) -> list[Tensor]:
    """Output and gradients by the formula in a dtype."""
    own = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    query, key, value, before, after = own
    weights = talking_weights(query, key, keep, before, after, added=added)
    output = output_of(weights, value)
    return [output, *torch.autograd.grad(output, own, above(output))]


def above(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(output.shape, generator=generator).to(output.dtype)


def found(leaves: list[Tensor], **options) -> list[Tensor]:
    normalizer = normalizers.TalkingHeads(*leaves[3:])
    output = regard.attention(leaves[0], leaves[1], leaves[2], normalizer=normalizer, kernel="mixed_heads", **options)
    return [output, *torch.autograd.grad(output, leaves, above(output))]


def close(has: list[Tensor], leaves: list[Tensor], keep: Tensor, added: Tensor | float = 0.0) -> None:
    """As near to float64 as the formula in float32 is, four times over, or as a sum over all keys or queries."""
    roundings = EPS * max(keep.shape[-2:]) ** 0.5
    truths, others = (formula(leaves, keep, dtype, added) for dtype in (torch.float64, torch.float32))
    for ours, other, truth in zip(has, others, truths, strict=True):
        budget = 4 * (other - truth).abs().max() + roundings * truth.abs().max()
        assert (ours - truth).abs().max() <= budget


def of_mask(name: str, queries: int, keys: int) -> tuple[object, Tensor]:
    if name == "drawn":  # of each batch, with an empty row
        keep = torch.rand(2, 1, queries, keys) > 0.4
        keep[..., min(3, queries - 1), :] = False
        return keep, keep
    mask = {"all": None, "causal": masks.causal(), "window": masks.window(before=9, after=4)}[name]
    everything = torch.ones(queries, keys, dtype=torch.bool)
    return mask, everything if mask is None else mask.dense(queries, keys)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", ["all", "causal", "window", "drawn"])
def test_it_is_the_formula(sizes, name, two_threads):
    leaves = inputs(*sizes)
    mask, keep = of_mask(name, sizes[2], sizes[3])
    close(found(leaves, mask=mask), leaves, keep)


def test_masks_that_differ_between_heads():
    leaves, keep = inputs(4, 4, 67, 131, 8, 8), torch.rand(4, 67, 131) > 0.2
    close(found(leaves, mask=keep), leaves, keep)


@pytest.mark.parametrize("left_out", ["before", "after"])
def test_one_matrix_alone(left_out):
    leaves = inputs(5, 5, 67, 70, 8, 8)
    at = 3 if left_out == "before" else 4
    rest = [leaf for index, leaf in enumerate(leaves) if index != at]
    normalizer = normalizers.TalkingHeads(**{{3: "after", 4: "before"}[at]: rest[3]})
    output = regard.attention(*rest[:3], normalizer=normalizer, kernel="mixed_heads")
    has = torch.autograd.grad(output, rest, above(output))
    with torch.no_grad():
        leaves[at].copy_(torch.eye(5))
    truth = formula(leaves, torch.ones(67, 70, dtype=torch.bool), torch.float64)
    for ours, expected in zip((output, *has), [each for i, each in enumerate(truth) if i != at + 1], strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=64 * EPS * expected.abs().max().item())


def test_more_than_is_kept_between_the_passes():
    """The scores of 64 rows of 16 heads take more memory than is kept: they are computed again."""
    leaves = inputs(16, 16, 5, 8300, 4, 4)
    close(found(leaves), leaves, torch.ones(5, 8300, dtype=torch.bool))


def test_a_bias_by_distance_has_its_gradient():
    leaves, table = inputs(4, 2, 67, 131, 16, 16), drawn(4, 16)
    bias = biases.relative(table, max_distance=40)
    normalizer = normalizers.TalkingHeads(*leaves[3:])
    output = regard.attention(*leaves[:3], mask=masks.causal(), bias=bias, normalizer=normalizer, kernel="mixed_heads")
    (ours,) = torch.autograd.grad(output, table, above(output), retain_graph=True)
    wide = table.detach().double().requires_grad_()
    added = biases.relative(wide, max_distance=40).evaluate(Grid.from_lengths(67, 131))
    query, key, value, *parts = (leaf.detach().double() for leaf in leaves)
    keep = masks.causal().dense(67, 131)
    expected = output_of(talking_weights(query, key, keep, *parts, added=added), value)
    (truth,) = torch.autograd.grad(expected, wide, above(output).double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=64 * EPS * truth.abs().max().item())


def test_biases_of_content_are_left_to_torch():
    leaves = inputs(4, 2, 37, 53, 16, 16)
    gates = torch.nn.functional.logsigmoid(drawn(2, 4, 53))
    options: dict = {"mask": masks.causal(), "normalizer": normalizers.TalkingHeads(*leaves[3:])}
    bias = biases.forget_gates(gates)
    with pytest.raises(KernelError, match="of all biases its code adds those by distance alone"):
        regard.attention(*leaves[:3], bias=bias, kernel="mixed_heads", **options)
    sums = gates.double().cumsum(-1)
    added = sums[..., -37:, None] - sums[..., None, :]
    query, key, value, *parts = (leaf.detach().double() for leaf in leaves)
    truth = output_of(talking_weights(query, key, masks.causal().dense(37, 53), *parts, added=added), value)
    found = regard.attention(*leaves[:3], bias=bias, **options)
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-5)


def test_dropout_drops_the_weights_that_the_formula_drops():
    leaves, results = inputs(5, 5, 67, 131, 8, 8), []
    for kernel in ("mixed_heads", "reference"):
        torch.manual_seed(3)
        output = regard.attention(
            *leaves[:3], dropout_p=0.3, normalizer=normalizers.TalkingHeads(*leaves[3:]), kernel=kernel
        )
        results.append((output, *torch.autograd.grad(output, leaves, above(output))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=64 * EPS * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_computed_in_float32(dtype):
    leaves = [leaf.detach().to(dtype) for leaf in inputs(4, 2, 67, 131, 16, 16)]
    ours = regard.attention(*leaves[:3], normalizer=normalizers.TalkingHeads(*leaves[3:]), kernel="mixed_heads")
    truth = formula(leaves, torch.ones(67, 131, dtype=torch.bool), torch.float64)[0]
    assert ours.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    assert (ours.double() - truth).abs().max() <= unit * truth.abs().max() + 64 * EPS * truth.abs().max()


def test_large_scores_have_weights_that_sum_to_one():
    """Scores near 2^18, which differ by about 1: float32 rounds a log-sum-exp by more than weights may be off."""
    leaves = inputs(4, 4, 19, 23, 8, 8)
    with torch.no_grad():
        leaves[0].sign_().mul_(2.0**8)
        leaves[1].mul_(2.0**-8).round_(decimals=3).add_(leaves[0][:, :, :1].sign() * 2.0**8)
        leaves[3].copy_(torch.eye(4))
    close(found(leaves), leaves, torch.ones(19, 23, dtype=torch.bool))


def test_a_weight_of_one_has_no_gradient():
    """Scores so far apart that each row has one weight, which is 1 to the last bit."""
    leaves = inputs(4, 4, 19, 23, 8, 8)
    with torch.no_grad():
        leaves[0].mul_(2.0**10)
        leaves[1].mul_(2.0**10)
        leaves[3].copy_(torch.eye(4))
    close(found(leaves), leaves, torch.ones(19, 23, dtype=torch.bool))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_masked_reaches_nothing(poison):
    leaves = inputs(4, 2, 67, 131, 8, 8)
    keep = torch.rand(67, 131) > 0.4
    keep[:, 7] = False
    with torch.no_grad():
        leaves[1][:, 0, 7], leaves[2][:, 0, 7] = poison, poison
    has = found(leaves, mask=keep)
    assert all(each.isfinite().all() for each in has)
    with torch.no_grad():
        leaves[1][:, 0, 7], leaves[2][:, 0, 7] = 0.0, 0.0
    close(has, leaves, keep)


def test_it_is_chosen_for_long_sequences_and_says_what_it_cannot(priced_as):
    priced_as(ZEN_4, "avx512")
    query = torch.zeros(1, 4, 2048, 32)
    problem = make_problem(query, query, query, normalizer=normalizers.TalkingHeads.learned(4))
    assert choose(problem).name == "mixed_heads"
    capped = make_problem(query, query, query, softcap=2.0, sinks=torch.zeros(4), normalizer=problem.normalizer)
    assert choose(capped).why_not(capped) == []
    kernel = choose(problem, "mixed_heads")
    assert kernel.why_not(capped) == ["its code has no softcap", "its code has no sinks"]
    other = make_problem(query, query, query, normalizer=normalizers.Sparsemax())
    assert kernel.why_not(other) == ["its code computes normalizers.TalkingHeads"]
