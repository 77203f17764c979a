"""MoBA, DSA and NSA against their formulas, written out query by query in float64."""

import math

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.errors import ConfigurationError, ShapeError
from regard.selection import (
    block_gate,
    gated_blocks,
    largest_scores,
    lightning_indices,
    native_sparse_attention,
    overlapping_blocks,
    selected_blocks,
)
from regard.selection.causal_blocks import CausalBlocks

BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 2, 6, 3, 53, 7


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=[LENGTH, 11], ids=["whole", "last queries"])
def queries(request, monkeypatch) -> int:
    """All queries, some rows of scores at a time, or the last ones alone."""
    monkeypatch.setattr(largest_scores, "SCORES_AT_ONCE", 7 * 53 * 12)
    return request.param


def tensors(queries: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = drawn(BATCH, HEADS, LENGTH, DIM), drawn(BATCH, KEY_HEADS, LENGTH, DIM), drawn(2, 3, LENGTH, 5)
    return query[:, :, LENGTH - queries :], key, value


def attended(query: Tensor, key: Tensor, value: Tensor, at: list[int]) -> Tensor:
    """One query over some keys; 0 over none."""
    if not at:
        return torch.zeros(value.shape[-1], dtype=value.dtype)
    return (key[at] @ query / math.sqrt(len(query))).softmax(-1) @ value[at]


def rows(queries: int) -> list[tuple[int, int, int, int, int]]:
    """Batch, head, key head, row and position of each query."""
    return [
        (batch, head, head * KEY_HEADS // HEADS, row, LENGTH - queries + row)
        for batch in range(BATCH)
        for head in range(HEADS)
        for row in range(queries)
    ]


@pytest.mark.parametrize(("size", "count"), [(8, 3), (5, 2), (64, 3)])
def test_mixture_of_block_attention(queries, size, count):
    query, key, value = tensors(queries)
    found = gated_blocks(query, key, size=size, count=count)
    output = regard.attention(query, key, value, mask=masks.causal() & masks.blocks(found, (1, size)))
    for batch, head, key_head, row, position in rows(queries):
        own = position // size
        means = [key[batch, key_head, b * size : (b + 1) * size].mean(0) for b in range(own)]
        earlier = sorted(range(own), key=lambda b: -float(query[batch, head, row] @ means[b]))[: count - 1]
        at = [k for b in (own, *earlier) for k in range(b * size, min((b + 1) * size, position + 1))]
        expected = attended(query[batch, head, row], key[batch, key_head], value[batch, key_head], at)
        torch.testing.assert_close(output[batch, head, row], expected)


def test_deepseek_sparse_attention(queries):
    query, key, value = tensors(queries)
    index_query, index_key = drawn(BATCH, 16, queries, 3), drawn(BATCH, LENGTH, 3)
    weights, count = drawn(BATCH, queries, 16), 9
    found = lightning_indices(index_query, index_key, weights, count=count)
    output = regard.attention(query, key, value, mask=masks.chosen(found.unsqueeze(1)))
    for batch, head, key_head, row, position in rows(queries):
        index = [
            sum(
                float(weights[batch, row, h] * torch.relu(index_query[batch, h, row] @ index_key[batch, k]))
                for h in range(16)
            )
            for k in range(position + 1)
        ]
        at = sorted(range(position + 1), key=lambda k: -index[k])[:count]
        expected = attended(query[batch, head, row], key[batch, key_head], value[batch, key_head], at)
        torch.testing.assert_close(output[batch, head, row], expected)


@pytest.mark.parametrize("padded", [0, 5])
def test_a_mask_says_which_keys_the_indexer_may_choose(queries, padded):
    """Columns are found, whatever the positions: with padding on the left these begin below 0."""
    index_query, index_key = drawn(BATCH, 16, queries, 3), drawn(BATCH, LENGTH, 3)
    weights, count, at = drawn(BATCH, queries, 16), 9, torch.arange(LENGTH) - padded
    at = torch.stack([at, torch.arange(LENGTH)])
    mask = masks.causal() & masks.window(before=13) & ~masks.prefix(0)
    found = lightning_indices(
        index_query, index_key, weights, count=count, mask=mask, key_positions=at, query_positions=at[:, -queries:]
    )
    assert found.shape == (BATCH, queries, count)
    for batch in range(BATCH):
        for row, column in enumerate(range(LENGTH - queries, LENGTH)):
            first = max(column - 13, padded if batch == 0 else 0)
            scores = torch.stack(
                [
                    (weights[batch, row] * (index_query[batch, :, row] @ index_key[batch, key]).relu()).sum()
                    for key in range(first, column + 1)
                ]
                or [torch.zeros(0, dtype=torch.float64).sum()]
            )
            best = [] if first > column else (scores.topk(min(count, len(scores))).indices + first).tolist()
            assert sorted(found[batch, row].tolist()) == sorted([*best, *[-1] * (count - len(best))])


SIZES = {"length": 6, "stride": 3, "size": 9, "count": 4}


def compressed_of(key: Tensor) -> Tensor:
    return overlapping_blocks(key, SIZES["length"], SIZES["stride"]).sin().mean(-2)


def importance(weights: Tensor, block: int) -> float:
    """Eq. 9 of NSA, whose blocks are counted from 1."""
    size, length = SIZES["size"] // SIZES["stride"], SIZES["length"] // SIZES["stride"]
    at = [size * (block + 1) - m - n - 1 for m in range(size) for n in range(length)]
    return sum(float(weights[i]) for i in at if 0 <= i < len(weights))


def test_native_sparse_attention(queries):
    (query, key, value), window = tensors(queries), 4
    keys, values, gates = compressed_of(key), compressed_of(value), torch.sigmoid(drawn(BATCH, HEADS, queries, 3))
    output = native_sparse_attention(query, key, value, (keys, values), gates, **SIZES, window=window)
    found = selected_blocks(query, keys, LENGTH, **SIZES)
    group = HEADS // KEY_HEADS
    for batch, head, key_head, row, position in rows(queries):
        ended = max((position + 1 - SIZES["length"]) // SIZES["stride"] + 1, 0)
        total = torch.zeros(ended, dtype=torch.float64)
        for other in range(key_head * group, (key_head + 1) * group):
            total += (keys[batch, key_head, :ended] @ query[batch, other, row] / math.sqrt(DIM)).softmax(-1)
        own = position // SIZES["size"]
        always = {0, own, max(own - 1, 0)}
        others = sorted(set(range(own)) - always, key=lambda b: -importance(total, b))
        blocks = [*always, *others][: max(SIZES["count"], len(always))]
        assert set(blocks) == set(found[batch, key_head, row].tolist()) - {-1}
        at = [k for b in blocks for k in range(b * SIZES["size"], min((b + 1) * SIZES["size"], position + 1))]
        own_query, expected = query[batch, head, row], torch.zeros(5, dtype=torch.float64)
        for gate, branch_keys, branch_values, chosen in (
            (0, keys, values, list(range(ended))),
            (1, key, value, at),
            (2, key, value, list(range(max(position + 1 - window, 0), position + 1))),
        ):
            branch = attended(own_query, branch_keys[batch, key_head], branch_values[batch, key_head], chosen)
            expected += gates[batch, head, row, gate] * branch
        torch.testing.assert_close(output[batch, head, row], expected)


def test_gradients_pass_to_all_but_the_selection():
    query, key, value = (tensor[:1, :, :13].requires_grad_() for tensor in tensors(LENGTH))
    weight, gates = drawn(DIM, DIM).requires_grad_(), torch.rand(1, HEADS, 13, 3, dtype=torch.float64).requires_grad_()

    def output(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, gates: Tensor) -> Tensor:
        compressed = compressed_of(key @ weight), compressed_of(value)
        return native_sparse_attention(query, key, value, compressed, gates, **SIZES, window=4)

    assert torch.autograd.gradcheck(output, (query, key, value, weight, gates), fast_mode=True)


def test_clusters_of_each_head():
    """Routing Transformer (Roy et al. 2021): keys and queries of one cluster, by ids of each head."""
    query, key, value = tensors(LENGTH)
    centers = drawn(HEADS, 4, DIM)
    keys = key.repeat_interleave(HEADS // KEY_HEADS, 1)
    of_queries, of_keys = ((tensor @ centers.mT).argmax(-1) for tensor in (query, keys))
    output = regard.attention(query, key, value, mask=masks.causal() & masks.documents(of_queries, of_keys))
    for batch, head, key_head, row, position in rows(LENGTH):
        at = [k for k in range(position + 1) if of_keys[batch, head, k] == of_queries[batch, head, row]]
        expected = attended(query[batch, head, row], key[batch, key_head], value[batch, key_head], at)
        torch.testing.assert_close(output[batch, head, row], expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, k: gated_blocks(q, k, size=0, count=1), ConfigurationError, "gated_blocks's size is 0"),
        (lambda q, k: gated_blocks(q[..., :3], k, size=2, count=1), ShapeError, r"has query \(2, 6, 53, 3\) and key"),
        (lambda q, k: gated_blocks(q[:, :5], k, size=2, count=1), ShapeError, "where key heads divide heads"),
        (lambda q, k: lightning_indices(q, k, q, count=2), ShapeError, "index heads, M, D"),
        (
            lambda q, k: lightning_indices(
                q, k[:, 0], q[..., 0].mT, count=2, mask=masks.where(keep=torch.ones(6, 53, 53, dtype=torch.bool))
            ),
            ShapeError,
            "which differs between 6 heads; all heads share what is chosen",
        ),
        (
            lambda q, k: selected_blocks(q, compressed_of(k), 53, length=4, stride=3, size=9, count=2),
            ShapeError,
            "stride 3, which does not divide both length 4 and size 9",
        ),
        (
            lambda q, k: native_sparse_attention(q, k, k, (k, k), q[..., :3], **SIZES, window=4),
            ShapeError,
            "has 53 compressed keys, 53 compressed values .* need 16 of them",
        ),
    ],
)
def test_what_does_not_fit(call, error, message):
    query, key, _ = tensors(LENGTH)
    with pytest.raises(error, match=message):
        call(query, key)


def test_blocks_that_are_decided_hide_their_scores():
    """Whatever a later block has, as NaN, it is not chosen; blocks that are seen in any case are."""
    blocks = CausalBlocks(5, 11, 3, local=2, initial=1)  # positions 6 to 10, whose own blocks are 2, 2, 2, 3, 3
    scores = torch.full((2, 5, 4), float("nan"))
    expected = torch.tensor(
        [[torch.inf, torch.inf, torch.inf, -torch.inf]] * 3 + [[torch.inf, torch.nan, torch.inf, torch.inf]] * 2
    )
    for _ in range(2):  # the second reads what is memoized
        torch.testing.assert_close(blocks.decide(scores, slice(None)), expected.expand(2, -1, -1), equal_nan=True)
        torch.testing.assert_close(
            blocks.decide(scores[:, 2:4], slice(2, 4)), expected[2:4].expand(2, -1, -1), equal_nan=True
        )
    doubled = blocks.decide(scores.double(), slice(0, 5))
    assert doubled.dtype is torch.float64


def test_poisoned_keys_after_a_query_choose_no_other_block():
    query, key, _ = (tensor.float() for tensor in tensors(LENGTH))
    poisoned = key.clone()
    poisoned[:, :, 40:] = float("nan")
    for found, hurt in (
        (gated_blocks(query, key, size=8, count=3), gated_blocks(query, poisoned, size=8, count=3)),
        (
            lightning_indices(query, key[:, 0], torch.ones(BATCH, LENGTH, HEADS), count=9),
            lightning_indices(query, poisoned[:, 0], torch.ones(BATCH, LENGTH, HEADS), count=9),
        ),
    ):
        assert torch.equal(found[..., :40, :], hurt[..., :40, :])


@pytest.mark.parametrize("keys", [1, 7, 8, 16, 19])
def test_means_of_blocks_of_which_the_last_has_fewer_keys(keys):
    key = drawn(2, 3, keys, 5)
    expected = torch.stack([part.mean(-2) for part in key.split(8, -2)], -2)
    torch.testing.assert_close(block_gate._block_means(key, 8), expected)
