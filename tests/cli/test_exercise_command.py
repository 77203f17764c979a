import pytest

from regard_doctor.code_explanation import explanation


@pytest.mark.parametrize(("language", "title"), [("en", "Scaled dot-product"), ("ko", "스케일드 닷 프로덕트")])
def test_an_exercise_is_listed_written_filled_in_and_checked(regard, tmp_path, language, title):
    listed = regard("exercise", "list", "--lang", language)
    assert f"scaled-dot-product: {title}" in listed.stdout
    path = tmp_path / "answer.py"
    assert regard("exercise", "write", "scaled-dot-product", path, "--lang", language).stdout == f"{path}\n"
    holes = regard("exercise", "check", path, "--lang", language)
    assert holes.exit_code == 1
    assert ("line 14" if language == "en" else "14행") in holes.stdout
    text = path.read_text("utf-8")
    for hole in ("query @ key.mT", "scores.softmax(dim=-1)", "weights @ value"):
        text = text.replace("...  #", f"{hole}  #", 1)
    path.write_text(text, encoding="utf-8")
    wrong = regard("exercise", "check", path, "--lang", language)
    assert wrong.exit_code == 1
    means = {"en": "scores of queries and keys are not divided", "ko": explanation("ATT101", "ko").summary}
    assert f"ATT101 {means[language]}" in wrong.stdout
    path.write_text(text.replace("query @ key.mT", "query @ key.mT / query.shape[-1] ** 0.5"), encoding="utf-8")
    right = regard("exercise", "check", path, "--lang", language)
    assert right.exit_code == 0
    assert ("right" if language == "en" else "맞았습니다") in right.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["write", "multihead"], "no coding exercise 'multihead'; did you mean 'multi-head'?"),
        (["write", "cache", "cache.txt"], "an exercise is a Python file; cache.txt does not end in .py"),
        (["check", "nowhere.py"], "nowhere.py cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_of_an_exercise_is_one_message(regard, arguments, message):
    result = regard("exercise", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("regard: ")
    assert message in result.stderr
