"""The state of the page: that Python and the page read and write the same permalinks, and what each opens with."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError
from regard.explorer import Atlas, ViewState, show, static_page
from regard.explorer.notebook import FramedPage, LiveWidget

PERMALINKS = json.loads(
    (Path(__file__).parents[2] / "explorer" / "test" / "permalinks.json").read_text(encoding="utf-8")
)


def tupled(value: Any) -> Any:
    return tuple(map(tupled, value)) if isinstance(value, list) else value


@pytest.fixture
def atlas():
    maps = {"first": torch.full((2, 3, 3), 1 / 3), "second": torch.full((1, 2, 3), 1 / 3)}
    return Atlas.from_weights(maps, title="run")


@pytest.mark.parametrize("case", PERMALINKS, ids=lambda case: case["permalink"][:20])
def test_permalinks_are_those_of_the_page(case):
    told: dict[str, Any] = {name: tupled(value) for name, value in case["state"].items()}
    state = ViewState(**told)
    assert state.permalink() == case["permalink"]
    assert ViewState.from_permalink(case["permalink"]) == state
    assert ViewState.from_permalink(f"http://127.0.0.1:1/token/#{case['permalink']}") == state


def test_all_that_the_page_keeps_is_among_them():
    assert set(PERMALINKS[-1]["state"]) == {field.name for field in dataclasses.fields(ViewState)}


def test_an_address_without_a_permalink_tells_nothing():
    assert ViewState.from_permalink("http://127.0.0.1:1/token/") == ViewState() == ViewState.from_permalink("#")


@pytest.mark.parametrize(
    ("permalink", "error"),
    [
        ("view=all", "the state's view is 'all'; it needs one of 'grid', 'head', 'lines', 'text', 'compare', 'table'"),
        ("head=x", "the state's head is 'x'; it needs a whole number of at least 0"),
        ("top=-1", "the state's top is -1; it needs a whole number of at least 0"),
        ("against=1.5", "the state's against is 1.5; it needs a whole number of at least 0, or None"),
        ("pins=1", r"the state's pins is \(\(1,\),\); it needs at most 6 pairs of a map and a head"),
        ("pins=0.0,0.1,0.2,0.3,0.4,0.5,0.6", "it needs at most 6 pairs"),
        ("frame=1,2,0", "it needs three numbers, row, column and a span above 0, or None"),
        ("frame=1,nan,3", "it needs three numbers"),
        (
            "at=3",
            r"the state's at is \(3,\); it needs two of these: a whole number of at least 0, a tuple of such numbers",
        ),
        ("at=3.x,", r"the state's at is \(\(3, 'x'\), None\); it needs two of these"),
        ("at=,", r"the state's at is \(None, None\); it needs two of these"),
        ("clip=2", "the state's clip is '2'; it needs True or False"),
        ("least=7", "the state's least is 7; it needs a number between 0 and 1"),
        ("find=" + "a" * 201, "it needs a text of at most 200 letters"),
        ("map=1.5", "the state's map is 1.5; it needs a whole number of at least 0, or a name"),
        ("heads=3", "a permalink has 'heads=3' in it; it needs name=value, of the names view, map, head"),
        ("head", "a permalink has 'head' in it; it needs name=value"),
    ],
)
def test_what_is_no_permalink_is_refused(permalink, error):
    with pytest.raises(ConfigurationError, match=error):
        ViewState.from_permalink(permalink)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (ViewState(map="third"), "the state's map is 'third'; the atlas has first, second"),
        (ViewState(map=2), "the state's map is 2; there are 2, and the first is 0"),
        (ViewState(map="second", head=1), "the state's head of map 1 is 1; there are 1, and the first is 0"),
        (ViewState(pins=((0, 1), (1, 1))), "the state's head of map 1 is 1"),
        (ViewState(map=1, at=(2, 0)), "the state's chosen query is 2; there are 2"),
        (ViewState(at=(2, 3)), "the state's chosen key is 3; there are 3"),
        (ViewState(at=(None, (0, 5))), "the state's chosen key is 5; there are 3"),
        (ViewState(atlas=1), "the state's atlas is 1; there are 1"),
        (ViewState(against=1), "the state's atlas is 1; there are 1"),
    ],
)
def test_a_state_of_what_is_not_there_is_refused(atlas, state, error):
    with pytest.raises(ConfigurationError, match=error):
        static_page(atlas, state=state)


def test_a_page_opens_with_it(atlas):
    assert '"state":"view=head&map=1"' in static_page(atlas, state=ViewState(view="head", map="second")).text
    assert '"state":"head=1&find=%3C%2Fscript%3E"' in static_page(atlas, state=ViewState(head=1, find="</script>")).text
    assert '"state":' not in static_page(atlas).text
    assert '"state":"view=grid"' in static_page(atlas, state=ViewState()).text, (
        "a map of it is of cross-attention, on which it opens"
    )


def test_a_notebook_opens_with_it(atlas, monkeypatch):
    pytest.importorskip("anywidget")
    one = atlas.show(state="view=head&head=1")
    several = show({"a": atlas, "b": atlas}, state=ViewState(atlas=1, map="second", against=0))
    assert isinstance(one, LiveWidget)
    assert isinstance(several, LiveWidget)
    assert one.widget.state == "view=head&head=1"
    assert several.widget.state == "map=1&atlas=1&against=0"
    with pytest.raises(ConfigurationError, match="the state's atlas is 2"):
        show({"a": atlas, "b": atlas}, state=ViewState(atlas=2))
    monkeypatch.setitem(sys.modules, "anywidget", None)
    framed_page = atlas.show(state=ViewState(view="table"))
    assert isinstance(framed_page, FramedPage)
    assert "view=table" in framed_page.page.text


def test_an_address_opens_with_it(atlas):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from regard.explorer.server import ExplorerServer

    serving = ExplorerServer(atlas, state=ViewState(map="second", at=(1, 2)))
    serving.close()
    assert serving.address.endswith("/#map=1&at=1,2")
    with pytest.raises(ConfigurationError, match="the state's map is 5"):
        ExplorerServer(atlas, state="map=5")
