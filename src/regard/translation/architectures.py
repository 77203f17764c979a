"""What an experiment can be told about its model: one frozen class for each architecture and each part of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, model_validator

from regard.translation.section import Count, Settings, Share, Shorthand


class PlainScore(Settings):
    """A score without sizes of its own."""

    kind: Literal["dot", "scaled_dot", "general", "location"]


class HiddenScore(Settings):
    """A score with a hidden layer."""

    kind: Literal["additive", "concat"]
    hidden_dim: Count | None = None
    """Width of the score's tanh layer; None: as wide as the decoder."""


ScoreSettings = Annotated[PlainScore | HiddenScore, Discriminator("kind"), Shorthand]


class GlobalWindow(Settings):
    """Every word of the source can be looked at."""

    kind: Literal["global"] = "global"


class LocalWindow(Settings):
    """Only the words up to `radius` from a centre: the target's own place (local-m) or a predicted one (local-p)."""

    kind: Literal["local-m", "local-p"]
    radius: Count = 10


WindowSettings = Annotated[GlobalWindow | LocalWindow, Discriminator("kind"), Shorthand]


class BahdanauDecoder(Settings):
    """The previous state asks, the context joins the input of the step."""

    kind: Literal["bahdanau"] = "bahdanau"
    score: ScoreSettings = HiddenScore(kind="additive")


class LuongDecoder(Settings):
    """The current state asks; tanh(W[context; state]), or the two as they are, predicts."""

    kind: Literal["luong"] = "luong"
    score: ScoreSettings = PlainScore(kind="general")
    input_feeding: bool = True
    window: WindowSettings = GlobalWindow()
    readout: Literal["tanh", "linear"] = "tanh"
    layers: Count = 1


DecoderSettings = Annotated[BahdanauDecoder | LuongDecoder, Discriminator("kind"), Shorthand]


class RecurrentSettings(Settings):
    """The recurrent translator: a bidirectional recurrent encoder and a decoder that attends to it."""

    kind: Literal["recurrent"] = "recurrent"
    embedding_dim: Count = 256
    hidden_dim: Count = 512
    cell: Literal["gru", "lstm"] = "gru"
    encoder_layers: Count = 1
    dropout: Share = 0.2
    decoder: DecoderSettings = BahdanauDecoder()
    max_source_length: Count | None = None
    """Tokens; needed by the score `location`, which has a row of weights for each position."""

    @model_validator(mode="after")
    def _location_knows_its_length(self) -> RecurrentSettings:
        if self.decoder.score.kind == "location" and self.max_source_length is None:
            raise ValueError(
                "the score 'location' has one weight per source position and needs to know how many: "
                "set model.max_source_length"
            )
        return self


class ComputedPositions(Settings):
    """Positions without an end: sines and cosines that are added, or that turn queries and keys."""

    kind: Literal["sinusoidal", "rotary"] = "sinusoidal"


class LearnedPositions(Settings):
    """A learned vector for each of the positions 0 .. length - 1, of which BEGIN takes one on the target side."""

    kind: Literal["learned"] = "learned"
    length: Count = 512


PositionSettings = Annotated[ComputedPositions | LearnedPositions, Discriminator("kind"), Shorthand]


class TransformerSettings(Settings):
    """The Transformer of Vaswani et al. (2017), whose base model is the default."""

    kind: Literal["transformer"] = "transformer"
    dim: Count = 512
    hidden_dim: Count = 2048
    """Width of the feed-forward parts."""
    num_heads: Count = 8
    encoder_layers: Count = 6
    decoder_layers: Count = 6
    dropout: Share = 0.1
    """Of what each part says before it is added, and of the embeddings."""
    attention_dropout: Share = 0.0
    """Of the attention's weights; not in the paper."""
    activation_dropout: Share = 0.0
    """Within the feed-forward parts; not in the paper."""
    norm: Literal["post", "pre"] = "post"
    """After each part, as in the paper, or before it."""
    positions: PositionSettings = ComputedPositions()
    shared_embeddings: Literal["none", "target", "all"] = "none"
    """One table for target and output, or for source, target and output as in the paper."""
    max_source_length: Count | None = None

    @model_validator(mode="after")
    def _sizes_meet(self) -> TransformerSettings:
        if self.dim % self.num_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} does not divide model.dim {self.dim}: each head takes "
                "dim / num_heads features"
            )
        if self.positions.kind == "sinusoidal" and self.dim % 2:
            raise ValueError(f"model.dim is {self.dim}; sinusoidal positions need it to be even")
        if self.positions.kind == "rotary" and self.dim // self.num_heads % 2:
            raise ValueError(
                f"rotary positions turn pairs of features and need heads of an even size; model.dim {self.dim} over "
                f"model.num_heads {self.num_heads} gives {self.dim // self.num_heads}"
            )
        return self


def _architecture(value: Any) -> str:
    kind = value.get("kind", "recurrent") if isinstance(value, Mapping) else getattr(value, "kind", "recurrent")
    return kind if isinstance(kind, str) else ""


ModelSettings = Annotated[
    Annotated[RecurrentSettings, Tag("recurrent")] | Annotated[TransformerSettings, Tag("transformer")],
    Discriminator(_architecture),
    Shorthand,
]
"""By `kind`; without one it is recurrent."""
