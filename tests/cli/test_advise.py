"""`regard advise`."""

import json

from regard.kernels.planning.rates import ZEN_4


def test_it_prints_candidates_and_a_recommendation(regard, priced_as):
    priced_as(ZEN_4, "avx512")
    done = regard("advise", "--tokens", "131072", "--task", "decode", "--memory", "16GB")
    assert done.exit_code == 0
    assert "-> grouped-query, 4 key heads: 8 query heads share a key head" in done.stdout


def test_it_prints_json(regard):
    done = regard("advise", "--tokens", "64", "--layers", "2", "--heads", "2", "--head-dim", "16", "--format", "json")
    assert json.loads(done.stdout)["workload"]["heads"] == 2


def test_the_table_of_textbook_rules(regard):
    done = regard("advise", "--table")
    assert "more than 32,000 tokens: flash kernels" in done.stdout
    assert len(json.loads(regard("advise", "--table", "--format", "json").stdout)) == 8


def test_wrong_settings_end_with_code_2(regard):
    for words, message in (
        (["--task", "serve"], "there is no task 'serve'"),
        (["--memory", "lots"], "memory 'lots' is not a size above 0"),
        (["--memory", "16"], "memory '16' has no unit, and would be 16 bytes: write it as 16GB, or 16B for bytes"),
        (["--task", "decoding"], "there is no task 'decoding'; did you mean 'decode'?"),
        (["--tokens", "128k"], "tokens is '128k': write the number out, 128000 or 131072"),
        (["--tokens", "many"], "tokens needs a whole number, such as 131072; it is 'many'"),
        (["--tokens", "-5"], "tokens is -5; it needs at least 1"),
        (["--format", "xml"], "there is no format 'xml': text or json"),
        (["--model", "nowhere"], "cannot read nowhere"),
    ):
        done = regard("advise", *words)
        assert done.exit_code == 2
        assert message in done.stderr


def test_a_number_may_have_separators(regard):
    small = "--layers", "1", "--heads", "2", "--head-dim", "16", "--format", "json"
    for text in ("2048", "2,048", "2_048"):
        assert json.loads(regard("advise", "--tokens", text, *small).stdout)["workload"]["tokens"] == 2048


def test_a_model_brings_its_own_settings(regard, tmp_path):
    settings = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "torch_dtype": "float32"}))
    workload = json.loads(regard("advise", "--model", str(tmp_path), "--format", "json").stdout)["workload"]
    assert (workload["architecture"], workload["dtype"], workload["heads"]) == ("encoder", "float32", 2)
    done = regard("advise", "--model", str(tmp_path), "--heads", "8")
    assert done.exit_code == 2
    assert "heads is 8, but the model has 2" in done.stderr


def test_the_table_of_textbook_rules_in_korean(regard):
    english, korean = (regard("advise", "--table", "--lang", language).stdout.splitlines() for language in ("en", "ko"))
    assert len(english) == len(korean) == 16
    for before, after in zip(english[1::2], korean[1::2], strict=True):
        assert before.strip().startswith("holds here") == after.strip().startswith("여기서도 맞음")
    assert korean[0] == "표준 트랜스포머: 스케일드 닷 프로덕트, 멀티 헤드"
    refused = regard("advise", "--lang", "ko")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--lang is the language of --table: add --table, or leave --lang out" in refused.stderr
