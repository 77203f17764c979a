"""Queries and keys that are packed each in their own way, against a loop over the documents in float64."""

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, native
from regard.kernels import KERNELS
from regard.nn import Attention, Projections

QUERY_LENGTHS, KEY_LENGTHS = (3, 0, 7, 1, 4), (5, 2, 1, 0, 11)  # some without queries, some without keys
HEADS, KEY_HEADS, DIM, VALUE_DIM = 4, 2, 16, 16


def ends(lengths: tuple[int, ...]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    queries, keys = sum(QUERY_LENGTHS), sum(KEY_LENGTHS)
    shapes = (HEADS, queries, DIM), (KEY_HEADS, keys, DIM), (KEY_HEADS, keys, VALUE_DIM), (HEADS, queries, VALUE_DIM)
    return [torch.randn(1, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_document(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each document by itself: softmax(q kᵀ / √d) v, and 0 where there are no keys."""
    parts = []
    for q, k, v in zip(
        query.split(QUERY_LENGTHS, -2), key.split(KEY_LENGTHS, -2), value.split(KEY_LENGTHS, -2), strict=True
    ):
        k, v = (tensor.repeat_interleave(HEADS // KEY_HEADS, -3) for tensor in (k, v))
        parts.append((q @ k.mT / DIM**0.5).softmax(-1) @ v)
    return torch.cat(parts, -2)


def with_gradients(output: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    *into, above = tensors
    return [output.detach(), *torch.autograd.grad(output, into, above.detach())]


PACKED = {
    "cu_seqlens": lambda: masks.from_cu_seqlens(ends(QUERY_LENGTHS), ends(KEY_LENGTHS)),
    "ids": lambda: masks.documents(
        torch.arange(5).repeat_interleave(torch.tensor(QUERY_LENGTHS)) * 7,
        (torch.arange(5) * 7).repeat_interleave(torch.tensor(KEY_LENGTHS))[None],
    ),
    "unsorted ids": lambda: masks.documents(
        torch.tensor([3, 9, 0, 2, 1]).repeat_interleave(torch.tensor(QUERY_LENGTHS)),
        torch.tensor([3, 9, 0, 2, 1]).repeat_interleave(torch.tensor(KEY_LENGTHS)),
    ),
}


@pytest.mark.parametrize("packed", PACKED)
def test_it_is_the_attention_of_each_document(packed):
    query, key, value, above = inputs(torch.float32)
    exact, mask, at = inputs(torch.float64), PACKED[packed](), range(sum(QUERY_LENGTHS))
    expected = with_gradients(by_document(*exact[:3]), exact)
    problem = regard.explain(query, key, value, mask=mask, query_positions=at).problem
    admitted = {kernel.name for kernel in KERNELS if not kernel.why_not(problem)}
    assert admitted >= {"reference", "tiled", "sdpa", "block_sparse"}
    assert not native.available() or admitted >= {"cpu_flash", "short"}
    for kernel in (None, *sorted(admitted)):
        output = regard.attention(query, key, value, mask=mask, query_positions=at, kernel=kernel)
        for has, needs in zip(with_gradients(output, [query, key, value, above]), expected, strict=True):
            torch.testing.assert_close(has.double(), needs, atol=2e-6, rtol=1e-5)


def test_a_layer_places_queries_at_0():
    layer = Attention(Projections(12, num_heads=2)).double().eval()
    query, memory = torch.randn(1, 15, 12).double(), torch.randn(1, 19, 12).double()
    with torch.no_grad():
        whole = layer(query, memory, mask=PACKED["cu_seqlens"]())
        for q, k, found in zip(*(
            query.split(QUERY_LENGTHS, 1), memory.split(KEY_LENGTHS, 1), whole.split(QUERY_LENGTHS, 1)
        ), strict=True):  # fmt: skip
            torch.testing.assert_close(found, layer(q, k))


def test_nan_in_a_document_stays_there():
    query, key, value, _ = inputs(torch.float32)
    clean = regard.attention(query, key, value, mask=PACKED["ids"](), query_positions=range(15))
    with torch.no_grad():
        key[..., 6, :] = torch.nan  # of the document without queries
        key[..., 8:, 0], value[..., 9, 1] = torch.inf, torch.nan  # of the last
    found = regard.attention(query, key, value, mask=PACKED["ids"](), query_positions=range(15))
    torch.testing.assert_close(found[..., :11, :], clean[..., :11, :])
    is_nan, scores_infinity = found[..., 11:, :].isnan(), query[..., 11:, 0] > 0
    assert is_nan[scores_infinity].all()
    # All keys of the others score -infinity, and count as masked; NaN in a value shows even so.
    assert not is_nan[~scores_infinity][:, [0, 2]].any()
    assert not found[..., 11:, :][~scores_infinity][:, [0, 2]].any()
    assert is_nan[..., 1].all()


@pytest.mark.skipif(not native.available(), reason="one of its kernels is of native code")
def test_clusters_of_heads_are_attention_within_each():
    """Ids in any order, (batch, heads, n): of a Routing Transformer or a Reformer; forward and gradient."""
    torch.manual_seed(0)
    ids = torch.randint(3, (2, HEADS, 23))
    exact = [torch.randn(2, HEADS, 23, DIM, dtype=torch.float64).requires_grad_() for _ in range(4)]
    parts = exact[0].new_zeros(2, HEADS, 23, DIM)
    for at in torch.cartesian_prod(torch.arange(2), torch.arange(HEADS), torch.arange(3)).tolist():
        own = (ids[at[0], at[1]] == at[2]).nonzero().flatten()
        q, k, v = (tensor[at[0], at[1], own] for tensor in exact[:3])
        parts[at[0], at[1], own] = (q @ k.T / DIM**0.5).softmax(-1) @ v
    expected = with_gradients(parts, exact)
    tensors = [tensor.detach().float().requires_grad_() for tensor in exact]
    query, key, value, _ = tensors
    for kernel in ("reference", "tiled", "sdpa", "cpu_flash", "block_sparse"):
        output = regard.attention(query, key, value, mask=masks.documents(ids), kernel=kernel)
        for has, needs in zip(with_gradients(output, tensors), expected, strict=True):
            torch.testing.assert_close(has.double(), needs, atol=2e-6, rtol=1e-5)


def test_clusters_of_heads_compile():
    query, ids = torch.randn(1, 2, 9, 8), torch.randint(3, (1, 2, 9))

    def attend(query: Tensor, ids: Tensor) -> Tensor:
        return regard.attention(query, query, query, mask=masks.documents(ids))

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(query, ids), attend(query, ids))
