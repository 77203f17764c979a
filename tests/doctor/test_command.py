"""`regard doctor`: options, formats and exit codes."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from regard.doctor import RULES
from regard_command.app import app
from regard_doctor.code_explanation import explanation
from regard_doctor.run_explanations import run_text

WRONG = "def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v\n"
CLEAN = "def f(q, k, v):\n    return q\n"


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "clean.py").write_text(CLEAN)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def settings(tmp_path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.regard.doctor]\n{text}\n")


def test_findings_are_lines_as_of_ruff(doctor):
    result = doctor("wrong.py", "--min-severity", "error")
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert re.fullmatch(r"wrong\.py:2:12: ATT111 softmax over axis -2, .*", line)
    assert result.stderr == "1 error in 1 file; `regard doctor --explain ATT111` explains a code\n"


def test_options_before_its_name_change_nothing(doctor):
    told = CliRunner().invoke(app, ["--debug", "doctor", "--select", "ATT111", "--format=json", "wrong.py"])
    assert (told.exit_code, told.stdout) == (1, doctor("wrong.py", "--format", "json", "--select", "ATT111").stdout)
    assert "--baseline FILE" in doctor("--help").stdout


def test_without_its_package_the_command_says_where_it_is_to_be_had(doctor, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("regard_doctor", "regard.doctor"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "regard_doctor", None)
    result = doctor("wrong.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'regard-doctor', which is not installed; pip install regard-doctor" in result.stderr


def test_nothing_found(doctor):
    result = doctor("clean.py")
    said = "nothing found in 1 file; --min-severity warning, or hint, shows more\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", said)


def test_errors_alone_are_reported_unless_more_is_asked_for(doctor, tmp_path):
    (tmp_path / "wrong.py").write_text("def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-1) @ v\n")
    assert doctor("wrong.py").exit_code == 0
    for options in (["--min-severity", "hint"], ["--select", "ATT9"]):
        result = doctor("wrong.py", *options)
        assert (result.exit_code, "ATT9" in result.stdout, "shows more" in result.stderr) == (1, True, False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch\n{% if causal %}\nsoftmax = 1\n{% endif %}\n", "it is a template"),
        ("from {{ package }} import softmax\n", "it is a template"),
        ("def f():\n    print 'softmax'\n", "it is written for another version of Python"),
        ("try:\n    softmax()\nexcept A, e:\n    raise\n", "it is written for another version of Python"),
    ],
)
def test_a_file_that_is_no_python_of_this_version_is_a_note(doctor, tmp_path, text, reason):
    (tmp_path / "other.py").write_text(text)
    result = doctor("other.py")
    assert result.exit_code == 0
    assert f"ATT000 the file is not analyzed: {reason}" in result.stdout


def test_a_file_with_an_error_of_syntax_is_an_error(doctor, tmp_path):
    (tmp_path / "broken.py").write_text("softmax = (1,\ndef f():\n")
    result = doctor("broken.py")
    assert (result.exit_code, "ATT000 the file does not parse" in result.stdout) == (2, True)


def test_nothing_to_read(doctor, tmp_path):
    (tmp_path / "empty").mkdir()
    result = doctor("empty")
    assert (result.exit_code, result.stderr) == (0, "nothing was read: there are no Python files\n")


def test_json(doctor):
    (finding,) = json.loads(doctor(".", "--format", "json", "--select", "ATT111").stdout)
    assert finding == {
        "path": "wrong.py",
        "line": 2,
        "column": 12,
        "code": "ATT111",
        "message": finding["message"],
        "severity": "error",
        "end_line": 2,
        "end_column": 38,
        "cell": None,
        "fixable": False,
    }
    assert json.loads(doctor("clean.py", "--format", "json").stdout) == []


def test_github(doctor):
    result = doctor(".", "--format", "github", "--select", "ATT111")
    assert re.fullmatch(
        r"::error file=wrong\.py,line=2,col=12,endLine=2,endColumn=38,title=ATT111::ATT111 softmax over .*",
        result.stdout.strip(),
    )


def test_sarif(doctor):
    log = json.loads(doctor(".", "--format", "sarif", "--select", "ATT111").stdout)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    (rule,) = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "regard doctor"
    assert rule["id"] == "ATT111"
    assert rule["shortDescription"]["text"] == RULES["ATT111"].summary
    assert rule["defaultConfiguration"] == {"level": "error"}
    assert "helpUri" not in rule  # there is no public address to invent
    assert rule["help"]["text"] == str(explanation("ATT111"))
    assert f"```py\n{RULES['ATT111'].right}\n```" in rule["help"]["markdown"]
    (result,) = run["results"]
    assert result["ruleId"] == run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"]
    assert result["level"] == "error"
    assert result["message"]["text"]
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "wrong.py"},
        "region": {"startLine": 2, "startColumn": 12, "endLine": 2, "endColumn": 38},
    }
    assert json.loads(doctor("clean.py", "--format", "sarif").stdout)["runs"][0]["results"] == []


def test_a_file_that_does_not_parse_is_reported_and_the_rest_read(doctor, tmp_path):
    (tmp_path / "broken.py").write_text("softmax = (")
    result = doctor(".", "--min-severity", "error", "--select", "ATT111")
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["broken.py", "wrong.py"]
    assert "ATT000 the file does not parse" in result.stdout


@pytest.mark.parametrize("address", ["https://docs.example/regard", "file:///regard/site/"])
def test_where_the_documentation_has_an_address_sarif_and_the_page_link_to_it(doctor, tmp_path, address):
    settings(tmp_path, f'documentation = "{address}"')
    log = json.loads(doctor(".", "--format", "sarif", "--select", "ATT111", "--html", "page.html").stdout)
    (rule,) = log["runs"][0]["tool"]["driver"]["rules"]
    assert rule["helpUri"] == f"{address.rstrip('/')}/mistakes.html#ATT111"
    if address.startswith("https"):
        assert f'<a href="{rule["helpUri"]}"' in (tmp_path / "page.html").read_text()


def test_an_unreadable_file_has_an_explanation_too(doctor, tmp_path):
    (tmp_path / "broken.py").write_text("softmax = (")
    log = json.loads(doctor("broken.py", "--format", "sarif").stdout)
    assert log["runs"][0]["tool"]["driver"]["rules"][0]["shortDescription"]["text"] == "A file cannot be read."
    assert "does not parse" in doctor("--explain", "att000").stdout


def test_select_and_ignore(doctor):
    assert doctor(".", "--select", "att1,ATT2", "--min-severity", "error").exit_code == 1
    assert doctor(".", "--select", "ATT2", "--min-severity", "error").exit_code == 0
    assert doctor(".", "--ignore", "ATT111", "--min-severity", "error").exit_code == 0


def test_settings_of_the_project(doctor, tmp_path):
    settings(tmp_path, 'ignore = ["ATT111"]\nmin-severity = "error"')
    assert doctor(".").exit_code == 0
    settings(tmp_path, 'exclude = ["wro*.py"]')
    assert doctor(".").exit_code == 0
    settings(tmp_path, 'select = ["ATT2"]')
    assert doctor(".").exit_code == 0
    settings(tmp_path, 'per-file-ignores = {"wrong.py" = ["ATT1", "ATT9"]}')
    assert doctor(".").exit_code == 0
    settings(tmp_path, 'per-file-ignores = {"other/*" = ["ATT1", "ATT9"]}')
    assert doctor(".").exit_code == 1
    assert doctor(".", "--select", "ATT111").exit_code == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ignored = []", "has the unknown key 'ignored'; did you mean 'ignore'?"),
        ('select = "ATT1"', "is 'ATT1'; it needs to be a list of strings"),
        ('select = ["ATT7"]', "unknown code 'ATT7' in [tool.regard.doctor]"),
        ('min-severity = "bad"', "unknown severity 'bad' in [tool.regard.doctor]"),
        ("per-file-ignores = 1", 'it needs to be a table such as {"tests/*" = ["ATT9"]}'),
        ('per-file-ignores = {"a" = ["ATT7"]}', "unknown code 'ATT7'"),
        ('documentation = "docs"', "is 'docs'; it needs the address of the documentation's folder"),
        ("documentation = 1", "documentation in [tool.regard.doctor]"),
        ("= 1", "is not TOML that can be read"),
    ],
)
def test_wrong_settings(doctor, tmp_path, text, message):
    settings(tmp_path, text)
    result = doctor(".")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no files or folders were named"),
        (("gone.py",), "there is no file or folder 'gone.py'"),
        ((".", "--select", "ATT7"), "unknown code 'ATT7' in --select"),
        ((".", "--ignore", "X"), "unknown code 'X' in --ignore"),
        (("--explain", "ATT7"), "unknown code 'ATT7'"),
        ((".", "--format", "xml"), "'xml' is not one of"),
    ],
)
def test_wrong_arguments(doctor, arguments, message):
    result = doctor(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(("code", "has_examples"), [("RUN101", True), ("run114", False)])
def test_a_code_of_a_running_model_is_explained(doctor, code, has_examples):
    result = doctor("--explain", code)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{code.upper()} (")
    assert ("Wrong:" in result.stdout) is has_examples
    assert f"Source: {run_text(code.upper()).source}" in result.stdout


@pytest.mark.parametrize("code", ["ATT101", "att111"])
def test_a_code_is_explained(doctor, code):
    result = doctor("--explain", code)
    rule = RULES[code.upper()]
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{rule.code} (error): {rule.summary}")
    assert all(part in result.stdout for part in ("Wrong:", "Right:", f"Source: {rule.source}"))
    assert result.stdout.rstrip().endswith(f"In the documentation: mistakes.html#{rule.code}")


def test_a_baseline_leaves_out_what_is_known_though_its_lines_move(doctor, tmp_path):
    assert doctor("wrong.py", "--write-baseline", "known.json").exit_code == 0
    (tmp_path / "wrong.py").write_text("import torch\n\n\n" + WRONG)
    assert doctor("wrong.py", "--baseline", "known.json").exit_code == 0
    (tmp_path / "wrong.py").write_text(WRONG + WRONG.replace("def f", "def g"))
    result = doctor("wrong.py", "--baseline", "known.json")
    assert (result.exit_code, len(result.stdout.splitlines()), "wrong.py:4:12: ATT111" in result.stdout) == (1, 1, True)


def test_a_baseline_that_is_written_anew_knows_what_the_old_one_knew(doctor):
    doctor("wrong.py", "--write-baseline", "known.json")
    assert doctor("wrong.py", "--baseline", "known.json", "--write-baseline", "known.json").exit_code == 0
    assert doctor("wrong.py", "--baseline", "known.json").exit_code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the baseline known.json cannot be read: No such file or directory; `--write-baseline` writes one"),
        ("{", "the baseline known.json is not JSON: "),
        (
            '{"version": 9}',
            "the baseline known.json has version 9; this doctor reads 1; `--write-baseline` writes",
        ),
        ("[]", "the baseline known.json has version None; this doctor reads 1"),
        ('{"version": 1, "known": [{}]}', "the baseline known.json has an entry that is none (KeyError('path'))"),
    ],
)
def test_a_file_that_is_no_baseline(doctor, tmp_path, text, message):
    if text is not None:
        (tmp_path / "known.json").write_text(text)
    result = doctor("wrong.py", "--baseline", "known.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_an_unknown_code_in_a_comment_is_named_and_the_rest_goes_on(doctor, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG.replace("@ v\n", "@ v  # regard: ignore[ATT11] a reason\n"))
    result = doctor("wrong.py")
    assert result.exit_code == 2
    assert "ATT000 a comment ignores the unknown code 'ATT11'; did you mean 'ATT" in result.stdout
    assert "ATT111 softmax over axis -2" in result.stdout


def test_a_comment_may_give_its_reason(doctor, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG.replace("@ v\n", "@ v  # regard: ignore[ATT111] of queries on purpose\n"))
    assert doctor("wrong.py").exit_code == 0


def test_files_of_another_framework_are_counted(doctor, tmp_path):
    (tmp_path / "model.py").write_text("import paddle\nweights = paddle.nn.functional.softmax(scores, axis=-2)\n")
    assert "nothing found in 1 file; 1 file uses paddle: not analyzed; " in doctor("model.py").stderr


def test_what_cannot_be_read_is_one_line_each_and_the_rest_is_read(doctor, tmp_path):
    (tmp_path / "lesson.ipynb").write_text("softmax {")
    (tmp_path / "latin.py").write_bytes(b"softmax = '\xe4'\n")
    (tmp_path / "named.py").write_text("softmax = 1  # regard: ignore[ATT11] no such code\n")
    (tmp_path / "wrong.py").write_text("def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v\n")
    result = doctor(".")
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    for line, message in zip(
        lines,
        [
            "latin.py:1:1: ATT000 the file is not text in UTF-8 or in the encoding that it declares: ",
            "lesson.ipynb:1:1: ATT000 the file is no notebook: it is not JSON",
            "named.py:1:1: ATT000 a comment ignores the unknown code 'ATT11'; did you mean 'ATT",
            "wrong.py:2:12: ATT111 softmax over axis -2",
        ],
        strict=True,
    ):
        assert line.startswith(message)


def test_a_code_is_explained_in_korean(doctor):
    """Text and labels; examples and the source are those of the English one."""
    english, korean = (doctor("--explain", "ATT201", "--lang", language) for language in ("en", "ko"))
    assert english.stdout == doctor("--explain", "ATT201").stdout
    assert korean.stdout.startswith("ATT201 (error): 인과 마스크가 미래 대신 과거를 가립니다.\n")
    assert "\n\n틀린 예:\n\n" in korean.stdout
    assert korean.stdout.endswith("문서: ko/mistakes.html#ATT201\n")
    code = [line for line in english.stdout.splitlines() if line.startswith("    ")]
    assert [line for line in korean.stdout.splitlines() if line.startswith("    ")] == code
    wrong = doctor("--explain", "ATT201", "--lang", "fr")
    assert wrong.exit_code == 2
    assert "'fr' is not one of" in wrong.stderr


def test_a_rule_without_korean_is_explained_in_english(doctor, monkeypatch):
    monkeypatch.setattr("regard_doctor.code_explanation.texts_in", lambda path: {})
    assert doctor("--explain", "ATT201", "--lang", "ko").stdout == doctor("--explain", "ATT201").stdout
