"""The file: what goes in comes out, what is asked for wrongly is refused, what fits no atlas is told."""

import json
import resource
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.errors import AtlasError, ConfigurationError, RegardError
from regard.explorer import Atlas, record
from regard.kernels.hooks import attention_hook
from regard.lenses import Weights

B, H, N, D = 2, 4, 30, 8
WORDS = [f"w{number}" for number in range(N)]


class Asker(nn.Module):
    def forward(self, *tensors, **options):
        return regard.attention(*tensors, **options)


def recording_of(n=N, batch=B, keys=None, **options):
    query, key = torch.randn(batch, H, n, D), torch.randn(batch, 2, keys or n, D)
    with record(Asker()) as recording:
        recording.model(query, key, key, **options)
    return recording


def atlas_of(**options):
    return recording_of(mask=masks.causal()).atlas(tokens=WORDS, title="a title", **options)


ROLES = [[{"name": "previous token", "score": 0.75, "n": 29, "rule": "weight on j = i - 1"}], [], [], []]


def test_a_round_trip(tmp_path):
    atlas = atlas_of().with_roles([ROLES, [[]] * 4])
    atlas.save(tmp_path / "a.atlas")
    again = Atlas.open(tmp_path / "a.atlas")
    assert repr(again) == repr(atlas) == "<atlas 'a title': 2 maps of 1 attention modules>"
    assert repr(again.maps[1]) == "<self attention 'Asker', sequence 1: 4 heads, 30 × 30>"
    for one, other in zip(atlas.maps, again.maps, strict=True):
        assert one.query_tokens == other.query_tokens == other.key_tokens == tuple(WORDS)
        assert one.levels == other.levels == ((30, 30),)
        assert other.cell(0) == (1, 1)
        assert one.roles == other.roles
        assert one.rounding == other.rounding
        everything = slice(0, N), slice(0, N)
        for head in range(H):
            whole, parts = one.weights(head, *everything), [slice(0, 17), slice(17, N)]
            np.testing.assert_allclose(whole.sum(-1), 1.0, atol=1e-2)
            np.testing.assert_array_equal(whole, other.weights(head, *everything))
            tiles = [[one.weights(head, rows, columns) for columns in parts] for rows in parts]
            np.testing.assert_array_equal(whole, np.block(tiles))
            np.testing.assert_array_equal(one.pooled(head, 0), other.pooled(head, 0))
            np.testing.assert_array_equal(one.entropy(head), other.entropy(head))
        assert {**one.metrics}.keys() == {**other.metrics}.keys()
    assert again.maps[0].roles[0][0]["name"] == "previous token"
    assert again.maps[1].roles == ((), (), (), ())
    again.save(tmp_path / "a.atlas")  # over the file that it reads
    assert Atlas.open(tmp_path / "a.atlas").maps[1].key_tokens == tuple(WORDS)
    assert [file.name for file in tmp_path.iterdir()] == ["a.atlas"]


def test_words_of_all_kinds(tmp_path):
    words = ["", "<script>alert(1)</script>", "\u202eabc", "ぬ" * 100_000, "\ud800", "a\nb\0c", *WORDS[6:]]
    atlas = recording_of().atlas(tokens=words)
    atlas.save(tmp_path / "a.atlas")
    read = Atlas.open(tmp_path / "a.atlas").maps[0].key_tokens
    assert read == ("", words[1], words[2], words[3], "?", words[5], *WORDS[6:])


def test_without_words_positions_stand_for_them():
    assert recording_of(n=4).atlas().maps[0].query_tokens == ("0", "1", "2", "3")
    shown = recording_of(n=2, keys=5, mask=masks.causal()).atlas().maps[0]
    assert (shown.query_tokens, shown.key_tokens) == (("3", "4"), ("0", "1", "2", "3", "4"))


