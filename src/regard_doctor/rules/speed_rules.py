"""Rules about speed: loops, slow paths of torch, masks and keys that are copied without need."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import TRANSPARENT, AttentionSite, names_in
from ..finding import Severity
from ..mask_values import hidden_pairs, is_zero_one, mask_values, triangle
from ..module_facts import Event, Loop, ModuleFacts
from ..python_syntax import Function, below, code_of, last_name, names_below
from ..rewriting import AddKeyword, Rewrite
from ..term import ABSENT, Term, is_none, is_true, label, number, through, walk
from .base import Report, rule, with_attributes
from .cached_keys import is_cached


@rule("ATT601", Severity.WARNING)
def attention_in_loop(facts: ModuleFacts) -> Iterator[Report]:
    """Attention is computed in a Python loop over heads, positions or examples."""
    for site in facts.sites:
        loop = next((one for one in site.event.loops if one.names), None)
        if loop is None or _is_over_modules(loop) or _is_of_few(loop):
            continue
        if _is_indexed_by_loop(site, loop) and not _is_ragged(site, loop):
            free = site.event.depth > 0 and not _is_over_heads(loop)
            message = "attention in a Python loop: make the loop's axis one of the batch"
            yield Report(site.node, message, unless="the rounds have keys of their own" if free else "")
    for node in facts.nodes[ast.ListComp]:
        if _calls_each_head(node, facts):
            yield Report(node, "each head is a module of its own, called in a Python loop: compute all heads at once")
    yield from _pairwise_loops(facts)
    for event in facts.operations("softmax"):
        if any(one.names for one in event.loops) and _is_row_of_products(event.term.input):
            yield Report(event.node, "the scores of one query at a time: one matrix product has those of all")


def _is_row_of_products(scores: Term) -> bool:
    """Whether the scores of a query are stacked from a comprehension over the keys."""
    scores = through(scores, "div", "mul", "cast", "masked_fill")
    made = scores.op == "call" and scores.value in ("torch.tensor", "torch.Tensor", "torch.FloatTensor")
    row = next(iter(scores.items), ABSENT) if made else scores["tensors"] if scores.op in ("stack", "cat") else ABSENT
    products = walk(row.items[0]) if row.op == "comprehension" else ()
    return any(
        one.op in ("matmul", "sum") or (one.op in ("method", "call") and str(one.value).rpartition(".")[2] == "dot")
        for one in products
    )


def _is_over_modules(loop: Loop) -> bool:
    """Whether a loop is over layers, each of which reads what the one before has computed, and not over an axis."""
    iterated = code_of(loop.node.iter) if isinstance(loop.node, ast.For | ast.AsyncFor) else ""
    listed = re.match(r"(enumerate\()?self\.(?!\w*heads?\b)", iterated)
    return listed is not None or _LAYER_NAMES.search(" ".join([*loop.names, iterated])) is not None


def _is_over_heads(loop: Loop) -> bool:
    return any("head" in name for name in (*loop.names, *names_in(loop.iterated or ABSENT)))


def _is_of_few(loop: Loop) -> bool:
    """Whether a loop has up to four rounds, as over two pictures that are compared."""
    counted = loop.iterated or ABSENT
    rounds = number(counted.items[0]) if counted.value == "range" and len(counted.items) == 1 else None
    return counted.op == "call" and rounds is not None and rounds <= 4


_LAYER_NAMES = re.compile(
    r"(^|[\W_])(n_?)?(layers?|blocks?|levels?|scales?|stages?|depth|hops?|paths?|modules?|pyramid|branch(es)?|iters?)"
    r"([\W_]|$)|nscales|nlayers"
)


def _is_indexed_by_loop(site: AttentionSite, loop: Loop) -> bool:
    """Whether the query is a part of a tensor that the loop does not change, picked by the loop's variable."""
    one = _picked_part(site.query, loop.node)
    if one is None or not _is_of_tensor(one, loop):
        return False
    within = {id(node) for node in ast.walk(loop.node)}
    made = [inner for inner in walk(one.input) if inner.op in ("carried", "apply")]
    return not any(one.op == "carried" or id(site.node) not in within or id(one.node) in within for one in made)


def _is_ragged(site: AttentionSite, loop: Loop) -> bool:
    """Whether the rounds of a loop have keys of different numbers: cut by what is looked up for each, or gathered."""
    for one in (part for term in (site.query, site.key, site.value) for part in walk(term)):
        gathered = one["tensors"] if one.op in ("stack", "cat") else ABSENT
        bounds = (bound for index in one.items for bound in (index.items if index.op == "slice" else (index,)))
        if gathered.op == "tuple" and not gathered.items:
            return True
        if one.op == "item" and any(_is_looked_up(bound, loop.node) for bound in bounds):
            return True
    return False


