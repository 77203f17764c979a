"""The sections of an experiment's YAML, as one frozen pydantic class each; docs/yaml.md lists their keys.

Where an option has parameters of its own it is a mapping with a `kind`, and its plain name is shorthand for it:
`score: dot` is `score: {kind: dot}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from regard.errors import ConfigurationError
from regard.models.normalizer_config import NormalizerConfig
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


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def values_by_key(self) -> dict[str, Any]:
        """The values as JSON has them, by dotted key.

        >>> LocalWindowSettings(kind="local-m").values_by_key()
        {'kind': 'local-m', 'radius': 10}
        """
        return _flat(self.model_dump(mode="json"))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


MAY_CHANGE = (
    "training.max_epochs",
    "training.max_updates",
    "training.max_minutes",
    "training.patience",
    "training.save_every",
    "training.keep_last",
    "training.keep_best",
    "data.folder",
    "search.",
)
"""Keys, and sections, that no update depends on: they may change when a run is resumed."""

MAY_CHANGE_WITHOUT_EXTRA = ("data.test.",)
"""Further such keys, unless there are extra pairs, which leave out what is tested on."""


class PlainScoreSettings(Section):
    """A score without sizes of its own."""

    kind: Literal["dot", "scaled_dot", "general", "location"]
    """q·k, q·k/√d, q·Wk, or a row of weights for each source position."""


class HiddenScoreSettings(Section):
    """A score with a hidden layer."""

    kind: Literal["additive", "concat"]
    """v·tanh(Wq + Uk) of Bahdanau et al., or v·tanh(W[q; k]) of Luong et al."""
    hidden_dim: Count | None = None
    """Width of the tanh layer; null: that of the decoder."""


ScoreSettings = Annotated[PlainScoreSettings | HiddenScoreSettings, Discriminator("kind"), Shorthand]


class GlobalWindowSettings(Section):
    """Attention to all source positions."""

    kind: Literal["global"] = "global"
    """All source positions."""


class LocalWindowSettings(Section):
    """Attention to source positions within `radius` of a centre (Luong et al. 2015, section 3.2)."""

    kind: Literal["local-m", "local-p"]
    """The centre is the target's own position (monotonic), or predicted from the state."""
    radius: Count = 10
    """Positions on each side of the centre."""


WindowSettings = Annotated[GlobalWindowSettings | LocalWindowSettings, Discriminator("kind"), Shorthand]


class PlainCoverageSettings(Section):
    """What a score knows of the attention of earlier steps."""

    kind: Literal["none", "sum"] = "none"
    """Nothing, or the sum of the weights that each source position has had (See et al. 2017)."""


class FertilitySettings(Section):
    """The sum of earlier weights, over a learned fertility of each source position (Tu et al. 2016)."""

    kind: Literal["fertility"]
    """The sum of earlier weights over a fertility."""
    most: Positive = 2.0
    """The largest fertility: target words that a source position is expected to give weight to."""


class RecurrentCoverageSettings(Section):
    """A vector of each source position, which a GRU keeps from step to step (Tu et al. 2016)."""

    kind: Literal["gru"]
    """A vector that a GRU keeps."""
    dim: Count = 10
    """Numbers of a vector."""


CoverageSettings = Annotated[
    PlainCoverageSettings | FertilitySettings | RecurrentCoverageSettings, Discriminator("kind"), Shorthand
]


class BahdanauSettings(Section):
    """Decoder of Bahdanau et al. (2015): the query is the previous state, the context is an input of the step."""

    kind: Literal["bahdanau"] = "bahdanau"
    """The query is the previous state, the context is an input of the step."""
    score: ScoreSettings = HiddenScoreSettings(kind="additive")
    """How well a query and a source position match."""
    coverage: CoverageSettings = PlainCoverageSettings()
    """What an additive score knows of the attention of earlier steps."""


