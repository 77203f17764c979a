"""Connections with half a request give way: they neither lock anybody out nor stay."""

import contextlib
import socket
import threading
import time
import urllib.request

import pytest
import torch

from regard.explorer import Atlas

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from regard.explorer import request_guard
from regard.explorer.server import ExplorerServer


@pytest.fixture
def server():
    server = ExplorerServer(Atlas.from_weights([torch.full((1, 2, 2), 0.5)]))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,))
    thread.start()
    assert ready.wait(30)
    yield server
    server.stop()
    thread.join(30)


def half_open(server, start=b"GET / HTTP/1.1\r\nX"):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    with contextlib.suppress(OSError):
        connection.sendall(start)
    return connection


def status(server):
    with urllib.request.urlopen(server.address, timeout=30) as answer:
        return answer.status


def is_closed(connection):
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_eighty_half_open_connections_do_not_lock_the_page_out(server):
    assert status(server) == 200
    held = [half_open(server) for _ in range(80)]
    for _ in range(10):
        assert status(server) == 200
    assert is_closed(held[0])  # the oldest gave way
    for connection in held:
        connection.close()
    assert status(server) == 200


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nX"])
def test_a_request_has_to_arrive_in_time(server, start, monkeypatch):
    monkeypatch.setattr(request_guard, "REQUEST_SECONDS", 0.3)
    begun = time.monotonic()
    with half_open(server, start) as connection:
        assert is_closed(connection)
    assert time.monotonic() - begun < 20


def test_half_of_a_second_request_has_to_be_finished_too(server, monkeypatch):
    monkeypatch.setattr(request_guard, "REQUEST_SECONDS", 0.3)
    path = server.address.split(str(server.port), 1)[1]
    whole = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    with half_open(server, whole) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        time.sleep(0.6)
        connection.sendall(whole[:9])  # it was kept alive until here
        connection.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
