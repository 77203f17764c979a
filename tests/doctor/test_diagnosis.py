"""Diagnosis of files: those that cannot be read, several processes, suppression comments."""

import os
from pathlib import Path

import pytest

from regard.doctor import RuleSelection, Severity, diagnose, diagnose_file, diagnose_files
from regard_doctor.diagnosis import UNREADABLE
from regard_doctor.doctor_error import DoctorError
from regard_doctor.python_source import LARGEST, mentions_attention
from regard_doctor.source_discovery import python_files

WRONG = "def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v{comment}\n"
ERRORS = RuleSelection(least=Severity.ERROR)


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def messages(path: Path) -> list[str]:
    found = diagnose_file(path)
    assert {finding.code for finding in found} <= {UNREADABLE}
    return [finding.message for finding in found]


def test_a_finding_has_its_place():
    (finding,) = diagnose(WRONG.format(comment=""), path="a.py", selection=ERRORS)
    assert (finding.line, finding.column, finding.end_line, finding.end_column) == (2, 12, 2, 38)
    assert str(finding).startswith("a.py:2:12: ATT111 softmax over axis -2")


def test_columns_count_characters():
    source = "def f(q, k, v):\n    ü = 1; return (q @ k.mT / 8).softmax(-2) @ v\n"
    (finding,) = diagnose(source, selection=ERRORS)
    assert source.splitlines()[1][finding.column - 1 : finding.end_column - 1] == "(q @ k.mT / 8).softmax(-2)"


@pytest.mark.parametrize(
    "comment",
    ["  # regard: ignore", "  # regard: ignore[ATT111]", "  # noqa  # regard: ignore[ATT101, ATT111]"],
)
def test_a_comment_suppresses(comment):
    assert diagnose(WRONG.format(comment=comment), selection=ERRORS) == []


@pytest.mark.parametrize("comment", ["  # regard: ignore[ATT101]", "  # ignore", "\n# regard: ignore"])
def test_another_comment_does_not(comment):
    assert len(diagnose(WRONG.format(comment=comment), selection=ERRORS)) == 1


def test_a_comment_for_the_file():
    assert diagnose("# regard: ignore-file[ATT111]\n" + WRONG.format(comment=""), selection=ERRORS) == []
    assert len(diagnose("# regard: ignore-file[ATT112]\n" + WRONG.format(comment=""), selection=ERRORS)) == 1


def test_a_comment_in_a_string_is_none():
    source = "x = '# regard: ignore-file'\n" + WRONG.format(comment="")
    assert len(diagnose(source, selection=ERRORS)) == 1


def test_a_file_that_does_not_parse(tmp_path):
    path = write(tmp_path / "a.py", "softmax = (\n")
    assert messages(path) == ["the file does not parse: line 1: '(' was never closed"]


def test_a_file_that_is_nested_too_deeply(tmp_path):
    path = write(tmp_path / "a.py", "softmax = " + "-" * 100_000 + "1\n")
    (message,) = messages(path)
    assert message.startswith("the file does not parse")


def test_a_long_chain_is_read(tmp_path):
    path = write(tmp_path / "a.py", "softmax = " + "+".join(["x"] * 3000) + "\n")
    assert len(messages(path)) <= 1


def test_a_function_of_a_mask_that_binds_a_name_again(tmp_path):
    source = """
from torch.nn.attention.flex_attention import create_block_mask

def mask(b, h, q_idx, kv_idx):
    seen = q_idx - kv_idx <= 256
    seen = seen & (q_idx - kv_idx < 1000)
    return seen
"""
    assert [finding.code for finding in diagnose(source)] in ([], ["ATT216"])
    assert diagnose_file(write(tmp_path / "a.py", source)) is not None


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("import torch; properties = [property, europe]", False),
        ("import torch; x = rope(x)", True),
        ("from torch import nn; self.rotary = None", True),
        ("import numpy; x.argmax()", False),
        ("import torch; x.argmax()", True),
        ("x.softmax(-1)", True),
    ],
)
def test_files_without_a_word_of_attention_are_not_parsed(line, counts):
    assert mentions_attention(line.encode()) is counts


def test_a_file_with_null_bytes(tmp_path):
    (message,) = messages(write(tmp_path / "a.py", b"softmax = 1\0\n"))
    assert "does not parse" in message


def test_a_file_that_is_not_utf8(tmp_path):
    (message,) = messages(write(tmp_path / "a.py", b"softmax = '\xe4'\n"))
    assert "is not text in UTF-8 or in the encoding that it declares" in message


def test_an_encoding_that_is_declared(tmp_path):
    assert messages(write(tmp_path / "a.py", b"# coding: latin-1\nsoftmax = '\xe4'\n")) == []


def test_an_enormous_file(tmp_path):
    (message,) = messages(write(tmp_path / "a.py", b"#" * (LARGEST + 1)))
    assert message == "the file has 4,000,001 bytes, more than the 4,000,000 that are read; exclude it"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path):
    path = write(tmp_path / "a.py", "")
    path.chmod(0)
    assert messages(path) == ["the file cannot be read: Permission denied"]


def test_a_file_that_is_gone(tmp_path):
    assert messages(tmp_path / "gone.py") == ["the file cannot be read: No such file or directory"]


def test_several_processes_find_the_same(tmp_path):
    paths = [write(tmp_path / f"{number:03}.py", WRONG.format(comment="")) for number in range(70)]
    one = diagnose_files(paths, ERRORS, jobs=1)
    assert [finding.path for finding in one] == [str(path) for path in paths]
    assert diagnose_files(paths, ERRORS, jobs=2) == one


def test_folders_are_searched_in_order(tmp_path):
    for name in ("b/b.py", "a.py", "b/a.pyi", "c.txt", ".venv/x.py", "b/__pycache__/x.py"):
        write(tmp_path / name, "")
    found = python_files([tmp_path, tmp_path / "a.py"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a.py", "b/a.pyi", "b/b.py"]


def test_excluded_patterns(tmp_path):
    for name in ("a.py", "b/c.py", "b/d/e.py"):
        write(tmp_path / name, "")
    assert [path.name for path in python_files([tmp_path], ["d"])] == ["a.py", "c.py"]
    assert [path.name for path in python_files([tmp_path], ["b/*.py"])] == ["a.py"]


def test_what_macos_keeps_beside_a_file_is_no_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "._a.py").write_bytes(b"\x00\x05\x16\x07\x00")
    assert [path.name for path in python_files([tmp_path])] == ["a.py"]


def test_links_in_a_circle(tmp_path):
    write(tmp_path / "a" / "one.py", "")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "a" / "loop.py").symlink_to(tmp_path / "a" / "loop.py")
    found = python_files([tmp_path])
    assert [path.name for path in found if path.name != "loop.py"] == ["one.py"]
    for path in found:
        diagnose_file(path)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(DoctorError, match="there is no file or folder '.*gone'; name one that exists"):
        python_files([tmp_path / "gone"])