class LuongSettings(Section):
    """Decoder of Luong et al. (2015): the query is the current state, the context is an input of the output layer."""

    kind: Literal["luong"] = "luong"
    """The query is the current state, the context is an input of the output layer."""
    score: ScoreSettings = PlainScoreSettings(kind="general")
    """How well a query and a source position match."""
    coverage: CoverageSettings = PlainCoverageSettings()
    """What an additive score knows of the attention of earlier steps."""
    input_feeding: bool = True
    """Whether the features that predicted a token are an input of the next step; without it a batch's steps are
    computed at once, several times as fast."""
    window: WindowSettings = GlobalWindowSettings()
    """Which source positions are attended to."""
    readout: Literal["tanh", "linear"] = "tanh"
    """The output layer's input: tanh(W[context; state]), or [context; state]."""
    layers: Count = 1
    """Recurrent layers."""


DecoderSettings = Annotated[BahdanauSettings | LuongSettings, Discriminator("kind"), Shorthand]


class PlainNormalizerSettings(Section):
    """Weights without a number to choose, of all attention of the model."""

    kind: Literal["softmax", "softmax1", "softpick", "sparsemax", "stick_breaking"]
    """`softmax`; with a 1 in its sum; of e^s - 1; the nearest distribution to the scores; the nearest tokens first."""


class NumberedNormalizerSettings(Section):
    """Weights with a number to choose."""

    kind: Literal["entmax", "relu", "sigmoid", "top_scores"]
    """Between softmax and sparsemax; of positive scores; of each score alone; softmax over the largest scores."""
    number: Annotated[float | int, NotTruth] | None = None
    """α of entmax (null: 1.5), the power of relu (null: 1), the bias of sigmoid, how many top_scores."""

    @model_validator(mode="after")
    def _number_fits(self) -> NumberedNormalizerSettings:
        try:
            NormalizerConfig(self.kind, self.number)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self


DISTRIBUTIONS = "softmax", "sparsemax", "entmax", "top_scores"
"""The kinds whose weights sum to 1 for any scores."""
NormalizerSettings = Annotated[PlainNormalizerSettings | NumberedNormalizerSettings, Discriminator("kind"), Shorthand]
"""What makes weights of scores."""


def normalizer_config(settings: PlainNormalizerSettings | NumberedNormalizerSettings) -> NormalizerConfig | None:
    """The normalizer of the settings; None for softmax."""
    if isinstance(settings, NumberedNormalizerSettings):
        return NormalizerConfig(settings.kind, settings.number)
    return None if settings.kind == "softmax" else NormalizerConfig(settings.kind)


