"""Read models of many languages that descend from BART into a `Transformer`: M2M100, which NLLB is, and mBART.

Both have norms before each layer. M2M100 has Tensor2Tensor's sinusoids from position 2 on; mBART has learned positions,
a norm of the embeddings and a bias of the output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...errors import CheckpointError
from ...masks import causal
from ...nn import Attention, FeedForward, PreNorm, Projections, TransformerBlock
from ...nn.feedforward import Activation
from ...positions import Learned, Tensor2TensorSinusoidal
from ..language_model.huggingface.config_reader import ModelSettings
from ..language_model.huggingface.stored_tensors import StoredTensor
from .encoder_decoder import Decoder, Embedding, Encoder, TiedOutput
from .marian_checkpoint import OUTPUT, OUTPUT_BIAS, SHARED, SOURCE, TARGET, bart_layer_name
from .pretrained_settings import GENERATION, HARMLESS_SETTINGS, StackSizes, size_of
from .pretrained_tensors import drop_copies, fill_model, only_row, open_translator
from .transformer import Transformer

FIRST_POSITION = 2
"""What both count the first token as: the id of padding, which is 1 there, and 1."""
_ACTIVATIONS: dict[str, Activation] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "swish": functional.silu,
}
_HARMLESS = {"add_bias_logits", "add_final_layer_norm", "normalize_before", "normalize_embedding"}
"""What these models have in any case, and older files say once more."""
_SIDES = {"source_embedding.": "model.encoder.", "target_embedding.": "model.decoder."}


@dataclass(frozen=True)
class MultilingualSettings:
    """What config.json says of the arithmetic of an `M2M100ForConditionalGeneration` or `MBartFor...`."""

    is_mbart: bool
    dim: int
    encoder: StackSizes
    decoder: StackSizes
    activation: str
    scale_embedding: bool
    ties_output: bool
    size: int
    max_positions: int

    @classmethod
    def read(cls, values: Mapping[str, Any], ignore: Collection[str] = ()) -> MultilingualSettings:
        """Read config.json.

        Raises:
            CheckpointError: a setting that is missing, impossible, or unknown here and not in `ignore`.
        """
        settings = ModelSettings(values, {})
        is_mbart = settings.only("model_type", "m2m_100", "mbart") == "mbart"
        settings.only("static_position_embeddings", False, default=False)
        read = cls(
            is_mbart=is_mbart,
            dim=size_of(settings, "d_model"),
            encoder=StackSizes.read(settings, "encoder"),
            decoder=StackSizes.read(settings, "decoder"),
            activation=settings.only("activation_function", *_ACTIVATIONS, default="gelu" if is_mbart else "relu"),
            scale_embedding=settings.only("scale_embedding", True, False, default=not is_mbart),
            ties_output=settings.only("tie_word_embeddings", True, False, default=True),
            size=size_of(settings, "vocab_size"),
            max_positions=size_of(settings, "max_position_embeddings", 1024),
        )
        settings.check_all_read(HARMLESS_SETTINGS | _HARMLESS | GENERATION | set(ignore))
        for part, stack in (("encoder", read.encoder), ("decoder", read.decoder)):
            if read.dim % stack.heads or read.dim % 2 or read.dim < 4:
                raise CheckpointError(
                    f"config.json says d_model={read.dim} and {part}_attention_heads={stack.heads}: d_model needs to "
                    "be even, at least 4, and a multiple of the heads"
                )
        return read

    def build(self, max_target_length: int | None = None) -> Transformer:
        """A model of these sizes, freshly initialised."""
        target = nn.Embedding(self.size, self.dim)
        source = target if self.ties_output else nn.Embedding(self.size, self.dim)
        tied, bias = TiedOutput(target, bias=self.is_mbart), self.is_mbart
        longest = self.max_positions if max_target_length is None else min(max_target_length, self.max_positions)
        return Transformer(
            self._embedding(source),
            self._embedding(target),
            encoder=Encoder([self._block(self.encoder) for _ in range(self.encoder.layers)], nn.LayerNorm(self.dim)),
            decoder=Decoder(
                [self._block(self.decoder, decoder=True) for _ in range(self.decoder.layers)], nn.LayerNorm(self.dim)
            ),
            output=tied if self.ties_output else nn.Linear(self.dim, self.size, bias=bias),
            max_source_length=self.max_positions,
            max_target_length=longest,
        )

    def _embedding(self, tokens: nn.Embedding) -> Embedding:
        scale = None if self.scale_embedding else 1.0
        if self.is_mbart:
            return Embedding(tokens, Learned(self.max_positions, self.dim), scale=scale, norm=nn.LayerNorm(self.dim))
        return Embedding(tokens, Tensor2TensorSinusoidal(self.dim, first=FIRST_POSITION), scale=scale)

    def _block(self, stack: StackSizes, *, decoder: bool = False) -> TransformerBlock:
        return TransformerBlock(
            Attention(Projections(self.dim, stack.heads), mask=causal() if decoder else None),
            FeedForward(self.dim, stack.hidden_dim, activation=_ACTIVATIONS[self.activation]),
            lambda: PreNorm(nn.LayerNorm(self.dim)),
            cross_attention=Attention(Projections(self.dim, stack.heads)) if decoder else None,
        )

    def stored_name(self, name: str) -> str:
        """The name of a parameter of `Transformer` in a model of transformers."""
        if layer := bart_layer_name(name):
            return layer
        for ours, theirs in _SIDES.items():
            if name.startswith(ours):
                part = name.removeprefix(ours)
                if part == "tokens.weight":
                    return SHARED if self.ties_output else theirs + "embed_tokens.weight"
                part = part.replace("positions.", "embed_positions.").replace("norm.", "layernorm_embedding.")
                return theirs + part
        return {
            "encoder.norm.weight": "model.encoder.layer_norm.weight",
            "encoder.norm.bias": "model.encoder.layer_norm.bias",
            "decoder.norm.weight": "model.decoder.layer_norm.weight",
            "decoder.norm.bias": "model.decoder.layer_norm.bias",
            "output.tokens.weight": SHARED,
            "output.weight": OUTPUT,
            "output.bias": OUTPUT_BIAS,
        }[name]

    def load(self, folder: Path, max_target_length: int | None = None) -> Transformer:
        """The model in a folder, in float32, whatever its tensors are stored in.

        Raises:
            CheckpointError: see `pretrained_tensors.fill_model`; copies of a table that differ from it.
        """
        stored = open_translator(folder)
        model = self.build(max_target_length)
        names = {name: self.stored_name(name) for name in model.state_dict()}
        if self.ties_output:
            copies = dict.fromkeys((SOURCE, TARGET, OUTPUT), (SHARED, "tie_word_embeddings"))
            drop_copies(folder, stored, copies)
        else:
            stored.pop(SHARED, None)
        if OUTPUT_BIAS in stored:
            stored[OUTPUT_BIAS] = only_row(stored[OUTPUT_BIAS])
        for side in _SIDES.values():
            self._prepare_positions(folder, stored, side)
        return fill_model(folder, model, stored, names)

    def _prepare_positions(self, folder: Path, stored: dict[str, StoredTensor], side: str) -> None:
        """Leave out the rows of learned positions that no token has, and stored sinusoids once they are seen to be."""
        name = side + ("embed_positions.weight" if self.is_mbart else "embed_positions.weights")
        if name not in stored:
            return
        table = stored[name]
        if self.is_mbart:
            shape = (max(table.shape[0] - FIRST_POSITION, 0), *table.shape[1:]) if table.shape else table.shape
            stored[name] = StoredTensor(shape, lambda: table.read()[FIRST_POSITION:])
            return
        found = stored.pop(name).read().float()[FIRST_POSITION:]
        sines = Tensor2TensorSinusoidal(self.dim, first=FIRST_POSITION)(torch.arange(len(found)))
        if found.shape != sines.shape or not torch.allclose(found, sines, rtol=0, atol=2e-3):
            raise CheckpointError(f"{name} in {folder} is not the table of sines and cosines that M2M100 has")
