"""`regard advise`."""

import json


def test_it_prints_candidates_and_a_recommendation(regard):
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
        (["--format", "xml"], "there is no format 'xml': text or json"),
        (["--model", "nowhere"], "cannot read nowhere"),
    ):
        done = regard("advise", *words)
        assert done.exit_code == 2
        assert message in done.stderr
