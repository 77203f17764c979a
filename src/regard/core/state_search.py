"""The search for what a mask, a bias or a function of the user's reads: the places of its `State`.

A function reads what its code names: closure cells, globals and attributes, and what the functions that it calls read.
All are looked up once. Code that finds what it reads in another way, writes to it or draws random numbers cannot be
known by its names: it has no state.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from .state import MISSING, VALUES, State, cell_content, counted

MOST_PLACES = 64
"""The most places that are compared: what reads more has no state."""
DICTS, LISTS = (dict, OrderedDict, defaultdict, Counter), (list, deque)
FIXED = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.EllipsisType)
LIBRARY = "regard"
TRUSTED = frozenset((LIBRARY, "torch", "numpy", "math", "cmath", "operator", "functools", "typing", "enum", "abc"))
"""The packages whose functions read nothing but what they were given: arguments, closures and defaults."""
CONSTRUCTORS = frozenset(("__init__", "__new__", "__post_init__"))
UNREAD = frozenset(("__repr__", "__str__", "__setattr__", "__delattr__", "__getstate__", "__subclasshook__"))
"""Python's own methods that no formula calls."""
DYNAMIC = frozenset(
    ("getattr", "hasattr", "vars", "dir", "globals", "locals", "eval", "exec", "open", "input", "next", "__dict__")
)
MUTATING = frozenset(
    ("append", "appendleft", "extend", "insert", "setdefault", "pop", "popleft", "popitem", "update", "discard")
)
WRITING = frozenset(("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR"))
RANDOM = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "random", "random_", "normal")
) | frozenset(
    ("normal_", "bernoulli", "bernoulli_", "multinomial", "poisson", "uniform_", "exponential_", "dropout", "rrelu")
)


class UnknownStateError(Exception):
    """What a value reads cannot be known."""


def state_of(value: Any) -> State | None:
    """The state of what a mask, a bias or a function reads; None where that cannot be known.

    >>> import torch
    >>> limit = torch.tensor(3)
    >>> state = state_of(lambda q, k, limit=limit: k <= limit)
    >>> state.is_current(), limit.add_(1), state.is_current()
    (True, tensor(4), False)
    >>> state_of(iter((3, 4))) is None  # what an iterator gives next
    True
    """
    names, known = set[str](), -1
    try:
        while known != len(names):  # of code that was found late the names count for what was found before
            known = len(names)
            search = _Search(names)
            search.add(value)
    except UnknownStateError:
        return None
    return search.found


