"""Rules about padding, memories and documents: which axis a mask is broadcast along, and whose mask it is."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, names_in, path
from ..finding import Severity
from ..mask_values import hidden_pairs, mask_values, triangle
from ..module_facts import Function, ModuleFacts
from ..term import Term, is_none, is_true, label, lineage, lowest_of_dtype, moved_axes, number, same, walk
from .base import Report, code_of, formulas, function_around, last_name, names_below, parameters, rule
from .mask_uses import fill_value, formula_mask, resolved, site_masks
from .softmax_rules import scores_rank

_PADDING = re.compile(
    r"(^|_)(pad|padding|attention_mask|key_mask|src_mask|token_mask|valid|keep|lengths?|mask)(_|$)", re.I
)
_PASSED = frozenset({"cast", "bool", "invert", "not", "equal", "not_equal", "expand", "carried", "repeat"})


def _last_axis(mask: Term) -> str:
    """Along which axis of the scores a padding mask runs: "queries" where a last axis of 1 was inserted, "keys" where
    one was inserted before the last, "" where that is not known.
    """
    inserted = ""
    for _ in range(20):
        if mask.op in ("equal", "not_equal") and inserted:
            return inserted
        if mask.op in _PASSED:
            mask = mask.input
        elif mask.op == "unsqueeze":
            inserted = inserted or _of_unsqueeze(mask)
            mask = mask.input
        elif mask.op == "item" and any(is_none(one) for one in mask.items):
            taken = sum(not is_none(one) for one in mask.items)  # [:, None] of (batch, keys) leaves the keys last
            inserted = inserted or ("queries" if is_none(mask.items[-1]) and taken > 1 else "keys")
            mask = mask.input
        else:
            break
    named = mask.op in ("parameter", "attribute", "name") and _PADDING.search(label(mask) or str(mask.value))
    compared = mask.op in ("less", "greater_equal", "less_equal", "greater")
    return inserted if named or compared else ""


def _of_unsqueeze(mask: Term) -> str:
    """As `_last_axis`, for one `unsqueeze` of a mask of (batch, length), or the second of two."""
    dim = number(mask.get("dim"))
    if dim is None:
        return ""
    inner = mask.input
    rank = 2
    while inner.op in _PASSED or inner.op == "unsqueeze":
        rank += inner.op == "unsqueeze"
        inner = inner.input
    if dim in (-1, rank):
        return "queries"
    return "keys" if dim in (-2, rank - 1) else ""


def _alternatives(mask: Term, combined: frozenset[str]) -> Iterator[Term]:
    """The masks that a mask is combined from, by these operations."""
    for one in resolved(mask):
        while one.op in ("invert", "cast", "bool", "not") or (one.op in ("equal", "not_equal") and not _has_pad(one)):
            one = one.input
        if one.op in combined:
            for operand in one.operands():
                yield from _alternatives(operand, combined)
        else:
            yield one


def _has_pad(compared: Term) -> bool:
    """Whether tokens are compared with that of padding."""
    return any("pad" in name.lower() for name in names_in(compared))


_COMBINED = frozenset({"and", "or", "mul"})


@rule("ATT209", Severity.ERROR)
def mask_of_queries(facts: ModuleFacts) -> Iterator[Report]:
    """A padding mask runs along the queries instead of the keys."""
    for site in facts.sites:
        if site.kind not in ("formula", "sdpa") or not _has_keys_last(site):
            continue
        found = [
            (_last_axis(part), node)
            for mask, node in site_masks(site)
            for part in _alternatives(mask, _COMBINED)
            if mask_values(part) is None
        ]
        if any(axis != "queries" for axis, _ in found):
            continue
        for axis, node in found:
            if axis == "queries":
                yield Report(
                    node.node,
                    "this padding mask runs along the queries: it has to be (batch, 1, 1, keys)",
                    unless="the axes of the scores are in another order"
                    if site.scores is not None and site.scores.term.op == "einsum"
                    else "",
                )
    for event in facts.operations("return"):  # masks made for several layers, of four axes
        name = event.function.name if event.function is not None else ""
        if event.depth > 0 or not re.search(r"(pad|src|tgt|trg|key|att\w*|seq\w*|make)_?(\w+_)?mask", name):
            continue
        mask = event.term.input
        four_axes = mask.op == "unsqueeze" and mask.input.op == "unsqueeze"
        four_axes = four_axes or (mask.op == "item" and len(mask.items) == 4)
        if four_axes and mask_values(mask) is None and _last_axis(mask) == "queries":
            yield Report(mask.node, "this padding mask runs along the queries: it has to be (batch, 1, 1, keys)")


def _has_keys_last(site: AttentionSite) -> bool:
    """Whether the softmax takes the last axis of the scores; of other layouts nothing is known."""
    axis = number(site.softmax.get("dim")) if site.softmax is not None else None
    if axis is None or axis == -1:
        return True
    rank = scores_rank(site)
    return axis >= 0 if rank is None else axis == rank - 1


@rule("ATT222", Severity.ERROR)
def rows_without_keys(facts: ModuleFacts) -> Iterator[Report]:
    """Padded queries see no key at all, and the softmax of a row of -inf is NaN."""
    for site in formulas(facts):
        if re.search(r"nan_to_num|isnan|nansum|\.any\(|\.all\(", code_of(site.event.function)):
            continue
        for step in site.before:
            value = step.term.get("value") if step.op in ("masked_fill", "setitem") else step.operand
            filled = fill_value(value) if step.op in ("masked_fill", "setitem", "where") else None
            if filled != -math.inf or lowest_of_dtype(value) is not None:
                continue
            for use in formula_mask(step):
                axes = {_last_axis(part) for part in _alternatives(use.mask, _COMBINED)}
                if {"queries", "keys"} <= axes:
                    yield Report(use.node.node, "padded queries see no key, and their rows become NaN: mask keys alone")


@rule("ATT223", Severity.WARNING)
def lowest_numbers_added(facts: ModuleFacts) -> Iterator[Report]:
    """Two masks of the lowest number of the dtype are added, which overflows to -inf."""
    for event in facts.operations("add"):
        left, right = event.term.get("input"), event.term.get("other")
        if any(one.op in ("clamp", "max", "method") for one in facts.consumers.get(id(event.term), [])):
            continue  # the sum is limited to the lowest number
        if left is not None and right is not None and _is_lowest_mask(left) and _is_lowest_mask(right):
            yield Report(event.term.node, "two masks of finfo.min add up to -inf: combine them as booleans")
    for site in formulas(facts):
        added = [step for step in site.before if step.op == "add" and step.operand and _is_lowest_mask(step.operand)]
        if len(added) > 1 and not any(step.conditional for step in added):
            yield Report(added[-1].term.node, "two masks of finfo.min add up to -inf: combine them as booleans")


def _is_lowest_mask(term: Term) -> bool:
    """Whether a term has the lowest number of its dtype where it hides, and 0 elsewhere."""
    *_, made = lineage(
        term, "unsqueeze", "expand", "item", "cast", "triu", "tril", "reshape", "repeat", "carried", "choice"
    )
    filled = {"masked_fill": made.get("value"), "full": made.get("fill_value"), "full_like": made.get("fill_value")}
    numbers = made.operands() if made.op == "mul" else (filled.get(made.op),)
    return any(lowest_of_dtype(one) is not None for one in numbers)


@rule("ATT232", Severity.ERROR)
def cross_attention_with_target_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Cross-attention gets the mask of the target, or none, instead of that of the source."""
    found: dict[int, AttentionSite] = {}
    for site in facts.sites:
        if _is_of_memory(site) and any(_is_of_target(mask) for mask, _ in site_masks(site)):
            known = found.get(id(site.output.node))
            if known is None or site.event.depth < known.event.depth:
                found[id(site.output.node)] = site
    for site in found.values():
        yield Report(
            site.event.call or site.output.node, "cross-attention gets the mask of the target: pass the source's"
        )
    for event in facts.applied(
        "torch.nn.TransformerDecoder", "torch.nn.TransformerDecoderLayer", "torch.nn.Transformer"
    ):
        for name in ("memory_mask", "memory_key_padding_mask"):
            mask = event.term.get(name)
            if not facts.is_judged(event) or mask is None:
                continue
            if _is_of_target(mask) or (not is_none(mask) and same(mask, event.term.get(name.replace("memory", "tgt")))):
                yield Report(event.term.node, f"{name} is the mask of the target: pass that of the source")
        memory = event.term.get("memory")
        given = [event.term.get(name) for name in ("memory_mask", "memory_key_padding_mask", "**")]
        if memory is not None and facts.is_judged(event) and all(is_none(one) for one in given):
            encoded = memory.op == "apply" and memory.value == "torch.nn.TransformerEncoder"
            if encoded and not is_none(memory.get("src_key_padding_mask")):
                yield Report(
                    event.term.node,
                    "the encoder hides the padding of the source, and cross-attention reads it: pass "
                    "memory_key_padding_mask",
                )


