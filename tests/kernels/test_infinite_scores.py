"""A pair that infinity in a query or key scores -infinity counts as masked: in every kernel, forward and backward."""

import functools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks, native
from regard.kernels import KERNELS
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.decode import DecodeKernel
from regard.kernels.infinite_scores import mask_without_infinity
from regard.kernels.tiled import TiledKernel
from regard.testing import SOFTMAX, Case, Expected, Inputs, OracleResult, assert_close, cases, long_cases, make_inputs
from regard.testing.oracle import upstream_gradients, with_repeated_heads

ON_CPU = tuple(kernel for kernel in KERNELS if kernel.name != "flex")
SMALL = (*ON_CPU, BlockSparseKernel((3, 2), 3), DecodeKernel(2), TiledKernel(16))
GROUPS, EVERY = 4, 6
"""Tests that share the cases, and every so many of the long ones."""
NAN, INF = math.nan, math.inf


def of_products(case: Case) -> bool:
    """Whether scores are products, of which infinity makes -infinity, and rows attend to no NaN."""
    return (
        case.score in ("default", "dot", "scaled")
        and "softcap" not in case.variant
        and case.poison in ("clean", "masked")
        and min(case.sizes) > 0
    )


@dataclass(frozen=True, eq=False)
class InfiniteInputs:
    """Inputs of a case of which some pairs have a score of -infinity, and the same with these pairs masked."""

    given: Inputs
    masked: Inputs

    @classmethod
    def of_case(cls, case: Case) -> "InfiniteInputs":
        """Keys of -infinity and, of several queries, a query: no score is +infinity or NaN."""
        inputs = make_inputs(case)
        queries, keys = case.sizes
        leaves = {name: leaf.detach().clone() for name, leaf in inputs.leaves.items()}
        for name, feature, other, infinite in (
            ("key", 0, "query", range(2, keys, max(keys // 3, 3))),
            ("query", 1, "key", range(3, queries, max(queries // 2, 4))),
        ):
            positive = entries(inputs, other, feature)
            leaves[other][positive] = leaves[other][positive].abs() + 0.5
            leaves[name][entries(inputs, name, feature, list(infinite))] = -INF
        given = replace(inputs, leaves={name: leaf.requires_grad_() for name, leaf in leaves.items()})
        query, key, _ = with_repeated_heads(given, leaves)
        scores = query.double() @ key.double().mT
        assert not (inputs.keep & (scores.isnan() | (scores == INF))).any()
        finite = {name: leaf.detach().nan_to_num(0.0, 0.0, 0.0) for name, leaf in leaves.items()}
        finite = {name: leaf if name in ("query", "key", "value") else leaves[name] for name, leaf in finite.items()}
        return cls(given, replace(inputs, leaves=finite, keep=inputs.keep & (scores != -INF)))


def entries(inputs: Inputs, name: str, feature: int, rows: list[int] | None = None) -> Tensor:
    """The entries of a leaf that are a feature of some rows of query or key; of all rows without `rows`."""
    leaf = torch.zeros(inputs.leaves[name].shape, requires_grad=True)
    whole = inputs.argument(name, leaf)[..., feature]
    (gradient,) = torch.autograd.grad((whole if rows is None else whole[..., rows]).sum(), leaf)
    return gradient > 0


@functools.cache
def expected_results(case: Case, with_lse: bool) -> tuple[InfiniteInputs, OracleResult, list[OracleResult]]:
    inputs = InfiniteInputs.of_case(case)
    truth = SOFTMAX.truth(inputs.masked, with_lse=with_lse)
    return inputs, truth, list(SOFTMAX.approximations(inputs.masked, truth, with_lse=with_lse))


def assert_agrees_with_infinity(kernel, case: Case) -> None:
    """Output, log-sum-exp and gradients are those of the problem whose pairs of -infinity are masked."""
    has_lse = not kernel.why_not(InfiniteInputs.of_case(case).given.problem(wants_lse=True))
    inputs, truth, approximations = expected_results(case, has_lse)
    result = kernel.run(inputs.given.problem(wants_lse=has_lse))
    dtype, leaves = inputs.given.leaves["value"].dtype, inputs.given.leaves
    assert_close(result.output, Expected(truth.output, dtype, [each.output for each in approximations]), "output")
    empty = ~inputs.masked.keep.any(-1).reshape(truth.lse.shape)
    assert result.output[empty].eq(0).all()
    results = [result.output]
    if has_lse:
        wide = torch.promote_types(dtype, torch.float32)
        assert_close(result.lse, Expected(truth.lse, wide, [each.lse for each in approximations], 1.0), "lse")
        results.append(result.lse)
    upstream = upstream_gradients(inputs.masked, truth.output)
    upstream = [each.to(own) for each, own in zip(upstream, results, strict=False)]
    found = torch.autograd.grad(results, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    magnitude = max(each.abs().mean().item() for each in truth.gradients.values() if each.numel())
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        of_others = [each.gradients[name] for each in approximations]
        assert_close(gradient, Expected(truth.gradients[name], dtype, of_others, magnitude), f"gradient of {name}")
        if name in ("query", "key", "value"):
            assert gradient[~inputs.masked.attended_entries(name)].eq(0).all()
        assert gradient[leaf.isinf()].eq(0).all()


def suite(kernels, among):
    for case in among:
        problem = make_inputs(case).problem()
        yield from ((kernel, case) for kernel in kernels if not kernel.why_not(problem))


@pytest.mark.parametrize("group", range(GROUPS))
def test_kernels_agree_with_the_oracle(group, assert_all):
    pairs = list(suite(SMALL, filter(of_products, cases(1))))
    assert {kernel.name for kernel, _ in pairs} >= {"sdpa", "block_sparse", "decomposed", "tiled", "reference"}
    assert_all(assert_agrees_with_infinity, pairs[group::GROUPS])


@pytest.mark.shorter
@pytest.mark.parametrize("group", range(GROUPS))
def test_several_tiles(group, assert_all):
    among = list(filter(of_products, long_cases()))[::EVERY]
    assert_all(assert_agrees_with_infinity, list(suite(ON_CPU, among))[group::GROUPS])


@pytest.mark.slow
@pytest.mark.parametrize("group", range(4 * GROUPS))
def test_kernels_agree_with_the_oracle_on_more_cases(group, assert_all):
    among = [case for each in (cases(2), long_cases()) for case in each if of_products(case)]
    assert_all(assert_agrees_with_infinity, list(suite(SMALL, among[group :: 4 * GROUPS])))


@pytest.mark.parametrize("variant", native.variants())
@pytest.mark.parametrize("kernel", ["short", "cpu_flash", "decode", "gathered"])
def test_all_native_code(variant, kernel, assert_all):
    with native.using(variant):
        pairs = list(suite([by_name(kernel)], filter(of_products, cases(1))))
        assert_all(assert_agrees_with_infinity, pairs)


def by_name(name: str):
    return next(kernel for kernel in KERNELS if kernel.name == name)


def drawn(queries: int = 7, keys: int = 11, **infinite: int) -> list[Tensor]:
    """Query, key and value without 0, of which the rows that are named have infinity in the first feature."""
    generator = torch.Generator().manual_seed(0)
    lengths = {"query": queries, "key": keys, "value": keys}
    tensors = {name: torch.randn(1, 2, length, 8, generator=generator) for name, length in lengths.items()}
    for name, row in infinite.items():
        tensors[name][..., row, 0] = INF
    return list(tensors.values())


def masked_truth(tensors: list[Tensor], keep: Tensor) -> tuple[list[Tensor], Tensor]:
    """Finite tensors in float64 with gradients, and which pairs have a score above -infinity."""
    query, key, _ = tensors
    double = [each.double().nan_to_num(0.0, 0.0, 0.0).requires_grad_() for each in tensors]
    return double, keep & (query.double() @ key.double().mT != -INF)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("infinite", [{"key": 3}, {"query": 2}, {"key": 3, "query": 2}], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "short", "decode", "cpu_flash", "block_sparse", "tiled", "reference"])
def test_rows_of_both_signs(kernel, infinite, masked):
    """Rows with a score of +infinity are NaN, and those with -infinity lack that key, whatever is hidden."""
    if not native.available() and kernel in ("short", "cpu_flash"):
        pytest.skip(str(native.why_not()))
    tensors, keep = drawn(**infinite), torch.ones(7, 11, dtype=torch.bool)
    if masked:
        keep[:, 5] = False
        tensors[1][..., 5, 1] = tensors[2][..., 5, 1] = NAN
    double, exists = masked_truth(tensors, keep)
    scores = tensors[0].double() @ tensors[1].double().mT
    bad = (keep & (scores.isnan() | (scores == INF))).any(-1)
    assert 0 < int(bad.sum()) < bad.numel()
    above = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(1))
    expected = regard.attention(*double, mask=masks.where(keep=exists & ~bad[..., None]), kernel="reference")
    true = torch.autograd.grad(expected, double, above.double())
    inputs = [each.requires_grad_() for each in tensors]
    output = regard.attention(*inputs, mask=keep if masked else None, kernel=kernel)
    assert torch.equal(output.isnan().all(-1), bad)
    torch.testing.assert_close(output[~bad], expected[~bad].float(), rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(output, inputs, above)
    for gradient, needed in zip(found, true, strict=True):
        torch.testing.assert_close(gradient, needed.float(), rtol=1e-5, atol=1e-5)


def test_second_derivatives_and_many_gradients_at_once():
    tensors = drawn(key=3)
    tensors[0] = tensors[0].abs() + 0.5
    tensors[1][..., 3, 0] = -INF
    double, exists = masked_truth(tensors, torch.ones(7, 11, dtype=torch.bool))
    found = []
    for own, options in ((double, {"mask": exists, "kernel": "reference"}), (tensors, {"kernel": "tiled"})):
        own = [each.to(torch.float64).detach().requires_grad_() for each in own]
        output = regard.attention(*own, **options)
        above = torch.ones(3, *output.shape, dtype=torch.float64).cumsum(0).sin()
        mapped = torch.autograd.grad(output, own, above, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(output.sin().sum(), own, create_graph=True)
        second = torch.autograd.grad([each.square().sum() for each in first], own)
        found.append([*mapped, *first, *second])
    for has, needs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(has, needs, rtol=1e-9, atol=1e-12)


def test_a_bias_and_sinks_have_their_gradients():
    tensors = drawn(key=3)
    tensors[0] = tensors[0].abs() + 0.5
    tensors[1][..., 3, 0] = -INF
    double, exists = masked_truth(tensors, torch.ones(7, 11, dtype=torch.bool))
    found = []
    for own, options in ((double, {"mask": exists, "kernel": "reference"}), (tensors, {})):
        bias = torch.linspace(-1, 1, 77, dtype=own[0].dtype).view(7, 11).requires_grad_()
        sinks = torch.tensor([0.5, -0.5], dtype=own[0].dtype, requires_grad=True)
        output = regard.attention(*own, bias=bias, sinks=sinks, **options)
        found.append(torch.autograd.grad(output.sum(), (bias, sinks)))
    assert found[1][0][:, 3].eq(0).all()
    for has, needs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(has, needs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_lenses_see_no_weight(kernel):
    tensors = drawn(key=3)
    tensors[0] = tensors[0].abs() + 0.5
    tensors[1][..., 3, 0] = -INF
    (query, key, value), exists = masked_truth(tensors, torch.ones(7, 11, dtype=torch.bool))
    weights, received = lenses.Weights(), lenses.Received()
    expected = regard.observe(query, key, value, weights, received, mask=exists)
    query, key, value = tensors
    seen = regard.observe(query, key, value, weights, received, kernel=kernel)
    assert seen[weights][..., 3].eq(0).all()
    assert seen[received][..., 3].eq(0).all()
    torch.testing.assert_close(seen[weights], expected[weights].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[received], expected[received].float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["sdpa", "short", "cpu_flash", "block_sparse", "tiled", "reference"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_many_tiles_without_any_score(kernel, masked):
    """Output 0, log-sum-exp -infinity, where one is given, and gradient 0."""
    if not native.available() and kernel in ("short", "cpu_flash"):
        pytest.skip(str(native.why_not()))
    tensors = drawn(131, 257)
    tensors[0][..., 5, 0], tensors[1][..., 0] = -INF, tensors[1][..., 0].abs() + 0.5
    tensors = [each.requires_grad_() for each in tensors]
    mask = masks.causal() if masked else None
    output = regard.attention(*tensors, mask=mask, kernel=kernel)
    assert output[..., 5, :].eq(0).all()
    assert output[..., :5, :].all()
    query, key, _ = torch.autograd.grad(output.square().sum(), tensors)
    assert query[..., 5, :].eq(0).all()
    assert query[..., 6, :].all()
    assert key.isfinite().all()
    if kernel != "sdpa":
        assert regard.attention_with_lse(*tensors, mask=mask, kernel=kernel)[1][..., 5].eq(-INF).all()


def test_finite_numbers_have_the_mask_that_they_had():
    mask = masks.causal()
    plain = regard.explain(*drawn(), mask=mask).problem
    assert mask_without_infinity(plain) is plain.mask
    tensors = drawn()
    tensors[1][..., 3, 0] = NAN  # whose rows are NaN
    with_nan = regard.explain(*tensors, mask=mask).problem
    assert mask_without_infinity(with_nan) is with_nan.mask
    assert mask_without_infinity(regard.explain(*drawn(key=3), mask=mask).problem) is not mask


def test_lists_of_key_heads():
    query, key, value = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    query, indices = query.abs(), torch.tensor([[[0, 2], [2, 3], [2, 5]], [[1, 4], [2, 2], [0, 3]]])
    key[0, 0, 2, 0] = -INF
    keep = masks.chosen(indices).dense(3, 6).repeat_interleave(2, 0)
    keep[:2, :, 2] = False
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = regard.attention(*tensors, mask=masks.chosen(indices))
    finite = key.detach().nan_to_num(neginf=0.0)
    others = [tensor.detach().requires_grad_() for tensor in (query, finite, value)]
    expected = regard.attention(*others, mask=keep)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output.square().sum(), tensors)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), others))
