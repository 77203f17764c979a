"""The language of a line: told where it is clear, by scripts and by frequent words, and not of a line that is read."""

from __future__ import annotations

import pytest

from regard.translation.guessed_language import NAMES, other_language
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

SENTENCES = {
    "en": "I do not know where the children of my sister have been, but we will see them at the station.",
    "fr": "Je ne sais pas où étaient les enfants de ma sœur, mais nous les verrons à la gare.",
    "de": "Ich weiß nicht, wo die Kinder von meiner Schwester waren, aber wir sehen sie auf dem Bahnhof.",
    "es": "No sé dónde estaban los hijos de mi hermana, pero los veremos en la estación.",
    "it": "Non so dove erano i figli di mia sorella, ma li vedremo alla stazione con la nonna.",
    "pt": "Eu não sei onde estavam os filhos da minha irmã, mas nós vamos vê-los na estação.",
    "nl": "Ik weet niet waar de kinderen van mijn zus waren, maar wij zien ze op het station.",
    "ko": "나는 학생입니다.",
    "ja": "私は学生です。",
    "zh": "我是学生。",
    "ru": "Я не знаю, где дети.",
    "el": "Δεν ξέρω πού είναι τα παιδιά.",
    "ar": "لا أعرف أين الأطفال",
    "he": "אני לא יודע איפה הילדים",
    "th": "ฉันไม่รู้ว่าเด็กอยู่ที่ไหน",
    "hi": "मुझे नहीं पता कि बच्चे कहाँ हैं",
}


def test_each_language_that_has_a_name_is_told():
    assert SENTENCES.keys() == NAMES.keys()


@pytest.mark.parametrize("expected", SENTENCES)
@pytest.mark.parametrize("code", SENTENCES)
def test_a_clear_line_is_told_from_every_other_language(code, expected):
    may_be = code == expected or (code, expected) == ("zh", "ja")  # Chinese characters alone may be Japanese
    assert other_language(SENTENCES[code], expected) == (None if may_be else code)


@pytest.mark.parametrize(
    "line",
    ["", "17 !", "Guten Tag", "Come in.", "We all die.", "Die, die, die!", "We met me.", "El Niño is in Los Angeles.",
     "No, no, no.", "HELLO", "déjà vu",
     "The word 안녕하세요 is Korean, and I do not read it", "a b c d e", "👍", "e = mc²"],
)  # fmt: skip
def test_what_may_be_english_is_not_told(line):
    assert other_language(line, "en") is None


def test_a_language_without_words_here_is_not_judged_by_its_words():
    assert other_language("Tämä on hyvin pitkä lause, ja se on suomea.", "fi") is None
    assert other_language(SENTENCES["de"], "fi") is None
    assert other_language(SENTENCES["ko"], "fi") == "ko"


def test_a_translator_names_the_language_that_it_does_not_read():
    translator = Translator.load(ENGLISH_FRENCH)
    assert translator.source_language == "en"
    english, german, korean = translator.translate(["I am tired.", SENTENCES["de"], SENTENCES["ko"]], observe=False)
    assert not any("seems to be" in warning for warning in english.warnings)
    assert "line 2: it seems to be German, and the model reads English: the translation is a guess" in german.warnings
    assert "line 3: it seems to be Korean, and the model reads English: the translation is a guess" in korean.warnings
    translator.source_language = None
    assert not any("seems to be" in warning for warning in translator.translate([SENTENCES["de"]])[0].warnings)
