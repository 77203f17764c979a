"""Parts of a line that are kept as they are: taken out before it is translated, and put back into the translation."""

from __future__ import annotations

import time

import pytest

from regard.errors import CorpusError
from regard.translation.kept_placement import diagonal_weights, put_back
from regard.translation.kept_text import LONGEST_WORD, shared_out, take_out
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.settings import SearchSettings
from regard.translation.translator import MOST_TOKENS, Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings

KNOWN = Vocabulary.train(['I love "you", Tom.', "世"], VocabularySettings(kind="characters"))

GREEDY = SearchSettings(beam=1)


@pytest.fixture(scope="module")
def translator():
    return Translator.load(ENGLISH_FRENCH)


@pytest.mark.parametrize(
    ("line", "text", "parts"),
    [
        ("I love you.", "I love you.", []),
        ("I <b>love</b> you.", "I love you.", [("<b>", 1), ("</b>", 2)]),
        ("<p class='x y' id=\"1\">I</p>", "I", [("<p class='x y' id=\"1\">", 0), ("</p>", 1)]),
        ("I love you ❤️😊.", "I love you.", [("❤️😊", 3)]),
        ("👩‍👩‍👧 I love 👍🏽 you", "I love you", [("👩‍👩‍👧", 0), ("👍🏽", 2)]),
        ("you❤Tom", "you Tom", [("❤", 1)]),
        ("I (love) you.", "I love you.", [("(", 1), (")", 2)]),
        ("I love “you” ❤", "I love “you”", [("❤", 3)]),  # quotes have a form that is known
        ("I <2 love> you", "I 2 love you", [("<", 1), (">", 3)]),
        ("<b>❤</b>", "", [("<b>", 0), ("❤", 0), ("</b>", 0)]),
        ("I love {x}, <b>you</b>.", "I love, you.", [("{x}", 2), ("<b>", 2), ("</b>", 3)]),
        ('I "<b>love</b>" you', 'I "love" you', [("<b>", 1), ("</b>", 2)]),
        ("<b>I love</b>, Tom<i></i>.", "I love, Tom.", [("<b>", 0), ("</b>", 2), ("<i>", 3), ("</i>", 3)]),
        ("I love<br/>you, %s", "I love you,", [("<br/>", 2), ("%s", 3)]),
        ("${a} %(b)s {{c}} {} %1$s I", "I", [(one, 0) for one in ("${a}", "%(b)s", "{{c}}", "{}", "%1$s")]),
        ("I " + "x" * 201 + " you", "I you", [("x" * 201, 1)]),
        ("I " + "x" * 200 + " you", "I " + "x" * 200 + " you", []),
        ("世" * 300, "世" * 300, []),  # of a language without spaces
        ("I 界" + "界" * 200, "I", [("界" * 201, 1)]),  # of one that is not known
    ],
)
def test_what_is_kept_and_where_it_stood(line, text, parts):
    kept = take_out(line, KNOWN)
    assert (kept.text, [(part.text, part.word) for part in kept.parts]) == (text, parts)
    words = len(kept.text.split())
    assert put_back(kept.text, kept.parts, diagonal_weights(words, words)) == line


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("I <b>love you", ["the tag <b> is not closed; it is kept behind the words that it stood behind"]),
        ("I </b>love you", ["the tag </b> closes nothing; it is kept behind the words that it stood behind"]),
        ("<b>I <i>love</b> you</i>", ["the tag <i> is not closed", "the tag </i> closes nothing"]),
        ('<b>I <br> love <img src="a">you</b> <hr/>', []),
    ],
)
def test_tags_without_partners_are_told(line, told):
    warnings = list(take_out(line, KNOWN).warnings())
    assert len(warnings) == len(told)
    assert all(message in warning for message, warning in zip(told, warnings, strict=True))


def test_parts_go_to_the_piece_that_they_stood_in():
    kept = take_out("❤ I love. <b>Tom</b> (you ❤", KNOWN)
    shared = shared_out(kept.parts, [2, 2])
    assert [[part.text for part in some] for some in shared] == [["❤"], ["<b>", "</b>", "(", "❤"]]
    assert [[part.word for part in some] for some in shared] == [[0], [0, 1, 1, 2]]
    assert put_back("Tom you", shared[1], diagonal_weights(2, 2)) == "<b>Tom</b> (you ❤"


def test_tags_and_emoji_are_in_the_translation(translator):
    plain, kept = translator.translate(["I am very tired.", "<b>I am very tired.</b> ❤️😊"])
    assert kept.text == f"<b>{plain.text}</b> ❤️😊"
    assert kept.candidates[0].tokens == plain.candidates[0].tokens
    assert kept.warnings == ("line 2: the source vocabulary does not know '❤', '😊', which it keeps as it is",)
    [inner] = translator.translate(["I am <i>very</i> tired."])
    assert inner.text.replace("<i>", "").replace("</i>", "") == plain.text
    assert not inner.warnings


def test_a_line_of_nothing_else_is_its_own_translation(translator):
    emoji, tags, empty = translator.translate(["😊 ❤", " <br/> <hr>", " "])
    assert (emoji.text, tags.text, empty.text) == ("😊 ❤", "<br/> <hr>", "")
    assert emoji.candidates == tags.candidates == ()


def test_a_line_that_is_cut_keeps_each_part_in_its_sentence(translator):
    line = "😊 I am tired. <b>You are late.</b>"
    first, second = translator.translate(["I am tired.", "You are late."])
    [whole] = translator.translate([line], split_above=5)
    assert whole.text == f"😊 {first.text} <b>{second.text}</b>"


@pytest.mark.parametrize("word", ["a" * 20_000, "I-am-tired." * 2_000, "é1ж" * 7_000, "あ漢" * 10_000])
def test_a_word_of_any_length_ends_at_once(translator, word):
    start = time.process_time()
    alone, beside = translator.translate([word, f"I am tired. {word}"], split_above=translator.longest_trained)
    assert time.process_time() - start < 2
    [plain] = translator.translate(["I am tired."])
    assert (alone.text, beside.text) == (word, f"{plain.text} {word}")
    assert f"has {len(word):,} characters without a space, and a word of more than {LONGEST_WORD} is kept" in "".join(
        alone.warnings
    )


def test_a_line_in_unknown_letters_without_spaces_is_a_guess_as_long_as_a_sentence(translator):
    [short, sentence] = translator.translate(["あ", "あ" * LONGEST_WORD], search=GREEDY)
    assert short.candidates
    assert sentence.candidates
    assert "the source vocabulary knows nothing of 'あ'; the translation is a guess" in short.warnings[0]
    assert f"knows nothing of '{'あ' * 100}'...; the translation is a guess" in sentence.warnings[0]


def test_tags_that_are_alike_are_warned_of_once():
    warnings = list(take_out("I <b>love <b>you <b>Tom <i>.", KNOWN).warnings())
    assert [warning.split(";")[0] for warning in warnings] == ["the tag <b> is not closed", "the tag <i> is not closed"]


def test_a_source_of_too_many_tokens_is_refused_at_once(translator):
    line, start = "I am tired. " * 2_000, time.process_time()
    message = rf"line 1 has [\d,]+ tokens, and at most {MOST_TOKENS:,} are read at once: split it into sentences"
    with pytest.raises(CorpusError, match=message):
        translator.translate([line])
    with pytest.raises(CorpusError, match=message):
        translator.align(["a" * 20_000], ["a"])
    assert time.process_time() - start < 2
