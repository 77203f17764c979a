"""Read T5, mT5 and MADLAD of transformers into a `Transformer`: its config.json and its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...biases import relative
from ...errors import CheckpointError
from ...masks import causal
from ...nn import Attention, FeedForward, GatedFeedForward, PreNorm, Projections, RMSNorm, TransformerBlock
from ...nn.feedforward import Activation
from ...scores import Dot
from ...utils.numbers import lies_between
from ..language_model.huggingface.config_reader import ModelSettings
from ..language_model.huggingface.stored_tensors import StoredTensor
from .encoder_decoder import Decoder, Embedding, Encoder, TiedOutput
from .pretrained_settings import GENERATION, HARMLESS_SETTINGS, size_of
from .pretrained_tensors import drop_copies, fill_model, open_translator
from .transformer import Transformer

_ACTIVATIONS: dict[str, Activation] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
}
_HARMLESS = {"n_positions"}
_SHARED, _OUTPUT = "shared.weight", "lm_head.weight"
_UNREAD = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""What older files have and no version of the model reads."""
_TABLE = "relative_attention_bias.weight"
_NORM = "decoder.final_layer_norm.weight"
# Of a layer: *.blocks.0.* here, *.block.0.layer.* there, where the feed-forward layer is the last.
_PARTS = {
    "attention.projections.": "0.SelfAttention.",
    "attention.bias.tensor_0": f"0.SelfAttention.{_TABLE}",
    "attention_residual.norm.": "0.layer_norm.",
    "cross_attention.projections.": "1.EncDecAttention.",
    "cross_residual.norm.": "1.layer_norm.",
    "feed_forward.": "-1.DenseReluDense.",
    "feed_forward_residual.norm.": "-1.layer_norm.",
}
_PROJECTIONS = {"query.": "q.", "key.": "k.", "value.": "v.", "output.": "o."}


