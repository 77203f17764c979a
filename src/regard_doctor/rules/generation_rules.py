"""Rules about generation: without a cache, and of texts that are padded on the left."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..finding import Severity
from ..module_facts import ClassFacts, ModuleFacts
from ..term import Term
from .base import (
    Report,
    bound_names,
    class_around,
    function_around,
    last_name,
    names_below,
    rule,
    target_names,
    text_around,
)
from .cached_keys import is_without_cache
from .called_model import ModelText, model_text

_CACHED = re.compile(r"past|cache|prev", re.I)


@rule("ATT511", Severity.WARNING)
def generation_without_cache(facts: ModuleFacts) -> Iterator[Report]:
    """Each step of generation computes the keys and values of the whole text again."""
    if not re.search(r"\b(cat|concat|hstack)\(", facts.source):
        return
    for node in [*facts.nodes[ast.For], *facts.nodes[ast.While]]:
        if _CACHED.search(ast.unparse(node)) or is_without_cache(node, facts):
            continue
        for grown, appended in _grown_sequences(node):
            call = None if _says_no_cache(node, facts) else _call_of_model(node, grown, facts)
            if call is None or [one.id for one in ast.walk(call) if isinstance(one, ast.Name)].count(grown) > 1:
                continue  # a text that is source and target, and changes as a whole
            if not _depends_on(appended, call, node):
                continue
            model = model_text(call, _own_class(call, facts), facts)
            if model.is_seen_to_keep_keys or (model.can_keep_keys and not _has_no_keys(call, facts)):
                yield Report(
                    call,
                    f"each step computes all of `{grown}` again: keep keys and values in a cache",
                    unless=_why_without_cache(call, model, facts),
                )
                break


def _says_no_cache(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether the text of the function around says that it does without a cache."""
    return _WITHOUT_CACHE.search(text_around(node, facts)) is not None


_WITHOUT_CACHE = re.compile(
    r"\b(no|without( an?| any)?) (kv[- ]?|keys?([- /]| and )values? )?cach|uncached|no_?cache|without_cache"
    r"|recomput|\binefficient|unoptimi[sz]ed",
    re.I,
)


_TRANSFORMER = re.compile(
    r"transformer|gpt|llama|bert\b|block_size|context_(len|size|window)|n_ctx|tgt_mask|causal|max_seq_len|n(um)?_heads?\b",
    re.I,
)
_RECURRENT = re.compile(r"lstm|\bgru\b|\brnn|mamba|rwkv|\bssm\b|bigram", re.I)
_WITHOUT_KEYS = re.compile(
    r"torch\.nn\.(Embedding|Linear|Dropout|LayerNorm|RMSNorm|BatchNorm\d?d?|Conv\dd|LSTM|GRU|RNN|LSTMCell|GRUCell|RNNCell|Parameter"
    r"|ReLU|GELU|SiLU|Tanh|Sigmoid|Sequential|Identity|CrossEntropyLoss)$"
)


def _why_without_cache(call: ast.Call, model: ModelText, facts: ModuleFacts) -> str:
    """A reason why the model that a loop calls may do without a cache: its tokens are read in orders, or see later
    ones; its steps are trained; or, where nothing says which model it is, a name in the file.
    """
    around = _own_class(call, facts)
    own = around if ast.unparse(call.func) in ("self", "self.forward") else None
    if own is not None and re.search(r"Encoder(?!.*Decoder)", own.node.name):
        return "an encoder sees the whole text, the later tokens too"
    forward = own.methods.get("forward") if own is not None else None
    if forward is not None and any(re.search(r"order|perm(utation)?s?$", one.arg) for one in forward.args.args):
        return "the tokens are read in other orders"
    if any(isinstance(one, ast.Constant) and one.value is None for one in call.args[1:]):
        return "the model attends without a causal mask"
    function = function_around(call, facts)
    if function is not None and re.search(r"(^|_)loss", function.name):
        return "gradients of all steps are needed"
    return model.doubt if model.is_seen_to_keep_keys else _doubt_by_names(call, facts) or model.doubt