def _is_looked_up(bound: Term, loop: ast.AST) -> bool:
    """Whether an index is, or is computed from, an entry that the loop's variable picks."""
    return any(one.op == "item" and any(_is_picked(index, loop) for index in one.items) for one in walk(bound))


_MADE_FROM_INPUT = frozenset(
    {"apply", "item", "mul", "div", "add", "sub", "matmul", "element", "chunk", "split", "unbind", "method"}
)


def _picked_part(query: Term, loop: ast.AST) -> Term | None:
    """The part that a loop picks for the query, which is made of it by layers, scales and moves of axes alone."""
    for _ in range(30):
        module = query["module"] if query.op == "apply" else ABSENT
        for one in (query, module):
            if one.op == "item" and any(_is_picked(index, loop) for index in one.items):
                return one if one is query or "head" in ast.unparse(loop) else None
        if query.op == "choice":
            return next((found for one in query.items if (found := _picked_part(one, loop)) is not None), None)
        joined = query["tensors"].items if query.op == "cat" else ()
        if not joined and (query.op not in _MADE_FROM_INPUT | TRANSPARENT or "input" not in query.arguments):
            return None
        query = joined[0] if joined else query.input
    return None


def _is_of_tensor(part: Term, loop: Loop) -> bool:
    """Whether a part is cut from a tensor, and is no entry of a list: by its other axes, or what the loop counts."""
    if any(one.op == "slice" for one in part.items) or len(part.items) > 1:
        return True
    counted = list(walk(loop.iterated)) if loop.iterated is not None else []
    names = " ".join([*loop.names, *map(label, counted)]) if counted else ""
    named = re.search(r"head|batch|(^|\W)(bs|b|h|seq\w*|len\w*)(\W|$)|token|position|row|quer", names)
    return named is not None or any(one.op == "size" for one in counted)


def _is_picked(index: Term, loop: ast.AST) -> bool:
    """Whether an index is the loop's variable, or the slice of it alone; chunks of many are no loop over positions."""
    if index.op != "slice" or len(index.items) < 2:
        return _is_loop_item(index, loop)
    first, last = index.items[:2]
    return _is_loop_item(first, loop) and last.op == "add" and number(last.get("other")) == 1


def _is_loop_item(term: Term, loop: ast.AST) -> bool:
    return term.op == "loop_item" and any(term.node is one for one in ast.walk(loop))


def _calls_each_head(node: ast.ListComp, facts: ModuleFacts) -> bool:
    """Whether a comprehension calls each of a list of modules, of a class with attention, on the same input."""
    match node:
        case ast.ListComp(
            elt=ast.Call(func=ast.Name(id=called)),
            generators=[ast.comprehension(target=ast.Name(id=name), iter=ast.Attribute(attr=modules))],
        ) if called == name and "head" in modules.lower():
            loops = (loop for site in facts.sites if site.event.class_ is not None for loop in site.event.loops)
            return any(loop.node is node for loop in loops)
    return False


def _pairwise_loops(facts: ModuleFacts) -> Iterator[Report]:
    """Loops within loops that set the score of one pair at a time, in functions with a softmax."""
    message = "scores are computed pair by pair in Python loops: one matrix product has all of them"
    for outer in facts.nodes[ast.For]:
        for inner in (one for one in outer.body if isinstance(one, ast.For)):
            if not isinstance(outer.target, ast.Name) or not isinstance(inner.target, ast.Name):
                continue
            variables = {outer.target.id, inner.target.id}
            for node in below(inner, ast.Assign):
                if _sets_pair(node, variables) and "softmax" in code_of(facts.function_around(outer)):
                    yield Report(outer, message)


def _sets_pair(node: ast.Assign, variables: set[str]) -> bool:
    target = node.targets[0]
    if not isinstance(target, ast.Subscript):
        return False
    product = re.search(r"\bdot\(|@|matmul\(|\.sum\(|\bsum\(|inner\(|bmm\(", ast.unparse(node.value))
    return variables <= names_below(target) & names_below(node.value) and product is not None


@rule("ATT602", Severity.WARNING)
def unused_weights(facts: ModuleFacts) -> Iterator[Report]:
    """`nn.MultiheadAttention` computes weights that nobody uses."""
    for event in facts.applied("torch.nn.MultiheadAttention"):
        given = event.term.get("need_weights")
        unknown = "**" in event.term.arguments or any(one.op == "starred" for one in event.term.operands())
        if unknown or not isinstance(event.node, ast.Call) or not _discards_weights(event, facts):
            continue
        if is_true(given):
            yield Report(event.node, "the weights are asked for and not used: pass need_weights=False")
        elif given is None:
            mended = Rewrite((AddKeyword(event.node, "need_weights", "False"),))
            yield Report(event.node, "the weights are computed and not used: pass need_weights=False", mended)


