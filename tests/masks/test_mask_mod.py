"""Masks from functions, against FlexAttention; their tiles; errors."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

from regard import masks
from regard.core.intervals import PARTIAL
from regard.errors import MaskError

BATCH, HEADS, N = 2, 3, 24
anything: Any = masks

ids = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [0] * 12 + [1] * 12])
lengths = torch.tensor([5, 20])
anchors = torch.tensor([3, 17])
pairs = torch.rand(N, N) < 0.5
threshold = torch.tensor(11)


def causal(b, h, q, k):
    return q >= k


def local(b, h, q, k):
    return torch.abs(q - k) <= 4


def per_document(b, h, q, k):
    return (q >= k) & (ids[b, q] == ids[b, k])


def natten(b, h, q, k):
    """Neighbours in a grid of 4 × 6, the window pushed inside at its edges."""
    row, column, other_row, other_column = q // 6, q % 6, k // 6, k % 6
    across = (column.clamp(1, 4) - other_column).abs() <= 1
    return across & ((row.clamp(1, 2) - other_row).abs() <= 1)


MODS: dict[str, Any] = {
    "causal": causal,
    "local": local,
    "per_document": per_document,
    "natten": natten,
    "prefix": lambda b, h, q, k: k < lengths[b],
    "per_head": lambda b, h, q, k: q - k <= h * 4 + 1,
    "pairs": lambda b, h, q, k: pairs[q, k],
    "threshold": lambda b, h, q, k: k < threshold,
    "row": lambda b, h, q, k: pairs[q][k],
    "reduced": lambda b, h, q, k: (q == anchors).any() | (k <= q),
    "reduced to itself": lambda b, h, q, k: (k <= q).any() & torch.all(q > 2),
    "stacked": lambda b, h, q, k: torch.stack([q > 3, k < 9]).all(),
    "broadcast": lambda b, h, q, k: (q < anchors).sum() > k // 12,
    "and": and_masks(causal, local),
    "or": or_masks(local, per_document, lambda b, h, q, k: k < 2),
    "constant": lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
    "floating": lambda b, h, q, k: (q - k) * 0.5 <= torch.sqrt(q + 1.0),
}
READS = {
    "per_document": {"batch": BATCH},
    "prefix": {"batch": BATCH},
    "or": {"batch": BATCH},
    "per_head": {"heads": HEADS},
}


@pytest.mark.parametrize("name", MODS)
def test_it_means_what_flex_attention_means(name):
    mask = masks.from_mod(MODS[name], **READS.get(name, {}))
    dense = mask.dense(N, N)
    assert dense.expand(BATCH, HEADS, N, N).equal(create_mask(MODS[name], BATCH, HEADS, N, N, "cpu"))
    part = mask.dense(3, 5, query_positions=torch.tensor([7, 2, 9]), key_positions=torch.arange(5, 10))
    assert part.equal(dense[..., [7, 2, 9], 5:10])
    at = torch.tensor([[7, 2], [0, 23]])
    per_batch = mask.dense(2, N, query_positions=at).expand(BATCH, HEADS, 2, N)
    whole = dense.expand(BATCH, HEADS, N, N)
    assert per_batch.equal(torch.stack([whole[0][:, at[0]], whole[1][:, at[1]]]))


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_pairs(name, sizes):
    queries, keys = sizes
    mask = masks.from_mod(MODS[name], **READS.get(name, {}))
    at: dict[str, Any] = {"query_positions": torch.arange(queries), "key_positions": torch.arange(keys)}
    assert mask.dense(queries, keys, **at).shape[-2:] == sizes
    assert mask.tiles(queries, keys, 4, **at).shape[-2:] == (-(-queries // 4), -(-keys // 4))


@pytest.mark.parametrize(
    ("mod", "same"),
    [
        (causal, masks.causal()),
        (local, masks.window(4, 4)),
        (MODS["and"], masks.causal() & masks.window(4, 4)),
        (MODS["prefix"], masks.prefix(lengths)),
        (per_document, masks.causal() & masks.documents(ids)),
    ],
)
def test_tiles_are_as_sharp_as_those_of_the_mask_itself(mod, same):
    mask = masks.from_mod(mod, batch=BATCH) if mod in (per_document, MODS["prefix"]) else masks.from_mod(mod)
    for size in (1, 4, (5, 3)):
        assert mask.tiles(N, N, size).equal(same.tiles(N, N, size))


def test_tiles_look_at_no_pair():
    long = masks.from_mod(causal)
    assert long.tiles(65_536, 65_536).equal(masks.causal().tiles(65_536, 65_536))


@pytest.mark.parametrize("name", ["reduced", "reduced to itself", "stacked", "row", "floating", "broadcast"])
def test_what_intervals_do_not_tell_is_partial(name):
    assert (masks.from_mod(MODS[name]).tiles(N, N, 4) == PARTIAL).all()


def test_repr_and_equality():
    assert repr(masks.from_mod(causal)) == "from_mod(causal)"
    assert repr(masks.from_mod(per_document, batch=2)) == "from_mod(per_document, batch=2)"
    assert repr(masks.from_mod(lambda b, h, q, k: k <= h, heads=3)) == "from_mod(<lambda>, heads=3)"
    assert masks.from_mod(causal) == masks.from_mod(causal) != masks.from_mod(local)
    assert len({masks.from_mod(causal), masks.from_mod(causal)}) == 1


weight = torch.zeros(N, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (3, r"from_mod needs a function \(b, h, q, k\) -> bool; it was given a int"),
        (masks.causal(), "it was given a Causal"),
        (lambda b, h, q, k: q - k, r"returned torch.int64 of shape \(\) for one pair; it needs one bool"),
        (lambda b, h, q, k: (q - k) * 0.5, r"returned torch.float32 of shape \(\).*added to the scores are a bias"),
        (lambda b, h, q, k: anchors < k, r"returned torch.bool of shape \(2,\) for one pair; it needs one bool"),
        (lambda b, h, q, k: pairs, r"returned torch.bool of shape \(24, 24\) for one pair"),
        (lambda b, h, q, k: True, "returned True for one pair; it needs a bool tensor"),
        (lambda b, h, q, k: None, "returned None for one pair; it needs a bool tensor"),
        (lambda b, h, q, k: weight[k] > 0, "reads a tensor that requires a gradient.*give it tensor.detach()"),
        (lambda b, h, q, k: weight[k].sigmoid(), "reads a tensor that requires a gradient.*or learn a bias instead"),
        (
            lambda b, h, q, k: k <= lengths[b],
            r"reads b, so .* differs between batch: .* from_mod\(function, batch=...\)",
        ),
        (lambda b, h, q, k: k <= h, r"reads h, so .* differs between heads: .* from_mod\(function, heads=...\)"),
    ],
)
def test_refused(function, match):
    with pytest.raises(MaskError, match=match):
        anything.from_mod(function)


def test_refused_sizes():
    with pytest.raises(MaskError, match="from_mod's batch is -1; it needs at least 0"):
        masks.from_mod(causal, batch=-1)
    with pytest.raises(MaskError, match="from_mod's heads needs a whole number; it is 2.0"):
        anything.from_mod(causal, heads=2.0)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (
            lambda b, h, q, k: (q > 3) and (k > 3),
            "cannot be evaluated: .*& | ~ and torch.where stand for and, or, not and if",
        ),
        (lambda b, h, q, k: k if q > 3 else k > 1, "cannot be evaluated"),
        (lambda b, h, q, k: [q > 3, q > 4][int(k)], "cannot be evaluated"),
        (lambda b, h, q, k: q.nothing(), "cannot be evaluated: AttributeError: .*nothing"),
        (lambda b, h, q: q > 0, "cannot be evaluated: TypeError"),
        (lambda b, h, q, k: anchors[k] > 5, "cannot be evaluated: IndexError: index 2 is out of bounds"),
        (lambda b, h, q, k: torch.zeros(0).bool()[k], "cannot be evaluated: IndexError"),
    ],
)
def test_functions_that_fail_when_used(function, match):
    mask = anything.from_mod(function)  # the one pair that it is asked about at first tells nothing
    with pytest.raises(MaskError, match=match):
        mask.dense(N, N)
    assert (mask.tiles(N, N, 4) == PARTIAL).all()
