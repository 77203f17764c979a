"""The live page of steps as one file: what is computed beforehand, and that data stay data."""

import base64
import gzip
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
    found = json.loads(re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', page.text)[0])
    return {**found, "answers": json.loads(gzip.decompress(base64.b64decode(found["answers"])))}


def whole(stored, trained):
    """An answer to a change as the page puts it together."""
    before = {table["key"]: table for table in trained["tables"]}
    tables = [
        before[one] if isinstance(one, str) else {**before.get(one["key"], {}), **one} for one in stored["tables"]
    ]
    tables = [{name: value for name, value in table.items() if value is not None} for table in tables]
    return {**trained, **stored, "tables": tables}


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
    stored = answers[answer_key(changed)]
    assert whole(stored, answers["4"]) == json.loads(json.dumps(live.answer(changed)))
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


def test_a_worked_example_has_each_query_with_single_and_joint_changes(live):
    page = steps_page(live, StepRequest("example:scaled-dot-product"))
    answers = payload(page)["answers"]
    singles, masked, products = 2 + 3 + 3 * 8, 7, 2
    assert len(answers) == 3 * (1 + singles + (masked - 3) + products * masked)
    for request in (
        StepRequest("example:scaled-dot-product", word=3, changes=("scale=1", "flip=1", "flip=3")),
        StepRequest("example:scaled-dot-product", word=2, changes=("flip=1", "flip=2", "flip=3")),
        StepRequest("example:scaled-dot-product", word=1, changes=("add=2:-4",)),
    ):
        stored = answers[answer_key(request)]
        assert whole(stored, answers[str(request.word)]) == json.loads(json.dumps(live.answer(request)))
    assert "<title>Scaled dot-product attention (Vaswani et al. 2017)</title>" in page.text
    assert len(page.text) < 80_000


def test_keys_of_linear_attention_are_masked_for_all_queries(live):
    answers = payload(steps_page(live, StepRequest("example:linear")))["answers"]
    assert {"1", "1 drop=1", "1 drop=2 drop=3"} <= answers.keys()
    assert not any("flip" in key or "add" in key for key in answers)


def test_an_example_of_which_nothing_can_be_changed_is_one_answer(live):
    assert list(payload(steps_page(live, StepRequest("example:delta-rule")))["answers"]) == ["1"]


def test_of_many_keys_single_changes_alone_are_in_a_page(live):
    answers = payload(steps_page(live, StepRequest("example:strided-mask")))["answers"]
    assert len(answers) == 6 * (1 + 1 + 6 + 6 * 8)


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
