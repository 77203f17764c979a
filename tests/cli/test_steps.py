import csv
import json

import pytest


def test_a_korean_sentence_is_translated_by_luongs_decoder(regard):
    result = regard("steps", "나는 학생이다.", "--lang", "ko", "--word", 4)
    assert result.exit_code == 0
    assert result.stderr == ""
    titles = [
        line.split("    ")[0] for line in result.stdout.splitlines() if line[:2] in ("1.", "2.", "4.", "5.", "6.")
    ]
    assert titles == [
        "1. 어텐션 점수(스코어)",
        "2. 어텐션 가중치(어텐션 분포): 행마다 소프트맥스",
        "4. 연결",
        "5. 어텐셔널 은닉 상태 s̃_t",
        "6. 예측: 가장 확률이 높은 다음 단어",
    ]
    assert "student" in result.stdout.splitlines()[-2]


def test_the_additive_score_is_bahdanaus(regard):
    result = regard("steps", "나는 학생이다.", "--score", "additive", "--format", "markdown")
    assert result.exit_code == 0
    assert r"\tanh(W q_i + U k_j)" in result.stdout


def test_what_if_marks_what_changes_and_says_the_next_words(regard):
    result = regard("steps", "I am tired.", "--word", 3, "--head", 2, "--what-if", "add=1:4", "--what-if", "scale=1")
    assert result.exit_code == 0
    assert "* changed" in result.stdout.splitlines()[0]
    trained, changed = result.stderr.splitlines()
    assert trained.startswith("as trained: the next word is ")
    assert changed.startswith("changed: the next word is ")


def test_all_heads_have_a_row_each(regard):
    result = regard("steps", "I am tired.", "--score", "multi_head", "--word", 3, "--format", "json")
    assert result.exit_code == 0
    tables = {table["key"]: table for table in json.loads(result.stdout)["tables"]}
    assert tables["weights"]["rows"] == [f"head{head}" for head in range(1, 7)]
    assert tables["context"]["title"]["en"] == "4. Context"


def test_letters_that_the_translator_does_not_know_are_said(regard):
    result = regard("steps", "나는 Zoë이다")
    assert result.exit_code == 0
    assert result.stderr.startswith("the source vocabulary does not know ")


def test_a_page_is_written(regard, tmp_path):
    result = regard("steps", "--example", "luong-dot", "--html", tmp_path / "steps.html", "--lang", "ko")
    assert result.stdout == f"{tmp_path / 'steps.html'}\n"
    assert "40 computed walkthroughs" in result.stderr
    assert "루옹 어텐션" in (tmp_path / "steps.html").read_text("utf-8")


def test_a_page_is_served(regard, monkeypatch):
    pytest.importorskip("uvicorn")
    from regard.explorer.steps_server import StepsServer

    monkeypatch.setattr(StepsServer, "run", lambda self, ready: (ready(), self.close()))
    result = regard(
        "steps", "나는 학생이다", "--serve", "--no-open", "--word", 4, "--what-if", "flip=2", "--lang", "ko"
    )
    assert result.exit_code == 0
    assert result.stdout.startswith("http://127.0.0.1:")
    assert result.stdout.endswith("&word=4&change=flip%3D2\n")
    assert regard("steps", "--serve", "--no-open").stdout.count("mechanism=dot&sentence=") == 1


def test_another_run_and_json(regard, run):
    result = regard("steps", "1 2", "--checkpoint", run, "--format", "json")
    assert result.exit_code == 0
    tables = {table["key"]: table for table in json.loads(result.stdout)["tables"]}
    assert tables["prediction"]["columns"][0] == "eins"
    assert tables["weights"]["columns"] == ["1", "2"]


def test_examples_are_listed_and_printed(regard):
    assert "luong-dot: Dot attention (Luong et al. 2015)" in regard("steps", "--example", "list").stdout
    changed = regard(
        "steps", "--example", "scaled-dot-product", "--word", 2, "--what-if", "scale=1", "--what-if", "flip=1"
    )
    assert "  q2      0*  0.119*  0.881*   1\n" in changed.stdout
    result = regard("steps", "--example", "luong-dot", "--format", "csv")
    assert ["s1", "1", "0", "2"] in list(csv.reader(result.stdout.splitlines()))


def test_a_sheet_is_written(regard, tmp_path):
    result = regard("steps", "--sheet", tmp_path / "sheet.html", "--seed", 3, "--lang", "ko")
    assert result.stdout == f"{tmp_path / 'sheet.html'}\n"
    assert "정답" in (tmp_path / "sheet.html").read_text("utf-8")