def _doubt_by_names(call: ast.Call, facts: ModuleFacts) -> str:
    """A reason why the model may have no keys: the file has a recurrent one, or a class calls what it was given."""
    given = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
    if _RECURRENT.search(facts.source) or (given and _TRANSFORMER.search(facts.source) is None):
        return "the model has no keys"
    around = _own_class(call, facts)
    made = around.attributes.get(last_name(call.func)) if around is not None and given else None
    if made is not None and made.op == "parameter":
        return "the model that the class is given is not causal, or has no keys"
    return ""


def _own_class(node: ast.AST, facts: ModuleFacts) -> ClassFacts | None:
    """What the file says of the class in whose text a node stands."""
    around = class_around(node, facts)
    return None if around is None else facts.classes.get(around.name)


def _has_no_keys(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether what is called is a model of this file that is made of layers without keys alone: no Transformer."""
    own = _own_class(call, facts)
    if own is None or not isinstance(call.func, ast.Name | ast.Attribute):
        return False
    if ast.unparse(call.func) in ("self", "self.forward"):
        return _is_without_keys(own, facts)
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
        made = own.attributes.get(call.func.attr)
        return (
            made is not None and made.op in ("call", "instance") and _WITHOUT_KEYS.search(str(made.value)) is not None
        )
    return False


def _is_without_keys(class_: ClassFacts, facts: ModuleFacts) -> bool:
    """Whether a class makes modules of torch alone, of which none has keys."""
    bases = [last_name(base) for base in class_.node.bases]
    if any(base not in ("Module", "LightningModule", "object") for base in bases):
        return False
    if any(site.event.class_ is class_ for site in facts.sites):
        return False
    made = [
        one
        for one in class_.attributes.values()
        if one.op in ("call", "instance", "apply", "unknown") and not _is_of_numbers(one)
    ]
    return bool(made) and all(_WITHOUT_KEYS.search(str(one.value)) for one in made)


def _is_of_numbers(made: Term) -> bool:
    """Whether an attribute is an object of the file that is no module, as a configuration is."""
    class_ = made.value
    return isinstance(class_, ClassFacts) and not class_.node.bases


def _depends_on(appended: list[ast.expr], call: ast.Call, loop: ast.For | ast.While) -> bool:
    """Whether what is appended to a sequence is computed, within the loop, from the result of a call."""
    assigned = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    waiting, seen = list(appended), set()
    while waiting:
        for node in ast.walk(waiting.pop()):
            if node is call:
                return True
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                waiting += [one.value for one in assigned if node.id in target_names(one)]
    return False


def _grown_sequences(loop: ast.For | ast.While) -> Iterator[tuple[str, list[ast.expr]]]:
    """Names that a loop assigns as themselves joined with something, and what that is."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            continue
        value, name = node.value, node.targets[0].id
        if isinstance(value, ast.Call) and last_name(value.func) in ("cat", "concat", "hstack") and value.args:
            joined = value.args[0]
            if isinstance(joined, ast.Tuple | ast.List) and any(name in bound_names(one) for one in joined.elts[:1]):
                yield name, joined.elts[1:]


def _call_of_model(loop: ast.For | ast.While, grown: str, facts: ModuleFacts) -> ast.Call | None:
    """The call in a loop that gets all of a growing sequence and of whose result the last position is used."""
    names, results = {grown}, {}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_tail(node.value, grown):
            names.add(node.targets[0].id)
    for node in ast.walk(loop):
        called = _called(node.value) if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and called is not None and _is_model_call(called, names, facts):
            if re.search(r"mems?\b|cache|past|state", " ".join(target_names(node))):
                continue
            if target_names(node) & {name for one in called.args for name in bound_names(one)}:
                continue  # scores = penalized(tokens, scores)
            for name in (name for target in node.targets for name in bound_names(target)):
                results[name] = called
    for node in ast.walk(loop):  # logits = out[0] if isinstance(out, tuple) else out
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp | ast.Attribute | ast.Subscript):
            used = [one.id for one in ast.walk(node.value) if isinstance(one, ast.Name) and one.id in results]
            for name in (name for target in node.targets for name in bound_names(target)):
                if used and not isinstance(node.value, ast.Subscript):
                    results.setdefault(name, results[used[0]])
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and _takes_last(node.slice):
            value = node.value.value if isinstance(node.value, ast.Attribute) else node.value
            if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
                continue
            if isinstance(value, ast.Name) and value.id in results:
                return results[value.id]
            if isinstance(value, ast.Call) and _is_model_call(value, names, facts):
                return value
    return None


