"""The rule about generation: a text that each step computes again, where a cache would keep its keys and values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..finding import Severity
from ..symbolic_evaluation import ClassFacts, ModuleFacts
from ..term import Term
from .base import Report, bound_names, function_around, last_name, rule, target_names
from .called_model import ModelText, model_text
from .mask_rules import is_without_cache

_CACHED = re.compile(r"past|cache|prev", re.I)


@rule(
    "ATT511",
    Severity.WARNING,
    source="https://github.com/karpathy/nanoGPT/blob/master/model.py",
    wrong="""
        class Writer(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.qkv = nn.Linear(dim, 3 * dim)

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def generate(model: Writer, x, steps):
            for _ in range(steps):
                x = torch.cat([x, model(x)[:, -1:]], dim=1)
            return x
    """,
    right="""
        class Writer(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.qkv = nn.Linear(dim, 3 * dim)

            def forward(self, x, past_k, past_v):
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
                return F.scaled_dot_product_attention(q, k, v), k, v

        def generate(model: Writer, x, past_k, past_v, steps):
            new = x[:, -1:]
            for _ in range(steps):
                new, past_k, past_v = model(new, past_k, past_v)
                x = torch.cat([x, new], dim=1)
            return x
    """,
)
def generation_without_cache(facts: ModuleFacts) -> Iterator[Report]:
    """Each step of generation computes the keys and values of the whole text again.

    n steps cost the work of n²/2 positions. A cache of keys and values makes a step compute one position. A warning
    where the model attends with a causal mask, or takes a cache, as its class says in this file or in one of the
    project that it is imported from; a hint where neither is seen. A model without attention, and one that has no mask
    at all, is no finding. It is a hint, too, where the file has a recurrent model, where a class calls what it was
    given and nothing says that this is a Transformer, where a model reads tokens in orders, and in a loss over steps.
    """
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
            model = model_text(call, _class_around(call, facts), facts)
            if model.is_seen_to_keep_keys or (model.can_keep_keys and not _has_no_keys(call, facts)):
                yield Report(
                    call,
                    f"each step computes all of `{grown}` again: keep keys and values in a cache",
                    unless=_why_without_cache(call, model, facts),
                )
                break


def _says_no_cache(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether the text of the function around says that it does without a cache."""
    function = function_around(node, facts)
    written = ast.get_source_segment(facts.source, function) if function is not None else None
    return (
        written is not None
        and re.search(
            r"\b(no|without( an?| any)?) (kv[- ]?|keys?([- /]| and )values? )?cach|uncached|no_?cache|without_cache"
            r"|recomput|\binefficient|unoptimi[sz]ed",
            written,
            re.I,
        )
        is not None
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
    around = _class_around(call, facts)
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
    around = _class_around(call, facts)
    made = around.attributes.get(last_name(call.func)) if around is not None and given else None
    if made is not None and made.op == "parameter":
        return "the model that the class is given is not causal, or has no keys"
    return ""


def _class_around(node: ast.AST, facts: ModuleFacts) -> ClassFacts | None:
    """The class of the file in whose text a node stands."""
    above: ast.AST | None = node
    while above is not None and not isinstance(above, ast.ClassDef):
        above = facts.parents.get(above)
    return facts.classes.get(above.name) if isinstance(above, ast.ClassDef) else None


def _has_no_keys(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether what is called is a model of this file that is made of layers without keys alone: no Transformer."""
    own = _class_around(call, facts)
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
    plain = function not in (
        "cat",
        "hstack",
        "pad",
        "len",
        "print",
        "append",
        "softmax",
        "argmax",
        "generate",
        "tuple",
        "list",
        "size",
    )
    plain = plain and not (function == "decode" and len(call.args) < 2)  # tokenizer.decode(tokens)
    return (
        plain
        and bool(passed & names)
        and not re.search(r"cache|past|state|hidden|memory_|\bmems?\b|start_pos", text, re.I)
    )


def _takes_last(index: ast.expr) -> bool:
    """Whether an index takes the last position of axis 1, or of axis 0: `[:, -1]`, `[:, -1, :]`, `[-1]`."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(ast.unparse(part) in ("-1", "-1:") for part in parts)
