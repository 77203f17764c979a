import io
import os

import pytest

from regard_command.command_error import CommandError
from regard_command.stdio import CHUNK_BYTES, arriving_lines


def test_whatever_has_arrived_is_given_at_once():
    reader, writer = os.pipe()
    with open(reader, "rb") as stream, open(writer, "wb", buffering=0) as typed:
        lines = arriving_lines(stream)
        typed.write(b"one\n")
        assert next(lines) == ["one"]
        typed.write(b"two\nthree\nfo")
        assert next(lines) == ["two", "three"]
        typed.write("u\u2028r\r\n\nfive".encode())
        assert next(lines) == ["fou\u2028r", ""]
        typed.close()
        assert list(lines) == [["five"]]


@pytest.mark.parametrize("length", [1, 7, 1000, 3 * CHUNK_BYTES])
def test_lines_of_any_length_come_whole(length):
    text = [str(number % 10) * length for number in range(50)]
    parts = list(arriving_lines(io.BytesIO("\n".join(text).encode())))
    assert [line for part in parts for line in part] == text


def test_no_input_gives_no_lines():
    assert list(arriving_lines(io.BytesIO(b""))) == []


def test_characters_that_are_cut_by_a_chunk_are_read():
    text = "ä" * CHUNK_BYTES + "\n"  # two bytes each
    assert [line for part in arriving_lines(io.BytesIO(b"x" + text.encode())) for line in part] == ["x" + text[:-1]]


def test_what_is_not_utf_8_is_named_after_the_lines_before_it():
    lines = arriving_lines(io.BytesIO("grün\nblau\n".encode() + "grün\n".encode("latin-1") + b"rot\n"))
    assert next(lines) == ["grün", "blau"]
    with pytest.raises(CommandError, match=r"standard input, line 3: byte 0xfc at position 3 is not UTF-8 .* iconv"):
        next(lines)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr("regard.translation.corpus.LONGEST_LINE", 1000)
    lines = arriving_lines(io.BytesIO(b"one\n" + b"0" * 100_000))
    assert next(lines) == ["one"]
    with pytest.raises(CommandError, match=r"standard input, line 2 has more than 1,000 bytes"):
        next(lines)