def _called(value: ast.expr) -> ast.Call | None:
    """The call of `model(x)`, `model(x).logits` and `model(x)[0]`."""
    if isinstance(value, ast.Attribute) or (isinstance(value, ast.Subscript) and ast.unparse(value.slice) == "0"):
        value = value.value
    return value if isinstance(value, ast.Call) else None


def _is_tail(value: ast.expr, grown: str) -> bool:
    """Whether a value is the sequence cut to the longest context: `tokens if ... else tokens[:, -n:]`."""
    if isinstance(value, ast.IfExp):
        return _is_tail(value.body, grown) or _is_tail(value.orelse, grown)
    if not isinstance(value, ast.Subscript) or not isinstance(value.value, ast.Name) or value.value.id != grown:
        return False
    last = value.slice.elts[-1] if isinstance(value.slice, ast.Tuple) else value.slice
    return isinstance(last, ast.Slice) and last.upper is None


def _is_model_call(call: ast.Call, names: set[str], facts: ModuleFacts) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id in facts.imports:
        return False  # a function of another file, as einops' rearrange is
    function, text = last_name(call.func), ast.unparse(call)
    passed = {name for argument in call.args[:3] for name in bound_names(argument)}
    passed |= {one.value.id for one in call.keywords if isinstance(one.value, ast.Name)}
    plain = function not in _NO_MODELS and not (function == "decode" and len(call.args) < 2)  # tokenizer.decode(tokens)
    return (
        plain
        and bool(passed & names)
        and not re.search(r"cache|past|state|hidden|memory_|\bmems?\b|start_pos", text, re.I)
    )


_NO_MODELS = frozenset(
    {"cat", "hstack", "pad", "len", "print", "append", "softmax", "argmax", "generate", "tuple", "list", "size"}
)


def _takes_last(index: ast.expr) -> bool:
    """Whether an index takes the last position of axis 1, or of axis 0: `[:, -1]`, `[:, -1, :]`, `[-1]`."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(ast.unparse(part) in ("-1", "-1:") for part in parts)


@rule("ATT243", Severity.WARNING)
def left_padding_without_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Texts are padded on the left, and the model gets neither a mask nor positions."""
    message = "texts padded on the left without a mask: the padding is read as words, and shifts every position"
    if _chooses_left(facts):
        for call in facts.nodes[ast.Call]:
            reads = bool(call.args) or any(one.arg == "input_ids" for one in call.keywords)
            generates = isinstance(call.func, ast.Attribute) and call.func.attr == "generate"
            plain = generates and reads and not _has_mask(call) and not _generates_otherwise(call, facts)
            if plain and _is_padded(call, facts):
                yield Report(call, message, unless=_why_without_mask(facts))
    for node in facts.nodes[ast.Assign]:
        target = node.targets[0]
        function = function_around(node, facts)
        if isinstance(target, ast.Name) and function is not None and any(map(_pads_left, ast.walk(node.value))):
            for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
                if _reads_tokens(call, target.id) and not _has_mask(call):
                    yield Report(node, message, unless=_if_recurrent(facts))
                    break


def _why_without_mask(facts: ModuleFacts) -> str:
    """A reason why a model may get no mask: it is recurrent, or one of another file, which may look for padding."""
    by_itself = "" if facts.sites else "`generate` finds the padding by its `pad_token_id`"
    return _if_recurrent(facts) or by_itself


