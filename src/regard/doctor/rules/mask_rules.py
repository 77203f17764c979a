"""Rules about masks: which pairs are hidden, by which meaning of True, and by what value."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..attention_sites import AttentionSite, Step, names_in
from ..finding import Severity
from ..mask_values import hidden_pairs, is_zero_one, mask_values, triangle
from ..symbolic_evaluation import Event, ModuleFacts
from ..term import Term, is_none, is_true, label, number, walk
from .base import Report, formulas, rule

TORCH_MASKS = {
    "torch.nn.MultiheadAttention": ("attn_mask",),
    "torch.nn.TransformerEncoder": ("mask",),
    "torch.nn.TransformerEncoderLayer": ("src_mask",),
    "torch.nn.TransformerDecoder": ("tgt_mask",),
    "torch.nn.TransformerDecoderLayer": ("tgt_mask",),
    "torch.nn.Transformer": ("src_mask", "tgt_mask"),
}
"""Masks of pairs that the modules of torch take; True hides."""

PADDING_MASKS = {
    "torch.nn.MultiheadAttention": ("key_padding_mask",),
    "torch.nn.TransformerEncoder": ("src_key_padding_mask",),
    "torch.nn.TransformerEncoderLayer": ("src_key_padding_mask",),
    "torch.nn.TransformerDecoder": ("tgt_key_padding_mask", "memory_key_padding_mask"),
    "torch.nn.TransformerDecoderLayer": ("tgt_key_padding_mask", "memory_key_padding_mask"),
    "torch.nn.Transformer": ("src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
}
"""Padding masks of these modules; True hides."""


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
    for event in facts.operations("sdpa"):
        mask = event.term.get("attn_mask")
        if is_judged(event, facts) and mask is not None:
            node = mask if _is_within(mask, event) else event.term
            yield MaskUse(mask, node, False, True, "scaled_dot_product_attention")
    for event in facts.applied(*TORCH_MASKS):
        for name in TORCH_MASKS[str(event.term.value)]:
            mask = event.term.get(name)
            if is_judged(event, facts) and mask is not None:
                yield MaskUse(mask, mask, True, True, str(event.term.value).removeprefix("torch."))
    for site in formulas(facts):
        for step in site.before:
            yield from formula_mask(step)


def _is_within(mask: Term, event: Event) -> bool:
    """Whether a mask is made in the function that passes it, not in a helper."""
    first, last = getattr(event.function, "lineno", 0), getattr(event.function, "end_lineno", None) or 0
    return event.function is None or first <= getattr(mask.node, "lineno", 0) <= last


def is_judged(event: Event, facts: ModuleFacts) -> bool:
    """Whether an event is not one that the callers of its function, in the same file, tell more about."""
    return event.depth > 0 or event.function not in facts.followed


def formula_mask(step: Step) -> Iterator[MaskUse]:
    """The use of a mask in one step of a formula, where the step is one."""
    if step.op in ("masked_fill", "setitem") and step.operand is not None and _hides(step.term.get("value")):
        yield MaskUse(step.operand, step.term, True, False, "the softmax")
    elif step.op == "where" and step.operand is not None and _hides(step.operand):
        condition = step.term.get("condition")
        if condition is not None:
            yield MaskUse(condition, step.term, step.operand is step.term.get("input"), False, "the softmax")
    elif step.op == "add" and step.operand is not None and number(step.operand) is None:
        yield MaskUse(step.operand, step.term, False, True, "the softmax")


def _hides(value: Term | None) -> bool:
    found = fill_value(value)
    return found is not None and found < -90


def fill_value(value: Term | None) -> float | None:
    """The number that a mask fills in; that of `finfo(...).min` is minus infinity."""
    if value is None:
        return None
    if value.op == "attribute" and value.value == "min" and any("finfo" in str(one.value) for one in walk(value)):
        return -math.inf
    if value.op == "call" and value.items:
        return fill_value(value.items[0]) if "tensor" in str(value.value) else number(value)
    if value.op == "full":
        return fill_value(value.get("fill_value"))
    return number(value)


def resolved(mask: Term) -> Iterator[Term]:
    """A mask, or the alternatives of which one is used."""
    if mask.op == "choice":
        for one in mask.items:
            yield from resolved(one)
    elif not is_none(mask):
        yield mask


@rule(
    "ATT201",
    Severity.ERROR,
    source="https://github.com/rasbt/LLMs-from-scratch/issues/1061; https://github.com/pytorch/pytorch/pull/170415",
    wrong="""
        def causal_attention(q, k, v):
            n = q.size(-2)
            mask = torch.triu(torch.ones(n, n, device=q.device), diagonal=1).bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    """,
    right="""
        def causal_attention(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
)
def inverted_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask hides the past instead of the future.

    True means *attend* to `scaled_dot_product_attention` and *ignore* to `nn.MultiheadAttention` and `nn.Transformer`;
    a mask made for one of them is inverted for the other. In a formula, `masked_fill` hides where the mask is True. The
    mask is computed for four positions, so its spelling does not matter.
    """
    for use in mask_uses(facts):
        for mask in resolved(use.mask):
            values = mask_values(mask)
            if values is None or (use.added is False and values.dtype != values.bool().dtype and not _boolean(mask)):
                continue
            if is_zero_one(values) and use.added:
                continue
            hidden = hidden_pairs(values if use.added else values.bool(), true_hides=use.true_hides)
            found = triangle(hidden)
            if found in ("past", "past and self"):
                meaning = "ignore" if use.true_hides else "attend"
                reason = f"; to {use.where}, True means {meaning}" if values.dtype == hidden.dtype else ""
                yield Report(use.node.node, f"this mask hides the past and shows the future{reason}: invert it")


def _boolean(mask: Term) -> bool:
    return mask.op in ("equal", "not_equal", "less", "greater", "bool", "invert", "less_equal", "greater_equal")


@rule(
    "ATT202",
    Severity.ERROR,
    source="https://github.com/pytorch/pytorch/issues/21518",
    wrong="""
        def causal_attention(q, k, v):
            mask = torch.tril(torch.ones(q.size(-2), k.size(-2)))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    """,
    right="""
        def causal_attention(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
)
def numeric_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of the numbers 0 and 1 is added to the scores, so that it hides nothing.

    A mask of floating-point numbers is added: 1 where it should show and 0 where it should hide changes weights by a
    factor of e at most. Pass a mask of booleans, or one of 0 and -inf.
    """
    for use in mask_uses(facts):
        for mask in (part for one in resolved(use.mask) for part in _summands(one)):
            values = mask_values(mask)
            if (use.added and values is not None and is_zero_one(values)) or (
                use.added and values is None and _is_float_comparison(mask)
            ):
                yield Report(
                    use.node.node,
                    f"a mask of numbers is added to the scores in {use.where}; 0 and 1 hide nothing: pass booleans, "
                    "or 0 and -inf",
                )


def _summands(mask: Term) -> Iterator[Term]:
    """A mask, and what it is the sum of."""
    yield mask
    if mask.op == "add":
        for one in mask.operands():
            yield from _summands(one)


def _is_broadcast_padding(mask: Term) -> bool:
    """Whether a mask is a parameter of (batch, keys) with axes inserted for heads and queries, as it came."""
    inserted = sum(is_none(one) for one in mask.items) if mask.op == "item" else 0
    return inserted == 2 and mask.input.op == "parameter" and not is_none(mask.items[-1])


def _is_integer(dtype: Term | None) -> bool:
    return dtype is not None and dtype.op == "name" and not str(dtype.value).startswith("torch.float")


def _is_float_comparison(mask: Term) -> bool:
    """Whether a mask is a comparison, which is boolean, converted to numbers."""
    while mask.op in ("unsqueeze", "expand", "reshape", "item", "repeat"):
        mask = mask.input
    if mask.op == "cast" and _is_broadcast_padding(mask.input) and not _is_integer(mask.get("dtype")):
        return True
    if mask.op != "cast" or not str(getattr(mask.get("dtype"), "value", "")).startswith("torch.float"):
        return False
    inner = mask.input
    while inner.op in ("unsqueeze", "expand", "reshape", "item", "repeat", "invert"):
        inner = inner.input
    return inner.op in ("equal", "not_equal", "less", "greater", "less_equal", "greater_equal", "bool")


@rule(
    "ATT203",
    Severity.ERROR,
    source="https://github.com/pytorch/pytorch/issues/103749",
    wrong="""
        def causal_attention(q, k, v):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            future = torch.triu(torch.ones(q.size(-2), k.size(-2), device=q.device)).bool()
            return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
    """,
    right="""
        def causal_attention(q, k, v):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            future = torch.triu(torch.ones(q.size(-2), k.size(-2), device=q.device), diagonal=1).bool()
            return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v
    """,
)
def hidden_diagonal(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask hides the position itself, so that the first query attends to nothing.

    `triu` without `diagonal=1` has the diagonal. With -inf the first row of the softmax is 0/0 = NaN; with a finite
    value it is the mean over all positions, the future included.
    """
    for use in mask_uses(facts):
        for mask in resolved(use.mask):
            values = mask_values(mask)
            if values is None or (is_zero_one(values) and use.added):
                continue
            hidden = hidden_pairs(values if use.added else values.bool(), true_hides=use.true_hides)
            if triangle(hidden) == "future and self":
                yield Report(
                    use.node.node,
                    "this causal mask hides the diagonal too: the first position attends to nothing; "
                    "start at diagonal=1",
                )