_TARGET_MASK = re.compile(
    r"^(?!\w*_(enc|encoder|src|source|mem|memory|cross)(_|$))"
    r"(tgt|trg|target|dec|decoder|causal|look_?ahead|future|subsequent)_(\w+_)?(mask|padding\w*)$",
    re.I,
)


def _is_of_memory(site: AttentionSite) -> bool:
    """Whether keys are those of an encoder, and queries are not; not where they are either, by an option."""
    if any(one.op == "choice" for one in walk(site.key, stop=frozenset({"matmul", "softmax"}))):
        return False
    keys, queries = names_in(site.key), names_in(site.query)
    return any(_MEMORY.match(name) for name in keys - queries)


def _is_of_target(mask: Term) -> bool:
    """Whether a mask is named as the target's, or hides the future."""
    for one in resolved(mask):
        values = mask_values(one)
        if values is not None and triangle(hidden_pairs(values, true_hides=False)) in ("future", "past"):
            return True
        while one.op in (*_PASSED, "unsqueeze", "item", "reshape"):
            one = one.input
        if one.op in ("parameter", "attribute") and _TARGET_MASK.match(label(one) or str(one.value)):
            return True
    return False


@rule("ATT242", Severity.ERROR)
def documents_without_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Documents are packed into one sequence, and attention has a causal mask only."""
    for function, site in _causal_functions(facts):
        documents = [one.arg for one in parameters(function) if _DOCUMENTS.match(one.arg)]
        if not documents or any(_is_tested(name, function) for name in documents):
            continue
        if site.event.call is not None and names_below(site.event.call) & set(documents):
            continue  # what is called has kernels of its own for them
        if not any(names_in(mask) & set(documents) for mask, _ in site_masks(site)):
            yield Report(
                site.event.call or site.output.node,
                f"documents (`{documents[0]}`) are separated by no mask: each attends to those before it",
            )


_DOCUMENTS = re.compile(
    r"^(cu_seq_?lens?\w*|doc(ument)?_?ids?|seq(uence)?_ids?|segment_ids|docs?|doc_?lens?|boundaries)$"
)


def _causal_functions(facts: ModuleFacts) -> Iterator[tuple[Function, AttentionSite]]:
    """Functions with attention that is causal and nothing else."""
    for site in facts.sites:
        node = function_around(site.event.call or site.output.node, facts)
        if node is None:
            continue
        masks = [one for mask, _ in site_masks(site) for one in resolved(mask)]
        causal = is_true(site.output.get("is_causal")) or bool(masks)
        if causal and all(
            (values := mask_values(one)) is not None
            and triangle(hidden_pairs(values.astype(bool), true_hides=True)) in ("future", "past and self")
            for one in masks
        ):
            yield node, site


def _is_tested(name: str, function: Function) -> bool:
    """Whether a branch depends on that name: the packed case may be another's."""
    branches = (node for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp))
    return any(name in names_below(node.test) for node in branches)


