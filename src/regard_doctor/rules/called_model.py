"""What the text of a model says of its attention: its class, and the classes and functions that this one uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..module_facts import ClassFacts, ModuleFacts
from ..project_module import Definition, ProjectModule
from ..python_syntax import Function, below, parameters

_MOST = 80
"""Definitions that are read for one model."""
_ATTENDS = re.compile(
    r"^softmax$|^scaled_dot_product_attention$|^MultiheadAttention$|^Transformer((En|De)coder(Layer)?)?$|^flex_attention$"
    r"|^flash_attn|^memory_efficient_attention$"
)
_CAUSAL = re.compile(r"^tri[lu]_?$|subsequent|causal_?(mask|bias|att)|look_?ahead|^Causal", re.I)
_CACHE = re.compile(r"(^|_)(past|cache|caches|kv)(_|$)|^use_cache$|layer_past", re.I)
_MASK = re.compile(r"mask", re.I)
_OF_TRANSFORMERS = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForVision2Seq|ForSeq2SeqLM)$")
_LIBRARIES = frozenset(
    {"torch", "einops", "numpy", "math", "typing", "dataclasses", "functools", "collections", "__future__", "abc"}
)
"""Modules without a model of their own: what is imported from them leaves nothing unknown."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """What is written in a model: that it attends, that its mask is causal, that it has any, that it takes a cache.

    `named`: an annotation or an assignment says which model it is. `complete`: all of it could be read.
    """

    attends: bool = False
    causal: bool = False
    masked: bool = False
    cached: bool = False
    named: bool = False
    complete: bool = False

    @property
    def can_keep_keys(self) -> bool:
        """Whether earlier keys may stay as they are when a token is added: some token does not see all others."""
        return not self.complete or (self.attends and (self.causal or self.masked)) or self.cached

    @property
    def is_seen_to_keep_keys(self) -> bool:
        """Whether the class that is called was read, and its earlier keys stay as they are."""
        return self.named and not self.doubt

    @property
    def doubt(self) -> str:
        """The circumstance under which keys change with each token, where what was read does not exclude it."""
        if self.cached or (self.attends and self.causal):
            return ""
        return "its tokens see later ones" if self.attends else "the model has no keys, or its tokens see later ones"


def model_text(call: ast.Call, class_: ClassFacts | None, facts: ModuleFacts) -> ModelText:
    """What is written in the model that a call runs; `class_` is the one around the call.

    Where neither an annotation nor an assignment says which model it is, it is read for those that the file defines.
    """
    classes = {name: one.node for name, one in facts.classes.items()}
    module = ProjectModule(Path(facts.path), facts.imports, {**facts.functions, **classes})
    names = list(_models(call, class_, facts))
    published = (one for one in names if facts.imports.get(one, "").startswith("transformers."))
    if any(map(_OF_TRANSFORMERS.search, published)):
        return ModelText(attends=True, cached=True, named=True, complete=True)
    found = [one for name in names if (one := module.definition(name)) is not None]
    if found:
        return _common([_text([one]) for one in found])
    if names and all(facts.imports.get(name) for name in names):
        return ModelText()  # it is of a file that is not there
    defined = [Definition(one.node, module) for one in facts.classes.values() if "forward" in one.methods]
    return replace(_text(defined), complete=False)


def _common(models: list[ModelText]) -> ModelText:
    """What is written in the models that a call may run; nothing, where some keep their keys and others do not."""
    alike = len({bool(one.doubt) for one in models}) == 1
    return replace(models[0], named=True) if alike else ModelText(named=True)


def _models(call: ast.Call, class_: ClassFacts | None, facts: ModuleFacts) -> Iterator[str]:
    """The names of classes that the receiver of a call is annotated with, or made of."""
    receiver = _receiver(call.func)
    own = receiver.startswith("self.") and class_ is not None
    if class_ is not None and (receiver == "self" or (own and receiver.removeprefix("self.") in class_.methods)):
        yield class_.name
        return
    if not own:
        yield from _annotated(receiver, facts.function_around(call))
    for node in below(class_.node if own and class_ is not None else facts.tree, ast.Assign, ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if receiver in map(ast.unparse, targets):
            yield from _assigned(node, facts)


def _assigned(node: ast.Assign | ast.AnnAssign, facts: ModuleFacts) -> Iterator[str]:
    """The classes that an assignment names: by an annotation, its own or its value's, or by what it makes."""
    if isinstance(node, ast.AnnAssign):
        yield from _classes(node.annotation)
    if isinstance(node.value, ast.Call):  # `Model(...)`, `Model.from_pretrained(...)` and `models.Model(...)`
        yield from [part for part in ast.unparse(node.value.func).split(".") if part[:1].isupper()][:1]
    elif isinstance(node.value, ast.Name):
        yield from _annotated(node.value.id, facts.function_around(node))


