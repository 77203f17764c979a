import re

from regard_command import align


def test_words_are_linked_in_pharaoh_format(regard, run, corpus):
    result = regard("align", "--checkpoint", run, "--source", corpus / "test.digits", "--target", corpus / "test.words")
    assert result.exit_code == 0
    assert result.stderr == ""
    digits = (corpus / "test.digits").read_text(encoding="utf-8").splitlines()
    links = result.stdout.splitlines()
    assert len(links) == len(digits)
    assert all(re.fullmatch(r"(\d+-\d+( |$))+", line) for line in links)
    diagonal = [" ".join(f"{place}-{place}" for place in range(len(line.split()))) for line in digits]
    assert sum(one == other for one, other in zip(links, diagonal, strict=True)) > 20


def test_a_pair_with_an_empty_side_gives_an_empty_line(regard, run, tmp_path, monkeypatch):
    monkeypatch.setattr(align, "PAIRS_AT_ONCE", 2)
    (tmp_path / "source").write_text("1\n\n1 2\n3\n", encoding="utf-8")
    (tmp_path / "target").write_text("eins\nzwei\n\ndrei\n", encoding="utf-8")
    result = regard("align", "--checkpoint", run, "--source", tmp_path / "source", "--target", tmp_path / "target")
    assert result.stdout == "0-0\n\n\n0-0\n"


def test_files_that_do_not_line_up_are_named_with_their_counts(regard, run, tmp_path):
    (tmp_path / "source").write_text("1\n2\n", encoding="utf-8")
    (tmp_path / "target").write_text("eins\n", encoding="utf-8")
    result = regard("align", "--checkpoint", run, "--source", tmp_path / "source", "--target", tmp_path / "target")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(r"the sides do not line up: \S+source has 2 lines and \S+target has 1; line i", result.stderr)


def test_a_missing_file_is_named(regard, run, corpus):
    result = regard("align", "--checkpoint", run, "--source", corpus / "test.digit", "--target", corpus / "test.words")
    assert result.exit_code == 2
    assert "there is no file" in result.stderr
    assert "did you mean 'test.digits'?" in result.stderr
