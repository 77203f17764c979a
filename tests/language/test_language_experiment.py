from pathlib import Path

import pytest

import regard.ring
from regard.errors import ConfigurationError
from regard.language.language_experiment import LanguageExperiment, language_reference, load_experiment
from regard.models.language_model import (
    AttentionConfig,
    LayerConfig,
    LinearAttentionConfig,
    PathPositionsConfig,
    RelativePositionsConfig,
)
from regard.positions import Rotary
from regard.translation.config_errors import sections_of
from regard.translation.experiment import Experiment, field_docstrings

PAGE = Path(__file__).parents[2] / "docs" / "yaml-language-model.md"
SMALL = {"name": "toy", "task": "language-model", "data": {"files": ["book.txt"]}}


def experiment(**sections):
    return LanguageExperiment.from_mapping({**SMALL, **sections})


def test_the_page_is_what_the_settings_say():
    assert PAGE.read_text(encoding="utf-8") == language_reference(), (
        "out of date: python -m regard.language.language_experiment > docs/yaml-language-model.md"
    )


def sections(section):
    yield section
    for field in section.model_fields.values():
        for inner in sections_of(field.annotation):
            yield from sections(inner)


@pytest.mark.parametrize("section", dict.fromkeys(sections(LanguageExperiment)))
def test_every_key_has_a_meaning(section):
    assert field_docstrings(section).keys() >= section.model_fields.keys()


def test_the_task_chooses_the_experiment(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("name: toy\ntask: language-model\ndata: {files: [book.txt]}\ntraining: {ring: striped}\n")
    loaded = load_experiment(file, ["data.length=64"])
    assert isinstance(loaded, LanguageExperiment)
    assert loaded.training.layout == regard.ring.Striped()
    assert loaded.data.length == 64
    loaded.save(file)
    assert load_experiment(file) == loaded
    file.write_text("name: toy\ndata: {train: {source: train.en, target: train.de}}\n")
    assert load_experiment(file) == Experiment.load(file)


def test_layers_by_name_and_with_keys():
    layers = ["causal", {"kind": "window", "before": 7, "prefix": 0}, "window", "linear"]
    config = experiment(model={"dim": 64, "num_heads": 2, "layers": layers, "sinks": True}).model.config()
    rotary = Rotary(32)
    assert config.layers == (
        LayerConfig(rotary=rotary),
        LayerConfig(before=7, rotary=rotary),
        LayerConfig(before=255, prefix=4, rotary=rotary),
        LayerConfig(linear=LinearAttentionConfig()),
    )
    assert isinstance(config.attention, AttentionConfig)
    assert config.attention.sinks


def test_positions_and_forget_gates():
    layers = ["causal", {"kind": "window", "before": 7, "prefix": 0}, "linear"]
    path, relative = PathPositionsConfig(), RelativePositionsConfig(8, values=False)
    for given, expected in (("path", path), ({"kind": "relative", "distance": 8, "values": False}, relative)):
        config = experiment(model={"dim": 60, "num_heads": 4, "layers": layers, "positions": given}).model.config()
        assert config.layers == (
            LayerConfig(positions=expected),
            LayerConfig(before=7, positions=expected),
            LayerConfig(linear=LinearAttentionConfig()),
        )
    config = experiment(model={"positions": {"kind": "path", "rank": None, "width": 1}, "forget_gate": True})
    attention = config.model.config().attention
    assert isinstance(attention, AttentionConfig)
    assert attention.forget_gate
    assert config.model.config().layers[0].positions == PathPositionsConfig(None, 1)


def test_a_normalizer_by_name_and_with_its_number():
    attentions = [
        experiment(model={"normalizer": given}).model.config().attention
        for given in (
            "softmax",
            "sparsemax",
            "entmax",
            {"kind": "entmax", "number": 1.25},
            {"kind": "relu", "number": 2},
        )
    ]
    configs = [attention.normalizer for attention in attentions if isinstance(attention, AttentionConfig)]
    made = [None if config is None else repr(config.make()) for config in configs]
    assert made == [None, "Sparsemax()", "Entmax(alpha=1.5)", "Entmax(alpha=1.25)", "ReLU(power=2)"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"ring": "zigzg"}},
            "ring: has 'zigzg', needs to be 'contiguous', 'zigzag' or 'striped'",
        ),
        ({"training": {"rings": "zigzag"}}, "training.rings: unknown key; did you mean 'ring'"),
        ({"model": {"layers": ["windw"]}}, "model.layers.0: there is no kind 'windw'; did you mean 'window'"),
        (
            {"model": {"layers": [{"kind": "linear", "before": 3}]}},
            "layers.0.before: unknown key; only the kind 'w",
        ),
        ({"model": {"layers": []}}, "model.layers: has .*at least 1 item"),
        ({"model": {"num_heads": 3}}, "model.num_heads 3 needs to divide model.dim 256 into heads of an even size"),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads 3 does not divide model.num_heads 4"),
        ({"data": {"files": []}}, "data.files: has .*at least 1 item"),
        ({"data": {"files": ["a"], "length": 1}}, "data.length: has 1, needs to be greater than or equal to 2"),
        (
            {"model": {"sinks": True, "normalizer": {"kind": "sigmoid", "number": -4}}},
            "model.sinks has no meaning with model.normalizer 'sigmoid': no sum divides the weights",
        ),
        (
            {"model": {"normalizer": "sparsemax"}, "training": {"ring": "zigzag"}},
            "training.ring 'zigzag' merges softmax attention, and model.normalizer is 'sparsemax'",
        ),
        (
            {"model": {"positions": "path", "sinks": True, "normalizer": "sparsemax"}},
            "model.positions 'path' have attention without model.sinks and model.normalizer: leave them out",
        ),
        (
            {"model": {"positions": "relative", "forget_gate": True}},
            "model.positions 'relative' have attention without model.forget_gate: leave it out",
        ),
        ({"model": {"positions": "pth"}}, "there is no kind 'pth'; did you mean 'path'"),
        (
            {"model": {"positions": "path"}, "training": {"ring": "zigzag"}},
            "the model has positions 'path' and forget_gate false: take rotary positions",
        ),
        (
            {"model": {"forget_gate": True}, "training": {"ring": "zigzag"}},
            "the model has positions 'rotary' and forget_gate true: take rotary positions",
        ),
        ({"model": {"normalizer": "sigmoid"}}, "'sigmoid' needs a number: its bias, such as -5.0"),
        ({"model": {"normalizer": {"kind": "entmax", "number": 1}}}, "alpha"),
        ({"model": {"normalizer": "sparsmax"}}, "there is no kind 'sparsmax'; did you mean 'sparsemax'"),
        ({"task": "translation"}, "task: has 'translation', needs to be 'language-model'"),
    ],
)
def test_wrong_keys_and_values_are_named(sections, message):
    with pytest.raises(ConfigurationError, match=message):
        experiment(**sections)


def test_a_task_that_does_not_exist(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("name: toy\ntask: language-modle\n")
    with pytest.raises(ConfigurationError, match="there is no task 'language-modle'; did you mean 'language-model'"):
        load_experiment(file)


def test_a_translator_is_not_read_from_the_run_of_a_language_model():
    with pytest.raises(ConfigurationError, match="task: has 'language-model', needs to be 'translation'"):
        Experiment.from_mapping(SMALL)
