"""The explorer as an anywidget: the kernel answers messages from the page.

A message asks {"id", "method", "arguments"} and is answered by {"id", "result"} or {"id", "error"}; numbers come as one
buffer of float32 in little-endian order beside {"id"}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import AtlasError, ConfigurationError, RegardError, require
from .collection import Collection
from .query_params import QUERIES, number, read_pairs
from .static_page import WebBundle

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
    if method not in QUERIES:
        raise ConfigurationError(f"there is no method {method[:40]!r}; there are atlases, rerun, {', '.join(QUERIES)}")
    pairs = {str(name): _written(value) for name, value in arguments.items()}
    asked = read_pairs(pairs, {"atlas": number, **QUERIES[method]})
    entry = collection.entry(asked.pop("atlas"))
    if entry is None:
        raise AtlasError("this atlas is not kept any more, since the model was run again: run the cell again")
    return entry.meta if method == "meta" else getattr(entry.answers, method)(**asked)


def _text(arguments: Mapping[str, Any]) -> str:
    text = arguments.get("text")
    if not isinstance(text, str) or len(arguments) != 1:
        raise ConfigurationError("the model is run with a text, and with nothing else")
    return text


def _written(value: Any) -> str:
    """A value of a message as the text of a query parameter, for the same checks."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "-".join(str(part) for part in value[:3])
    return str(value)
