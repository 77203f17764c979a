"""Rules about generation: without a cache, and of texts that are padded on the left."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..finding import Severity
from ..module_facts import ClassFacts, ModuleFacts
from ..python_syntax import below, bound_names, code_of, last_name, names_below, parameters, target_names
from ..term import ABSENT, Term
from .base import Report, rule
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
            call = None if _WITHOUT_CACHE.search(facts.text_around(node)) else _call_of_model(node, grown, facts)
            if call is None or [one.id for one in below(call, ast.Name)].count(grown) > 1:
                continue  # a text that is source and target, and changes as a whole
            if not _depends_on(appended, call, node):
                continue
            model = model_text(call, _own_class(call, facts), facts)
            if model.is_seen_to_keep_keys or (model.can_keep_keys and not _has_no_keys(call, facts)):
                message = f"each step computes all of `{grown}` again: keep keys and values in a cache"
                yield Report(call, message, unless=_why_without_cache(call, model, facts))
                break


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
    """A reason why the model that a loop calls may do without a cache, or, where nothing says which model it is, a name
    in the file that is one.
    """
    own = _own_class(call, facts) if _calls_itself(call) else None
    if own is not None and re.search(r"Encoder(?!.*Decoder)", own.name):
        return "an encoder sees the whole text, the later tokens too"
    orders = parameters(own.methods.get("forward")) if own is not None else []
    if any(re.search(r"order|perm(utation)?s?$", one.arg) for one in orders):
        return "the tokens are read in other orders"
    if any(isinstance(one, ast.Constant) and one.value is None for one in call.args[1:]):
        return "the model attends without a causal mask"
    if re.search(r"(^|_)loss", getattr(facts.function_around(call), "name", "")):
        return "gradients of all steps are needed"
    return model.doubt if model.is_seen_to_keep_keys else _doubt_by_names(call, facts) or model.doubt


def _calls_itself(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("self", "self.forward")


def _attribute_called(call: ast.Call) -> str:
    """The name of the module of a call `self.module(...)`; "" of other calls."""
    of_self = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
    return last_name(call.func) if of_self else ""


def _doubt_by_names(call: ast.Call, facts: ModuleFacts) -> str:
    """A reason why the model may have no keys: the file has a recurrent one, or a class calls what it was given."""
    given, own = _attribute_called(call), _own_class(call, facts)
    if _RECURRENT.search(facts.source) or (given and _TRANSFORMER.search(facts.source) is None):
        return "the model has no keys"
    passed = given and own is not None and own.attributes.get(given, ABSENT).op == "parameter"
    return "the model that the class is given is not causal, or has no keys" if passed else ""


def _own_class(node: ast.AST, facts: ModuleFacts) -> ClassFacts | None:
    """What the file says of the class in whose text a node stands."""
    around = facts.class_around(node)
    return None if around is None else facts.classes.get(around.name)


def _has_no_keys(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether what is called is a model of this file that is made of layers without keys alone: no Transformer."""
    own = _own_class(call, facts)
    if own is None or _calls_itself(call):
        return own is not None and _is_without_keys(own, facts)
    made = own.attributes.get(_attribute_called(call), ABSENT)
    return made.op in ("call", "instance") and _WITHOUT_KEYS.search(str(made.value)) is not None


def _is_without_keys(class_: ClassFacts, facts: ModuleFacts) -> bool:
    """Whether a class makes modules of torch alone, of which none has keys."""
    known = all(last_name(base) in ("Module", "LightningModule", "object") for base in class_.node.bases)
    if not known or any(site.event.class_ is class_ for site in facts.sites):
        return False
    made = [one for one in class_.attributes.values() if one.op in ("call", "instance", "apply", "unknown")]
    modules = [one for one in made if not _is_of_numbers(one)]
    return bool(modules) and all(_WITHOUT_KEYS.search(str(one.value)) for one in modules)


def _is_of_numbers(made: Term) -> bool:
    """Whether an attribute is an object of the file that is no module, as a configuration is."""
    return isinstance(made.value, ClassFacts) and not made.value.node.bases


def _depends_on(appended: list[ast.expr], call: ast.Call, loop: ast.For | ast.While) -> bool:
    """Whether what is appended to a sequence is computed, within the loop, from the result of a call."""
    assigned, seen = [(node.value, target_names(node)) for node in below(loop, ast.Assign)], set()
    waiting = list(appended)
    for one in waiting:  # grows while it is read
        if any(node is call for node in ast.walk(one)):
            return True
        new = names_below(one) - seen
        seen |= new
        waiting += [value for value, names in assigned if names & new]
    return False


def _grown_sequences(loop: ast.For | ast.While) -> Iterator[tuple[str, list[ast.expr]]]:
    """Names that a loop assigns as themselves joined with something, and what that is."""
    for node in below(loop, ast.Assign):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Name(id="cat" | "concat" | "hstack") | ast.Attribute(attr="cat" | "concat" | "hstack"),
                    args=[ast.Tuple(elts=[first, *others]) | ast.List(elts=[first, *others]), *_],
                ),
            ) if name in bound_names(first):
                yield name, others


