"""What an experiment can be told: one frozen class per section of its YAML.

Where an option has parameters of its own it is a mapping with a `kind`, and its plain name is shorthand for it:
`score: dot` is `score: {kind: dot}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from regard.translation.vocabulary import VocabularySettings


def _refuse_truth_values(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("needs to be a number")
    return value


def _expand_shorthand(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


NotTruth = BeforeValidator(_refuse_truth_values)
Count = Annotated[int, NotTruth, Field(ge=1)]
WholeNumber = Annotated[int, NotTruth, Field(ge=0)]
Positive = Annotated[float, NotTruth, Field(gt=0)]
Share = Annotated[float, NotTruth, Field(ge=0, lt=1)]
Shorthand = BeforeValidator(_expand_shorthand)


class Settings(BaseModel):
    """A section: unknown keys are refused, values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TextFiles(Settings):
    """Parallel text in two files, line by line, plain or gzip."""

    source: Path
    target: Path


class TextTable(Settings):
    """Parallel text in two columns of one tab-separated file, plain or gzip; columns count from 0."""

    tsv: Path
    source_column: WholeNumber = 0
    target_column: WholeNumber = 1

    @model_validator(mode="after")
    def _columns_differ(self) -> TextTable:
        if self.source_column == self.target_column:
            raise ValueError(f"source_column and target_column are both {self.source_column}; they need to differ")
        return self


def _files_or_table(value: Any) -> str:
    has_table = "tsv" in value if isinstance(value, Mapping) else isinstance(value, TextTable)
    return "table" if has_table else "files"


TextSettings = Annotated[
    Annotated[TextFiles, Tag("files")] | Annotated[TextTable, Tag("table")], Discriminator(_files_or_table)
]


class DataSettings(Settings):
    """Where the text is. Files are relative to `folder`, which is relative to the current directory."""

    folder: Path = Path()
    train: TextSettings
    validation: TextSettings | None = None
    test: TextSettings | None = None
    source_language: str | None = None
    target_language: str | None = None
    max_length: Count = 100
    """Tokens; training pairs with a longer side are dropped."""


class VocabularySides(Settings):
    """A vocabulary for each language, told apart."""

    source: VocabularySettings
    target: VocabularySettings

    @model_validator(mode="after")
    def _two_are_not_shared(self) -> VocabularySides:
        if self.source.shared or self.target.shared:
            raise ValueError(
                "a shared vocabulary is one for both sides: write vocabulary.shared, without vocabulary.source and "
                "vocabulary.target"
            )
        return self


def _one_or_two(value: Any) -> str:
    if isinstance(value, Mapping):
        return "two" if "source" in value or "target" in value else "one"
    return "two" if isinstance(value, VocabularySides) else "one"


VocabularyChoice = Annotated[
    Annotated[VocabularySettings, Tag("one")] | Annotated[VocabularySides, Tag("two")],
    Discriminator(_one_or_two),
    Shorthand,
]


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


class ModelSettings(Settings):
    """The translator: a bidirectional recurrent encoder and a decoder that attends to it."""

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
    def _location_knows_its_length(self) -> ModelSettings:
        if self.decoder.score.kind == "location" and self.max_source_length is None:
            raise ValueError(
                "the score 'location' has one weight per source position and needs to know how many: "
                "set model.max_source_length"
            )
        return self


class Constant(Settings):
    """The learning rate stays as it is after the warm-up."""

    kind: Literal["constant"] = "constant"


class InverseSquareRoot(Settings):
    """The learning rate falls as 1/√update after the warm-up."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"


class Plateau(Settings):
    """The learning rate is multiplied by `factor` after more than `patience` validations without a better score."""

    kind: Literal["plateau"] = "plateau"
    factor: Annotated[Share, Field(gt=0)] = 0.5
    patience: WholeNumber = 1


DecaySettings = Annotated[Constant | InverseSquareRoot | Plateau, Discriminator("kind"), Shorthand]


class TrainingSettings(Settings):
    """How to train. An update is one step of the optimiser on one batch."""

    batch_tokens: Count = 4000
    max_epochs: Count = 30
    max_minutes: Positive | None = None
    learning_rate: Positive = 1e-3
    optimizer: Literal["adam"] = "adam"
    warmup_steps: WholeNumber = 0
    decay: DecaySettings = Constant()
    clip_norm: Positive | None = 1.0
    label_smoothing: Share = 0.0
    patience: Count | None = None
    """Validations without a better score after which training ends."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: str = "auto"
    devices: Annotated[int, NotTruth, Field(ge=-1)] | Literal["auto"] | list[WholeNumber] = 1
    num_nodes: Count = 1
    strategy: str = "auto"
    validate_every: Count | Annotated[float, NotTruth, Field(gt=0, le=1)] = 1.0
    """A whole number of updates, or a part of an epoch: 1 is after every update, 1.0 after every epoch."""
    save_every: Count = 500
    """Updates between two saves of the whole state, beside those at every validation."""

    @model_validator(mode="after")
    def _half_precision_needs_an_accelerator(self) -> TrainingSettings:
        if self.precision == "16-mixed" and self.accelerator == "cpu":
            raise ValueError("training.precision 16-mixed does not exist on the accelerator cpu; write bf16-mixed")
        return self


class SearchSettings(Settings):
    """How to translate: beam search, ranked by log P / ((5 + length) / 6)^length_penalty."""

    beam: Count = 5
    length_penalty: Annotated[float, NotTruth, Field(ge=0)] = 1.0
    max_length_ratio: Positive = 2.0
    n_best: Count = 1

    @model_validator(mode="after")
    def _beam_holds_the_best(self) -> SearchSettings:
        if self.n_best > self.beam:
            raise ValueError(f"search.n_best {self.n_best} needs a search.beam of at least as many; it is {self.beam}")
        return self