@rule("ATT405", Severity.ERROR)
def mask_in_other_order(facts: ModuleFacts) -> Iterator[Report]:
    """The mask is repeated for the heads in another order than the data."""
    yield from _einops_order(facts)
    for site in facts.sites:
        order = "batch" if site.kind == "module" else _row_order(site.query)
        if not order:
            continue
        for mask, _ in site_masks(site):
            for one in walk(mask, stop=frozenset({"apply", "call"})):
                found = _repeated_order(one)
                if found and found != order:
                    fitting = "repeat_interleave(heads, dim=0)" if order == "batch" else "repeat(heads, 1, 1)"
                    yield Report(
                        one.node, f"rows of the data are ordered by {order} first, and this mask is not: use {fitting}"
                    )


def _einops_order(facts: ModuleFacts) -> Iterator[Report]:
    """Masks that einops repeats as "(h b)" where the same function rearranges its data as "(b h)", or the reverse."""
    for function in _written_orders(facts):
        data, masks = function
        orders = {order for order, _ in data}
        for order, node in masks:
            if orders and order not in orders:
                yield Report(node, f"rows of the data are ({orders.pop()}), and those of this mask ({order})")
                break


def _written_orders(facts: ModuleFacts) -> Iterator[tuple[list, list]]:
    """The orders of rows in patterns of einops, by function: those of `rearrange` and those of `repeat`."""
    called = {node.func.id for node in facts.nodes[ast.Call] if isinstance(node.func, ast.Name)}
    for function in facts.nodes[ast.FunctionDef] if called >= {"rearrange", "repeat"} else ():
        found: dict[str, list] = {"rearrange": [], "repeat": []}
        for node in ast.walk(function):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            pattern = node.args[1] if isinstance(node, ast.Call) and name in found and len(node.args) > 1 else None
            if isinstance(pattern, ast.Constant) and isinstance(pattern.value, str):
                rows = re.search(r"-> *\((b h|h b)\)", pattern.value)
                if rows is not None:
                    found[name].append((rows[1], node))
        if found["rearrange"] and found["repeat"]:
            yield found["rearrange"], found["repeat"]


