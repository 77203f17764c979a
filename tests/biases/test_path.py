"""PaTH's products of reflections, taken one after the other in float64: chunks, positions, heads, length, errors."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import regard
from regard import biases, masks, scores
from regard.biases import householder_products
from regard.errors import ConfigurationError, DtypeError, ShapeError

HEADS, KEY_HEADS, DIM = 4, 2, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def inputs(queries: int, keys: int, of_vectors: int = KEY_HEADS) -> list[Tensor]:
    """Query, key, value, vectors and strengths up to 2."""
    vectors = normalize(drawn(2, of_vectors, keys, DIM).detach(), dim=-1).requires_grad_()
    beta = (2 * torch.rand(2, of_vectors, keys, dtype=torch.float64)).requires_grad_()
    return [
        drawn(2, HEADS, queries, DIM),
        drawn(2, KEY_HEADS, keys, DIM),
        drawn(2, KEY_HEADS, keys, DIM),
        vectors,
        beta,
    ]


def formula(query: Tensor, key: Tensor, vectors: Tensor, beta: Tensor, reached: Tensor) -> Tensor:
    """Scores k_j · H_j+1 … H_i q_i over √D; reached (..., M, N): the tokens at or before each query."""
    key, vectors, beta = (each.repeat_interleave(HEADS // each.shape[1], 1) for each in (key, vectors, beta))
    moved, columns = query, []
    for j in reversed(range(key.shape[-2])):
        columns.append((moved * key[:, :, j : j + 1]).sum(-1))
        w, strength = vectors[:, :, j : j + 1], beta[:, :, j, None, None]
        moved = torch.where(reached[..., j : j + 1], moved - strength * (moved * w).sum(-1, keepdim=True) * w, moved)
    return torch.stack(columns[::-1], -1) / DIM**0.5


def attended(weighed: Tensor, keep: Tensor, value: Tensor) -> Tensor:
    weights = weighed.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ value.repeat_interleave(HEADS // KEY_HEADS, 1)


def check(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    above = torch.randn(expected.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad(output, leaves, above, retain_graph=True) for output in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("of_vectors", [1, KEY_HEADS, HEADS])
@pytest.mark.parametrize(("queries", "keys"), [(37, 53), (67, 131), (1, 131), (131, 131)])
@pytest.mark.covering
def test_chunks_of_any_length_and_vectors_of_any_heads(chunk, of_vectors, queries, keys, monkeypatch):
    monkeypatch.setattr(householder_products, "CHUNK", chunk)
    query, key, value, vectors, beta = leaves = inputs(queries, keys, of_vectors)
    keep = torch.ones(queries, keys).tril(keys - queries).bool()
    expected = attended(formula(query, key, vectors, beta, keep), keep, value)
    bias = biases.path(vectors, beta)
    check(regard.attention(query, key, value, mask=masks.causal(), bias=bias, kernel="tiled"), expected, leaves)


def test_windows_documents_and_empty_rows(monkeypatch):
    monkeypatch.setattr(householder_products, "CHUNK", 8)
    query, key, value, vectors, beta = leaves = inputs(53, 53)
    reached = torch.ones(53, 53).tril().bool()
    some = torch.rand(2, HEADS, 53, 53) > 0.4
    some[..., 3, :], some[..., 7] = False, False
    for mask in (masks.causal() & masks.window(before=9), masks.causal() & masks.documents(torch.arange(53) // 20)):
        whole = mask & masks.where(keep=some)
        keep = whole.dense(53, 53)
        expected = attended(formula(query, key, vectors, beta, reached), keep, value)
        for kernel in ("tiled", None):
            found = regard.attention(query, key, value, mask=whole, bias=biases.path(vectors, beta), kernel=kernel)
            check(found, expected, leaves)


def test_positions_with_gaps_of_each_batch_and_queries_without_a_key(monkeypatch):
    monkeypatch.setattr(householder_products, "CHUNK", 4)
    query, key, value, vectors, beta = leaves = inputs(5, 23)
    has = torch.stack([torch.randperm(60)[:23].sort().values for _ in range(2)])
    at = torch.tensor([[0, 59, 7, 30, 31], [12, 12, 58, 3, 40]])
    keep = (has[:, None] <= at[..., None]).unsqueeze(1)
    expected = attended(formula(query, key, vectors, beta, keep), keep, value)
    bias = biases.path(vectors, beta)
    for kernel in ("tiled", "reference"):
        found = regard.attention(
            *(query, key, value),
            mask=masks.causal(),
            bias=bias,
            kernel=kernel,
            query_positions=at,
            key_positions=has,
        )
        check(found, expected, leaves)


def test_inputs_without_heads():
    query, key, value = (drawn(2, 19, DIM) for _ in range(3))
    vectors, beta = drawn(2, 19, DIM), drawn(2, 19)
    found = regard.attention(query, key, value, mask=masks.causal(), bias=biases.path(vectors, beta))
    with_heads = regard.attention(
        *(each[:, None] for each in (query, key, value)),
        mask=masks.causal(),
        bias=biases.path(vectors[:, None], beta[:, None]),
    )
    torch.testing.assert_close(found, with_heads[:, 0])


def test_no_strength_is_no_position():
    query, key, value, vectors, beta = inputs(37, 53)
    bias = biases.path(vectors, 0 * beta)
    plain = regard.attention(query, key, value, mask=masks.causal())
    torch.testing.assert_close(regard.attention(query, key, value, mask=masks.causal(), bias=bias), plain)


def test_float32_over_a_thousand_reflections():
    """Reflections do not lengthen a vector: rounding grows by at most one step of it for each chunk."""
    query, key, value, vectors, beta = (each.detach() for each in inputs(1031, 1031))
    beta = 2 - 0.1 * beta  # as near to mirrors as they are taught to be
    reached = torch.ones(1031, 1031).tril().bool()
    low = [each.float() for each in (query, key, value, vectors, beta)]
    exact = [each.double() for each in low]
    expected = attended(formula(exact[0], exact[1], exact[3], exact[4], reached), reached, exact[2])
    found = regard.attention(*low[:3], mask=masks.causal(), bias=biases.path(low[3], low[4]))
    assert (found - expected).abs().max() < 64 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: biases.path(torch.ones(5, DIM).long(), torch.ones(5)), DtypeError, "vectors.*it is torch.int64"),
        (lambda: biases.path(torch.ones(5, DIM), torch.ones(5).int()), DtypeError, "beta.*it is torch.int32"),
        (lambda: biases.path(torch.ones(1, 9, DIM), torch.ones(1, 7)), ShapeError, r"vectors of .* \(1, 9, 8\)"),
        (lambda: biases.path(torch.ones(1, 7, 3), torch.ones(1, 7)), ShapeError, r"needs \(2, 4, 7, 8\)"),
        (lambda: biases.path(torch.ones(3, 7, DIM), torch.ones(1, 7)), ShapeError, "in place of the heads"),
        (lambda: biases.path(torch.ones(1, 7, DIM), torch.ones(1, 6)), ShapeError, r"beta of .* \(1, 6\)"),
    ],
)
def test_what_does_not_fit_is_named(make, error, words):
    query, key, value = inputs(5, 7)[:3]
    with pytest.raises(error, match=words):
        regard.attention(query, key, value, bias=make())


def test_the_order_of_the_keys_and_the_score_are_checked():
    query, key, value, vectors, beta = inputs(5, 7)
    with pytest.raises(ConfigurationError, match="not in ascending order: sort keys"):
        regard.attention(
            *(query, key, value),
            bias=biases.path(vectors, beta),
            query_positions=torch.arange(5),
            key_positions=torch.arange(7).flip(0),
        )
    score = scores.Additive(DIM, DIM, 3).double()
    with pytest.raises(ConfigurationError, match="leave score out"):
        regard.attention(query, key, value, score=score, bias=biases.path(vectors, beta))


@pytest.mark.parametrize("positions", [None, torch.arange(70)], ids=["range", "tensor"])
def test_it_is_compiled_as_a_whole(positions):
    leaves = inputs(70, 70)

    def attend(query: Tensor, key: Tensor, value: Tensor, vectors: Tensor, beta: Tensor) -> Tensor:
        return regard.attention(
            *(query, key, value),
            mask=masks.causal(),
            bias=biases.path(vectors, beta),
            query_positions=positions,
            key_positions=positions,
        )

    torch.compiler.reset()
    outputs = attend(*leaves), torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), leaves) for output in outputs))
