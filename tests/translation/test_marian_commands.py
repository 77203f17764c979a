"""Every command that takes a translator takes the folder of a Marian model."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from marian_folders import SENTENCES, write_folder
from run_commands import regard
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import MarianMTModel, PreTrainedTokenizerFast

from regard.translation.translator import Translator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian")
    write_folder(folder, generation={"num_beams": 2, "max_length": 12})
    (folder / "source").write_text("".join(f"{line}\n" for line in SENTENCES[:3]), encoding="utf-8")
    (folder / "target").write_text("".join(f"{line}\n" for line in SENTENCES[1:4]), encoding="utf-8")
    return folder


def test_translate(folder):
    translator = Translator.from_huggingface(folder)
    said = regard("translate", "--checkpoint", folder, *SENTENCES[:2]).stdout.splitlines()
    assert said == [one.text for one in translator.translate(SENTENCES[:2])]
    greedy = translator.search.model_copy(update={"beam": 1})
    said = regard("translate", "--checkpoint", folder, "--beam", 1, SENTENCES[0]).stdout.splitlines()
    assert said == [one.text for one in translator.translate(SENTENCES[:1], search=greedy)]
    ranked = regard("translate", "--checkpoint", folder, "--n-best", 4, SENTENCES[0]).stdout.splitlines()
    assert [line.split(" ||| ")[0] for line in ranked] == ["0"] * 4


def test_test(folder, tmp_path):
    files = ("--source", folder / "source", "--target", folder / "target")
    result = regard("test", "--checkpoint", folder, *files, "--output", tmp_path / "said")
    assert re.search(r"BLEU", result.stdout)
    assert len((tmp_path / "said").read_text("utf-8").splitlines()) == 3
    message = regard("test", "--checkpoint", folder, code=2).stderr
    assert "has no data.test; name two files with --source and --target" in message
    message = regard("test", "--checkpoint", folder, *files, "--set", "search.beam=2", code=2).stderr
    assert "--set search.beam=2 is of an experiment" in message


def test_align(folder):
    result = regard("align", "--checkpoint", folder, "--source", folder / "source", "--target", folder / "target")
    links = [[tuple(map(int, link.split("-"))) for link in line.split()] for line in result.stdout.splitlines()]
    for line, source, target in zip(links, SENTENCES[:3], SENTENCES[1:4], strict=True):
        assert {word for _, word in line} == set(range(len(target.split())))
        assert max(word for word, _ in line) < len(source.split())


def test_explore(folder, tmp_path):
    page = tmp_path / "page.html"
    regard("explore", "--translate", "--checkpoint", folder, "--html", page, SENTENCES[0])
    assert "quick" in page.read_text("utf-8")


def test_steps(folder):
    for kind in ("cross", "self", "encoder"):
        shown = regard("steps", "I am not.", "--checkpoint", folder, "--kind", kind, "--format", "json")
        tables = {table["key"]: table for table in json.loads(shown.stdout)["tables"]}
        assert tables["prediction"]["rows"] == ["P(y1)"]
        assert tables["source_embedding"]["rows"][-1] == "</s>"


def test_a_text_model_stays_within_its_positions(folder, tmp_path):
    """`explore --model` lets transformers generate, which would go on beyond the table of positions."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    size = MarianMTModel.from_pretrained(copy).config.vocab_size
    tokenizer = Tokenizer(WordLevel({**{word: 2 + i for i, word in enumerate(["the", "dog"])}, "<unk>": 1}, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.add_tokens([f"t{i}" for i in range(size)])
    fast.save_pretrained(copy)
    (tmp_path / "text").write_text("the dog " * 9, encoding="utf-8")
    regard("explore", "--model", copy, "--text", tmp_path / "text", "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()
    (tmp_path / "text").write_text("the dog " * 30, encoding="utf-8")
    message = regard("explore", "--model", copy, "--text", tmp_path / "text", "--html", tmp_path / "page", code=2)
    assert "the text has 60 tokens, and the model takes 48" in message.stderr
