"""Rules about masks, caps and options that are computed, passed or stored, and have no effect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import path, product
from ..finding import Severity
from ..module_facts import Function, ModuleFacts, defaults_of
from ..term import is_none
from .base import Report, class_around, function_around, is_used_as_value, last_name, names_below, parameters, rule

_PURE = frozenset(
    {
        *("masked_fill", "masked_scatter", "where", "tanh", "clamp", "softmax", "tril", "triu", "add", "mul", "div"),
        *("sub", "float", "half", "bfloat16", "transpose", "permute", "unsqueeze", "repeat_interleave", "logical_not"),
    }
)
"""Functions and methods of torch that return a new tensor."""
_CONTAINERS = frozenset({"add", "mul", "div", "sub"})
"""Names of `_PURE` that sets and other containers have as methods with an effect."""
_TENSORS = re.compile(
    r"^(\w*_)?(scores?|attn?|attention|mask|bias|weight|logits?|energy|sim|dots|q|k|v|x|query|key|value)$", re.I
)
_EFFECTS = re.compile(r"(^|_)(mask|bias|capped|softcap\w*|causal|future|padding|keep)$|^(mask|bias|capped)_|cap(ped)?$")
_OPTIONS = re.compile(
    r"^_?(attn_)?(logits?_|attention_)?(soft_?cap\w*|logit_cap|causal|is_causal|is_decoder|decoder|bidirectional|"
    r"window|window_size|sliding_window|local_window|use_causal_mask|causal_mask|mask_future|alibi|use_alibi)$"
)
_MASKS = re.compile(
    r"^(attn_|attention_|causal_|key_padding_|padding_|pad_|src_|tgt_|trg_|key_|encoder_|memory_|context_|document_|doc_"
    r"|source_|audio_|image_|text_|window_)*mask$|^(cu_seqlens|document_ids|doc_ids|segment_ids|is_causal|causal|use_causal_mask|soft_?cap|logit_cap|window_size)$"
    r"|^(\w+_)?valid(_mask)?$|^(src_|tgt_|seq_|key_|padding_)?(lengths|lens)$"
)
_HUGGING_FACE = re.compile(r"transformers|PreTrainedModel|ALL_ATTENTION_FUNCTIONS")


def _weighing_functions(facts: ModuleFacts) -> Iterator[Function]:
    """The functions that attend, that compute the weights of products alone, or that call what attends in this file."""
    nodes = [*_attending_functions(facts).values(), *(site.event.call for site in facts.sites)]
    for event in facts.operations("softmax"):
        if path(event.term.input, lambda term: product(term) is not None) is not None:
            nodes.append(event.node)
    found = (function_around(node, facts) for node in nodes if node is not None)
    yield from dict.fromkeys(function for function in found if function is not None)


def _attending_functions(facts: ModuleFacts) -> dict[Function, ast.AST]:
    """The functions in whose own text attention is computed, each with the first place of it."""
    found: dict[Function, ast.AST] = {}
    for site in facts.sites:
        function = function_around(site.node, facts)
        if function is not None:
            found.setdefault(function, site.node)
    return found


@rule("ATT251", Severity.ERROR)
def dropped_result(facts: ModuleFacts) -> Iterator[Report]:
    """A mask or a cap is computed, and the result is dropped."""
    if not facts.sites:
        return
    for node in facts.nodes[ast.Expr]:
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in _PURE:
            continue
        shown = facts.path.endswith(".ipynb") and function_around(node, facts) is None  # what a cell ends with
        if shown or _is_expected_to_raise(node, facts):
            continue
        if call.func.attr in _CONTAINERS and (not _TENSORS.search(last_name(call.func.value)) or _adds_an_entry(call)):
            continue
        if not any(keyword.arg == "out" for keyword in call.keywords) and (call.args or call.func.attr == "tanh"):
            yield Report(call, f"the result of {call.func.attr} is dropped: assign it, or use the method in place")
    for function in _attending_functions(facts):
        read = names_below(function, ast.Load)
        for node in (one for one in ast.walk(function) if isinstance(one, ast.Assign) and _is_computed(one.value)):
            target = node.targets[0]
            is_unread = len(node.targets) == 1 and isinstance(target, ast.Name) and target.id not in read
            if is_unread and _EFFECTS.search(last_name(target)):
                yield Report(node, f"`{last_name(target)}` is computed, and nothing uses it")
        yield from _replaced(function)


def _is_expected_to_raise(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a statement stands in `with pytest.raises(...)` or the like, so that its result is none."""
    above = facts.parents.get(node)
    items = above.items if isinstance(above, ast.With) else []
    return any("raises" in ast.unparse(one.context_expr).lower() for one in items)


