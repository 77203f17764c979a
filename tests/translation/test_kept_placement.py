"""Tags and other parts in a translation: around the words that the weights say, and always well-formed."""

import random
import re

import pytest
import torch

from regard.translation.kept_placement import diagonal_weights, put_back
from regard.translation.kept_text import take_out
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings

TAG = re.compile(r"</?\w+/?>")


@pytest.fixture(scope="module")
def translator():
    return Translator.load(ENGLISH_FRENCH)


def weights_of(source: str, target: str, links: dict[int, list[int]]):
    """Weights of each target word on its source words, with a little on all."""
    weights = torch.full((len(target.split()), len(source.split())), 0.01)
    for word, some in links.items():
        weights[word, some] = 1.0
    return weights


def placed(line: str, target: str, links: dict[int, list[int]]) -> str:
    known = Vocabulary.train([line, "(“”)"], VocabularySettings(kind="characters"))
    kept = take_out(line, known)
    return put_back(target, kept.parts, weights_of(kept.text, target, links))


RED_CAR = "la voiture rouge roule", {0: [0], 1: [2], 2: [1], 3: [3]}
"""Of "the red car drives"."""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("the <b>red</b> car drives", "la voiture <b>rouge</b> roule"),
        ("the <b>red</b> <i>car</i> drives", "la <i>voiture</i> <b>rouge</b> roule"),
        ("the <b>red <i>car</i></b> drives", "la <b><i>voiture</i> rouge</b> roule"),
        ("<p>the <b>red</b> car drives</p>", "<p>la voiture <b>rouge</b> roule</p>"),
        ("<p><b>the</b> red car drives</p><hr/>", "<p><b>la</b> voiture rouge roule</p><hr/>"),
        ("the {x} red car drives", "la {x} voiture rouge roule"),
        ("the red {x}car drives", "la {x}voiture rouge roule"),
        ("the red car {x} drives", "la voiture {x} rouge roule"),
        ("{x} the <b>red</b> car drives {y}", "{x} la voiture <b>rouge</b> roule {y}"),
        ("the red<br/>car <b></b>drives", "la voiture rouge<br/><b></b>roule"),
        ("the <b>red car</b> drives", "la <b>voiture rouge</b> roule"),
        ("the <a>red</a> <b>car {x}</b> drives", "la <b>voiture {x}</b> <a>rouge</a> roule"),
    ],
)
def test_parts_follow_the_words(line, expected):
    assert placed(line, *RED_CAR) == expected


@pytest.mark.parametrize(
    ("line", "target", "expected"),
    [
        ("it is <b>red</b>.", "c'est rouge.", "c'est <b>rouge</b>."),
        ("it is <b>red.</b>", "c'est rouge.", "c'est <b>rouge.</b>"),
        ("<b>it is red</b>!", "c'est rouge !", "<b>c'est rouge</b> !"),
        ('it is "<b>red</b>"', 'c\'est "rouge"', 'c\'est "<b>rouge</b>"'),
        ('it is <b>"red"</b>', 'c\'est "rouge"', 'c\'est <b>"rouge"</b>'),
        ("it is (<b>red</b>)", "c'est (rouge)", "c'est (<b>rouge</b>)"),
        ("<b>it is <i>red</i></b>.", "c'est rouge.", "<b>c'est <i>rouge</i></b>."),
        ("it is {x}.", "c'est.", "c'est {x}."),
        ("it is red. {x}", "c'est rouge.", "c'est rouge. {x}"),
    ],
)
def test_punctuation_stays_inside_or_outside(line, target, expected):
    words = len(target.split())
    links = {place: [place + 1] for place in range(words)} | {0: [0, 1]}
    if target.endswith(" !"):
        links[words - 1] = [2]
    assert placed(line, target, {t: [s for s in some if s < 3] for t, some in links.items()}) == expected


def test_sums_of_shares_choose_the_run():
    """m_t - 1/2 is 0.4, -0.1, 0.3, -0.5 and 0.05: the best run has the first three words."""
    weights = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2], [0.0, 1.0], [0.55, 0.45]])
    parts = take_out("<b>a</b> b", Vocabulary.train(["a b"], VocabularySettings(kind="words"))).parts
    assert put_back("v w x y z", parts, weights) == "<b>v w x</b> y z"
    assert put_back("v w x y z", parts, 7 * weights) == "<b>v w x</b> y z"  # shares, whatever the rest of a row is