class RecurrentSettings(Section):
    """The recurrent translator: a bidirectional recurrent encoder and a decoder that attends to it."""

    kind: Literal["recurrent"] = "recurrent"
    """A recurrent encoder and decoder."""
    embedding_dim: Count = 256
    """Width of the embeddings of both sides."""
    hidden_dim: Count = 512
    """Width of the decoder's state; each direction of the encoder has half."""
    cell: Literal["gru", "lstm"] = "gru"
    """The recurrent cell."""
    encoder_layers: Count = 1
    """Bidirectional layers of the encoder."""
    encoder_states: Literal["all", "last"] = "all"
    """What the decoder reads of the encoder: its states at all source tokens, or the last states of both directions
    alone, one vector for a sentence, which is translation without attention (Cho et al. 2014)."""
    dropout: Share = 0.2
    """On embeddings, between encoder layers, and on the features that predict a token."""
    decoder: DecoderSettings = BahdanauSettings()
    """The decoder and its attention."""
    normalizer: NormalizerSettings = PlainNormalizerSettings(kind="softmax")
    """What makes weights of scores, in the attention to the source."""
    pointer: bool = False
    """Whether source tokens can be copied, as a pointer-generator does, words that a vocabulary of words lacks too;
    needs one vocabulary of both sides (`vocabulary.shared`)."""
    max_source_length: Count | None = None
    """Most source tokens that the model takes; null: any number. Needed by the score `location`, which has a row of
    weights for each position."""

    @model_validator(mode="after")
    def _location_knows_its_length(self) -> RecurrentSettings:
        if self.decoder.score.kind == "location" and self.max_source_length is None:
            raise ValueError(
                "the score 'location' has one weight per source position and needs to know how many: "
                "set model.max_source_length"
            )
        return self

    @model_validator(mode="after")
    def _one_vector_has_no_places(self) -> RecurrentSettings:
        if self.encoder_states == "last" and (self.pointer or self.decoder.coverage.kind != "none"):
            key = "pointer" if self.pointer else "decoder.coverage"
            raise ValueError(
                f"model.{key} reads at which source token attention is, and with model.encoder_states 'last' there is "
                "no attention: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _coverage_has_a_hidden_layer(self) -> RecurrentSettings:
        if self.decoder.coverage.kind != "none" and not isinstance(self.decoder.score, HiddenScoreSettings):
            raise ValueError(
                f"model.decoder.coverage enters the hidden layer of a score, and {self.decoder.score.kind!r} has none: "
                "set model.decoder.score to additive or concat, or leave coverage out"
            )
        return self

    @model_validator(mode="after")
    def _pointer_has_a_distribution(self) -> RecurrentSettings:
        if self.pointer and self.normalizer.kind not in DISTRIBUTIONS:
            raise ValueError(
                f"model.pointer copies source tokens by weights that sum to 1, and those of model.normalizer "
                f"{self.normalizer.kind!r} may not: choose {', '.join(DISTRIBUTIONS)}, or leave pointer out"
            )
        return self


class ComputedPositionSettings(Section):
    """Position encodings without parameters, for any length."""

    kind: Literal["sinusoidal", "rotary", "alibi", "none"] = "sinusoidal"
    """Sines and cosines added to the embeddings, rotations of queries and keys, ALiBi's penalty of the distance in all
    self-attention (in the encoder the same in both directions: a source and its reversal look alike), or none."""


class LearnedPositionSettings(Section):
    """A learned vector for each of the positions 0 .. length - 1, of which BEGIN takes one on the target side."""

    kind: Literal["learned"] = "learned"
    """A learned vector for each position."""
    length: Count = 512
    """Number of positions; longer sentences are refused."""


class RelativePositionSettings(Section):
    """A learned vector for each distance, added to keys and values in all self-attention (Shaw et al. 2018)."""

    kind: Literal["relative"] = "relative"
    """A learned vector for each distance, the same for all heads."""
    distance: Count = 16
    """The distance from which on tokens share a vector, in either direction."""
    values: bool = True
    """Whether values have vectors too, or keys alone."""


PositionSettings = Annotated[
    ComputedPositionSettings | LearnedPositionSettings | RelativePositionSettings, Discriminator("kind"), Shorthand
]


class SoftmaxAttentionSettings(Section):
    """Softmax attention to all tokens."""

    kind: Literal["softmax"] = "softmax"
    """Exact softmax attention."""


class LinearAttentionSettings(Section):
    """Linear attention (Katharopoulos et al. 2020)."""

    kind: Literal["linear"]
    """Linear attention by a feature map."""
    feature_map: Literal["elu", "relu", "softmax"] = "elu"
    """The feature map of queries and keys."""


class PerformerSettings(Section):
    """Linear attention by random features of the softmax kernel (Choromanski et al. 2021)."""

    kind: Literal["performer"]
    """FAVOR+."""
    num_features: Count = 64
    """Random features of each query and key."""


class LinformerSettings(Section):
    """Softmax attention to learned mixtures of positions (Wang et al. 2020); `max_source_length` is its length."""

    kind: Literal["linformer"]
    """Linformer."""
    rank: Count = 16
    """Mixtures of keys, and of values, that each token attends to."""


EncoderAttentionSettings = Annotated[
    SoftmaxAttentionSettings | LinearAttentionSettings | PerformerSettings | LinformerSettings,
    Discriminator("kind"),
    Shorthand,
]


class TransformerSettings(Section):
    """The Transformer of Vaswani et al. (2017), whose base model is the default."""

    kind: Literal["transformer"] = "transformer"
    """A Transformer encoder and decoder."""
    dim: Count = 512
    """Width of the model, d_model; a multiple of num_heads."""
    hidden_dim: Count = 2048
    """Width of the feed-forward layers, d_ff."""
    num_heads: Count = 8
    """Attention heads of each layer."""
    head_dim: Count | None = None
    """Features of a query or key of a head; null: dim / num_heads."""
    score: Literal["scaled_dot", "dot"] = "scaled_dot"
    """q·k/√head_dim, as in the paper, or q·k, of all attention."""
    encoder_attention: EncoderAttentionSettings = SoftmaxAttentionSettings()
    """How the encoder's tokens attend to each other."""
    decoder_attention: Literal["softmax", "ssru"] = "softmax"
    """How the decoder's tokens learn of those before: softmax attention, or an SSRU (Kim et al. 2019), a recurrent
    layer in its place, of one vector for each sentence. The attention to the source is softmax attention."""
    normalizer: NormalizerSettings = PlainNormalizerSettings(kind="softmax")
    """What makes weights of scores, in all softmax attention."""
    encoder_layers: Count = 6
    """Layers of the encoder."""
    decoder_layers: Count = 6
    """Layers of the decoder."""
    dropout: Share = 0.1
    """On the output of each sub-layer, and on the embeddings."""
    attention_dropout: Share = 0.0
    """On the attention weights; not in the paper."""
    activation_dropout: Share = 0.0
    """Within the feed-forward layers; not in the paper."""
    norm: Literal["post", "pre"] = "post"
    """Layer normalisation after each residual sum, as in the paper, or before each sub-layer."""
    positions: PositionSettings = ComputedPositionSettings()
    """How positions enter."""
    shared_embeddings: Literal["none", "target", "all"] = "none"
    """One matrix for target embeddings and output layer (target), or for all embeddings, as in the paper (all)."""
    max_source_length: Count | None = None
    """Most source tokens that the model takes; null: any number."""

    @model_validator(mode="after")
    def _sizes_meet(self) -> TransformerSettings:
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} does not divide model.dim {self.dim}: each head takes "
                "dim / num_heads features; write model.head_dim for another number"
            )
        if self.positions.kind == "sinusoidal" and self.dim % 2:
            raise ValueError(f"model.dim is {self.dim}; sinusoidal positions need it to be even")
        if self.positions.kind == "rotary" and self.features_per_head % 2:
            raise ValueError(
                f"rotary positions turn pairs of features and need heads of an even size; model.dim {self.dim} over "
                f"model.num_heads {self.num_heads} gives {self.features_per_head}"
                if self.head_dim is None
                else f"rotary positions turn pairs of features; model.head_dim is {self.head_dim} and needs to be even"
            )
        return self

    @model_validator(mode="after")
    def _relative_positions_fit(self) -> TransformerSettings:
        if self.positions.kind != "relative":
            return self
        if self.score != "scaled_dot" or self.normalizer.kind != "softmax":
            raise ValueError(
                "model.positions 'relative' has vectors of keys and values in softmax attention of q·k/√head_dim; "
                f"model.score is {self.score!r} and model.normalizer {self.normalizer.kind!r}: leave these out, or "
                "choose other positions"
            )
        return self

    @model_validator(mode="after")
    def _encoder_attention_fits(self) -> TransformerSettings:
        kind, positions = self.encoder_attention.kind, self.positions.kind
        if kind == "linformer" and self.max_source_length is None:
            raise ValueError(
                "model.encoder_attention 'linformer' has weights for each source position and needs to know how many: "
                "set model.max_source_length"
            )
        by_pairs = positions in ("alibi", "relative") or (positions == "rotary" and kind == "linformer")
        if kind != "softmax" and by_pairs:
            raise ValueError(
                f"model.encoder_attention {kind!r} has no scores of pairs of tokens, which model.positions "
                f"{positions!r} would change: choose positions that are added to the embeddings, such as sinusoidal"
            )
        if kind != "softmax" and self.score != "scaled_dot":
            raise ValueError(
                f"model.encoder_attention {kind!r} has a score of its own; leave model.score {self.score!r} out, or "
                "choose softmax"
            )
        if kind != "softmax" and self.normalizer.kind != "softmax":
            raise ValueError(
                f"model.normalizer {self.normalizer.kind!r} takes the place of softmax in all attention, and "
                f"model.encoder_attention {kind!r} has none of it: leave one of the two out"
            )
        if kind != "softmax" and self.attention_dropout:
            raise ValueError(
                f"model.attention_dropout {self.attention_dropout} drops weights of softmax attention, and "
                f"model.encoder_attention {kind!r} computes none: set it to 0"
            )
        return self

    @property
    def features_per_head(self) -> int:
        """Features of a query or key of a head."""
        return self.head_dim or self.dim // self.num_heads


