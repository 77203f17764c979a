"""The live page of steps as one file: what is computed beforehand, and that data stay data."""

import json
import re

import pytest

from regard.errors import ConfigurationError
from regard.explorer.steps_page import answer_key, permalink, single_changes, steps_page
from regard.steps.live_steps import LiveSteps, StepRequest

REQUEST = StepRequest("dot", "나는 학생이다", word=4)


@pytest.fixture(scope="module")
def live():
    return LiveSteps()


@pytest.fixture(scope="module")
def page(live):
    return steps_page(live, REQUEST, "ko")


def payload(page):
    return json.loads(re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', page.text)[0])


def test_every_word_is_in_it_with_each_single_change(live, page):
    answers = payload(page)["answers"]
    first = live.answer(REQUEST)
    changes = list(single_changes(first))
    assert changes[:3] == [("score=scaled_dot",), ("flip=1",), ("flip=2",)]
    assert len(changes) == 3 + 2 * 8
    assert len(answers) == 6 * (1 + len(changes))
    assert payload(page)["opening"].endswith("&word=4")
    assert page.contents == f"{len(answers)} computed walkthroughs"
    assert answers["4"]["next"] == [{"word": "student", "probability": "0.910"}]


def test_an_answer_to_a_change_is_that_of_the_server(live, page):
    answers = payload(page)["answers"]
    changed = StepRequest("dot", "나는 학생이다", word=4, changes=("add=2:-4",))
    tables = {table["key"]: table for table in answers["4"]["tables"]}
    stored = answers[answer_key(changed)]
    merged = {
        **answers["4"],
        **stored,
        "tables": [tables[one] if isinstance(one, str) else one for one in stored["tables"]],
    }
    assert merged == json.loads(json.dumps(live.answer(changed)))
    assert "source_embedding" in stored["tables"]


def test_answers_beyond_the_room_are_left_out_and_counted(live):
    page = steps_page(live, REQUEST, most=20_000)
    answers = payload(page)["answers"]
    assert {str(word) for word in range(1, 7)} <= answers.keys()
    assert len(answers) < 60
    assert (
        page.contents
        == f"{len(answers)} computed walkthroughs; {120 - len(answers)} that do not fit into 0 MB are left out"
    )


def test_changes_of_the_opening_are_in_it(live):
    page = steps_page(live, StepRequest("dot", "나는 학생이다", word=1, changes=("flip=1", "add=2:1.5")), most=0)
    assert "1 flip=1 add=2:1.5" in payload(page)["answers"]
    assert payload(page)["opening"].endswith("&change=flip%3D1&change=add%3D2%3A1.5")


def test_a_worked_example_is_one_answer(live):
    page = steps_page(live, StepRequest("example:saturation"))
    assert list(payload(page)["answers"]) == ["1"]
    assert "<title>Without 1/√d the softmax saturates</title>" in page.text


def test_it_loads_nothing_and_a_sentence_is_no_markup(live):
    page = steps_page(live, StepRequest("scaled_dot", "I am <b>tired</b>.", word=1), most=0)
    assert "default-src 'none'; script-src 'sha256-" in page.text
    assert "<b>" not in page.text.split("<body>")[1]
    assert not set(re.findall(r"https?://[\w.]+", page.text))


def test_a_permalink_has_what_is_not_as_by_default():
    assert permalink(None) == "lang=en"
    request = StepRequest("multi_head", "I am.", layer=1, head=None, kind="encoder", source_word=2)
    assert (
        permalink(request) == "lang=en&mechanism=multi_head&sentence=I+am.&kind=encoder&layer=1&head=all&source_word=2"
    )


def test_a_page_that_was_not_built_says_so(live, monkeypatch, tmp_path):
    from regard.explorer import steps_page as module
    from regard.explorer.static_page import WebBundle

    monkeypatch.setattr(module, "steps_bundle", lambda: WebBundle.read(tmp_path, markup="steps.html", name="steps"))
    with pytest.raises(ConfigurationError, match="the explorer's page cannot be read .* `npm ci && npm run build`"):
        steps_page(live, StepRequest("example:saturation"))
