"""Models of Hugging Face with regard's attention in ONNX Runtime: small ones, with random weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import regard.huggingface

from .exporting import SEQUENCE, OnnxModel, assert_agrees_in_onnx, assert_same

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter

VOCABULARY = 50
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}


def model_of(architecture: str, config: str, **settings: Any) -> nn.Module:
    """A model of an architecture with regard's attention."""
    torch.manual_seed(0)
    regard.huggingface.register()
    kind = getattr(transformers, architecture)
    return kind._from_config(getattr(transformers, config)(**settings), attn_implementation="regard").eval()


class Padded(nn.Module):
    """The first result of a model for tokens and their padding mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.model(tokens, attention_mask=mask)[0]


class WithPast(nn.Module):
    """A decoder's logits, keys and values, for tokens after those of a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache(tuple(zip(past[::2], past[1::2], strict=True)))
        found = self.model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
        return found.logits, *(each for layer in found.past_key_values.layers for each in (layer.keys, layer.values))


class Translating(nn.Module):
    """The logits of an encoder-decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(input_ids=source, decoder_input_ids=target, use_cache=False).logits


def padded(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - 1 :] = 0
    return torch.randint(VOCABULARY, (batch, length)), mask


MODELS = {
    "bert": ("BertModel", "BertConfig", SMALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 4}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"sliding_window": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_padded_texts(name):
    architecture, config, settings = MODELS[name]
    module = Padded(model_of(architecture, config, **settings))
    assert_agrees_in_onnx(module, padded, (SEQUENCE, SEQUENCE), [(2, 6), (3, 17), (1, 9)])


def test_llama_with_a_cache():
    model = model_of("LlamaForCausalLM", "LlamaConfig", **GROUPED)
    step, past = WithPast(model), [torch.randn(2, 2, 3, 8) for _ in range(4)]
    grows = tuple({0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in past)
    example = torch.randint(VOCABULARY, (2, 4)), torch.ones(2, 7, dtype=torch.int64)
    graph = OnnxModel(step, (*example, *past), (SEQUENCE, SEQUENCE, grows))
    for batch in (3, 1):
        text, mask = torch.randint(VOCABULARY, (batch, 17)), torch.ones(batch, 17, dtype=torch.int64)
        with torch.no_grad():
            expected = model(text, attention_mask=mask).logits
        past, logits = [torch.zeros(batch, 2, 0, 8)] * 4, []
        for start, stop in ((0, 7), (7, 8), (8, 17)):
            part, *past = graph(text[:, start:stop], mask[:, :stop], *past)
            logits.append(part)
        assert_same(torch.cat(logits, 1), expected, f"batch {batch}")


def test_an_encoder_decoder():
    settings = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    module = Translating(model_of("T5ForConditionalGeneration", "T5Config", **settings))

    def texts(batch: int, source: int, target: int) -> tuple[Tensor, Tensor]:
        return torch.randint(VOCABULARY, (batch, source)), torch.randint(VOCABULARY, (batch, target))

    assert_agrees_in_onnx(module, texts, (SEQUENCE, SEQUENCE), [(2, 6, 5), (3, 17, 9), (1, 9, 2)])
