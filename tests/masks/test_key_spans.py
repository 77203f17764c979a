"""Densities from spans of keys and from distances, without a tile or a pair."""

import pytest
import torch

from regard import masks
from regard.errors import MaskError

IDS = torch.tensor([0] * 5 + [1] * 11 + [2] + [5] * 13)


@pytest.fixture
def no_tiles(monkeypatch):
    """No tile is evaluated."""
    monkeypatch.setattr(masks.Mask, "verdicts", lambda *_: pytest.fail("tiles were evaluated"))


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("queries", "keys"), [(30, 30), (7, 30), (30, 7)])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(before=6, after=3),
        masks.window(after=2),
        masks.window(),
        masks.prefix(9),
        masks.documents(IDS),
        masks.causal() & masks.window(before=9),
        masks.causal() & (masks.window(before=4) | masks.prefix(2)),
        masks.causal() & masks.documents(IDS) & ~masks.window(before=1),
        ~(masks.causal() | masks.prefix(3)) | masks.documents(IDS),
        masks.strided(4),
        masks.causal() & masks.dilated(before=3, step=2),
    ],
    ids=repr,
)
def test_a_density_is_that_of_the_pairs(mask, queries, keys):
    at = {"query_positions": range(queries)} if queries > keys else {}
    assert mask.density(queries, keys, **at) == mask.dense(queries, keys, **at).double().mean().item()


@pytest.mark.usefixtures("no_tiles")
def test_positions_of_a_shard():
    mask, queries, keys = masks.causal() & masks.window(before=20), range(40, 60), range(25, 60)
    dense = mask.dense(20, 35, query_positions=queries, key_positions=keys)
    assert mask.density(20, 35, query_positions=queries, key_positions=keys) == dense.double().mean().item()


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("queries", [range(30), range(7), range(11, 25)])
def test_documents_of_queries_and_of_keys(queries):
    drawn = torch.randint(9, (30,), generator=torch.Generator().manual_seed(1))  # in any order, and ids without keys
    mask = masks.documents(drawn, (IDS[:23] // 2 * 2)) & ~masks.window(before=1)
    at = {"query_positions": queries, "key_positions": range(3, 20)}
    assert mask.density(len(queries), 17, **at) == mask.dense(len(queries), 17, **at).double().mean().item()


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents(IDS.flip(0)),
        masks.documents(torch.stack([IDS, IDS // 2])),
        masks.documents(torch.stack([IDS, IDS // 2])[None]),
        masks.documents(IDS, IDS.flip(0)),
        masks.documents(IDS, IDS[None]),
    ],
    ids=repr,
)
def test_documents_that_are_no_spans(mask):
    assert mask.key_span() is None
    assert mask.density(30, 30) == pytest.approx(mask.dense(30, 30).double().mean().item(), abs=1e-12)


def test_a_million_tokens_look_at_no_tile(no_tiles):
    length, ids = 2**20, torch.arange(2**20) // 3000
    sinks = masks.causal() & (masks.window(before=4095) | masks.prefix(4))
    early = sum(range(1, 4101))
    assert sinks.density(length, length) * length**2 == early + (length - 4100) * 4100
    whole, rest = divmod(length, 3000)
    pairs = whole * 3000 * 3001 / 2 + rest * (rest + 1) / 2
    assert (masks.causal() & masks.documents(ids)).density(length, length) * length**2 == pairs


def test_a_position_without_an_id():
    with pytest.raises(MaskError, match="is for 30 positions, from 0, but queries or keys sit at"):
        (masks.causal() & masks.documents(IDS)).density(2, 40)


def test_many_terms_are_counted_by_tiles():
    mask = masks.prefix(1)
    for start in range(2, 12):
        mask = mask | (masks.prefix(start) & masks.window(before=start))
    assert mask.density(20, 20) == pytest.approx(mask.dense(20, 20).double().mean().item(), abs=1e-12)