def _receiver(called: ast.expr) -> str:
    """The model that is called: `model` of `model(x)` and of `model.decode(x)`, `self.net` of `self.net(x)`."""
    written = ast.unparse(called)
    if written == "self" or not written.startswith("self."):
        return written.partition(".")[0]
    parts = written.split(".")
    return "self" if len(parts) == 2 and parts[1] in ("forward", "__call__") else ".".join(parts[:2])


def _annotated(name: str, function: Function | None) -> Iterator[str]:
    for one in parameters(function):
        if one.arg == name and one.annotation is not None:
            yield from _classes(one.annotation)


def _classes(annotation: ast.expr) -> Iterator[str]:
    """The names in an annotation that are no base class of all models."""
    for node in below(annotation, ast.Name, ast.Constant):
        name = node.id if isinstance(node, ast.Name) else node.value
        if isinstance(name, str) and name.isidentifier() and name not in ("Module", "nn", "torch", "Any", "Callable"):
            yield name


def _text(models: Iterable[Definition]) -> ModelText:
    """What is written in models and in all that they use, as far as it can be read."""
    waiting = list(models)
    cached = any(_CACHE.search(name) for one in waiting for name in _parameters(one.node))
    seen, words, complete = set(), set(), True
    for one in waiting:  # grows while it is read
        if id(one.node) in seen:
            continue
        if len(seen) == _MOST:
            complete = False
            break
        seen.add(id(one.node))
        for word in _words(one.node):
            words.add(word)
            used = one.module.definition(word) if word[:1] != "." else None
            if used is not None:
                waiting.append(used)
            elif _is_unknown(word, one.module):
                complete = False
    plain = {word.lstrip(".") for word in words}
    return ModelText(
        attends=any(map(_ATTENDS.search, plain)),
        causal=any(map(_CAUSAL.search, plain)) or "is_causal=" in words or "causal=" in words,
        masked=any(map(_MASK.search, plain)),
        cached=cached,
        complete=complete,
    )


def _is_unknown(name: str, module: ProjectModule) -> bool:
    """Whether a name is imported from a file that is not there, and may be a part of a model."""
    imported = module.imports.get(name, "")
    return "." in imported and name[:1].isupper() and imported.partition(".")[0] not in _LIBRARIES


def _parameters(node: ast.AST) -> Iterator[str]:
    """The parameters of the methods that a model is called by."""
    for one in below(node, ast.FunctionDef, ast.AsyncFunctionDef):
        if one is node or one.name in ("forward", "__call__", "decode", "step"):
            yield from (parameter.arg for parameter in parameters(one))


def _words(node: ast.AST) -> Iterator[str]:
    """Names in a definition; an attribute begins with a dot, an option that is not switched off ends with `=`."""
    for one in ast.walk(node):
        match one:
            case ast.Name(id=name):
                yield name
            case ast.Attribute(attr=name) | ast.arg(arg=name):
                yield f".{name}"
            case ast.keyword(arg=name) if getattr(one.value, "value", True):
                yield f"{name}="
