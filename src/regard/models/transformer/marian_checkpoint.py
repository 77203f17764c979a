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
from torch import Tensor, nn
from torch.nn import functional

from ...errors import CheckpointError
from ...masks import causal
from ...nn import Attention, FeedForward, PostNorm, Projections, TransformerBlock
from ...nn.feedforward import Activation
from ...positions import SplitSinusoidal
from ..language_model.huggingface.config_reader import ModelSettings
from ..language_model.huggingface.hf_checkpoint import open_tensors
from ..language_model.huggingface.stored_tensors import StoredTensor
from ..language_model.saved_model import check_same
from .encoder_decoder import Decoder, Embedding, Encoder, TiedOutput
from .transformer import Transformer

# Of a layer: *.blocks.0.* here, model.*.layers.0.* there.
MARIAN_PARTS = {
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
# Settings of training and of tokenizers, and older ones that MarianMTModel does not read.
_HARMLESS = {
    "_num_labels",
    "activation_dropout",
    "add_bias_logits",
    "attention_dropout",
    "classif_dropout",
    "classifier_dropout",
    "decoder_layerdrop",
    "do_blenderbot_90_layernorm",
    "dropout",
    "encoder_layerdrop",
    "extra_pos_embeddings",
    "finetuning_task",
    "gradient_checkpointing",
    "init_std",
    "num_hidden_layers",
    "num_labels",
    "output_past",
    "save_step",
    "tokenizer_class",
}
# Those of generation, which older files have in config.json; `translation.pretrained_search` reads them.
GENERATION = {
    "bad_words_ids",
    "decoder_start_token_id",
    "diversity_penalty",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "renormalize_logits",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
SHARED, SOURCE, TARGET = (f"model.{part}.weight" for part in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
OUTPUT, OUTPUT_BIAS = "lm_head.weight", "final_logits_bias"
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


@dataclass(frozen=True)
class MarianStack:
    """The sizes of an encoder or a decoder."""

    layers: int
    heads: int
    hidden_dim: int


@dataclass(frozen=True)
class MarianSettings:
    """What config.json says of the arithmetic of a `MarianMTModel`."""

    dim: int
    encoder: MarianStack
    decoder: MarianStack
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
        stacks = [
            MarianStack(
                *(_size(settings, f"{part}_{name}") for name in ("layers", "attention_heads", "ffn_dim")),
            )
            for part in ("encoder", "decoder")
        ]
        source = _size(settings, "vocab_size")
        for name in (
            "normalize_before",
            "normalize_embedding",
            "add_final_layer_norm",
            "force_bos_token_to_be_generated",
        ):
            settings.only(name, False, default=False)
        settings.only("static_position_embeddings", True, default=True)
        read = cls(
            dim=_size(settings, "d_model"),
            encoder=stacks[0],
            decoder=stacks[1],
            activation=settings.only("activation_function", *MARIAN_ACTIVATIONS, default="gelu"),
            scale_embedding=settings.only("scale_embedding", True, False, default=False),
            shares_embeddings=settings.only("share_encoder_decoder_embeddings", True, False, default=True),
            ties_output=settings.only("tie_word_embeddings", True, False, default=True),
            source_size=source,
            target_size=source if settings.is_off("decoder_vocab_size") else _size(settings, "decoder_vocab_size"),
            max_positions=_size(settings, "max_position_embeddings", 1024),
        )
        settings.check_all_read(_HARMLESS | GENERATION | set(ignore))
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

    def _block(self, stack: MarianStack, *, decoder: bool = False) -> TransformerBlock:
        return TransformerBlock(
            Attention(Projections(self.dim, stack.heads), mask=causal() if decoder else None),
            FeedForward(self.dim, stack.hidden_dim, activation=MARIAN_ACTIVATIONS[self.activation]),
            lambda: PostNorm(nn.LayerNorm(self.dim)),
            cross_attention=Attention(Projections(self.dim, stack.heads)) if decoder else None,
        )


def _size(settings: ModelSettings, name: str, default: int | None = None) -> int:
    """A setting that is a whole number of at least 1."""
    value = settings.need(name) if default is None else settings.get(name, default)
    if type(value) is not int or not 1 <= value < 2**26:
        raise CheckpointError(f"config.json says {name}={str(value)[:80]}; it needs a whole number in 1..{2**26 - 1:,}")
    return value


def marian_name(name: str, settings: MarianSettings) -> str:
    """The name of a parameter of `Transformer` in a `MarianMTModel`.

    >>> small = MarianStack(1, 2, 16)
    >>> settings = MarianSettings(8, small, small, "relu", True, True, True, 20, 20, 64)
    >>> marian_name("decoder.blocks.0.cross_attention.projections.output.bias", settings)
    'model.decoder.layers.0.encoder_attn.out_proj.bias'
    """
    layer = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", name)
    if layer:
        ours = next(part for part in MARIAN_PARTS if layer[3].startswith(part))
        return f"model.{layer[1]}.layers.{layer[2]}.{MARIAN_PARTS[ours]}{layer[3].removeprefix(ours)}"
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
    stored = open_tensors(folder, "AutoModelForSeq2SeqLM")
    if not settings.ties_output and {SOURCE, TARGET} <= stored.keys():
        settings = replace(settings, shares_embeddings=False)  # transformers 5 then ties none of the tables
    model = settings.build(max_target_length)
    needed = model.state_dict()
    names = {name: marian_name(name, settings) for name in needed}
    _check_copies(folder, stored, settings, set(names.values()))
    shapes = {name: list(tensor.shape) for name, tensor in stored.items()}
    wanted = {names[name]: list(tensor.shape) for name, tensor in needed.items()}
    if OUTPUT_BIAS in shapes:
        wanted[OUTPUT_BIAS] = [1, settings.target_size]
    check_same(str(folder), shapes, wanted)
    read: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        if theirs not in read:
            read[theirs] = _numbers(folder, theirs, stored[theirs])
        needed[ours].copy_(read[theirs].reshape(needed[ours].shape))
    return model.eval()


def _numbers(folder: Path, name: str, stored: StoredTensor) -> Tensor:
    tensor = stored.read()
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CheckpointError(
            f"{name} in {folder} is {tensor.dtype}: weights need floating-point numbers of 16 bits or more, so load "
            "the model before it was quantised"
        )
    return tensor.float()


def _check_copies(folder: Path, stored: dict[str, StoredTensor], settings: MarianSettings, needed: set[str]) -> None:
    """Drop copies of tables, and stored positions, once they are seen to be what they should be."""
    for name, kept in ((SOURCE, SHARED), (TARGET, SHARED), (OUTPUT, TARGET if TARGET in needed else SHARED)):
        if name not in stored or name in needed or kept not in stored:
            continue
        if not torch.equal(stored.pop(name).read(), stored[kept].read()):
            setting = "tie_word_embeddings" if name == OUTPUT else "share_encoder_decoder_embeddings"
            raise CheckpointError(
                f"{name} in {folder} differs from {kept}, but config.json says that they are one table: set {setting} "
                "to false there if both are meant"
            )
    if SHARED in stored and SHARED not in needed:
        stored.pop(SHARED)
    for name in _POSITIONS:
        if name in stored:
            table = stored.pop(name).read().float()
            sines = SplitSinusoidal(settings.dim)(torch.arange(len(table)))
            if table.shape != sines.shape or not torch.allclose(table, sines, rtol=0, atol=2e-3):
                raise CheckpointError(f"{name} in {folder} is not the table of sines and cosines that Marian's have")
