"""What a notebook displays: a widget whose messages the kernel answers, a page in a frame, a picture."""

import base64
import struct
import sys
import zlib

import numpy as np
import pytest
import torch

from regard.errors import AtlasError, ConfigurationError, MissingExtra
from regard.explorer import Atlas, ViewState, show
from regard.explorer import collection as collection_module
from regard.explorer.collection import Collection
from regard.explorer.notebook import FramedPage, LiveWidget, answer
from regard.explorer.preview import COLOURS, NO_PAIR, PAPER, preview_png
from regard.explorer.static_page import WebBundle


def made(text):
    words = text.split()
    if words[0] == "fail":
        raise RuntimeError("no such layer")
    if words[0] == "interrupt":
        raise KeyboardInterrupt
    weights = torch.ones(len(words), len(words)).tril()
    return Atlas.from_weights({"head": (weights / weights.sum(-1, keepdim=True))[None]}, tokens=words, title=text)


@pytest.fixture
def ask():
    collection = Collection({"it was late": made("it was late")}, rerun=made)

    def asking(method, _message=None, **arguments):
        sent = []
        message = {"id": "a.1", "method": method, "arguments": arguments} if _message is None else _message
        answer(collection, message, lambda content, buffers: sent.append((content, buffers)))
        assert len(sent) == 1
        return sent[0]

    return asking


def test_numbers_come_as_buffers(ask):
    content, buffers = ask("weights", atlas=0, map=0, head=0, rows=[1, 3], columns=[0, 3])
    assert content == {"id": "a.1"}
    np.testing.assert_allclose(np.frombuffer(buffers[0], "<f4"), [0.5, 0.5, 0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-3)
    content, buffers = ask("profile", atlas=0, map=0, head=0, which="entropy")
    np.testing.assert_allclose(np.frombuffer(buffers[0], "<f4"), np.log([1, 2, 3]), atol=1e-3)


def test_words_come_as_results(ask):
    assert ask("tokens", atlas=0, map=0, side="key", start=1, stop=3) == ({"id": "a.1", "result": ["was", "late"]}, [])
    assert ask("meta", atlas=0)[0]["result"]["title"] == "it was late"
    assert ask("atlases")[0]["result"]["atlases"] == [{"number": 0, "name": "it was late"}]


def test_heads_are_ranked_and_changes_told(ask):
    content, buffers = ask("kept", atlas=0, map=0, queries="1", keys="0.1", by="weight")
    np.testing.assert_allclose(np.frombuffer(buffers[0], "<f4"), [1.0], rtol=1e-3)
    ask("rerun", text="it is late")
    content, _ = ask("changes", atlas=1, other=0, map=0, queries="1", keys="0")
    assert content["result"] == {"heads": [{"map": 0, "head": 0, "value": 0.0}]}
    assert (
        "this atlas is not kept any more" in ask("changes", atlas=1, other=9, map=0, queries="1", keys="0")[0]["error"]
    )
    assert "has no norms of values" in ask("norms", atlas=1, map=0, head=0)[0]["error"]


def test_a_run_gives_a_new_atlas(ask, monkeypatch):
    assert [of["number"] for of in ask("rerun", text="it is very late")[0]["result"]["atlases"]] == [1, 0]
    assert ask("tokens", atlas=1, map=0, side="key", start=2, stop=3)[0]["result"] == ["very"]
    monkeypatch.setattr(collection_module, "MOST_ROWS", 0)
    ask("rerun", text="now")
    assert "this atlas is not kept any more" in ask("meta", atlas=0)[0]["error"]
    assert "the text is empty" in ask("rerun", text=" ")[0]["error"]
    assert ask("rerun", text="fail")[0]["error"] == "the model failed: RuntimeError: no such layer"
    assert ask("rerun", text="interrupt")[0]["error"] == "the kernel was interrupted"
    assert [of["number"] for of in ask("atlases")[0]["result"]["atlases"]] == [2, 1]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (None, "a message needs an id, a method and its arguments"),
        (["meta"], "a message needs an id"),
        ({"id": 1}, "a message needs an id"),
        ({"id": 1, "method": "meta", "arguments": [0]}, "a message needs an id"),
        ({"method": "__class__", "arguments": {}}, "there is no method '__class__'; there are atlases, rerun, meta"),
        ({"method": "meta", "arguments": {}}, "the parameter 'atlas' is missing"),
        ({"method": "meta", "arguments": {"atlas": True}}, "atlas is 'True'; it needs a whole number"),
        ({"method": "meta", "arguments": {"atlas": 7}}, "this atlas is not kept any more"),
        ({"method": "overview", "arguments": {"atlas": 0, "map": 1.0, "reduce": "max"}}, "map is '1.0'"),
        ({"method": "overview", "arguments": {"atlas": 0, "map": -1, "reduce": "max"}}, "map is '-1'"),
        (
            {"method": "overview", "arguments": {"atlas": 0, "map": 0, "reduce": ["max"] * 9}},
            "there is no 'max-max-max'",
        ),
        (
            {"method": "overview", "arguments": {"atlas": 0, "map": 0, "reduce": "max", "x": 1}},
            "there is no parameter 'x'",
        ),
        (
            {"method": "weights", "arguments": {"atlas": 0, "map": 0, "head": 0, "rows": [0], "columns": [0, 1]}},
            "rows is '0'; it needs a start and a stop",
        ),
        ({"method": "rerun", "arguments": {"text": 3}}, "the model is run with a text, and with nothing else"),
        ({"method": "rerun", "arguments": {"text": "a", "path": "/"}}, "the model is run with a text, and"),
    ],
)
def test_a_bad_message_is_answered_in_words(ask, message, error):
    content, buffers = ask("", {} if message is None else message)
    assert error in content["error"]
    assert (content["id"], buffers) == (message.get("id") if isinstance(message, dict) else None, [])


