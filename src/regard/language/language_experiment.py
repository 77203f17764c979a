"""The settings of a language-model experiment, read from one YAML file and checked; docs/yaml-language-model.md.

`task: language-model` in the file chooses them. `python -m regard.language.language_experiment` prints the page.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, model_validator

from regard.errors import ConfigurationError, nearest
from regard.models.language_model import (
    AttentionConfig,
    GatedFeedForwardConfig,
    LanguageModelConfig,
    LayerConfig,
    LinearAttentionConfig,
    PathPositionsConfig,
    RelativePositionsConfig,
)
from regard.positions import Rotary
from regard.ring import Contiguous, RingLayout, Striped, Zigzag
from regard.translation.experiment import TRANSLATION, Experiment, YAMLExperiment, read_mapping, settings_tables
from regard.translation.settings import (
    Count,
    NormalizerSettings,
    NotTruth,
    PlainNormalizerSettings,
    Positive,
    Section,
    Share,
    Shorthand,
    WholeNumber,
    normalizer_config,
)

BYTES = 256
"""The vocabulary: tokens are the bytes of the text."""

LAYOUTS: dict[str, RingLayout] = {"contiguous": Contiguous(), "zigzag": Zigzag(), "striped": Striped()}
"""Layouts of a ring by the names that `training.ring` has for them."""


class LongTextSettings(Section):
    """The text: files one after the other, as bytes. Files are relative to `folder`."""

    folder: Path = Path()
    """Folder that the files are relative to."""
    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Text files, plain or gzip, and folders, whose files are taken in the order of their names."""
    length: Annotated[int, NotTruth, Field(ge=2)] = 4096
    """Tokens of a sequence; an update reads one sequence, at a random place of the text."""
    held_out: WholeNumber = 0
    """Bytes at the end of the text that are not trained on but validated on, in sequences of `length`."""


class CausalLayerSettings(Section):
    """Softmax attention to all tokens before each."""

    kind: Literal["causal"] = "causal"
    """All tokens before each, and itself."""


class WindowLayerSettings(Section):
    """Softmax attention to the tokens just before each and to the first of the sequence."""

    kind: Literal["window"] = "window"
    """The nearest tokens before each, itself, and the first of the sequence."""
    before: WholeNumber = 255
    """How many tokens before each it attends to."""
    prefix: WholeNumber = 4
    """How many of the first tokens all attend to, as attention sinks."""


class LinearLayerSettings(Section):
    """Linear attention to all tokens before each, through a state of constant size."""

    kind: Literal["linear"] = "linear"
    """All tokens before each, in time linear in their number."""
    feature_map: Literal["elu", "relu", "identity", "softmax", "unit"] | None = None
    """The feature map; null: elu, or unit for the delta rule."""
    decay: Literal["head", "feature"] | None = None
    """Learned gates by which the state decays, one per head or per feature; null: none."""
    delta_rule: bool = False
    """Whether a value replaces what the state has for its key."""


class RotaryPositionSettings(Section):
    """Queries and keys are turned by their positions."""

    kind: Literal["rotary"] = "rotary"
    """Rotary positions, of `rotary_base`."""


class PathPositionSettings(Section):
    """PaTH: each token reflects what is before it (Yang et al. 2025)."""

    kind: Literal["path"] = "path"
    """A learned reflection of each token and head."""
    rank: Count | None = 32
    """Rank of the map from tokens to directions of reflections; null: a matrix that is no product."""
    width: Count = 3
    """Tokens that the convolution of directions reads; 1: no convolution."""


class ByDistanceSettings(Section):
    """A learned vector for each distance, added to keys and values (Shaw et al. 2018)."""

    kind: Literal["relative"] = "relative"
    """A learned vector for each distance, the same for all heads."""
    distance: Count = 16
    """The distance from which on tokens share a vector."""
    values: bool = True
    """Whether values have vectors too, or keys alone."""


LayerPositionSettings = Annotated[
    RotaryPositionSettings | PathPositionSettings | ByDistanceSettings, Discriminator("kind"), Shorthand
]


