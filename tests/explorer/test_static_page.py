"""The static page: what is in it, that it is what the atlas has, and that it can run nothing else."""

import base64
import gzip
import hashlib
import html
import json
import re

import numpy as np
import pytest
import torch

import regard
from regard.errors import AtlasError, CheckpointError, ConfigurationError
from regard.explorer import Atlas, record
from regard.explorer.notebook import framed_page
from regard.explorer.static_page import WebBundle, encode_array, fit_payload, round_mantissa, static_page

EMPTY = sum(len(part.encode()) for part in (WebBundle.read().markup, WebBundle.read().script, WebBundle.read().styles))
"""Bytes of a page without any data."""
HOSTILE = ["</script><script>alert(1)</script>", "<!--", "]]>", "‮abc", "\ud800", "x" * 5000, "&lt;", "\u2028"]


def random_weights(heads, queries, keys):
    return torch.softmax(3 * torch.randn(heads, queries, keys), -1)


def held(text):
    found = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def read(array, shape):
    data = gzip.decompress(base64.b64decode(array["data"]))
    return np.frombuffer(data, {"f2": "<f2", "f4": "<f4"}[array["type"]]).astype(np.float32).reshape(shape)


@pytest.fixture(scope="module")
def causal():
    torch.manual_seed(0)
    layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal())
    with torch.no_grad(), record(torch.nn.Sequential(layer)) as recording:
        recording.model(torch.randn(1, 300, 8))
    return recording.atlas(title="a & <b>")


def test_short_maps_are_in_it_weight_by_weight(causal):
    page = static_page(causal)
    data, of = held(page.text), causal.maps[0]
    assert page.contents == "whole weights of 1 map, to within 0.4% of each"
    assert sorted(data["tiles"]) == [f"0/{h}/{r}/{c}" for h in range(2) for r in range(2) for c in range(2)]
    whole = np.block([[read(data["tiles"][f"0/1/{r}/{c}"], (height, width)) for c, width in ((0, 256), (1, 44))]
                      for r, height in ((0, 256), (1, 44))])  # fmt: skip
    expected = of.weights(1, slice(0, 300), slice(0, 300))
    exists = np.tril(np.ones((300, 300), dtype=bool))
    np.testing.assert_array_equal(np.isnan(whole), ~exists)
    np.testing.assert_allclose(whole[exists], expected[exists], rtol=2**-8, atol=2**-22)
    np.testing.assert_allclose(read(data["profiles"]["0/1/entropy"], 300), of.entropy(1), rtol=2**-8, atol=2**-22)
    last = len(of.levels) - 1
    assert sorted(data["pooled"]) == [f"0/{h}/{last}/{reduce}" for h in range(2) for reduce in ("max", "mean")]
    shown = read(data["pooled"][f"0/0/{last}/max"], of.levels[last])
    np.testing.assert_allclose(shown, of.pooled(0, last, "max"), rtol=2**-8)
    np.testing.assert_array_equal(np.isnan(shown), ~np.tri(*of.levels[last], dtype=bool))
    np.testing.assert_allclose(read(data["profiles"]["0/1/largest"], 300), of.largest(1), rtol=2**-8, atol=2**-22)
    assert data["meta"]["profiles"] == ["entropy", "received", "largest"]
    assert data["meta"]["exact"] == "weights to within 0.4 %"
    assert data["meta"]["all"] == "regard explore ATLAS serves all"


def test_a_map_of_one_tile_needs_no_pyramid():
    data = held(
        static_page(Atlas.from_weights([random_weights(1, 5, 7)], tokens=(list("abcde"), list("ABCDEFG")))).text
    )
    assert data["pooled"] == {}
    assert data["tokens"] == [{"query": list("abcde"), "key": list("ABCDEFG")}]
    assert data["meta"]["maps"][0]["kind"] == "cross"


def test_twelve_layers_of_twelve_heads_take_less_than_five_megabytes():
    atlas = Atlas.from_weights({f"layer.{i}": random_weights(12, 128, 128) for i in range(12)})
    page = static_page(atlas)
    assert page.contents == "whole weights of 12 maps, to within 0.4% of each"
    assert page.size < 5e6