def random_markup(generator: random.Random, words: list[str], depth: int = 0) -> str:
    """Words with elements and points among them, well-formed."""
    pieces, place = [], 0
    while place < len(words):
        size = generator.randint(0, len(words) - place)
        if depth < 3 and generator.random() < 0.5:
            name = generator.choice("abcp")
            pieces.append(f"<{name}>{random_markup(generator, words[place : place + size], depth + 1)}</{name}>")
        else:
            pieces += words[place : place + size]
        if generator.random() < 0.3:
            pieces.append("<x/>")
        place += size
    return " ".join(pieces)


def shape(text: str) -> list[str]:
    """Each tag with the elements that it stands in, sorted: raises where one is not closed in its order."""
    around, found = [], []
    for number, tag in enumerate(TAG.findall(text)):
        if tag.endswith("/>"):
            found.append("/".join([*around, tag]))
        elif tag.startswith("</"):
            assert around.pop() == tag[2:-1], (number, text)
        else:
            around.append(tag[1:-1])
            found.append("/".join(around))
    assert not around
    return sorted(found)


@pytest.mark.parametrize("seed", range(150))
def test_what_was_well_formed_is_again_and_no_word_is_lost(seed):
    generator = random.Random(seed)
    words = [generator.choice(["one", "two,", "(three)", "four.", '"five"']) for _ in range(generator.randint(1, 9))]
    line = random_markup(generator, words)
    kept = take_out(line, Vocabulary.train([line, "(“”)"], VocabularySettings(kind="characters")))
    target = " ".join(
        generator.choice(["un", "deux,", "(trois)", "quatre !", "«"]) for _ in range(generator.randint(0, 9))
    )
    weights = (
        torch.rand(len(target.split()), len(kept.text.split()), generator=torch.Generator().manual_seed(seed)) ** 4
    )
    found = put_back(target, kept.parts, weights)
    assert shape(found) == shape(line)
    assert "".join(TAG.sub("", found).split()) == "".join(target.split())


def test_words_that_no_weight_reaches_have_a_place():
    parts = take_out("<b>a</b> {x} b", Vocabulary.train(["a b"], VocabularySettings(kind="words"))).parts
    assert shape(put_back("v w", parts, torch.zeros(2, 2))) == ["b"]
    assert put_back("v w", parts, diagonal_weights(2, 2)) == "<b>v</b> {x} w"
    assert put_back("", parts, torch.zeros(0, 2)) == "<b></b>{x}"


SENTENCES = [
    ("I sold my <b>old</b> car.", "J'ai vendu ma <b>vieille</b> voiture."),
    ("I sold my <b>old car</b> yesterday.", "J'ai vendu ma <b>vieille voiture</b> hier."),
    ("<b>I am <i>very</i> tired</b>.", "<b>Je suis <i>très</i> fatigué</b>."),
    ("Hello {name}, how are you?", "Bonjour {name}, comment allez-vous ?"),
    ("I gave {name} the <b>book</b>.", "J'ai donné {name} le <b>livre</b>."),
    ('Tom <a href="a.html">doesn\'t</a> speak French.', 'Tom <a href="a.html">ne parle pas</a> français.'),
    ("She has <b>three</b> children and <i>two</i> dogs.", "Elle a <b>trois</b> enfants et <i>deux</i> chiens."),
]


def test_real_sentences_keep_their_markup_around_their_words(translator):
    found = translator.translate([line for line, _ in SENTENCES], observe=False)
    assert [one.text for one in found] == [expected for _, expected in SENTENCES]
    assert not any(one.warnings for one in found)
    observed = translator.translate([SENTENCES[0][0]], search=translator.search.model_copy(update={"n_best": 3}))
    assert all(shape(one.text) == ["b"] for one in observed[0].candidates)


def test_an_element_of_two_sentences_that_are_translated_apart(translator):
    line = "<b>I am tired. You <i>are late.</i></b> I am <u>tired. You are</u> late."
    [found] = translator.translate([line], split_above=5)
    assert shape(found.text) == shape(line)
    assert found.text.startswith("<b>Je suis fatigué. Tu <i>") or found.text.startswith("<b>Je suis fatigué. Vous <i>")
