import gzip
from pathlib import Path

import pytest

from regard.errors import CorpusError
from regard.translation import corpus
from regard.translation.corpus import ParallelText, read_lines
from regard.translation.settings import TextFiles, TextTable

FILES = TextFiles(source=Path("a.de"), target=Path("a.en"))
TABLE = TextTable(tsv=Path("pairs.tsv"))


def write_sides(folder: Path, source: bytes, target: bytes) -> None:
    (folder / "a.de").write_bytes(source)
    (folder / "a.en").write_bytes(target)


def test_two_files_line_by_line(tmp_path):
    write_sides(tmp_path, "Grüß Gott\nzwei\n".encode(), b"hello\ntwo\n")
    text = ParallelText.read(FILES, tmp_path)
    assert (text.sources, text.targets) == (["Grüß Gott", "zwei"], ["hello", "two"])
    assert (len(text), text.dropped_empty) == (2, 0)
    assert text.source_name.endswith("a.de")
    assert text.target_name.endswith("a.en")


def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path):
    write_sides(tmp_path, gzip.compress(b"eins\nzwei"), b"one\ntwo")
    assert ParallelText.read(FILES, tmp_path).sources == ["eins", "zwei"]
    (tmp_path / "plain.gz").write_bytes(b"not packed\n")
    assert read_lines(tmp_path / "plain.gz") == ["not packed"]


def test_the_columns_of_a_table(tmp_path):
    (tmp_path / "pairs.tsv").write_bytes(gzip.compress("Go.\t가.\tCC-BY\n\nHi.\t안녕.\tCC-BY\n".encode()))
    text = ParallelText.read(TextTable(tsv=Path("pairs.tsv"), source_column=1, target_column=0), tmp_path)
    assert (text.sources, text.targets, text.dropped_empty) == (["가.", "안녕."], ["Go.", "Hi."], 1)
    assert text.source_name.endswith("pairs.tsv column 1")


def test_paths_are_relative_to_the_folder_and_absolute_ones_stay(tmp_path):
    write_sides(tmp_path, b"a\n", b"b\n")
    absolute = TextFiles(source=tmp_path / "a.de", target=tmp_path / "a.en")
    assert ParallelText.read(absolute, "/elsewhere").sources == ["a"]


def test_only_line_feeds_end_lines(tmp_path):
    odd = "one\u2028still\x85one\x0b\x0c\x1c\ntwo\n"
    write_sides(tmp_path, odd.encode(), b"1\n2\n")
    assert ParallelText.read(FILES, tmp_path).sources == ["one\u2028still\x85one\x0b\x0c\x1c", "two"]


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    write_sides(tmp_path, b"\xef\xbb\xbfeins\r\nzwei\r\n", b"one\ntwo")
    text = ParallelText.read(FILES, tmp_path)
    assert (text.sources, text.targets) == (["eins", "zwei"], ["one", "two"])


def test_lines_come_in_nfc(tmp_path):
    write_sides(tmp_path, "u\u0308ber\n".encode(), "가\n".encode())
    text = ParallelText.read(FILES, tmp_path)
    assert (text.sources, text.targets) == (["über"], ["가"])


def test_pairs_with_an_empty_side_are_dropped_and_counted(tmp_path):
    write_sides(tmp_path, b"a\n\n \t\nd\n", b"1\n2\n3\n\xc2\xa0\n")
    text = ParallelText.read(FILES, tmp_path)
    assert (text.sources, text.targets, text.dropped_empty) == (["a"], ["1"], 3)


def test_missing_file(tmp_path):
    write_sides(tmp_path, b"a\n", b"b\n")
    with pytest.raises(CorpusError, match=r"there is no file .*a\.d; did you mean 'a\.de'\?"):
        read_lines(tmp_path / "a.d")
    with pytest.raises(CorpusError, match=r"there is no file .*x: the folder .*absent does not exist either"):
        read_lines(tmp_path / "absent" / "x")


def test_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(CorpusError, match=r"is a folder; it needs to be a file of text"):
        read_lines(tmp_path)


def test_unreadable_file(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CorpusError, match=r"cannot read .*loop: Too many levels"):
        read_lines(tmp_path / "loop")


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "latin1").write_bytes("gut\nschön\n".encode("latin-1"))
    with pytest.raises(CorpusError, match=r"latin1, line 2: byte 0xf6 at position 4 is not UTF-8 .*save the file as"):
        read_lines(tmp_path / "latin1")


def test_truncated_gzip(tmp_path):
    lines = [f"line {i * 7919 % 1000}" for i in range(1000)]
    packed = gzip.compress("\n".join(lines).encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorpusError, match=r"cut\.gz is a truncated gzip file .*: [1-9]\d* lines were good, the rest"):
        read_lines(tmp_path / "cut.gz")