def test_a_class_is_marked(regard, tmp_path):
    """A student who does not divide by √4 and one who does not start: text, a row for each cell, and counts."""
    written = regard("steps", "--sheet", tmp_path / "class.csv", "--students", 2, "--topic", "scaled-dot-product")
    assert written.stdout.split() == [str(tmp_path / f"class-{name}.csv") for name in ("1", "2", "answers")]
    answers = (tmp_path / "class-answers.csv").read_text("utf-8-sig").splitlines()
    first = answers[: next(at for at, line in enumerate(answers[1:], 1) if line.startswith("Attention by hand"))]
    scores = next(at for at, line in enumerate(first) if line.startswith("Attention scores"))
    scaled = next(at for at, line in enumerate(first) if line.startswith("Scores times the scale"))
    first[scaled + 2 : scaled + 5] = first[scores + 2 : scores + 5]
    (tmp_path / "class-1.csv").write_text("\n".join(first), "utf-8")
    text = regard("steps", "--check", tmp_path, "--lang", "ko")
    assert text.exit_code == 0
    assert "짐작되는 실수: 점수를 √d로 나누지 않았습니다." in text.stdout
    counts = json.loads(regard("steps", "--check", tmp_path, "--format", "json").stdout)
    assert [(one["student"], one["right"] + one["wrong"], one["blank"]) for one in counts] == [(1, 42, 0), (2, 0, 42)]
    assert counts[0]["exercises"][0]["first_wrong"] == "scaled_scores"
    table = csv.DictReader(regard("steps", "--check", tmp_path / "class-1.csv", "--format", "csv").stdout.splitlines())
    assert {row["table"] for row in table if row["mark"] == "wrong"} == {"scaled_scores"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing was given; it needs one of a sentence, --example NAME, --sheet FILE and --check"),
        (["나", "--example", "local"], "SENTENCE and --example was given; it needs one"),
        (["나", "--score", "dott"], "score is 'dott'; the translators that regard comes with have 'additive', 'dot', "),
        (
            ["I am.", "--what-if", "mask=1"],
            "'mask=1' is no change; it needs score=NAME, scale=NUMBER, flip=KEY",
        ),
        (["I am.", "--what-if", "add=1"], "'add=1' is no change"),
        (["I am.", "--what-if", "flip=9"], "there are 1 queries and 3 keys"),
        (["I am.", "--layer", "7"], "layer is 7; there are 3, 0 to 2"),
        (["I am.", "--word", "99"], "there is no such word"),
        (["--example", "linear", "--what-if", "flip=1"], "'linear' has no flip to change; it takes drop"),
        (["--example", "flash", "--word", 3, "--what-if", "flip=1"], "query 3 is not there: the worked example has 2"),
        (["--example", "bahdanaw"], "no worked example 'bahdanaw'; did you mean 'bahdanau'"),
        (["I am " * 30], "steps are printed for at most 24"),
        (["--sheet", "sheet.docx"], "written as .html or .csv"),
        (["I am tired.", "--score", "additive"], "has no Korean letters, and the translator with the score 'additive'"),
        (
            ["나는 학생이다", "--score", "scaled_dot"],
            "has Korean letters, and the translator with the score 'scaled_dot'",
        ),
        (
            ["나는 학생이다", "--kind", "self"],
            "one attention of one head, to the source: leave kind, layer and head out",
        ),
        (
            ["I am.", "--score", "multi_head", "--head", "2"],
            "prints all heads, and --head 2 names one: leave --head out",
        ),
        (["I am.", "--port", "8000"], "--port is about a server, and nothing is served: add --serve"),
        (["I am.", "--serve", "--html", "a.html"], "--serve shows the page and --html writes it: leave one of them"),
        (["--sheet", "a.html", "--topic", "multihead"], "no worked example 'multihead'; did you mean 'multi-head'?"),
        (["--sheet", "a.html", "--topic", ","], "topics is empty; a sheet needs one at least"),
        (["--sheet", "a.html", "--topic", "flash,flash"], "the topic 'flash' is named twice"),
        (["--sheet", "a.html", "--students", "1001"], "students is 1001; a class has 1 to 1000"),
        (["나", "--topic", "flash"], "--topic was given without --sheet, and it is about the numbers of --sheet FILE"),
        (["--check", "a.csv", "--seed", "2"], "and a sheet says itself which seed and topics it has: leave --seed out"),
        (["--check", "a.csv", "--students", "2"], "leave --students out"),
        (["--check", "a.csv", "--html", "b.html"], "--check marks a sheet for paper, which is no page of --html"),
        (["--check", "a.csv", "--format", "html"], "--check prints text, csv or json, and --format html was given"),
        (["--check", "nowhere.csv"], "nowhere.csv cannot be read: No such file or directory"),
        (["--sheet", "a.html", "--serve"], "--sheet writes a sheet for paper, which is no page of --serve"),
        (["I am.", "--html", "nowhere/a.html"], "the folder nowhere does not exist; make it first"),
        (["I am.", "--serve", "--word", "99"], "there is no such word"),
    ],
)
def test_a_mistake_is_one_message(regard, arguments, message):
    result = regard("steps", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("regard: ")
    assert message in result.stderr


def test_score_and_checkpoint_exclude_each_other(regard, run):
    result = regard("steps", "1", "--score", "dot", "--checkpoint", run)
    assert result.exit_code == 2
    assert "leave one of them out" in result.stderr
