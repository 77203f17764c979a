"""The translator in the package: that it is whole, small, told where it comes from, and translates."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from regard.translation.checkpoint import load_weights
from regard.translation.date_demo import show_translations
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH, RunFolder
from regard.translation.translator import Translator

SHIPPED = RunFolder(ENGLISH_FRENCH)


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(ENGLISH_FRENCH)


def test_the_folder_has_ten_megabytes_at_most():
    files = [path for path in ENGLISH_FRENCH.iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"README.md", SHIPPED.best.name, SHIPPED.experiment.name}
    assert sum(path.stat().st_size for path in files) <= 10_000_000


def test_its_weights_are_bfloat16_and_the_mean_of_several():
    tensors, header = load_weights(SHIPPED.best)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert len(header["averaged_updates"]) >= 2


def test_it_is_what_the_recipe_makes():
    recipe = Experiment.load(Path(__file__).parents[2] / "recipes" / "english-french-everyday.yaml")
    assert Experiment.load(SHIPPED.experiment).differences(recipe) == []


def test_the_card_names_data_licence_split_scores_and_limits():
    card = (ENGLISH_FRENCH / "README.md").read_text(encoding="utf-8")
    for said in ("tatoeba.org", "manythings.org/anki", "CC BY 2.0 FR", "Split by sentence", "seed 1", "## Limits"):
        assert said in card
    assert float(re.findall(r"BLEU\D+([\d.]+)", card)[0]) > 0
    assert float(re.findall(r"chrF\D+([\d.]+)", card)[0]) > 0
    assert "$" not in card


def test_the_card_says_all_that_its_template_says():
    card = (ENGLISH_FRENCH / "README.md").read_text(encoding="utf-8")
    template = (Path(__file__).parents[2] / "recipes" / "english_french.md").read_text(encoding="utf-8")
    assert [line for line in template.splitlines() if "$" not in line and line not in card] == []


def test_it_knows_how_long_the_sentences_of_its_training_were(translator):
    assert translator.longest_trained == 17


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        ("I am very tired.", "fatigu"),
        ("I am very tired", "fatigu"),
        ("i am very tired", "fatigu"),
        ("Where is the station?", "gare"),
        ("She is my sister.", "sœur"),
        ("I don't like coffee.", "café"),
        ("Tom is in the kitchen.", "cuisine"),
        ("What time is it?", "heure"),
        ("We have two cats.", "deux"),
        ("Thank you very much.", "erci"),
        ("Hello!", "Bonjour"),
        ("hello", "Bonjour"),
        ("Hello, how are you?", "Bonjour, comment"),
        ("Good morning.", "Bonjour"),
        ("Goodbye!", "revoir"),
        ("No.", "Non"),
    ],
)
def test_everyday_sentences_have_the_word_they_need(translator: Translator, sentence: str, word: str):
    [translation] = translator.translate([sentence], observe=False)
    assert word in translation.text
    assert translation.warnings == ()


def test_every_head_can_be_looked_at(translator: Translator):
    [translation] = translator.translate(["I am very tired."])
    best = translation.candidates[0]
    assert best.weights.shape == (len(best.tokens), 3, 6, len(translation.source_tokens))
    torch.testing.assert_close(best.weights.sum(-1), torch.ones(best.weights.shape[:-1]))


def test_the_demo_shows_it_with_where_it_looks():
    written = io.StringIO()
    show_translations(Console(file=written, width=100))
    shown = written.getvalue()
    assert "English to French, by the small Transformer that regard comes with:" in shown
    assert re.search(r"  I am very tired\. → .*fatigu", shown)
    assert "tenths of" in shown  # the scale of the heat map
    assert 'regard translate "I am very tired."' in shown