def _adds_an_entry(call: ast.Call) -> bool:
    """Whether what a container gets is a text, as the name of a weight is."""
    return any(
        isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", None), str) for one in call.args
    ) or any(re.search(r"name|key|path|prefix", ast.unparse(one)) for one in call.args)


def _is_computed(value: ast.expr) -> bool:
    """Whether a value is the result of a computation, not a part of another value or a constant."""
    return isinstance(value, ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare) and not (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("pop", "get")
    )


def _replaced(function: Function) -> Iterator[Report]:
    """Masks that the same block of statements binds anew before they are read."""
    for block in (body for node in ast.walk(function) for body in _blocks(node)):
        waiting: dict[str, ast.Assign] = {}
        for statement in block:
            read = names_below(statement, ast.Load)
            waiting = {name: node for name, node in waiting.items() if name not in read}
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and _MASKS.match(target.id):
                if target.id in waiting:
                    yield Report(statement, f"this replaces the `{target.id}` computed before, which nothing read")
                if _is_computed(statement.value):
                    waiting[target.id] = statement


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list):
            yield body


@rule("ATT252", Severity.WARNING)
def ignored_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A function that attends takes a mask, or an option of masks, and does not read it."""
    prescribed = _HUGGING_FACE.search(facts.source)
    for function in _weighing_functions(facts):
        passed = parameters(function)
        read = names_below(function, ast.Load)
        methods = isinstance(facts.parents.get(function), ast.ClassDef)
        private = function.name.startswith("_") and function.name != "__call__"
        if (prescribed and methods) or private or _only_raises(function):
            continue
        replaces = not methods and bool(passed) and passed[0].arg == "self"  # a method of another file
        if (
            replaces
            or _is_handed_out(function, facts)
            or (methods and _has_unknown_base(facts.parents[function], facts))
        ):
            continue
        unread = [one for one in passed if _MASKS.match(one.arg) and one.arg not in read]
        names = {one.arg for one in unread}
        if {"tgt_mask", "memory_mask"} <= names or {"src_mask", "src_key_padding_mask"} <= names:
            continue  # a layer for nn.TransformerDecoder or nn.TransformerEncoder, which pass all of their masks
        for one in unread:
            if not (prescribed and _is_prescribed(one, function)) and not _is_said_unused(one, function):
                yield Report(
                    one,
                    f"`{function.name}` takes `{one.arg}` and does not use it",
                    unless=_why_unused(one.arg, function, facts, shared=not prescribed),
                )
    if not prescribed:
        yield from _unread_options(facts)
    yield from _unread_buffers(facts)


def _why_unused(name: str, function: Function, facts: ModuleFacts, *, shared: bool) -> str:
    """A reason why a function may take a mask that it does not use; `shared`: other functions may prescribe it."""
    if not _is_passed(name, function, facts):
        return "callers know that it has no effect"
    if shared and _has_sibling(function, facts):
        return "it takes the arguments of the functions in whose place it can be called"
    return ""


def _has_sibling(function: Function, facts: ModuleFacts) -> bool:
    """Whether another function of the file, which this one does not call, has nearly the same parameters."""
    own = {one.arg for one in parameters(function)} - {"self"}
    written = ast.unparse(function)
    for other in facts.nodes[ast.FunctionDef]:
        names = {one.arg for one in parameters(other)} - {"self"}
        calls = other.name != function.name and (
            f"{function.name}(" in ast.unparse(other) or f"{other.name}(" in written
        )
        if other is not function and not calls and len(own & names) >= max(4, 0.7 * len(own | names)):
            return True
    return False


def _has_unknown_base(class_: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a class of another file, which may prescribe the parameters, is a base."""
    bases = [last_name(base) for base in class_.bases] if isinstance(class_, ast.ClassDef) else []
    return any(base not in ("Module", "Layer", "object", "ABC", "Function", *facts.classes) for base in bases)


def _is_passed(name: str, function: Function, facts: ModuleFacts) -> bool:
    """Whether a call in the file, outside of the function, passes a value by that name that is not just handed on."""
    for call in facts.nodes[ast.Call]:
        around = function_around(call, facts)
        values = [one.value for one in call.keywords if one.arg == name]
        values += [one for one in call.args if last_name(one) == name]
        if around is not function and any(not _is_handed_on(value, around) for value in values):
            return True
    return False