def test_words_by_sequence_side_and_name():
    each = [["a", "b", "c"], ["d", "e", "f"]]
    assert [m.key_tokens for m in recording_of(n=3).atlas(tokens=each).maps] == [("a", "b", "c"), ("d", "e", "f")]
    atlas = recording_of(n=3, keys=5, mask=masks.causal()).atlas(tokens={"Asker": list("vwxyz"), "Other": ["x"]})
    assert (atlas.maps[0].query_tokens, atlas.maps[0].key_tokens) == (("x", "y", "z"), tuple("vwxyz"))
    atlas = recording_of(n=5, keys=3).atlas(tokens=(list("vwxyz"), each))
    assert (atlas.maps[1].query_tokens, atlas.maps[1].key_tokens) == (tuple("vwxyz"), ("d", "e", "f"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (WORDS[:-1], r"tokens has 29 words, but 'Asker' has 30 keys: give one for each position, padding included"),
        ([WORDS] * 3, r"tokens has 3 lists, but 'Asker' has 2 sequences"),
        ("text", r"tokens needs lists of words, str, for 'Asker'; it has 'text'"),
        ([1] * N, r"tokens needs lists of words"),
        ({"Askr": WORDS}, r"tokens has no word list for 'Asker'; did you mean 'Askr'"),
    ],
)
def test_words_that_do_not_fit(tokens, message):
    with pytest.raises(AtlasError, match=message):
        recording_of().atlas(tokens=tokens)


def test_nothing_caught():
    with record(nn.Linear(2, 2)) as recording:
        recording.model(torch.zeros(2))
    with pytest.raises(AtlasError, match=r"no attention was caught: Linear has no module whose class is called an att"):
        recording.atlas()


def test_only_the_model_is_heard():
    query = torch.randn(1, H, N, D)
    with record(Asker()) as recording:
        regard.attention(query, query, query)
        Asker()(query, query, query)
    assert recording.calls == []


@pytest.mark.parametrize("model", [None, Asker])
def test_a_model_is_needed(model):
    with pytest.raises(ConfigurationError, match=r"record needs a model, a torch.nn.Module; this is a"), record(model):
        pass


def test_a_dtype_that_is_not_known():
    wrong: Any = "half"
    with (
        pytest.raises(ConfigurationError, match="as dtype 'float16' or 'keep'; it is 'half'"),
        record(Asker(), dtype=wrong),
    ):
        pass


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.weights(4, slice(0, 1), slice(0, 1)), "the map 'Asker' has the heads 0 to 3; there is no head 4"),
        (lambda m: m.weights(-1, slice(0, 1), slice(0, 1)), "no head -1"),
        (lambda m: m.weights(0, slice(0, 31), slice(0, 1)), "there are 30 rows; they were asked for from 0 to 31"),
        (lambda m: m.exists(0, slice(0, 1), slice(-3, 2)), "there are 30 columns; they were asked for from -3 to 2"),
        (lambda m: m.weights(0, slice(0, 9, 2), slice(0, 1)), "weights need rows as a slice without a step"),
        (lambda m: m.weights(0, 3, slice(0, 1)), "weights need rows as a slice without a step"),
        (lambda m: m.pooled(0, 1), "the map 'Asker' has the levels 0 to 0; there is no level 1"),
        (lambda m: m.pooled(0, 0, "sum"), "a map has the cells' 'mean' and 'max'; there is no 'sum'"),
        (lambda m: m.cell("0"), "there is no level '0'"),
        (lambda m: m.entropy(9), "there is no head 9"),
        (lambda m: m.received(True), "there is no head True"),
        (lambda m: m.largest(4), "there is no head 4"),
    ],
)
def test_what_is_not_there(ask, message):
    with pytest.raises(AtlasError, match=message):
        ask(atlas_of().maps[0])


def test_a_tile_beyond_memory(tmp_path):
    shown = recording_of(n=9, batch=1).atlas().maps[0]
    record_ = {**shown.record, "queries": 10**7, "keys": 10**7}
    long = torch.zeros(1, 1, 1, D).expand(1, H, 10**7, D)
    arrays = {**shown.arrays, "0.query": long, "0.key": long[:, :2], "0.lse": long[..., 0]}
    huge = type(shown)(record_, arrays, 0)
    with pytest.raises(AtlasError, match="Weights of 10,000,000 × 10,000,000 pairs .* look at a smaller rectangle"):
        huge.weights(0, slice(0, 10**7), slice(0, 10**7))


