"""docs/yaml.md, written from the settings classes: every key of an experiment with its type, default and meaning.

`python -m regard.translation.yaml_reference > docs/yaml.md` writes it anew; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from regard.translation.config_errors import kinds_of, sections_of
from regard.translation.experiment import Experiment
from regard.translation.settings import MAY_CHANGE

HEAD = """\
# The YAML of an experiment

One file is one experiment: `regard train experiment.yaml`. `name` and `data.train` are needed, every other key has a
default. Unknown keys are refused, with the nearest that is known; a key can be set on the command line, too:
`regard train experiment.yaml --set training.max_epochs=3`. Files with `task: language-model` have other keys:
[yaml-language-model.md](yaml-language-model.md). The smallest file:

    name: toy
    data:
      train: {source: train.en, target: train.de}

Where an option has a `kind`, its plain name is shorthand for it: `score: dot` is `score: {kind: dot}`. Words are read
as YAML 1.2 reads them: `no` is text, `1e-3` is a number.

{resuming}

This page is written by `python -m regard.translation.yaml_reference`."""


def reference() -> str:
    """The page as Markdown."""
    return settings_tables(HEAD.replace("{resuming}", _resuming()), Experiment)


def settings_tables(head: str, root: type[BaseModel]) -> str:
    """A page as Markdown: its head, and a table for each section of an experiment."""
    return "\n\n".join([head, *_tables(root, "", set())]) + "\n"


def _resuming() -> str:
    """The paragraph on the keys that may change when a run is resumed."""
    keys = ", ".join(f"`{key.rstrip('.')}`" for key in MAY_CHANGE)
    text = (
        "A run is resumed with the settings that it began with. These keys, on which no update depends, may change: "
        f"{keys}; and `data.test`, unless there is `data.extra`."
    )
    return "\n".join(textwrap.wrap(text, 120))


def _tables(section: type[BaseModel], path: str, written: set[type[BaseModel]]) -> Iterator[str]:
    """A table for a section, then those of the sections within it, each where it is first met."""
    written.add(section)
    yield f"## {_heading(section, path)}\n\n{_first_paragraph(section)}\n\n{_table(section)}"
    for key, field in section.model_fields.items():
        for inner in sections_of(field.annotation):
            if inner not in written:
                yield from _tables(inner, f"{path}.{key}".removeprefix("."), written)


def _heading(section: type[BaseModel], path: str) -> str:
    kinds = " or ".join(f"`{kind}`" for kind in kinds_of(section))
    return (f"`{path}`" if path else "The file") + (f" of kind {kinds}" if kinds else "")


def _first_paragraph(section: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(section) or "").split("\n\n")[0].split())


def _table(section: type[BaseModel]) -> str:
    meanings = field_docstrings(section)
    rows = [
        f"| `{key}` | {_type(field)} | {_default(field)} | {meanings[key].replace('|', '&#124;')} |"
        for key, field in section.model_fields.items()
    ]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def field_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a class and of its bases, which pydantic does not store."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        source = ast.parse(Path(inspect.getfile(base)).read_text(encoding="utf-8"))
        body = next(node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for field, after in itertools.pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _type(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{signs[name]} {getattr(one, name)}" for one in field.metadata for name in signs if hasattr(one, name)]
    return ", ".join([_type_name(field.annotation), *limits])


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = FieldInfo.from_annotation(annotation)
        return _type_name(arguments[0]) if sections_of(annotation) else _type(inner)
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0])}"
    if sections_of(annotation):
        kinds = [kind for section in sections_of(annotation) for kind in kinds_of(section)]
        null = " or null" if types.NoneType in arguments else ""
        return (f"kind: {', '.join(f'`{kind}`' for kind in kinds)}" if kinds else "section") + null
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    return {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "null", Path: "path"}[
        annotation
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.default
    if isinstance(value, BaseModel):
        return f"`{value.kind}`" if hasattr(value, "kind") else "its defaults"  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, tuple):
        return f"`[{', '.join(str(getattr(each, 'kind', each)) for each in value)}]`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
