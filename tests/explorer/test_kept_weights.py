"""Heads ranked by the tokens that one keeps, and the largest weights of rows and columns, against all weights."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.errors import AtlasError, ConfigurationError
from regard.explorer import Atlas, rank_heads, record
from regard.explorer.api import AtlasAPI
from regard.explorer.kept_weights import indices, kept_values, top_values

LENGTH = 61


def model_and_text(mask=None):
    torch.manual_seed(0)
    layers = [regard.nn.Attention(regard.nn.Projections(24, num_heads=6, num_kv_heads=2), mask=mask) for _ in range(3)]
    return nn.Sequential(*layers).eval(), torch.randn(1, LENGTH, 24)


def recorded(model, text, tokens=None):
    with torch.no_grad(), record(model, dtype="keep") as recording:
        model(text)
    return recording.atlas(tokens=tokens or [f"t{i}" for i in range(text.shape[1])])


@pytest.fixture(scope="module")
def atlas():
    return recorded(*model_and_text(regard.masks.causal()))


def whole(of, by="weight"):
    """All weights, or contributions, of a map, (heads, M, N)."""
    everything = slice(0, of.queries), slice(0, of.keys)
    tell = of.weights if by == "weight" else of.contributions
    return np.stack([tell(head, *everything) for head in range(of.heads)]).astype(np.float64)


@pytest.mark.parametrize("by", ["weight", "contribution"])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([40], [3]), ([5, 40, 41, 60], [3, 4, 50]), (None, [0, 7]), ([9, 33], None)],
    ids=["a pair", "several", "a key", "a query"],
)
def test_kept_values_are_means_of_sums(atlas, by, queries, keys):
    for of in atlas.maps:
        all_of = whole(of, by)
        if keys is None:
            expected = all_of[:, queries].max(-1).mean(-1)
        else:
            rows = all_of if queries is None else all_of[:, queries]
            expected = rows[:, :, keys].sum(-1).mean(-1)
        np.testing.assert_allclose(kept_values(of, queries, keys, by), expected, rtol=1e-5, atol=1e-6)


def test_pairs_that_do_not_exist_are_no_number(atlas):
    assert np.isnan(kept_values(atlas.maps[0], [3], [40], "weight")).all()
    assert not np.isnan(kept_values(atlas.maps[0], [3, 41], [40], "weight")).any()


def test_heads_are_ranked_over_all_layers(atlas):
    for by in ("weight", "contribution"):
        found = rank_heads(atlas, [40], [3], by=by)
        values = {(at, head): whole(of, by)[head, 40, 3] for at, of in enumerate(atlas.maps) for head in range(6)}
        assert [(each.map, each.head) for each in found] == sorted(values, key=lambda each: -values[each])
    assert rank_heads(atlas, [40], [3], by="weight") != rank_heads(atlas, [40], [3], by="contribution")


def test_given_effects_rank_heads_by_their_size(atlas):
    effects = {
        (of.name, head): (-1.0) ** head * (10 * at + head) for at, of in enumerate(atlas.maps) for head in range(6)
    }
    del effects["1", 2]
    found = rank_heads(atlas, [0], [0], by=effects)
    assert [(each.map, each.head) for each in found[:2]] == [(2, 5), (2, 4)]
    assert (found[-1].map, found[-1].head) == (1, 2)
    assert math.isnan(found[-1].value)


def test_changes_between_two_atlases():
    model, text = model_and_text(regard.masks.causal())
    before = recorded(model, text)
    with torch.no_grad():
        model.get_parameter("1.projections.query.weight")[:4] *= 3  # head 0 of the second layer, and all that reads it
    now = recorded(model, text)
    (old,), (new,) = ([whole(of)] for of in (before.maps[1], now.maps[1]))
    pair = rank_heads(now, [40], [3], by=before)
    values = {(each.map, each.head): each.value for each in pair}
    assert values[1, 0] == pytest.approx(new[0, 40, 3] - old[0, 40, 3], abs=1e-6)
    assert values[0, 0] == values[1, 3] == 0.0
    assert [abs(each.value) for each in pair] == sorted((abs(each.value) for each in pair), reverse=True)
    rows = {(each.map, each.head): each.value for each in rank_heads(now, [40, 50], None, by=before)}
    assert rows[1, 0] == pytest.approx(np.abs(new[0] - old[0])[[40, 50]].sum(-1).mean() / 2, abs=1e-6)
    other = recorded(model, text[:, :60])
    with pytest.raises(AtlasError, match=r"has 61 × 61 tokens and 6 heads, and that of the other atlas 60 × 60 and 6"):
        rank_heads(now, [1], [1], by=other)
    with pytest.raises(AtlasError, match="the other atlas has no map '0', call 0, sequence 0"):
        rank_heads(now, [1], [1], by=Atlas.from_weights([torch.eye(61)[None]]))


def test_only_maps_of_the_same_tokens_are_ranked():
    weights = torch.full((2, 4, 3), 1 / 3), torch.full((2, 3, 3), 1 / 3), torch.full((2, 4, 3), 1 / 3)
    atlas = Atlas.from_weights(list(weights))
    assert {each.map for each in rank_heads(atlas, [3], [2])} == {0, 2}
    assert {each.map for each in rank_heads(atlas, [1], [2], map=1)} == {1}


@pytest.mark.parametrize("by", ["weight", "contribution"])
@pytest.mark.parametrize("side", ["query", "key"])
def test_the_largest_of_a_row_and_of_a_column(atlas, side, by):
    of = atlas.maps[1]
    line = (whole(of, by)[2, 40] if side == "query" else whole(of, by)[2, :, 40]).astype(np.float64)
    found = top_values(of, 2, side, 40, 5, by)
    assert found["indices"] == np.argsort(-line, kind="stable")[:5].tolist()
    chosen = found["weights"] if by == "weight" else found["contributions"]
    np.testing.assert_allclose(chosen, np.sort(line)[::-1][:5], rtol=1e-5, atol=1e-6)
    weights = whole(of)[2, 40] if side == "query" else whole(of)[2, :, 40]
    assert found["rest"] == pytest.approx(weights.sum() - weights[found["indices"]].sum(), abs=1e-5)
    assert found["tokens"] == [f"t{at}" for at in found["indices"]]
    assert len(top_values(of, 2, side, 40, 500, by)["indices"]) == (41 if side == "query" else 21)


def test_rows_with_nothing_and_rows_with_nan():
    class Attending(nn.Module):
        def forward(self, *tensors, **options):
            return regard.attention(*tensors, **options)

    query = torch.randn(1, 1, 4, 8)
    key = query.clone()
    key[0, 0, 2] = math.nan
    with record(Attending()) as recording:
        recording.model(query, key, query, mask=regard.masks.causal() & ~regard.masks.global_tokens([0]))
    of = recording.atlas().maps[0]
    assert top_values(of, 0, "query", 3, 3, "weight")["broken"]
    nothing = top_values(of, 0, "query", 0, 3, "weight")
    assert (nothing["indices"], nothing["broken"], nothing["rest"]) == ([], False, 0.0)
    assert kept_values(of, [3], [1], "weight").tolist() == [math.inf]
    assert kept_values(of, [1], [1], "weight").tolist() == pytest.approx([1.0])


def test_a_row_of_a_hundred_thousand_keys_takes_milliseconds():
    class Attending(nn.Module):
        def forward(self, *tensors, **options):
            return regard.attention(*tensors, **options)

    query, key = torch.randn(1, 1, 7, 64), torch.randn(1, 1, 100_003, 64)
    with torch.no_grad(), record(Attending()) as recording:
        recording.model(query, key, key)
    of = recording.atlas().maps[0]
    of.key_tokens  # noqa: B018  # read once for all rows
    times = []
    for row in range(7):
        start = time.perf_counter()
        top_values(of, 0, "query", row, 8, "weight")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1  # some 10 ms; all weights of the row are computed, and no other row


WRONG = [
    (([61], [0], "weight"), r"has the rows 0 to 60; there is no 61"),
    (([0], [-1], "weight"), r"has the columns 0 to 60; there is no -1"),
    (([], [0], "weight"), r"0 rows were asked about; it needs to be 1 to 64"),
    ((range(65), [0], "weight"), r"65 rows were asked about"),
    ((None, None, "weight"), "heads are ranked by tokens"),
    (([0], [0], "ink"), "heads are ranked by 'weight' and by 'contribution'; there is no 'ink'"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG)
def test_what_is_not_there(atlas, asked, message):
    with pytest.raises(AtlasError, match=message):
        kept_values(atlas.maps[0], *asked)


def test_norms_that_are_not_there():
    of = Atlas.from_weights([torch.eye(3)[None]]).maps[0]
    assert not of.has_value_norms
    with pytest.raises(
        AtlasError, match="the map 'layers.0' has no norms of values, so that contributions are not known"
    ):
        kept_values(of, [0], [0], "contribution")
    assert top_values(of, 0, "query", 0, 1, "weight")["contributions"] is None
    for side, count, message in (("row", 1, "it is 'row'"), ("key", 0, "it needs to be 1 to 4,096")):
        with pytest.raises(AtlasError, match=message):
            top_values(of, 0, side, 0, count, "weight")
    with pytest.raises(AtlasError, match="the atlas has the maps 0 to 0; there is no map 1"):
        rank_heads(Atlas.from_weights([torch.eye(3)[None]]), [0], [0], map=1)


@pytest.mark.parametrize("text", ["", "1.", "-1", "1.x", "١", "1,2", "9" * 13])
def test_indices_of_a_request_are_plain(text):
    with pytest.raises(ConfigurationError, match="queries is .*; it needs indices such as queries=3.4, or - for all"):
        indices("queries", text)


def test_rankings_are_json(atlas):
    answers = AtlasAPI(atlas)
    assert answers.meta()["maps"][0]["norms"] is True
    listed = answers.ranking(0, (3,), (40,), "weight")["heads"]
    assert len(listed) == 18
    assert {each["value"] for each in listed} == {None}
    assert answers.kept(0, (40,), (3,), "weight").shape == (6,)
    assert answers.norms(0, 1).shape == (LENGTH,)
    assert {each["value"] for each in answers.changes(AtlasAPI(atlas), 0, (40,), (3,))["heads"]} == {0.0}
