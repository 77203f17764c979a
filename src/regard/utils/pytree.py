"""Flatten a value into tensors plus a spec string, and rebuild it: pytrees of dataclasses and tuples.

torch's transforms know tensors, not masks: an operator, a saved graph and a vectorised map take a flat list of tensors.
The spec is a Python expression for the value with the tensors as variables, so that it means the same in every process.
It passes within programs that already run any code, names any class and is rebuilt in each call; files, which name only
the classes of a table, are written by `utils.dataclass_json`.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import operator
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError


def tree_flatten(value: Any) -> tuple[list[Tensor], str]:
    """The tensors of a value in order, and its spec, in which `_0` stands for the first of them.

    A value is a dataclass, a tuple, a number, a string, None or a tensor, and so are its parts.

    >>> import torch
    >>> tensors, spec = tree_flatten((torch.zeros(2), None, 0.5))
    >>> spec
    '(_0, None, 0.5)'
    """
    tensors: list[Tensor] = []
    return tensors, _spec(value, tensors)


def tree_tensors(value: Any) -> list[Tensor]:
    """The tensors of a value, in the order of `tree_flatten`.

    >>> import torch
    >>> tree_tensors((torch.zeros(2), None, 0.5))
    [tensor([0., 0.])]
    """
    tensors: list[Tensor] = []
    _add_tensors((value,), tensors)
    return tensors


def _add_tensors(parts: Sequence[Any], tensors: list[Tensor]) -> None:
    """Append the tensors of some parts of a value; most are None, and take no call of a function."""
    for part in parts:
        if isinstance(part, Tensor):
            tensors.append(part)
        elif isinstance(part, tuple):
            _add_tensors(part, tensors)
        elif part is not None and (names := _parts(type(part), torch.compiler.is_exporting())):
            _add_tensors([getattr(part, name) for name in names], tensors)


ONLY_IN_GRAPHS = "_only_in_graphs"
"""The attribute of a dataclass that names fields, with defaults, which are parts of it in exported graphs alone."""


def part_names(value: Any) -> list[str]:
    """The names of a dataclass's init fields, which are its parts; torch.compile traces it, of an object."""
    left_out = () if torch.compiler.is_exporting() else getattr(value, ONLY_IN_GRAPHS, ())
    return [field.name for field in fields(value) if field.init and field.name not in left_out]


@cache
def _parts(kind: type, exporting: bool) -> list[str]:
    """`part_names` of a dataclass, remembered; none for any other type."""
    return part_names(kind) if is_dataclass(kind) else []


def tree_unflatten(spec: str, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a value from its spec and tensors.

    >>> tree_unflatten("(1, _0)", ["a tensor"])
    (1, 'a tensor')
    """
    return _builder(spec)(tensors)


def tree_replace(value: Any, tensors: Sequence[Tensor]) -> Any:
    """A value with other tensors, in the order of `tree_tensors`; torch.compile traces it.

    >>> import torch
    >>> tree_replace((torch.zeros(2), None, 0.5), [torch.ones(1)])
    (tensor([1.]), None, 0.5)
    """
    left = list(tensors)
    return _replaced(value, left)


def _replaced(value: Any, left: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return left.pop(0)
    if isinstance(value, tuple):
        return tuple(_replaced(part, left) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*[_replaced(getattr(value, name), left) for name in part_names(value)])
    return value


def _spec(value: Any, tensors: list[Tensor]) -> str:
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"_{len(tensors) - 1}"
    if is_dataclass(value):
        kind = type(value)
        parts = [_spec(getattr(value, name), tensors) for name in part_names(value)]
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return "(" + "".join(_spec(part, tensors) + ", " for part in value)[: -2 if len(value) > 1 else None] + ")"
    if isinstance(value, range):
        return f"builtins.range({_spec(value.start, tensors)}, {_spec(value.stop, tensors)})"
    if value is None or isinstance(value, bool | int | float | str):
        if torch.compiler.is_compiling():
            return _compiled_literal(value)
        literal = repr(value)
        return _WITHOUT_LITERAL.get(literal, literal)
    return f"{__name__}.{_object_of_token.__name__}({object_token(value)!r})"


def _compiled_literal(value: bool | int | float | str | None) -> str:
    """A literal under torch.compile, where a number may be symbolic and has no repr: its current value, exactly."""
    if isinstance(value, float):
        return f"builtins.float.fromhex({value.hex()!r})"
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(operator.index(value))
    return repr(value)


_WITHOUT_LITERAL = {"inf": "1e999", "-inf": "-1e999", "nan": "(1e999 - 1e999)"}

# What has no spec of its own, such as a function, is stored under a token that no other process uses.
_PROCESS, _numbers = secrets.token_hex(8), itertools.count()
_tokens: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_in_programs: dict[str, Any] = {}  # what an exported program needs after the call that made it has ended


def object_token(value: Any) -> str:
    """A token for an object without a literal; under torch.compile the token must exist already."""
    token = _tokens.get(value)
    if token is None:
        token = _tokens[value] = f"{_PROCESS}-{next(_numbers)}"
        _values[token] = value
    if torch.compiler.is_exporting():
        _in_programs[token] = value
    return token


def _object_of_token(token: str) -> Any:
    if token in _values:
        return _values[token]
    raise ExportError(
        "the program has a mask, bias or normalizer that is no dataclass, or holds a function: it is not in the file, "
        "but in the process that exported it. Save program.run_decompositions(regard.export.decompositions()) there"
    )


Builder = Callable[[Sequence[Tensor]], Any]


@lru_cache(maxsize=1024)
def _builder(spec: str) -> Builder:
    return _build(ast.parse(spec, mode="eval").body)


def _build(node: ast.expr) -> Builder:
    match node:
        case ast.Call(func=name, args=arguments):
            kind, parts = _class(ast.unparse(name)), [_build(argument) for argument in arguments]
            return lambda tensors: kind(*[part(tensors) for part in parts])
        case ast.Tuple(elts=elements):
            parts = [_build(element) for element in elements]
            return lambda tensors: tuple([part(tensors) for part in parts])
        case ast.Name(id=name):
            index = int(name[1:])
            return lambda tensors: tensors[index]
        case ast.BinOp():  # the one sum there is: not a number
            return lambda tensors: float("nan")
        case _:
            literal = ast.literal_eval(node)
            return lambda tensors: literal


def _class(name: str) -> Callable:
    """Look up a class or function by its qualified name."""
    if name == "builtins.float.fromhex":
        return float.fromhex
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)