def _architecture(value: Any) -> str:
    kind = value.get("kind", "recurrent") if isinstance(value, Mapping) else getattr(value, "kind", "recurrent")
    return kind if isinstance(kind, str) else ""


ModelSettings = Annotated[
    Annotated[RecurrentSettings, Tag("recurrent")] | Annotated[TransformerSettings, Tag("transformer")],
    Discriminator(_architecture),
    Shorthand,
]
"""By `kind`; without one it is recurrent."""


class TextFiles(Section):
    """Parallel text in two files, line by line, plain or gzip."""

    source: Path
    """File of the source side."""
    target: Path
    """File of the target side: its line i translates line i of the source."""


class TextTable(Section):
    """Parallel text in two columns of one tab-separated file, plain or gzip; columns count from 0."""

    tsv: Path
    """The tab-separated file."""
    source_column: WholeNumber = 0
    """Column of the source side, from 0."""
    target_column: WholeNumber = 1
    """Column of the target side, from 0."""

    @model_validator(mode="after")
    def _columns_differ(self) -> TextTable:
        if self.source_column == self.target_column:
            raise ValueError(f"source_column and target_column are both {self.source_column}; they need to differ")
        return self


def _expand_path(value: Any) -> Any:
    return {"tsv": value} if isinstance(value, str | Path) else value