GOOD = {"name": "a", "score": 1.0, "n": 2, "rule": "b"}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([ROLES], "roles need one entry for each of the 2 maps; they are 1"),
        ([ROLES, [[]]], "the roles of 'Asker' need one list for each of its 4 heads; they are 1"),
        ([ROLES, [[{"name": "a"}], [], [], []]], "a role of 'Asker' needs to be"),
        ([ROLES, [[GOOD | {"score": float("nan")}], [], [], []]], "a role of 'Asker' needs to be"),
        ([ROLES, [[GOOD | {"n": True}], [], [], []]], "a role of 'Asker' needs to be"),
        ([ROLES, ["abcd", [], [], []]], "a role of 'Asker' needs to be"),
    ],
)
def test_roles_that_are_none(roles, message):
    with pytest.raises(AtlasError, match=message):
        atlas_of().with_roles(roles)


def spread(*shape):
    return torch.randn(*shape).softmax(-1)


def test_given_weights():
    attentions = (spread(2, 3, 5, 5), spread(2, 3, 5, 5))
    atlas = Atlas.from_weights(attentions, tokens=list("abcde"), title="given")
    assert [(m.name, m.sequence) for m in atlas.maps] == [
        ("layers.0", 0),
        ("layers.0", 1),
        ("layers.1", 0),
        ("layers.1", 1),
    ]
    tile = atlas.maps[3].weights(2, slice(1, 4), slice(0, 5))
    np.testing.assert_allclose(tile, attentions[1][1, 2, 1:4], atol=5e-4)
    assert atlas.maps[0].exists(0, slice(0, 2), slice(0, 3)).all()


def test_given_arrays_and_a_round_trip(tmp_path):
    atlas = Atlas.from_weights({"cross": spread(3, 4, 90).numpy()}, tokens=(list("abcd"), [str(n) for n in range(90)]))
    atlas.save(tmp_path / "g.atlas")
    (shown,) = Atlas.open(tmp_path / "g.atlas").maps
    assert (shown.kind, shown.queries, shown.keys, shown.levels) == ("cross", 4, 90, ((4, 45),))
    assert shown.key_tokens[-1] == "89"
    np.testing.assert_array_equal(shown.weights(1, *[slice(0, 4)] * 2), atlas.maps[0].weights(1, *[slice(0, 4)] * 2))


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({}, "at least one array of weights; it has none"),
        (3, "from_weights needs arrays by name"),
        ({"a": "x"}, "the weights 'a' need to be an array; they are a str"),
        (
            {"a": torch.zeros(3, 3)},
            r"the weights 'a' are torch.float32 \(3, 3\); they need .* \(heads, M, N\) or \(batch",
        ),
        ({"a": torch.zeros(1, 3, 3, dtype=torch.long)}, "they need floating-point numbers"),
        ({"a": torch.zeros(1, 0, 3)}, "none of them 0"),
        ({"a": -spread(1, 3, 3)}, "the weights 'a' need to be softmax weights, 0 to 1, and one is -0"),
        ({"a": spread(1, 3, 3) * torch.nan}, "some are NaN or infinite: are these scores"),
        ({"a": 2 * spread(1, 3, 3)}, r"a row of the weights 'a' sums to 2; it needs to be at most 1 \+ 0.02"),
        ({"a": spread(1, 3, 3), "b": torch.eye(1, 3).mT.expand(1, 3, 2)}, "a row of the weights 'b' sums to 2"),
    ],
)
def test_weights_that_are_none(maps, message):
    with pytest.raises(AtlasError, match=message):
        Atlas.from_weights(maps)


@pytest.mark.parametrize("title", [5, None, b"run"])
def test_a_title_that_is_none_is_refused_at_once(title, tmp_path):
    for make in (lambda: Atlas.from_weights([spread(1, 3, 3)], title=title), lambda: recording_of().atlas(title=title)):
        with pytest.raises(AtlasError, match="the title of an atlas needs to be a str; it is "):
            make()
    atlas = atlas_of()
    atlas.title = title
    with pytest.raises(AtlasError, match="the title of an atlas needs to be a str"):
        atlas.save(tmp_path / "a.atlas")


