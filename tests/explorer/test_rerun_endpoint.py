"""The model run again over a real socket: what changes, what does not, and who may ask for it."""

import http.client
import json
import logging
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from torch import nn

from regard.errors import AtlasError, ConfigurationError, CorpusError
from regard.explorer import Atlas
from regard.explorer import collection as collection_module
from regard.explorer.collection import MOST_BYTES, MOST_KEPT, Collection, RunStopped, stoppable

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from regard.explorer.server import ExplorerServer


class Model:
    """Runs at once, or waits in one call of a module after the other until it is let go or stopped."""

    def __init__(self):
        self.begun, self.go_on, self.ended = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
        self.layer = nn.Identity()
        self.texts = []

    def __call__(self, text):
        if text.startswith("wait"):
            try:
                self.begun.release()
                deadline = time.monotonic() + 60
                while not self.go_on.wait(0.005):
                    assert time.monotonic() < deadline
                    self.layer(torch.zeros(1))
            finally:
                self.ended.release()
        if text.startswith("refuse"):
            raise CorpusError("the text has 9 tokens, and the model takes 3")
        if text.startswith("fail"):
            raise RuntimeError("a secret of the model")
        self.texts.append(text)
        words = text.split()
        return Atlas.from_weights({"head": torch.eye(len(words))[None]}, tokens=words, title=text)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def serving(model):
    serving = ExplorerServer({"it was late": model("it was late")}, rerun=model)
    thread = threading.Thread(target=serving.run)
    thread.start()
    yield serving
    model.go_on.set()
    serving.stop()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def ask(serving):
    def asking(path, body=None, method=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        given = {"Origin": f"http://127.0.0.1:{serving.port}", "Content-Type": "text/plain;charset=UTF-8"}
        sent = {**(given if body is not None else {}), **{name.replace("_", "-"): of for name, of in headers.items()}}
        sent = {name: of for name, of in sent.items() if of is not None}
        method = method or ("GET" if body is None else "POST")
        connection.request(method, urlsplit(serving.address).path + path, body=body, headers=sent)
        response = connection.getresponse()
        told = response.read()
        connection.close()
        return response.status, told

    return asking


def names(told):
    return [(one["number"], one["name"]) for one in json.loads(told)["atlases"]]


def test_a_run_puts_its_atlas_first_and_the_last_two_are_kept_however_large(ask, monkeypatch):
    monkeypatch.setattr(collection_module, "MOST_ROWS", 0)
    assert json.loads(ask("atlases")[1])["rerun"] == MOST_BYTES
    status, told = ask("rerun", b"it is late")
    assert (status, names(told)) == (200, [(1, "it is late"), (0, "it was late")])
    assert names(ask("rerun", "zwölf Uhr\n".encode())[1]) == [(2, "zwölf Uhr\n"), (1, "it is late")]
    assert names(ask("atlases")[1]) == [(2, "zwölf Uhr\n"), (1, "it is late")]
    assert json.loads(ask("2/tokens?map=0&side=key&start=0&stop=2")[1]) == ["zwölf", "Uhr"]
    assert json.loads(ask("1/meta")[1])["maps"][0]["keys"] == 3
    status, told = ask("0/meta")
    assert (status, json.loads(told)["error"]) == (
        410,
        "this atlas is not kept any more, since the model was run again: load the page anew",
    )
    assert ask("3/meta")[0] == 404
    assert ask("03/meta")[0] == 404
    assert ask("%D9%A1/meta")[0] == 404
    assert ask("9" * 5000 + "/meta")[0] == 404


def test_texts_that_were_read_are_a_store_and_are_not_read_again(ask, model):
    for text in (b"one two", b"three four", b"five"):
        assert ask("rerun", text)[0] == 200
    read = len(model.texts)
    assert names(ask("rerun", b"one two")[1]) == [(1, "one two"), (3, "five"), (2, "three four"), (0, "it was late")]
    assert len(model.texts) == read
    assert json.loads(ask("0/tokens?map=0&side=key&start=0&stop=3")[1]) == ["it", "was", "late"]
    for at in range(MOST_KEPT):
        assert ask("rerun", b"text %d" % at)[0] == 200
    assert len(names(ask("atlases")[1])) == MOST_KEPT
    assert ask("1/meta")[0] == 410


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (b"", 400, "the text is empty; it needs at least one word for the model to read"),
        (" \n\u3000".encode(), 400, "the text is empty"),
        (b"caf\xe9", 400, "the text is not UTF-8: byte 0xe9 at 4"),
        (b"\xed\xa0\x80", 400, "the text is not UTF-8: byte 0xed at 1"),
        (b"x" * (MOST_BYTES + 1), 413, "the text has more than 100,000 bytes, the most that are read"),
        (b"x" * 20_000_000, 413, "the text has more than 100,000 bytes"),
        (b"refuse this", 400, "the text has 9 tokens, and the model takes 3"),
        (b"fail at this", 500, "the model failed at this text; where the server runs it has said more"),
    ],
)
def test_a_text_that_cannot_be_read_changes_nothing(ask, logged, text, status, message):
    try:
        told = ask("rerun", text)
    except OSError:  # it went on sending when the server had heard enough
        assert len(text) > 10_000_000
    else:
        assert told[0] == status
        assert json.loads(told[1])["error"].startswith(message)
        assert b"secret" not in told[1]
    assert names(ask("atlases")[1]) == [(0, "it was late")]
    assert ask("0/weights?map=0&head=0&rows=0-1&columns=0-1") == (200, np.float32(1).tobytes())
    assert any("a secret of the model" in logging.Formatter().format(record) for record in logged) == (status == 500)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"method": "GET"}, 405),
        ({"method": "PUT"}, 405),
        ({"method": "OPTIONS"}, 405),
        ({"Origin": None}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Host": "evil.example:{port}"}, 403),
        ({"Content_Type": "application/json"}, 415),
        ({"Content_Type": "multipart/form-data; boundary=a"}, 415),
        ({"Content_Type": None}, 415),
    ],
)
def test_only_its_own_page_runs_the_model(ask, serving, changed, status):
    settings = {name: of and of.format(port=serving.port) for name, of in changed.items()}
    assert ask("rerun", b"never read", **settings)[0] == status
    assert names(ask("atlases")[1]) == [(0, "it was late")]