class _Search:
    """A walk through what a value reads. `names`: the attributes that code reads; of an object no others are read."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.found = names, State()
        self.visited: dict[int, Any] = {}  # by id; an object that is gone would leave its id to another

    def add(self, value: Any) -> None:
        """Add the places that a value reads.

        Raises:
            UnknownStateError: they cannot be known.
        """
        if isinstance(value, VALUES) or value is MISSING or id(value) in self.visited:
            return
        self.visited[id(value)] = value
        if len(self.found) > MOST_PLACES:
            raise UnknownStateError
        match value:
            case Tensor():
                if (found := counted(value)) is None:
                    raise UnknownStateError
                self.found.tensors.append(found)
            case types.FunctionType():
                self._add_function(value)
            case types.MethodType():
                self._add_all((value.__func__, value.__self__))
            case functools.partial():
                self._add_all((value.func, *value.args, *value.keywords.values()))
            case functools._lru_cache_wrapper() | staticmethod() | classmethod():
                self.add(value.__wrapped__)
            case property():
                self.add(value.fget)
            case functools.cached_property():
                self.add(value.func)
            case types.BuiltinFunctionType():
                self._add_builtin(value)
            case types.ModuleType():
                self._add_module(value)
            case type():
                self._add_class(value, UNREAD)
            case _ if type(value) not in FIXED:
                self._add_object(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _add_entry(self, mapping: Mapping, key: Any) -> None:
        seen = mapping.get(key, MISSING)
        self.found.entries.append((mapping, key, seen))
        self.add(seen)

    def _add_contents(self, listed: Callable[[Any], tuple], container: Any) -> None:
        seen = listed(container)
        self.found.contents.append((listed, container, seen))
        self._add_all(seen)

    def _add_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            seen = cell_content(cell)
            self.found.cells.append((cell, seen))
            self.add(seen)
        self._add_all((function.__defaults__, *(function.__kwdefaults__ or {}).values()))
        if _is_trusted(function.__module__):
            return
        names = _names(function.__code__)
        self.names |= names
        for name in sorted(names):
            for namespace in (function.__globals__, function.__dict__):
                if name in namespace:
                    self._add_entry(namespace, name)

    def _add_builtin(self, function: types.BuiltinFunctionType) -> None:
        bound = function.__self__
        if bound is not None and not isinstance(bound, types.ModuleType | type):
            self.add(bound)
        elif not _is_trusted(function.__module__ or getattr(bound, "__name__", "")):
            raise UnknownStateError

    def _add_module(self, module: types.ModuleType) -> None:
        if not _is_trusted(module.__name__):
            for name in sorted(self.names & vars(module).keys()):
                self._add_entry(vars(module), name)

    def _add_class(self, kind: type, unread: frozenset[str]) -> None:
        """The attributes of a class that code reads; of one that extends a class of the library it may read all."""
        for each in kind.__mro__:
            if each is object or _is_trusted(each.__module__):
                continue
            namespace = _namespace(each)
            if "__getattr__" in namespace or "__getattribute__" in namespace:
                raise UnknownStateError
            for name, held in namespace.items():
                if isinstance(held, types.MemberDescriptorType | types.GetSetDescriptorType):
                    continue
                if name.startswith(("__", "_abc_")):
                    is_read = isinstance(held, types.FunctionType) and name not in unread
                else:
                    is_read = name in self.names or _extends_library(kind)
                if is_read:
                    self._add_entry(namespace, name)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        if kind in LISTS:
            self._add_contents(tuple, value)
        elif kind in DICTS:
            self._add_contents(tuple, value)
            for key in value:
                self._add_entry(value, key)
        elif kind is set and "add" not in self.names:
            self._add_contents(_in_order, value)
        elif isinstance(value, tuple | frozenset):
            self._add_all(value)
        elif kind.__module__.split(".")[0] == LIBRARY and is_dataclass(value):
            self._add_all(getattr(value, each.name) for each in fields(value) if each.init)
        elif kind.__module__.split(".")[0] == LIBRARY and not isinstance(value, nn.Module):
            for name in _read_names(vars(value)):
                self._add_entry(vars(value), name)
        elif _is_trusted(kind.__module__) or kind.__module__ in ("builtins", "collections", "weakref"):
            raise UnknownStateError
        else:
            self._add_class(kind, UNREAD | CONSTRUCTORS)
            self._add_attributes(value)

    def _add_attributes(self, value: Any) -> None:
        """The attributes of an object of a user's class."""
        kind, held = type(value), getattr(value, "__dict__", None)
        if isinstance(value, nn.Module):
            self.names.add("forward")
            namespaces = vars(value), value._parameters, value._buffers, value._modules
            for name in sorted(self.names):
                for namespace in (each for each in namespaces if name in each):
                    self._add_entry(namespace, name)
        elif _is_frozen(kind):  # its fields do not change, so that equal ones read the same
            self._add_all(getattr(value, each.name) for each in fields(kind))
        elif held is not None:
            for name in _read_names(held if _extends_library(kind) else self.names):
                self._add_entry(held, name)
        if any(vars(each).get("__slots__") for each in kind.__mro__):
            self._add_contents(_slots, value)


def _read_names(names: Iterable[str]) -> list[str]:
    """Names of attributes without those of what the library remembers."""
    return sorted(name for name in names if not name.startswith("_memo"))


def _in_order(values: set) -> tuple:
    return tuple(sorted(values, key=hash))


def _slots(value: Any) -> tuple:
    """What the slots of an object hold."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = (name for each in slots for name in ((each,) if isinstance(each, str) else each))
    return tuple(getattr(value, name, MISSING) for name in names if name not in ("__dict__", "__weakref__"))


def _is_trusted(module: str | None) -> bool:
    return (module or "").split(".")[0] in TRUSTED


def _is_frozen(kind: Any) -> bool:
    return is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _extends_library(kind: type) -> bool:
    return any(each.__module__.split(".")[0] == LIBRARY for each in kind.__mro__)


@functools.lru_cache(maxsize=1024)
def _namespace(kind: type) -> Mapping[str, Any]:
    """The attributes of a class: the same object in each call, as `vars` makes a new one."""
    return vars(kind)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that a function's code names, and that of the functions in it.

    Raises:
        UnknownStateError: it draws random numbers, finds what it reads by names that are not in the code, or writes to
            what it may read.
    """
    found = set(code.co_names)
    if not found.isdisjoint(RANDOM | DYNAMIC | MUTATING):
        raise UnknownStateError
    for each in dis.get_instructions(code):
        imports = each.opname == "IMPORT_NAME" and not _is_trusted(each.argval)
        if imports or each.opname in WRITING or (each.opname == "STORE_DEREF" and each.argval in code.co_freevars):
            raise UnknownStateError
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return frozenset(found)
