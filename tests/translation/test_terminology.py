"""Terminology in a text, their tokens, and translations of the shipped model that have to hold them."""

import gzip
import re

import pytest

from regard.errors import ConfigurationError, CorpusError, VocabularyError
from regard.translation.constrained_search import Phrase
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.terminology import FoundTerm, Terminology, phrases_of, word_edges
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings


@pytest.fixture(scope="module")
def translator():
    return Translator.load(ENGLISH_FRENCH)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The bank is closed.", [("rive", range(1, 2))]),
        ("BANK, bank!", [("rive", range(1)), ("rive", range(1, 2))]),
        ("Bankers embank.", []),
        ("A bank  account (bank).", [("compte", range(1, 3)), ("rive", range(3, 4))]),
        ("the river-bank", [("rive", range(1, 2))]),
        ("", []),
    ],
)
def test_phrases_are_found_as_whole_words(text, found):
    assert Terminology({"bank": "rive", "Bank account": "compte"}).of(text) == [FoundTerm(*one) for one in found]


def test_what_touches_a_korean_or_chinese_phrase_is_no_part_of_it():
    terms = Terminology({"고양이": "cat", "水": "water"})
    assert [one.text for one in terms.of("고양이가 水水를")] == ["cat", "water", "water"]


def test_a_file_is_read_with_what_is_forced(tmp_path):
    (tmp_path / "terms.tsv").write_bytes(gzip.compress(b"bank\trive\n\n Tom \tThomas\nbank\trive\n"))
    terms = Terminology.read(tmp_path / "terms.tsv", always=["merci"])
    assert [one.text for one in terms.of("Tom at the bank")] == ["Thomas", "rive", "merci"]
    assert (len(terms), bool(terms), bool(Terminology())) == (3, True, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bank rive\n", r"terms.tsv, line 1: 'bank rive' is no term; it needs a phrase of the source, one tab, and"),
        ("a\tb\nbank\trive\tx\n", r"line 2: 'bank\\trive\\tx' is no term"),
        ("bank\t \n", r"line 1: 'bank\\t ' is no term"),
        ("bank\trive\n\nBank\tbanque\n", r"line 3: 'Bank' is 'banque' here, and 'rive' in line 1; leave one of them"),
    ],
)
def test_a_line_that_is_no_term_is_named(tmp_path, text, message):
    (tmp_path / "terms.tsv").write_text(text)
    with pytest.raises(CorpusError, match=message):
        Terminology.read(tmp_path / "terms.tsv")


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (lambda: Terminology({"a": " "}), "the term 'a': ' ' has an empty side; it needs words on both"),
        (lambda: Terminology({"a": "b", "A": "c"}), "'A' has two terms, 'b' and 'c': leave one"),
        (lambda: Terminology(always=[" "]), "words that are forced are empty; name some, or force none"),
        (lambda: Terminology(always="merci"), r"always is one text, 'merci'; it needs to be a list of phrases"),
    ],
)
def test_phrases_that_say_nothing_are_refused(terms, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        terms()


def test_equal_phrases_are_one_that_is_said_twice():
    vocabulary = Vocabulary.train(["ab cd"], VocabularySettings(kind="words"))
    ab, cd = vocabulary.encode("ab cd")
    found = [FoundTerm("ab", range(1, 2)), FoundTerm("cd ab", range(1)), FoundTerm("ab", range(3, 4))]
    phrases = phrases_of(found, [-1, 0, 1, 1, 2, 3], vocabulary)
    assert phrases == [Phrase((ab,), 2, (2, 3, 5)), Phrase((cd, ab), 1, (1,))]


def test_what_the_vocabulary_cannot_write_is_named(translator):
    with pytest.raises(
        VocabularyError, match="'日本' cannot be written with the target vocabulary: it lacks '日', '本'; force"
    ):
        translator.translate(["I am tired."], terms=Terminology(always=["日本"]))
    words = Vocabulary.train(["ab cd"], VocabularySettings(kind="words"))
    with pytest.raises(VocabularyError, match="'ab ce' cannot be written with the target vocabulary: it lacks 'ce'"):
        Terminology(always=["ab ce"]).check(words)


@pytest.mark.parametrize("kind", ["characters", "words", "bpe"])
def test_edges_of_words(kind):
    vocabulary = Vocabulary.train(["abab baba, ab!", "ab한국 한국"], VocabularySettings(kind=kind, size=24))
    edges = word_edges(vocabulary)
    labels = vocabulary.tokens(range(len(vocabulary)))
    for i in range(4, len(vocabulary)):
        letter = labels[i][0] in "ab"
        assert edges.joins[i] == (letter and kind != "words"), labels[i]
        assert edges.ends_in_letter[i] == (labels[i][-1] in "ab"), labels[i]
    assert not edges.joins[:4].any()


TERMS = {
    "car": "bagnole",
    "friend": "pote",
    "very tired": "crevé",
    "doctor": "toubib",
    "work": "boulot",
    "Tom": "Thomas",
}
SENTENCES = [
    ("I sold my old car yesterday.", "J'ai vendu ma vieille bagnole hier."),
    ("The doctor said that the car was red.", "Le toubib a dit que c'était la bagnole."),
    ("I have a lot of work to do.", "J'ai beaucoup de boulot à faire."),
    ("Tom's car is new.", "La bagnole de Thomas est nouvelle."),
    ("Carla has no cars.", None),
]


def test_terms_stand_where_the_word_would_and_nothing_else_changes(translator):
    sources = [source for source, _ in SENTENCES]
    plain = translator.translate(sources, observe=False)
    found = translator.translate(sources, observe=False, terms=Terminology(TERMS))
    for (_, expected), before, after in zip(SENTENCES, plain, found, strict=True):
        assert after.text == (expected or before.text)
    assert found[0].candidates[0].log_probability < plain[0].candidates[0].log_probability


def test_every_phrase_is_said_as_whole_words_by_every_candidate(translator):
    terms = Terminology(TERMS, always=["donc", "art"])
    lines = ["My friend has a car.", "I am very tired, Tom.", "A friend of my friend works."]
    told = translator.search.model_copy(update={"n_best": 3})
    for line, translation in zip(lines, translator.translate(lines, terms=terms, search=told), strict=True):
        assert len(translation.candidates) == 3
        for candidate in translation.candidates:
            said = re.findall(r"\w+", candidate.text)
            for term in terms.of(line):
                assert said.count(term.text) >= [one.text for one in terms.of(line)].count(term.text)
            assert len(candidate.weights) == len(candidate.tokens)


def test_a_line_in_parts_has_terms_and_no_words_of_its_own(translator):
    line = "I sold my old car yesterday. I have a lot of work to do."
    [found] = translator.translate([line], split_above=8, terms=Terminology(TERMS))
    assert found.text == "J'ai vendu ma vieille bagnole hier. J'ai beaucoup de boulot à faire."
    with pytest.raises(CorpusError, match="line 7 is translated in 2 parts, and 'donc' could be said in any of them"):
        translator.translate([line], split_above=8, terms=Terminology(always=["donc"]), first_line=7)


def test_too_many_words_for_the_model_are_refused(translator, monkeypatch):
    monkeypatch.setattr(type(translator.model), "max_target_length", 5)
    with pytest.raises(ConfigurationError, match="and a translation of this model 5 at most: force fewer"):
        translator.translate(["I am tired."], terms=Terminology(always=["un deux trois quatre cinq"]))