def test_other_ways_in_are_shut(ask):
    assert ask("rerun?text=a", b"a")[0] == 400
    assert ask("rerun/", b"a")[0] == 405
    assert ask("0/rerun", b"a")[0] == 405
    assert ask("0/meta", b"a")[0] == 405
    assert ask("../rerun", b"a")[0] in (404, 405)
    assert names(ask("atlases")[1]) == [(0, "it was late")]


def test_without_a_model_nothing_can_be_run():
    serving = ExplorerServer(
        {"a": Atlas.from_weights([torch.ones(1, 1, 1)]), "b": Atlas.from_weights([torch.ones(1, 1, 1)])}
    )
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        for method, path, status in (("POST", "rerun", 405), ("GET", "rerun", 404), ("GET", "atlases", 200)):
            connection.request(method, urlsplit(serving.address).path + path)
            response = connection.getresponse()
            told = response.read()
            assert response.status == status
        assert json.loads(told) == {
            "atlases": [{"number": 0, "name": "a"}, {"number": 1, "name": "b"}],
            "rerun": 0,
            "effects": None,
        }
        connection.close()
    finally:
        serving.stop()
        thread.join(30)


def test_one_run_at_a_time_while_all_else_is_answered(ask, model):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, "rerun", b"wait for me")
        assert model.begun.acquire(timeout=60)
        status, told = ask("rerun", b"me too")
        assert (status, json.loads(told)["error"]) == (
            409,
            "the model is running on another text already: wait until it is done, or cancel that",
        )
        assert json.loads(ask("0/tokens?map=0&side=key&start=1&stop=2")[1]) == ["was"]
        assert ask("1/meta")[0] == 404
        model.go_on.set()
        assert names(first.result()[1])[0] == (1, "wait for me")
    assert ask("rerun", b"me too")[0] == 200


