"""A server under load: mixed, hostile and cancelled requests at a steady rate, none of which may be its own error.

    python benchmarks/serving_load.py [REQUESTS A SECOND] [SECONDS]

Clients are threads of another process. Ends with 1 where an answer is not one of those that its request may have, where
the server logs an error, where pages are missing at the end, or where memory still grows in the last of four rounds.
"""

import collections
import itertools
import json
import logging
import multiprocessing
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

# oneDNN, and torch that calls it, keep code for the 1,024 shapes that came last, which takes minutes to fill.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
# As the command `regard` has it: threads that wait for one another spin otherwise, on cores that the clients need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import _timing
import torch
from _report import table
from serving import language_model

from regard.serving import ModelServer, ServedModel, ServingLimits
from regard.serving.text_codec import ByteCodec

CLIENTS, ROUNDS = 64, 4
MOST_GROWTH = 8 * 2**20
"""Bytes, in the last round: in those before, memory is filled that stays."""
BUSY = {429, 503}
"""There are too many requests."""
JSON = {"content-type": "application/json"}

Call = Callable[[int, random.Random], int]


def main(rate: float = 200.0, seconds: float = 60.0) -> None:
    print(_timing.machine())
    model = ServedModel("bytes", language_model(2, 64), ByteCodec())
    server, errors = ModelServer(model, limits=ServingLimits(queue=64), pages=128), _Errors()
    logging.getLogger().addHandler(errors)
    thread = threading.Thread(target=server.run)
    thread.start()
    counts, spent, sizes = collections.Counter[tuple[str, int]](), 0.0, [resident()]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for _ in range(ROUNDS):
            of_round, took = pool.apply(send, (server.port, rate, seconds / ROUNDS))
            counts.update(of_round)
            spent += took
            time.sleep(2.0)  # what was cut off is given back
            sizes.append(resident())
    others = server.state.others()
    server.stop()
    thread.join()
    table(
        f"{seconds:.0f} s of mixed, hostile and cancelled requests",
        ["requests a second, asked for", "sent", "memory, MiB", "pages free at the end", "errors logged"],
        [
            [
                *(f"{rate:.0f}", f"{sum(counts.values()) / spent:.0f}"),
                ", ".join(f"{size / 2**20:.0f}" for size in sizes),
                f"{others['regard_pages_free']:.0f} of {others['regard_pages']:.0f}",
                str(len(errors.messages)),
            ]
        ],
    )
    rows = [[kind, str(status or "cut off"), str(count)] for (kind, status), count in sorted(counts.items())]
    table("What was answered", ["request", "status", "how many"], rows)
    wrong = [f"{kind}: {status}" for kind, status in sorted(counts) if status not in KINDS[kind][1] | BUSY]
    wrong += errors.messages
    if others["regard_pages_free"] != others["regard_pages"]:
        wrong.append("pages are missing")
    if sizes[-1] - sizes[-2] > MOST_GROWTH:
        wrong.append(f"memory still grows: by {(sizes[-1] - sizes[-2]) / 2**20:.1f} MiB in the last round")
    if wrong:
        raise SystemExit("\n".join(["serving_load:", *wrong]))


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def resident() -> int:
    """Bytes of this process in memory, or the most that they have been where the system does not tell."""
    told = Path("/proc/self/statm")
    if told.exists():
        return int(told.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def send(port: int, rate: float, seconds: float) -> tuple[dict[tuple[str, int], int], float]:
    """Requests of all kinds at a steady rate: how many of each had which status, and how long it took."""
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    numbers, began = itertools.count(), time.perf_counter()
    names = [name for name, (_, _, share) in KINDS.items() for _ in range(share)]

    def client(_: int) -> None:
        for number in _turns(numbers, began, rate, seconds):
            draw = random.Random(number)
            name = draw.choice(names)
            counts[name, KINDS[name][0](port, draw)] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return dict(counts), time.perf_counter() - began


def _turns(numbers: Iterator[int], began: float, rate: float, seconds: float) -> Iterator[int]:
    """Numbers of requests, each when its time has come."""
    for number in numbers:
        if number >= rate * seconds:
            return
        time.sleep(max(began + number / rate - time.perf_counter(), 0.0))
        yield number


def status_of(port: int, body: object, *, path: str = "/v1/completions", method: str = "POST", **headers: str) -> int:
    """The status of an answer, which is read to its end."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, data, JSON | headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def prompt(draw: random.Random, tokens: int) -> dict[str, object]:
    return {"prompt": "a" * draw.randrange(1, 60), "max_tokens": tokens}


def cut_off(port: int, data: bytes, wait: float = 0.0) -> int:
    """Send some bytes and leave."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        time.sleep(wait)
    return 0


def posted(body: object, *, more: int = 0) -> bytes:
    """A request as it is sent, that announces some bytes more than it has."""
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(text) + more}\r\n\r\n"
    return head.encode() + text


KINDS: dict[str, tuple[Call, set[int], int]] = {
    "whole": (lambda port, draw: status_of(port, prompt(draw, 4)), {200}, 6),
    "whole, streamed": (lambda port, draw: status_of(port, prompt(draw, 4) | {"stream": True}), {200}, 2),
    "whole, with attention": (lambda port, draw: status_of(port, prompt(draw, 2) | {"attention": {}}), {200}, 1),
    "cancelled at once": (lambda port, draw: cut_off(port, posted(prompt(draw, 500))), {0}, 4),
    "cancelled while it streams": (
        *(lambda port, draw: cut_off(port, posted(prompt(draw, 500) | {"stream": True}), 0.05), {0}, 2),
    ),
    "half a body": (lambda port, draw: cut_off(port, posted(prompt(draw, 4), more=100)), {0}, 1),
    "half a head": (lambda port, draw: cut_off(port, b"POST /v1/completions HTTP/1.1\r\nhost: loc"), {0}, 1),
    "no HTTP": (lambda port, draw: cut_off(port, draw.randbytes(200)), {0}, 1),
    "no JSON": (lambda port, draw: status_of(port, b'{"prompt": '), {400}, 2),
    "no object": (lambda port, draw: status_of(port, [1, 2]), {400}, 1),
    "wrong types": (lambda port, draw: status_of(port, {"prompt": {"a": 1}, "max_tokens": "x"}), {400}, 1),
    "too many tokens": (lambda port, draw: status_of(port, prompt(draw, 10**6)), {413}, 2),
    "no such model": (lambda port, draw: status_of(port, prompt(draw, 4) | {"model": "another"}), {404}, 1),
    "no such path": (lambda port, draw: status_of(port, {}, path="/v1/nothing"), {404}, 1),
    "another method": (lambda port, draw: status_of(port, b"", method="PUT"), {405}, 1),
    "another host": (lambda port, draw: status_of(port, prompt(draw, 4), host="elsewhere.example"), {403}, 1),
    "metrics": (lambda port, draw: status_of(port, b"", path="/metrics", method="GET"), {200}, 1),
}
"""Of each kind of request: how it is sent, the statuses that it may have, 0 where it does not wait, and its share."""


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*map(float, sys.argv[1:]))
