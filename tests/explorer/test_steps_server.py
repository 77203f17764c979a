"""The server of the live page of steps, over a real socket: what it computes, what it refuses, and in which words."""

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest

from regard.errors import ConfigurationError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from regard.explorer.steps_server import StepsServer
from regard.steps.live_steps import LiveSteps, StepRequest

REQUEST = {"mechanism": "dot", "sentence": "나는 학생이다", "word": 4}


@pytest.fixture(scope="module")
def serving():
    serving = StepsServer(LiveSteps(), opening=StepRequest.read(REQUEST), language="ko")
    thread = threading.Thread(target=serving.run)
    thread.start()
    yield serving
    serving.stop()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def ask(serving):
    def asking(path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        given = {"Origin": f"http://127.0.0.1:{serving.port}", "Content-Type": "application/json"}
        sent = {**(given if body is not None else {}), **{name.replace("_", "-"): of for name, of in headers.items()}}
        sent = {name: of for name, of in sent.items() if of is not None}
        method = "GET" if body is None else "POST"
        connection.request(method, urlsplit(serving.address).path + path, body=body, headers=sent)
        response = connection.getresponse()
        told = response.read()
        connection.close()
        return response, told

    return asking


def answered(ask, fields):
    response, told = ask("answer", json.dumps(fields).encode())
    return response.status, json.loads(told)


def test_the_page_and_its_opening(serving, ask):
    assert serving.address.split("#")[1].startswith("lang=ko&mechanism=dot&sentence=%EB%82%98")
    assert serving.address.endswith("&word=4")
    for name, kind in (("", "text/html"), ("steps.js", "text/javascript"), ("steps.css", "text/css")):
        response, told = ask(name)
        assert response.status == 200
        assert response.headers["content-type"].startswith(kind)
        assert "script-src 'self'" in response.headers["content-security-policy"]
        assert told
    response, told = ask("options")
    assert [one["name"] for one in json.loads(told)["mechanisms"]] == ["dot", "additive", "scaled_dot", "multi_head"]


def test_each_change_is_computed(ask):
    status, before = answered(ask, REQUEST)
    assert status == 200
    assert before["next"][0]["word"] == "student"
    status, after = answered(ask, {**REQUEST, "changes": ["flip=2"]})
    assert after["next"][0]["word"] == "student" != after["next"][1]["word"]
    marked = {table["key"] for table in after["tables"] for row in table["rows"] if list in map(type, row["cells"])}
    assert {"mask", "weights", "context", "attentional", "prediction"} <= marked
    assert not marked & {"scores", "decoder_state", "annotations"}
    status, drag = answered(ask, {**REQUEST, "changes": ["add=1:12.5"]})
    assert drag["tables"][5]["key"] == "bias"
    assert answered(ask, {"mechanism": "example:luong-dot"})[1]["title"]["ko"] == "루옹 어텐션: 내적(dot) 스코어"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mechanism": "dot", "sentence": "I am tired."}, "the sentence 'I am tired.' has no Korean letters"),
        (
            {"mechanism": "dot", "sentence": "나는 " * 25},
            "the sentence has 25 tokens, and steps are printed for at most",
        ),
        ({"mechanism": "softmax", "sentence": "나"}, "score is 'softmax'; the translators that regard comes with have"),
        ({**REQUEST, "kind": "self"}, "a recurrent translator has one attention of one head, to the source"),
        ({**REQUEST, "changes": ["mask=1"]}, "--what-if 'mask=1' is no change; it needs score=NAME, scale=NUMBER"),
        ({**REQUEST, "word": 99}, "there is no such word: the translation has 6 tokens, I am a student"),
        ([REQUEST], "a request is a list; it needs to be an object of JSON"),
    ],
)
def test_a_mistake_is_one_message(ask, fields, message):
    status, told = answered(ask, fields)
    assert status == 400
    assert told["error"].startswith(message)


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"{", {}, 400, "the request is not JSON"),
        (b"[" * 90_000, {}, 400, "the request is not JSON"),
        (b"\xff", {}, 400, "the text is not UTF-8: byte 0xff at 1"),
        (b"x" * 100_001, {}, 413, "the text has more than 100,000 bytes"),
        (b"{}", {"Content_Type": "text/plain"}, 415, "a text is taken as application/json in UTF-8"),
        (b"{}", {"Origin": "http://elsewhere.example"}, 403, "this server answers its own page alone"),
        (b"{}", {"Origin": None}, 403, "this server runs the model for its own page alone"),
    ],
)
def test_what_is_not_a_request_of_the_page_is_refused(ask, body, headers, status, message):
    response, told = ask("answer", body, **headers)
    assert response.status == status
    assert json.loads(told)["error"].startswith(message)


@pytest.mark.parametrize("path", ["0/meta", "steps.html", "..", "%2e%2e/etc/passwd", "answer/"])
def test_there_is_nothing_else(ask, path):
    response, told = ask(path)
    assert response.status in (404, 405)
    assert json.loads(told)["error"]


def test_a_port_that_is_taken_is_said(serving):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"the port {port} of 127.0.0.1 cannot be used: .* Choose another"):
            StepsServer(LiveSteps(), port)
