"""Rules about masks, caps and options that are computed, passed or stored, and have no effect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import path, product
from ..finding import Severity
from ..module_facts import ModuleFacts
from ..python_syntax import Function, below, defaults_of, last_name, names_below, parameters
from ..term import is_none
from .base import Report, rule

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
    weights = (
        one for one in facts.operations("softmax") if path(one.term.input, lambda term: product(term) is not None)
    )
    nodes = [*(site.event.call for site in facts.sites), *(event.node for event in weights)]
    found = (facts.function_around(node) for node in nodes)
    yield from dict.fromkeys(one for one in (*_attending_functions(facts), *found) if one is not None)


def _attending_functions(facts: ModuleFacts) -> dict[Function, None]:
    """The functions in whose own text attention is computed."""
    found = (facts.function_around(site.node) for site in facts.sites)
    return dict.fromkeys(function for function in found if function is not None)


@rule("ATT251", Severity.ERROR)
def dropped_result(facts: ModuleFacts) -> Iterator[Report]:
    """A mask or a cap is computed, and the result is dropped."""
    for node in facts.nodes[ast.Expr] if facts.sites else ():
        match node.value:
            case ast.Call(func=ast.Attribute(value=changed, attr=name), args=given) as call if name in _PURE:
                shown = facts.path.endswith(".ipynb") and facts.function_around(node) is None  # what a cell ends with
                written = any(keyword.arg == "out" for keyword in call.keywords) or not (given or name == "tanh")
                tensor = _TENSORS.search(last_name(changed)) and not any(map(_is_text, given))
                container = name in _CONTAINERS and not tensor
                if not (shown or written or container or _is_expected_to_raise(node, facts)):
                    yield Report(call, f"the result of {name} is dropped: assign it, or use the method in place")
    for function in _attending_functions(facts):
        read = names_below(function, ast.Load)
        for node in (one for one in below(function, ast.Assign) if _is_computed(one.value)):
            name = node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else ""
            if name not in read and _EFFECTS.search(name):
                yield Report(node, f"`{name}` is computed, and nothing uses it")
        yield from _replaced(function)


def _is_expected_to_raise(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a statement stands in `with pytest.raises(...)` or the like, so that its result is none."""
    above = facts.parents.get(node)
    items = above.items if isinstance(above, ast.With) else []
    return any("raises" in ast.unparse(one.context_expr).lower() for one in items)


def _is_text(given: ast.expr) -> bool:
    """Whether what a container gets is a text, as the name of a weight is."""
    text = isinstance(given, ast.JoinedStr) or isinstance(getattr(given, "value", None), str)
    return text or re.search(r"name|key|path|prefix", ast.unparse(given)) is not None


def _is_computed(value: ast.expr) -> bool:
    """Whether a value is the result of a computation, not a part of another value or a constant."""
    part = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("pop", "get")
    return isinstance(value, ast.Call | ast.BinOp | ast.UnaryOp | ast.Compare) and not part


def _replaced(function: Function) -> Iterator[Report]:
    """Masks that the same block of statements binds anew before they are read."""
    fields = (getattr(node, name, None) for node in ast.walk(function) for name in ("body", "orelse", "finalbody"))
    for block in (body for body in fields if isinstance(body, list)):
        waiting: set[str] = set()
        for statement in block:
            waiting -= names_below(statement, ast.Load)
            match statement:
                case ast.Assign(targets=[ast.Name(id=name), *_]) if _MASKS.match(name):
                    if name in waiting:
                        yield Report(statement, f"this replaces the `{name}` computed before, which nothing read")
                    if _is_computed(statement.value):
                        waiting.add(name)


@rule("ATT252", Severity.WARNING)
def ignored_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A function that attends takes a mask, or an option of masks, and does not read it."""
    prescribed = _HUGGING_FACE.search(facts.source) is not None
    for function in _weighing_functions(facts):
        if _is_bound_to_parameters(function, facts) or (prescribed and _is_method(function, facts)):
            continue
        read = names_below(function, ast.Load)
        unread = [one for one in parameters(function) if _MASKS.match(one.arg) and one.arg not in read]
        names = {one.arg for one in unread}
        if {"tgt_mask", "memory_mask"} <= names or {"src_mask", "src_key_padding_mask"} <= names:
            continue  # a layer for nn.TransformerDecoder or nn.TransformerEncoder, which pass all of their masks
        for one in unread:
            if not (prescribed and _is_prescribed(one, function)) and not _is_said_unused(one, function):
                unless = _why_unused(one.arg, function, facts, shared=not prescribed)
                yield Report(one, f"`{function.name}` takes `{one.arg}` and does not use it", unless=unless)
    if not prescribed:
        yield from _unread_options(facts)
    yield from _unread_buffers(facts)


def _is_method(function: Function, facts: ModuleFacts) -> bool:
    return isinstance(facts.parents.get(function), ast.ClassDef)


def _is_bound_to_parameters(function: Function, facts: ModuleFacts) -> bool:
    """Whether others say what a function has to take: a base of another file, or those that it is handed to."""
    private = function.name.startswith("_") and function.name != "__call__"
    if private or all(isinstance(one, ast.Raise | ast.Pass | ast.Expr) for one in function.body):
        return True
    if _is_method(function, facts):
        return _has_unknown_base(facts.parents[function], facts) or _is_handed_out(function, facts)
    replaces = [one.arg for one in parameters(function)[:1]] == ["self"]  # a method of another file
    return replaces or _is_handed_out(function, facts)


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
    for other in (one for one in facts.nodes[ast.FunctionDef] if one is not function):
        names = {one.arg for one in parameters(other)} - {"self"}
        if len(own & names) >= max(4, 0.7 * len(own | names)):
            calls = f"{function.name}(" in ast.unparse(other) or f"{other.name}(" in ast.unparse(function)
            if other.name == function.name or not calls:
                return True
    return False


def _has_unknown_base(class_: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a class of another file, which may prescribe the parameters, is a base."""
    bases = [last_name(base) for base in class_.bases] if isinstance(class_, ast.ClassDef) else []
    return any(base not in ("Module", "Layer", "object", "ABC", "Function", *facts.classes) for base in bases)


