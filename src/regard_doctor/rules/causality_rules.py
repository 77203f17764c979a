"""Rules about attention that has to be causal and has no causal mask: decoders, and models of the next token."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, names_in, source_of
from ..finding import Severity
from ..module_facts import ClassFacts, Function, ModuleFacts
from ..term import Term, is_none, is_true, label, lowest_of_dtype, number, text, walk
from .base import Report, code_of, function_around, parameters, rule
from .mask_uses import may_be_masked


@rule("ATT231", Severity.ERROR)
def missing_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Attention that has to be causal has no mask: every position sees the future."""
    for site in facts.sites:
        class_ = site.event.class_
        if class_ is None or not _is_causal_attention(class_.name):
            continue
        optional = any("mask" in one.arg for one in parameters(function_around(site.node, facts)))
        if optional and "causal" not in class_.name.lower():
            continue  # masked by what it is given, on another path
        if not _is_masked(site) and not _is_cross(site):
            yield Report(site.node, f"{class_.name} attends without a causal mask: every position sees the future")
    yield from _decoders_without_mask(facts)
    for event in facts.applied("torch.nn.TransformerEncoder"):
        given = [event.term.get(name) for name in ("mask", "is_causal")]
        name = event.class_.name if event.class_ is not None else ""
        if facts.is_judged(event) and all(is_none(one) for one in given) and re.search(_LANGUAGE_MODEL, name):
            yield Report(event.node, f"the encoder of {name} has no causal mask: every position sees the next ones")
    for event in facts.applied("torch.nn.TransformerDecoder", "torch.nn.Transformer"):
        term = event.term
        if not facts.is_judged(event) or not all(is_none(term.get(name)) for name in ("tgt_mask", "tgt_is_causal")):
            continue
        target = term.get("tgt")
        if target is not None and target is not term.get("src") and _is_embedded_text(target, event.class_):
            yield Report(
                term.node,
                f"{str(term.value).removeprefix('torch.')} without tgt_mask: every target position sees the next ones; "
                "pass nn.Transformer.generate_square_subsequent_mask(length)",
            )