def _files_or_table(value: Any) -> str:
    has_table = "tsv" in value if isinstance(value, Mapping) else isinstance(value, TextTable)
    return "table" if has_table else "files"


TextSettings = Annotated[
    Annotated[TextFiles, Tag("files")] | Annotated[TextTable, Tag("table")],
    Discriminator(_files_or_table),
    BeforeValidator(_expand_path),
]
"""A path alone is that of a table."""


class SplitSettings(Section):
    """Pairs split off `data.train`; pairs that share a sentence stay in one part."""

    validation: WholeNumber = 0
    """Pairs to validate on."""
    test: WholeNumber = 0
    """Pairs to test on."""
    seed: WholeNumber = 1
    """Seed of the split alone: trainings with other seeds are tested on the same pairs."""

    @model_validator(mode="after")
    def _something_is_held_out(self) -> SplitSettings:
        if not self.validation + self.test:
            raise ValueError("holds nothing out; set data.split.validation or data.split.test to a number of pairs")
        return self


class DataSettings(Section):
    """Where the text is. Files are relative to `folder`, which is relative to the current directory."""

    folder: Path = Path()
    """Folder that the files are relative to."""
    train: TextSettings
    """Text to train on."""
    alignments: Path | None = None
    """File of the word links of `train` for `training.guided_alignment`, plain or gzip, as fast_align writes it: a line
    for each pair such as `0-0 1-2`, source word before target word, both from 0; words are what spaces separate."""
    validation: TextSettings | None = None
    """Text to validate on."""
    test: TextSettings | None = None
    """Text that `regard test` translates and scores."""
    split: SplitSettings | None = None
    """Pairs of the training text to validate or test on, in place of files."""
    casual_copies: Share = 0.0
    """Share of the training pairs that are there a second time without the source's final mark, in lower case, or
    both."""
    extra: TextSettings | None = None
    """More text to train on, of which nothing is held out; pairs that share a sentence with what is validated or tested
    on are left out of it."""
    extra_times: Count = 1
    """How often each extra pair is in the training text."""
    placeholders: Path | None = None
    """The placeholders.json of `regard prepare`, where the text has placeholders; it is kept with the model, which then
    translates with them."""
    source_language: str | None = None
    """Code of the source language, such as en."""
    target_language: str | None = None
    """Code of the target language, such as de; `regard test --tokenised` needs it."""
    max_length: Count = 100
    """Most tokens of a side of a training pair; longer pairs are left out."""

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