def _call_of_model(loop: ast.For | ast.While, grown: str, facts: ModuleFacts) -> ast.Call | None:
    """The call in a loop that gets all of a growing sequence and of whose result the last position is used."""
    assigned = [(node, {name for one in node.targets for name in bound_names(one)}) for node in below(loop, ast.Assign)]
    tails = (node.targets[0] for node, _ in assigned if _is_tail(node.value, grown))
    names, results = {grown, *(one.id for one in tails if isinstance(one, ast.Name))}, {}
    for node, bound in assigned:
        called, changed = _called(node.value), target_names(node)
        if called is None or re.search(r"mems?\b|cache|past|state", " ".join(changed)):
            continue
        passed = {name for one in called.args for name in bound_names(one)}
        if not changed & passed and _is_model_call(called, names, facts):  # not scores = penalized(tokens, scores)
            results |= dict.fromkeys(bound, called)
    for node, bound in assigned:  # logits = out[0] if isinstance(out, tuple) else out
        used = [one.id for one in below(node.value, ast.Name) if one.id in results]
        if used and isinstance(node.value, ast.IfExp | ast.Attribute):
            results = dict.fromkeys(bound, results[used[0]]) | results
    for node in below(loop, ast.Subscript):
        shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        value = node.value.value if isinstance(node.value, ast.Attribute) else node.value
        if shape or not _takes_last(node.slice):
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
    match value:
        case ast.IfExp(body=body, orelse=orelse):
            return _is_tail(body, grown) or _is_tail(orelse, grown)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Tuple(elts=[*_, last]) | last) if name == grown:
            return isinstance(last, ast.Slice) and last.upper is None
    return False


def _is_model_call(call: ast.Call, names: set[str], facts: ModuleFacts) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id in facts.imports:
        return False  # a function of another file, as einops' rearrange is
    function = last_name(call.func)
    passed = [*call.args[:3], *(one.value for one in call.keywords if isinstance(one.value, ast.Name))]
    decodes = function == "decode" and len(call.args) < 2  # tokenizer.decode(tokens)
    if function in _NO_MODELS or decodes or names.isdisjoint(name for one in passed for name in bound_names(one)):
        return False
    return not re.search(r"cache|past|state|hidden|memory_|\bmems?\b|start_pos", ast.unparse(call), re.I)


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
    for call in facts.nodes[ast.Call] if _chooses_left(facts) else ():
        reads = bool(call.args) or any(one.arg == "input_ids" for one in call.keywords)
        generates = isinstance(call.func, ast.Attribute) and call.func.attr == "generate"
        plain = generates and reads and not _has_mask(call) and not _generates_otherwise(call, facts)
        if plain and _is_padded(call, facts):
            by_itself = "" if facts.sites else "`generate` finds the padding by its `pad_token_id`"
            yield Report(call, message, unless=_if_recurrent(facts) or by_itself)
    for node in (one for one in facts.nodes[ast.Assign] if any(map(_pads_left, below(one.value, ast.BinOp)))):
        name, calls = code_of(node.targets[0]), below(facts.function_around(node), ast.Call)
        if any(_reads_tokens(call, name) and not _has_mask(call) for call in calls):
            yield Report(node, message, unless=_if_recurrent(facts))


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
    assigned = below(facts.function_around(call) or facts.tree, ast.Assign)
    made = [one for node in assigned if target_names(node) & names for one in below(node.value, ast.Call)]
    helpers = (facts.functions.get(last_name(one.func)) for one in made)
    return any(map(_pads, (*made, *(one for helper in helpers for one in below(helper, ast.Call)))))


def _pads(call: ast.Call) -> bool:
    """Whether a call pads texts to one length."""
    alone = bool(call.args) and isinstance(call.args[0], ast.List) and len(call.args[0].elts) == 1
    return not alone and (last_name(call.func) == "pad" or any(one.arg in ("padding", None) for one in call.keywords))


def _generates_otherwise(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether a call of `generate` is that of the class itself, or of an engine that reads texts and not padded ids."""
    receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if receiver == "self" or re.search(r"!= *[\w.]*pad|\.ne\([\w.]*pad", facts.source):  # or one that finds the padding
        return True
    engine = any(name.startswith("vllm") for name in facts.imports.values())
    return engine and bool(re.search(r"(^|[._])(v?llm|engine)", receiver))


def _has_mask(call: ast.Call) -> bool:
    """Whether a call passes a mask or positions, or what is not known."""
    unknown = any(one.arg is None or re.search(r"mask|position|lengths", one.arg) for one in call.keywords)
    passed = " ".join(map(ast.unparse, call.args[1:]))
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    return unknown or starred or re.search(r"mask|position|lengths|keep|valid", passed) is not None


def _pads_left(node: ast.BinOp) -> bool:
    """Whether an expression is `[pad] * (longest - len(text)) + text`."""
    match node:
        case ast.BinOp(left=ast.BinOp(op=ast.Mult()) as left, op=ast.Add(), right=text):
            listed = isinstance(left.left, ast.List) or isinstance(left.right, ast.List)
            return listed and f"len({ast.unparse(text)})" in ast.unparse(left)
    return False


def _reads_tokens(call: ast.Call, name: str) -> bool:
    """Whether a model is called with a variable as its first argument."""
    first = call.args[0] if call.args else None
    reads = isinstance(first, ast.Name) and first.id == name
    return reads and re.search(r"(^|[._])(model|net|lm|encoder)$", ast.unparse(call.func)) is not None