def _is_handed_on(value: ast.expr, function: Function | None) -> bool:
    """Whether a value is None, or a parameter of the function around that may be left out and is not bound anew."""
    if isinstance(value, ast.Constant):
        return value.value is None
    if function is None or not isinstance(value, ast.Name):
        return False
    return value.id in defaults_of(function) and value.id not in names_below(function, ast.Store)


def _is_handed_out(function: Function, facts: ModuleFacts) -> bool:
    """Whether a function or its class is registered, or it is stored or passed on: callers prescribe its parameters."""
    class_ = facts.parents[function]
    decorators = [*function.decorator_list, *(class_.decorator_list if isinstance(class_, ast.ClassDef) else ())]
    return any("regist" in ast.unparse(one).lower() for one in decorators) or is_used_as_value(function, facts)


def _is_said_unused(parameter: ast.arg, function: Function) -> bool:
    """Whether the docstring of a function says that a parameter is not used."""
    written = ast.get_docstring(function) or ""
    return (
        re.search(
            rf"\b{parameter.arg}\b[^:]*:[^:]*\b(not used|unused|ignored|not implemented|not supported)\b", written, re.I
        )
        is not None
    )


def _is_prescribed(parameter: ast.arg, function: Function) -> bool:
    """Whether a mask is a parameter of an interface, and the function makes no causal mask in its place."""
    return parameter.arg == "attention_mask" and "is_causal" not in ast.unparse(function)


def _only_raises(function: Function) -> bool:
    return all(isinstance(one, ast.Raise | ast.Pass | ast.Expr) for one in function.body)


def _unread_options(facts: ModuleFacts) -> Iterator[Report]:
    """Options of attention that the constructor of a module stores, and of which nothing in the file is read."""
    if not facts.sites:
        return
    stored: dict[str, ast.Attribute] = {}
    attending = {id(class_around(function, facts)) for function in _weighing_functions(facts)}
    for node in facts.nodes[ast.Attribute]:
        value = getattr(facts.parents.get(node), "value", None)
        if not _attends(class_around(node, facts), attending, facts):
            continue
        made = isinstance(value, ast.Call | ast.Constant)  # a module of that name, or no choice
        option = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self" and _OPTIONS.match(node.attr)
        if option and not made:
            stored.setdefault(node.attr, node)
    for node in facts.nodes[ast.Attribute]:
        if not isinstance(node.ctx, ast.Store) and not _is_option_source(node, facts):
            stored.pop(node.attr, None)
    for name, node in stored.items():
        constructor = function_around(node, facts)
        nodes = ast.walk(constructor) if constructor is not None else ()
        if sum(isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load) for one in nodes) > 1:
            continue  # the constructor chooses by it what it makes
        if f'"{name}"' not in facts.source and f"'{name}'" not in facts.source:
            yield Report(node, f"`self.{name}` is stored, and nothing reads it: attention does not depend on it")


def _attends(class_: ast.ClassDef | None, attending: set[int], facts: ModuleFacts) -> bool:
    """Whether a class has a function that attends, or a base or subclass of it in the file has."""
    family = [class_] if class_ is not None else []
    for one in family:  # grows while it is read
        names = {last_name(base) for base in one.bases}
        related = (other for other in facts.nodes[ast.ClassDef] if other not in family)
        family += [
            other for other in related if other.name in names or one.name in {last_name(base) for base in other.bases}
        ]
    return any(id(one) in attending for one in family)


def _unread_buffers(facts: ModuleFacts) -> Iterator[Report]:
    """Masks that a constructor stores as a buffer, and that nothing in the file reads."""
    if not facts.sites:
        return
    read = {node.attr for node in facts.nodes[ast.Attribute] if not isinstance(node.ctx, ast.Store)}
    for event in facts.operations("method"):
        term = event.term
        name = term.items[0].value if term.value == "register_buffer" and term.items else None
        if not isinstance(name, str) or not _MASKS.match(name) or name in read or event.class_ is None:
            continue
        if (len(term.items) > 1 and is_none(term.items[1])) or _has_unknown_base(event.class_.node, facts):
            continue
        mentioned = [one for one in facts.nodes[ast.Constant] if one.value == name]
        if len(mentioned) == 1 and isinstance(term.node, ast.Call):
            yield Report(term.node, f"the buffer `{name}` is stored, and nothing reads it: nothing is masked by it")


def _is_option_source(node: ast.Attribute, facts: ModuleFacts) -> bool:
    """Whether an attribute is the right side of an assignment to an attribute of its name."""
    above = facts.parents.get(node)
    return isinstance(above, ast.Assign) and any(
        isinstance(target, ast.Attribute) and target.attr == node.attr for target in above.targets
    )
