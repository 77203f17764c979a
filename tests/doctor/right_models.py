"""Thirty-five models that are right, each of another architecture, with a batch: what `examine` must not blame.

`python tests/doctor/right_models.py` prints the table of docs/doctor-evaluation.md.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.doctor import Examination, Severity, examine

LENGTH = 40


@dataclass(frozen=True)
class RightModel:
    """A model without a mistake. batch: what it takes. settings: of `examine`, as its user would give them."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def examined(self) -> Examination:
        """What `examine` finds in it."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return examine(self.build(), self.batch(), **self.settings)


def ids(vocabulary: int = 100, length: int = LENGTH, seed: int = 3) -> Tensor:
    return torch.randint(10, vocabulary, (2, length), generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


def of_transformers(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """A class of transformers with two layers of random weights; `changes` go into its configuration."""

    def build() -> nn.Module:
        import transformers

        from regard.doctor.tiny_models import strengthen, tiny_config

        model_class = getattr(transformers, name)
        model = model_class(tiny_config(model_class.config_class, changes)).eval()
        strengthen(model)
        return model

    return build


class Sines(nn.Module):
    """x + the table of sines of Vaswani et al. 2017, batch first."""

    table: Tensor

    def __init__(self, dim: int, most: int = 256) -> None:
        super().__init__()
        angles = torch.arange(most)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class TorchTranslator(nn.Module):
    """`nn.Transformer` with the masks that its tutorial passes: True hides."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embed_source, self.embed_target = nn.Embedding(100, 32), nn.Embedding(90, 32)
        self.positions = Sines(32)
        self.body = nn.Transformer(32, 4, 2, 2, 64, 0.1, batch_first=True, norm_first=norm_first)
        self.out = nn.Linear(32, 90)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        hidden = self.body(
            self.positions(self.embed_source(src) * 32**0.5),
            self.positions(self.embed_target(tgt) * 32**0.5),
            tgt_mask=future,
            src_key_padding_mask=src_key_padding_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask,
        )
        return self.out(hidden)


