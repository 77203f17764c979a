"""Hops in parts: the same pairs, keys in buffers that are used in turn, and a bounded number of bytes at a time."""

import pytest
import torch
from ring_cases import RingCase
from test_ring_attention import check

import regard.ring as ring
from regard import biases, masks
from regard.kernels.validation import make_problem
from regard.ring.hops import count, plan_hops
from regard.ring.key_exchange import PART_BYTES, PartCounts, ReusedBuffers, hop_parts
from regard.ring.layout import place


def shard_problem(heads: int = 8, key_heads: int = 8, rows: int = 8, **options):
    query, key = (torch.zeros(1, number, rows, 64) for number in (heads, key_heads))
    return make_problem(query, key, key, **options)


@pytest.mark.parametrize(
    ("key_heads", "options", "expected"),
    [
        (8, {"mask": masks.causal()}, (8, 2)),
        (2, {"mask": masks.causal()}, (2, 8)),
        (1, {}, (1, 16)),
        (8, {"bias": biases.alibi(8)}, (1, 16)),
        (8, {"dropout_p": 0.1}, (1, 16)),
        (8, {"mask": masks.from_mod(lambda b, h, q, k: q - k < h, heads=8)}, (1, 16)),
    ],
)
def test_heads_are_parted_where_they_are_alike(key_heads, options, expected):
    counts = PartCounts.for_problem(shard_problem(key_heads=key_heads, **options), 2**20)
    assert (counts.heads, counts.keys) == expected


def test_small_shards_are_not_cut():
    bytes_per_key = 2 * 8 * 64 * 4
    for keys, parts in ((8, 1), (2 * PART_BYTES // bytes_per_key, 2), (7 * PART_BYTES // bytes_per_key, 4)):
        counts = PartCounts.for_problem(shard_problem(), keys)
        assert counts.heads * counts.keys == parts


@pytest.mark.parametrize("counts", [PartCounts(4, 1), PartCounts(1, 3), PartCounts(2, 2)])
@pytest.mark.parametrize("layout", [ring.Contiguous(), ring.Zigzag(), ring.Contiguous((100, 700, 200))])
def test_parts_have_each_pair_of_each_head_once(layout, counts):
    length, processes, heads, key_heads = 1000, 3, 8, 4
    mask = masks.causal() & (masks.window(before=300) | masks.prefix(5))
    shards, met = place(layout, length, processes), torch.zeros(heads, length, length, dtype=torch.int64)
    sent, received = {}, {}
    for rank in range(processes):
        problem, rows = shard_problem(heads, key_heads, shards.lengths[rank], mask=mask), shards.positions(rank)
        parts = hop_parts(plan_hops(problem, shards, shards, rank), problem, counts)
        for part in parts:
            hop = part.hop
            owned = shards.positions(hop.source)
            keys = torch.cat([owned[span] for span in hop.received] or [owned[:0]])
            if part is not parts[0]:
                if hop.sent:
                    sent.setdefault((rank, hop.destination), []).append((hop.sent, part.key_heads))
                if hop.received:
                    received.setdefault((hop.source, rank), []).append((hop.received, part.key_heads))
                assert count(hop.received) <= -(-max(shards.lengths) // counts.keys // 64) * 64 + 64
            for block in hop.blocks:
                queries, columns = torch.tensor(block.query_positions), torch.tensor(block.key_positions)
                assert rows[block.rows].equal(queries)
                assert keys[block.columns].equal(columns)
                met[part.query_heads or slice(None), queries[:, None], columns] += 1
    assert met.max() == 1
    assert bool((met.bool() | ~mask.dense(length, length)).all())
    assert sent == received


def test_buffers_are_used_in_turn():
    buffers, tensor = ReusedBuffers(2), torch.zeros(1, 2, 5, 3)
    first, second, third = (buffers.rows_like(tensor, rows) for rows in (4, 5, 2))
    assert (first.shape, third.shape) == ((1, 2, 4, 3), (1, 2, 2, 3))
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("layout", [ring.Zigzag(), ring.Contiguous((250, 20, 130)), ring.Striped()])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "causal", "heads": 4, "key_heads": 2},
        {"mask": "sinks and window", "reach": 90, "sinks": True},
        {"mask": "heads", "bias": "sum", "dropout": 0.3},
        {"mask": "none", "heads": 6, "key_heads": 3, "batch": (2, 1), "softcap": 2.0},
    ],
    ids=lambda options: options["mask"],
)
def test_parts_of_hops(pool, layout, options):
    check(pool, RingCase(3, 400, layout=layout, in_parts=True, **options), 3)