@dataclass(frozen=True)
class T5Settings:
    """What config.json says of the arithmetic of a `T5ForConditionalGeneration` or `MT5ForConditionalGeneration`."""

    dim: int
    head_dim: int
    hidden_dim: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    buckets: int
    max_distance: int
    eps: float
    activation: str
    is_gated: bool
    scales_output: bool
    size: int

    @classmethod
    def read(cls, values: Mapping[str, Any], ignore: Collection[str] = ()) -> T5Settings:
        """Read config.json.

        Raises:
            CheckpointError: a setting that is missing, impossible, or unknown here and not in `ignore`.
        """
        settings = ModelSettings(values, {})
        is_t5 = settings.only("model_type", "t5", "mt5") == "t5"
        activation, is_gated = _feed_forward(settings, "relu" if is_t5 else "gated-gelu")
        tied = settings.get("tie_word_embeddings", True)
        # T5 1.1 is told from T5 by its untied output, or by this setting where transformers 5 saved it.
        scales = settings.get("scale_decoder_outputs", tied is not False) if is_t5 else False
        eps, layers = settings.get("layer_norm_epsilon", 1e-6), size_of(settings, "num_layers")
        if not lies_between(0, eps, 1):
            raise CheckpointError(f"config.json says layer_norm_epsilon={eps!r}; it needs a number between 0 and 1")
        no_decoder = settings.is_off("num_decoder_layers")
        read = cls(
            dim=size_of(settings, "d_model"),
            head_dim=size_of(settings, "d_kv"),
            hidden_dim=size_of(settings, "d_ff"),
            heads=size_of(settings, "num_heads"),
            encoder_layers=layers,
            decoder_layers=layers if no_decoder else size_of(settings, "num_decoder_layers"),
            buckets=size_of(settings, "relative_attention_num_buckets", 32),
            max_distance=size_of(settings, "relative_attention_max_distance", 128),
            eps=eps,
            activation=activation,
            is_gated=is_gated,
            scales_output=bool(scales),
            size=size_of(settings, "vocab_size"),
        )
        settings.check_all_read(HARMLESS_SETTINGS | _HARMLESS | GENERATION | set(ignore))
        return read

    def build(self, max_target_length: int | None = None, *, ties_output: bool = True) -> Transformer:
        """A model of these sizes, freshly initialised; all layers of a stack share one bias."""
        tokens = nn.Embedding(self.size, self.dim)
        encoder_table, decoder_table = (nn.Parameter(torch.empty(self.heads, self.buckets)) for _ in range(2))
        encoder = [self._block(encoder_table) for _ in range(self.encoder_layers)]
        decoder = [self._block(decoder_table, decoder=True) for _ in range(self.decoder_layers)]
        return Transformer(
            Embedding(tokens, scale=1.0),
            Embedding(tokens, scale=1.0),
            encoder=Encoder(encoder, RMSNorm(self.dim, self.eps)),
            decoder=Decoder(decoder, RMSNorm(self.dim, self.eps)),
            output=TiedOutput(tokens) if ties_output else nn.Linear(self.dim, self.size, bias=False),
            max_target_length=max_target_length,
        )

    def _block(self, table: nn.Parameter, *, decoder: bool = False) -> TransformerBlock:
        bias = relative(table, max_distance=self.max_distance, bidirectional=not decoder)
        feed_forward = GatedFeedForward if self.is_gated else FeedForward
        return TransformerBlock(
            Attention(self._projections(), score=Dot(), bias=bias, mask=causal() if decoder else None),
            feed_forward(self.dim, self.hidden_dim, activation=_ACTIVATIONS[self.activation], bias=False),
            lambda: PreNorm(RMSNorm(self.dim, self.eps)),
            cross_attention=Attention(self._projections(), score=Dot()) if decoder else None,
        )

    def _projections(self) -> Projections:
        return Projections(self.dim, self.heads, head_dim=self.head_dim, bias=False)

    def stored_name(self, name: str) -> str:
        """The name of a parameter of `Transformer` in a model of transformers."""
        layer = re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", name)
        if layer is None:
            table = _OUTPUT if name == "output.weight" else _SHARED
            norm = re.fullmatch(r"(encoder|decoder)\.norm\.weight", name)
            return f"{norm[1]}.final_layer_norm.weight" if norm else table
        stack, number, part = layer.groups()
        ours = next(prefix for prefix in _PARTS if part.startswith(prefix))
        rest = part.removeprefix(ours)
        for mine, theirs in (_PROJECTIONS | self._feed_forward_names).items():
            rest = theirs + rest.removeprefix(mine) if rest.startswith(mine) else rest
        theirs = _PARTS[ours].replace("-1", "2" if stack == "decoder" else "1")
        return f"{stack}.block.{0 if ours.endswith('tensor_0') else number}.layer.{theirs}{rest}"

    @property
    def _feed_forward_names(self) -> dict[str, str]:
        gated = {"gate.": "wi_0.", "up.": "wi_1."}
        return {**(gated if self.is_gated else {"up.": "wi."}), "down.": "wo."}

    def load(self, folder: Path, max_target_length: int | None = None) -> Transformer:
        """The model in a folder, in float32, whatever its tensors are stored in.

        The factor of the output, 1/√dim of T5 1.0, is in the gain of the last norm.

        Raises:
            CheckpointError: see `pretrained_tensors.fill_model`; copies of the table that differ from it.
        """
        stored = open_translator(folder)
        stored.pop(_UNREAD, None)
        drop_copies(
            folder,
            stored,
            {f"{stack}.embed_tokens.weight": (_SHARED, "tie_word_embeddings") for stack in ("encoder", "decoder")},
        )
        # transformers ties the output unless the file has one that differs.
        output, shared = stored.get(_OUTPUT), stored.get(_SHARED)
        tied = output is None or shared is None or torch.equal(output.read(), shared.read())
        if tied:
            stored.pop(_OUTPUT, None)
        model = self.build(max_target_length, ties_output=tied)
        names = {name: self.stored_name(name) for name in model.state_dict()}
        converted = {name: self._converted(name, tensor) for name, tensor in stored.items()}
        return fill_model(folder, model, converted, names, wide=("wo.weight", _NORM))

    def _converted(self, name: str, stored: StoredTensor) -> StoredTensor:
        """A tensor as it is stored here: tables of a bias by head, and the factor of the output in the last norm."""
        if name.endswith(_TABLE):
            return StoredTensor(tuple(reversed(stored.shape)), lambda: stored.read().T)
        if name == _NORM and self.scales_output:
            return StoredTensor(stored.shape, lambda: stored.read().float() * self.dim**-0.5)
        return stored


def _feed_forward(settings: ModelSettings, default: str) -> tuple[str, bool]:
    """The activation of the feed-forward layer, and whether it has a gate."""
    known = [f"{gate}{name}" for gate in ("", "gated-") for name in _ACTIVATIONS]
    given = settings.only("feed_forward_proj", *known, default=default)
    activation, is_gated = given.removeprefix("gated-"), given.startswith("gated-")
    if given == "gated-gelu":
        activation = "gelu_new"
    settings.only("dense_act_fn", activation, default=activation)
    settings.only("is_gated_act", is_gated, default=is_gated)
    return activation, is_gated