def _discards_weights(event: Event, facts: ModuleFacts) -> bool:
    match facts.parents.get(event.node):
        case ast.Subscript(slice=ast.Constant(value=0)):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return _is_indexed_by_zero_alone(name, event, facts)
        case ast.Assign(targets=[ast.Tuple(elts=[_, ast.Name(id=name)])]):
            return name == "_" or name not in names_below(event.function or facts.tree, ast.Load)
    return False


def _is_indexed_by_zero_alone(name: str, event: Event, facts: ModuleFacts) -> bool:
    """Whether of a name, bound once in its function, nothing but entry 0 is used."""
    used = [node for node in below(event.function, ast.Name) if node.id == name]
    loads = [facts.parents[node] for node in used if isinstance(node.ctx, ast.Load)]
    first = all(isinstance(one, ast.Subscript) and getattr(one.slice, "value", None) == 0 for one in loads)
    return len(used) - len(loads) == 1 and bool(loads) and first


@rule("ATT603", Severity.WARNING)
def dense_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask, or one that hides nothing, is passed as a tensor."""
    for event in facts.judged("sdpa"):
        mask = event.term["attn_mask"]
        values = mask_values(mask)
        if values is None or is_zero_one(values):
            continue
        if values.dtype != bool and not values.any():
            yield Report(event.node, "a mask of zeros hides nothing and keeps this off the flash kernels: pass none")
        if triangle(hidden_pairs(values, true_hides=False)) == "future" and not is_cached(event.term["key"]):
            message = "a causal mask as a tensor keeps this off the flash kernels: pass is_causal=True instead"
            yield Report(event.node, message)


@rule("ATT604", Severity.WARNING)
def uncompiled_flex_attention(facts: ModuleFacts) -> Iterator[Report]:
    """`flex_attention` is called without `torch.compile`."""
    message = "flex_attention is not compiled and computes all scores: use torch.compile(flex_attention)"
    if re.search(r"compiling\b", facts.source) or any(_compiles_a_model(one, facts) for one in facts.nodes[ast.Call]):
        return
    for event in facts.operations("flex"):
        if not _is_compiled(event.function):
            yield Report(event.node, message)


def _is_compiled(function: Function | None) -> bool:
    """Whether a function is compiled, or also calls what its name says is: the call as it is serves other devices."""
    calls = (one.func for one in below(function, ast.Call))
    return any("compile" in ast.unparse(one) for one in (*calls, *getattr(function, "decorator_list", ())))


def _compiles_a_model(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether a call compiles a model, with all functions that it calls, and not one function of FlexAttention."""
    name = ast.unparse(call.func)
    if name.rpartition(".")[2] != "compile" or name.startswith("re."):
        return False
    compiled = ast.unparse(call.args[0]) if call.args else ""
    return facts.imports.get(compiled, compiled).rpartition(".")[2] not in ("flex_attention", "create_block_mask")


@rule("ATT605", Severity.WARNING)
def block_mask_each_step(facts: ModuleFacts) -> Iterator[Report]:
    """A block mask is made in each call of `forward`."""
    for event in facts.operations("block_mask"):
        if event.function is None or event.function.name != "forward" or event.depth > 0:
            continue
        if facts.function_around(event.node) is event.function and not any(facts.tests_around(event.node)):
            yield Report(event.node, "this makes the block mask in every call: make it once for each length")


@rule("ATT606", Severity.WARNING)
def causal_buffer(facts: ModuleFacts) -> Iterator[Report]:
    """Each layer stores a causal mask of the longest length as a buffer."""
    message = "each layer stores a causal mask of n² numbers: use is_causal=True, or share one mask"
    with_attention = {id(site.event.class_) for site in facts.sites if site.event.class_ is not None}
    for event in facts.operations("method"):
        node, items = event.node, event.term.items
        if event.term.value != "register_buffer" or len(items) < 2 or id(event.class_) not in with_attention:
            continue
        values = mask_values(items[1])
        if values is None or _is_never_called(facts.function_around(node), facts):
            continue
        shown = values if values.min() >= 0 else values < 0
        half = triangle(shown.astype(bool)) in ("future", "past", "future and self", "past and self")
        if half and not any(_is_of_old_torch(test, event) for test in facts.tests_around(node)):
            yield Report(node, message, unless=_why_stored(str(items[0].value), event, facts))


