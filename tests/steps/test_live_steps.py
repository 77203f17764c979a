import json
from typing import Any

import pytest

from regard.errors import ConfigurationError, CorpusError
from regard.steps import EXAMPLES, WhatIf, translation_steps
from regard.steps.example_notes import NOTES
from regard.steps.installed_mechanisms import MECHANISMS
from regard.steps.live_steps import LiveSteps, StepRequest
from regard.translation.translator import Translator


@pytest.fixture(scope="module")
def live():
    return LiveSteps()


def asked(mechanism: str, **fields: Any) -> StepRequest:
    sentence = MECHANISMS[mechanism].sentence if mechanism in MECHANISMS else ""
    return StepRequest.read({"mechanism": mechanism, "sentence": sentence, **fields})


def by_key(answer):
    return {table["key"]: table for table in answer["tables"]}


@pytest.mark.parametrize(
    ("mechanism", "titles"),
    [
        ("dot", ["어텐션 점수", "어텐션 가중치(어텐션 분포)", "문맥 벡터(어텐션 값)", "연결", "어텐셔널 은닉", "예측"]),
        ("additive", ["어텐션 점수", "어텐션 가중치", "문맥 벡터", "연결", "디코더 은닉 상태 s_t", "예측"]),
        ("scaled_dot", ["어텐션 점수", "점수 × 스케일", "어텐션 가중치", "문맥 벡터", "모든 헤드", "출력", "예측"]),
        ("multi_head", ["어텐션 점수", "점수 × 스케일", "어텐션 가중치", "문맥 벡터", "모든 헤드", "출력", "예측"]),
    ],
)
def test_the_steps_of_the_textbook_are_numbered(live, mechanism, titles):
    answer = live.answer(asked(mechanism))
    numbered = [table["title"]["ko"] for table in answer["tables"] if table["title"]["ko"][0].isdigit()]
    assert len(numbered) == len(titles)
    for number, (found, title) in enumerate(zip(numbered, titles, strict=True), start=1):
        assert found.startswith(f"{number}. {title}")
    json.dumps(answer)


def test_the_numbers_are_those_of_the_walkthrough(live):
    answer = live.answer(asked("dot", word=4, changes=["flip=2", "add=1:1.5"]))
    translator = Translator.load(MECHANISMS["dot"].folder)
    what_if = WhatIf(flip=[(3, 1)], add={(3, 0): 1.5})
    steps = translation_steps(translator, MECHANISMS["dot"].sentence, word=3, what_if=what_if)
    tables = by_key(answer)
    assert list(tables) == list(steps.keys)
    [row] = tables["prediction"]["rows"]
    shown = [cell if isinstance(cell, str) else cell[0] for cell in row["cells"]]
    assert shown == [f"{float(number):.3f}" for number in steps["prediction"].numbers[0]]
    assert tables["prediction"]["columns"] == list(steps["prediction"].columns)


def test_a_masked_word_changes_the_next_word(live):
    answer = live.answer(asked("dot", word=4, changes=["flip=2"]))
    before, after = answer["next"]
    assert before["word"] == "student" != after["word"]
    assert (answer["attended"], answer["attends"]) == ([True, True], [True, False])
    assert answer["command"] == "regard steps '나는 학생이다' --score dot --word 4 --what-if flip=2"


def test_what_can_be_changed_is_that_of_the_score(live):
    assert live.answer(asked("additive"))["scores"] == ["additive", "dot", "scaled_dot"]
    assert not live.answer(asked("additive"))["scaled"]
    assert live.answer(asked("additive", changes=["score=scaled_dot"]))["scaled"]
    answer = live.answer(asked("scaled_dot", changes=["scale=1"]))
    assert answer["scores"] == ["scaled_dot", "dot"]
    assert [title["en"] for title in answer["left_out"]] == ["2. Scores times the scale 0.177"]


def test_all_heads_have_a_row_each_and_change_together(live):
    before = live.answer(asked("multi_head", word=3))
    tables = by_key(before)
    assert [row["name"] for row in tables["weights"]["rows"]] == [f"head{head}" for head in range(1, 7)]
    for head in (0, 4):
        one = by_key(live.answer(asked("scaled_dot", word=3, head=head)))
        for key in ("query", "scores", "scaled_scores", "weights", "context"):
            assert one[key]["rows"][0]["cells"] == tables[key]["rows"][head]["cells"]
    changed = by_key(live.answer(asked("multi_head", word=3, changes=["flip=3"])))
    assert all(isinstance(row["cells"][2], list) for row in changed["weights"]["rows"])
    assert before["request"]["head"] is None
    assert before["places"]["cross"] == (3, 6)


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples_are_answered(live, name):
    answer = live.answer(asked(f"example:{name}"))
    assert answer["title"]["en"] == EXAMPLES[name].title.en
    assert ("note" in answer) == (name in NOTES)
    assert answer["command"] == f"regard steps --example {name}"
    assert any(not table["given"] for table in answer["tables"])
    json.dumps(answer)


