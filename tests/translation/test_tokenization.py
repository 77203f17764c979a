import pytest

from regard.translation.tokenization import CharacterSpelling, Spelling, SubwordSpelling, WordSpelling


def cut(spelling: Spelling, line: str) -> list[str]:
    return [piece for chunk in spelling.chunks(line) for piece in spelling.pieces(chunk)]


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("Hello, world!", ["Hello", "￭,", "world", "￭!"]),
        ("well-known", ["well", "￭-￭", "known"]),
        ("(a) b", ["(￭", "a", "￭)", "b"]),
        ("- b", ["-", "b"]),
        ("...", [".", "￭.", "￭."]),
        ('"¿a?".', ['"￭', "¿￭", "a", "￭?", '￭"', "￭."]),
        ("3.14 €", ["3", "￭.￭", "14", "€"]),
        ("l’été\u202f?", ["l", "￭’￭", "été", "￭\u202f", "￭?"]),
        ("हिन्दी", ["हिन्दी"]),
    ],
)
def test_words(line, pieces):
    spelling = WordSpelling()
    assert cut(spelling, line) == pieces
    assert spelling.line(pieces) == line


def test_a_word_is_the_same_piece_wherever_it_stands():
    pieces = cut(WordSpelling(), 'dog "dog" (dog) dog-dog dog.')
    assert {piece for piece in pieces if "dog" in piece} == {"dog"}


@pytest.mark.parametrize("spelling", [CharacterSpelling(), SubwordSpelling(), WordSpelling()])
@pytest.mark.parametrize("line", ["▁ ￭ a▁b￭c ▁▁", "￭", "▁", "日本、\u3000語。", "a\u00a0b c"])
def test_text_may_hold_the_marks(spelling, line):
    assert spelling.line(cut(spelling, line)) == line


@pytest.mark.parametrize("spelling", [CharacterSpelling(), SubwordSpelling(), WordSpelling()])
def test_what_no_text_should_hold_is_replaced(spelling):
    assert spelling.line(cut(spelling, "a\ufdd0b \ud800 \ufdd2")) == "a\ufffdb \ufffd \ufffd"


@pytest.mark.parametrize("spelling", [CharacterSpelling(), SubwordSpelling(), WordSpelling()])
def test_white_space_is_trimmed_and_collapsed(spelling):
    assert spelling.line(cut(spelling, "\t a \r\n  b ")) == "a b"
    assert spelling.line(cut(spelling, " ")) == ""


@pytest.mark.parametrize("spelling", [CharacterSpelling(), SubwordSpelling(), WordSpelling()])
def test_as_many_words_begin_as_white_space_separates(spelling):
    assert sum(spelling.begins_word(cut(spelling, "Hello, (dear) world!"))) == 3
    assert spelling.begins_word([]) == []


def test_labels_are_readable():
    assert [WordSpelling().label(piece) for piece in cut(WordSpelling(), "a-▁, ￭")] == ["a", "-", "▁", ",", "￭"]
    assert [CharacterSpelling().label(piece) for piece in cut(CharacterSpelling(), "a ▁")] == ["a", "▁", "▁"]
    assert [SubwordSpelling().label(piece) for piece in cut(SubwordSpelling(), "a ￭!")] == ["▁a", "▁￭", "!"]