def test_a_notebook_shows_a_widget_where_there_is_anywidget(monkeypatch):
    pytest.importorskip("anywidget")
    shown = show({"a": made("it was late"), "b": made("it is late")}, height=500)
    assert isinstance(shown, LiveWidget)
    assert (shown.widget.height, shown.widget.state) == (500, "")
    assert shown.widget._esm == WebBundle.read().script
    assert "export{" in shown.widget._esm
    outputs = []
    monkeypatch.setattr("IPython.display.display", lambda output, raw: outputs.append(output))
    shown._ipython_display_()
    still, live = outputs
    assert base64.b64decode(still["image/png"]) == preview_png(made("it was late"))
    assert still["image/png"].endswith(shown.widget.hides)
    assert len(shown.widget.hides) == 60
    assert live["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.widget.model_id
    assert live["text/plain"] == "<explorer, live: <atlas 'it was late': 1 maps of 1 attention modules>>"
    sent = []
    shown.widget.send = lambda content, buffers=None: sent.append(content)
    shown.widget._handle_custom_msg({"id": "x.1", "method": "atlases", "arguments": {}}, [])
    assert [of["name"] for of in sent[0]["result"]["atlases"]] == ["a", "b"]


def test_what_is_shown_is_told():
    pytest.importorskip("anywidget")
    shown = made("it was late").show(state=ViewState(view="head"))
    assert isinstance(shown, LiveWidget)
    assert shown.state == ViewState(view="head")
    shown.widget.state = "view=lines&top=5"  # as the page sets it
    assert shown.state == ViewState(view="lines", top=5)


def test_an_atlas_shows_itself_with_its_model():
    pytest.importorskip("anywidget")
    shown = made("it was late").show(rerun=made)
    assert isinstance(shown, LiveWidget)
    with pytest.raises(ConfigurationError, match="there are 2 atlases and a model to run again"):
        show({"a": made("a"), "b": made("b")}, rerun=made)
    with pytest.raises(AtlasError, match="there is no atlas to show"):
        show({})


def test_without_anywidget_it_is_a_page_in_a_frame(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    shown = made("it was late").show()
    assert isinstance(shown, FramedPage)
    bundle = shown._repr_mimebundle_()
    still = f'<img src="data:image/png;base64,{bundle["image/png"]}"'
    # A frame over the picture, which is all that is left of it where a notebook is not trusted.
    assert bundle["text/html"].startswith(f'<div style="display: grid">{still}')
    assert bundle["text/html"].count("grid-area: 1 / 1") == 2
    assert '<iframe srcdoc="' in bundle["text/html"]
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["text/plain"] == repr(shown)
    missing = r"'anywidget', which is not installed; pip install 'regard\[notebook\]'"
    with pytest.raises(MissingExtra, match=missing):
        show(made("a"), rerun=made)
    with pytest.raises(MissingExtra, match=missing):
        show({"a": made("a"), "b": made("b")})


def pixels(png):
    """Read back what `picture` wrote."""
    at, found = 8, {}
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        data = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        found[kind] = data
        at += 12 + length
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, 1 + width)
    assert (lines[:, 0] == 0).all()
    return np.frombuffer(found[b"PLTE"], np.uint8).reshape(-1, 3)[lines[:, 1:]]


def test_the_picture_has_all_heads():
    torch.manual_seed(0)
    layer = torch.zeros(2, 2, 2)
    layer[0] = torch.eye(2)
    drawn = pixels(preview_png(Atlas.from_weights({"a": layer, "b": layer[:1]})))
    assert drawn.shape == (6 + 2 * 54, 6 + 2 * 54, 3)
    first, last = tuple(COLOURS[0]), tuple(COLOURS[-1])
    centres = [18, 42, 72, 96]
    seen = [[tuple(drawn[row, column].tolist()) for column in centres] for row in centres]
    assert seen[0] == [last, first, first, first]
    assert seen[1] == [first, last, first, first]
    assert seen[2] == [last, first, PAPER, PAPER]


def test_pairs_that_do_not_exist_are_no_colour_of_the_map():
    import regard
    from regard.explorer import record

    layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=1), mask=regard.masks.causal())
    with torch.no_grad(), record(nn := torch.nn.Sequential(layer)) as recording:
        nn(torch.randn(1, 2, 4))
    drawn = pixels(preview_png(recording.atlas()))
    assert tuple(drawn[18, 42].tolist()) == NO_PAIR
    assert tuple(drawn[18, 18].tolist()) == tuple(COLOURS[-1])
