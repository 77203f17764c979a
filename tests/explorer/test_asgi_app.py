"""The explorer's server over a real socket: what it tells, what it refuses, and that it goes on."""

import http.client
import json
import logging
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
import torch

import regard
from regard.explorer import Atlas, record

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from regard.explorer.server import ExplorerServer

LENGTH = 300
GOOD = (
    "0/meta",
    "0/tokens?map=0&side=key&start=0&stop=300",
    "0/pooled?map=0&head=1&level=0&reduce=mean",
    "0/overview?map=0&reduce=max",
    "0/weights?map=0&head=0&rows=0-256&columns=44-300",
    "0/profile?map=0&head=1&which=received",
    "0/norms?map=0&head=1",
    "0/top?map=0&head=1&side=key&index=7&count=3&by=contribution",
    "0/kept?map=0&queries=4.5&keys=-&by=weight",
    "0/ranking?map=0&queries=-&keys=3&by=contribution",
    "0/changes?other=0&map=0&queries=4&keys=3",
)
BAD = {
    "0/meta?map=0": 400,
    "0/tokens?map=0&side=key&start=5&stop=5": 400,
    "0/tokens?map=0&side=key&start=0&stop=301": 400,
    "0/pooled?map=0&head=2&level=0&reduce=mean": 400,
    "0/pooled?map=0&head=0&level=0&reduce=__class__": 400,
    "0/overview?map=1&reduce=max": 400,
    "0/weights?map=0&head=0&rows=0-257&columns=0-1": 400,
    "0/weights?map=0&head=0&rows=0-1&columns=0-99999999999": 400,
    "0/weights?map=0&head=0&rows=0-1": 400,
    "0/weights?map=0&head=0&rows=0-1&columns=0-1&columns=0-1": 400,
    "0/weights?map=0&head=0&rows=NaN-1&columns=0-1": 400,
    "0/weights?map=-1&head=0&rows=0-1&columns=0-1": 400,
    "0/profile?map=0&head=%D9%A1&which=entropy": 400,
    "0/profile?map=0&head=1&which=" + "x" * 5000: 400,
    "0/top?map=0&head=0&side=row&index=0&count=3&by=weight": 400,
    "0/top?map=0&head=0&side=key&index=300&count=3&by=weight": 400,
    "0/kept?map=0&queries=1,2&keys=-&by=weight": 400,
    "0/kept?map=0&queries=-&keys=-&by=weight": 400,
    "0/ranking?map=0&queries=0&keys=0&by=__class__": 400,
    "0/changes?other=7&map=0&queries=0&keys=0": 400,
    "0/changes?other=0&map=0&queries=0&keys=%00": 400,
    "..": 404,
    "%2e%2e/%2e%2e/etc/passwd": 404,
    "explorer.js/": 404,
    "/etc/passwd": 404,
    "web/explorer.js": 404,
    "index.html": 404,
    "%00": 404,
    "answer": 404,
}


@pytest.fixture(scope="module")
def atlas():
    torch.manual_seed(0)
    layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal())
    with torch.no_grad(), record(torch.nn.Sequential(layer)) as recording:
        recording.model(torch.randn(1, LENGTH, 8))
    return recording.atlas(tokens=[f"<b>{i}" for i in range(LENGTH)])


