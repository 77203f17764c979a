"""What is wrong with an experiment's keys and values, in the words of the YAML that the user wrote."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from regard.errors import nearest

Path = tuple[str, ...]


def unknown_keys(data: Any, annotation: Any, root: type[BaseModel], path: Path = ()) -> Iterator[str]:
    """Every key, and every `kind`, that is not known at its place, with the nearest that is."""
    candidates = _sections(annotation)
    kinds = {kind: section for section in candidates for kind in _kinds(section)}
    kind = data.get("kind") if isinstance(data, Mapping) else data
    if kinds and isinstance(kind, str) and kind not in kinds:
        yield f"{_dotted(path)}: there is no kind {kind!r}; {nearest(kind, kinds)}"
    elif candidates and isinstance(data, Mapping):
        section = kinds[kind] if kind in kinds else max(candidates, key=lambda one: len(one.model_fields.keys() & data))
        for key, value in data.items():
            field = section.model_fields.get(key)
            here = (*path, str(key))
            if field is None:
                others = [other for other, known in kinds.items() if key in known.model_fields]
                yield f"{_dotted(here)}: unknown key; {_mend(str(key), section, others, root)}"
            else:
                yield from unknown_keys(value, field.annotation, root, here)


def wrong_values(error: ValidationError, data: Any) -> Iterator[str]:
    """What pydantic found, one line per key: what it has and what it needs."""
    needs: dict[Path, list[str]] = {}
    has: dict[Path, str] = {}
    for detail in error.errors(include_url=False):
        path = _path_in(data, detail)
        needs.setdefault(path, []).append(_need(detail))
        has.setdefault(path, _shown(detail["input"]))
        if "error" in detail.get("ctx", {}) and isinstance(detail["input"], Mapping):
            has[path] = ""  # a rule about several keys names them itself
        if detail["type"] == "missing":
            has[path] = ""
    for path, reasons in needs.items():
        if any(other[: len(path)] == path for other in needs if other != path):
            continue  # what is wrong is further in
        place = f"{_dotted(path)}: " if path else ""
        yield f"{place}{has[path]}{' or '.join(dict.fromkeys(reasons))}".replace(" or needs to be ", " or ")


def _mend(key: str, section: type[BaseModel], kinds: list[str], root: type[BaseModel]) -> str:
    if kinds:
        return f"only the kind {' or '.join(map(repr, kinds))} has it"
    elsewhere = dict.fromkeys(_dotted(place) for place in _places(key, root) if key != "kind")
    if elsewhere:
        return f"it belongs elsewhere: write {' or '.join(elsewhere)}"
    return nearest(key, section.model_fields)


def _places(name: str, annotation: Any, path: Path = ()) -> Iterator[Path]:
    """Where in the tree of sections a key of this name is known."""
    for section in _sections(annotation):
        for key, field in section.model_fields.items():
            if key == name:
                yield (*path, key)
            yield from _places(name, field.annotation, (*path, key))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field of this annotation can hold."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _sections(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [section for option in typing.get_args(annotation) for section in _sections(option)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    field = section.model_fields.get("kind")
    return typing.get_args(field.annotation) if field and typing.get_origin(field.annotation) is Literal else ()


def _path_in(data: Any, detail: ErrorDetails) -> Path:
    """The keys of pydantic's location that the data has: it also names the member of a union that it tried."""
    path: list[str] = []
    for step in detail["loc"]:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(step))
    if detail["type"] == "missing":
        path.append(str(detail["loc"][-1]))
    return tuple(path)


def _need(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":  # `unknown_keys` let it pass, so that another kind has it
        return "which only another kind has: write the 'kind' beside it"
    if detail["type"] == "union_tag_not_found":
        return "needs the key 'kind'"
    message = detail["msg"].removeprefix("Value error, ")
    needed = message.removeprefix("Input should be ")
    return message if needed == message else f"needs to be {needed}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"has {text if len(text) <= 80 else text[:77] + '...'}, "


def _dotted(path: Path) -> str:
    return ".".join(path)
