"""A value taken apart into its tensors and the form around them, and put together again.

torch's transforms know tensors, not masks: an operator, a saved graph and a vectorised map take a flat list of tensors.
What is left of a value without them, its form, is a plain word that reads as the value was written, so that it means
the same in every process.
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


def tree_flatten(value: Any) -> tuple[list[Tensor], str]:
    """The tensors of a value in their order, and its form, where `_0` stands for the first of them.

    A value is a dataclass, a tuple, a number, a word, None or a tensor, and so are its parts.

    >>> import torch
    >>> tensors, form = tree_flatten((torch.zeros(2), None, 0.5))
    >>> form
    '(_0, None, 0.5)'
    """
    tensors: list[Tensor] = []
    return tensors, _form(value, tensors)


def tree_tensors(value: Any) -> list[Tensor]:
    """The tensors of a value alone, as `tree_flatten` gives them.

    >>> import torch
    >>> tree_tensors((torch.zeros(2), None, 0.5))
    [tensor([0., 0.])]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tree_tensors(part)]
    return [tensor for name in _parts(type(value)) for tensor in tree_tensors(getattr(value, name))]


@cache
def _parts(kind: type) -> tuple[str, ...]:
    """The names of what a value of a dataclass is made from; none of any other value's."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else ()


def tree_unflatten(form: str, tensors: Sequence[Tensor]) -> Any:
    """The value of a form over other tensors, or the same ones.

    >>> tree_unflatten("(1, _0)", ["a tensor"])
    (1, 'a tensor')
    """
    return _builder(form)(tensors)


def _form(value: Any, tensors: list[Tensor]) -> str:
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"_{len(tensors) - 1}"
    if is_dataclass(value):
        kind = type(value)
        parts = [_form(getattr(value, field.name), tensors) for field in fields(value) if field.init]
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return "(" + "".join(_form(part, tensors) + ", " for part in value)[: -2 if len(value) > 1 else None] + ")"
    if isinstance(value, range):
        return f"builtins.range({_form(value.start, tensors)}, {_form(value.stop, tensors)})"
    if value is None or isinstance(value, bool | int | float | str):
        if torch.compiler.is_compiling():
            return _compiled_word(value)
        word = repr(value)
        return _WITHOUT_LITERAL.get(word, word)
    return f"{__name__}.{_recalled.__name__}({remembered(value)!r})"


def _compiled_word(value: bool | int | float | str | None) -> str:
    """The same under torch.compile, which may let a number vary and then has no repr of it: what it is now, exactly."""
    if isinstance(value, float):
        return f"builtins.float.fromhex({value.hex()!r})"
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(operator.index(value))
    return repr(value)


_WITHOUT_LITERAL = {"inf": "1e999", "-inf": "-1e999", "nan": "(1e999 - 1e999)"}

# What has no form of its own, such as a function, is remembered by a word that no other process uses.
_PROCESS, _numbers = secrets.token_hex(8), itertools.count()
_words: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def remembered(value: Any) -> str:
    """The word for a value; what is to be used under torch.compile has to be known before."""
    word = _words.get(value)
    if word is None:
        word = _words[value] = f"{_PROCESS}-{next(_numbers)}"
        _values[word] = value
    return word


def _recalled(word: str) -> Any:
    return _values[word]


Builder = Callable[[Sequence[Tensor]], Any]


@lru_cache(maxsize=1024)
def _builder(form: str) -> Builder:
    return _build(ast.parse(form, mode="eval").body)


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
    """A class, or another function, by the name of its module and its own."""
    if name == "builtins.float.fromhex":
        return float.fromhex
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)
