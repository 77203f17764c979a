"""Vectors by distance that are added to the values, against the formula in float64: Shaw et al. 2018, Eq. 3."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, value_vectors
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.kernels.hooks import AttentionSubstitute, active_substitute, attention_hook, substitute_attention

HEADS, KEY_HEADS, DIM, WIDTH = 4, 2, 8, 6
RANGES = [(3, 2), (0, 0), (0, 1), (1, 0), (0, 4), (5, 0), (70, 70)]


@pytest.fixture(params=[0, value_vectors.FEW_KEYS], ids=["parts", "few keys"])
def few_keys(request, monkeypatch):
    """Both ways of computing it."""
    monkeypatch.setattr(value_vectors, "FEW_KEYS", request.param)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def inputs(queries: int, keys: int, before: int, after: int, heads: int = HEADS) -> list[Tensor]:
    key, value = drawn(2, KEY_HEADS, keys, DIM), drawn(2, KEY_HEADS, keys, WIDTH)
    return [drawn(2, HEADS, queries, DIM), key, value, drawn(heads, before + 1 + after, WIDTH)]


def with_vectors(weights: Tensor, value: Tensor, vectors: Tensor, before: int, after: int, away: Tensor) -> Tensor:
    """Σ_j w_ij (v_j + a[clip(away_ij)]), with a vector for each pair; away (..., M, N) key less query position."""
    chosen = vectors[:, away.clamp(-before, after) + before]  # [H, (B,) M, N, Dv]
    if away.ndim == 3:
        chosen = chosen.transpose(0, 1)
    pairs = value.repeat_interleave(HEADS // KEY_HEADS, 1).unsqueeze(-3) + chosen
    return (weights.unsqueeze(-1) * pairs).sum(-2)


def softmax_weights(query: Tensor, key: Tensor, keep: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    scores = query @ key.repeat_interleave(HEADS // KEY_HEADS, 1).mT / DIM**0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[-2]]


def distances(queries: int, keys: int) -> Tensor:
    return torch.arange(keys) - torch.arange(keys - queries, keys).unsqueeze(-1)


def check(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    above = torch.randn(expected.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad(output, leaves, above) for output in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("before", "after"), RANGES)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(4, 7)], ids=str)
@pytest.mark.usefixtures("few_keys")
def test_it_is_the_formula_with_all_gradients(before, after, mask):
    query, key, value, vectors = leaves = inputs(37, 53, before, after)
    keep = None if mask is None else mask.dense(37, 53)
    found = regard.relative_value_attention(query, key, value, vectors, before=before, after=after, mask=mask)
    weights = softmax_weights(query, key, keep)
    check(found, with_vectors(weights, value, vectors, before, after, distances(37, 53)), leaves)


@pytest.mark.usefixtures("few_keys")
def test_empty_rows_hidden_keys_nan_and_sinks():
    query, key, value, vectors = leaves = inputs(37, 53, 3, 2, heads=1)
    sinks, keep = drawn(HEADS), torch.rand(2, HEADS, 37, 53) > 0.4
    keep[..., 3, :], keep[..., 7] = False, False
    expected = with_vectors(softmax_weights(query, key, keep, sinks), value, vectors, 3, 2, distances(37, 53))
    options = {"before": 3, "after": 2, "mask": keep, "sinks": sinks}
    check(regard.relative_value_attention(*leaves, **options), expected, [*leaves, sinks])
    with torch.no_grad():
        key[:, :, 7], value[:, :, 7] = torch.nan, torch.inf
    found = regard.relative_value_attention(*leaves, **options)
    torch.testing.assert_close(found, expected)
    assert not found[:, :, 3].any()
    gradients = torch.autograd.grad(found.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.usefixtures("few_keys")
def test_positions_in_any_order_with_gaps_and_of_each_batch():
    query, key, value, vectors = leaves = inputs(5, 11, 3, 2)
    has = torch.stack([torch.randperm(40)[:11] for _ in range(2)])
    has[0, 0] = has[0, 1]  # two keys at one position have one vector
    at = has[:, 3:8] + 1
    found = regard.relative_value_attention(
        query, key, value, vectors, before=3, after=2, query_positions=at, key_positions=has
    )
    away = has.unsqueeze(-2) - at.unsqueeze(-1)
    check(found, with_vectors(softmax_weights(query, key, None), value, vectors, 3, 2, away), leaves)


def test_with_the_vectors_of_the_keys_it_is_all_of_shaw():
    query, key, value, vectors = leaves = inputs(67, 131, 4, 4)
    of_keys, away = drawn(1, 9, DIM), distances(67, 131)
    bias = biases.shaw(of_keys, before=4, after=4)
    scores = query @ key.repeat_interleave(2, 1).mT
    scores = scores + torch.einsum("bhid,ijd->bhij", query, of_keys[0, away.clamp(-4, 4) + 4])
    expected = with_vectors((scores / DIM**0.5).softmax(-1), value, vectors, 4, 4, away)
    found = regard.relative_value_attention(query, key, value, vectors, before=4, after=4, bias=bias)
    check(found, expected, [*leaves, of_keys])


@pytest.mark.usefixtures("few_keys")
def test_biases_that_count_the_keys_of_a_row_see_all_that_the_mask_leaves():
    query, key, value, vectors = inputs(37, 37, 3, 0)
    options = {"mask": masks.causal(), "bias": biases.cope(drawn(HEADS, 7, DIM))}
    weights = lenses.Weights()
    expected = regard.observe(query, key, value, weights, **options)[weights]
    found = regard.relative_value_attention(query, key, value, vectors, before=3, after=0, **options)
    torch.testing.assert_close(found, with_vectors(expected, value, vectors, 3, 0, distances(37, 37)))


@pytest.mark.parametrize("keys", [53, 521])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_as_near_as_its_roundings(keys, dtype):
    leaves = [tensor.detach() for tensor in inputs(keys, keys, 7, 0)]
    low = [tensor.to(dtype) for tensor in leaves]
    mask = masks.causal()
    query, key, value, vectors = (tensor.double() for tensor in low)
    weights = softmax_weights(query, key, mask.dense(keys, keys))
    expected = with_vectors(weights, value, vectors, 7, 0, distances(keys, keys))
    found = regard.relative_value_attention(low[0], low[1], low[2], low[3], before=7, after=0, mask=mask)
    assert found.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps * expected.abs().max()
    assert (found - expected).abs().max() < bound


@pytest.mark.usefixtures("few_keys")
def test_dropout_drops_what_attention_drops_and_the_vectors_with_it():
    query, key, value, vectors = inputs(37, 53, 3, 2)
    torch.manual_seed(5)
    plain = regard.attention(query, key, torch.ones_like(value), dropout_p=0.3)
    torch.manual_seed(5)
    found = regard.relative_value_attention(
        query, key, torch.zeros_like(value), torch.ones_like(vectors), before=3, after=2, dropout_p=0.3
    )
    torch.testing.assert_close(found, plain)
    assert not torch.allclose(plain, torch.ones_like(plain))


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.usefixtures("few_keys")
def test_inputs_without_heads(axes):
    query, key, value = (drawn(*(2,) * (axes - 2), 13, size) for size in (DIM, DIM, WIDTH))
    vectors = drawn(1, 4, WIDTH)
    found = regard.relative_value_attention(query, key, value, vectors, before=2, after=1)
    chosen = vectors[0, distances(13, 13).clamp(-2, 1) + 2]
    weights = (query @ key.mT / DIM**0.5).softmax(-1)
    torch.testing.assert_close(found, weights @ value + torch.einsum("...ij,ijd->...id", weights, chosen))


def test_memory_is_linear_in_the_length(largest_storage):
    """No tensor of all pairs: 8,192² numbers of one head would be 268 MB."""
    n = 8192
    query = torch.randn(1, 1, n, 8, requires_grad=True)
    vectors = torch.randn(1, 9, 8, requires_grad=True)
    with largest_storage:
        mask = masks.causal() & masks.window(before=63)
        regard.relative_value_attention(query, query, query, vectors, before=8, after=0, mask=mask).sum().backward()
    assert largest_storage.bytes < 64 * n * 8


@pytest.mark.parametrize(
    ("vectors", "options", "error", "words"),
    [
        (torch.ones(1, 3, WIDTH), {"before": -1, "after": 3}, ConfigurationError, "before is -1; it needs at least 0"),
        (torch.ones(1, 3, WIDTH), {"before": 1, "after": 0.5}, ConfigurationError, "after needs a whole number"),
        (torch.ones(1, 3, WIDTH).long(), {"before": 1, "after": 1}, DtypeError, "this is torch.int64"),
        (torch.ones(1, 3, 9), {"before": 1, "after": 1}, ShapeError, r"\(4, 3, 6\).* have the shape \(1, 3, 9\)"),
        (torch.ones(3, 3, WIDTH), {"before": 1, "after": 1}, ShapeError, "1 in place of the heads"),
        (
            torch.ones(1, 3, WIDTH),
            {"before": 1, "after": 1, "normalizer": regard.normalizers.Sigmoid()},
            ConfigurationError,
            "log-sum-exp of softmax.* leave it out",
        ),
    ],
)
def test_what_does_not_fit_is_named(vectors, options, error, words):
    query, key, value, _ = inputs(5, 7, 1, 1)
    with pytest.raises(error, match=words):
        regard.relative_value_attention(query, key, value, vectors, **options)


@pytest.mark.usefixtures("few_keys")
def test_one_sequence_of_keys_for_positions_of_each_batch():
    query, key, value, vectors = inputs(5, 11, 3, 2)
    key, value = key[:1], value[:1]
    has = torch.stack([torch.randperm(40)[:11] for _ in range(2)])
    at = has[:, 3:8] + 1
    found = regard.relative_value_attention(
        query, key, value, vectors, before=3, after=2, query_positions=at, key_positions=has
    )
    away = has.unsqueeze(-2) - at.unsqueeze(-1)
    weights = softmax_weights(query, key.expand(2, -1, -1, -1), None)
    expected = with_vectors(weights, value.expand(2, -1, -1, -1), vectors, 3, 2, away)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("few_keys")
def test_it_is_compiled_as_a_whole_and_mapped():
    query, key, value, vectors = leaves = inputs(37, 53, 3, 2)

    def attend(query: Tensor, key: Tensor, value: Tensor, vectors: Tensor) -> Tensor:
        return regard.relative_value_attention(query, key, value, vectors, before=3, after=2, mask=masks.causal())

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    outputs = attend(*leaves), compiled(*leaves)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), leaves) for output in outputs))
    mapped = torch.func.vmap(attend, in_dims=(0, 0, 0, None))(query[:, None], key[:, None], value[:, None], vectors)
    torch.testing.assert_close(mapped[:, 0], outputs[0])


@pytest.mark.parametrize("keys", [37, 307], ids=["few keys", "parts"])
def test_a_hook_sees_one_attention_and_a_substitute_has_whole_rows(keys):
    query, key, value, vectors = (each.detach() for each in inputs(keys, keys, 3, 0))
    options = {"before": 3, "after": 0, "mask": masks.causal()}
    expected, seen = regard.relative_value_attention(query, key, value, vectors, **options), []
    with attention_hook(lambda problem, lse: seen.append(problem)):
        found = regard.relative_value_attention(query, key, value, vectors, **options)
    torch.testing.assert_close(found, expected)
    assert [problem.value.shape[-1] for problem in seen] == [WIDTH]
    with substitute_attention(lambda problem: None):
        torch.testing.assert_close(regard.relative_value_attention(query, key, value, vectors, **options), expected)
    own = torch.eye(keys, dtype=torch.bool)  # an edit: each token reads itself alone
    with substitute_attention(lambda problem: _as_mask(problem, own)):
        found = regard.relative_value_attention(query, key, value, vectors, **options)
    torch.testing.assert_close(found, value.repeat_interleave(HEADS // KEY_HEADS, 1) + vectors[:, None, 3])


def _as_mask(problem, keep: Tensor) -> Tensor:
    return keep.to(problem.value.dtype) @ problem.value.repeat_interleave(HEADS // KEY_HEADS, 1)


def test_a_part_of_the_positions_is_refused():
    query, key, value, vectors = inputs(5, 5, 3, 0)
    substitute = AttentionSubstitute(lambda problem: None, no_mixtures="some positions")
    with active_substitute(substitute), pytest.raises(ConfigurationError, match="vectors of the keys of this process"):
        regard.relative_value_attention(query, key, value, vectors, before=3, after=0)
