"""Masks where they take effect: what hides which pairs, in calls and in formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..array_frameworks import LAYERS
from ..attention_sites import AttentionSite, Step
from ..module_facts import Event, ModuleFacts
from ..term import Term, is_none, number, through, walk
from .base import formulas

_OF_SOURCE, _OF_TARGET = ("src_key_padding_mask",), ("tgt_key_padding_mask", "memory_key_padding_mask")
TORCH_MASKS = {
    "torch.nn.MultiheadAttention": (("attn_mask",), ("key_padding_mask",)),
    "torch.nn.TransformerEncoder": (("mask",), _OF_SOURCE),
    "torch.nn.TransformerEncoderLayer": (("src_mask",), _OF_SOURCE),
    "torch.nn.TransformerDecoder": (("tgt_mask",), _OF_TARGET),
    "torch.nn.TransformerDecoderLayer": (("tgt_mask",), _OF_TARGET),
    "torch.nn.Transformer": (("src_mask", "tgt_mask"), _OF_SOURCE + _OF_TARGET),
}
"""Masks of pairs, and of padding, that the modules of torch take; True hides."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskUse:
    """A mask where it takes effect: the pairs that it hides are those where it is True, or False, or very negative."""

    mask: Term
    node: Term
    true_hides: bool
    added: bool
    where: str


def mask_uses(facts: ModuleFacts) -> Iterator[MaskUse]:
    """All masks of pairs of a module: of SDPA, of the modules of torch, of formulas."""
    for event in filter(facts.is_judged, [*facts.operations("sdpa"), *facts.applied(*LAYERS)]):
        mask, name = event.term.get("attn_mask"), str(event.term.value)
        if event.term.op == "sdpa":
            name = event.name if facts.framework else "scaled_dot_product_attention"
        if mask is not None:
            yield MaskUse(mask, mask if _is_within(mask, event) else event.term, False, True, name)
    for event in filter(facts.is_judged, facts.applied(*TORCH_MASKS)):
        called = str(event.term.value)
        for mask in filter(None, map(event.term.get, TORCH_MASKS[called][0])):
            yield MaskUse(mask, mask, True, True, called.removeprefix("torch."))
    for step in (step for site in formulas(facts) for step in site.before):
        yield from formula_mask(step)


def _is_within(mask: Term, event: Event) -> bool:
    """Whether a mask is made in the function that passes it, not in a helper."""
    first, last = getattr(event.function, "lineno", 0), getattr(event.function, "end_lineno", None) or 0
    return event.function is None or first <= getattr(mask.node, "lineno", 0) <= last


def filled_value(step: Step) -> Term | None:
    """The number that a step fills in where it hides, as a term; None of steps that fill in nothing."""
    if step.op in ("masked_fill", "setitem"):
        return step.term.get("value")
    return step.operand if step.op == "where" else None


def formula_mask(step: Step) -> Iterator[MaskUse]:
    """The use of a mask in one step of a formula, where the step is one."""
    added = step.op == "add" and number(step.operand) is None
    if step.operand is None or not (added or hides(filled_value(step))):
        return
    mask = step.term["condition"] if step.op == "where" else step.operand
    true_hides = step.operand is step.term["input"] if step.op == "where" else not added
    yield MaskUse(mask, step.term, true_hides, added, "the softmax")


def site_masks(site: AttentionSite) -> Iterator[tuple[Term, Term]]:
    """The masks of one site, each with the term at which it takes effect: steps of a formula, arguments of a call."""
    if site.kind == "formula":
        yield from ((use.mask, use.node) for step in site.before for use in formula_mask(step))
    else:
        given = (site.output.get(name) for name in ("attn_mask", "key_padding_mask"))
        yield from ((mask, mask) for mask in given if mask is not None)


def may_be_masked(site: AttentionSite) -> bool:
    """Whether anything hides keys at a site, other than that it is causal by an option."""
    if site.kind == "formula":
        return any(site.masks()) or any(step.op in ("mul", "masked_fill", "tril") for step in site.after)
    return not site.output.lacks("attn_mask", "key_padding_mask", "block_mask", "score_mod", "**")


def hides(value: Term | None) -> bool:
    """Whether a number that is filled in hides a score."""
    found = fill_value(value)
    return found is not None and found < -90


def fill_value(value: Term | None) -> float | None:
    """The number that a mask fills in; those of `finfo(...).min` and `-finfo(...).max` are minus infinity."""
    if value is None:
        return None
    bound, name = (value.input, "max") if value.op == "negative" else (value, "min")
    if bound.op == "attribute" and bound.value == name:
        return -math.inf if any("finfo" in str(one.value) for one in walk(bound)) else None
    if value.op == "call" and value.items and "tensor" in str(value.value):
        return fill_value(value.items[0])
    return fill_value(value["fill_value"]) if value.op in ("full", "full_like") else number(value)


def resolved(mask: Term) -> Iterator[Term]:
    """A mask, or the alternatives of which one is used."""
    for one in mask.items if mask.op == "choice" else ():
        yield from resolved(one)
    if mask.op != "choice" and not is_none(mask):
        yield mask


def parts_that_hide(mask: Term, true_hides: bool, *moved: str) -> Iterator[tuple[Term, bool]]:
    """The conditions that hide a key by themselves, each with whether it hides where it is True.

    moved: operations that are looked through, besides those that leave the axes of all pairs.
    """
    if mask.op in ("invert", "not", "unsqueeze", "expand", "bool", "carried", *moved):
        yield from parts_that_hide(mask.input, true_hides ^ (mask.op in ("invert", "not")), *moved)
    elif mask.op == ("or" if true_hides else "and"):
        for one in mask.operands():
            yield from parts_that_hide(one, true_hides, *moved)
    else:
        yield mask, true_hides


def is_mask_name(term: Term) -> bool:
    """Whether a value is named as a mask of pairs or of keys; masks of heads are others."""
    term = through(term, "unsqueeze", "expand", "cast", "item", "reshape", "rearrange")
    name = str(term.value) if term.op in ("parameter", "attribute", "name") else ""
    return "head" not in name and bool(
        re.search(r"(^|_)(attn|attention|causal|src|tgt|trg|padding|pad|key)?_?mask$", name)
    )


def is_counted(term: Term) -> bool:
    """Whether a term is positions that were counted."""
    term = through(term, "unsqueeze", "item", "expand", "cast", "reshape", "repeat")
    return term.op == "arange"