def leave(serving, text):
    """Ask for a run, and go away when the model has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    headers = {"Origin": f"http://127.0.0.1:{serving.port}", "Content-Type": "text/plain"}
    connection.request("POST", urlsplit(serving.address).path + "rerun", body=text, headers=headers)
    return connection


def test_a_run_ends_when_nobody_waits_for_it(ask, serving, model):
    connection = leave(serving, b"wait for nobody")
    assert model.begun.acquire(timeout=60)
    connection.close()
    assert model.ended.acquire(timeout=60)
    assert not model.go_on.is_set()
    assert names(ask("rerun", b"another")[1]) == [(1, "another"), (0, "it was late")]


def test_the_server_ends_while_a_model_runs(model):
    serving = ExplorerServer({"a": model("a")}, rerun=model)
    thread = threading.Thread(target=serving.run)
    thread.start()
    connection = leave(serving, b"wait for the end")
    assert model.begun.acquire(timeout=60)
    serving.stop()
    assert model.ended.acquire(timeout=60)
    thread.join(30)
    assert not thread.is_alive()
    connection.close()


def test_a_request_for_the_old_atlas_is_answered_about_the_old_atlas(ask, monkeypatch):
    from regard.explorer import api

    monkeypatch.setattr(collection_module, "MOST_ROWS", 0)
    begun, go_on, real = threading.Event(), threading.Event(), api.displayed_weights

    def wait(*asked):
        begun.set()
        assert go_on.wait(60)
        return real(*asked)

    monkeypatch.setattr(api, "displayed_weights", wait)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(ask, "0/weights?map=0&head=0&rows=0-3&columns=0-3")
        assert begun.wait(60)
        for text in (b"one two", b"three four"):
            assert ask("rerun", text)[0] == 200
        go_on.set()
        assert late.result() == (200, np.eye(3, dtype="<f4").tobytes())
    assert ask("0/weights?map=0&head=0&rows=0-3&columns=0-3")[0] == 410


def test_a_tag_of_one_atlas_is_none_of_another(serving, ask):
    def tag(number, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        path = urlsplit(serving.address).path + f"{number}/profile?map=0&head=0&which=received"
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, response.headers["etag"]

    assert ask("rerun", b"it is late")[0] == 200
    status, first = tag(0)
    assert status == 200
    assert tag(1, **{"If-None-Match": first})[0] == 200
    assert tag(0, **{"If-None-Match": first})[0] == 304


def test_a_shelf_of_several_atlases():
    one = Atlas.from_weights([torch.ones(1, 1, 1)], title="one")
    assert Collection(one).listed()["atlases"] == [{"number": 0, "name": "one"}]
    with pytest.raises(AtlasError, match="there is no atlas to show: give one, or several by their names"):
        Collection({})
    with pytest.raises(ConfigurationError, match="there are 2 atlases and a model to run again: give the one atlas"):
        Collection({"a": one, "b": one}, rerun=lambda text: one)
    with pytest.raises(ConfigurationError, match="these atlases are records: there is no model here to run"):
        Collection(one).run("a")
    with pytest.raises(CorpusError, match="half of a character in it, a surrogate without its other half"):
        Collection(one, rerun=lambda text: one).run("\ud800")
    with pytest.raises(CorpusError, match="the text has 100,002 bytes, and at most 100,000 are read"):
        Collection(one, rerun=lambda text: one).run("é" * 50_001)
    collection = Collection(one, rerun=lambda text: Atlas([], {}))
    with pytest.raises(AtlasError, match="no map of attention in it"):
        collection.run("a")
    assert collection.listed()["atlases"] == [{"number": 0, "name": "one"}]


def test_a_run_is_stopped_on_its_own_thread_alone():
    stop, layer = threading.Event(), nn.Linear(1, 1)
    with stoppable(stop):
        stop.clear()
        layer(torch.zeros(1))
        stop.set()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(layer, torch.zeros(1)).result().shape == (1,)
        with pytest.raises(RunStopped):
            layer(torch.zeros(1))
        stop.clear()
    layer(torch.zeros(1))
    with pytest.raises(RunStopped), stoppable(stop):  # at its end, if not before
        stop.set()
    layer(torch.zeros(1))


def test_the_hook_of_a_run_changes_no_result():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    given = torch.randn(1, 5, 8)
    with torch.no_grad():
        expected = model.eval()(given)
        with stoppable(threading.Event()):
            assert torch.equal(model(given), expected)


def hostile(dice, token):
    """A request made up of parts that are right or wrong: method, path, headers and body, as bytes."""
    paths = ["rerun", "rerun/", "rerun?a=1", "0/meta", "1/meta", "2/rerun", "atlases", "atlases?rerun=1", "../rerun"]
    path = dice.choice([*paths, "9" * 400 + "/meta", "0/0/meta", "%72erun", "rerun%00", "0/__class__", "\xe9/meta"])
    body = dice.choice([b"", b"two words", b"refuse", b"fail", b"\xff\xfe", bytes(dice.randbytes(99)), b"x" * 200_000])
    kinds = ["text/plain", "text/plain;charset=UTF-8", "application/json", "", "text/plain" * 40]
    lengths = [len(body)] * 6 + [0, len(body) + 7, 10**12, -1]
    lines = [
        f"{dice.choice(['POST'] * 6 + ['GET', 'PUT', 'HEAD', 'BREW'])} /{token}/{path} HTTP/1.1",
        f"Host: 127.0.0.1{dice.choice([':{port}'] * 6 + ['', ':1'])}",
        f"Content-Type: {dice.choice(kinds)}",
        f"Content-Length: {dice.choice(lengths)}",
        *dice.choice([["Origin: http://127.0.0.1:{port}"]] * 6 + [[], ["Origin: null"], ["Origin: a", "Origin: b"]]),
        *dice.choice([[]] * 6 + [["Transfer-Encoding: chunked"], ["Expect: 100-continue"], ["Upgrade: h2c"]]),
    ]
    return "\r\n".join([*lines, "", ""]), body


def test_requests_made_up_of_right_and_wrong_parts(ask, serving, logged):
    dice, statuses = random.Random(5), set()
    for _ in range(300):
        head, body = hostile(dice, urlsplit(serving.address).path.strip("/"))
        with socket.create_connection(("127.0.0.1", serving.port), timeout=20) as raw:
            try:
                raw.sendall(head.replace("{port}", str(serving.port)).encode("latin-1") + body)
                if f"Content-Length: {len(body)}\r" not in head or "chunked" in head:
                    raw.shutdown(socket.SHUT_WR)  # more would be waited for
                told = raw.recv(1 << 16)
            except OSError:  # it was closed before all was sent
                told = b""
        if told:
            statuses.add(int(told.split(b" ", 2)[1]))
    assert statuses <= {100, 200, 400, 403, 404, 405, 410, 413, 415, 500, 499}
    assert {200, 400, 403, 405, 415} <= statuses
    failures = {record.getMessage() for record in logged if record.name == "regard.explorer"}
    assert failures <= {"the model failed at a text"}, "500 is for the model's own failures alone"
    assert len(names(ask("atlases")[1])) == 2
    assert names(ask("rerun", b"at last")[1])[0][1] == "at last"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_runs_leave_no_memory_behind():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    weights = torch.eye(400)[None]
    collection = Collection(
        Atlas.from_weights({"head": weights}), rerun=lambda text: Atlas.from_weights({"head": weights.clone()})
    )
    for number in range(20):
        collection.run(f"a {number}")
    before = resident()
    for number in range(200):  # each atlas takes half a megabyte
        collection.run(f"b {number}")
    assert resident() - before < 30e6
    assert [entry.number for entry in collection.entries] == list(range(220, 220 - MOST_KEPT, -1))
