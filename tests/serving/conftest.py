"""Small models behind a running server."""

import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch

from regard.models.language_model import (
    AttentionConfig,
    GatedFeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    LayerConfig,
)
from regard.positions import Rotary
from regard.serving import ModelServer, ServedModel
from regard.serving.text_codec import ByteCodec
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator


@pytest.fixture(scope="session")
def language_model():
    """A model of bytes that writes letters: random weights, and an output that leaves other bytes out."""
    torch.manual_seed(2)
    rotary = Rotary(8)
    config = LanguageModelConfig(
        vocabulary_size=256,
        dim=32,
        layers=(LayerConfig(rotary=rotary), LayerConfig(before=20, rotary=rotary)),
        attention=AttentionConfig(num_heads=4, num_kv_heads=2),
        feed_forward=GatedFeedForwardConfig(48),
    )
    model = LanguageModel(config).eval()
    letters = torch.zeros(256, 1)
    letters[ord("a") : ord("z") + 1] = 1.0
    with torch.no_grad():
        assert model.output is not None
        model.output.weight.mul_(letters * 3)  # of all other bytes the logit is 0
    return model


@pytest.fixture(scope="session")
def translator():
    return Translator.load(ENGLISH_FRENCH)


@pytest.fixture(scope="session")
def bytes_model(language_model):
    return ServedModel("bytes", language_model, ByteCodec())


@contextmanager
def running(model, **settings):
    """A server of a model on a free port, in a thread."""
    server = ModelServer(model, **settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def serve():
    return running


@pytest.fixture(scope="session")
def bytes_server(bytes_model):
    with running(bytes_model, pages=200) as server:
        yield server


def asked(address, path, body=None, headers=None, timeout=60):
    """The status and body of a request; `body` is sent as JSON, or as it is where it is bytes."""
    data = json.dumps(body).encode() if not isinstance(body, bytes | None) else body
    request = urllib.request.Request(address + path, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="session")
def ask():
    return asked


@pytest.fixture(scope="session")
def eventually():
    """Wait until something holds, ten seconds at most."""

    def wait(holds):
        end = time.monotonic() + 10
        while not holds() and time.monotonic() < end:
            time.sleep(0.02)
        assert holds()

    return wait