def _is_never_called(method: Function | None, facts: ModuleFacts) -> bool:
    """Whether a method of the file is no constructor, and nothing in the file names it but its definition."""
    if method is None or method.name == "__init__":
        return False
    used = (*facts.nodes[ast.Attribute], *facts.nodes[ast.Name])
    return not any(last_name(one) == method.name for one in used)


def _why_stored(name: str, event: Event, facts: ModuleFacts) -> str:
    """A reason why a layer may store a mask of its own: it is the only one, or the triangle is changed afterwards."""
    if event.class_ is not None and _is_made_once(event.class_.name, facts):
        return "the model has one such layer"
    targets = (one for node in facts.nodes[ast.Assign] for one in node.targets if isinstance(one, ast.Subscript))
    if any(re.match(rf"self\.{re.escape(name)}\b", ast.unparse(one)) for one in targets):
        return "what is hidden besides the future differs between layers"
    return ""


def _is_made_once(name: str, facts: ModuleFacts, depth: int = 4) -> bool:
    """Whether the file makes one instance of a class, in a class of which the same is true, up to a whole model."""
    calls = [one for one in facts.nodes[ast.Call] if isinstance(one.func, ast.Name) and one.func.id == name]
    if not calls:
        return re.search(r"block|layer|att(entio)?n|head|encoder|decoder", name, re.I) is None
    above = next((one for one in facts.around(calls[0]) if isinstance(one, (ast.ClassDef, *_REPEATED))), None)
    if len({_assigned_to(one, facts) for one in calls}) > 1 or depth == 0 or isinstance(above, _REPEATED):
        return False
    return above is None or (isinstance(above, ast.ClassDef) and _is_made_once(above.name, facts, depth - 1))


_REPEATED = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)


def _assigned_to(call: ast.AST, facts: ModuleFacts) -> str:
    """What a call is assigned to, the same in two branches, as source code; its line where it is not assigned."""
    node = facts.statement_around(call)
    line = str(getattr(call, "lineno", ""))
    return " ".join(map(ast.unparse, node.targets)) if isinstance(node, ast.Assign) else line


def _is_of_old_torch(test: ast.expr, event: Event) -> bool:
    """Whether a condition is that torch has no `scaled_dot_product_attention`, or is an attribute that says so."""
    written = with_attributes(test, event)
    return "hasattr" in written and "scaled_dot_product_attention" in written


@rule("ATT607", Severity.WARNING)
def repeated_keys(facts: ModuleFacts) -> Iterator[Report]:
    """Keys and values of grouped heads are copied for every query head."""
    if re.search(r"#.*enable_gqa", facts.source):  # the author knows it, and says why not
        return
    for event in facts.judged("sdpa"):
        function = facts.function_around(event.node)
        key, value = _repeated(event.term["key"]), _repeated(event.term["value"])
        grouped = not is_none(event.term["enable_gqa"]) or "enable_gqa=" in code_of(function)  # in another branch too
        if key is None or value is None or grouped:
            continue
        yield Report(
            key.node if facts.function_around(key.node) is function else event.node,
            "keys are copied for each query head: pass enable_gqa=True, and leave keys and values as they are",
            unless="another kernel of this function needs the copies" if _is_of_kernels(event, facts) else "",
        )


def _is_of_kernels(event: Event, facts: ModuleFacts) -> bool:
    """Whether a call is one of several that a name chooses: `if self.kernel == "triton"`."""
    compared = (one for test in facts.tests_around(event.node) for one in below(test, ast.Compare))
    return any(isinstance(getattr(side, "value", None), str) for one in compared for side in one.comparators)


def _repeated(operand: Term) -> Term | None:
    operand = through(operand, "transpose", "cast", "permute")
    if operand.op == "repeat_interleave":
        copied = number(operand["dim"]) in (1, 2, -3) and number(operand["repeats"]) != 1
        return operand if copied else None
    if operand.op == "choice" and isinstance(operand.node, ast.Call):  # a helper that returns early for one group
        return next((found for one in operand.items if (found := _repeated(one)) is not None), None)
    return operand if operand.op in ("reshape", "flatten") and _is_expanded(operand.input) else None


def _is_expanded(term: Term) -> bool:
    """Whether a tensor is expanded along an axis that was inserted for it, which a reshape then copies."""
    inner = term.input if term.op in ("expand", "repeat") else ABSENT
    return inner.op == "unsqueeze" or (inner.op == "item" and any(is_none(one) for one in inner.items))