def _is_passed(name: str, function: Function, facts: ModuleFacts) -> bool:
    """Whether a call in the file, outside of the function, passes a value by that name that is not just handed on."""
    for call in facts.nodes[ast.Call]:
        values = [one.value for one in call.keywords if one.arg == name]
        values += [one for one in call.args if last_name(one) == name]
        around = facts.function_around(call) if values else function
        if around is not function and not all(_is_handed_on(value, around) for value in values):
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
    return any("regist" in ast.unparse(one).lower() for one in decorators) or facts.is_used_as_value(function)


def _is_said_unused(parameter: ast.arg, function: Function) -> bool:
    """Whether the docstring of a function says that a parameter is not used."""
    said = rf"\b{parameter.arg}\b[^:]*:[^:]*\b(not used|unused|ignored|not implemented|not supported)\b"
    return re.search(said, ast.get_docstring(function) or "", re.I) is not None


def _is_prescribed(parameter: ast.arg, function: Function) -> bool:
    """Whether a mask is a parameter of an interface, and the function makes no causal mask in its place."""
    return parameter.arg == "attention_mask" and "is_causal" not in ast.unparse(function)


def _unread_options(facts: ModuleFacts) -> Iterator[Report]:
    """Options of attention that the constructor of a module stores, and of which nothing in the file is read."""
    if not facts.sites:
        return
    stored: dict[str, ast.Attribute] = {}
    attending = {facts.class_around(function) for function in _weighing_functions(facts)} - {None}
    for node in facts.nodes[ast.Attribute]:
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self" and _OPTIONS.match(node.attr):
            value = getattr(facts.parents.get(node), "value", None)
            made = isinstance(value, ast.Call | ast.Constant)  # a module of that name, or no choice
            if not made and _family(facts.class_around(node), facts) & attending:
                stored.setdefault(node.attr, node)
    for node in facts.nodes[ast.Attribute] if stored else ():
        if not isinstance(node.ctx, ast.Store) and not _is_option_source(node, facts):
            stored.pop(node.attr, None)
    for name, node in stored.items():
        read = [one for one in below(facts.function_around(node), ast.Name) if isinstance(one.ctx, ast.Load)]
        chooses = [one.id for one in read].count(name) > 1  # the constructor chooses by it what it makes
        if not chooses and f'"{name}"' not in facts.source and f"'{name}'" not in facts.source:
            yield Report(node, f"`self.{name}` is stored, and nothing reads it: attention does not depend on it")


def _family(class_: ast.ClassDef | None, facts: ModuleFacts) -> set[ast.ClassDef]:
    """A class, its bases and its subclasses in the file, and theirs."""
    bases = {one: {last_name(base) for base in one.bases} for one in facts.nodes[ast.ClassDef]}
    family = [class_] if class_ is not None else []
    for one in family:  # grows while it is read
        related = (other for other in bases if other.name in bases[one] or one.name in bases[other])
        family += [other for other in related if other not in family]
    return set(family)


def _unread_buffers(facts: ModuleFacts) -> Iterator[Report]:
    """Masks that a constructor stores as a buffer, and that nothing in the file reads."""
    buffers = (one for one in facts.operations("method") if one.term.value == "register_buffer" and one.term.items)
    for event in buffers if facts.sites else ():
        name, *made = event.term.items
        if not isinstance(name.value, str) or not _MASKS.match(name.value) or event.class_ is None:
            continue
        if (made and is_none(made[0])) or _has_unknown_base(event.class_.node, facts):
            continue
        read = (one.attr == name.value and not isinstance(one.ctx, ast.Store) for one in facts.nodes[ast.Attribute])
        if [one.value for one in facts.nodes[ast.Constant]].count(name.value) == 1 and not any(read):
            message = f"the buffer `{name.value}` is stored, and nothing reads it: nothing is masked by it"
            yield Report(event.node, message)


def _is_option_source(node: ast.Attribute, facts: ModuleFacts) -> bool:
    """Whether an attribute is the right side of an assignment to an attribute of its name."""
    targets = getattr(facts.parents.get(node), "targets", [])
    return any(isinstance(target, ast.Attribute) and target.attr == node.attr for target in targets)