@pytest.fixture(scope="module")
def serving(atlas):
    serving = ExplorerServer(atlas)
    thread = threading.Thread(target=serving.run)
    thread.start()
    yield serving
    serving.stop()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def ask(serving):
    """Ask for what is below the token; a path that begins with "!" is taken as it is."""

    def asking(path, method="GET", host=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        at = path[1:] if path.startswith("!") else urlsplit(serving.address).path + path
        connection.putrequest(method, at, skip_host=True)
        for value in [f"127.0.0.1:{serving.port}"] if host is None else host:
            connection.putheader("Host", value)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, response.headers, body

    return asking


def test_it_listens_on_the_loopback_interface_alone(serving):
    assert serving._socket.getsockname()[0] == "127.0.0.1"
    token = urlsplit(serving.address).path.strip("/")
    assert len(token) >= 32
    other = ExplorerServer(Atlas.from_weights([torch.ones(1, 1, 1)]))
    other.close()
    assert token not in other.address


def test_the_page_comes_with_a_strict_policy(ask):
    for name, kind in (("", "text/html"), ("explorer.js", "text/javascript"), ("explorer.css", "text/css")):
        status, headers, body = ask(name)
        assert status == 200
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        file = Path(regard.__file__).parent / "explorer" / "web" / (name or "index.html")
        assert body == file.read_bytes()
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert not [header for header in headers if header.lower().startswith("access-control")]
        assert "server" not in headers
    assert ask("?renderer=canvas")[0] == 200


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://slides.example", "http://[::1]:8000"])
def test_pages_of_one_origin_may_show_it_in_a_frame(atlas, origin):
    server = ExplorerServer(atlas, embedding=origin)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with urlopen(server.address) as answer:
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    finally:
        server.stop()
        thread.join()
    assert policy["frame-ancestors"] == origin
    assert policy["default-src"] == policy["base-uri"] == "'none'"


def test_numbers_are_the_atlas_s(ask, atlas):
    status, headers, body = ask("0/weights?map=0&head=1&rows=20-276&columns=0-256")
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    told = np.frombuffer(body, "<f4").reshape(256, 256)
    exists = np.tril(np.ones((LENGTH, LENGTH), dtype=bool))[20:276, :256]
    np.testing.assert_array_equal(np.isnan(told), ~exists)
    np.testing.assert_array_equal(told[exists], atlas.maps[0].weights(1, slice(20, 276), slice(0, 256))[exists])
    pooled = np.frombuffer(ask("0/pooled?map=0&head=1&level=0&reduce=mean")[2], "<f4")
    np.testing.assert_array_equal(pooled, atlas.maps[0].pooled(1, 0, "mean").ravel())
    assert json.loads(ask("0/tokens?map=0&side=query&start=7&stop=9")[2]) == ["<b>7", "<b>8"]
    meta = json.loads(ask("0/meta")[2])
    assert (meta["maps"][0]["heads"], meta["maps"][0]["queries"]) == (2, LENGTH)


def test_an_answer_that_is_known_is_neither_computed_nor_sent_again(ask, monkeypatch):
    path = "0/weights?map=0&head=1&rows=0-9&columns=0-9"
    _, headers, _ = ask(path)
    assert headers["cache-control"] == "private, max-age=3600, immutable"
    monkeypatch.setattr("regard.explorer.api.displayed_weights", None)
    assert ask(path, If_None_Match=headers["etag"])[::2] == (304, b"")
    monkeypatch.undo()
    monkeypatch.setattr("regard.explorer.api.displayed_weights", lambda *_: np.zeros((9, 9), np.float32))
    assert ask(path.replace("head=1", "head=0"), If_None_Match=headers["etag"])[::2] == (200, bytes(4 * 81))
    assert ask(path, If_None_Match='"else"')[::2] == (200, bytes(4 * 81))
    assert ask("0/meta")[1]["cache-control"] == "no-store"


@pytest.mark.parametrize("path", GOOD)
def test_what_is_asked_well_is_answered(ask, path):
    assert ask(path)[0] == 200


@pytest.mark.parametrize("path", BAD)
def test_what_is_asked_badly_is_refused_in_words(ask, path):
    status, headers, body = ask(path)
    assert status == BAD[path]
    assert set(json.loads(body)) == {"error"}
    assert b"Traceback" not in body
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        (["127.0.0.1:{port}"], None, 200),
        (["localhost:{port}"], None, 200),
        (["LOCALHOST:{port}"], "http://localhost:{port}", 200),
        (["127.0.0.1:{port}"], "http://127.0.0.1:{port}", 200),
        (["127.0.0.1:{port}"], "http://localhost:{port}", 403),
        (["127.0.0.1:{port}"], "https://127.0.0.1:{port}", 403),
        (["127.0.0.1:{port}"], "http://evil.example", 403),
        (["127.0.0.1:{port}"], "null", 403),
        (["127.0.0.1"], None, 403),
        (["127.0.0.1:1"], None, 403),
        (["evil.example:{port}"], None, 403),
        (["127.0.0.1:{port}.evil.example"], None, 403),
        (["[::1]:{port}"], None, 403),
        ([""], None, 403),
        ([], None, 400),
        (["127.0.0.1:{port}", "evil.example"], None, 400),
    ],
)
def test_only_its_own_page_on_this_machine_is_answered(ask, serving, host, origin, status):
    headers = {} if origin is None else {"Origin": origin.format(port=serving.port)}
    assert ask("0/meta", host=[of.format(port=serving.port) for of in host], **headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
def test_it_is_asked_by_get_alone(ask, method):
    status, headers, body = ask("0/meta", method=method)
    assert (status, headers["allow"]) == (405, "GET")
    assert method == "HEAD" or "is asked by GET" in json.loads(body)["error"]
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["!/", "!/meta", "!//meta", "!/wrong/meta", "!/%F0%9F%98%80/", "!/{token}", "!/{token}x/"]
)
def test_without_the_token_there_is_nothing(ask, serving, path):
    status, _, body = ask(path.format(token=urlsplit(serving.address).path.strip("/")))
    assert status == 404
    assert "open the address that the server printed" in json.loads(body)["error"]