@rule(
    "ATT215",
    Severity.ERROR,
    source="https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19",
    wrong="""
        def causal_attention(q, k, v):
            n = q.size(-2)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            seen = torch.tril(torch.ones(n, n, device=q.device), diagonal=1)
            return torch.softmax(scores.masked_fill(seen == 0, float("-inf")), dim=-1) @ v
    """,
    right="""
        def causal_attention(q, k, v):
            n = q.size(-2)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            seen = torch.tril(torch.ones(n, n, device=q.device))
            return torch.softmax(scores.masked_fill(seen == 0, float("-inf")), dim=-1) @ v
    """,
)
def visible_next_position(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask leaves the next position visible.

    `tril(diagonal=1)` and the complement of `triu(diagonal=2)` keep one position too many: the next token, which a
    language model has to predict. Keys are visible up to the query's own position: `tril()`, or hidden by `triu(1)`.
    """
    for use in mask_uses(facts):
        for mask in resolved(use.mask):
            values = mask_values(mask)
            if values is None or (is_zero_one(values) and use.added):
                continue
            hidden = hidden_pairs(values if use.added else values.bool(), true_hides=use.true_hides)
            if triangle(hidden) == "future but the next":
                yield Report(use.node.node, "this causal mask shows each position the next one: move its diagonal by 1")
    for event in facts.operations("return"):
        name = event.function.name if event.function is not None else ""
        values = mask_values(event.term.input) if "mask" in name and event.depth == 0 else None
        if values is not None and triangle(~values.bool()) == "future but the next":
            yield Report(event.term.input.node, "this causal mask shows each position the next one: use diagonal=0")
    for event in facts.operations("masked_fill"):
        values = mask_values(event.term.get("mask"))
        if values is not None and values.dtype == (values == 0).dtype and triangle(values) == "future but the next":
            yield Report(event.term.node, "this causal mask shows each position the next one: fill triu(diagonal=1)")


@rule(
    "ATT204",
    Severity.ERROR,
    source="https://github.com/pytorch/pytorch/issues/101967",
    wrong="""
        def attention(q, k, v, keep):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores + (1.0 - keep) * float("-inf")
            return torch.softmax(scores, dim=-1) @ v
    """,
    right="""
        def attention(q, k, v, keep):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(keep == 0, float("-inf"))
            return torch.softmax(scores, dim=-1) @ v
    """,
)
def zero_times_infinity(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of 0 and 1 is multiplied by infinity: 0 · inf is NaN.

    Every visible position becomes NaN, and with it the whole row. Use `masked_fill`, or a large finite number.
    """
    for event in facts.operations("mul"):
        left, right = event.term.get("input"), event.term.get("other")
        if left is None or right is None:
            continue
        for factor, other in ((left, right), (right, left)):
            plain = number(factor)
            if plain is not None and math.isinf(plain) and number(other) is None and _has_zeros(other):
                yield Report(event.term.node, "0 · inf is NaN: use masked_fill with -inf, or torch.where")
                break


def _has_zeros(term: Term) -> bool:
    """Whether a factor is a mask that has zeros, by its values, its name or how it is computed."""
    values = mask_values(term)
    if values is not None:
        return bool((values == 0).any())
    if term.op == "sub" and number(term.get("input")) == 1:
        return True
    if term.op in ("equal", "not_equal", "bool", "invert", "triu", "tril"):
        return True
    return term.op == "cast" and _has_zeros(term.input)


@rule(
    "ATT205",
    Severity.ERROR,
    source="https://github.com/karpathy/minGPT/issues/75",
    wrong="""
        def attention(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(mask == 0, 1e-9)
            return torch.softmax(scores, dim=-1) @ v
    """,
    right="""
        def attention(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(mask == 0, float("-inf"))
            return torch.softmax(scores, dim=-1) @ v
    """,
)
def mask_that_hides_nothing(facts: ModuleFacts) -> Iterator[Report]:
    """Hidden scores are set to a number that the softmax does not ignore.

    A score of 0, or of ±1e-9 (a slip of -1e9), has as much weight as an average key; a positive number has more than
    the visible ones. Use -inf.
    """
    for site in formulas(facts):
        for step in site.before:
            value = step.term.get("value") if step.op in ("masked_fill", "setitem") else None
            if step.op == "where":
                value = step.operand
            found = fill_value(value)
            if any(_hides(other.term.get("value")) for other in site.before if other is not step):
                continue  # hidden before, and rows without any visible key made finite
            if found is not None and found > -30:
                yield Report(
                    step.term.node, f"hidden scores are set to {found:g}, which the softmax does not ignore: use -inf"
                )


@rule(
    "ATT206",
    Severity.ERROR,
    source="https://github.com/huggingface/transformers/issues/31673",
    wrong="""
        def attention(q, k, v, n):
            mask = torch.tril(torch.ones(n, n))
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return torch.softmax(scores * mask, dim=-1) @ v
    """,
    right="""
        def attention(q, k, v, n):
            mask = torch.tril(torch.ones(n, n))
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            return torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ v
    """,
)
def multiplied_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are multiplied by a mask before the softmax.

    A score of 0 is no hidden one: its weight is e⁰ over the sum, often more than that of visible keys, and the future
    leaks. Fill with -inf instead.
    """
    for site in formulas(facts):
        others = [step for step in site.masks() if step.op != "mul"]
        for step in site.before:
            if step.op != "mul" or step.operand is None or others:
                continue
            values = mask_values(step.operand)
            if (values is not None and is_zero_one(values)) or is_mask_name(step.operand):
                yield Report(
                    step.term.node,
                    "scores are multiplied by a mask: a score of 0 is not hidden; fill with -inf where the mask is 0",
                )


def is_mask_name(term: Term) -> bool:
    """Whether a value is named as a mask of pairs or of keys; masks of heads are others."""
    while term.op in ("unsqueeze", "expand", "cast", "item", "reshape"):
        term = term.input
    name = str(term.value) if term.op in ("parameter", "attribute", "name") else ""
    return bool(re.search(r"(^|_)(attn|attention|causal|src|tgt|trg|padding|pad|key)?_?mask$", name))


@rule(
    "ATT207",
    Severity.ERROR,
    source="https://arxiv.org/abs/1706.03762",
    wrong="""
        def causal_attention(q, k, v, n):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            weights = torch.softmax(scores, dim=-1)
            weights = weights * torch.tril(torch.ones(n, n))
            return weights @ v
    """,
    right="""
        def causal_attention(q, k, v, n):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            return weights @ v
    """,
)
def mask_after_softmax(facts: ModuleFacts) -> Iterator[Report]:
    """The mask is applied to the weights, after the softmax, and to nothing before it.

    Hidden keys still stand in the sum that the softmax divides by: the weights of a row no longer sum to 1, and how
    much is missing tells of the hidden keys. Mask the scores.
    """
    for site in formulas(facts):
        if any(site.masks()) or any(step.op == "div" for step in site.after):
            continue
        for step in site.after:
            mask = step.operand if step.op in ("mul", "masked_fill") else None
            if mask is None:
                continue
            while mask.op in ("equal", "not_equal", "invert"):
                mask = mask.input
            values = mask_values(mask)
            known = values is not None and (is_zero_one(values) or values.dtype == (values == 0).dtype)
            if known or is_mask_name(mask):
                yield Report(
                    step.term.node, "the weights are masked after the softmax and do not sum to 1: mask the scores"
                )


@rule(
    "ATT208",
    Severity.ERROR,
    source="https://github.com/pytorch/pytorch/pull/170415; https://github.com/mlverse/torch/pull/1208",
    wrong="""
        class Encoder(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.attention = nn.MultiheadAttention(dim, 8, batch_first=True)

            def forward(self, x, tokens, pad_id):
                keep = tokens != pad_id
                return self.attention(x, x, x, key_padding_mask=keep, need_weights=False)[0]
    """,
    right="""
        class Encoder(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.attention = nn.MultiheadAttention(dim, 8, batch_first=True)

            def forward(self, x, tokens, pad_id):
                ignore = tokens == pad_id
                return self.attention(x, x, x, key_padding_mask=ignore, need_weights=False)[0]
    """,
)
def inverted_padding_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A padding mask hides the words and shows the padding.

    `key_padding_mask` of the modules of torch is True at padding; `attn_mask` of `scaled_dot_product_attention` and the
    `attention_mask` of tokenizers are True, or 1, at words.
    """
    for event in facts.applied(*PADDING_MASKS):
        for name in PADDING_MASKS[str(event.term.value)]:
            for mask in resolved(event.term.get(name) or Term("constant", event.term.node)):
                if is_judged(event, facts) and not _is_plain(mask) and _true_at(mask) == "words":
                    yield Report(mask.node, f"{name} hides where it is True, and this mask is True at words: invert it")
    for event in facts.operations("sdpa"):
        for mask in resolved(event.term.get("attn_mask") or Term("constant", event.term.node)):
            if is_judged(event, facts) and _true_at(mask) == "padding":
                yield Report(
                    mask.node,
                    "attn_mask of scaled_dot_product_attention shows where it is True, and this mask is True at "
                    "padding: invert it",
                )
    for site in formulas(facts):
        for step in site.before:
            for use in formula_mask(step):
                passed_on = _is_plain(use.mask) or use.mask.op in ("cast", "bool", "unsqueeze")
                if not use.added and not passed_on and _true_at(use.mask) == ("words" if use.true_hides else "padding"):
                    yield Report(use.node.node, "this mask hides the words and shows the padding: invert it")


def _is_plain(mask: Term) -> bool:
    """Whether a mask is passed on as it came: it may have been inverted before."""
    return mask.op in ("parameter", "attribute")


_PAD_NAMES = re.compile(r"(^|_)pad(ding)?(_|$)|pad_?(id|idx|token|index)", re.I)
_OPPOSITE = {"words": "padding", "padding": "words", "": ""}


def _true_at(mask: Term) -> str:
    """Where a padding mask is True: "words", "padding", or "" if that is not plain."""
    if mask.op in ("unsqueeze", "expand", "reshape", "item", "repeat", "cast", "bool", "transpose"):
        return _true_at(mask.input)
    if mask.op in ("invert", "not"):
        return _OPPOSITE[_true_at(mask.input)]
    if mask.op in ("equal", "not_equal"):
        left, right = mask.get("input"), mask.get("other")
        if left is None or right is None:
            return ""
        if any(_PAD_NAMES.search(label(one)) for one in (left, right) if one.op in ("parameter", "attribute", "name")):
            return "padding" if mask.op == "equal" else "words"
        if number(right) in (0, 1) and _true_at(left):
            same = (number(right) == 1) == (mask.op == "equal")
            return _true_at(left) if same else _OPPOSITE[_true_at(left)]
        return ""
    named = str(mask.value) if mask.op in ("parameter", "attribute") else ""
    return "words" if named == "attention_mask" else ""


@rule(
    "ATT211",
    Severity.ERROR,
    source="https://github.com/pytorch/pytorch/issues/108108; https://github.com/ml-explore/mlx/pull/2967",
    wrong="""
        def decode(q, k, v, past_k, past_v):
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """,
    right="""
        def decode(q, k, v, past_k, past_v):
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
            m, n = q.size(2), k.size(2)
            keep = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(diagonal=n - m)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    """,
)
def causal_with_cache(facts: ModuleFacts) -> Iterator[Report]:
    """`is_causal=True` with keys of a cache: the triangle starts at the first key.

    torch aligns the triangle with the first query and the first key. With n cached keys, the new query of a decoding
    step sees the first key alone. Pass `is_causal=False` for one query, and for several a mask aligned to the last key.
    """
    for event in facts.operations("sdpa"):
        key = event.term.get("key")
        if not is_judged(event, facts) or key is None or not is_true(event.term.get("is_causal")):
            continue
        if is_cached(key):
            yield Report(
                event.term.node,
                "is_causal=True aligns the triangle with the first key, and these keys begin with those of a cache: "
                "pass a mask aligned to the last key",
            )


CACHE_NAMES = re.compile(r"past|cache|prev(ious)?_|memory_k|k_?cache|history", re.I)


def is_cached(key: Term) -> bool:
    """Whether keys are, on some path, joined from those of a cache and new ones."""
    for _ in range(30):
        if key.op == "cat":
            joined = key.get("tensors")
            if joined is None or not joined.items:
                return False
            stored = joined.items[0].op in ("item", "loop_item") and not any(
                one.op in ("apply", "matmul") for one in walk(joined.items[0])
            )
            return _names_a_cache(joined.items[0]) or (
                stored and any(one.op == "attribute" for one in walk(joined.items[0]))
            )
        if key.op == "choice":
            return any(is_cached(one) for one in key.items)
        if key.op in ("element", "item") and key.input.op == "method":
            return key.input.value == "update" and _names_a_cache(key.input.input)
        if key.op in ("transpose", "reshape", "expand", "repeat_interleave", "cast", "unsqueeze", "item"):
            key = key.input
        else:
            return False
    return False


def _names_a_cache(term: Term) -> bool:
    return any(CACHE_NAMES.search(name) for name in names_in(term))


@rule(
    "ATT221",
    Severity.WARNING,
    source="https://github.com/facebookresearch/fairseq/issues/3575; https://github.com/karpathy/minGPT/issues/75",
    wrong="""
        def attention(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(mask == 0, -1e9)
            return torch.softmax(scores, dim=-1) @ v
    """,
    right="""
        def attention(q, k, v, mask):
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            scores = scores.masked_fill(mask == 0, float("-inf"))
            return torch.softmax(scores, dim=-1) @ v
    """,
)
def finite_mask_value(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are hidden by a finite number, which half precision cannot hold or scores can outgrow.

    -1e9 overflows in float16, where `masked_fill` refuses it; -1e4 or -100 can be outgrown by scores in training. A row
    without any visible key becomes an average of hidden values. Use -inf, or `torch.finfo(scores.dtype).min`.
    """
    for site in formulas(facts):
        for step in site.before:
            value = step.term.get("value") if step.op in ("masked_fill", "setitem") else None
            if step.op == "where":
                value = step.operand
            node = step.term.node
            if step.op == "add" and step.operand is not None:
                value, node = _finite_number(step.operand)
            found = number(value)
            if found is None or not -math.inf < found <= -30:
                continue
            if found < -65504:
                reason = "which overflows in float16"
            elif found > -20000:
                reason = "which scores can outgrow"
            else:
                continue
            yield Report(node, f"scores are hidden by {found:g}, {reason}: use -inf")


def _finite_number(added: Term) -> tuple[Term | None, ast.AST]:
    """The number by which an added mask hides, and where it is written: (1 - mask) * -1e4, or a filled triangle."""
    for one in walk(added, stop=frozenset({"apply", "softmax", "matmul"})):
        if one.op == "mul":
            found = next((factor for factor in one.operands() if number(factor) is not None), None)
        else:
            found = one.get("fill_value") if one.op == "full" else one.get("value") if one.op == "masked_fill" else None
        plain = number(found)
        if plain is not None and -math.inf < plain <= -30:
            return found, one.node
    return None, added.node


@rule(
    "ATT231",
    Severity.ERROR,
    source="https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/19; https://arxiv.org/abs/1706.03762",
    wrong="""
        class CausalSelfAttention(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads = heads
                self.qkv = nn.Linear(dim, 3 * dim)

            def forward(self, x):
                b, n, d = x.shape
                q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
                return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
    """,
    right="""
        class CausalSelfAttention(nn.Module):
            def __init__(self, dim, heads):
                super().__init__()
                self.heads = heads
                self.qkv = nn.Linear(dim, 3 * dim)

            def forward(self, x):
                b, n, d = x.shape
                q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d)
    """,
)
def missing_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Attention that has to be causal has no mask: every position sees the future.

    Training then copies the next token from the input, with a loss close to zero, and generation fails. Reported where
    the class is named causal or masked, and for `nn.Transformer` and `nn.TransformerDecoder` without a `tgt_mask`
    whose targets are embedded tokens.
    """
    for site in facts.sites:
        class_ = site.event.class_
        if class_ is None or not re.search(r"causal|masked", class_.name, re.I) or not _is_attention_name(class_.name):
            continue
        if not _has_mask(site) and not _is_cross(site):
            yield Report(
                site.output.node, f"{class_.name} attends without a causal mask: every position sees the future"
            )
    yield from _decoders_without_mask(facts)
    for event in facts.applied("torch.nn.TransformerEncoder"):
        given = [event.term.get(name) for name in ("mask", "is_causal")]
        name = event.class_.name if event.class_ is not None else ""
        if is_judged(event, facts) and all(is_none(one) for one in given) and re.search(_LANGUAGE_MODEL, name):
            yield Report(
                event.term.node, f"the encoder of {name} has no causal mask: every position sees the next ones"
            )
    for event in facts.applied("torch.nn.TransformerDecoder", "torch.nn.Transformer"):
        term = event.term
        if not is_judged(event, facts) or not all(is_none(term.get(name)) for name in ("tgt_mask", "tgt_is_causal")):
            continue
        target = term.get("tgt")
        if target is not None and _is_embedded_tokens(target):
            yield Report(
                term.node,
                f"{str(term.value).removeprefix('torch.')} without tgt_mask: every target position sees the next ones; "
                "pass nn.Transformer.generate_square_subsequent_mask(length)",
            )


def _decoders_without_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Layers named decoders that attend to what an encoder gave, and to themselves without a mask."""
    layers: dict[str, list[AttentionSite]] = {}
    for site in facts.sites:
        class_ = site.event.caller if site.event.depth else site.event.class_
        if class_ is not None and re.search(r"^(Transformer)?Decoder(Layer|Block)?\d*$", class_.name):
            layers.setdefault(class_.name, []).append(site)
    for name, sites in layers.items():
        crossing = [_is_cross(site) for site in sites]
        if not any(crossing) or all(crossing):
            continue
        for site, crosses in zip(sites, crossing, strict=True):
            names = {one for term in (site.query, site.key) for one in names_in(term)}
            if crosses or _has_mask(site) or any(re.search(r"object|query_(pos|embed)", one) for one in names):
                continue
            node = site.event.call or site.output.node
            yield Report(node, f"the self-attention of {name} has no causal mask: every position sees the next ones")


_LANGUAGE_MODEL = r"GPT|LanguageModel|CausalLM|CharLM|DecoderOnly|^LM$|TransformerLM"


def _is_attention_name(name: str) -> bool:
    return bool(re.search(r"att(entio)?n|head", name, re.I)) and not re.search(
        r"masked_?lm|maskedlm|masked_image", name, re.I
    )


def _has_mask(site: AttentionSite) -> bool:
    if site.kind == "formula":
        return any(site.masks()) or any(step.op in ("mul", "masked_fill", "tril") for step in site.after)
    term = site.output
    if "**" in term.arguments:
        return True
    names = ("attn_mask", "is_causal", "key_padding_mask", "score_mod", "block_mask")
    given = [term.get(name) for name in names]
    return any(
        one is not None and not is_none(one) and not (one.op == "constant" and one.value is False) for one in given
    )


def _is_cross(site: AttentionSite) -> bool:
    return any(re.search(r"memory|enc_|encod|context|cross|(^|_)src", name, re.I) for name in names_in(site.key))


def _is_embedded_tokens(target: Term) -> bool:
    return any(
        one.op == "apply" and one.value == "torch.nn.Embedding" and not _is_position(one) for one in walk(target)
    )


def _is_position(applied: Term) -> bool:
    names = {label(applied)} | {label(one) for one in applied.operands()}
    return any(re.search(r"pos|query", name, re.I) for name in names)
