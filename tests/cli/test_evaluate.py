import json
import re
import shutil
import sys

import pytest
from typer.testing import CliRunner

from regard.translation import translator
from regard.translation.search import beam_search
from regard_command.app import app


def test_the_test_set_is_translated_and_scored(regard, run, corpus):
    result = regard("test", "--checkpoint", run)
    assert result.exit_code == 0
    bleu, chrf = result.stdout.splitlines()
    assert re.fullmatch(r"BLEU +[\d.]+  nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:\S+", bleu)
    assert re.fullmatch(r"chrF +[\d.]+  nrefs:1\|case:mixed\|.*version:\S+", chrf)
    assert float(bleu.split()[1]) > 80
    hypotheses = (run / "test.hypotheses.txt").read_text(encoding="utf-8").splitlines()
    references = (corpus / "test.words").read_text(encoding="utf-8").splitlines()
    assert len(hypotheses) == len(references)
    assert sum(one == other for one, other in zip(hypotheses, references, strict=True)) > 24  # of 30
    assert "30 sentences in " in result.stderr
    assert str(run / "test.hypotheses.txt") in result.stderr


def test_other_files_can_be_scored_without_regard_to_case(regard, run, tmp_path):
    (tmp_path / "source").write_text("1 2 3 4\n5 6 7 8\n", encoding="utf-8")
    (tmp_path / "target").write_text("EINS ZWEI DREI VIER\nFÜNF SECHS SIEBEN ACHT\n", encoding="utf-8")
    files = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--output", tmp_path / "out.txt"]
    cased, lower = (regard("test", "--checkpoint", run, *files, *more) for more in ([], ["--lowercase"]))
    assert "BLEU  0.00  nrefs:1|case:mixed" in cased.stdout
    assert "BLEU 100.00  nrefs:1|case:lc" in lower.stdout
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "eins zwei drei vier\nfünf sechs sieben acht\n"


def test_pairs_with_an_empty_side_are_counted(regard, run, tmp_path):
    (tmp_path / "source").write_text("1\n\n3\n", encoding="utf-8")
    (tmp_path / "target").write_text("eins\nzwei\ndrei\n", encoding="utf-8")
    files = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--output", tmp_path / "out.txt"]
    result = regard("test", "--checkpoint", run, *files)
    assert "1 pairs with an empty side are left out" in result.stderr
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "eins\ndrei\n"


def test_the_search_can_be_set_and_the_model_cannot(regard, run, tmp_path):
    output = ["--output", tmp_path / "out.txt"]
    assert regard("test", "--checkpoint", run, *output, "--set", "search.beam=1").exit_code == 0
    (tmp_path / "out.txt").unlink()
    result = regard("test", "--checkpoint", run, *output, "--set", "model.hidden_dim=64")
    assert result.exit_code == 2
    assert "--set model.hidden_dim: the training has settled this; now only keys of data and search" in result.stderr
    assert not (tmp_path / "out.txt").exists()


def test_one_side_alone_is_refused(regard, run):
    for given, missing in (("--source", "--target"), ("--target", "--source")):
        result = regard("test", "--checkpoint", run, given, "some.txt")
        assert result.exit_code == 2
        assert f"{given} needs {missing} beside it" in result.stderr


def test_an_experiment_without_a_test_set_is_told_how_to_name_one(regard, run):
    result = regard("test", "--checkpoint", run, "--set", "data.test=null")
    assert result.exit_code == 2
    assert "the experiment 'digits' has no data.test; name two files with --source and --target" in result.stderr


def test_sides_that_do_not_line_up_leave_nothing_behind(regard, run, tmp_path):
    (tmp_path / "source").write_text("1\n2\n", encoding="utf-8")
    (tmp_path / "target").write_text("eins\n", encoding="utf-8")
    files = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--output", tmp_path / "out.txt"]
    result = regard("test", "--checkpoint", run, *files)
    assert result.exit_code == 2
    assert re.search(r"the sides do not line up: \S+source has 2 lines and \S+target has 1", result.stderr)
    assert not (tmp_path / "out.txt").exists()


