"""Arguments of the wrong kind are refused where they are given, by an error that says what is needed."""

# pyright: reportArgumentType=false
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard import approximations, biases, linear, masks, nn, normalizers, positions, scores, selection, steps
from regard.errors import CheckpointError, ConfigurationError, DtypeError, KernelError, ShapeError
from regard.models import LanguageModel
from regard.models.language_model import (
    AttentionConfig,
    ContinuousBatch,
    FeedForwardConfig,
    LanguageModelConfig,
    LayerConfig,
    Sampling,
)
from regard.translation.translator import Translator

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


def test_of_scores():
    refuses(lambda: scores.General("8", 8), ConfigurationError, "query_dim needs a whole number; it is '8'")
    refuses(lambda: scores.General(8, 8.0), ConfigurationError, "key_dim needs a whole number; it is 8.0")
    refuses(lambda: scores.General(8, -8), ConfigurationError, "key_dim is -8; it needs at least 0")
    refuses(lambda: scores.Additive(None, 8, 8), ConfigurationError, "query_dim needs a whole number; it is None")
    refuses(lambda: scores.Additive(8, 8, "8"), ConfigurationError, "hidden_dim needs a whole number; it is '8'")
    refuses(lambda: scores.Concat(8, "8", 8), ConfigurationError, "key_dim needs a whole number; it is '8'")
    refuses(lambda: scores.Location(8, "9"), ConfigurationError, "max_length needs a whole number; it is '9'")


def test_of_normalizers():
    for wrong in ("a", [1.0], math.nan, True):
        message = f"bias is {wrong!r}; it needs a finite number, or a tensor"
        refuses(lambda wrong=wrong: normalizers.Sigmoid(wrong), ConfigurationError, message)
    refuses(lambda: normalizers.Entmax("1.5"), ConfigurationError, "alpha is '1.5'; it needs a number of at least 1.05")
    matrix = [[1.0, 0.0], [0.0, 1.0]]
    refuses(lambda: normalizers.LinearChain(matrix), DtypeError, "transitions needs a torch.Tensor; it is a list: pass")
    refuses(lambda: normalizers.TalkingHeads(after=matrix), DtypeError, "after needs a torch.Tensor; it is a list")
    refuses(lambda: normalizers.MultiToken(matrix), DtypeError, "before needs a torch.Tensor; it is a list: pass torch")


def test_of_positions_and_distances():
    refuses(lambda: positions.YaRN("4", 128), ConfigurationError, "YaRN needs a factor of 1 or more")
    refuses(
        lambda: positions.YaRN(4.0, 128, beta_slow="1"), ConfigurationError, "YaRN needs 0 < beta_slow < beta_fast;"
    )
    refuses(lambda: positions.YaRN(4.0, 128, attention_factor="1"), ConfigurationError, "an attention_factor above 0")
    refuses(lambda: positions.Proportional("1"), ConfigurationError, "needs a share in 0..1")
    table = torch.zeros(2, 32)
    message = "relative's max_distance needs a whole number; it is '128'"
    refuses(lambda: biases.relative(table, max_distance="128"), ConfigurationError, message)
    refuses(lambda: positions.LinearScaling("2"), ConfigurationError, "LinearScaling needs a factor of 1 or more")
    clipped = lambda before: biases.clipped(torch.zeros(1, 3), before=before, after=1)  # noqa: E731
    refuses(lambda: clipped("1"), ConfigurationError, "clipped's before needs a whole number; it is '1'")


def test_of_selection_and_approximations():
    for select in (selection.gated_blocks, selection.landmark_blocks, selection.hierarchical_blocks):
        refuses(
            lambda select=select: select(None, Q, size=4, count=1), DtypeError, "query needs a torch.Tensor; it is None"
        )
        refuses(
            lambda select=select: select(Q, [1.0], size=4, count=1), DtypeError, "key needs a torch.Tensor; it is a li"
        )
    refuses(
        lambda: selection.lightning_indices(Q, None, Q, count=1), DtypeError, "key needs a torch.Tensor; it is None"
    )
    refuses(lambda: selection.overlapping_blocks("a", 4, 2), DtypeError, "tensor needs a torch.Tensor; it is a str")
    refuses(lambda: selection.sinkhorn(None), DtypeError, "scores needs a torch.Tensor; it is None")
    refuses(
        lambda: approximations.soft_attention(None, Q, landmarks=2), DtypeError, "query needs a torch.Tensor; it is N"
    )
    refuses(
        lambda: approximations.soft_attention(Q, [1.0], landmarks=2), DtypeError, "value needs a torch.Tensor; it is"
    )
    lara = approximations.Lara(2)
    for lengths in (3, "33"):
        message = f"lengths is {lengths!r}; it needs a list of whole numbers"
        refuses(
            lambda lengths=lengths: regard.approximation(Q, Q, Q, lara, lengths=lengths), ConfigurationError, message
        )


