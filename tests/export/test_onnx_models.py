"""Layers and models in ONNX Runtime, with and without a cache, with batch and lengths that may vary."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from regard import masks, normalizers
from regard.export import TensorStep
from regard.models import LanguageModel, transformer
from regard.models import language_model as lm
from regard.nn import (
    Attention,
    CrossBlock,
    DifferentialAttention,
    DifferentialAttentionV2,
    FeedForward,
    GatedFeedForward,
    InducedSetBlock,
    LatentAttention,
    LatentProjections,
    LengthProjection,
    LightningIndexer,
    LinearAttention,
    LinformerAttention,
    MultiheadAttention,
    MultiTokenAttention,
    OutputGate,
    PerceiverEncoder,
    PerformerAttention,
    PooledSet,
    PostNorm,
    PreNorm,
    Projections,
    RelativeAttention,
    RMSNorm,
    ShortConvolution,
    TokenShift,
    TransformerBlock,
    swap,
)
from regard.positions import Rotary, Sinusoidal

from .exporting import BATCH, SEQUENCE, OnnxModel, Together, assert_agrees_in_onnx, assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter

DIM, HEADS, VOCABULARY = 16, 4, 50
SIZES = [(2, 6, 9), (3, 17, 23), (1, 1, 2)]
LAYER = {"nhead": HEADS, "dim_feedforward": 23, "batch_first": True, "dropout": 0.0}


def sequences(batch: int, length: int, memory: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, DIM), torch.randn(batch, memory, DIM)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def projections(**options: Any) -> Projections:
    return Projections(DIM, HEADS, **options)


class OfFirst(nn.Module):
    """A layer of the first of two sequences; how: as which arguments."""

    def __init__(self, layer: nn.Module, how: Any = None) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.layer(first) if self.how is None else self.how(self.layer, first, second)


class Swapped(OfFirst):
    """One of torch's layers with regard's attention."""

    def __init__(self, layer: nn.Module, how: Any = None) -> None:
        super().__init__(nn.Sequential(layer).eval(), how)
        assert swap(self.layer).replaced
        assert any(isinstance(each, MultiheadAttention) for each in self.layer.modules())


def block() -> TransformerBlock:
    attention = Attention(projections(num_kv_heads=2), rotary=Rotary(4), mask=masks.causal() & masks.window(before=3))
    return TransformerBlock(attention, GatedFeedForward(DIM, 24), lambda: PreNorm(RMSNorm(DIM)))


def cross() -> CrossBlock:
    return CrossBlock(
        Attention(projections()), FeedForward(DIM, 24), PreNorm(nn.LayerNorm(DIM)), PreNorm(nn.LayerNorm(DIM))
    )


def layers() -> dict[str, nn.Module]:
    latent: dict[str, Any] = {"latent_dim": 8, "rotary_dim": 4, "query_latent_dim": 8}
    own: dict[str, nn.Module] = {
        "grouped": Attention(projections(num_kv_heads=2)),
        "rotary": Attention(projections(), rotary=Rotary(4), mask=masks.causal()),
        "gate": Attention(projections(), gate=OutputGate(projections()), mask=masks.prefix(3)),
        "forget gate": Attention(projections(), forget_gate=True, mask=masks.causal()),
        "differential": DifferentialAttention(projections(), 1, mask=masks.causal()),
        "differential 2": DifferentialAttentionV2(projections(num_kv_heads=2), mask=masks.causal()),
        "latent": LatentAttention(LatentProjections(DIM, HEADS, **latent), Rotary(4), mask=masks.causal()),
        # Of equal scores any key may be chosen: with many heads of the indexer none are.
        "indexer": LatentAttention(
            LatentProjections(DIM, HEADS, **latent),
            Rotary(4),
            mask=masks.causal(),
            indexer=LightningIndexer(DIM, 8, num_heads=64, head_dim=8, count=3),
        ),
        "multi-token": MultiTokenAttention(projections(), normalizers.MultiToken.learned(HEADS, queries=2, keys=3)),
        "relative": RelativeAttention(projections(), before=3, after=2),
        "linear": LinearAttention(projections()),
        "linear causal": LinearAttention(
            projections(), causal=True, convolution=ShortConvolution(projections()), shift=TokenShift(DIM)
        ),
        "delta": LinearAttention(projections(), causal=True, delta_rule=True),
        "performer": PerformerAttention(projections(), num_features=16, causal=True),
        "linformer": LinformerAttention(projections(), LengthProjection(64, 8)),
        "block": block(),
        "set": InducedSetBlock(3, DIM, gather=cross(), spread=cross()),
        "perceiver": PerceiverEncoder(3, DIM, [(cross(), [block()])]),
        "pooled": PooledSet(3, DIM, block=cross(), feed_forward=FeedForward(DIM, 24)),
    }
    crossed: dict[str, nn.Module] = {"cross": Attention(projections()), "cross block": cross()}
    return {**{name: OfFirst(layer) for name, layer in own.items()}, **crossed}


@pytest.mark.parametrize("part", range(4))
def test_every_layer(part):
    """In four graphs of some layers each."""
    torch.manual_seed(0)
    some = dict(list(layers().items())[part::4])
    assert_agrees_in_onnx(Together(some), sequences, (SEQUENCE, SEQUENCE), SIZES)


def test_layers_of_torch_after_swap():
    def decode(layer: Any, first: Tensor, second: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(first.shape[1])
        return layer[0](first, second, tgt_mask=future, tgt_is_causal=True)

    torch.manual_seed(0)
    parts = {
        "multihead": Swapped(
            nn.MultiheadAttention(DIM, HEADS, batch_first=True), lambda layer, q, k: layer[0](q, k, k)[0]
        ),
        "weights": Swapped(
            nn.MultiheadAttention(DIM, HEADS, batch_first=True), lambda layer, q, k: layer[0](q, k, k)[1]
        ),
        "encoder": Swapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, **LAYER), 2)),
        "decoder": Swapped(nn.TransformerDecoderLayer(DIM, **LAYER), decode),
    }
    assert_agrees_in_onnx(Together(parts), sequences, (SEQUENCE, SEQUENCE), SIZES)


def language_model(*kinds: lm.LayerConfig) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        lm.LanguageModelConfig(
            vocabulary_size=VOCABULARY,
            dim=32,
            layers=kinds,
            attention=lm.AttentionConfig(num_heads=4, num_kv_heads=2),
            feed_forward=lm.GatedFeedForwardConfig(48),
        )
    ).eval()


NEAR, FAR = lm.LayerConfig(before=3, rotary=Rotary(8)), lm.LayerConfig(rotary=Rotary(8, base=1e6))
STATE = lm.LayerConfig(
    linear=lm.LinearAttentionConfig(
        delta_rule=True,
        decay="head",
        convolution=lm.ShortConvolutionConfig(4),
        shift=lm.TokenShiftConfig(),
        gate=lm.OutputGateConfig(),
    )
)


def test_language_model_without_a_cache():
    model = language_model(NEAR, FAR)
    assert_agrees_in_onnx(model, lambda *size: (tokens(*size),), (SEQUENCE,), [(2, 6), (3, 17), (1, 2)], opset=23)


@pytest.mark.parametrize("kinds", [(NEAR, FAR), (STATE, FAR)], ids=["keys and values", "with a state"])
def test_steps_of_a_language_model(kinds):
    model = language_model(*kinds)
    step = TensorStep(model).eval()
    with torch.no_grad():
        past = step(tokens(2, 3), *step.no_past(2))[1:]
    grows = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    shapes = tuple(grows if name.startswith(("keys", "values")) else BATCH for name in step.names)
    graph = OnnxModel(step, (tokens(2, 4), *past), (SEQUENCE, shapes))
    for batch in (3, 1):
        text = tokens(batch, 17)
        with torch.no_grad():
            expected = model(text)
        past, logits = step.no_past(batch), []
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 17)):  # a prompt, tokens one at a time, and several
            part, *past = graph(text[:, start:stop], *past)
            logits.append(part)
        assert_same(torch.cat(logits, 1), expected, f"batch {batch}")


def test_transformer():
    torch.manual_seed(0)

    def part(**cross_attention: Any) -> TransformerBlock:
        own = Attention(projections(), mask=masks.causal() if cross_attention else None)
        return TransformerBlock(own, FeedForward(DIM, 24), lambda: PostNorm(nn.LayerNorm(DIM)), **cross_attention)

    shared = transformer.Embedding(nn.Embedding(VOCABULARY, DIM), Sinusoidal(DIM))
    model = transformer.Transformer(
        shared,
        shared,
        encoder=transformer.Encoder([part()]),
        decoder=transformer.Decoder([part(cross_attention=Attention(projections()))]),
        output=transformer.TiedOutput(shared.tokens),
    )

    def sentences(batch: int, source: int, target: int) -> tuple[Tensor, ...]:
        return tokens(batch, source), torch.randint(1, source + 1, (batch,)), tokens(batch, target)

    assert_agrees_in_onnx(model, sentences, (SEQUENCE, BATCH, SEQUENCE), SIZES)
