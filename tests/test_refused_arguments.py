"""Arguments of the wrong kind are refused where they are given, by an error that says what is needed."""

# pyright: reportArgumentType=false
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard import biases, linear, masks, nn, normalizers, positions
from regard.errors import ConfigurationError, DtypeError, KernelError, ShapeError
from regard.models import LanguageModel
from regard.models.language_model import (
    AttentionConfig,
    FeedForwardConfig,
    LanguageModelConfig,
    LayerConfig,
    Sampling,
)

Q = torch.randn(1, 2, 5, 8)
TOKENS = torch.tensor([[1, 2, 3]])


def projections(**options: Any) -> nn.Projections:
    return nn.Projections(16, 2, **options)


def sdpa(**options: Any) -> torch.Tensor:
    return regard.scaled_dot_product_attention(Q, Q, Q, **options)


def linear_attention(**options: Any) -> torch.Tensor:
    return linear.linear_attention(Q, Q, Q, feature_map=linear.Elu(), **options)


def config(**changes: Any) -> LanguageModelConfig:
    settings: dict[str, Any] = {
        "vocabulary_size": 9,
        "dim": 8,
        "layers": (LayerConfig(),),
        "attention": AttentionConfig(num_heads=2),
        "feed_forward": FeedForwardConfig(16),
    }
    return LanguageModelConfig(**{**settings, **changes})


def generate(tokens: Any = TOKENS, **options: Any) -> list[torch.Tensor]:
    return list(LanguageModel(config()).eval().generate(tokens, 3, **options))


def layer(**options: Any) -> nn.Attention:
    return nn.Attention(projections(), **options)


def block(residual: Any) -> nn.TransformerBlock:
    return nn.TransformerBlock(layer(), nn.FeedForward(16, 32), residual)


def refuses(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_of_attention():
    refuses(lambda: regard.attention(Q, Q, Q, kernel=3), KernelError, "kernel is 3; it needs the name of one")
    refuses(lambda: sdpa(is_causal="no"), ConfigurationError, "is_causal is 'no'; it needs True or False")
    refuses(lambda: sdpa(enable_gqa=None), ConfigurationError, "enable_gqa is None; it needs True or False")
    refuses(lambda: regard.merge(None), ConfigurationError, "parts is None; merge needs a list of (output, lse) pairs")
    refuses(lambda: regard.merge("ab"), ConfigurationError, "part 0 is a str; merge needs (output, lse) pairs")
    refuses(lambda: regard.merge([Q]), ConfigurationError, "part 0 is a Tensor; merge needs (output, lse) pairs")
    refuses(lambda: regard.merge([(Q, 0.5)]), ConfigurationError, "part 0 is a tuple; merge needs (output, lse) pairs")


def test_of_masks_and_biases():
    refuses(lambda: masks.causal().dense(-1, 3), ShapeError, "queries is -1; it needs at least 0")
    refuses(lambda: masks.causal().dense(3, "3"), ShapeError, "keys needs a whole number; it is '3'")
    for wrong in (math.nan, "a", True):
        refuses(lambda wrong=wrong: biases.gaussian(wrong, 1.0), ConfigurationError, f"center is {wrong!r}; gaussian")
        refuses(lambda wrong=wrong: biases.gaussian(1.0, wrong), ConfigurationError, f"sigma is {wrong!r}; gaussian")
    refuses(lambda: normalizers.DependencyTrees(1), ConfigurationError, "single_root is 1; it needs True or False")


def test_of_linear_attention():
    for wrong in ("yes", None, 1):
        for name in ("causal", "normalize"):
            message = f"{name} is {wrong!r}; it needs True or False"
            refuses(lambda name=name, wrong=wrong: linear_attention(**{name: wrong}), ConfigurationError, message)


def test_of_layers():
    refuses(
        lambda: nn.Attention(None), ConfigurationError, "projections is None; the layer needs its dims and heads as"
    )
    for cap in (-1, "30", math.nan, True):
        refuses(lambda cap=cap: layer(softcap=cap), ConfigurationError, f"softcap is {cap!r}; it needs a finite number")
    refuses(
        lambda: layer(score="dot"), ConfigurationError, "score needs a score such as scores.Additive(...); it is 'dot'"
    )
    refuses(lambda: layer(rotary=True), ConfigurationError, "rotary is True; it needs a positions.Rotary(8)")
    refuses(lambda: layer(gate=True), ConfigurationError, "gate is True; it needs an nn.OutputGate")
    refuses(lambda: layer(forget_gate="yes"), ConfigurationError, "forget_gate is 'yes'; it needs True or False")
    refuses(lambda: projections(bias=1), ConfigurationError, "bias names 1; it needs True, False or some of 'query'")
    refuses(lambda: nn.FeedForward(8, 16, activation="relu"), ConfigurationError, "activation is 'relu'; it needs a")
    refuses(lambda: nn.RMSNorm(8, eps="a"), ConfigurationError, "eps is 'a'; it needs a number of at least 0")
    refuses(lambda: positions.Rotary(8, base="1e4"), ConfigurationError, "it is '1e4'")
    refuses(lambda: block("prenorm"), ConfigurationError, "residual is a str; a block needs a function that makes")
    refuses(lambda: block(nn.PreNorm(nn.RMSNorm(16))), ConfigurationError, "residual is a PreNorm; a block needs a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("16", 2), "embed_dim needs a whole number; it is '16'"),
        ((16.0, 2), "embed_dim needs a whole number; it is 16.0"),
        ((16, True), "num_heads needs a whole number; it is True"),
        ((16, 0), "num_heads is 0; it needs at least 1"),
    ],
)
def test_of_multihead_attention(arguments, message):
    refuses(lambda: nn.MultiheadAttention(*arguments), ConfigurationError, message)
    refuses(lambda: nn.MultiheadAttention(16, 2, kdim=0), ConfigurationError, "kdim is 0; it needs at least 1")


