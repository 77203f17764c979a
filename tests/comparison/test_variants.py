import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.comparison import Recipe, load_recipe, make_variants
from regard.comparison.recipe import ComparisonSettings
from regard.comparison.variants import parse_vary
from regard.errors import ConfigurationError


def experiments(recipe) -> list[Any]:
    return [variant.experiment for variant in make_variants(recipe)]


def names(recipe):
    return [variant.name for variant in make_variants(recipe)]


def test_a_short_name_has_values_of_its_own(recipe):
    assert names(recipe(vary={"score": None})) == ["dot", "scaled_dot", "general", "additive", "concat", "location"]


def test_a_variant_has_the_settings_of_its_value_and_the_others_of_the_recipe(recipe):
    bahdanau, luong = experiments(recipe(vary={"mechanism": None}))
    assert (bahdanau.model.decoder.kind, luong.model.decoder.kind) == ("bahdanau", "luong")
    assert {key.split(".")[1] for key in luong.differences(bahdanau)} == {"decoder"}


def test_values_of_several_names_are_combined(recipe):
    combined = recipe(vary={"score": ["dot", "general"], "model.cell": ["gru", "lstm"]})
    assert names(combined) == [
        "score=dot, cell=gru", "score=dot, cell=lstm", "score=general, cell=gru", "score=general, cell=lstm"
    ]  # fmt: skip


def test_named_variants_set_several_keys(recipe):
    variants = {"small": {}, "wide": {"model.hidden_dim": 16, "training.learning_rate": 0.01}}
    small, wide = experiments(recipe(variants=variants))
    assert wide.differences(small) == ["model.hidden_dim", "training.learning_rate"]


def test_a_section_may_be_a_value(recipe):
    varied = recipe(vary=dict([parse_vary("score=dot,{kind: additive, hidden_dim: 4}")]))
    assert names(varied)[1] == "additive hidden_dim=4"
    assert experiments(varied)[1].model.decoder.score.hidden_dim == 4


def test_a_variant_whose_settings_exclude_each_other_says_why_and_the_others_stand(recipe):
    *others, location = make_variants(recipe(vary={"score": ["dot", "general", "location"]}))
    assert all(one.experiment is not None and one.reason is None for one in others)
    assert location.experiment is None
    assert "needs to know how many: set model.max_source_length" in str(location.reason)