def test_long_maps_are_in_it_as_fine_as_there_is_room():
    atlas = Atlas.from_weights({"short": random_weights(1, 20, 20), "long": random_weights(1, 700, 700)})
    sizes = []
    for most, contents in (
        (3_000_000, "whole weights of 1 map, to within 0.4% of each; 1 map in cells of 2 × 2 weights and more"),
        (EMPTY + 285_000, "whole weights of 1 map, to within 0.4% of each; 1 map in cells of 4 × 4 weights and more"),
        (EMPTY + 55_000, "whole weights of 1 map, to within 0.4% of each; 1 map in cells of 8 × 8 weights and more"),
    ):
        page = static_page(atlas, most=most)
        assert page.contents == contents
        assert page.size <= most
        sizes.append(page.size)
        data = held(page.text)
        assert [key for key in data["tiles"] if key.startswith("1/")] == []
        assert f"1/0/{len(atlas.maps[1].levels) - 1}/mean" in data["pooled"]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(AtlasError, match="2 maps with 2 heads in all, and even their overviews take more than 0 MB"):
        static_page(atlas, most=120_000)
    with pytest.raises(AtlasError, match="no map of attention"):
        static_page(Atlas([], {}))


def test_the_heads_with_the_clearest_roles_are_in_it_as_far_as_there_is_room():
    atlas = Atlas.from_weights({"first": random_weights(2, 300, 300), "second": random_weights(3, 300, 300)})
    role = {"name": "sink", "n": 300, "rule": "r"}
    roles = [[[], [role | {"score": 0.6}]], [[], [role | {"score": 0.5}, role | {"score": 0.9}], []]]
    order = [(1, 1), (0, 1), (0, 0), (1, 0), (1, 2)]
    for most, count, said in (
        (2_000_000, 5, "whole weights of 2 maps, to within 0.4% of each"),
        (835_000, 2, "2 maps in cells of 2 × 2 weights and more, with whole weights of 2 heads of them"),
        (680_000, 1, "2 maps in cells of 2 × 2 weights and more, with whole weights of 1 head of them"),
        (545_000, 0, "2 maps in cells of 2 × 2 weights and more"),
        (370_000, 1, "2 maps in cells of 4 × 4 weights and more, with whole weights of 1 head of them"),
    ):
        contents = fit_payload(atlas.with_roles(roles), most)
        data = contents.payload
        assert contents.summary() == said
        assert len(json.dumps(data)) < contents.size + 5000 < most + 5000  # beside the names of what there is
        expected = [f"{n}/{h}/{r}/{c}" for n, h in order[:count] for r in range(2) for c in range(2)]
        assert sorted(data["tiles"]) == sorted(expected)
        for number, head in order[:count]:
            row = [read(data["tiles"][f"{number}/{head}/0/{c}"], (256, width)) for c, width in ((0, 256), (1, 44))]
            weights = atlas.maps[number].weights(head, slice(0, 256), slice(0, 300))
            np.testing.assert_allclose(np.hstack(row), weights, rtol=2**-8, atol=2**-22)


@pytest.fixture(scope="module")
def long():
    """Two layers of two heads with 1,500 tokens, and a third of another text."""
    torch.manual_seed(1)
    layers = torch.nn.ModuleList(
        regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal()) for _ in range(3)
    )
    with torch.no_grad(), record(layers) as recording:
        for layer, length in zip(layers, (1500, 1500, 700), strict=True):
            layer(torch.randn(1, length, 8))
    words = {str(layer): [f"{layer // 2}:{at}" for at in range(700 if layer == 2 else 1500)] for layer in range(3)}
    return recording.atlas(tokens=words)


def exact_weights(page, atlas, number, head, row, column):
    """A tile of a page, and what the atlas has there."""
    of = atlas.maps[number]
    rows, columns = (
        slice(256 * at, min(256 * at + 256, count)) for at, count in ((row, of.queries), (column, of.keys))
    )
    expected = of.weights(head, rows, columns)
    return read(held(page.text)["tiles"][f"{number}/{head}/{row}/{column}"], expected.shape), expected


def test_weights_around_a_kept_pair_are_in_it_for_all_heads_of_the_text(long):
    page = static_page(long, state="view=head&map=1&head=1&at=1100,700")
    tiles = held(page.text)["tiles"]
    around = {(3, 2), (4, 2)} | {(3, 3), (4, 3)}  # rows 972 to 1228, columns 572 to 828
    expected = {f"{number}/{head}/{row}/{column}" for number in (0, 1) for head in (0, 1) for row, column in around}
    assert set(tiles) == expected
    for number, head in ((0, 0), (1, 1)):
        found, weights = exact_weights(page, long, number, head, 4, 2)
        exists = ~np.isnan(found)
        assert exists.all()
        np.testing.assert_allclose(found, weights, rtol=2**-8, atol=2**-22)
    assert "16 tiles of weights around what is shown" in page.contents
    first = list(tiles)[:4]
    assert all(key.startswith("1/1/") for key in first)  # those of the shown head come first
    assert not held(static_page(long).text)["tiles"]