@pytest.mark.parametrize("place", [-6, 40])  # the check sum at the end; the packed text
def test_corrupt_gzip(tmp_path, place):
    packed = bytearray(gzip.compress("\n".join(map(str, range(1000))).encode()))
    packed[place] ^= 0xFF
    (tmp_path / "bad.gz").write_bytes(packed)
    with pytest.raises(CorpusError, match=r"bad\.gz is a (corrupt|truncated) gzip file .*: [\d,]+ lines were good"):
        read_lines(tmp_path / "bad.gz")


def test_sides_of_different_length(tmp_path):
    write_sides(tmp_path, b"a\nb\nc\n", b"1\n2\n")
    with pytest.raises(CorpusError, match=r"do not line up: .*a\.de has 3 lines and .*a\.en has 2; line i of one"):
        ParallelText.read(FILES, tmp_path)


def test_table_line_with_too_few_columns(tmp_path):
    (tmp_path / "pairs.tsv").write_bytes(b"a\tb\nlonely\n")
    with pytest.raises(
        CorpusError, match=r"pairs\.tsv, line 2 has 1 column separated .*; it needs 2 for source_column 0 and"
    ):
        ParallelText.read(TABLE, tmp_path)


def test_empty_corpus(tmp_path):
    write_sides(tmp_path, b"", b"")
    with pytest.raises(
        CorpusError, match=r"no parallel text: .*a\.de with .*a\.en has no lines; it needs at least one"
    ):
        ParallelText.read(FILES, tmp_path)


def test_corpus_that_is_empty_once_empty_pairs_are_dropped(tmp_path):
    write_sides(tmp_path, b"\nb\n", b"1\n\n")
    with pytest.raises(CorpusError, match=r"no parallel text: .* has 2 lines, but each has an empty side"):
        ParallelText.read(FILES, tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, compressed):
    monkeypatch.setattr(corpus, "LONGEST_LINE", 1000)
    path, text = tmp_path / "bomb", b"good\n" + b"0" * 999 + b"\n" + b"0" * 100_000
    path.write_bytes(gzip.compress(text) if compressed else text)
    with pytest.raises(CorpusError, match=r"bomb, line 3 has more than 1,000 bytes; text needs to have a sentence"):
        read_lines(path)
    path.write_bytes(b"0" * 1000)
    assert read_lines(path) == ["0" * 1000]


def test_a_sentence_in_place_of_a_file(tmp_path):
    with pytest.raises(CorpusError, match=r"there is no file .*He can read\.; a sentence needs to stand in a file"):
        read_lines(tmp_path / "He can read.")


def write_links(folder: Path, links: str) -> None:
    write_sides(folder, b"ein  rotes Haus\n\nzwei\n", b"a red house\nx\ntwo of\n")
    (folder / "links").write_text(links)


def test_links_of_words_are_read_beside_the_text(tmp_path):
    write_links(tmp_path, "0-0 2-2 1-1 0p1\n\n0-1 0-0\n")
    text = ParallelText.read(FILES, tmp_path, alignments=Path("links"))
    assert text.links == [{(0, 0), (1, 1), (2, 2)}, {(0, 0), (0, 1)}]  # the empty pair is gone with its line
    assert ParallelText.read(FILES, tmp_path).links is None


def test_links_of_a_table(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a b\tc\nd\te f\n")
    (tmp_path / "links").write_bytes(gzip.compress(b"1-0\n0-1\n"))
    assert ParallelText.read(TABLE, tmp_path, alignments=Path("links")).links == [{(1, 0)}, {(0, 1)}]


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("0-0\n\n", r"do not line up: .*links has 2 lines and .*a\.de has 3; line i of one needs to link the words"),
        ("0-0\n\n0-0\n0-0\n", r"links has 4 lines and .*a\.de has 3"),
        ("0-0 1:1\n\n\n", r"links, line 1: '1:1' is no link; it needs to be two word numbers as in 0-1"),
        (
            "0-0\n\n0-2\n",
            r"links, line 3: 0-2 links source word 0 and target word 2, and there are 1 and 2 words, from 0",
        ),
        (
            "3-0\n\n\n",
            r"line 1: 3-0 links source word 3 .* there are 3 and 3 words, from 0, in .*a\.de and .*a\.en; words",
        ),
    ],
)
def test_bad_links(tmp_path, links, message):
    write_links(tmp_path, links)
    with pytest.raises(CorpusError, match=message):
        ParallelText.read(FILES, tmp_path, alignments=Path("links"))


def test_links_that_are_not_there(tmp_path):
    write_links(tmp_path, "")
    with pytest.raises(CorpusError, match=r"there is no file .*lonks; did you mean 'links'"):
        ParallelText.read(FILES, tmp_path, alignments=Path("lonks"))