def test_windows_of_a_language_model_are_those_of_all_layers():
    data = {"name": "toy", "task": "language-model", "data": {"files": ["book.txt"]}}
    toy = Recipe("toy", data, ComparisonSettings(vary={"window": [16, "all"]}))
    window, everything = experiments(toy)
    assert [(layer.kind, layer.before) for layer in window.model.layers] == [("window", 16)] * 4
    assert [layer.kind for layer in everything.model.layers] == ["causal"] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing varies; name what does with --vary, a short name (score, mechanism, window, coverage) or"),
        ({"vary": {"scores": None}}, "--vary scores: recurrent models have no such short name; did you mean 'score'?"),
        ({"vary": {"heads": None}}, "--vary heads: recurrent models have no such short name; it is one of transformer"),
        ({"vary": {"model.heads": [1, 2]}}, "variant '1': model.heads: unknown key; Known: "),
        ({"vary": {"model.hiden_dim": [8, 16]}}, "model.hiden_dim: unknown key; did you mean 'hidden_dim'?"),
        ({"vary": {"score": ["dot", "genral"]}}, "there is no kind 'genral'; did you mean 'general'?"),
        ({"vary": {"model.hidden_dim": [8, "wide"]}}, "model.hidden_dim: has 'wide', needs to be a valid integer"),
        ({"vary": {"model.hidden_dim": [8, 0]}}, "model.hidden_dim: has 0, needs to be greater than or equal to 1"),
        ({"vary": {"score": ["dot"]}}, "there is one variant, 'dot'; a comparison needs two or more: name more values"),
        ({"vary": {"score": ["dot", "dot"]}}, "the variant 'dot' is there twice; leave one out"),
        ({"vary": {"model.hidden_dim": None}}, "a key path needs its values, such as model.hidden_dim=1,2"),
        ({"vary": {"score": []}}, "compare.vary.score: has no values; name two or more"),
        ({"vary": {"seed.more": [1, 2]}}, "--vary seed.more: seed is 1 and holds no keys"),
        ({"vary": {"score": None}, "baseline": "dto"}, "there is no variant 'dto'; did you mean 'dot'?"),
    ],
)  # fmt: skip
def test_what_cannot_vary_is_named(recipe, options, message):
    overrides = ["seed=1"] if "seed.more" in options.get("vary", {}) else []
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_variants(recipe(*overrides, **options))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score=", "--vary 'score=' has no values; write some, such as score=1,2, or score alone"),
        ("=dot", "names nothing to vary; it needs a short name or a key path"),
        ("score=[dot", "the values are no YAML; write them with commas between, such as score=1,2"),
    ],
)
def test_wrong_values_on_the_command_line(text, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        parse_vary(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sedes": [1]}, "compare.sedes: unknown key; did you mean 'seeds'?"),
        ({"seeds": [1, 1]}, "compare.seeds [1, 1] has a seed twice, whose runs would be the same"),
        ({"seeds": []}, "compare.seeds: has [], "),
        ({"measure": "blue"}, "compare.measure: has 'blue', needs to be 'bleu', 'exact', 'cross-entropy'"),
        ({"measure": "bits-per-byte"}, "has 'bits-per-byte', which the task 'translation' does not have"),
        ({"decode": 5}, "compare.decode: has 5, which is for language models; leave it out"),
        ({"lengths": [9, 4]}, "compare.lengths [9, 4] needs to rise from each length to the next"),
    ],
)  # fmt: skip
def test_a_wrong_section_of_a_recipe(recipe, options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        recipe(**options)


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read .* name the YAML file of an experiment"):
        load_recipe(tmp_path / "none.yaml")


def test_dates_need_no_file():
    recipe = load_recipe("dates", options={"vary": {"score": None}})
    with_text = replace(recipe, experiment={**recipe.experiment, "data": {"train": {"tsv": "train.tsv"}}})
    assert [one.reason for one in make_variants(with_text)] == [None] * 6


RECIPES = sorted((Path(__file__).parents[2] / "recipes" / "comparisons").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_ship_can_be_trained_in_all_their_variants(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.compare.question is not None
    assert len(recipe.compare.seeds) >= 3
    assert [one.reason for one in make_variants(recipe)] == [None] * len(make_variants(recipe))


def test_a_key_of_the_recipe_that_does_not_exist_is_named_with_the_nearest(recipe):
    with pytest.raises(ConfigurationError, match="modle: unknown key; did you mean 'model'?"):
        make_variants(recipe("modle.cell=lstm", vary={"score": None}))
    with pytest.raises(ConfigurationError, match="training.learning_rat: unknown key; did you mean 'learning_rate'?"):
        make_variants(recipe("training.learning_rat=1", vary={"score": None}))


def test_a_language_model_has_no_classes_of_source_length(tmp_path):
    path = tmp_path / "book.yaml"
    path.write_text("name: book\ntask: language-model\ndata: {files: [book.txt]}\ncompare: {lengths: [4]}")
    with pytest.raises(
        ConfigurationError, match=r"compare.lengths: has \(4,\), which is for translators; leave it out"
    ):
        load_recipe(path)


def test_the_documentation_has_every_key_of_the_section():
    page = (Path(__file__).parents[2] / "docs" / "comparisons.md").read_text("utf-8")
    for key in ComparisonSettings.model_fields:
        assert f"| `{key}` |" in page, key
    for path in RECIPES:
        assert f"| {path.name} |" in page