def _if_recurrent(facts: ModuleFacts) -> str:
    recurrent = re.search(r"rwkv|mamba|lstm|\bgru\b", facts.source, re.I)
    return "the model is recurrent and reads no mask" if recurrent else ""


def _chooses_left(facts: ModuleFacts) -> bool:
    """Whether a statement or an argument of the file, and no text in it, puts the padding on the left, and one pads."""
    keywords = (one for one in facts.nodes[ast.keyword] if one.arg in ("padding_side", "padding"))
    assigned = (one for one in facts.nodes[ast.Assign] if last_name(one.targets[0]) == "padding_side")
    left = any(isinstance(one.value, ast.Constant) and one.value.value == "left" for one in (*keywords, *assigned))
    pads = any(one.arg == "padding" and getattr(one.value, "value", True) for one in facts.nodes[ast.keyword])
    return left and (pads or any(last_name(one.func) == "pad" for one in facts.nodes[ast.Call]))


def _is_padded(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether what is read was padded by a tokenizer, in the same function or one that it calls, and not one text."""
    read = [*call.args[:1], *(one.value for one in call.keywords if one.arg in ("input_ids", None))]
    names = {name for one in read for name in names_below(one)}
    assigned = (one for one in ast.walk(function_around(call, facts) or facts.tree) if isinstance(one, ast.Assign))
    made = (one.value for one in assigned if target_names(one) & names)
    return any(_pads(one) for value in made for one in _with_helpers(value, facts))


def _with_helpers(value: ast.expr, facts: ModuleFacts) -> Iterator[ast.AST]:
    """The nodes of an expression, and those of the functions of the file that it calls."""
    for node in ast.walk(value):
        yield node
        helper = facts.functions.get(last_name(node.func)) if isinstance(node, ast.Call) else None
        yield from ast.walk(helper) if helper is not None else ()


def _pads(node: ast.AST) -> bool:
    """Whether a call pads texts to one length."""
    if not isinstance(node, ast.Call):
        return False
    alone = bool(node.args) and isinstance(node.args[0], ast.List) and len(node.args[0].elts) == 1
    padded = last_name(node.func) == "pad" or any(one.arg in ("padding", None) for one in node.keywords)
    return padded and not alone


def _generates_otherwise(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether a call of `generate` is that of the class itself, or of an engine that reads texts and not padded ids."""
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if receiver == "self" or re.search(r"!= *[\w.]*pad|\.ne\([\w.]*pad", facts.source):  # or one that finds the padding
        return True
    engine = any(name.startswith("vllm") for name in facts.imports.values())
    return engine and bool(re.search(r"(^|[._])(v?llm|engine)", receiver))


def _has_mask(call: ast.Call) -> bool:
    """Whether a call passes a mask or positions, or what is not known."""
    if any(one.arg is None or re.search(r"mask|position|lengths", one.arg) for one in call.keywords):
        return True
    return any(isinstance(one, ast.Starred) for one in call.args) or bool(
        re.search(r"mask|position|lengths|keep|valid", " ".join(map(ast.unparse, call.args[1:])))
    )


def _pads_left(node: ast.AST) -> bool:
    """Whether an expression is `[pad] * (longest - len(text)) + text`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add) or not isinstance(node.left, ast.BinOp):
        return False
    left = node.left
    padded = isinstance(left.op, ast.Mult) and any(isinstance(one, ast.List) for one in (left.left, left.right))
    return padded and f"len({ast.unparse(node.right)})" in ast.unparse(left)


def _reads_tokens(call: ast.Call, name: str) -> bool:
    """Whether a model is called with a variable as its first argument."""
    first = call.args[0] if call.args else None
    called = ast.unparse(call.func)
    return (
        isinstance(first, ast.Name) and first.id == name and bool(re.search(r"(^|[._])(model|net|lm|encoder)$", called))
    )