def test_options_have_all_mechanisms_and_examples(live):
    options = live.options()
    assert [one["name"] for one in options["mechanisms"]] == list(MECHANISMS)
    assert [one["name"] for one in options["examples"]] == [f"example:{name}" for name in EXAMPLES]


def test_a_checkpoint_is_a_mechanism_of_its_own():
    live = LiveSteps(MECHANISMS["scaled_dot"].folder)
    assert live.options()["mechanisms"][0]["name"] == "checkpoint"
    request = StepRequest.read({"mechanism": "checkpoint", "sentence": "I am tired.", "head": None, "word": 3})
    answer = live.answer(request)
    assert len(by_key(answer)["weights"]["rows"]) == 6
    assert f"--checkpoint {MECHANISMS['scaled_dot'].folder}" in answer["command"]


def test_unknown_letters_are_said(live):
    answer = live.answer(StepRequest("dot", "나는 Zoë이다"))
    assert "does not know" in answer["warnings"][0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mechanism": "dot", "sentence": "I am."}, "has no Korean letters, and the translator with the score 'dot' "),
        ({"mechanism": "dott", "sentence": "나"}, "score is 'dott'; the translators that regard comes with have"),
        ({"mechanism": "checkpoint", "sentence": "나"}, "score is 'checkpoint'; the translators"),
        ({"mechanism": "example:bahdanaw"}, "no worked example 'bahdanaw'; did you mean 'bahdanau'"),
        ({"mechanism": "dot", "sentence": "나는 학생이다", "kind": "self"}, "one attention of one head, to the source"),
        ({"mechanism": "dot", "sentence": "나는 학생이다", "layer": 1}, "leave kind, layer and head out"),
        ({"mechanism": "scaled_dot", "sentence": "I am.", "kind": "selff"}, "kind is 'selff'; did you mean 'self'"),
        ({"mechanism": "scaled_dot", "sentence": "I am.", "head": 6}, "head is 6; there are 6, 0 to 5"),
        ({"mechanism": "dot", "sentence": "나는 학생이다", "word": 7}, "no such word: the translation has 6 tokens"),
        ({"mechanism": "dot", "sentence": "나는 학생이다", "changes": ["flip=3"]}, "key that is not there"),
        ({"mechanism": "dot", "sentence": "나는 학생이다", "changes": ["score=additive"]}, "has weights, and this"),
        ({"mechanism": "additive", "sentence": "나는 학생이다", "changes": ["scale=1"]}, "leave scale out"),
        ({"mechanism": "dot", "sentence": "나는 학생이다", "changes": ["add=1:nan"]}, "'add=1:nan' is no change"),
    ],
)
def test_what_cannot_be_answered_says_why(live, fields, message):
    with pytest.raises(ConfigurationError, match=message):
        live.answer(StepRequest.read(fields))


def test_a_sentence_that_is_too_long_or_empty_says_so(live):
    with pytest.raises(CorpusError, match="the sentence has 25 tokens, and steps are printed for at most 24: take a"):
        live.answer(asked("dot", sentence="나는 " * 25))
    with pytest.raises(CorpusError, match="the sentence is empty"):
        live.answer(asked("scaled_dot", sentence=" "))
    with pytest.raises(ConfigurationError, match="the sentence has 1001 characters, and at most 1000 are read"):
        asked("dot", sentence="나" * 1001)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "a request is a list; it needs to be an object of JSON"),
        ({}, "the field 'mechanism' is missing"),
        ({"mechanism": "dot", "words": 1}, "no field 'words'; did you mean 'word'"),
        ({"mechanism": "dot", "word": "1"}, 'word is "1"; it needs to be a whole number'),
        ({"mechanism": "dot", "word": True}, "word is true; it needs to be a whole number"),
        ({"mechanism": "dot", "layer": 1.5}, "layer is 1.5; it needs to be a whole number or null"),
        ({"mechanism": "dot", "changes": "flip=1"}, 'changes is "flip=1"; it needs to be a list'),
        ({"mechanism": "dot", "changes": [1]}, "changes needs to be at most 50 short texts, such as 'flip=2'"),
        ({"mechanism": "dot", "changes": ["flip=1"] * 51}, "at most 50 short texts"),
    ],
)
def test_a_request_is_checked(values, message):
    with pytest.raises(ConfigurationError, match=message):
        StepRequest.read(values)