def _decoders_without_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Layers named decoders that attend to what an encoder gave, and to themselves without a mask."""
    layers: dict[str, list[AttentionSite]] = {}
    of_tokens = re.search(r"vocab|nn\.Embedding|\b(tgt|trg|target_tokens|target_ids|input_ids|words)\b", facts.source)
    if not of_tokens or re.search(r"query_pos|reference_points|bbox", facts.source):
        return  # of objects or pictures, which have no order
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
            if crosses or _is_masked(site) or any(re.search(r"object|query_(pos|embed)", one) for one in names):
                continue
            node = site.place
            yield Report(
                node,
                f"the self-attention of {name} has no causal mask: every position sees the next ones",
                unless=""
                if re.search(r"vocab|nn\.Embedding\(|\bwords\b", facts.source)
                else "its positions have no order",
            )


_LANGUAGE_MODEL = r"GPT|LanguageModel|CausalLM|CharLM|DecoderOnly|^LM$|TransformerLM"


def _is_causal_attention(name: str) -> bool:
    """Whether a class is named as attention that is causal, and not as one that is not."""
    causal = re.search(r"causal|masked", name, re.I) and re.search(r"att(entio)?n|head", name, re.I)
    return bool(causal) and not re.search(r"non_?causal|acausal|unmasked|masked_?lm|masked_?image", name, re.I)


def _is_masked(site: AttentionSite) -> bool:
    return may_be_masked(site) or not _is_off(site.output.get("is_causal"))


def _is_off(option: Term | None) -> bool:
    """Whether an option is left out, None or False."""
    return option is None or (option.op == "constant" and not option.value)


def _is_cross(site: AttentionSite) -> bool:
    return any(re.search(r"memory|enc_|encod|context|cross|(^|_)src", name, re.I) for name in names_in(site.key))


def _is_embedded_text(target: Term, class_: ClassFacts | None) -> bool:
    """Whether tokens of a vocabulary are embedded: by its name, or as the same class scores it."""
    embedded = [
        one for one in walk(target) if one.op == "apply" and one.value == "torch.nn.Embedding" and not _is_position(one)
    ]
    named = (one for applied in embedded for one in names_in(applied, stop=frozenset({"parameter"})))
    return any(_VOCABULARY.search(name) for name in named) or any(
        _scores_its_vocabulary(one, class_) for one in embedded
    )


_VOCABULARY = re.compile(
    r"vocab|word|tok|tgt|trg|target|text|char|caption|(^|_)dec|ntoken|lang|lm_|letters|(^|_)y(_|$)", re.I
)


def _is_position(applied: Term) -> bool:
    names = {label(applied)} | {label(one) for one in applied.operands()}
    return any(re.search(r"pos|query|label|class|type|segment", name, re.I) for name in names)


@rule("ATT233", Severity.ERROR)
def next_token_is_visible(facts: ModuleFacts) -> Iterator[Report]:
    """A model that learns to predict the next token sees it: its attention has no causal mask."""
    shifted = re.search(r"\[(\.\.\.|:), :-1\b", facts.source) and re.search(r"\[(\.\.\.|:), 1:\]", facts.source)
    if not shifted:
        return
    message = "this model predicts the next token, and its attention has no causal mask: every position sees it"
    for event in facts.applied("torch.nn.TransformerEncoder"):
        given = [event.term.get(name) for name in ("mask", "is_causal", "**")]
        source = event.term.get("src")
        if source is None or not facts.is_judged(event) or not all(is_none(one) for one in given):
            continue
        if _scores_its_vocabulary(source, event.class_):
            yield Report(event.node, message)
    reported = {
        site.event.call for site in facts.sites if is_true(site.output.get("is_causal"))
    }  # on one path at least
    for site in facts.sites:
        call, class_ = site.event.call, site.event.caller
        if call is None or call in reported or class_ is None or not _has_padding_mask_alone(site):
            continue
        embedded = all(_embedding(source_of(one)) is not None for one in (site.query, site.key))
        if embedded and _computes_shifted_loss(function_around(call, facts)):
            reported.add(call)
            yield Report(call, message)


def _embedding(term: Term) -> Term | None:
    """The module that embeds what a term is computed from, where one does."""
    return next(
        (one.get("module") for one in walk(term) if one.op == "apply" and one.value == "torch.nn.Embedding"), None
    )


def _scores_its_vocabulary(source: Term, class_: ClassFacts | None) -> bool:
    """Whether a class has a linear layer with one output for each token that it embeds."""
    if class_ is None:
        return False
    sizes = {
        text(module.get("num_embeddings"))
        for one in walk(source)
        if one.op == "apply" and one.value == "torch.nn.Embedding" and (module := one.get("module")) is not None
    }
    outputs = [one for one in class_.attributes.values() if one.op == "call" and one.value == "torch.nn.Linear"]
    return any(text(one.get("out_features")) in sizes for one in outputs)


def _computes_shifted_loss(function: Function | None) -> bool:
    written = code_of(function)
    return "cross_entropy" in written and bool(re.search(r":-1\]|:-1, :\]", written)) and ", 1:]" in written


def _has_padding_mask_alone(site: AttentionSite) -> bool:
    """Whether a site has no mask, or masks that are the same for every query."""
    if site.kind == "formula":
        if any(step.op == "mul" and step.operand is not None and step.operand.op == "parameter" for step in site.after):
            return False
        return all(step.operand is not None and _is_of_keys(step.operand) for step in site.masks())
    mask, others = site.output.get("attn_mask"), ("is_causal", "block_mask", "score_mod", "**")
    without = mask is None or is_none(mask) or _is_of_keys(mask)
    return without and all(_is_off(site.output.get(name)) for name in others)


def _is_of_keys(mask: Term) -> bool:
    """Whether a mask of (batch, keys) is broadcast along heads and queries: `mask[:, None, None, :]`."""
    for _ in range(12):
        if mask.op in ("mul", "sub", "add"):
            inner = [one for one in mask.operands() if number(one) is None and lowest_of_dtype(one) is None]
            if len(inner) != 1:
                return False
            mask = inner[0]
        elif mask.op in ("cast", "invert", "equal", "not_equal", "bool", "masked_fill"):
            mask = mask.input
        else:
            break
    if mask.op == "unsqueeze" and mask.input.op == "unsqueeze":
        return [number(one.get("dim")) for one in (mask.input, mask)] == [1.0, 2.0]
    return (
        mask.op == "item"
        and len(mask.items) == 4
        and [is_none(one) for one in mask.items] == [False, True, True, False]
    )
