"""Notebook display of the explorer: a live widget with anywidget, else the static page in an iframe.

Messages from the widget ask {"id", "method", "arguments"} and are answered by {"id", "result"} or {"id", "error"};
numbers come as one buffer of float32 in little-endian order beside {"id"}. A saved notebook has a PNG of all heads.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import AtlasError, ConfigurationError, MissingExtra, RegardError, require
from .api import CHANGES, QUERIES, number, read_pairs
from .atlas import Atlas
from .collection import Collection, CollectionEntry, Rerun
from .preview import preview_png
from .static_page import StaticPage, WebBundle, static_page
from .view_state import ViewState, opening_permalink

Send = Callable[[dict[str, Any], list[bytes]], None]


def widget(collection: Collection, *, state: str, height: int, hides: str) -> Any:
    """Make a widget that displays a collection, opened with a permalink.

    hides: the end of the data of the picture that stands in for it where it cannot be shown.

    Raises:
        MissingExtra: anywidget is not installed.
    """
    anywidget = require("anywidget", extra="notebook")
    import traitlets

    bundle = WebBundle.read()

    class Explorer(anywidget.AnyWidget):
        _esm = bundle.script
        _css = bundle.styles
        height = traitlets.Int().tag(sync=True)
        state = traitlets.Unicode().tag(sync=True)
        hides = traitlets.Unicode().tag(sync=True)

    made = Explorer(height=height, state=state, hides=hides)
    made.on_msg(lambda widget, message, _: answer(collection, message, widget.send))
    return made


def answer(collection: Collection, message: Any, send: Send) -> None:
    """Answer one message; errors are sent as answers."""
    name = message.get("id") if isinstance(message, Mapping) else None
    try:
        found = _result(collection, message)
    except RegardError as error:
        send({"id": name, "error": str(error)}, [])
    except KeyboardInterrupt:
        send({"id": name, "error": "the kernel was interrupted"}, [])
    except Exception as error:  # of the user's own model, in the user's own notebook: told as it is
        send({"id": name, "error": f"the model failed: {type(error).__name__}: {str(error)[:300]}"}, [])
    else:
        if isinstance(found, np.ndarray):
            send({"id": name}, [np.ascontiguousarray(found, dtype="<f4").tobytes()])
        else:
            send({"id": name, "result": found}, [])


def _result(collection: Collection, message: Any) -> Any:
    given = message if isinstance(message, Mapping) else {}
    method, arguments = given.get("method"), given.get("arguments")
    if not isinstance(method, str) or not isinstance(arguments, Mapping):
        raise ConfigurationError("a message needs an id, a method and its arguments")
    if method == "atlases":
        return collection.listed()
    if method == "rerun":
        collection.run(_text(arguments))
        return collection.listed()
    readers = QUERIES | {"changes": CHANGES}
    if method not in readers:
        raise ConfigurationError(f"there is no method {method[:40]!r}; there are atlases, rerun, {', '.join(readers)}")
    pairs = {str(name): _parameter_text(value) for name, value in arguments.items()}
    asked = read_pairs(pairs, {"atlas": number, **readers[method]})
    entry = _entry(collection, asked.pop("atlas"))
    if method == "changes":
        asked["other"] = _entry(collection, asked["other"]).answers
    return entry.meta if method == "meta" else getattr(entry.answers, method)(**asked)


def _entry(collection: Collection, number: int) -> CollectionEntry:
    entry = collection.entry(number)
    if entry is None:
        raise AtlasError("this atlas is not kept any more, since the model was run again: run the cell again")
    return entry


def _text(arguments: Mapping[str, Any]) -> str:
    text = arguments.get("text")
    if not isinstance(text, str) or len(arguments) != 1:
        raise ConfigurationError("the model is run with a text, and with nothing else")
    return text


def _parameter_text(value: Any) -> str:
    """Format a value of a message as a query parameter, so that it passes the same checks."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "-".join(str(part) for part in value[:3])
    return str(value)


MOST_BYTES = 8_000_000
"""The largest page in a notebook, which keeps it with its outputs."""
ENDING = 60
"""Trailing characters of the base64 preview by which the page finds it: the data and the PNG checksum."""
IN_PLACE = "grid-area: 1 / 1"
"""CSS that places the page over its preview."""


