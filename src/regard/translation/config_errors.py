"""Error messages for an experiment's keys and values, in terms of the YAML that the user wrote."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from regard.errors import nearest

KeyPath = tuple[str, ...]
"""The keys from the top of the YAML to a value: ("training", "decay", "kind")."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "alpha": ("length_penalty",),
    "batch_size": ("batch_tokens",),
    "beam_size": ("beam",),
    "columns": ("source_column", "target_column"),
    "d_ff": ("hidden_dim",),
    "d_model": ("dim",),
    "dev": ("validation",),
    "early_stopping": ("patience",),
    "emb_dim": ("embedding_dim",),
    "embedding_size": ("embedding_dim",),
    "epochs": ("max_epochs",),
    "ff_size": ("hidden_dim",),
    "file": ("tsv", "source", "target"),
    "gpus": ("devices",),
    "grad_clip": ("clip_norm",),
    "gradient_clip_val": ("clip_norm",),
    "hidden_size": ("hidden_dim", "dim"),
    "languages": ("source_language", "target_language"),
    "layers": ("encoder_layers", "decoder_layers"),
    "lenpen": ("length_penalty",),
    "lr": ("learning_rate",),
    "lr_scheduler": ("decay",),
    "max_grad_norm": ("clip_norm",),
    "max_len": ("max_length",),
    "max_steps": ("max_updates",),
    "num_beams": ("beam",),
    "num_layers": ("encoder_layers", "decoder_layers", "layers"),
    "num_train_epochs": ("max_epochs",),
    "path": ("tsv", "source", "target", "folder"),
    "rnn_type": ("cell",),
    "scheduler": ("decay",),
    "src": ("source",),
    "steps": ("max_updates",),
    "tgt": ("target",),
    "trg": ("target",),
    "type": ("kind",),
    "valid": ("validation",),
    "vocab_size": ("size",),
    "warmup": ("warmup_steps",),
    "warmup_updates": ("warmup_steps",),
}
"""The names that other toolkits have for our keys."""


def unknown_keys(data: Any, annotation: Any, root: type[BaseModel], path: KeyPath = ()) -> Iterator[str]:
    """A message for every unknown key, and every unknown `kind`, with the known one that is meant."""
    if isinstance(data, list):
        for index, value in enumerate(data):
            yield from unknown_keys(value, annotation, root, (*path, str(index)))
        return
    candidates = sections_of(annotation)
    kinds = {kind: section for section in candidates for kind in kinds_of(section)}
    kind = data.get("kind") if isinstance(data, Mapping) else data
    if kinds and isinstance(kind, str) and kind not in kinds:
        yield f"{_dotted(path)}: there is no kind {kind!r}; {_kind_meant(kind, kinds, root)}"
    elif candidates and isinstance(data, Mapping):
        section = kinds[kind] if kind in kinds else max(candidates, key=lambda one: len(one.model_fields.keys() & data))
        known = section.model_fields if kinds else {key for one in candidates for key in one.model_fields}
        for key, value in data.items():
            field = section.model_fields.get(key)
            here = (*path, str(key))
            if field is None:
                others = [other for other, one in kinds.items() if key in one.model_fields]
                yield f"{_dotted(here)}: unknown key; {_key_meant(str(key), known, others, root)}"
            else:
                yield from unknown_keys(value, field.annotation, root, here)


def wrong_values(error: ValidationError, data: Any) -> Iterator[str]:
    """A message for every key whose value pydantic refused: its value, and the values it may have."""
    needs: dict[KeyPath, list[str]] = {}
    has: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False):
        path = _path_in(data, detail)
        needs.setdefault(path, []).append(_need(detail))
        has.setdefault(path, _format_value(detail["input"]))
        if "error" in detail.get("ctx", {}) and isinstance(detail["input"], Mapping):
            has[path] = ""  # a rule about several keys names them itself
        if detail["type"] == "missing":
            has[path] = ""
    for path, reasons in needs.items():
        if any(other[: len(path)] == path for other in needs if other != path):
            continue  # what is wrong is further in
        place = f"{_dotted(path)}: " if path else ""
        yield f"{place}{has[path]}{' or '.join(dict.fromkeys(reasons))}".replace(" or needs to be ", " or ")


def _key_meant(key: str, known: Iterable[str], kinds: list[str], root: type[BaseModel]) -> str:
    """Suggest a key in place of an unknown one: the end of a message."""
    if kinds:
        return f"only the kind {' or '.join(map(repr, kinds))} has it"
    meant = [name for name in OTHER_NAMES.get(key, ()) if name in known]
    if meant:
        return f"did you mean {' or '.join(map(repr, meant))}? {nearest('', known)}"
    names = [name for name in (key, *OTHER_NAMES.get(key, ())) if name != "kind"]
    elsewhere = dict.fromkeys(_dotted(place) for name in names for place in _places(name, root))
    if elsewhere:
        return f"it belongs elsewhere: write {' or '.join(elsewhere)}"
    return nearest(key, known)


def _kind_meant(kind: str, kinds: Iterable[str], root: type[BaseModel]) -> str:
    elsewhere = dict.fromkeys(_dotted(place) for place in _places("kind", root, kind=kind))
    if elsewhere:
        return f"it belongs elsewhere: write {' or '.join(elsewhere)}. {nearest('', kinds)}"
    return nearest(kind, kinds)


def _places(name: str, annotation: Any, path: KeyPath = (), kind: str | None = None) -> Iterator[KeyPath]:
    """The paths to every key of a name in the tree of sections; of a `kind` only those that can have this value."""
    for section in sections_of(annotation):
        for key, field in section.model_fields.items():
            if key == name and (kind is None or kind in kinds_of(section)):
                yield (*path, key)
            yield from _places(name, field.annotation, (*path, key), kind)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field of this annotation can contain."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return sections_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType, list, tuple):
        return [section for option in typing.get_args(annotation) for section in sections_of(option)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def kinds_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` that choose a settings class; none of one that has no kind."""
    field = section.model_fields.get("kind")
    return typing.get_args(field.annotation) if field and typing.get_origin(field.annotation) is Literal else ()


def _path_in(data: Any, detail: ErrorDetails) -> KeyPath:
    """The path in the YAML of an error: pydantic's location without the members of unions that it tried."""
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
    if detail["type"] == "path_type":
        return "needs to be a path"
    if detail["type"] == "union_tag_not_found":
        return "needs the key 'kind'"
    message = detail["msg"].removeprefix("Value error, ")
    needed = message.removeprefix("Input should be ")
    return message if needed == message else f"needs to be {needed}"


def _format_value(value: Any) -> str:
    text = repr(value)
    return f"has {text if len(text) <= 80 else text[:77] + '...'}, "


def _dotted(path: KeyPath) -> str:
    return ".".join(path)
