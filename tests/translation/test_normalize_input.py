"""What a vocabulary does not know of a line: made plain, left out, or named."""

import pytest
from test_translator import ENGLISH, reverser

from regard.translation.input_lines import normalize_line
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings

LINES = ['I love "you", Tom - a lot...', "it's e1"] * 3


def vocabulary(kind: str = "characters", lines: list[str] = LINES, **options) -> Vocabulary:
    return Vocabulary.train(lines, VocabularySettings(kind=kind, size=60, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["characters", "words", "bpe", "unigram"])
def test_known_lines_stay_as_they_are(kind):
    for line in [*LINES, "", " \t", "I  love\tTom"]:
        known = normalize_line(line, vocabulary(kind))
        assert (known.text, known.left_out, known.guessed, list(known.warnings())) == (line, (), (), [])


@pytest.mark.parametrize("kind", ["characters", "words", "bpe", "unigram"])
def test_the_characters_that_a_vocabulary_knows(kind):
    known = vocabulary(kind)
    assert known.unknown_characters("".join(LINES)) == []
    assert known.unknown_characters("zI ▁zx￭ ") == ["z", "▁", "x", "￭"]  # the marks of spellings are no text
    assert vocabulary(kind, ["▁ a"]).unknown_characters("▁a￭") == ["￭"]
    assert vocabulary(kind, lowercase=True).unknown_characters("LOVE Z") == ["z"]
    assert vocabulary(kind, ["é"]).unknown_characters("e\u0301") == []  # NFC


@pytest.mark.parametrize(
    ("line", "text", "left_out"),
    [
        ("I love you ❤️.", "I love you.", ("❤",)),
        ("I ❤ you ❤❤ a lot", "I you a lot", ("❤",)),
        ("❤ I love 👩‍👩‍👧 you 👍🏽", "I love you", ("❤", "👩", "👧", "👍", "🏽")),
        ("you❤Tom", "you Tom", ("❤",)),
        ("you (Tom)", "you Tom", ("(", ")")),
        ("1️⃣", "1", ()),
        ("lo\u200dve \u200e Tom", "love Tom", ()),
        ("❤", "", ("❤",)),
        ("[^-]\\ Tom", "- Tom", ("[", "^", "]", "\\")),
        ("«you» “you” „you‟ it’s Tom – a — a\u00a0lot…", '"you" "you" "you" it\'s Tom - a - a lot...', ()),
    ],
)
def test_signs_are_made_plain_or_left_out(line, text, left_out):
    known = normalize_line(line, vocabulary())
    assert (known.text, known.left_out, known.guessed) == (text, left_out, ())


def test_what_is_known_is_not_made_plain():
    assert normalize_line("«a»❤", vocabulary(lines=["«a»"])).text == "«a»"


def test_where_the_plain_sign_is_unknown_too_it_is_left_out():
    known = normalize_line("“a” — a", vocabulary(lines=["a"]))
    assert (known.text, known.left_out) == ("a a", ("“", "”", "—"))


def test_letters_digits_and_accents_stay():
    known = normalize_line("Iж 2 a\u0302\u0302 ❤", vocabulary())
    assert (known.text, known.left_out, known.guessed) == ("Iж 2 â\u0302", ("❤",), ("ж", "2", "â", "\u0302"))
    assert list(known.warnings()) == [
        "the source vocabulary does not know '❤', which it leaves out, and does not know 'ж', '2', 'â', '\u0302'; what "
        "the translation says there is a guess"
    ]


def test_many_characters_are_counted():
    [warning] = normalize_line("абвгдежзийк", vocabulary()).warnings()
    assert "'з' and 3 more; what the translation says there is a guess" in warning


def test_a_vocabulary_of_words_names_the_words_that_it_lacks():
    known = normalize_line("I love the zebra, Tom ❤ love zebra", vocabulary("words"))
    assert (known.text, known.left_out, known.guessed) == ("I love the zebra, Tom love zebra", ("❤",), ("the", "zebra"))
    assert normalize_line("lot love I", vocabulary("words")).guessed == ()
    assert normalize_line("over", vocabulary("words")).guessed == ("over",)  # of letters that it has


def test_a_translation_is_that_of_what_is_left_and_keeps_its_source():
    [known, both] = reverser(ENGLISH).translate(["a dog ❤ runs", "Ж ❤"], first_line=4)
    assert (known.text, known.source, known.source_tokens) == ("runs dog ❤ a", "a dog ❤ runs", ("a", "dog", "runs"))
    unknown = "line {}: the source vocabulary does not know '❤', which it keeps as it is"
    assert known.warnings == (unknown.format(4),)
    guess = "line 5: the source vocabulary knows nothing of 'Ж'; the translation is a guess"
    assert both.warnings == (unknown.format(5), guess)


def test_alignment_reads_every_word():
    [pair] = reverser(ENGLISH).align(["a ❤ dog"], ["dog a"])
    assert pair.source_tokens == ("a", "<unk>", "dog")


def test_a_line_longer_than_those_of_training_says_so():
    short = reverser(ENGLISH)
    translator = Translator(
        short.model, short.source_vocabulary, short.target_vocabulary, short.search, longest_trained=3
    )
    first, second = translator.translate(["a dog runs", "a dog runs the"])
    assert first.warnings == ()
    assert second.warnings == (
        "line 2: it has 4 tokens, and the model was trained on sentences of 3 at most: the translation may leave out "
        "much of it; give one sentence a line",
    )
    assert short.translate(["a dog runs the"])[0].warnings == ()
