"""A server beside the library that it serves: sentences and tokens a second.

Clients are threads of another process, so that the server has its own interpreter.
"""

import json
import multiprocessing
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import _timing
import torch
from _report import met, table

from regard.models import language_model as lm
from regard.positions import Rotary
from regard.serving import ModelServer, ServedModel
from regard.serving.text_codec import ByteCodec
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

LINES = ["A dog runs in the park.", "Two men are playing guitar on a stage.", "A girl in a red coat reads a book."]
CLIENTS = 32


def main(sentences: int = 192, texts: int = 16, new: int = 32) -> None:
    print(_timing.machine())
    rows = [translated(sentences), continued(texts, new)]
    table(
        "Served, beside the library itself (`benchmarks/serving.py`)",
        ["model", "a second, library", "a second, served", "share", "goal"],
        rows,
    )


def served_seconds(server: ModelServer, path: str, bodies: list[dict]) -> float:
    """The time of all requests, by clients of another process."""
    thread = threading.Thread(target=server.run)
    thread.start()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(ask_all, (server.port, path, bodies[:2]))
        spent = pool.apply(ask_all, (server.port, path, bodies))
    server.stop()
    thread.join()
    return spent


def ask_all(port: int, path: str, bodies: list[dict]) -> float:
    """The time until all requests are answered; runs in a process of clients."""
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(lambda body: ask(port, path, body), bodies))
    if set(statuses) != {200}:
        raise SystemExit(f"serving: the statuses are {sorted(set(statuses))}, not 200 alone")
    return time.perf_counter() - began


def ask(port: int, path: str, body: object) -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def translated(sentences: int) -> list[str]:
    translator = Translator.load(ENGLISH_FRENCH)
    lines = [LINES[number % len(LINES)] for number in range(sentences)]
    translator.translate(lines[:CLIENTS], observe=False)
    began = time.perf_counter()
    for first in range(0, sentences, CLIENTS):  # as many at once as there are clients
        translator.translate(lines[first : first + CLIENTS], observe=False)
    own = time.perf_counter() - began
    server = ModelServer(ServedModel("translator", translator=translator))
    bodies = [{"q": line, "source": "en", "target": "fr"} for line in lines]
    spent = served_seconds(server, "/translate", bodies)
    rates = sentences / own, sentences / spent
    return ["the shipped translator", *(f"{rate:.0f}" for rate in rates), f"{own / spent:.0%}", met(rates[1], 50)]


def language_model(layers: int = 8, dim: int = 512) -> lm.LanguageModel:
    attention, rotary = lm.AttentionConfig(num_heads=8, num_kv_heads=4), Rotary(dim // 8)
    feed_forward = lm.GatedFeedForwardConfig(1408)
    return lm.LanguageModel(
        lm.LanguageModelConfig(256, dim, (lm.LayerConfig(rotary=rotary),) * layers, attention, feed_forward)
    ).eval()


def continued(texts: int, new: int) -> list[str]:
    model, draw = language_model(), random.Random(1)
    prompts = ["".join(draw.choice("abcdefgh ") for _ in range(draw.randrange(20, 120))) for _ in range(texts)]
    list(model.generate_many([[1, 2, 3]] * texts, 2))
    began = time.perf_counter()
    list(model.generate_many([list(prompt.encode()) for prompt in prompts], new))
    own = time.perf_counter() - began
    server = ModelServer(ServedModel("bytes", model, ByteCodec()))
    bodies = [{"prompt": prompt, "max_tokens": new, "temperature": 0} for prompt in prompts]
    spent = served_seconds(server, "/v1/completions", bodies)
    rates = texts * new / own, texts * new / spent
    return ["8 layers of 512, tokens", *(f"{rate:.0f}" for rate in rates), f"{own / spent:.0%}", met(own / spent, 0.9)]


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
