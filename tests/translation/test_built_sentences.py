"""The recipe that builds longer sentences, with other words, of those of the texts."""

import importlib
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from regard.translation.placeholders import Placeholders

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))
recipe = importlib.import_module("built_sentences")
words = importlib.import_module("inflected_words")

FORMS = set(words.inflected())
CLASSES = recipe.WordClasses.of_forms(FORMS)


@pytest.mark.parametrize(
    "form",
    [
        ("noun (masculine), plural", "newspapers", "journaux"),
        ("noun (masculine), plural", "festivals", "festivals"),
        ("noun (masculine), plural", "prices", "prix"),
        ("noun (feminine), plural", "wives", "épouses"),
        ("noun (feminine), plural", "cities", "villes"),
        ("adjective (feminine)", "political", "politique"),
        ("adjective (feminine, plural)", "nuclear", "nucléaires"),
        ("adjective (masculine, plural)", "national", "nationaux"),
        ("adjective (masculine, plural)", "blue", "bleus"),
        ("past", "announced", "annonça"),
        ("imperfect", "ate", "mangeait"),
        ("present, singular", "considers", "considère"),
        ("present, singular", "throws", "jette"),
        ("present, singular", "employs", "emploie"),
        ("present, plural", "study", "étudient"),
        ("participle, present", "planning", "planifiant"),
        ("participle, present", "beginning", ""),
        ("participle in -ées", "studied", "étudiées"),
        ("infinitive", "propose", "proposer"),
        ("country", "Germany", "Allemagne"),
    ],
)
def test_words_are_inflected(form):
    assert (form in FORMS) == bool(form[2])


def test_each_line_of_the_tables_is_whole():
    kinds = Counter(line.split("\t")[0] for line in words.WORDS.read_text("utf-8").splitlines())
    assert set(kinds) == {"noun (masculine)", "noun (feminine)", "adjective", "verb", "adverb", "country", "city"}
    assert all(line.count("\t") == 2 for line in words.WORDS.read_text("utf-8").splitlines())
    assert all(form.split() == [form] for _, *sides in FORMS for form in sides)
    sentences = [line.split("\t") for line in recipe.SENTENCES.read_text("utf-8").splitlines()]
    assert all(len(one) == 2 and one[0][-1] == "." and one[1][-1] in ".»" for one in sentences)
    assert {line.split("\t")[0] for line in recipe.JOINTS.read_text("utf-8").splitlines()} == {
        "between",
        "before",
        "after",
    }


def test_a_word_becomes_another_of_its_class_on_both_sides():
    draw = random.Random(1)
    found = {CLASSES.substituted(("I see a car.", "Je vois une voiture."), 1.0, draw) for _ in range(200)}
    assert len(found) > 100
    feminine = {(english, french) for kind, english, french in FORMS if kind == "noun (feminine)"}
    for source, target in found:
        one = re.fullmatch(r"I see (an?) ([\w-]+)\.", source)
        other = re.fullmatch(r"Je vois une ([\w-]+)\.", target)
        assert one is not None
        assert other is not None
        assert (one[2], other[1]) in feminine
        assert not recipe.elided(other[1])  # "la" of another sentence stays right
    pairs = [
        ("The car and the car.", "La voiture et la voiture."),  # twice, so which is which is not known
        ("I see it.", "Je la vois."),
        ("The car.", "L'auto."),  # said by a word that the table does not have
    ]
    assert [CLASSES.substituted(pair, 1.0, draw) for pair in pairs] == pairs


def test_a_capital_stays_where_it_was():
    draw = random.Random(2)
    for _ in range(50):
        source, target = CLASSES.substituted(("Soldiers sleep.", "Des soldats dorment."), 1.0, draw)
        assert source[0].isupper()
        assert target.split()[1][0].islower()
        source, _ = CLASSES.substituted(("I live in France.", "Je vis en France."), 1.0, draw)
        assert source.split()[-1][0].isupper()


def test_codes_stand_for_words_with_one_link_and_become_placeholders():
    codes = recipe.Codes({"the"})
    pair = "The old dog sees houses.", "Le vieux chien voit l'été d'hier des maisons."
    links = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 7), (3, 4)]
    source, target = codes.hidden(pair, links, 1.0, random.Random(1))
    assert source == "The xq1001 xq1002 sees xq1003."
    assert target == "Le xq1001 xq1002 voit l'été d'hier des xq1003."
    placed, said = Placeholders(frozenset(["the", "sees"])).pair(source, target)
    assert (placed, said) == ("The ① ② sees ③.", "Le ① ② voit l'été d'hier des ③.")
    assert codes.hidden(pair, links, 0.0, random.Random(1)) == pair
    assert codes.hidden(("Of Rome", "De Rome"), [(1, 1)], 1.0, random.Random(1))[1] == "De xq1004"
    assert codes.hidden(("Of Arles", "Vin d'Arles"), [(1, 1)], 1.0, random.Random(1))[1] == "Vin de xq1005"


def test_statements_are_joined_to_clauses_of_one_sentence():
    pairs = [
        ("It is late.", "Il est tard."),
        ("I see it.", "Je le vois."),
        ("Tom came.", "Tom est venu."),
        ("Now it is seen, and I know that they sleep.", "Là je le sais, il est vu et on dort."),
    ]
    clauses = recipe.Clauses.of(pairs)
    draw = random.Random(3)
    built = [clauses.joined([pairs[:3]], [1.0], draw) for _ in range(300)]
    assert len(set(built)) > 250
    assert max(len(source.split()) for source, _ in built) > 15
    for source, target in built:
        assert source.rstrip('"')[-1] == "."
        assert target.rstrip("» ")[-1] == "."
        assert not re.search(r"\b(que|parce que|tandis que|puisque) [iI]l\b", target)
        assert "i see" not in source
        assert "tom" not in source + target
    assert any("parce qu'il est tard" in target for _, target in built)
    assert any("said that it is late" in source for source, _ in built)
    assert [recipe.is_statement(pair) for pair in [pairs[0], ("Go!", "Va !"), ("A. B.", "A. B.")]] == [
        True,
        False,
        False,
    ]


def test_all_of_it_is_built_of_texts(monkeypatch):
    short = [
        (f"I see a {one} here.", f"Je vois un {autre} ici.")
        for one, autre in [("car", "auto"), ("dog", "chien"), ("cat", "chat"), ("book", "livre"), ("king", "roi")]
    ]
    long = [("The war began in 1912 because of a law.", "La guerre a commencé en 1912 en raison d'une loi.")]
    texts = recipe.Texts(short, long)
    for name, count in {"VARIED": 4, "JOINED": 20, "ROUNDS_OF_LONG": 3}.items():
        monkeypatch.setattr(recipe, name, count)
    built = recipe.built(texts, random.Random(1))
    assert built == recipe.built(texts, random.Random(1))
    assert len(built) == 4 + 3 + 20
    assert not set(built[:4]) & set(short)
    assert all("1912" in source and "1912" in target for source, target in built[4:7])
