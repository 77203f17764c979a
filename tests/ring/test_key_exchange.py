"""Hops in parts: the same pairs, keys in buffers that are used in turn, and a bounded number of bytes at a time."""

import pytest
import torch
from ring_cases import RingCase
from test_ring_attention import check

import regard.ring as ring
from regard import biases, masks
from regard.kernels.validation import make_problem
from regard.ring import key_exchange
from regard.ring.hops import count, plan_hops
from regard.ring.key_exchange import PART_BYTES, PartCounts, ReusedBuffers, heads_alike, hop_parts
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
    problem = shard_problem(key_heads=key_heads, **options)
    counts = PartCounts.for_keys(problem, 2**20, by_heads=heads_alike(problem))
    assert (counts.heads, counts.keys) == expected


def test_small_messages_are_not_cut():
    bytes_per_key = 2 * 8 * 64 * 4
    for keys, parts in ((8, 1), (2 * PART_BYTES // bytes_per_key, 2), (7 * PART_BYTES // bytes_per_key, 4)):
        counts = PartCounts.for_keys(shard_problem(), keys, by_heads=True)
        assert counts.heads * counts.keys == parts


@pytest.mark.parametrize(("by_heads", "part_bytes"), [(True, 2**17), (False, 2**17), (True, 2**14), (True, 2**30)])
@pytest.mark.parametrize("layout", [ring.Contiguous(), ring.Zigzag(), ring.Contiguous((100, 700, 200))])
def test_parts_have_each_pair_of_each_head_once(monkeypatch, layout, by_heads, part_bytes):
    length, processes, heads, key_heads = 1000, 3, 8, 4
    monkeypatch.setattr(key_exchange, "PART_BYTES", part_bytes)
    mask = masks.causal() & (masks.window(before=300) | masks.prefix(5))
    shards, met = place(layout, length, processes), torch.zeros(heads, length, length, dtype=torch.int64)
    sent, received = {}, {}
    for rank in range(processes):
        problem, rows = shard_problem(heads, key_heads, shards.lengths[rank], mask=mask), shards.positions(rank)
        plan = plan_hops(problem, shards, shards, rank)
        parts = hop_parts(plan, problem, max(shards.lengths), by_heads=by_heads)
        assert [part.number for part in parts] == sorted({part.number for part in parts})
        for part in parts:
            hop = part.hop
            owned = shards.positions(hop.source)
            keys = torch.cat([owned[span] for span in hop.received] or [owned[:0]])
            if part is not parts[0]:
                if hop.sent:
                    sent.setdefault((rank, hop.destination), []).append((part.number, hop.sent, part.sent_heads))
                if hop.received:
                    received.setdefault((hop.source, rank), []).append((part.number, hop.received, part.key_heads))
                width = key_heads if part.key_heads is None else part.key_heads.stop - part.key_heads.start
                most = max(2 * part_bytes, max(shards.lengths) * key_heads * 512 // 16)  # keys and values: 512 bytes
                assert count(hop.received) * width * 512 <= most + 64 * width * 512
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


ORDERS = [
    {"mask": "causal window", "reach": 90},
    {"mask": "window", "reach": 70},
    {"mask": "documents"},
    {"mask": "near and first", "reach": 60},  # neighbours of the first process have no hop that it has
    {"mask": "none", "heads": 6, "key_heads": 3},
    {"mask": "blocks", "reach": 32},
]


@pytest.mark.parametrize("layout", [ring.Contiguous(), ring.Zigzag(), ring.Contiguous((250, 20, 10, 120))])
@pytest.mark.parametrize("options", ORDERS, ids=lambda options: options["mask"])
def test_both_ends_post_messages_in_the_same_order(pool, layout, options):
    """As a backend without tags needs it: each message meets the one of its size and kind at the other end."""
    case = RingCase(5, 400, layout=layout, in_parts=True, **options)
    posted = pool.run("message_order", 4, case=case)
    for sender in range(4):
        for receiver in range(4):
            sent = [message for kind, peer, *message in posted[sender] if (kind, peer) == ("send", receiver)]
            received = [message for kind, peer, *message in posted[receiver] if (kind, peer) == ("receive", sender)]
            assert sent == received
    kinds = {tag for messages in posted for _, _, tag, _ in messages}
    assert kinds == {"key", "value", "key gradient", "value gradient"} or options["mask"] == "documents"
