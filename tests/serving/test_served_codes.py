"""Pages of codes behind the server: its answers are those of the model with a cache that is packed so."""

import json

import pytest
import torch

from regard.core.packing import Packing
from regard.errors import ConfigurationError
from regard.nn import CacheFormat
from regard.serving import ModelServer, ServedModel

CODES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
PROMPTS = ["Once upon a time, " * 5, "Hi", "Schöne Grüße"]


@pytest.mark.parametrize("code", CODES)
def test_answers_are_those_of_a_packed_cache(serve, ask, bytes_model, language_model, code):
    format_ = CacheFormat(Packing(code), Packing(code))
    expected = []
    for prompt in PROMPTS:
        cache = language_model.make_cache().packed(format_)
        stream = language_model.generate(torch.tensor([list(prompt.encode())]), 24, cache=cache)
        expected.append(bytes(int(token) for token in stream).decode("utf-8", "replace"))
    with serve(bytes_model, pages=40, cache_format=format_) as server:
        status, answer = ask(server.address, "/v1/completions", {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0})
        memory = server.state.worker.batch.paged.memory
    assert status == 200, answer
    assert [choice["text"] for choice in json.loads(answer)["choices"]] == expected
    with serve(bytes_model, pages=40) as server:
        assert memory.nbytes < 0.5 * server.state.worker.batch.paged.memory.nbytes


def test_a_translator_has_no_pages(translator):
    model = ServedModel("en-fr", translator=translator)
    with pytest.raises(ConfigurationError, match="and this is a translator, which has none: leave it out"):
        ModelServer(model, cache_format=CacheFormat())
