"""Frozen dataclasses as JSON and back, from a table of the classes that a file may name; nothing else is built.

The masks and biases of atlases and the configurations of language models are stored in this form. Two other forms
serve other ends: `utils.pytree` passes values to torch within a process, and `translation.checkpoint` stores nested
dicts, lists and tuples without classes, whose exact types it restores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ..errors import RegardError, nearest

DEEPEST = 64
"""The most dataclasses and lists that may be nested in one another."""
LARGEST = 2**53
"""The largest whole number that every reader of JSON represents exactly."""


@dataclass(frozen=True)
class DataclassJSON:
    """The JSON form of dataclasses: an object with the class's name under `tag`, and each init field by its own name.

    A field is a dataclass of the table, a tuple (a JSON list), a number, a string, a bool, None, or a tensor, which is
    stored elsewhere and referred to as {"array": name}.

    Args:
        classes: the classes by their names in the file; a subclass of one is not in the table.
        tag: the entry of an object that has the name.
        subject: what the values belong to, for error messages: "the configuration".
        error: the class of the errors.

    >>> @dataclass(frozen=True)
    ... class Size:
    ...     rows: int
    ...     columns: int = 1
    >>> form = DataclassJSON({"size": Size}, tag="is", subject="the table", error=RegardError)
    >>> form.encode(Size(2, 3))
    {'is': 'size', 'rows': 2, 'columns': 3}
    >>> form.decode({"is": "size", "rows": 2})
    Size(rows=2, columns=1)
    """

    classes: Mapping[str, type]
    tag: str
    subject: str
    error: type[RegardError]

    def encode(
        self,
        value: Any,
        store: Callable[[Tensor], str] | None = None,
        prepare: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """A value as JSON.

        Args:
            value: a dataclass, or what a field of one can be.
            store: stores a tensor and returns its name; without it, tensors are refused.
            prepare: called with each dataclass, inner ones too; the value that it returns is encoded instead.

        Raises:
            error: a class that is not in the table; a tensor without `store`.
        """
        if is_dataclass(value) and not isinstance(value, type):
            value = prepare(value)
            name = next((name for name, kind in self.classes.items() if kind is type(value)), None)
            if name is None:
                own = type(value).__name__
                raise self.error(
                    f"{self.subject} holds a {own}, which is none of regard's own: a file cannot name it; "
                    f"{nearest(own, self.classes)}"
                )
            return {self.tag: name} | {
                field.name: self.encode(getattr(value, field.name), store, prepare) for field in _init_fields(value)
            }
        if isinstance(value, list | tuple):
            return [self.encode(item, store, prepare) for item in value]
        if isinstance(value, Tensor):
            if store is None:
                raise self.error(f"{self.subject} holds a tensor of shape {tuple(value.shape)}; it needs plain values")
            return {"array": store(value)}
        return value

    def decode(
        self,
        tree: Any,
        tensors: Mapping[str, Tensor] | None = None,
        check: Callable[[str, Mapping[str, Any]], None] = lambda name, values: None,
    ) -> Any:
        """The value of which `encode` returned the JSON; fields that are missing take their defaults.

        Args:
            tree: the JSON.
            tensors: the tensors that may be referred to, by their names.
            check: called with a class's name in the file and its fields before each object is built; raises where they
                do not fit.

        Raises:
            error: a name or a field that is unknown or missing, a tensor that is not there, fields that the class
                refuses, or values that are nested too deep.
        """
        return self._decode(tree, {} if tensors is None else tensors, check, DEEPEST)

    def _decode(self, tree: Any, tensors: Mapping[str, Tensor], check: Callable[..., None], depth: int) -> Any:
        if not depth:
            raise self.error(f"{self.subject} is nested deeper than {DEEPEST} times")
        if isinstance(tree, list):
            return tuple([self._decode(item, tensors, check, depth - 1) for item in tree])
        if isinstance(tree, int) and abs(tree) > LARGEST:
            raise self.error(f"{self.subject} has a whole number of more than {LARGEST:,}")
        if not isinstance(tree, dict):
            return tree
        if set(tree) == {"array"}:
            name = tree["array"]
            if not isinstance(name, str) or name not in tensors:
                raise self.error(f"{self.subject} refers to the array {str(name)[:80]!r}, which is not there")
            return tensors[name]
        name = tree.get(self.tag)
        if not isinstance(name, str) or name not in self.classes:
            shown = str(name)[:80]
            raise self.error(f"{self.subject} names {shown!r}, which is unknown here; {nearest(shown, self.classes)}")
        kind = self.classes[name]
        parts = {part: self._decode(item, tensors, check, depth - 1) for part, item in tree.items() if part != self.tag}
        allowed = _init_fields(kind)
        values = {field.name: parts[field.name] if field.name in parts else _default(field) for field in allowed}
        if parts.keys() - values.keys() or any(value is MISSING for value in values.values()):
            raise self.error(
                f"{name!r} in {self.subject} has {sorted(tree)[:9]}; it needs {self.tag!r} and {list(values)}"
            )
        check(name, values)
        try:
            return kind(**values)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise self.error(f"{name!r} in {self.subject} cannot be built: {error}") from None


DERIVED = MappingProxyType({"derived": True})
"""Metadata of a field, with a default, that follows from the others: it is not written."""


def _init_fields(kind: Any) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.init and field.metadata != DERIVED]


def _default(field: Field[Any]) -> Any:
    """The default of a field, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()