class ReviewClassifier(nn.Module):
    """`nn.TransformerEncoder` and a mean over the tokens that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(100, 32, padding_idx=0), Sines(32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        hidden = self.body(self.positions(self.embed(tokens)), src_key_padding_mask=padding)
        kept = (~padding)[..., None]
        return self.out((hidden * kept).sum(1) / kept.sum(1).clamp(min=1))


class RecurrentTranslator(nn.Module):
    """A bidirectional GRU that a GRU reads by additive attention (Bahdanau et al. 2015); token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_source = nn.Embedding(100, 16, padding_idx=0)
        self.embed_target = nn.Embedding(90, 16, padding_idx=0)
        self.encoder = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.query, self.key, self.score = nn.Linear(32, 24), nn.Linear(32, 24), nn.Linear(24, 1)
        self.cell, self.out = nn.GRUCell(16 + 32, 32), nn.Linear(64, 90)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        lengths = (src != 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed_source(src), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        memory, last = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(memory, batch_first=True, total_length=src.shape[1])
        state, keys = torch.cat([last[0], last[1]], -1), self.key(memory)
        outside = torch.arange(src.shape[1], device=src.device) >= lengths[:, None]
        outputs = []
        for word in self.embed_target(trg).unbind(1):
            energies = self.score(torch.tanh(self.query(state)[:, None] + keys)).squeeze(-1)
            weights = energies.masked_fill(outside, -torch.inf).softmax(-1)
            context = (weights[..., None] * memory).sum(1)
            state = self.cell(torch.cat([word, context], -1), state)
            outputs.append(self.out(torch.cat([state, context], -1)))
        return torch.stack(outputs, 1)


class GlobalAttentionTranslator(nn.Module):
    """LSTMs with the general score of Luong et al. 2015 over all source states, all targets at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_source, self.embed_target = nn.Embedding(100, 24), nn.Embedding(90, 24)
        self.encoder, self.decoder = nn.LSTM(24, 32, batch_first=True), nn.LSTM(24, 32, batch_first=True)
        self.general, self.mix, self.out = nn.Linear(32, 32, False), nn.Linear(64, 32), nn.Linear(32, 90)

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor) -> Tensor:
        memory, _ = self.encoder(self.embed_source(source))
        states, _ = self.decoder(self.embed_target(target))
        scores = torch.bmm(states, self.general(memory).transpose(1, 2))
        weights = scores.masked_fill(~source_mask[:, None], -torch.inf).softmax(-1)
        return self.out(torch.tanh(self.mix(torch.cat([torch.bmm(weights, memory), states], -1))))


class SpeechEncoder(nn.Module):
    """Two convolutions of stride 2, then a Transformer: one output for four frames."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(20, 32, 3, 2, 1), nn.Conv1d(32, 32, 3, 2, 1)
        self.positions = Sines(32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, 30)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        outside = torch.arange(frames.shape[1], device=frames.device) >= lengths[:, None]
        x = frames.masked_fill(outside[..., None], 0).transpose(1, 2)
        x = functional.gelu(self.first(x)).masked_fill(outside[:, None, ::2], 0)
        x = functional.gelu(self.second(x)).transpose(1, 2)
        return self.out(self.body(self.positions(x), src_key_padding_mask=outside[:, ::4]))


class CachedDecoder(nn.Module):
    """Grouped heads, rotary positions, a cache and SDPA, as today's language models."""

    def __init__(self, dim: int = 32, heads: int = 4, groups: int = 2, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.groups, self.window = heads, groups, window
        self.embed, self.norm = nn.Embedding(100, dim), nn.RMSNorm(dim)
        self.query, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * groups * (dim // heads), bias=False)
        self.head = nn.Linear(dim, 100)

    def rotated(self, x: Tensor, start: int) -> Tensor:
        half = x.shape[-1] // 2
        places = torch.arange(start, start + x.shape[-2], device=x.device, dtype=x.dtype)
        angles = places[:, None] / 10000 ** (torch.arange(half, device=x.device, dtype=x.dtype) / half)
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def forward(
        self, tokens: Tensor, cache: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = self.embed(tokens)
        hidden = self.norm(x)
        start = 0 if cache is None else cache[0].shape[-2]
        query = self.rotated(self.query(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2), start)
        key, value = self.key_value(hidden).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4)
        key = self.rotated(key, start)
        if cache is not None:
            key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
        total = key.shape[-2]
        rows = torch.arange(start, total, device=tokens.device)[:, None]
        columns = torch.arange(total, device=tokens.device)
        keep = columns <= rows
        if self.window is not None:
            keep &= columns > rows - self.window
        y = functional.scaled_dot_product_attention(query, key, value, attn_mask=keep, enable_gqa=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2))), (key, value)


class LinearDecoder(nn.Module):
    """Causal linear attention with elu(x) + 1 (Katharopoulos et al. 2020), written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(100, 32), nn.Embedding(256, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        states = (k[..., :, None] * v[..., None, :]).cumsum(2)
        sums = k.cumsum(2)
        y = (q[..., None, :] @ states).squeeze(-2) / (q * sums).sum(-1, keepdim=True)
        return self.out(x + y.transpose(1, 2).flatten(2))


class SetEncoder(nn.Module):
    """Induced set attention without positions: what a set is needs none (Lee et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(8, 32))
        self.read = nn.MultiheadAttention(32, 4, batch_first=True)
        self.write = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        points = self.points.expand(x.shape[0], -1, -1)
        summary, _ = self.read(points, x, x, key_padding_mask=key_padding_mask, need_weights=False)
        y, _ = self.write(x, summary, summary, need_weights=False)
        return self.out(x + y)


def own_language_model() -> nn.Module:
    from regard.models import language_model as lm
    from regard.positions import Rotary

    near, far = lm.LayerConfig(before=7, rotary=Rotary(8)), lm.LayerConfig(rotary=Rotary(8, base=1e6))
    attention = lm.AttentionConfig(num_heads=4, num_kv_heads=2)
    config = lm.LanguageModelConfig(100, 32, (near, far), attention, lm.GatedFeedForwardConfig(86))
    return lm.LanguageModel(config).eval()


def own_recurrent_translator() -> nn.Module:
    from regard.models import recurrent
    from regard.scores import Additive

    encoder = recurrent.BidirectionalEncoder(16, 12)
    decoder = recurrent.BahdanauDecoder(16, 24, 20, score=Additive(20, 24, 20), cell="gru", readout_dim=16)
    return recurrent.RecurrentTranslator(100, 90, embedding_dim=16, encoder=encoder, decoder=decoder).eval()


def two_sides(source: str, target: str, source_length: int = LENGTH) -> Callable[[], dict[str, Tensor]]:
    return lambda: {source: ids(length=source_length), target: ids(90, seed=4)}


TOKENS: Callable[[], dict[str, Tensor]] = lambda: {"input_ids": ids()}  # noqa: E731
ENCODER = {"is_decoder": False, "type_vocab_size": 2}
SPEECH = {"num_mel_bins": 20, "input_feat_per_channel": 20, "max_source_positions": 40, "decoder_start_token_id": 2}

SOUND = {
    "conv_dim": (16, 16),
    "conv_kernel": (5, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}

RIGHT_MODELS = (
    RightModel("BERT, masked words", of_transformers("BertForMaskedLM", **ENCODER), TOKENS),
    RightModel("BERT, a class for a text", of_transformers("BertForSequenceClassification", **ENCODER), TOKENS),
    RightModel("DistilBERT", of_transformers("DistilBertForTokenClassification"), TOKENS),
    RightModel(
        "DeBERTa v2",
        of_transformers("DebertaV2ForTokenClassification", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        TOKENS,
    ),
    RightModel("GPT-2", of_transformers("GPT2LMHeadModel"), TOKENS),
    RightModel("OPT", of_transformers("OPTForCausalLM"), TOKENS),
    RightModel("Bloom, ALiBi", of_transformers("BloomForCausalLM"), TOKENS),
    RightModel("Llama", of_transformers("LlamaForCausalLM"), TOKENS),
    RightModel("Mistral, a window of 16", of_transformers("MistralForCausalLM"), TOKENS),
    RightModel("Gemma 3, windows and whole layers", of_transformers("Gemma3ForCausalLM"), TOKENS),
    RightModel("XLNet, all tokens", of_transformers("XLNetLMHeadModel", d_head=8), TOKENS),
    RightModel("Longformer", of_transformers("LongformerForMaskedLM", attention_window=8, is_decoder=False), TOKENS),
    RightModel("T5", of_transformers("T5ForConditionalGeneration"), two_sides("input_ids", "decoder_input_ids", 24)),
    RightModel("BART", of_transformers("BartForConditionalGeneration"), two_sides("input_ids", "decoder_input_ids")),
    RightModel("Marian", of_transformers("MarianMTModel"), two_sides("input_ids", "decoder_input_ids", 24)),
    RightModel(
        "Whisper",
        of_transformers("WhisperForConditionalGeneration", **SPEECH),
        lambda: {"input_features": numbers(20, 80), "decoder_input_ids": ids()},
    ),
    RightModel(
        "Speech2Text",
        of_transformers("Speech2TextForConditionalGeneration", **SPEECH | {"max_source_positions": 200}),
        lambda: {"input_features": numbers(80, 20), "decoder_input_ids": ids()},
    ),
    RightModel(
        "Wav2Vec 2.0, samples of a sound",
        of_transformers("Wav2Vec2ForCTC", **SOUND),
        lambda: {"input_values": numbers(400)},
    ),
    RightModel(
        "ViT",
        of_transformers("ViTForImageClassification", image_size=24, patch_size=8),
        lambda: {"pixel_values": numbers(3, 24, 24)},
    ),
    RightModel(
        "Swin",
        of_transformers("SwinForImageClassification", **WINDOWS),
        lambda: {"pixel_values": numbers(3, 32, 32)},
    ),
    RightModel(
        "Perceiver",
        of_transformers(
            "PerceiverForMaskedLM", d_latents=32, num_latents=8, num_blocks=1, max_position_embeddings=LENGTH
        ),
        lambda: {"inputs": ids()},
    ),
    RightModel("CLIP, texts", of_transformers("CLIPTextModel", eos_token_id=99), TOKENS),
    RightModel(
        "nn.Transformer, sides of equal length",
        TorchTranslator,
        two_sides("src", "tgt"),
        {"causal": True},
    ),
    RightModel(
        "nn.Transformer, norms first, a shorter source",
        lambda: TorchTranslator(norm_first=True),
        two_sides("src", "tgt", 23),
        {"causal": True},
    ),
    RightModel("nn.TransformerEncoder, a class for a text", ReviewClassifier, ids, {"pad_token": 0}),
    RightModel(
        "nn.TransformerEncoderLayer",
        lambda: nn.TransformerEncoderLayer(32, 4, batch_first=True),
        lambda: numbers(LENGTH, 32),
    ),
    RightModel("GRU, additive attention", RecurrentTranslator, two_sides("src", "trg", 23), {"pad_token": 0}),
    RightModel(
        "LSTM, general score",
        GlobalAttentionTranslator,
        lambda: two_sides("source", "target", 23)() | {"source_mask": torch.ones(2, 23, dtype=torch.bool)},
        {"causal": True},
    ),
    RightModel(
        "speech encoder, a quarter of the frames",
        SpeechEncoder,
        lambda: {"frames": numbers(LENGTH, 20), "lengths": torch.full((2,), LENGTH)},
        {"padding": lambda keep: {"lengths": keep.sum(1)} if bool(keep[:, 0].all()) else None},
    ),
    RightModel("grouped heads, rotary positions, a cache", CachedDecoder, ids, {"causal": True}),
    RightModel("the same with a window of 8", lambda: CachedDecoder(window=8), ids, {"causal": True}),
    RightModel("linear attention", LinearDecoder, ids, {"causal": True}),
    RightModel("set attention", SetEncoder, lambda: numbers(LENGTH, 32), {"causal": False}),
    RightModel("regard.models.LanguageModel", own_language_model, ids, {"causal": True}),
    RightModel(
        "regard.models.RecurrentTranslator",
        own_recurrent_translator,
        lambda: {
            "source": ids(length=23),
            "source_lengths": torch.full((2,), 23),
            "target": ids(90, seed=4),
        },
        {"causal": True},
    ),
)
"""Models of transformers, of torch's modules, written by hand, and of this library."""


def warned(found: Examination) -> str:
    """The codes of the warnings."""
    return ", ".join(sorted({one.code for one in found.findings if one.severity is Severity.WARNING}))


def table() -> str:
    """A row for each model: how many checks ran, errors, and codes of warnings."""
    rows = ["| model | checks | errors | warnings |", "| --- | --- | --- | --- |"]
    for one in RIGHT_MODELS:
        found = one.examined()
        errors = sum(each.severity is Severity.ERROR for each in found.findings)
        rows.append(f"| {one.name} | {len(found.checked)} | {errors} | {warned(found)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
