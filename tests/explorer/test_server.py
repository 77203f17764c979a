"""Where the explorer's server listens, and that it does no work for nobody."""

import asyncio
import socket
import sys

import pytest
import torch

from regard.errors import AtlasError, ConfigurationError, MissingExtra
from regard.explorer import Atlas

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from regard.explorer.asgi_app import application
from regard.explorer.collection import Collection
from regard.explorer.server import ExplorerServer
from regard.explorer.static_page import WebBundle


@pytest.fixture
def atlas():
    return Atlas.from_weights([torch.full((1, 2, 2), 0.5)])


def test_a_port_that_is_taken_is_told(atlas):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"the port {port} of 127.0.0.1 cannot be used: .* Choose another"):
            ExplorerServer(atlas, port)
    with pytest.raises(ConfigurationError, match="port is 70000; it needs to be between 0"):
        ExplorerServer(atlas, 70000)


def test_a_port_may_be_chosen_and_is_given_back(atlas):
    first = ExplorerServer(atlas)
    first.close()
    again = ExplorerServer(atlas, first.port)
    assert f":{first.port}/" in again.address
    again.close()


def test_without_maps_or_without_the_extra_nothing_is_served(atlas, monkeypatch):
    with pytest.raises(AtlasError, match="no map of attention"):
        ExplorerServer(Atlas([], {}))
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(MissingExtra, match=r"pip install 'regard\[explorer\]'"):
        ExplorerServer(atlas)


def test_what_nobody_waits_for_any_more_is_not_computed(atlas, monkeypatch):
    computed = []
    monkeypatch.setattr("regard.explorer.api.displayed_weights", lambda *of: computed.append(of))
    app = application(Collection(atlas), WebBundle.read(), token="t", host="127.0.0.1", port=1)
    query = b"map=0&head=0&rows=0-1&columns=0-2"
    scope = {"type": "http", "method": "GET", "path": "/t/0/weights", "query_string": query, "http_version": "1.1"}
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    async def run():
        await app({**scope, "headers": [(b"host", b"127.0.0.1:1")]}, receive, send)

    asyncio.run(run())
    assert (sent[0]["status"], computed) == (499, [])


@pytest.mark.parametrize(
    "embedding",
    [
        "",
        "null",
        "localhost:8000",
        "http://a.b/slides",
        "http://a.b; script-src *",
        "http://a b",
        "file:///slides.html",
        "*",
    ],
)
def test_what_is_no_origin_may_not_show_the_page(atlas, embedding):
    with pytest.raises(ConfigurationError, match="embedding is .*; it needs to be an origin, scheme, host and port"):
        ExplorerServer(atlas, embedding=embedding)
