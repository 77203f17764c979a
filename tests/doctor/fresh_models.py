"""How to run each mistake of the third set: as in `planted_models.py`, by text on the line of the mistake."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from planted_models import CAUSAL, LENGTH, PlantedModel, by, ids, numbers, ones
from torch import Tensor, nn

FRESH = Path(__file__).parent / "planted_fresh"


def fresh_mistakes() -> list[dict[str, Any]]:
    """The third set, with the line of each mistake."""
    mistakes = tomllib.loads((FRESH / "mistakes.toml").read_text())["mistake"]
    for one in mistakes:
        lines = (FRESH / one["file"]).read_text().splitlines()
        (one["line"],) = (number for number, line in enumerate(lines, 1) if one["at"] in line)
    return mistakes


class Vmapped(nn.Module):
    """The functions of `vmapped_gpt.py` with their parameters."""

    def __init__(self, module: ModuleType, name: str) -> None:
        super().__init__()
        parameters = module.init()
        self.weights = nn.ParameterDict({key: nn.Parameter(one) for key, one in parameters.items()})
        self.function = getattr(module, name)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.function(self.weights, tokens)


class Weighted(nn.Module):
    """The average of a memory by the weights of an attention, a row of numbers for each row."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, memory: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("bl,bld->bd", self.attention(hidden, memory, mask), memory)


def trajectory(module: ModuleType) -> dict[str, Tensor]:
    return {
        "timesteps": torch.arange(24).repeat(2, 1),
        "states": numbers(24, 6),
        "actions": numbers(24, 3, seed=4),
        "returns_to_go": numbers(24, 1, seed=5),
        "attention_mask": ones(24).long(),
    }


def pictures(module: ModuleType) -> dict[str, Tensor]:
    return {"features": numbers(LENGTH, 32), "mask": ~ones(), "pos": numbers(LENGTH, 32, seed=4)}


def listening(module: ModuleType) -> dict[str, Tensor]:
    return {"tokens": ids(60), "audio": numbers(16, 32), "audio_mask": ones(16)}


def two_documents(module: ModuleType) -> dict[str, Tensor]:
    index = torch.arange(LENGTH).repeat(2, 1)
    return {"input_ids": ids(80), "position_ids": torch.where(index < 20, index, index - 20)}


def entry(
    file: str,
    at: str,
    codes: tuple[str, ...],
    build: Callable[[ModuleType], nn.Module],
    batch: Callable[[ModuleType], Any],
    **settings: Any,
) -> PlantedModel:
    mistakes = fresh_mistakes()
    (line,) = (one["line"] for one in mistakes if one["file"] == file and one["at"] == at)
    return PlantedModel(file, (line,), codes, build, batch, settings, folder=FRESH, mistakes=tuple(mistakes))


