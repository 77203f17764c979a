"""What is told of an atlas, and what is refused before anything is computed."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.errors import AtlasError, ConfigurationError
from regard.explorer import Atlas, record
from regard.explorer.api import AtlasAPI, number, read_query, span, word
from regard.explorer.recording import with_detected_roles

LENGTH = 90


@pytest.fixture(scope="module")
def atlas():
    torch.manual_seed(0)
    layer = regard.nn.Attention(regard.nn.Projections(12, num_heads=3), mask=regard.masks.causal())
    with torch.no_grad(), record(torch.nn.Sequential(layer)) as recording:
        recording.model(torch.randn(2, LENGTH, 12))
    return recording.atlas(tokens=[f"word {i}" for i in range(LENGTH)], title="a test")


@pytest.fixture
def answers(atlas):
    return AtlasAPI(atlas)


def test_meta_is_json_and_says_what_there_is(atlas, answers):
    meta = json.loads(json.dumps(answers.meta(), allow_nan=False))
    assert (meta["version"], meta["title"], meta["overview"]) == (1, "a test", True)
    assert meta["profiles"] == ["entropy", "received", "largest"]
    first = meta["maps"][0]
    assert [of["sequence"] for of in meta["maps"]] == [0, 1]
    assert (first["name"], first["kind"], first["heads"], first["queries"]) == ("0", "self", 3, LENGTH)
    assert first["levels"] == [list(shape) for shape in atlas.maps[0].levels]
    assert first["cells"][0] == list(atlas.maps[0].cell(0))
    assert first["metrics"]["entropy"] == pytest.approx(atlas.maps[0].metrics["entropy"].tolist())
    assert first["roles"] == [[dict(role) for role in of_head] for of_head in atlas.maps[0].roles]


def test_a_metric_that_is_no_number_is_null():
    atlas = Atlas.from_weights([torch.zeros(1, 2, 2)])
    values = AtlasAPI(atlas).meta()["maps"][0]["metrics"]["entropy"]
    assert all(value is None or math.isfinite(value) for value in values)
    json.dumps(values, allow_nan=False)


def test_weights_are_the_atlas_s_and_nan_where_there_is_no_pair(atlas, answers):
    told = answers.weights(1, 2, (3, 60), (10, 90))
    expected = atlas.maps[1].weights(2, slice(3, 60), slice(10, 90))
    exists = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))[3:60, 10:90]
    assert told.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(told), ~exists)
    np.testing.assert_array_equal(told[exists], expected[exists])


def test_levels_profiles_and_tokens_are_the_atlas_s(atlas, answers):
    of = atlas.maps[0]
    for level in range(len(of.levels)):
        for reduce in ("max", "mean"):
            np.testing.assert_array_equal(answers.pooled(0, 1, level, reduce), of.pooled(1, level, reduce))
    whole = answers.overview(0, "max")
    assert whole.shape == (3, *of.levels[-1])
    np.testing.assert_array_equal(whole[2], of.pooled(2, len(of.levels) - 1, "max"))
    np.testing.assert_array_equal(answers.profile(0, 0, "entropy"), of.entropy(0))
    np.testing.assert_array_equal(answers.profile(0, 0, "received"), of.received(0))
    np.testing.assert_array_equal(answers.profile(0, 2, "largest"), of.largest(2))
    assert np.isnan(answers.pooled(0, 1, 0, "mean")[0, -1])
    assert np.isnan(whole[:, 0, -1]).all()
    assert np.isfinite(whole[:, -1, 0]).all()
    assert answers.tokens(0, "query", 88, 90) == ["word 88", "word 89"]


def test_a_long_token_is_cut():
    answers = AtlasAPI(Atlas.from_weights([torch.full((1, 2, 2), 0.5)], tokens=["x" * 10**6, "<b>"]))
    first, second = answers.tokens(0, "key", 0, 2)
    assert (len(first), first[-1], second) == (1000, "…", "<b>")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("weights", (2, 0, (0, 1), (0, 1)), "has the maps 0 to 1; there is no map 2"),
        ("weights", (0, 3, (0, 1), (0, 1)), "has the heads 0 to 2; there is no head 3"),
        ("weights", (0, 0, (0, 91), (0, 1)), "there are 90 rows, and they were asked for from 0 to 91"),
        ("weights", (0, 0, (0, 1), (5, 5)), "there are 90 columns, and they were asked for from 5 to 5"),
        ("tokens", (0, "values", 0, 1), "there is no side 'values'"),
        ("tokens", (0, "key", 0, 91), "there are 90 tokens"),
        ("pooled", (0, 0, 9, "max"), "there is no level 9"),
        ("pooled", (0, 0, 0, "sum"), "there is no 'sum'"),
        ("pooled", (0, 9, 0, "max"), "there is no head 9"),
        ("overview", (0, "min"), "there is no 'min'"),
        ("profile", (0, 0, "maximum"), "profiles 'entropy', 'received', 'largest'; there is no 'maximum'"),
        ("profile", (0, 7, "entropy"), "there is no head 7"),
    ],
)
def test_what_is_not_there_is_refused(answers, name, arguments, message):
    with pytest.raises(AtlasError, match=message):
        getattr(answers, name)(*arguments)


def test_too_much_at_once_is_refused(monkeypatch):
    answers = AtlasAPI(Atlas.from_weights([torch.full((1, 300, 300), 1 / 300)]))
    with pytest.raises(AtlasError, match="257 rows were asked for at once; at most 256 are returned: ask for parts"):
        answers.weights(0, 0, (0, 257), (0, 1))
    monkeypatch.setattr("regard.explorer.api.MOST_CELLS", 100)
    with pytest.raises(AtlasError, match="cells were asked for at once; at most 100 are returned"):
        answers.pooled(0, 0, 0, "max")
    with pytest.raises(AtlasError, match="cells were asked for at once"):
        answers.overview(0, "max")


def test_an_atlas_without_maps_has_nothing_to_show():
    with pytest.raises(AtlasError, match="no map of attention in it"):
        AtlasAPI(Atlas([], {}))


ROWS = {"map": number, "rows": span, "side": word}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "the parameter 'map' is missing; it needs map, rows, side"),
        ("map=0&rows=0-1", "the parameter 'side' is missing"),
        ("map=0&rows=0-1&side=key&head=0", "there is no parameter 'head'; it needs map, rows, side"),
        ("map=0&map=0&rows=0-1&side=key", "the parameter 'map' is there more than once"),
        ("map=&rows=0-1&side=key", "map is ''; it needs a whole number"),
        ("map=-1&rows=0-1&side=key", "map is '-1'; it needs a whole number of at least 0"),
        ("map=NaN&rows=0-1&side=key", "map is 'NaN'"),
        ("map=1e3&rows=0-1&side=key", "map is '1e3'"),
        ("map=01&rows=0-1&side=key", "map is '01'"),
        ("map=0x1&rows=0-1&side=key", "map is '0x1'"),
        ("map=%D9%A1&rows=0-1&side=key", "map is '١'"),  # ARABIC-INDIC DIGIT ONE
        ("map=1%0A&rows=0-1&side=key", r"map is '1\\n'"),
        ("map=1_0&rows=0-1&side=key", "map is '1_0'"),
        ("map=" + "9" * 300 + "&rows=0-1&side=key", "it needs a whole number"),
        ("map=0&rows=5&side=key", "rows is '5'; it needs a start and a stop, such as rows=0-256"),
        ("map=0&rows=-1-5&side=key", "rows is '-1-5'"),
        ("map=0&rows=0--5&side=key", "rows is '0--5'"),
        ("map=0&rows=0-1&side=", "side is empty"),
        ("map=%ff&rows=0-1&side=key", "the query cannot be read"),
        ("map", "the query cannot be read"),
        ("&".join(f"a{i}=1" for i in range(40)), "the query cannot be read"),
        ("map=" + "1" * 600, "the query has 604 bytes; at most 500 are read"),
    ],
)
def test_a_query_is_read_strictly(query, message):
    with pytest.raises(ConfigurationError, match=message):
        read_query(query.encode(), ROWS)


def test_a_query_that_needs_nothing_takes_nothing():
    assert read_query(b"", {}) == {}
    with pytest.raises(ConfigurationError, match="there is no parameter 'a'; it needs none"):
        read_query(b"a=1", {})


def test_roles_are_found_where_the_truth_is_known(atlas):
    previous = torch.eye(40)[torch.arange(40).sub(1).clamp(min=0)]
    found = with_detected_roles(Atlas.from_weights({"a": torch.stack([previous, torch.full((40, 40), 1 / 40)])}))
    roles = AtlasAPI(found).meta()["maps"][0]["roles"]
    assert [role["name"] for role in roles[0]] == ["previous token"]
    assert roles[0][0]["score"] == pytest.approx(1)
    assert roles[0][0]["n"] == 39
    assert [role["name"] for role in roles[1]] == ["diffuse"]
    assert [len(of.roles) for of in with_detected_roles(atlas).maps] == [3, 3]


def test_roles_of_cross_attention_stay():
    found = with_detected_roles(Atlas.from_weights({"cross": torch.full((1, 4, 7), 1 / 7)}))
    assert found.maps[0].roles == ((),)


def test_roles_that_were_told_stay():
    told = [[[{"name": "mine", "score": 0.5, "n": 3, "rule": "as I like it"}]]]
    found = with_detected_roles(Atlas.from_weights([torch.eye(9)[None]]).with_roles(told))
    assert [role["name"] for role in found.maps[0].roles[0]] == ["mine"]


def test_rows_that_attend_to_nan_are_told_from_pairs_that_do_not_exist():
    class Attending(nn.Module):
        def forward(self, query, key):
            return regard.attention(query, key, key, mask=regard.masks.causal())

    query, key = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    key[0, 1, 60] = math.nan  # of one head: its rows from 60 on attend to it
    with record(Attending()) as recording:
        recording.model(query, key)
    answers = AtlasAPI(recording.atlas())
    assert answers.meta()["maps"][0]["broken"] == [0, 40]
    tile = answers.weights(0, 1, (0, 100), (0, 100))
    rows, columns = np.indices(tile.shape)
    np.testing.assert_array_equal(np.isnan(tile), columns > rows)
    np.testing.assert_array_equal(np.isinf(tile), (rows >= 60) & (columns <= rows))
    assert np.isfinite(answers.weights(0, 0, (0, 100), (0, 100))[rows >= columns]).all()
    for level in range(len(recording.atlas().maps[0].levels)):
        cells = answers.pooled(0, 1, level, "mean")
        high, wide = recording.atlas().maps[0].cell(level)
        down, across = np.indices(cells.shape)
        empty = across * wide > down * high + high - 1
        np.testing.assert_array_equal(np.isnan(cells), empty)
        np.testing.assert_array_equal(np.isinf(cells), ((down + 1) * high > 60) & ~empty)
        assert np.isnan(recording.atlas().maps[0].pooled(1, level)[-1]).all()  # a NaN for both in Python
    assert np.isinf(answers.overview(0, "max")[1]).any()
    assert "broken" not in AtlasAPI(Atlas.from_weights([torch.full((1, 2, 2), 0.5)])).meta()["maps"][0]


def test_shares_are_at_most_one():
    """Queries and keys in half precision make some rows sum to more than 1."""
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, 6, 32) * 3
    with torch.no_grad(), record(layer) as recording:
        layer(x, x, x, need_weights=False)
    metrics = recording.atlas().maps[0].metrics
    assert all(metrics[name].max() <= 1.0 for name in ("sink", "local", "self", "previous", "next"))