LayerSettings = Annotated[
    CausalLayerSettings | WindowLayerSettings | LinearLayerSettings, Discriminator("kind"), Shorthand
]


class ByteModelSettings(Section):
    """The language model: blocks of attention and a gated feed-forward network (SwiGLU), RMS norms, tied embeddings."""

    dim: Count = 256
    """Width of the model; a multiple of num_heads."""
    num_heads: Count = 4
    """Attention heads of each layer."""
    num_kv_heads: Count | None = None
    """Heads of keys and values, each shared by several query heads; null: as many as num_heads."""
    hidden_dim: Count = 682
    """Width of the feed-forward networks."""
    layers: Annotated[tuple[LayerSettings, ...], Field(min_length=1)] = (CausalLayerSettings(),) * 4
    """What each layer attends to, from the first to the last."""
    sinks: bool = False
    """Whether each head of softmax attention learns a logit that takes weight and gives no value."""
    normalizer: NormalizerSettings = PlainNormalizerSettings(kind="softmax")
    """What makes weights of scores, in all softmax attention."""
    positions: LayerPositionSettings = RotaryPositionSettings()
    """How positions enter softmax attention."""
    rotary_base: Positive = 10_000.0
    """Base of the rotary positions of softmax attention."""
    forget_gate: bool = False
    """Whether each token has a gate for each head of softmax attention, by which what comes before it fades."""
    dropout: Share = 0.0
    """On embeddings and on the output of each sub-layer."""
    attention_dropout: Share = 0.0
    """On the weights of softmax attention."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> ByteModelSettings:
        odd = self.positions.kind == "rotary" and self.dim // self.num_heads % 2
        if self.dim % self.num_heads or odd:
            raise ValueError(
                f"model.num_heads {self.num_heads} needs to divide model.dim {self.dim} into heads of an even size, "
                "whose pairs of features rotary positions turn"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"model.num_kv_heads {self.num_kv_heads} does not divide model.num_heads {self.num_heads}")
        return self

    @model_validator(mode="after")
    def _sinks_have_a_meaning(self) -> ByteModelSettings:
        config = normalizer_config(self.normalizer)
        if self.sinks and config is not None and (why := config.make().refuses.get("sinks")):
            raise ValueError(f"model.sinks has no meaning with model.normalizer {config.name!r}: {why}")
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> ByteModelSettings:
        if self.positions.kind == "rotary":
            return self
        lacks = {"sinks": self.sinks, "normalizer": self.normalizer.kind != "softmax"}
        if self.positions.kind == "relative":
            lacks["forget_gate"] = self.forget_gate
        given = [f"model.{name}" for name, is_set in lacks.items() if is_set]
        if given:
            raise ValueError(
                f"model.positions {self.positions.kind!r} have attention without {' and '.join(given)}: leave "
                f"{'it' if len(given) == 1 else 'them'} out, or take rotary positions"
            )
        return self

    def config(self) -> LanguageModelConfig:
        """The configuration of `regard.models.LanguageModel`."""
        softmax = self._softmax_layer()
        return LanguageModelConfig(
            vocabulary_size=BYTES,
            dim=self.dim,
            layers=tuple(_layer_config(layer, softmax) for layer in self.layers),
            attention=AttentionConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                sinks=self.sinks,
                dropout=self.attention_dropout,
                normalizer=normalizer_config(self.normalizer),
                forget_gate=self.forget_gate,
            ),
            feed_forward=GatedFeedForwardConfig(self.hidden_dim),
            tied=True,
            dropout=self.dropout,
        )

    def _softmax_layer(self) -> LayerConfig:
        """A layer of softmax attention over all tokens before each, with the positions of the settings."""
        if isinstance(self.positions, PathPositionSettings):
            return LayerConfig(positions=PathPositionsConfig(self.positions.rank, self.positions.width))
        if isinstance(self.positions, ByDistanceSettings):
            return LayerConfig(positions=RelativePositionsConfig(self.positions.distance, self.positions.values))
        return LayerConfig(rotary=Rotary(self.dim // self.num_heads, base=self.rotary_base))


def _layer_config(layer: LayerSettings, softmax: LayerConfig) -> LayerConfig:
    """A layer of the settings; `softmax` has the positions of softmax attention."""
    if isinstance(layer, LinearLayerSettings):
        return LayerConfig(linear=LinearAttentionConfig(layer.feature_map, layer.decay, layer.delta_rule))
    if isinstance(layer, WindowLayerSettings):
        return replace(softmax, before=layer.before, prefix=layer.prefix)
    return softmax


class LongTrainingSettings(Section):
    """How to train. An update is one step of the optimiser; torchrun starts several processes.

    An update reads `accumulate` sequences for each ring, without one for each process.
    """

    ring: Literal["contiguous", "zigzag", "striped"] | None = None
    """How each sequence is sharded over the processes of a ring: contiguous for windows, zigzag or striped for causal
    layers; null: each process reads sequences of its own."""
    ring_size: Annotated[int, NotTruth, Field(ge=2)] | None = None
    """Processes of a ring, a divisor of those that torchrun starts; each ring reads sequences of its own. null: all
    processes are one ring."""
    accumulate: Count = 1
    """Sequences that a ring, or a process without one, reads for an update, one after the other; their gradients are
    added."""
    checkpointing: bool = False
    """Whether the activations within a block are computed a second time in the backward pass instead of being stored:
    less memory, a third more time."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Number format of the computation, as Lightning names it; weights and partial results of a ring are float32."""
    start_from: Path | None = None
    """Folder of another run whose weights training begins with; its model is the same."""
    max_updates: Count = 1000
    """Updates after which training ends."""
    max_minutes: Positive | None = None
    """Minutes after which training ends; null: no limit."""
    learning_rate: Positive = 2e-3
    """Peak of the learning rate, after the warm-up."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the mean and of the square of gradients."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    warmup_steps: WholeNumber = 0
    """Updates over which the learning rate rises linearly."""
    decay: Literal["constant", "linear"] = "constant"
    """What the learning rate does after the warm-up: linear falls to 0 at max_updates."""
    clip_norm: Positive | None = 1.0
    """Norm to which gradients are clipped; null: not at all."""
    validate_every: Count = 100
    """Updates after which the state is saved, and the held-out text is read."""
    report_every: Count = 10
    """Updates after which a line of progress is printed."""
    accelerator: str = "auto"
    """Where to compute, as Lightning names it: cpu, cuda, auto."""

    @model_validator(mode="after")
    def _ring_size_needs_a_ring(self) -> LongTrainingSettings:
        if self.ring_size is not None and self.ring is None:
            raise ValueError(
                f"training.ring_size {self.ring_size} needs training.ring, which says how a ring shards a sequence: "
                "write ring: contiguous, zigzag or striped, or leave ring_size out"
            )
        return self

    @property
    def layout(self) -> RingLayout | None:
        """The layout of the ring."""
        return None if self.ring is None else LAYOUTS[self.ring]


class LanguageExperiment(YAMLExperiment):
    """All settings of the run of a language model: data, model, training.

    >>> experiment = LanguageExperiment.from_mapping(
    ...     {"name": "toy", "task": "language-model", "data": {"files": ["book.txt"]}, "training": {"ring": "zigzag"}}
    ... )
    >>> experiment.data.length, experiment.training.layout
    (4096, Zigzag())
    """

    task: Literal["language-model"] = "language-model"
    """What is trained; without it a translator (docs/yaml.md)."""
    seed: WholeNumber = 1
    """Seed of initialisation, dropout and the places of the sequences."""
    data: LongTextSettings
    """Where the text is."""
    model: ByteModelSettings = ByteModelSettings()
    """The model to train."""
    training: LongTrainingSettings = LongTrainingSettings()
    """How to train it."""

    @model_validator(mode="after")
    def _rings_compute_softmax(self) -> LanguageExperiment:
        if self.training.ring is not None and self.model.normalizer.kind != "softmax":
            raise ValueError(
                f"training.ring {self.training.ring!r} merges softmax attention, and model.normalizer is "
                f"{self.model.normalizer.kind!r}: leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _rings_know_positions(self) -> LanguageExperiment:
        model, ring = self.model, self.training.ring
        if ring is not None and (model.forget_gate or model.positions.kind != "rotary"):
            raise ValueError(
                f"training.ring {ring!r} needs positions that each process knows without the tokens of others, and "
                f"the model has positions {model.positions.kind!r} and forget_gate {str(model.forget_gate).lower()}: "
                "take rotary positions without a forget gate, or leave ring out"
            )
        return self


TASKS: dict[str, type[Experiment] | type[LanguageExperiment]] = {
    TRANSLATION: Experiment,
    "language-model": LanguageExperiment,
}
"""Experiments by the `task` of their file."""


def load_experiment(path: str | Path, overrides: Iterable[str] = ()) -> Experiment | LanguageExperiment:
    """Read the experiment of a YAML file, of the task that it names, with overrides such as `data.length=8192`.

    Raises:
        ConfigurationError: there is no such task, or as for `YAMLExperiment.load`.
    """
    data = read_mapping(Path(path), overrides)
    task = data.get("task", TRANSLATION)
    if task == "preparation":
        raise ConfigurationError(f"{path}: task: {task!r} is for `regard prepare`, which makes a text to train on")
    if not isinstance(task, str) or task not in TASKS:
        raise ConfigurationError(f"{path}: task: there is no task {task!r}; {nearest(str(task), TASKS)}")
    return TASKS[task].from_mapping(data, origin=str(path))


MAY_CHANGE_LATER = (
    "training.max_minutes",
    "training.validate_every",
    "training.report_every",
    "training.ring",
    "training.ring_size",
    "training.accumulate",
    "training.checkpointing",
    "data.folder",
)
"""Keys that no update of as many sequences depends on, but for rounding: they may change when a run is resumed."""

MAY_CHANGE_WITHOUT_DECAY = ("training.max_updates",)
"""Further such keys, unless the learning rate falls to 0 at the last update."""

HEAD = """\
# The YAML of a language model

