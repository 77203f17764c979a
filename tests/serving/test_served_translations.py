"""Translations in LibreTranslate's form, with their alignment."""

import json
import urllib.parse

import pytest

from regard.serving import ServedModel

LINES = ["A dog runs in the park.", "Two men are playing guitar."]


@pytest.fixture(scope="module")
def server(translator, serve):
    with serve(ServedModel("translator", translator=translator)) as server:
        yield server


def post(ask, server, **body):
    status, text = ask(server.address, "/translate", {"source": "en", "target": "fr", **body})
    return status, json.loads(text)


def test_a_text_a_list_and_lines_of_a_text(server, ask, translator):
    expected = [each.text for each in translator.translate(LINES, observe=False)]
    assert post(ask, server, q=LINES[0]) == (200, {"translatedText": expected[0]})
    assert post(ask, server, q=LINES, format="text") == (200, {"translatedText": expected})
    assert post(ask, server, q="\n\n".join(LINES)) == (200, {"translatedText": "\n\n".join(expected)})
    assert post(ask, server, q="") == (200, {"translatedText": ""})


def test_a_form_as_browsers_send_it(server, ask, translator):
    body = urllib.parse.urlencode({"q": LINES[0], "source": "auto", "target": "fr"}).encode()
    status, text = ask(server.address, "/translate", body, {"content-type": "application/x-www-form-urlencoded"})
    assert status == 200
    assert json.loads(text)["translatedText"] == translator.translate(LINES[:1])[0].text


def test_alternatives_are_the_other_candidates(server, ask, translator):
    search = translator.search.model_copy(update={"n_best": 3})
    expected = [candidate.text for candidate in translator.translate(LINES[:1], search=search)[0].candidates]
    status, answer = post(ask, server, q=LINES[0], alternatives=2)
    assert status == 200
    assert [answer["translatedText"], *answer["alternatives"]] == expected


def test_alignment_beside_a_translation(server, ask, translator):
    status, answer = post(ask, server, q=LINES, attention={"top": 2, "entropy": True})
    assert status == 200
    for line, translation, ((told,)) in zip(LINES, answer["translatedText"], answer["attention"], strict=True):
        (aligned,) = translator.align([line], [translation])
        assert told["source_tokens"] == list(aligned.source_tokens)
        assert told["source_words"] == line.split()
        assert told["target_words"] == translation.split()
        assert [tuple(link) for link in told["alignment"]] == list(aligned.links)
        assert all(s < len(told["source_words"]) and t < len(told["target_words"]) for s, t in told["alignment"])
        for pairs, row, entropy in zip(told["top"], aligned.weights, told["entropy"], strict=True):
            assert [weight for _, weight in pairs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
            assert entropy == pytest.approx(float(-(row * row.log()).nan_to_num().sum()), abs=1e-4)


def test_languages(server, ask):
    status, text = ask(server.address, "/languages")
    assert status == 200
    assert json.loads(text) == [
        {"code": "en", "name": "English", "targets": ["fr"]},
        {"code": "fr", "name": "French", "targets": []},
    ]


def test_the_client_of_libretranslate(server, translator):
    client = pytest.importorskip("libretranslatepy").LibreTranslateAPI(server.address)
    assert [language["code"] for language in client.languages(timeout=60)] == ["en", "fr"]
    for line in LINES:
        expected = translator.translate([line], observe=False)[0].text
        assert client.translate(line, "en", "fr", timeout=60) == expected


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"target": "de"}, 400, "de is not supported: this model translates into fr"),
        ({"source": "fr"}, 400, "fr is not supported: this model translates from en"),
        ({"format": "html"}, 400, "format: Input should be 'text'"),
        ({"q": 5}, 400, "q: Input should be a valid string"),
        ({"glossary": "x"}, 400, "glossary: it is not known here"),
        ({"attention": {"map": True}}, 400, "attention.map: it is not known here"),
        ({"q": "a" * 40_000}, 413, "40,000 letters; 32,768 are taken at most"),
    ],
)
def test_what_is_refused(server, ask, change, status, message):
    found, answer = post(ask, server, **{"q": LINES[0]} | change)
    assert found == status
    assert message in answer["error"]