def test_of_caches():
    refuses(lambda: nn.KVCache().append([1.0], Q), DtypeError, "keys needs a torch.Tensor; it is a list")
    refuses(lambda: nn.KVCache().append(Q, None), DtypeError, "values needs a torch.Tensor; it is None")


def test_of_language_models():
    refuses(lambda: LanguageModel(None), ConfigurationError, "config is a NoneType; a LanguageModel is made of a")
    refuses(lambda: config(vocabulary_size="9"), ConfigurationError, "vocabulary_size needs a whole number; it is '9'")
    refuses(lambda: config(layers=3), ConfigurationError, "layers is 3; it needs a LayerConfig for each layer")
    refuses(lambda: config(attention=None), ConfigurationError, "attention is None; it needs settings of all layers")
    refuses(lambda: config(feed_forward=16), ConfigurationError, "feed_forward is 16; it needs settings of all layers")
    refuses(lambda: generate([[1]]), DtypeError, "tokens needs a torch.Tensor; it is a list")
    refuses(lambda: generate(captured="yes"), ConfigurationError, "captured is 'yes'; it needs True or False")
    refuses(lambda: generate(sampling=0.7), ConfigurationError, "sampling is 0.7; it needs a Sampling(")
    refuses(lambda: generate(sampling=Sampling), ConfigurationError, "it needs a Sampling(")
    refuses(lambda: generate(sampling=Sampling(), generator=5), ConfigurationError, "generator is 5; it needs a torch.")
    for wrong in ("1", True, math.nan, 0):
        refuses(lambda wrong=wrong: Sampling(temperature=wrong), ConfigurationError, f"temperature is {wrong!r}; it")
    for wrong in ("1", True, 1.5):
        refuses(lambda wrong=wrong: Sampling(top_p=wrong), ConfigurationError, f"top_p is {wrong!r}; it needs")
    assert Sampling(top_p=1.0).top_p == 1