def test_given_words_that_do_not_fit():
    with pytest.raises(AtlasError, match="tokens has 2 words, but 'a' has 3 keys"):
        Atlas.from_weights({"a": spread(1, 3, 3)}, tokens=["a", "b"])


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(AtlasError, match=r"cannot write .*the folder .* does not exist"):
        atlas_of().save(tmp_path / "missing" / "a.atlas")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(AtlasError, match=r"a.atlas cannot be read \(No such file"):
        Atlas.open(tmp_path / "a.atlas")
    with pytest.raises(AtlasError, match=r"cannot be read \(Is a directory"):
        Atlas.open(tmp_path)


def test_safetensors_is_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(RegardError, match=r"pip install 'regard\[explorer\]'"):
        atlas_of().save(tmp_path / "a.atlas")


def test_importing_it_imports_no_extra(warm_python):
    extras = "('safetensors', 'transformers', 'matplotlib')"
    code = f"import sys, regard.explorer; print([name for name in {extras} if name in sys.modules])"
    found = subprocess.run([*warm_python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="what is taken is read from /proc")
def test_twenty_thousand_positions_in_little_memory(tmp_path):
    n = 20_000  # the weights of one head would take 1.6 GB
    query = torch.randn(1, 2, n, 8)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**29, limits[1]))
    try:
        with torch.no_grad(), record(Asker()) as recording:
            recording.model(query, query, query, mask=masks.causal() & masks.window(before=3000))
        recording.atlas(tokens=[f"w{number}" for number in range(n)]).save(tmp_path / "a.atlas")
        (shown,) = Atlas.open(tmp_path / "a.atlas").maps
        rows, columns = slice(19_000, 19_256), slice(18_900, 19_156)
        tile = shown.weights(1, rows, columns)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    lens = Weights(rows, columns)
    seen = regard.observe(query, query, query, lens, mask=masks.causal() & masks.window(before=3000))[lens]
    np.testing.assert_allclose(tile, seen[0, 1], rtol=0.01, atol=1e-7)
    assert (shown.cell(0), shown.key_tokens[-1]) == ((64, 64), "w19999")


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is read from /proc")
def test_size_and_memory_mapping(tmp_path):
    layer = nn.MultiheadAttention(64 * 4, 4, batch_first=True)
    x = torch.randn(1, 2048, 256)
    with torch.no_grad(), record(layer) as recording:
        layer(x, x, x, need_weights=False)
    path = tmp_path / "a.atlas"
    recording.atlas(tokens=[str(n) for n in range(2048)]).save(path)
    both = 2 * 2048 * 256 * 2
    assert path.stat().st_size < 3 * both
    shown = Atlas.open(path).maps[0]
    assert shown.levels[0] == (512, 512)
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if str(path) in line]
    at = shown.arrays["0.query"].data_ptr()
    assert any(int(start, 16) <= at < int(stop, 16) for start, stop in spans)  # it is the file, and no copy of it


def test_the_file_says_what_it_holds(tmp_path):
    atlas_of().save(tmp_path / "a.atlas")
    data = (tmp_path / "a.atlas").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    head = json.loads(header["__metadata__"]["atlas"])
    assert (head["format"], head["version"], head["title"]) == ("regard-atlas", 1, "a title")
    assert head["records"][0]["mask"] == {"is": "causal"}


def test_of_nested_hooks_the_innermost_is_called():
    query, outer, inner = torch.randn(1, H, N, D), [], []

    with attention_hook(lambda problem, lse: outer.append(lse)):
        regard.attention(query, query, query)
        with attention_hook(lambda problem, lse: inner.append(lse)):
            regard.attention_with_lse(query, query, query)
        regard.observe(query, query, query, regard.lenses.Entropy())
    regard.attention(query, query, query)
    assert (len(outer), len(inner)) == (2, 1)