def _row_order(query: Term) -> str:
    """Whether rows of batch · heads have the batch first or the heads first; "" if that is not known."""
    found = path(query, lambda one: (one.op == "reshape" and len(one.items) == 3) or one.op == "cat")
    if found is None:
        return ""
    reshaped = found[0]
    if reshaped.op == "cat":
        joined = reshaped.get("tensors")
        split = joined is not None and joined.op in ("split", "chunk")
        return "heads" if split and number(reshaped.get("dim")) in (0, None) else ""
    order = moved_axes(reshaped.input)
    if reshaped.input.op == "transpose":
        return "batch" if order == [1, 2] else ""
    return "batch" if order[:2] == [0, 2] else "heads" if order[:2] == [2, 0] else ""


def _repeated_order(mask: Term) -> str:
    """The order of rows of a mask of (batch, queries, keys) that is repeated for heads."""
    if mask.op == "repeat" and len(mask.items) in (2, 3):
        first, *others = mask.items
        heads = "head" in label(first).lower() or label(first) in ("h", "nh", "n_h")
        return "heads" if heads and number(first) is None and all(number(one) == 1 for one in others) else ""
    if mask.op == "repeat_interleave" and number(mask.get("dim")) == 0:
        return "batch"
    return ""


@rule("ATT234", Severity.ERROR)
def memory_as_query(facts: ModuleFacts) -> Iterator[Report]:
    """Cross-attention gets the memory as queries, and the states of the decoder as keys and values."""
    for event in facts.operations("apply", "method"):
        call = event.term.node
        name = last_name(call.func) if isinstance(call, ast.Call) else ""
        written = [ast.unparse(one).rpartition(".")[2] for one in call.args[:3]] if isinstance(call, ast.Call) else []
        if not _CROSS.search(name) or len(written) < 2 or event.depth > 0:
            continue
        if _MEMORY.search(written[0]) and not any(_MEMORY.search(one) for one in written[1:]):
            yield Report(call, f"`{written[0]}` is what cross-attention reads, its keys and values: swap them")


_CROSS = re.compile(r"cross|src_att|source_att|enc(oder)?_(dec\w*_)?att|memory_att|encdec", re.I)
_MEMORY = re.compile(r"^(mem(ory)?|enc(oder)?_?(out(put)?s?|states?|hidden\w*)|context|source|src)$", re.I)


@rule("ATT244", Severity.WARNING)
def mean_over_padding(facts: ModuleFacts) -> Iterator[Report]:
    """The mean of a padded batch counts the padding."""
    padded = any(
        one.arg == "padding" and getattr(one.value, "value", None) in (True, "longest", "max_length")
        for call in facts.nodes[ast.Call]
        for one in call.keywords
    )
    for event in facts.operations("mean") if padded else ():
        term = event.term
        if number(term.get("dim")) == 1 and term.input.op == "attribute" and term.input.value == "last_hidden_state":
            yield Report(term.node, "this mean counts the padding: multiply by the mask, and divide by its sum")
