"""Sinkhorn attention against its formula, block by block, with all gradients; and the matrix that sorts."""

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ConfigurationError, ShapeError
from regard.selection import sinkhorn, sinkhorn_attention


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def divided(scores: Tensor, iterations: int) -> Tensor:
    matrix = scores.exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


def by_blocks(query: Tensor, key: Tensor, value: Tensor, sorting: Tensor, size: int) -> Tensor:
    """One head and one block after the other."""
    heads = []
    for head in range(query.shape[1]):
        of_key = head * key.shape[1] // query.shape[1]
        matrix = sorting[:, of_key % sorting.shape[1]]
        own_key, own_value = (tensor[:, of_key].unflatten(1, (-1, size)) for tensor in (key, value))
        mixed_key, mixed_value = (torch.einsum("zab,zbij->zaij", matrix, own) for own in (own_key, own_value))
        keys, values = torch.cat([mixed_key, own_key], 2), torch.cat([mixed_value, own_value], 2)
        queries = query[:, head].unflatten(1, (-1, size))
        heads.append(((queries @ keys.mT / query.shape[-1] ** 0.5).softmax(-1) @ values).flatten(1, 2))
    return torch.stack(heads, 1)


@pytest.mark.parametrize("of_heads", [2, 1])
@pytest.mark.parametrize(("blocks", "size"), [(7, 5), (1, 13), (11, 1)])
def test_it_is_its_formula_with_all_gradients(blocks, size, of_heads):
    length = blocks * size
    leaves = [
        drawn(3, 4, length, 8),
        drawn(3, 2, length, 8),
        drawn(3, 2, length, 5),
        drawn(3, of_heads, blocks, blocks),
    ]
    query, key, value, scores = leaves
    found = sinkhorn_attention(query, key, value, sinkhorn(scores), size=size)
    expected = by_blocks(query, key, value, divided(scores, 8), size)
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, above) for each in (found, expected)))


def test_a_permutation_puts_whole_blocks_beside_the_own():
    query, key, value = drawn(1, 2, 12, 8), drawn(1, 2, 12, 8), drawn(1, 2, 12, 3)
    order = torch.tensor([2, 0, 1])
    found = sinkhorn_attention(query, key, value, torch.eye(3)[order].double()[None], size=4)
    keep = torch.zeros(12, 12, dtype=torch.bool)
    for block, other in enumerate(order.tolist()):
        for there in (block, other):
            keep[4 * block : 4 * block + 4, 4 * there : 4 * there + 4] = True
    torch.testing.assert_close(found, regard.attention(query, key, value, mask=keep))


def test_rows_and_columns_sum_to_one():
    matrix = sinkhorn(drawn(2, 3, 17, 17), iterations=60)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 3, 17, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(2, 3, 17, dtype=torch.float64))
    large = sinkhorn(torch.tensor([[1e4, 0.0], [0.0, -1e4]]))
    assert large.isfinite().all()


def test_a_matrix_of_another_dtype_is_that_of_the_keys():
    query = torch.randn(1, 2, 12, 8, dtype=torch.bfloat16)
    assert sinkhorn_attention(query, query, query, torch.eye(3).expand(1, 3, 3), size=4).dtype == torch.bfloat16


def test_what_does_not_fit_is_named():
    query = torch.randn(1, 2, 12, 8)
    sorting = torch.eye(3)[None]
    with pytest.raises(ShapeError, match=r"a multiple of size=5: choose a size that divides"):
        sinkhorn_attention(query, query, query, sorting, size=5)
    with pytest.raises(ShapeError, match=r"sorting is \(1, 3, 3\); of 12 keys in blocks of 6 it needs .* or 1, 2, 2\)"):
        sinkhorn_attention(query, query, query, sorting, size=6)
    with pytest.raises(ShapeError, match=r"value \(1, 2, 11, 8\); it needs as many queries, keys and values"):
        sinkhorn_attention(query, query, query[:, :, 1:], sorting, size=4)
    with pytest.raises(ShapeError, match=r"sinkhorn has scores \(3, 4\); it needs"):
        sinkhorn(torch.zeros(3, 4))
    with pytest.raises(ConfigurationError, match="sinkhorn's iterations is 0"):
        sinkhorn(sorting, iterations=0)
    with pytest.raises(ConfigurationError, match="sinkhorn_attention's size is 0"):
        sinkhorn_attention(query, query, query, sorting, size=0)