def test_of_recurrent_layers():
    refuses(
        lambda: nn.LinearAttention("a"), ConfigurationError, "projections is 'a'; the layer needs its dims and heads"
    )
    refuses(
        lambda: nn.LinearAttention(projections(), feature_map="elu"),
        ConfigurationError,
        "feature_map is 'elu'; it needs a map such as regard.linear.Elu()",
    )
    refuses(
        lambda: nn.ShortConvolution("16"), ConfigurationError, "projections is '16'; it needs nn.Projections(dim, num"
    )
    refuses(lambda: nn.ShortConvolution(-16), ConfigurationError, "projections is -16; it needs at least 1")
    for kind in (nn.PerformerAttention, nn.PathAttention, nn.OutputGate):
        refuses(lambda kind=kind: kind("16"), ConfigurationError, "projections is '16'; ")
    refuses(lambda: nn.SSRU("16"), ConfigurationError, "dim needs a whole number; it is '16'")
    refuses(
        lambda: linear.FavorPlus(1, 2, matrix=[[1.0], [2.0]]), DtypeError, "matrix needs a torch.Tensor; it is a list"
    )


def test_of_caches():
    refuses(lambda: nn.KVCache().append([1.0], Q), DtypeError, "keys needs a torch.Tensor; it is a list")
    refuses(lambda: nn.KVCache().append(Q, None), DtypeError, "values needs a torch.Tensor; it is None")
    refuses(
        lambda: nn.KVCache("static"), ConfigurationError, "policy is 'static'; a cache is made by KVCache(), KVCache."
    )


def test_of_language_models():
    refuses(lambda: LanguageModel(None), ConfigurationError, "config is a NoneType; a LanguageModel is made of a")
    refuses(lambda: config(vocabulary_size="9"), ConfigurationError, "vocabulary_size needs a whole number; it is '9'")
    refuses(lambda: config(layers=3), ConfigurationError, "layers is 3; it needs a LayerConfig for each layer")
    refuses(lambda: AttentionConfig(num_heads="2"), ConfigurationError, "num_heads needs a whole number; it is '2'")
    refuses(lambda: AttentionConfig(2, head_dim=-8), ConfigurationError, "head_dim is -8; it needs at least 1")
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


def test_of_paths(tmp_path):
    for wrong in (None, 3):
        message = f"folder is {wrong!r}; it needs a path, such as"
        refuses(lambda wrong=wrong: LanguageModel.load(wrong), ConfigurationError, message)
        refuses(lambda wrong=wrong: LanguageModel(config()).save(wrong), ConfigurationError, message)
        refuses(lambda wrong=wrong: LanguageModel.from_huggingface(wrong), ConfigurationError, message)
        refuses(lambda wrong=wrong: Translator.load(wrong), ConfigurationError, message)
    refuses(lambda: LanguageModel.load(tmp_path / "none"), CheckpointError, "there is no config.json in")


def test_of_texts_that_are_continued_together():
    model = LanguageModel(config()).eval()
    for wrong in (None, 3, "abc"):
        message = f"texts is {wrong!r}; it needs a list with the tokens of each text"
        refuses(lambda wrong=wrong: model.generate_many(wrong, 3), ShapeError, message)
    refuses(lambda: model.generate_many([1, 2], 3), ShapeError, "text 0 is 1; it needs its tokens, a list or tensor of")
    refuses(
        lambda: model.generate_many([[1]], 3, seeds=["a"]), ConfigurationError, "seeds[0] needs a whole number; it is"
    )
    refuses(lambda: model.generate_many([[1]], 3, seeds=3), ConfigurationError, "seeds is 3; it needs a list of whole")
    refuses(lambda: model.generate_many([[1]], 3, seeds=[1, 2]), ConfigurationError, "there are 2 seeds for 1 texts")
    options = {"draft": "lookup", "sampling": 0.7, "cache_format": "int8"}
    needs = {"draft": "a PromptLookup()", "sampling": "a Sampling(", "cache_format": "an nn.CacheFormat"}
    for name, value in options.items():
        message = f"{name} is {value!r}; it needs {needs[name]}"
        refuses(lambda name=name: model.generate_many([[1]], 3, **{name: options[name]}), ConfigurationError, message)
    refuses(
        lambda: ContinuousBatch("gpt2", 2), ConfigurationError, "model is 'gpt2'; it needs a regard.models.LanguageM"
    )
    batch = ContinuousBatch(model, 2)
    refuses(lambda: batch.add([1], 3, seed="a"), ConfigurationError, "seed needs a whole number; it is 'a'")
    assert len(list(model.generate_many([[1]], 3, seeds=[-1]))) == 3


def test_of_steps():
    refuses(lambda: steps.worked_example(None), ConfigurationError, "there is no worked example None; Known: ")
    refuses(lambda: steps.walkthrough(Q, Q, Q, head="1"), ConfigurationError, "head needs a whole number; it is '1'")
    refuses(lambda: steps.walkthrough(Q, Q, Q, rows=["a"]), ConfigurationError, "row needs a whole number; it is 'a'")
    refuses(lambda: steps.layer_walkthrough(layer(), None), DtypeError, "query needs a torch.Tensor; it is None")
    refuses(lambda: steps.mark_sheet(None), ConfigurationError, "path is None; it needs a path, such as")
    refuses(
        lambda: steps.make_worksheet(1, "flash"), ConfigurationError, "topics is the text 'flash'; it needs a list of"
    )
    refuses(lambda: steps.make_class_sheets(1, "3"), ConfigurationError, "students needs a whole number; it is '3'")
