import json
import random
import re
import shutil

import pytest

from regard.translation.run_folder import ENGLISH_FRENCH
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


@pytest.fixture
def text(tmp_path):
    """Two files of sentences whose words are turned round, and the gold links of all."""
    random.seed(3)
    lines = [[str(random.randint(0, 30)) for _ in range(random.randint(1, 6))] for _ in range(400)]
    (tmp_path / "source").write_text("".join(f"{' '.join(f's{word}' for word in line)}\n" for line in lines))
    (tmp_path / "target").write_text("".join(f"{' '.join(f't{word}' for word in line[::-1])}\n" for line in lines))
    gold = [" ".join(f"{place}-{len(line) - 1 - place}" for place in range(len(line))) for line in lines]
    (tmp_path / "gold").write_text("\n".join(gold) + "\n")
    return tmp_path


def test_links_are_learned_from_the_text_alone(regard, text):
    result = regard("align", "--source", text / "source", "--target", text / "target", "--gold", text / "gold")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 400
    rate, diagonal = map(float, re.findall(r"([\d.]+)%", result.stderr))
    assert rate < 5
    assert diagonal > 50


def test_more_text_is_learned_from_and_not_printed(regard, text):
    for side in ("source", "target"):
        lines = (text / side).read_text().splitlines(keepends=True)
        (text / f"{side}.few").write_text("".join(lines[:3]))
    few = "align", "--source", text / "source.few", "--target", text / "target.few"
    result = regard(*few, "--also", text / "source", text / "target")
    gold = (text / "gold").read_text().splitlines()[:3]
    assert [set(line.split()) for line in result.stdout.splitlines()] == [set(line.split()) for line in gold]


def test_the_heads_that_link_as_the_text_does_are_kept_and_used(regard, run, corpus, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run, model)
    files = "--source", corpus / "test.digits", "--target", corpus / "test.words"
    before = regard("align", "--checkpoint", model, *files)
    chosen = regard("align", "--checkpoint", model, *files, "--choose")
    assert chosen.exit_code == 0
    assert chosen.stdout == ""
    assert re.search(r"at the step that says a word: alignment error rate [\d.]+% .* kept in", chosen.stderr)
    kept = json.loads((model / "alignment.json").read_text())
    assert (kept["layer"], kept["head"], kept["step"]) == (None, None, "says")  # of a recurrent translator
    assert regard("align", "--checkpoint", model, *files).stdout == before.stdout
    (model / "alignment.json").write_text(json.dumps(kept | {"step": "reads"}))
    assert regard("align", "--checkpoint", model, *files).stdout != before.stdout
    (model / "alignment.json").write_text("{")
    damaged = regard("align", "--checkpoint", model, *files)
    assert damaged.exit_code == 2
    assert "alignment.json cannot be read" in damaged.stderr


def test_both_directions_are_joined(regard, run, corpus):
    files = "--source", corpus / "test.digits", "--target", corpus / "test.words"
    forth = regard("align", "--checkpoint", run, *files).stdout.splitlines()
    swapped = "--source", corpus / "test.words", "--target", corpus / "test.digits"
    back = regard("align", "--checkpoint", run, *swapped).stdout.splitlines()
    both = regard("align", "--checkpoint", run, "--reverse", run, *files)
    assert both.exit_code == 0
    for one, other, joined in zip(forth, back, both.stdout.splitlines(), strict=True):
        turned = {"-".join(link.split("-")[::-1]) for link in other.split()}
        assert turned & set(one.split()) <= set(joined.split()) <= turned | set(one.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--choose"], "--choose is about the attention of a translator: add --checkpoint FOLDER"),
        (["--teach", "x"], "--teach is about the attention of a translator"),
        (["--checkpoint", "x", "--choose", "--teach", "y"], "prints no links: leave --choose out"),
        (["--checkpoint", "x", "--reverse", "z", "--teach", "y"], "prints no links: leave --reverse out"),
        (["--layer", "0"], "--layer is about the attention of a translator"),
        (["--checkpoint", "x", "--also", "a", "b"], "a translator has learned: leave it out"),
        (["--checkpoint", "x", "--choose", "--head", "1"], "by itself: leave --head out"),
    ],
)
def test_options_without_effect_are_refused(regard, text, options, message):
    result = regard("align", "--source", text / "source", "--target", text / "target", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_gold_of_other_pairs_is_refused(regard, text):
    (text / "gold").write_text("0-0\n")
    result = regard("align", "--source", text / "source", "--target", text / "target", "--gold", text / "gold")
    assert result.exit_code == 2
    assert "has the links of 1 pairs, and there are 400" in result.stderr


def test_a_head_is_taught_and_the_translator_written(regard, run, text, tmp_path):
    (tmp_path / "few.en").write_text("I am tired.\nThe house is old.\nMy dog is old.\n")
    (tmp_path / "few.fr").write_text("Je suis fatigué.\nLa maison est vieille.\nMon chien est vieux.\n")
    model, files = tmp_path / "taught", ("--source", tmp_path / "few.en", "--target", tmp_path / "few.fr")
    options = "--checkpoint", ENGLISH_FRENCH, "--layer", "1", "--head", "2", "--updates", "2"
    result = regard("align", *files, *options, "--teach", model)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert re.fullmatch(
        r"layer 1, head 2, taught by 3 pairs: alignment error rate [\d.]+% against the links that the text teaches, of "
        r"the first 3\n",
        result.stderr,
    )
    kept = json.loads((model / "alignment.json").read_text())
    assert (kept["layer"], kept["head"], kept["step"]) == (1, 2, "says")
    assert regard("align", *files, "--checkpoint", model).exit_code == 0
    again = regard("align", *files, *options, "--teach", model)
    assert again.exit_code == 2
    assert "is not empty, and what it holds would be mixed up: name another folder" in again.stderr
    recurrent = regard("align", *files, "--checkpoint", run, "--teach", tmp_path / "other")
    assert recurrent.exit_code == 2
    assert "is no Transformer, and has no head that could be taught" in recurrent.stderr
    assert not (tmp_path / "other").exists()