PADDING = ("RUN103", "RUN104", "RUN105")
FRESH_MODELS = (
    entry(
        "unet_conditioning.py",
        "self.scale = query_dim**-0.5",
        ("RUN115",),
        lambda m: m.CrossAttention(48, None, 4, 8),
        lambda m: numbers(LENGTH, 48),
    ),
    entry(
        "unet_conditioning.py",
        '"b j -> (h b) () j"',
        (*PADDING, "RUN107"),
        lambda m: m.CrossAttention(32, 24, 4, 8),
        lambda m: {"x": numbers(LENGTH, 32), "context": numbers(16, 24), "mask": ones(16)},
        sequence="x",
    ),
    entry(
        "unet_conditioning.py",
        "k = k.softmax(dim=-2)",
        ("RUN117",),
        lambda m: m.LinearAttention(32),
        lambda m: numbers(32, 6, 6),
    ),
    entry(
        "time_first_translator.py",
        "return self.table[start : start + length].unsqueeze(0)",
        ("RUN104",),
        lambda m: m.Encoder(),
        lambda m: ids(60),
        pad_token=0,
    ),
    entry(
        "time_first_translator.py",
        "                key_padding_mask = None",
        (*PADDING, "RUN120"),
        lambda m: m.Decoder(),
        lambda m: {"tokens": ids(60), "padding_mask": ~ones()},
        padding=by("padding_mask", drops=True),
        **CAUSAL,
    ),
    entry(
        "time_first_translator.py",
        "out = self.attention(x.reshape(time, batch, channels)",
        ("RUN107",),
        lambda m: m.BatchFirstBlock(),
        lambda m: numbers(LENGTH, 32),
    ),
    entry(
        "vmapped_gpt.py",
        "torch.tensor(-1e4, dtype=logits.dtype)",
        ("RUN118",),
        lambda m: Vmapped(m, "forward"),
        lambda m: ids(64),
        **CAUSAL,
    ),
    entry(
        "vmapped_gpt.py",
        "dtype=torch.bool), diagonal=1)",
        ("RUN101",),
        lambda m: Vmapped(m, "forward"),
        lambda m: ids(64),
        **CAUSAL,
    ),
    entry(
        "vmapped_gpt.py",
        "vmap(strict_head, in_dims=0, out_dims=0)",
        ("RUN109",),
        lambda m: Vmapped(m, "forward_strict"),
        lambda m: ids(64),
        **CAUSAL,
    ),
    entry(
        "transformer_xl.py",
        "BD = torch.einsum(",
        ("RUN106", "RUN116"),
        lambda m: m.MemTransformerLM(),
        lambda m: ids(60),
        cache="mems",
        **CAUSAL,
    ),
    entry(
        "transformer_xl.py",
        "torch.triu(word_emb.new_ones(qlen, klen), diagonal=1)",
        ("RUN120",),
        lambda m: m.MemTransformerLM(),
        lambda m: ids(60),
        cache="mems",
        **CAUSAL,
    ),
    entry(
        "speech_recognizer.py",
        "scale = (n_state // self.n_head) ** -0.25",
        ("RUN115",),
        lambda m: m.TextDecoder(),
        listening,
        sequence="tokens",
        **CAUSAL,
    ),
    entry(
        "speech_recognizer.py",
        "self.positional_embedding[:n]",
        ("RUN120",),
        lambda m: m.TextDecoder(),
        listening,
        sequence="tokens",
        **CAUSAL,
    ),
    entry(
        "speech_recognizer.py",
        "x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)",
        ("RUN103",),
        lambda m: m.TextDecoder(),
        listening,
        sequence="tokens",
        **CAUSAL,
    ),
    entry(
        "object_queries.py",
        "src_key_padding_mask=torch.logical_not(mask)",
        ("RUN103", "RUN110"),
        lambda m: m.Detector(),
        pictures,
        sequence="features",
        padding=by("mask", drops=True),
    ),
    entry(
        "object_queries.py",
        "self.maps = F.dropout(logits.softmax(-1), self.p)",
        ("RUN123",),
        lambda m: m.Detector(),
        pictures,
        sequence="features",
    ),
    entry(
        "trajectories.py",
        "attention_mask[:, None, None, :].to(weights.dtype) * -1e9",
        (*PADDING, "RUN110"),
        lambda m: m.MaskedCausalAttention(32, 4, 96),
        lambda m: {"x": numbers(LENGTH, 32), "attention_mask": ones().long()},
        **CAUSAL,
    ),
    entry(
        "trajectories.py",
        "torch.cat([attention_mask] * 3, dim=1)",
        ("RUN103", "RUN105"),
        lambda m: m.DecisionTransformer(),
        trajectory,
        sequence="states",
        padding=lambda keep: {"attention_mask": keep.long(), "timesteps": (keep.cumsum(1) - 1).clamp(min=0)},
        **CAUSAL,
    ),
    entry(
        "latent_attention.py",
        "self.softmax_scale = self.qk_nope_head_dim**-0.5",
        ("RUN115",),
        lambda m: m.MLA(),
        lambda m: numbers(LENGTH, 64),
        **CAUSAL,
    ),
    entry(
        "latent_attention.py",
        "freqs_cis = self.freqs_cis[:seqlen]",
        ("RUN120",),
        lambda m: m.MLA(),
        lambda m: numbers(LENGTH, 64),
        **CAUSAL,
    ),
    entry(
        "latent_attention.py",
        "dtype=torch.bfloat16",
        ("RUN119",),
        lambda m: m.MLA(),
        lambda m: numbers(LENGTH, 64),
        **CAUSAL,
    ),
    entry(
        "slot_engine.py",
        "out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)",
        ("RUN120",),
        lambda m: m.SlotAttention(),
        lambda m: {"x": numbers(LENGTH, 32), "cache": m.SlotCache()},
        **CAUSAL,
    ),
    entry(
        "slot_engine.py",
        "inside = positions < lengths.max()",
        PADDING,
        lambda m: m.Reranker(),
        lambda m: {"x": numbers(LENGTH, 32), "lengths": torch.full((2,), LENGTH)},
        padding=lambda keep: {"lengths": keep.sum(1)} if bool(keep[:, 0].all()) else None,
    ),
    entry(
        "retention.py",
        "distance = (n[:, None] - n[None, :]).abs()",
        ("RUN101",),
        lambda m: m.Retention(),
        lambda m: numbers(LENGTH, 32),
        **CAUSAL,
    ),
    entry(
        "rnn_with_attention.py",
        "return F.softmax(attention, dim=0)",
        ("RUN107", "RUN117"),
        lambda m: m.Seq2Seq(),
        lambda m: {"src": ids(50, 24), "trg": ids(50, seed=4)},
        pad_token=0,
    ),
    entry(
        "rnn_with_attention.py",
        "weights = F.softmax(scores, dim=1)",
        PADDING,
        lambda m: Weighted(m.DotAttention()),
        lambda m: {"memory": numbers(LENGTH, 24), "hidden": numbers(24, seed=4), "mask": ones()},
        sequence="memory",
        padding="mask",
    ),
    entry(
        "text_and_picture.py",
        "mask.tril_(-1)",
        ("RUN101", "RUN110"),
        lambda m: m.TextTower(),
        lambda m: ids(60),
        **CAUSAL,
    ),
    entry(
        "text_and_picture.py",
        "attn = attn + bias.view(N, N, -1)",
        ("RUN117",),
        lambda m: m.WindowAttention(),
        lambda m: numbers(16, 32),
    ),
    entry(
        "text_and_picture.py",
        "dropout_p=self.attn_drop.p",
        ("RUN123",),
        lambda m: m.PictureBlock(),
        lambda m: numbers(LENGTH, 32),
    ),
    entry(
        "preferences.py",
        "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        ("RUN102",),
        lambda m: m.Policy(),
        two_documents,
        **CAUSAL,
    ),
    entry(
        "local_blocks.py",
        "before = F.pad(blocks, (0, 0, 0, 0, 1, 0), value=pad)[:, :, :-1]",
        ("RUN117", "RUN118", "RUN110"),
        lambda m: m.LocalAttention(),
        lambda m: numbers(LENGTH, 32),
        **CAUSAL,
    ),
    entry(
        "local_blocks.py",
        "k = torch.cat([k.roll(1, dims=2), k], dim=3)",
        ("RUN101",),
        lambda m: m.RolledAttention(),
        lambda m: numbers(LENGTH, 32),
        **CAUSAL,
    ),
    entry(
        "local_blocks.py",
        "band = (distance >= 0) & (distance <= self.sliding_window)",
        ("RUN108",),
        lambda m: m.BandedAttention(),
        lambda m: numbers(LENGTH, 32),
        **CAUSAL,
    ),
    entry(
        "review_classifier.py",
        "logits = logits * attention_mask",
        ("RUN103",),
        lambda m: m.ReviewClassifier(),
        lambda m: {"input_ids": ids(90), "attention_mask": ones().long()},
    ),
    entry(
        "review_classifier.py",
        "src_key_padding_mask=attention_mask.eq(1)",
        ("RUN103", "RUN110"),
        lambda m: m.ReviewClassifier(),
        lambda m: {"input_ids": ids(90), "attention_mask": ones().long()},
    ),
)
"""One entry for each model that can be built; the others are functions that no output shows wrong."""