class SeparateVocabularySettings(Section):
    """A vocabulary for each side, with settings of its own."""

    source: VocabularySettings
    """Vocabulary of the source side."""
    target: VocabularySettings
    """Vocabulary of the target side."""

    @model_validator(mode="after")
    def _two_are_not_shared(self) -> SeparateVocabularySettings:
        if self.source.shared or self.target.shared:
            raise ValueError(
                "a shared vocabulary is one for both sides: write vocabulary.shared, without vocabulary.source and "
                "vocabulary.target"
            )
        return self


def _one_or_two(value: Any) -> str:
    if isinstance(value, Mapping):
        return "two" if "source" in value or "target" in value else "one"
    return "two" if isinstance(value, SeparateVocabularySettings) else "one"


VocabularyChoice = Annotated[
    Annotated[VocabularySettings, Tag("one")] | Annotated[SeparateVocabularySettings, Tag("two")],
    Discriminator(_one_or_two),
    Shorthand,
]


class ConstantDecay(Section):
    """The learning rate stays as it is after the warm-up."""

    kind: Literal["constant"] = "constant"
    """No decay."""


class InverseSquareRootDecay(Section):
    """The learning rate falls as 1/√update after the warm-up."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    """Decay as 1/√update."""


class PlateauDecay(Section):
    """The learning rate is multiplied by `factor` after more than `patience` validations without a better score."""

    kind: Literal["plateau"] = "plateau"
    """Reduction where validations get no better."""
    factor: Annotated[Share, Field(gt=0)] = 0.5
    """What the learning rate is multiplied by."""
    patience: WholeNumber = 1
    """Validations without a better score that change nothing."""


DecaySettings = Annotated[ConstantDecay | InverseSquareRootDecay | PlateauDecay, Discriminator("kind"), Shorthand]


class GuidedAlignmentSettings(Section):
    """A loss that draws attention weights towards `data.alignments` (Chen et al. 2016, Garg et al. 2019)."""

    weight: Positive = 0.05
    """Weight of the loss, beside 1 of the cross entropy."""
    layer: WholeNumber | None = None
    """Decoder layer of a Transformer, from 0; null: the last but one. A recurrent translator has one attention."""
    head: WholeNumber = 0
    """Head of that layer, from 0."""


class TrainingSettings(Section):
    """How to train. An update is one step of the optimiser on one batch."""

    start_from: Path | None = None
    """Weights of another run to fine-tune, such as runs/NAME/best.safetensors, with its vocabularies beside them.
    Vocabulary and model are as in that run, but for dropout: a section without a kind takes them from there. Where text
    is split, the other run has to have split it alike, or what is held out here was trained on there."""
    new_characters: Count | None = None
    """With `start_from`: characters that the other run's vocabulary lacks and that the text has so often get an id,
    as placeholders need one; null: none does."""
    batch_tokens: Count = 4000
    """Most tokens of a batch, padding included: sentences times the longest of a side."""
    max_epochs: Count = 30
    """Passes over the training text after which training ends."""
    max_updates: Count | None = None
    """Updates after which training ends; null: no limit."""
    max_minutes: Positive | None = None
    """Minutes after which training ends; null: no limit."""
    learning_rate: Positive = 1e-3
    """Peak of the learning rate, after the warm-up."""
    optimizer: Literal["adam"] = "adam"
    """The optimiser."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Adam's decay rates of the mean and of the square of gradients."""
    warmup_steps: WholeNumber = 0
    """Updates over which the learning rate rises linearly."""
    decay: DecaySettings = ConstantDecay()
    """What the learning rate does after the warm-up."""
    clip_norm: Positive | None = 1.0
    """Norm to which gradients are clipped; null: not at all."""
    label_smoothing: Share = 0.0
    """Share of the target distribution that is spread over all tokens."""
    coverage_loss: Annotated[float, NotTruth, Field(ge=0)] = 0.0
    """Weight of the coverage loss of a recurrent translator, which counts attention to what has been attended to
    before; 1 in See et al. (2017)."""
    guided_alignment: GuidedAlignmentSettings | None = None
    """Guided alignment, by links of words that are given; null: none."""
    patience: Count | None = None
    """Validations without a better score after which training ends; null: no limit."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Number format of the computation, as Lightning names it."""
    accelerator: str = "auto"
    """Where to compute, as Lightning names it: cpu, cuda, mps, auto."""
    devices: Annotated[int, NotTruth, Field(ge=-1)] | Literal["auto"] | list[WholeNumber] = 1
    """Number of devices, or their indices, or auto; -1 is all."""
    num_nodes: Count = 1
    """Machines that train together."""
    strategy: str = "auto"
    """How several processes train together, as Lightning names it: ddp, auto."""
    validate_every: Count | Annotated[float, NotTruth, Field(gt=0, le=1)] = 1.0
    """Updates between two validations if a whole number, part of an epoch if a fraction: 1 is after every update, 1.0
    after every epoch."""
    save_every: Count = 500
    """Updates between two saves of the state, beside those at every validation."""
    keep_last: WholeNumber = 0
    """How many of the latest weights, one set per validation, are kept for `regard average`."""
    keep_best: WholeNumber = 0
    """How many of the weights that validated best are kept for `regard average`."""

    @model_validator(mode="after")
    def _new_characters_need_a_vocabulary(self) -> TrainingSettings:
        if self.new_characters is not None and self.start_from is None:
            raise ValueError(
                "training.new_characters adds to the vocabulary of training.start_from, and there is none: a "
                "vocabulary that is learned has all characters of its text"
            )
        return self

    @model_validator(mode="after")
    def _half_precision_needs_an_accelerator(self) -> TrainingSettings:
        if self.precision == "16-mixed" and self.accelerator == "cpu":
            raise ValueError("training.precision 16-mixed does not exist on the accelerator cpu; write bf16-mixed")
        return self