@pytest.mark.parametrize(
    ("state", "tiles"),
    [
        ("view=head&map=0&head=1&frame=1300,300,100", {"0/1/4/0", "0/1/4/1", "0/1/5/0", "0/1/5/1"}),
        ("view=head&map=2&head=0&at=600,", {f"2/{head}/{r}/{c}" for head in (0, 1) for r in (1, 2) for c in (1, 2)}),
        ("view=lines&map=0&head=0&window=1400,1380", {"0/0/5/5"}),
        (
            "view=compare&map=0&pins=1.1,2.0&frame=100,100,50",
            {"0/0/0/0", "1/1/0/0"},  # the pin of another text has other places
        ),
        ("view=head&map=0&at=0,0&frame=1499,0,4", {"0/0/5/0"} | {f"{m}/{h}/0/0" for m in (0, 1) for h in (0, 1)}),
    ],
)
def test_weights_that_a_state_shows_are_in_it(long, state, tiles):
    assert set(held(static_page(long, state=state).text)["tiles"]) == tiles


@pytest.mark.parametrize("most", [120_000, 220_000, 420_000, 800_000, 5_000_000])
@pytest.mark.parametrize("state", [None, "view=head&map=1&head=1&at=1100,700"])
def test_a_page_is_no_larger_than_its_budget(long, most, state):
    page = static_page(long, state=state, most=EMPTY + most)
    assert page.size <= EMPTY + most
    # At least what is seen first is there, also where there is no room for all heads.
    assert state is None or most < 300_000 or "1/1/4/2" in held(page.text)["tiles"]


def test_profiles_of_long_texts_are_left_out_where_there_is_no_room_for_them(long):
    """They would leave none for a map that can be read."""
    page = static_page(long, most=EMPTY + 100_000)
    data = held(page.text)
    assert page.size <= EMPTY + 100_000
    assert "without profiles of rows and columns" in page.contents
    assert (data["profiles"], data["meta"]["profiles"]) == ({}, [])
    assert data["pooled"]
    assert held(static_page(long, most=EMPTY + 800_000).text)["meta"]["profiles"] == ["entropy", "received", "largest"]


def test_a_wide_frame_has_its_middle_in_it(long):
    tiles = held(static_page(long, state="view=head&map=0&frame=750,750,1e9").text)["tiles"]
    assert "0/0/2/2" in tiles
    assert len(tiles) <= 25


def test_maps_of_one_text_share_its_tokens(long):
    tokens = held(static_page(long).text)["tokens"]
    assert tokens == [{"query": [f"0:{at}" for at in range(1500)]}, 0, {"query": [f"1:{at}" for at in range(700)]}]


def test_its_policy_lets_its_own_script_run_and_nothing_else(causal):
    text = static_page(causal).text
    policy = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    assert len(policy) == 1
    assert text.index("Content-Security-Policy") < min(text.index("<style"), text.index("<script"))
    said = dict(part.split(" ", 1) for part in policy[0].split("; "))
    bundle = WebBundle.read()
    for name, part in (("script-src", bundle.script), ("style-src", bundle.styles)):
        assert said[name] == f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
        assert part in text
    assert said["default-src"] == said["base-uri"] == said["form-action"] == "'none'"
    assert "connect-src" not in said
    assert "unsafe" not in policy[0]
    markup = text.replace(bundle.script, "").replace(bundle.styles, "")
    assert not re.search(r'(?:src|href)="(?!data:)', markup)
    assert "//" not in re.sub(r"<script type=.application/json.*?</script>", "", markup, flags=re.DOTALL).replace(
        policy[0], ""
    )


