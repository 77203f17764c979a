"""What a server takes at most, from whom, and what is left of requests whose client has gone."""

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from regard.errors import ConfigurationError
from regard.serving import ServedModel, ServingLimits

BODY = {"prompt": "Hallo", "max_tokens": 5, "temperature": 0}
PATH = "/v1/completions"


def raw(server, body, *, path=PATH, headers=""):
    """A connection with a request on it."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\ncontent-length: {len(text)}\r\n{headers}\r\n"
    connection.sendall(head.encode() + text)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_pages_return_where_a_client_goes_away(bytes_server, eventually, stream):
    batch = bytes_server.state.worker.batch
    cancelled = batch.counts.generated
    connections = [raw(bytes_server, BODY | {"max_tokens": 4000, "stream": stream}) for _ in range(3)]
    eventually(lambda: len(batch.running) == 3)
    for connection in connections:
        connection.close()
    eventually(lambda: batch.is_empty and batch.paged.memory.pool.free == 200)
    assert batch.counts.generated - cancelled < 3 * 4000
    eventually(lambda: bytes_server.state.metrics.running == 0)


def test_too_large_is_413(bytes_server, ask):
    status, text = ask(bytes_server.address, PATH, BODY | {"user": "x" * 2**20})
    assert status == 413
    assert "larger than 1,048,576 bytes" in json.loads(text)["error"]["message"]


def test_a_full_queue_is_429_and_a_late_answer_503(bytes_model, serve, ask, eventually):
    with serve(bytes_model, pages=100, limits=ServingLimits(queue=2, seconds=1.5)) as server:
        long = BODY | {"max_tokens": 4000}
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ask, server.address, PATH, long) for _ in range(2)]
            eventually(lambda: server.state.metrics.running == 2)
            status, text = ask(server.address, PATH, BODY)
            assert status == 429
            assert "2 requests are being answered, the most that are taken" in text
            assert json.loads(text)["error"]["type"] == "rate_limit_error"
            for answer in answers:
                status, text = answer.result()
                assert status == 503
                assert "took longer than 1.5 s" in text
        eventually(lambda: server.state.worker.batch.is_empty)
        assert ask(server.address, PATH, BODY)[0] == 200
        assert ask(server.address, "/health")[0] == 200


def test_a_stream_that_takes_too_long_ends_with_an_error(bytes_model, serve, ask):
    with serve(bytes_model, pages=100, limits=ServingLimits(seconds=1.0)) as server:
        status, text = ask(server.address, PATH, BODY | {"max_tokens": 4000, "stream": True})
        assert status == 200
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert json.loads(events[0])["choices"]
        assert "took longer than 1 s" in json.loads(events[-1])["error"]["message"]


def test_who_may_ask(bytes_server, ask):
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        assert ask(bytes_server.address, PATH, BODY, headers)[0] == 403
    own = {"origin": bytes_server.address}
    assert ask(bytes_server.address, PATH, BODY, own)[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the request is no JSON"),
        (b"[" * 100_000, 400, "the request is no JSON"),
        (b"\xff\xfe", 400, "the request is no JSON"),
        (b"[]", 400, "the request: Input should be a valid dictionary"),
        (b"{}", 400, "prompt: Field required"),
        (b'{"prompt": [1, "a"]}', 400, "prompt"),
        (b'{"prompt": "a", "seed": 1e400}', 400, "seed"),
        (b'{"prompt": "\\ud800"}', 400, "surrogates not allowed"),
    ],
)
def test_malformed_requests(bytes_server, ask, body, status, message):
    found, text = ask(bytes_server.address, PATH, body)
    assert found == status
    assert message in json.loads(text)["error"]["message"]


def test_paths_and_methods(bytes_server, ask):
    status, text = ask(bytes_server.address, "/v1/embeddings", {})
    assert status == 404
    assert "there are /health, /metrics" in json.loads(text)["error"]["message"]
    assert ask(bytes_server.address, PATH)[0] == 405
    status, text = ask(bytes_server.address, "/nothing")
    assert (status, json.loads(text)["error"][:19]) == (404, "there is no '/nothi")


def test_metrics_count_what_was_done(bytes_model, serve, ask):
    with serve(bytes_model, pages=100, lookup=True) as server:
        for _ in range(3):
            assert ask(server.address, PATH, BODY)[0] == 200
        ask(server.address, PATH, {})
        text = ask(server.address, "/metrics")[1]
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines[f'regard_requests_total{{path="{PATH}",status="200"}}'] == "3"
        assert lines[f'regard_requests_total{{path="{PATH}",status="400"}}'] == "1"
        assert lines["regard_tokens_generated_total"] == "15"
        assert lines["regard_pages_free"] == "100"
        assert lines["regard_request_seconds_count"] == "4"
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))


def test_what_was_begun_is_answered_at_the_end(bytes_model, serve, ask, eventually):
    with serve(bytes_model, pages=100) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server.address, PATH, BODY | {"max_tokens": 150})
        eventually(lambda: server.state.worker.batch.running)
        server.stop()
        status, text = answer.result()
        assert status == 200
        assert json.loads(text)["usage"]["completion_tokens"] == 150


def test_a_model_that_fails_answers_500_and_goes_on(language_model, bytes_model, serve, ask, monkeypatch, eventually):
    with serve(bytes_model, pages=100) as server:
        with monkeypatch.context() as patched:
            patched.setattr(language_model, "next_features", lambda *args, **named: 1 / 0)
            status, text = ask(server.address, PATH, BODY)
            assert status == 500
            assert "the model failed at this text" in text
        assert server.state.worker.batch.paged.memory.pool.free == 100
        assert ask(server.address, PATH, BODY)[0] == 200


def test_mixed_hostile_and_cancelled_requests(bytes_model, language_model, serve, ask, eventually):
    """Whole answers stay right, and nothing is left of the others."""
    expected = {}
    with serve(bytes_model, pages=60, limits=ServingLimits(queue=32)) as server:
        expected = {n: ask(server.address, PATH, BODY | {"prompt": "x" * n, "max_tokens": 8}) for n in range(1, 6)}

        def one(number):
            draw = random.Random(number)
            kind, size = draw.choice(["whole", "whole", "gone", "bad", "long"]), draw.randrange(1, 6)
            if kind == "whole":
                status, text = ask(server.address, PATH, BODY | {"prompt": "x" * size, "max_tokens": 8})
                assert status in (200, 429)
                if status == 200:
                    assert json.loads(text)["choices"] == json.loads(expected[size][1])["choices"]
            elif kind == "gone":
                connection = raw(server, BODY | {"max_tokens": 2000, "stream": draw.random() < 0.5})
                time.sleep(draw.random() / 10)
                connection.close()
            else:
                body = b"{" if kind == "bad" else {"prompt": "y" * 5000, "max_tokens": 1}
                assert ask(server.address, PATH, body)[0] in ((400, 429) if kind == "bad" else (413, 429))
            return kind

        with ThreadPoolExecutor(12) as pool:
            assert set(pool.map(one, range(120))) == {"whole", "gone", "bad", "long"}
        batch = server.state.worker.batch
        eventually(lambda: batch.is_empty and batch.paged.memory.pool.free == 60)
        eventually(lambda: server.state.metrics.running == 0)
        text = ask(server.address, "/metrics")[1]
        assert 'status="500"' not in text
        assert not batch.paged.memory.pool.sequences
        assert threading.active_count() < 60


@pytest.mark.parametrize("change", [{"seconds": 0}, {"queue": 0}, {"tokens": -1}, {"seconds": float("inf")}])
def test_numbers_of_limits(change):
    with pytest.raises(ConfigurationError, match="needs"):
        ServingLimits(**change)


def test_neither_model(serve):
    with (
        pytest.raises(ConfigurationError, match="neither a language model nor a translator"),
        serve(ServedModel("none")),
    ):
        pass
