"""The translator of `regard translate`: that it is small, told what it may be used for, copies and reads captions."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from regard.errors import ConfigurationError
from regard.translation.checkpoint import load_weights, save_tensors
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH_LONGER, MODELS, RunFolder
from regard.translation.translator import Translator

SHIPPED = RunFolder(ENGLISH_FRENCH_LONGER)
RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = RECIPES / "english-french-longer.yaml"
sys.path.insert(0, str(RECIPES))
ship = importlib.import_module("ship_english_french_longer")


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(ENGLISH_FRENCH_LONGER)


def test_the_folder_has_ten_megabytes_at_most():
    assert sum(path.stat().st_size for path in ENGLISH_FRENCH_LONGER.iterdir()) <= 10_000_000


def test_its_weights_are_bfloat16_and_the_mean_of_several():
    tensors, header = load_weights(SHIPPED.best)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(header["averaged_updates"]) >= 2


def test_it_is_what_the_recipe_makes():
    assert Experiment.load(SHIPPED.experiment).differences(Experiment.load(RECIPE)) == []


def trained(folder, name: str, text: str, start: str, *more: str):
    """The folder of a training, with its settings alone."""
    keys = [f"data.folder=data/{text}", f"training.start_from={folder / start}/average.safetensors", *more]
    (folder / name).mkdir()
    Experiment.load(RECIPE, keys).save(RunFolder(folder / name).experiment)
    return folder / name


def test_trainings_that_are_none_of_the_recipe_are_not_shipped(tmp_path):
    first = trained(tmp_path, "first", "english-french-text", "everyday")
    second = trained(tmp_path, "second", "english-french-built-text", "first", "training.learning_rate=0.0007")
    third = trained(tmp_path, "third", "english-french-last-text", "second", "training.validate_every=100")
    recipe = Experiment.load(RECIPE)
    ship.check_runs([first, second, third], recipe)
    with pytest.raises(ConfigurationError, match=r"third has read .*last-text, and the text .* is english-french-text"):
        ship.check_runs([third, second, first], recipe)
    other = trained(tmp_path, "other", "english-french-last-text", "first")
    with pytest.raises(
        ConfigurationError, match=r"other starts from .*first.*, and needs to go on from weights in .*second"
    ):
        ship.check_runs([first, second, other], recipe)
    small = trained(tmp_path, "small", "english-french-last-text", "second", "model.dim=96", "training.clip_norm=2.0")
    with pytest.raises(ConfigurationError, match=r"small is no run of .*: it differs in model.dim, training.clip_norm"):
        ship.check_runs([first, second, small], recipe)


def test_weights_are_mixed_with_those_of_the_first_training_which_may_know_fewer_tokens(tmp_path):
    table, first = torch.arange(6.0).reshape(3, 2), torch.full((2, 2), 8.0)
    save_tensors(
        {"source": table, "target": table, "bias": torch.zeros(5)}, tmp_path / "last.safetensors", {"update": 7}
    )
    save_tensors({"source": first, "target": first, "bias": torch.ones(5)}, tmp_path / "first.safetensors", {})
    ship.mix(tmp_path / "last.safetensors", tmp_path / "first.safetensors", 0.25)
    tensors, header = load_weights(tmp_path / "last.safetensors")
    assert tensors["source"].tolist() == [[2.0, 2.75], [3.5, 4.25], [4.0, 5.0]]
    assert tensors["source"] is tensors["target"]
    assert tensors["bias"].tolist() == [0.25] * 5
    assert (header["update"], header["mixed"]) == (7, 0.25)


def test_what_it_may_be_used_for_is_told_wherever_the_model_goes():
    card = (ENGLISH_FRENCH_LONGER / "README.md").read_text(encoding="utf-8")
    for said in ("tatoeba.org", "CC BY 2.0 FR", "Multi30k", "use the model for nothing else", "seed 1", "## Limits"):
        assert said in card
    assert "$" not in card.replace("$1,299.99", "")
    for file in ("README.md", "NOTICE", "pyproject.toml"):
        assert "non-commercial" in (MODELS / file).read_text(encoding="utf-8")


def test_the_card_has_the_scores_and_all_that_its_template_says():
    card = (ENGLISH_FRENCH_LONGER / "README.md").read_text(encoding="utf-8")
    scores = {name: float(bleu) for name, bleu in re.findall(r"^\| (\w+) \| [\d,]+ \| ([\d.]+) \|", card, re.MULTILINE)}
    assert scores["everyday"] > 40
    assert scores["captions"] > 40
    template = (RECIPES / "english_french_longer.md").read_text(encoding="utf-8")
    assert [line for line in template.splitlines() if "$" not in line and line not in card] == []


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("I am very tired.", ["fatigué"]),
        ("Hello!", ["Bonjour"]),
        ("Where is the station?", ["gare"]),
        ("A man in a blue shirt is standing on a ladder cleaning a window.", ["homme", "bleu", "échelle", "fenêtre"]),
        ("Two dogs are playing with a red ball on the beach.", ["chiens", "rouge", "plage"]),
        ("I have 17 books at home.", ["17", "livres"]),
        ("It costs $1,299.99.", ["1,299.99"]),
        ("See https://example.org/a/b for more.", ["https://example.org/a/b"]),
        ("I met Ngozi in front of the station.", ["Ngozi", "gare"]),
    ],
)
def test_everyday_sentences_captions_and_what_is_copied(translator: Translator, sentence: str, words: list[str]):
    [translation] = translator.translate([sentence], observe=False)
    assert [word for word in words if word not in translation.text] == []


def test_its_head_and_its_trust_were_chosen_by_evidence(translator: Translator):
    assert translator.trust is not None
    assert translator.alignment is not None
    [pair] = translator.align(["I am tired."], ["Je suis fatigué."])
    assert (2, 2) in pair.links
