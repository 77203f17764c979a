"""A value taken apart into its tensors and the form around them, and put together again.

torch's transforms know tensors, not masks: an operator, a saved graph and a vectorised map take a flat list of tensors.
What is left of a value without them, its form, is a plain word that reads as the value was written, so that it means
the same in every process.
"""

from __future__ import annotations

import ast
import importlib
import math
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor


def take_apart(value: Any) -> tuple[list[Tensor], str]:
    """The tensors of a value in their order, and its form, where `_0` stands for the first of them.

    A value is a dataclass, a tuple, a number, a word, None or a tensor, and so are its parts.

    >>> import torch
    >>> tensors, form = take_apart((torch.zeros(2), None, 0.5))
    >>> form
    '(_0, None, 0.5)'
    """
    tensors: list[Tensor] = []
    return tensors, _form(value, tensors)


def put_together(form: str, tensors: Sequence[Tensor]) -> Any:
    """The value of a form over other tensors, or the same ones.

    >>> put_together("(1, _0)", ["a tensor"])
    (1, 'a tensor')
    """
    return _builder(form)(tensors)


def _form(value: Any, tensors: list[Tensor]) -> str:
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"_{len(tensors) - 1}"
    if is_dataclass(value):
        kind = type(value)
        parts = [_form(getattr(value, field.name), tensors) for field in fields(value)]
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return "(" + "".join(_form(part, tensors) + ", " for part in value)[: -2 if len(value) > 1 else None] + ")"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"  # infinity has no literal of its own
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return f"{__name__}.{_recalled.__name__}({_remembered(value)!r})"


# What has no form of its own, such as a function, is remembered by a word that no other process uses.
_PROCESS = secrets.token_hex(8)
_words: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def _remembered(value: Any) -> str:
    word = _words.get(value)
    if word is None:
        word = _words[value] = f"{_PROCESS}-{len(_words)}-{id(value)}"
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
        case _:
            literal = ast.literal_eval(node)
            return lambda tensors: literal


def _class(name: str) -> type:
    """A class by the name of its module and its own."""
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)
