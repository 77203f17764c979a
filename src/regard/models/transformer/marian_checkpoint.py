"""Read a `MarianMTModel` of transformers, as OPUS-MT's are, into a `Transformer`: its config.json and its tensors.

What changes the arithmetic is read, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...errors import CheckpointError
from ...masks import causal
from ...nn import Attention, FeedForward, PostNorm, Projections, TransformerBlock
from ...nn.feedforward import Activation
from ...positions import SplitSinusoidal
from ..language_model.huggingface.config_reader import ModelSettings
from ..language_model.huggingface.stored_tensors import StoredTensor
from .encoder_decoder import Decoder, Embedding, Encoder, TiedOutput
from .pretrained_settings import GENERATION, HARMLESS_SETTINGS, StackSizes, size_of
from .pretrained_tensors import drop_copies, fill_model, only_row, open_translator
from .transformer import Transformer

# Of a layer: *.blocks.0.* here, model.*.layers.0.* there.
_PARTS = {
    "attention.projections.query.": "self_attn.q_proj.",
    "attention.projections.key.": "self_attn.k_proj.",
    "attention.projections.value.": "self_attn.v_proj.",
    "attention.projections.output.": "self_attn.out_proj.",
    "attention_residual.norm.": "self_attn_layer_norm.",
    "cross_attention.projections.query.": "encoder_attn.q_proj.",
    "cross_attention.projections.key.": "encoder_attn.k_proj.",
    "cross_attention.projections.value.": "encoder_attn.v_proj.",
    "cross_attention.projections.output.": "encoder_attn.out_proj.",
    "cross_residual.norm.": "encoder_attn_layer_norm.",
    "feed_forward.up.": "fc1.",
    "feed_forward.down.": "fc2.",
    "feed_forward_residual.norm.": "final_layer_norm.",
}
MARIAN_ACTIVATIONS: dict[str, Activation] = {
    "swish": functional.silu,
    "silu": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
}
# Older settings that MarianMTModel does not read.
_HARMLESS = {
    "add_bias_logits",
    "do_blenderbot_90_layernorm",
    "extra_pos_embeddings",
}
SHARED, SOURCE, TARGET = (f"model.{part}.weight" for part in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
OUTPUT, OUTPUT_BIAS = "lm_head.weight", "final_logits_bias"
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


@dataclass(frozen=True)
class MarianSettings:
    """What config.json says of the arithmetic of a `MarianMTModel`."""

    dim: int
    encoder: StackSizes
    decoder: StackSizes
    activation: str
    scale_embedding: bool
    shares_embeddings: bool
    ties_output: bool
    source_size: int
    target_size: int
    max_positions: int

    @classmethod
    def read(cls, values: Mapping[str, Any], ignore: Collection[str] = ()) -> MarianSettings:
        """Read config.json.

        Raises:
            CheckpointError: a setting that is missing, impossible, or unknown here and not in `ignore`.
        """
        settings = ModelSettings(values, {})
        stacks = [StackSizes.read(settings, part) for part in ("encoder", "decoder")]
        source = size_of(settings, "vocab_size")
        for name in (
            "normalize_before",
            "normalize_embedding",
            "add_final_layer_norm",
            "force_bos_token_to_be_generated",
        ):
            settings.only(name, False, default=False)
        settings.only("static_position_embeddings", True, default=True)
        read = cls(
            dim=size_of(settings, "d_model"),
            encoder=stacks[0],
            decoder=stacks[1],
            activation=settings.only("activation_function", *MARIAN_ACTIVATIONS, default="gelu"),
            scale_embedding=settings.only("scale_embedding", True, False, default=False),
            shares_embeddings=settings.only("share_encoder_decoder_embeddings", True, False, default=True),
            ties_output=settings.only("tie_word_embeddings", True, False, default=True),
            source_size=source,
            target_size=source if settings.is_off("decoder_vocab_size") else size_of(settings, "decoder_vocab_size"),
            max_positions=size_of(settings, "max_position_embeddings", 1024),
        )
        settings.check_all_read(HARMLESS_SETTINGS | _HARMLESS | GENERATION | set(ignore))
        read._check()
        return read

    def _check(self) -> None:
        for part, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            if self.dim % stack.heads or self.dim % 2:
                raise CheckpointError(
                    f"config.json says d_model={self.dim} and {part}_attention_heads={stack.heads}: d_model needs to "
                    "be even, and a multiple of the heads"
                )
        if self.shares_embeddings and self.source_size != self.target_size:
            raise CheckpointError(
                f"config.json says vocab_size={self.source_size} and decoder_vocab_size={self.target_size}, which need "
                "to be equal where share_encoder_decoder_embeddings is true"
            )

    def build(self, max_target_length: int | None = None) -> Transformer:
        """A model of these sizes, freshly initialised."""
        target = nn.Embedding(self.target_size, self.dim)
        source = target if self.shares_embeddings else nn.Embedding(self.source_size, self.dim)
        output = TiedOutput(target, bias=True) if self.ties_output else nn.Linear(self.dim, self.target_size)
        longest = self.max_positions if max_target_length is None else min(max_target_length, self.max_positions)
        return Transformer(
            self._embedding(source),
            self._embedding(target),
            encoder=Encoder([self._block(self.encoder) for _ in range(self.encoder.layers)]),
            decoder=Decoder([self._block(self.decoder, decoder=True) for _ in range(self.decoder.layers)]),
            output=output,
            max_source_length=self.max_positions,
            max_target_length=longest,
        )

    def _embedding(self, tokens: nn.Embedding) -> Embedding:
        return Embedding(tokens, SplitSinusoidal(self.dim), scale=None if self.scale_embedding else 1.0)

    def _block(self, stack: StackSizes, *, decoder: bool = False) -> TransformerBlock:
        return TransformerBlock(
            Attention(Projections(self.dim, stack.heads), mask=causal() if decoder else None),
            FeedForward(self.dim, stack.hidden_dim, activation=MARIAN_ACTIVATIONS[self.activation]),
            lambda: PostNorm(nn.LayerNorm(self.dim)),
            cross_attention=Attention(Projections(self.dim, stack.heads)) if decoder else None,
        )


def bart_layer_name(name: str) -> str | None:
    """The name of a parameter of a layer as all models that descend from BART have it; None of what is in no layer.

    >>> bart_layer_name("encoder.blocks.3.feed_forward.up.weight")
    'model.encoder.layers.3.fc1.weight'
    """
    layer = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", name)
    if layer is None:
        return None
    ours = next(part for part in _PARTS if layer[3].startswith(part))
    return f"model.{layer[1]}.layers.{layer[2]}.{_PARTS[ours]}{layer[3].removeprefix(ours)}"


def marian_name(name: str, settings: MarianSettings) -> str:
    """The name of a parameter of `Transformer` in a `MarianMTModel`.

    >>> small = StackSizes(1, 2, 16)
    >>> settings = MarianSettings(8, small, small, "relu", True, True, True, 20, 20, 64)
    >>> marian_name("decoder.blocks.0.cross_attention.projections.output.bias", settings)
    'model.decoder.layers.0.encoder_attn.out_proj.bias'
    """
    if layer := bart_layer_name(name):
        return layer
    source, target = (SHARED, SHARED) if settings.shares_embeddings else (SOURCE, TARGET)
    return {
        "source_embedding.tokens.weight": source,
        "target_embedding.tokens.weight": target,
        "output.tokens.weight": target,
        "output.weight": OUTPUT,
        "output.bias": OUTPUT_BIAS,
    }[name]


def load_marian(folder: Path, settings: MarianSettings, max_target_length: int | None = None) -> Transformer:
    """The model in a folder, in float32, whatever its tensors are stored in.

    Raises:
        CheckpointError: there are no safetensors; tensors that are missing, extra or of another shape; whole numbers,
            as of quantised weights; copies of a table that differ from it; positions that are not sinusoids.
    """
    stored = open_translator(folder)
    if not settings.ties_output and {SOURCE, TARGET} <= stored.keys():
        settings = replace(settings, shares_embeddings=False)  # transformers 5 then ties none of the tables
    model = settings.build(max_target_length)
    names = {name: marian_name(name, settings) for name in model.state_dict()}
    needed = set(names.values())
    target = TARGET if TARGET in needed else SHARED
    copies = {
        SOURCE: (SHARED, "share_encoder_decoder_embeddings"),
        TARGET: (SHARED, "share_encoder_decoder_embeddings"),
        OUTPUT: (target, "tie_word_embeddings"),
    }
    drop_copies(folder, stored, {name: copy for name, copy in copies.items() if name not in needed})
    if SHARED not in needed:
        stored.pop(SHARED, None)
    _check_positions(folder, stored, settings.dim)
    if OUTPUT_BIAS in stored:
        stored[OUTPUT_BIAS] = only_row(stored[OUTPUT_BIAS])
    return fill_model(folder, model, stored, names)


def _check_positions(folder: Path, stored: dict[str, StoredTensor], dim: int) -> None:
    """Drop stored positions, once they are seen to be sinusoids."""
    for name in _POSITIONS:
        if name in stored:
            table = stored.pop(name).read().float()
            sines = SplitSinusoidal(dim)(torch.arange(len(table)))
            if table.shape != sines.shape or not torch.allclose(table, sines, rtol=0, atol=2e-3):
                raise CheckpointError(f"{name} in {folder} is not the table of sines and cosines that Marian's have")