def test_what_fails_inside_tells_nothing(ask, monkeypatch, logged):
    def fail(*_):
        raise RuntimeError("a secret")

    monkeypatch.setattr("regard.explorer.api.displayed_weights", fail)
    status, _, body = ask("0/weights?map=0&head=0&rows=0-1&columns=0-1")
    assert status == 500
    assert json.loads(body) == {"error": "the server failed at this; where it runs it has said more"}
    [failure] = logged
    assert "a secret" in logging.Formatter().format(failure)


def test_it_listens_while_it_computes(ask, monkeypatch):
    begun, go_on = threading.Semaphore(0), threading.Event()

    def wait(of, head, rows, columns):
        begun.release()
        assert go_on.wait(60)
        return np.zeros((rows.stop - rows.start, columns.stop - columns.start), np.float32)

    monkeypatch.setattr("regard.explorer.api.displayed_weights", wait)
    path = "0/weights?map=0&head=0&rows=0-1&columns=0-2"
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(ask, path) for _ in range(5)]
        try:
            assert begun.acquire(timeout=60)
            assert begun.acquire(timeout=60)
            assert ask("0/meta")[0] == 200
            assert ask("nothing")[0] == 404
            assert not begun.acquire(timeout=0.2)  # two at a time
        finally:
            go_on.set()
        assert [done.result()[::2] for done in waiting] == [(200, bytes(8))] * 5


def test_what_is_no_http_is_turned_away(serving, ask):
    for sent in (b"\x16\x03\x01" + os.urandom(200), b"GET " + b"a" * 200_000 + b"\r\n\r\n", b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", serving.port), timeout=30) as raw:
            try:
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                told = raw.recv(1 << 16)
            except OSError:  # it was closed before all was sent
                told = b""
        assert told == b"" or told.startswith(b"HTTP/1.1 400")
    assert ask("0/meta")[0] == 200


def crowd(ask, count, seed):
    """Good and bad requests from several sides at once; the good and the bad that were answered otherwise."""
    chosen = random.Random(seed).choices([*((path, 200) for path in GOOD), *BAD.items()], k=count)
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda of: ask(of[0])[0], chosen))
    return [(of, status) for of, status in zip(chosen, statuses, strict=True) if of[1] != status]


def test_four_hundred_requests_good_and_bad(ask):
    assert crowd(ask, 400, seed=0) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_many_requests_leave_no_memory_behind(ask):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    assert crowd(ask, 1000, seed=1) == []
    before = resident()
    assert crowd(ask, 5000, seed=2) == []
    assert resident() - before < 30e6