def test_words_of_a_stranger_are_data(causal):
    plain = static_page(Atlas.from_weights({"a": random_weights(1, 8, 8)}, tokens=list("abcdefgh"), title="t")).text
    title = "</title><script>alert(1)</script>‮" + "x" * 1000
    atlas = Atlas.from_weights({"</script><img src=x>": random_weights(1, 8, 8)}, tokens=HOSTILE, title=title)
    text = static_page(atlas).text
    for markup in ("<script", "</script", "<!--", "<img", "<title", "</title", "<b"):
        assert text.lower().count(markup) == plain.lower().count(markup)
    data = held(text)
    shown = [word.encode("utf-8", "replace").decode() for word in HOSTILE]
    assert data["tokens"][0]["query"][:5] == shown[:5]
    assert len(data["tokens"][0]["query"][5]) == 1000
    assert data["meta"]["maps"][0]["name"] == "</script><img src=x>"
    assert "‮" not in text
    assert "<title>a &amp; &lt;b&gt;</title>" in static_page(causal).text


def test_it_is_written_whole_or_not_at_all(causal, tmp_path):
    page = static_page(causal)
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.text
    assert (tmp_path / "page.html").stat().st_size == page.size
    with pytest.raises(CheckpointError, match="the folder .* does not exist"):
        page.save(tmp_path / "nowhere" / "page.html")


def test_a_notebook_gets_it_in_a_sandbox(causal):
    shown = framed_page(causal, height=500)
    markup = shown._repr_html_()
    found = re.fullmatch(
        r'<iframe srcdoc="([^"]*)" sandbox="([^"]*)" title="regard explorer" style="([^"]*)"></iframe>', markup
    )
    assert found
    assert html.unescape(found[1]) == static_page(causal).text
    assert found[2] == "allow-scripts allow-downloads allow-forms"
    assert "height: 500px" in found[3]
    assert repr(shown).startswith("<explorer, ")
    assert framed_page(causal, most=EMPTY + 30_000).page.size <= EMPTY + 30_000


@pytest.mark.parametrize("digits", [3, 8, 10, 11])
def test_numbers_are_rounded_to_the_nearest(digits):
    values = np.concatenate([np.logspace(-4, 0, 500), [0.0, 1.0]]).astype(np.float32)
    kept = round_mantissa(values, digits).astype(np.float32)
    assert (np.abs(kept - values) <= np.maximum(2.0**-digits * values, 2.0 ** (-14 - digits))).all()
    assert len(np.unique(kept)) <= 14 * 2 ** (digits - 1) + 2
    assert (np.diff(kept[:-2]) >= 0).all()
    assert np.isnan(round_mantissa(np.array([np.nan], np.float32), digits)).all()


def test_large_numbers_keep_single_precision():
    values = np.array([1e5, 0.25], np.float32)
    assert read(encode_array(values), 2).tolist() == [1e5, 0.25]


def test_a_page_that_is_not_there_is_told(tmp_path, monkeypatch, causal):
    with pytest.raises(ConfigurationError, match="install regard anew, or, in a checkout, run `npm ci"):
        WebBundle.read(tmp_path)
    broken = WebBundle("<html></html>", "", "")
    monkeypatch.setattr(WebBundle, "read", classmethod(lambda cls: broken))
    with pytest.raises(ConfigurationError, match='needs <meta charset="utf-8"> once; it has it 0 times'):
        static_page(causal)
    monkeypatch.setattr(WebBundle, "read", classmethod(lambda cls: WebBundle("", "</SCRIPT>", "")))
    with pytest.raises(ConfigurationError, match="cannot stand inside a page"):
        static_page(causal)


def test_twelve_times_twelve_heads_fit_into_five_megabytes():
    """Also of noise, which nothing compresses."""
    weights = torch.softmax(3 * torch.randn(12, 12, 128, 128, generator=torch.Generator().manual_seed(0)), -1)
    page = static_page(Atlas.from_weights(list(weights), tokens=[f"token{i}" for i in range(128)]))
    assert page.contents == "whole weights of 12 maps, to within 0.4% of each"
    assert page.size < 5_000_000


@pytest.mark.parametrize(
    "values",
    [
        random_weights(1, 211, 211)[0].numpy(),
        np.where(np.tri(211, dtype=bool), random_weights(1, 211, 211)[0].numpy(), np.nan),
        np.where(np.tri(211, k=-9, dtype=bool), 0, random_weights(1, 211, 211)[0].numpy()),
        np.full((211, 211), np.nan),
    ],
    ids=["dense", "causal", "many zeros", "no pair"],
)
def test_fast_compression_is_hardly_larger_than_the_best(values):
    data = round_mantissa(values.astype(np.float32)).astype("<f2").tobytes()
    fast = len(base64.b64decode(encode_array(values.astype(np.float32))["data"]))
    best = min(len(gzip.compress(data, level)) for level in (6, 9))
    assert fast <= 1.02 * best + 32
