"""Text from tokens as they come, and stop words across them."""

import random

import pytest

from regard.serving.text_codec import ByteCodec, DecodedStream, StopWords


def test_letters_come_when_they_are_whole():
    stream, text = DecodedStream(ByteCodec()), "aß漢😀"
    assert [stream.add(token) for token in text.encode()] == ["a", "", "ß", "", "", "漢", "", "", "", "😀"]
    assert stream.add(0xE6) == ""
    assert stream.end() == "\ufffd"


def test_any_tokens_become_the_text_of_all():
    draw = random.Random(1)
    for _ in range(200):
        tokens = [draw.randrange(300) for _ in range(draw.randrange(30))]
        stream = DecodedStream(ByteCodec())
        parts = [stream.add(token) for token in tokens] + [stream.end()]
        assert "".join(parts) == ByteCodec().decode(tokens)


def test_stop_words_are_found_wherever_parts_begin():
    draw = random.Random(2)
    for _ in range(500):
        text = "".join(draw.choice("abc") for _ in range(draw.randrange(20)))
        words = ["".join(draw.choice("abc") for _ in range(draw.randrange(1, 5))) for _ in range(draw.randrange(3))]
        stop, told, rest = StopWords(words), "", text
        while rest and not stop.found:
            size = draw.randrange(1, 4)
            told, rest = told + stop.add(rest[:size]), rest[size:]
        told += stop.end()
        places = [text.find(word) for word in words if word in text]
        if places:
            ends = [text.find(word) + len(word) for word in words if word in text]
            assert stop.found
            assert told == text[: len(told)]
            assert min(places) <= len(told) < min(ends)  # the word that was whole first, of several in one part any
        else:
            assert not stop.found
            assert told == text


@pytest.mark.parametrize("words", [[], [""]])
def test_no_words_hold_nothing_back(words):
    assert StopWords(words).add("abc") == "abc"