@dataclass(frozen=True, slots=True)
class FramedPage:
    """Cell output that displays a static page in an iframe, `height` pixels high.

    Behind the page there is a picture of all heads: that is for who shows a saved notebook and no frames.
    """

    atlas: Atlas
    page: StaticPage
    height: int

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        still = _preview_base64(self.atlas)
        # What shows a notebook without trusting it takes the frame away, and shows no other form of the output.
        markup = (
            f'<div style="display: grid"><img src="data:image/png;base64,{still}" alt="all heads" style="{IN_PLACE}">'
            f"{self._repr_html_()}</div>"
        )
        return {"text/plain": repr(self), "image/png": still, "text/html": markup}

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.page.text, quote=True)}" '
            'sandbox="allow-scripts allow-downloads allow-forms" title="regard explorer" '
            f'style="{IN_PLACE}; width: 100%; height: {self.height}px; border: 0; background: white"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<explorer, {self.page.size / 1e6:.1f} MB: {self.page.contents}>"


@dataclass(frozen=True, slots=True)
class LiveWidget:
    """Cell output that displays a live widget, whose requests the kernel answers.

    Before the widget there is a picture of all heads, which the widget hides: that is what a saved notebook shows where
    no kernel runs.
    """

    atlas: Atlas
    still: str
    widget: Any

    @property
    def state(self) -> ViewState:
        """The current view of the widget; `atlas.show(state=...)` opens another one with it."""
        return ViewState.from_permalink(self.widget.state)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # Two outputs: of the forms of one, a notebook takes the widget even where there is no kernel to answer it.
        display({"text/plain": repr(self), "image/png": self.still}, raw=True)
        view = {"version_major": 2, "version_minor": 1, "model_id": self.widget.model_id}
        display({"text/plain": repr(self), "application/vnd.jupyter.widget-view+json": view}, raw=True)

    def __repr__(self) -> str:
        return f"<explorer, live: {self.atlas!r}>"


def _preview_base64(atlas: Atlas) -> str:
    """The preview as base64 PNG, for saved notebooks."""
    return b64encode(preview_png(atlas)).decode()


def show(
    atlases: Atlas | Mapping[str, Atlas],
    *,
    state: ViewState | str | None = None,
    rerun: Rerun | None = None,
    height: int = 640,
) -> FramedPage | LiveWidget:
    """Display atlases in a notebook, `height` pixels high, opened with a state or a permalink.

    With anywidget the kernel answers the page: every tile is exact and computed as it is looked at. Several atlases by
    their names are shown with a slider, and `rerun`, which gives the atlas of another text, adds a box for one; while
    it runs, so does the kernel, which may be interrupted. Without anywidget it is one atlas, as `framed_page` shows it.

    Raises:
        AtlasError: there is no atlas, or one without a map; without anywidget, one that is too large.
        ConfigurationError: `rerun` with several atlases; a state that is none, or of something that is not there.
        MissingExtra: anywidget is not installed, and there are several atlases, or `rerun`.
    """
    collection = Collection(atlases, rerun)
    shown = [atlases] if isinstance(atlases, Atlas) else list(atlases.values())
    opening = opening_permalink(state, shown)
    try:
        require("anywidget", extra="notebook")
    except MissingExtra:
        if rerun is not None or len(collection.entries) > 1:
            raise
        return framed_page(shown[0], state=opening, height=height)

    still = _preview_base64(shown[0])
    return LiveWidget(shown[0], still, widget(collection, state=opening, height=height, hides=still[-ENDING:]))


def framed_page(
    atlas: Atlas, *, state: ViewState | str | None = None, height: int = 640, most: int = MOST_BYTES
) -> FramedPage:
    """Display an atlas as a static page in an iframe, which needs no kernel.

    The page is in a sandbox: it has neither the notebook's origin nor its cookies.

    Raises:
        AtlasError: there is no map in the atlas, or it is too large even in the coarsest form.
        ConfigurationError: a state that is none, or of something that the atlas does not have.

    >>> import torch
    >>> framed_page(Atlas.from_weights([torch.full((1, 2, 2), 0.5)]))
    <explorer, 0.2 MB: whole weights of 1 map, to within 0.4% of each>
    """
    return FramedPage(atlas, static_page(atlas, state=state, most=most), height)


Atlas.notebook_view = staticmethod(show)
