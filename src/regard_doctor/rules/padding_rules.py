"""Rules about padding, memories and documents: which axis a mask is broadcast along, and whose mask it is."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from itertools import islice

from ..attention_sites import AttentionSite, WrittenFormula, names_in, path
from ..finding import Severity
from ..mask_values import hidden_triangle, mask_values
from ..module_facts import ModuleFacts
from ..python_syntax import Function, below, code_of, last_name, names_below, parameters
from ..term import (
    ABSENT,
    Term,
    is_none,
    is_true,
    label,
    lineage,
    lowest_of_dtype,
    moved_axes,
    number,
    same,
    through,
    walk,
)
from .base import Report, formulas, rule
from .mask_uses import fill_value, filled_value, formula_mask, resolved, site_masks
from .softmax_rules import scores_rank

_PADDING = re.compile(
    r"(^|_)(pad|padding|attention_mask|key_mask|src_mask|token_mask|valid|keep|lengths?|mask)(_|$)", re.I
)
_PASSED = frozenset({"cast", "bool", "invert", "not", "equal", "not_equal", "expand", "carried", "repeat"})


def _last_axis(mask: Term) -> str:
    """The axis of the scores along which a padding mask runs: "queries" where a last axis of 1 was inserted, "keys"
    where one was before the last, "" where that is not known.
    """
    inserted = ""
    while mask.op in (*_PASSED, "unsqueeze") or _has_new_axes(mask):
        if mask.op in ("equal", "not_equal") and inserted:
            return inserted
        inserted, mask = inserted or _inserted(mask), mask.input
    named = mask.op in ("parameter", "attribute", "name") and _PADDING.search(label(mask) or str(mask.value))
    return inserted if named or mask.op in ("less", "greater_equal", "less_equal", "greater") else ""


def _has_new_axes(mask: Term) -> bool:
    return mask.op == "item" and any(is_none(one) for one in mask.items)


def _inserted(mask: Term) -> str:
    """As `_last_axis`, for one operation on a mask of (batch, length): an `unsqueeze`, or an index with None."""
    if mask.op == "item":
        taken = sum(not is_none(one) for one in mask.items)  # [:, None] of (batch, keys) leaves the keys last
        return "queries" if is_none(mask.items[-1]) and taken > 1 else "keys"
    dim = number(mask["dim"]) if mask.op == "unsqueeze" else None
    rank = 2 + sum(one.op == "unsqueeze" for one in lineage(mask.input, *_PASSED, "unsqueeze"))
    return "queries" if dim in (-1, rank) else "keys" if dim in (-2, rank - 1) else ""


def _alternatives(mask: Term) -> Iterator[Term]:
    """The masks that a mask is combined from, by "and", "or" and products."""
    for one in resolved(mask):
        while one.op in ("invert", "cast", "bool", "not") or (one.op in ("equal", "not_equal") and not _has_pad(one)):
            one = one.input
        combined = one.operands() if one.op in ("and", "or", "mul") else ()
        yield from (part for operand in combined for part in _alternatives(operand))
        if not combined:
            yield one


def _has_pad(compared: Term) -> bool:
    """Whether tokens are compared with that of padding."""
    return any("pad" in name.lower() for name in names_in(compared))


@rule("ATT209", Severity.ERROR)
def mask_of_queries(facts: ModuleFacts) -> Iterator[Report]:
    """A padding mask runs along the queries instead of the keys."""
    message = "this padding mask runs along the queries: it has to be (batch, 1, 1, keys)"
    for site in facts.sites:
        if site.kind not in ("formula", "sdpa") or not _has_keys_last(site):
            continue
        found = [
            (_last_axis(part), node)
            for mask, node in site_masks(site)
            for part in _alternatives(mask)
            if mask_values(part) is None
        ]
        free = isinstance(site, WrittenFormula) and site.scores.term.op == "einsum"
        for _, node in found if all(axis == "queries" for axis, _ in found) else ():
            yield Report(node.node, message, unless="the axes of the scores are in another order" if free else "")
    for event in facts.operations("return"):  # masks made for several layers, of four axes
        mask, name = event.term.input, event.function.name if event.function is not None else ""
        named = re.search(r"(pad|src|tgt|trg|key|att\w*|seq\w*|make)_?(\w+_)?mask", name)
        twice = mask.op == "unsqueeze" and mask.input.op == "unsqueeze"
        four_axes = twice or (mask.op == "item" and len(mask.items) == 4)
        if named and event.depth == 0 and four_axes and mask_values(mask) is None and _last_axis(mask) == "queries":
            yield Report(mask.node, message)


def _has_keys_last(site: AttentionSite) -> bool:
    """Whether the softmax takes the last axis of the scores; of other layouts nothing is known."""
    axis = number(site.softmax["dim"]) if isinstance(site, WrittenFormula) else None
    if axis is None or axis == -1 or not isinstance(site, WrittenFormula):
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
            value = filled_value(step)
            if fill_value(value) != -math.inf or lowest_of_dtype(value) is not None:
                continue
            for use in formula_mask(step):
                if {"queries", "keys"} <= {_last_axis(part) for part in _alternatives(use.mask)}:
                    yield Report(use.node.node, "padded queries see no key, and their rows become NaN: mask keys alone")


@rule("ATT223", Severity.WARNING)
def lowest_numbers_added(facts: ModuleFacts) -> Iterator[Report]:
    """Two masks of the lowest number of the dtype are added, which overflows to -inf."""
    message = "two masks of finfo.min add up to -inf: combine them as booleans"
    for event in facts.operations("add"):
        limited = facts.uses(event.term, "clamp", "max", "method")
        if not limited and _is_lowest_mask(event.term["input"]) and _is_lowest_mask(event.term["other"]):
            yield Report(event.node, message)
    for site in formulas(facts):
        added = [step for step in site.before if step.op == "add" and step.operand and _is_lowest_mask(step.operand)]
        if len(added) > 1 and not any(step.conditional for step in added):
            yield Report(added[-1].term.node, message)


def _is_lowest_mask(term: Term) -> bool:
    """Whether a term has the lowest number of its dtype where it hides, and 0 elsewhere."""
    moves = ("unsqueeze", "expand", "item", "cast", "triu", "tril", "reshape", "repeat", "carried", "choice")
    *_, made = lineage(term, *moves)
    filled = {"masked_fill": made["value"], "full": made["fill_value"], "full_like": made["fill_value"]}
    numbers = made.operands() if made.op == "mul" else (filled.get(made.op),)
    return any(lowest_of_dtype(one) is not None for one in numbers)


@rule("ATT232", Severity.ERROR)
def cross_attention_with_target_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Cross-attention gets the mask of the target, or none, instead of that of the source."""
    found: dict[ast.AST, AttentionSite] = {}
    for site in sorted(facts.sites, key=lambda one: one.event.depth):
        masks = [one for mask, _ in site_masks(site) for one in resolved(mask)]
        of_target = _is_of_memory(site) and any(map(_is_of_target, masks))
        if of_target or any(_is_named_as_query(one, site) for one in masks):
            found.setdefault(site.node, site)
    for site in found.values():
        yield Report(site.place, "cross-attention gets the mask of the target: pass the source's")
    decoders = ("torch.nn.TransformerDecoder", "torch.nn.TransformerDecoderLayer", "torch.nn.Transformer")
    for event in filter(facts.is_judged, facts.applied(*decoders)):
        for name in ("memory_mask", "memory_key_padding_mask"):
            mask, of_target = event.term[name], event.term[name.replace("memory", "tgt")]
            if _is_of_target(mask) or (not is_none(mask) and same(mask, of_target)):
                yield Report(event.node, f"{name} is the mask of the target: pass that of the source")
        memory = event.term["memory"]
        encoded = memory.applies("torch.nn.TransformerEncoder")
        without = event.term.lacks("memory_mask", "memory_key_padding_mask", "**")
        if encoded and without and not is_none(memory["src_key_padding_mask"]):
            yield Report(
                event.node,
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
    return any(map(_MEMORY.match, names_in(site.key) - names_in(site.query)))


def _is_of_target(mask: Term) -> bool:
    """Whether a mask is named as the target's, or hides the future."""
    for one in resolved(mask):
        if hidden_triangle(one, true_hides=False) in ("future", "past"):
            return True
        one = through(one, *_PASSED, "unsqueeze", "item", "reshape")
        if one.op in ("parameter", "attribute") and _TARGET_MASK.match(label(one) or str(one.value)):
            return True
    return False


_OF_WHAT = re.compile(r"(\w+?)_(key_padding_mask|padding_mask|pad_mask|mask|valid|pad|lengths?|lens?)", re.I)


def _is_named_as_query(mask: Term, site: AttentionSite) -> bool:
    """Whether a mask of keys is called as what queries are made from, `text_mask` of `text`, and nothing as keys."""
    queries, keys = names_in(site.query), names_in(site.key)
    owners = {found[1] for name in names_in(mask) if (found := _OF_WHAT.fullmatch(name)) is not None}
    of_keys = _last_axis(mask) == "keys" or mask is site.output.get("key_padding_mask")
    return of_keys and bool(owners & queries - keys) and not owners & keys


@rule("ATT242", Severity.ERROR)
def documents_without_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Documents are packed into one sequence, and attention has a causal mask only."""
    for site in filter(_is_causal_alone, facts.sites):
        function = facts.function_around(site.place)
        documents = [one.arg for one in parameters(function) if _DOCUMENTS.match(one.arg)]
        tested = {name for one in below(function, ast.If, ast.IfExp) for name in names_below(one.test)}
        called = names_below(site.event.call) if site.event.call is not None else set()  # it may have such kernels
        read = {name for mask, _ in site_masks(site) for name in names_in(mask)}
        if documents and not {*documents} & (tested | called | read):
            yield Report(
                site.place, f"documents (`{documents[0]}`) are separated by no mask: each attends to those before it"
            )


_DOCUMENTS = re.compile(
    r"^(cu_seq_?lens?\w*|doc(ument)?_?ids?|seq(uence)?_ids?|segment_ids|docs?|doc_?lens?|boundaries)$"
)


def _is_causal_alone(site: AttentionSite) -> bool:
    """Whether attention is causal and nothing else."""
    masks = [one for mask, _ in site_masks(site) for one in resolved(mask)]
    causal = is_true(site.output["is_causal"]) or bool(masks)
    hidden = (hidden_triangle(one, true_hides=True, as_booleans=True) for one in masks)
    return causal and all(one in ("future", "past and self") for one in hidden)


@rule("ATT405", Severity.ERROR)
def mask_in_other_order(facts: ModuleFacts) -> Iterator[Report]:
    """The mask is repeated for the heads in another order than the data."""
    yield from _einops_order(facts)
    fitting = {"batch": "repeat_interleave(heads, dim=0)", "heads": "repeat(heads, 1, 1)"}
    for site in facts.sites:
        order = "batch" if site.kind == "module" else _row_order(site.query)
        masks = (mask for mask, _ in site_masks(site)) if order else ()
        for one in (one for mask in masks for one in walk(mask, stop=frozenset({"apply", "call"}))):
            if _repeated_order(one) not in ("", order):
                message = f"rows of the data are ordered by {order} first, and this mask is not: use {fitting[order]}"
                yield Report(one.node, message)


def _einops_order(facts: ModuleFacts) -> Iterator[Report]:
    """Masks that einops repeats as "(h b)" where the same function rearranges its data as "(b h)", or the reverse."""
    for function in facts.nodes[ast.FunctionDef]:
        written = list(_row_orders(function))
        orders = {order for name, order, _ in written if name == "rearrange"}
        masks = ((order, node) for name, order, node in written if name == "repeat" and orders - {order} == orders)
        for order, node in islice(masks if orders else (), 1):
            yield Report(node, f"rows of the data are ({orders.pop()}), and those of this mask ({order})")


def _row_orders(function: Function) -> Iterator[tuple[str, str, ast.Call]]:
    """The orders of rows in patterns of einops, with the name of the function, `rearrange` or `repeat`."""
    for node in below(function, ast.Call):
        match node:
            case ast.Call(
                func=ast.Name(id="rearrange" | "repeat" as name), args=[_, ast.Constant(value=str(written)), *_]
            ):
                if (rows := re.search(r"-> *\((b h|h b)\)", written)) is not None:
                    yield name, rows[1], node


def _row_order(query: Term) -> str:
    """Whether rows of batch · heads have the batch first or the heads first; "" if that is not known."""
    found = path(query, lambda one: (one.op == "reshape" and len(one.items) == 3) or one.op == "cat")
    reshaped = found[0] if found is not None else ABSENT
    if reshaped.op == "cat":
        return "heads" if reshaped["tensors"].op in ("split", "chunk") and number(reshaped["dim"]) in (0, None) else ""
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
    return "batch" if mask.op == "repeat_interleave" and number(mask["dim"]) == 0 else ""


@rule("ATT234", Severity.ERROR)
def memory_as_query(facts: ModuleFacts) -> Iterator[Report]:
    """Cross-attention gets the memory as queries, and the states of the decoder as keys and values."""
    for event in facts.operations("apply", "method"):
        call = event.node
        if not isinstance(call, ast.Call) or not _CROSS.search(last_name(call.func)) or event.depth > 0:
            continue
        first, *others = [ast.unparse(one).rpartition(".")[2] for one in call.args[:3]] or [""]
        if others and _MEMORY.search(first) and not any(_MEMORY.search(one) for one in others):
            yield Report(call, f"`{first}` is what cross-attention reads, its keys and values: swap them")


_CROSS = re.compile(r"cross|src_att|source_att|enc(oder)?_(dec\w*_)?att|memory_att|encdec", re.I)
_MEMORY = re.compile(r"^(mem(ory)?|enc(oder)?_?(out(put)?s?|states?|hidden\w*)|context|source|src)$", re.I)


@rule("ATT244", Severity.WARNING)
def mean_over_padding(facts: ModuleFacts) -> Iterator[Report]:
    """The mean of a padded batch counts the padding."""
    options = (getattr(one.value, "value", None) for one in facts.nodes[ast.keyword] if one.arg == "padding")
    padded = any(value in (True, "longest", "max_length") for value in options)
    for event in facts.operations("mean") if padded else ():
        read = event.term.input
        if number(event.term["dim"]) == 1 and read.op == "attribute" and read.value == "last_hidden_state":
            yield Report(event.node, "this mean counts the padding: multiply by the mask, and divide by its sum")