`task: language-model` makes `regard train experiment.yaml` train a language model of bytes on a long text, one sequence
an update. `name`, `task` and `data.files` are needed, every other key has a default; unknown keys are refused. One
line, `training.ring`, shards each sequence over the processes that torchrun starts, on one machine or on several:

    name: book
    task: language-model
    data: {files: [book.txt], length: 131072, held_out: 262144}
    model:
      layers: [window, window, linear, {kind: window, before: 1023}]
      sinks: true
    training:
      ring: contiguous

    torchrun --nproc-per-node 2 --no-python regard train book.yaml

The loss, the gradients and so the weights are those of one process that reads the whole sequence, up to rounding (and
dropout, which processes draw for their tokens).

Several rings train together, each on sequences of its own, where `training.ring_size` is smaller than the number of
processes: of 8 processes in rings of 4, an update reads 2 sequences. One process with `accumulate: 2` reads the same
two, and comes to the same weights:

    training:
      ring: contiguous
      ring_size: 4
      checkpointing: true    # less memory, a third more time
      precision: bf16-mixed

    torchrun --nproc-per-node 8 --no-python regard train book.yaml

Processes of a ring are neighbours: on one machine, where its size divides the number of processes there. The run's
folder gets experiment.yaml, model/ (for `regard.models.LanguageModel.load`), state/ (all that resuming needs) and logs/
(TensorBoard). The same command resumes a run that was interrupted.

{resuming}

This page is written by `python -m regard.language.language_experiment`."""


def language_reference() -> str:
    """The page docs/yaml-language-model.md as Markdown."""
    keys = ", ".join(f"`{key}`" for key in MAY_CHANGE_LATER)
    text = (
        f"These keys may change then: {keys}, as long as an update reads as many sequences; and "
        "`training.max_updates`, unless `training.decay` is linear."
    )
    return settings_tables(HEAD.replace("{resuming}", "\n".join(textwrap.wrap(text, 120))), LanguageExperiment)


if __name__ == "__main__":
    sys.stdout.write(language_reference())