PenaltyForm = Literal["gnmt", "length"]
SearchMethod = Literal["exact", "refilled"]
"""Base of the length penalty: (5 + length) / 6 (gnmt), or the length itself (length)."""


class SearchSettings(Section):
    """How to translate: beam search with a length penalty."""

    beam: Count = 5
    """Hypotheses that are kept at each step; 1 is greedy search."""
    length_penalty: Annotated[float, NotTruth, Field(ge=0)] = 1.0
    """Exponent of the length penalty; 0 ranks by probability alone."""
    penalty_form: PenaltyForm = "gnmt"
    """gnmt: log P / ((5 + length) / 6)^length_penalty, of Wu et al. (2016). length: log P / length^length_penalty, as
    fairseq, Marian and Hugging Face have it."""
    max_length_ratio: Positive = 2.0
    """Most tokens of a translation, as a multiple of its source's, plus 10."""
    n_best: Count = 1
    """Translations of each line."""
    method: SearchMethod = "exact"
    """exact: what ends leaves its place in the beam empty, and a search ends when nothing in it can still be better.
    refilled: every place is filled again, and a search ends when no beam is better now than the worst of as many
    finished translations as it is wide, as transformers has it."""

    stop_early: bool = False
    """Whether a refilled search ends as soon as as many translations are finished as it is wide, as transformers with
    early_stopping."""
    forced_end: bool = False
    """Whether a refilled search ranks what is cut as if its end followed, as transformers with forced_eos_token_id."""
    renormalize: bool = False
    """Whether probabilities are those among what may be said, without padding and the beginning of a sentence."""

    @model_validator(mode="after")
    def _beam_holds_the_best(self) -> SearchSettings:
        if self.n_best > self.beam:
            raise ValueError(f"search.n_best {self.n_best} needs a search.beam of at least as many; it is {self.beam}")
        return self
