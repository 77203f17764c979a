"""Every command that takes a translator takes the folder of a student of Bergamot."""

from __future__ import annotations

import json

import pytest
from bergamot_folders import CONFIG, write_student
from marian_folders import SENTENCES
from run_commands import regard

from regard.translation.translator import Translator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    write_student(folder)
    (folder / "source").write_text("".join(f"{line}\n" for line in SENTENCES[:3]), encoding="utf-8")
    (folder / "target").write_text("".join(f"{line}\n" for line in SENTENCES[1:4]), encoding="utf-8")
    return folder


def test_translate(folder, tmp_path):
    translator = Translator.from_marian(folder)
    said = regard("translate", "--checkpoint", folder, *SENTENCES[:2]).stdout.splitlines()
    assert said == [one.text for one in translator.translate(SENTENCES[:2])]
    wide = translator.search.model_copy(update={"beam": 3})
    said = regard("translate", "--checkpoint", folder, "--beam", 3, SENTENCES[0]).stdout.splitlines()
    assert said == [one.text for one in translator.translate(SENTENCES[:1], search=wide)]
    ranked = regard("translate", "--checkpoint", folder, "--n-best", 4, SENTENCES[0]).stdout.splitlines()
    assert [line.split(" ||| ")[0] for line in ranked] == ["0"] * 4
    regard("translate", "--checkpoint", folder, "--attention", tmp_path / "map.npz", SENTENCES[0])
    (said,) = regard("translate", "--checkpoint", folder, "--int8", SENTENCES[0]).stdout.splitlines()
    translator.quantize()
    assert [said] == [one.text for one in translator.translate(SENTENCES[:1])]


def test_test(folder, tmp_path):
    files = ("--source", folder / "source", "--target", folder / "target")
    result = regard("test", "--checkpoint", folder, *files, "--output", tmp_path / "said")
    assert "BLEU" in result.stdout
    assert len((tmp_path / "said").read_text("utf-8").splitlines()) == 3
    message = regard("test", "--checkpoint", folder, code=2).stderr
    assert "has no data.test; name two files with --source and --target" in message
    message = regard("test", "--checkpoint", folder, *files, "--set", "search.beam=2", code=2).stderr
    assert "--set search.beam=2 is of an experiment, and this model has none: leave it out" in message


def test_align(folder, tmp_path):
    files = ("--source", folder / "source", "--target", folder / "target")
    result = regard("align", "--checkpoint", folder, *files)
    links = [[tuple(map(int, link.split("-"))) for link in line.split()] for line in result.stdout.splitlines()]
    for line, source, target in zip(links, SENTENCES[:3], SENTENCES[1:4], strict=True):
        assert {word for _, word in line} == set(range(len(target.split())))
        assert max(word for word, _ in line) < len(source.split())
    message = regard("align", "--checkpoint", folder, *files, "--teach", tmp_path / "taught", code=2).stderr
    assert "files of Marian are read alone: teach a model of transformers" in message


def test_explore_shows_the_encoder_and_what_the_decoder_attends_to(folder, tmp_path):
    page = tmp_path / "page.html"
    regard("explore", "--translate", "--checkpoint", folder, "--html", page, SENTENCES[0])
    text = page.read_text("utf-8")
    assert "decoder.blocks.1.cross_attention" in text
    assert "encoder.blocks.1.attention" in text
    assert "decoder.blocks.1.attention" not in text


def test_steps(folder, tmp_path):
    for kind in ("cross", "encoder"):
        shown = regard("steps", "I am not.", "--checkpoint", folder, "--kind", kind, "--format", "json")
        tables = {table["key"]: table for table in json.loads(shown.stdout)["tables"]}
        assert tables["prediction"]["rows"] == ["P(y1)"]
        assert tables["source_embedding"]["rows"][-1] == "</s>"
    translator = Translator.from_marian(folder)
    [said] = translator.translate(["I am not."])
    for number, token in enumerate(
        said.candidates[0].tokens[:3], start=1
    ):  # the best listed word is the one that is said
        shown = regard("steps", "I am not.", "--checkpoint", folder, "--word", number, "--format", "json")
        prediction = next(table for table in json.loads(shown.stdout)["tables"] if table["key"] == "prediction")
        assert prediction["columns"][0].lstrip("-") == token.lstrip("▁")
    message = regard("steps", "I am not.", "--checkpoint", folder, "--kind", "self", code=2).stderr
    assert "this decoder has an SSRU, a recurrent layer, and no attention to its own words" in message
    regard("steps", "I am not.", "--checkpoint", folder, "--html", tmp_path / "steps.html")


def test_what_a_folder_may_lack(folder, tmp_path):
    (tmp_path / "config.intgemm8bitalpha.yml").write_text(CONFIG)
    message = regard("translate", "--checkpoint", tmp_path, "Hello.", code=2).stderr
    assert "cannot read" in message
    assert "model.intgemm.alphas.bin: No such file or directory" in message
