"""What an experiment can be told: one frozen class per section of its YAML.

Where an option has parameters of its own it is a mapping with a `kind`, and its plain name is shorthand for it:
`score: dot` is `score: {kind: dot}`.

What the sections of an experiment have in common, and the kinds of numbers in them.

What an experiment can be told about its model: one frozen class for each architecture and each part of one.
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


class SplitSettings(Settings):
    """How many pairs of `data.train` are held out of it; pairs that share a sentence stay on one side."""

    validation: WholeNumber = 0
    test: WholeNumber = 0
    seed: WholeNumber = 1
    """Of the split alone: trainings with other seeds are tested on the same pairs."""

    @model_validator(mode="after")
    def _something_is_held_out(self) -> SplitSettings:
        if not self.validation + self.test:
            raise ValueError("holds nothing out; set data.split.validation or data.split.test to a number of pairs")
        return self


class DataSettings(Settings):
    """Where the text is. Files are relative to `folder`, which is relative to the current directory."""

    folder: Path = Path()
    train: TextSettings
    validation: TextSettings | None = None
    test: TextSettings | None = None
    split: SplitSettings | None = None
    """In place of files for validation or test, or of both."""
    casual_copies: Share = 0.0
    """Of how many training pairs there is a copy without the source's final mark, in lower case, or both."""
    extra: TextSettings | None = None
    """More to train on, of which nothing is held out; without pairs that share a sentence with what is held out, or
    with the files to validate and to test on."""
    extra_times: Count = 1
    """How often each of these pairs is in the training text: few that matter are lost among many."""
    source_language: str | None = None
    target_language: str | None = None
    max_length: Count = 100
    """Tokens; training pairs with a longer side are dropped."""

    @property
    def validates(self) -> bool:
        """Whether there is text to validate on."""
        return self.validation is not None or (self.split is not None and self.split.validation > 0)

    @model_validator(mode="after")
    def _each_part_is_told_once(self) -> DataSettings:
        for part in ("validation", "test"):
            if self.split is not None and getattr(self.split, part) and getattr(self, part) is not None:
                raise ValueError(f"data.{part} and data.split.{part} both say what the {part} text is; leave one out")
        return self

    @model_validator(mode="after")
    def _something_is_repeated(self) -> DataSettings:
        if self.extra is None and self.extra_times != 1:
            raise ValueError("data.extra_times repeats the pairs of data.extra, and there are none: name their file")
        return self


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

    start_from: Path | None = None
    """Weights of another run, such as runs/NAME/best.safetensors, with its vocabularies beside it: fine-tuning.

    Vocabulary and model are as in that run, but for dropout: what a section without a kind does not tell is from there.
    Where text is split, the other run has to have split it alike, or what is held out here was trained on there.
    """
    batch_tokens: Count = 4000
    max_epochs: Count = 30
    max_updates: Count | None = None
    max_minutes: Positive | None = None
    learning_rate: Positive = 1e-3
    optimizer: Literal["adam"] = "adam"
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's: of the mean and of the square."""
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
    keep_last: WholeNumber = 0
    """Stops of which the weights are kept, the latest ones, for averaging."""
    keep_best: WholeNumber = 0
    """The same of those that validated best."""

    @model_validator(mode="after")
    def _half_precision_needs_an_accelerator(self) -> TrainingSettings:
        if self.precision == "16-mixed" and self.accelerator == "cpu":
            raise ValueError("training.precision 16-mixed does not exist on the accelerator cpu; write bf16-mixed")
        return self


PenaltyForm = Literal["gnmt", "length"]
"""What of a length is raised to the power of the length penalty: (5 + length) / 6, or the length itself."""


class SearchSettings(Settings):
    """How to translate: beam search, ranked by log P / ((5 + length) / 6)^length_penalty, or another form of it."""

    beam: Count = 5
    length_penalty: Annotated[float, NotTruth, Field(ge=0)] = 1.0
    penalty_form: PenaltyForm = "gnmt"
    """gnmt: Wu et al. (2016). length: log P / length^length_penalty, as fairseq, Marian and Hugging Face have it."""
    max_length_ratio: Positive = 2.0
    n_best: Count = 1

    @model_validator(mode="after")
    def _beam_holds_the_best(self) -> SearchSettings:
        if self.n_best > self.beam:
            raise ValueError(f"search.n_best {self.n_best} needs a search.beam of at least as many; it is {self.beam}")
        return self