def test_a_name_given_in_the_current_folder_is_found_there(regard, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").write_text("1\n", encoding="utf-8")
    (tmp_path / "target").write_text("eins\n", encoding="utf-8")
    result = regard("test", "--checkpoint", run, "--source", "source", "--target", "target", "--output", "out.txt")
    assert result.exit_code == 0
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "eins\n"


def test_the_tokens_of_moses_are_scored_beside_the_text(regard, run, tmp_path):
    (tmp_path / "source").write_text("1 2 3 4\n5 6 7 8\n", encoding="utf-8")
    (tmp_path / "target").write_text("EINS ZWEI DREI VIER\nFÜNF SECHS SIEBEN ACHT\n", encoding="utf-8")
    files = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--output", tmp_path / "out.txt"]
    told = [*files, "--tokenised", "--set", "data.target_language=de"]
    cased, lower = (regard("test", "--checkpoint", run, *told, *more) for more in ([], ["--lowercase"]))
    assert [line.split()[0] for line in cased.stdout.splitlines()] == ["BLEU", "chrF", "BLEU"]
    assert cased.stdout.splitlines()[2].startswith("BLEU  0.00  nrefs:1|case:mixed|eff:no|tok:moses-de|smooth:none|")
    assert lower.stdout.splitlines()[2].startswith("BLEU 100.00  nrefs:1|case:lc|eff:no|tok:moses-de|smooth:none|")


def test_tokens_need_a_language(regard, run, tmp_path):
    result = regard("test", "--checkpoint", run, "--tokenised", "--output", tmp_path / "out.txt")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--tokenised: each language has tokens of its own, and the experiment does not say which" in result.stderr
    assert not (tmp_path / "out.txt").exists()


def test_tokens_need_their_extra_before_anything_is_translated(regard, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    told = ["--tokenised", "--set", "data.target_language=de", "--output", tmp_path / "out.txt"]
    result = regard("test", "--checkpoint", run, *told)
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "needs the package 'sacremoses', which is not installed; pip install 'regard[moses]' brings it" in result.stderr
    )
    assert not (tmp_path / "out.txt").exists()


@pytest.fixture(scope="module")
def parted(corpus, tmp_path_factory):
    """A run whose test text is a part of its training text."""
    folder = tmp_path_factory.mktemp("runs") / "parted"
    options = [
        "data.validation=null",
        "data.test=null",
        "data.split={test: 25, validation: 10}",
        "training.max_epochs=1",
        "data.target_language=de",
    ]
    told = [argument for option in options for argument in ("--set", option)]
    result = CliRunner().invoke(app, ["train", str(corpus / "digits.yaml"), "--folder", str(folder), *told])
    assert result.exit_code == 0, result.stderr
    return folder


def test_what_a_split_holds_out_is_found_again(regard, parted):
    result = regard("test", "--checkpoint", parted)
    assert result.exit_code == 0, result.stderr
    assert len((parted / "test.hypotheses.txt").read_text(encoding="utf-8").splitlines()) == 25


@pytest.mark.parametrize("other", ["data.split.seed=2", "data.split.test=30", "data.split={test: 3}"])
def test_another_split_is_refused(regard, parted, other):
    result = regard("test", "--checkpoint", parted, "--set", other)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(r"--set data\.split\.\w+: the training has settled this; .* the split of the data", result.stderr)


def test_the_tokeniser_of_bleu_can_be_chosen(regard, run, tmp_path, monkeypatch):
    result = regard("test", "--checkpoint", run, "--output", tmp_path / "out", "--tokenize", "char")
    assert result.exit_code == 0
    assert "|tok:char|" in result.stdout
    monkeypatch.setattr("regard.translation.translator.Translator.load", lambda *_: pytest.fail("it was loaded"))
    result = regard("test", "--checkpoint", run, "--tokenize", "ko-mecap")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "tokenize is 'ko-mecap'; did you mean 'ko-mecab'?" in result.stderr


def test_a_model_is_calibrated_and_says_how_far_it_can_be_trusted(regard, run, corpus, tmp_path, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(run, model)
    before = regard("translate", "--checkpoint", model, "--trust", "1 2 3")
    assert before.exit_code == 2
    assert "was not calibrated, so nothing is known of how far it can be trusted" in before.stderr
    text = "--source", corpus / "train.digits", "--target", corpus / "train.words", "--output", tmp_path / "out.txt"
    searches = []
    monkeypatch.setattr(translator, "beam_search", lambda *a, **k: searches.append(a) or beam_search(*a, **k))
    calibrated = regard("test", "--checkpoint", model, *text, "--calibrate", "--batch-size", "600")
    assert calibrated.exit_code == 0
    assert len(searches) == 1  # one batch, translated once
    assert re.search(r"trust: predicted and true chrF of [\d,]+ sentences, each predicted without", calibrated.stderr)
    after = regard("translate", "--checkpoint", model, "--trust", "1 2 3")
    trust, said = after.stdout.split(" ||| ")
    assert float(trust) > 0.5
    assert said == "eins zwei drei\n"
    assert "likely to be poor" not in after.stderr
    kept = json.loads((model / "trust.json").read_text())
    (model / "trust.json").write_text(json.dumps(kept | {"weights": [0.1, 0, 0, 0, 0, 0, 0]}))
    assert (
        "line 1: the translation is likely to be poor: predicted chrF 10 of 100"
        in regard("translate", "--checkpoint", model, "1 2 3").stderr
    )
    both = regard("translate", "--checkpoint", model, "--trust", "--n-best", "2", "1 2 3")
    assert both.exit_code == 2
    assert "leave one of them out" in both.stderr


def test_few_pairs_do_not_calibrate(regard, run, tmp_path):
    (tmp_path / "source").write_text("1\n2\n", encoding="utf-8")
    (tmp_path / "target").write_text("eins\nzwei\n", encoding="utf-8")
    files = "--source", tmp_path / "source", "--target", tmp_path / "target", "--output", tmp_path / "out.txt"
    result = regard("test", "--checkpoint", run, *files, "--calibrate")
    assert result.exit_code == 2
    assert "there are 2 translations with a known one; trust needs 100 at least" in result.stderr
    assert not (run / "trust.json").exists()
    assert not (tmp_path / "out.txt").exists()


def test_a_file_that_cannot_be_written_is_refused_before_the_work(regard, run, tmp_path, monkeypatch):
    monkeypatch.setattr(translator.Translator, "translate", lambda *_, **__: pytest.fail("translated for nothing"))
    result = regard("test", "--checkpoint", run, "--output", tmp_path / "gone" / "said.txt")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "said.txt: the folder" in result.stderr
    assert "gone does not exist; make it first" in result.stderr
