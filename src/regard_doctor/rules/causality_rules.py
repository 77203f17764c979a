"""Rules about attention that has to be causal and has no causal mask: decoders, and models of the next token."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, names_in, source_of
from ..finding import Severity
from ..module_facts import ClassFacts, ModuleFacts
from ..python_syntax import Function, code_of, parameters
from ..term import ABSENT, Term, is_none, is_true, label, lowest_of_dtype, number, same, through, walk
from .base import Report, rule
from .mask_uses import may_be_masked


@rule("ATT231", Severity.ERROR)
def missing_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Attention that has to be causal has no mask: every position sees the future."""
    for site in (one for one in facts.sites if one.event.class_ is not None):
        name = site.event.class_.name
        if _is_causal_attention(name) and not _is_masked(site) and not _is_cross(site):
            optional = any("mask" in one.arg for one in parameters(facts.function_around(site.node)))
            if not optional or "causal" in name.lower():  # else masked by what it is given, on another path
                yield Report(site.node, f"{name} attends without a causal mask: every position sees the future")
    yield from _decoders_without_mask(facts)
    yield from _causal_with_another_mask(facts)
    for event in filter(facts.is_judged, facts.applied("torch.nn.TransformerEncoder")):
        name = event.class_.name if event.class_ is not None else ""
        if event.term.lacks("mask", "is_causal") and re.search(_LANGUAGE_MODEL, name):
            message = f"the encoder of {name} has no causal mask: every position sees the next ones"
            yield Report(event.node, message)
    for event in filter(facts.is_judged, facts.applied("torch.nn.TransformerDecoder", "torch.nn.Transformer")):
        term, target = event.term, event.term["tgt"]
        unmasked = term.lacks("tgt_mask", "tgt_is_causal")
        if unmasked and target is not term["src"] and _is_embedded_text(target, event.class_):
            yield Report(
                event.node,
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
    unless = "" if re.search(r"vocab|nn\.Embedding\(|\bwords\b", facts.source) else "its positions have no order"
    for name, sites in layers.items():
        own = [site for site in sites if not _is_cross(site)]
        for site in own if len(own) < len(sites) else ():
            names = names_in(site.query) | names_in(site.key)
            if not _is_masked(site) and not any(re.search(r"object|query_(pos|embed)", one) for one in names):
                message = f"the self-attention of {name} has no causal mask: every position sees the next ones"
                yield Report(site.place, message, unless=unless)


def _causal_with_another_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Causal masks that are made only where another mask is given, in a function that attends."""
    attending = {facts.function_around(site.node) for site in facts.sites}
    for node in facts.nodes[ast.If]:
        function = facts.function_around(node)
        given = re.fullmatch(r"(\w*mask\w*) is not None", code_of(node.test))
        inner = [one for one in node.body if isinstance(one, ast.If) and _CAUSAL_OPTION.fullmatch(code_of(one.test))]
        if function not in attending or given is None or not any(re.search("tri[lu]", code_of(one)) for one in inner):
            continue
        rest = [*(one for one in function.body if one is not node), *node.orelse] if function is not None else []
        if not any(_CAUSAL.search(code_of(one)) for one in rest):
            yield Report(node, f"the causal mask is applied only with `{given[1]}`: without it all see the future")


_CAUSAL_OPTION = re.compile(r"(self\.)?_?(is_|use_)?causal(_mask)?")
_CAUSAL = re.compile(r"causal|tri[lu]\(", re.I)


_LANGUAGE_MODEL = r"GPT|LanguageModel|CausalLM|CharLM|DecoderOnly|^LM$|TransformerLM"


def _is_causal_attention(name: str) -> bool:
    """Whether a class is named as attention that is causal, and not as one that is not."""
    causal = re.search(r"causal|masked", name, re.I) and re.search(r"att(entio)?n|head", name, re.I)
    return bool(causal) and not re.search(r"non_?causal|acausal|unmasked|masked_?lm|masked_?image", name, re.I)


def _is_masked(site: AttentionSite) -> bool:
    return may_be_masked(site) or not _is_off(site.output["is_causal"])


def _is_off(option: Term) -> bool:
    """Whether an option is left out, None or False."""
    return is_none(option) or (option.op == "constant" and not option.value)


def _is_cross(site: AttentionSite) -> bool:
    return any(re.search(r"memory|enc_|encod|context|cross|(^|_)src", name, re.I) for name in names_in(site.key))


def _is_embedded_text(target: Term, class_: ClassFacts | None) -> bool:
    """Whether tokens of a vocabulary are embedded: by its name, or as the same class scores it."""
    embedded = [one for one in _embeddings(target) if not _is_position(one)]
    named = (one for applied in embedded for one in names_in(applied, stop=frozenset({"parameter"})))
    return any(map(_VOCABULARY.search, named)) or any(_scores_its_vocabulary(one, class_) for one in embedded)


def _embeddings(term: Term) -> Iterator[Term]:
    """The embeddings of tokens that a term is computed from."""
    return (one for one in walk(term) if one.applies("torch.nn.Embedding"))


_VOCABULARY = re.compile(
    r"vocab|word|tok|tgt|trg|target|text|char|caption|(^|_)dec|ntoken|lang|lm_|letters|(^|_)y(_|$)", re.I
)


def _is_position(applied: Term) -> bool:
    names = {label(applied)} | {label(one) for one in applied.operands()}
    return any(re.search(r"pos|query|label|class|type|segment", name, re.I) for name in names)


@rule("ATT233", Severity.ERROR)
def next_token_is_visible(facts: ModuleFacts) -> Iterator[Report]:
    """A model that learns to predict the next token sees it: its attention has no causal mask."""
    if not re.search(r"\[(\.\.\.|:), :-1\b", facts.source) or not re.search(r"\[(\.\.\.|:), 1:\]", facts.source):
        return
    message = "this model predicts the next token, and its attention has no causal mask: every position sees it"
    for event in filter(facts.is_judged, facts.applied("torch.nn.TransformerEncoder")):
        unmasked = event.term.lacks("mask", "is_causal", "**")
        if unmasked and _scores_its_vocabulary(event.term["src"], event.class_):
            yield Report(event.node, message)
    causal = (site for site in facts.sites if is_true(site.output["is_causal"]))
    reported = {site.event.call for site in causal} | {None}  # on one path at least
    for site in facts.sites:
        call, embedded = site.event.call, all(any(_embeddings(source_of(one))) for one in (site.query, site.key))
        own = call not in reported and site.event.caller is not None and embedded and _has_padding_mask_alone(site)
        if own and _computes_shifted_loss(facts.function_around(call)):
            reported.add(call)
            yield Report(site.place, message)


def _scores_its_vocabulary(source: Term, class_: ClassFacts | None) -> bool:
    """Whether a class has a linear layer with one output for each token that it embeds."""
    made = class_.attributes.values() if class_ is not None else ()
    outputs = [one["out_features"] for one in made if one.op == "call" and one.value == "torch.nn.Linear"]
    modules = [one["module"] for one in _embeddings(source)] if outputs else []
    return any(same(one["num_embeddings"], size) for one in modules if one is not ABSENT for size in outputs)


def _computes_shifted_loss(function: Function | None) -> bool:
    written = code_of(function)
    return "cross_entropy" in written and bool(re.search(r":-1\]|:-1, :\]", written)) and ", 1:]" in written


def _has_padding_mask_alone(site: AttentionSite) -> bool:
    """Whether a site has no mask, or masks that are the same for every query."""
    if any(step.op == "mul" and step.operand is not None and step.operand.op == "parameter" for step in site.after):
        return False
    masks = [site.output["attn_mask"], *(step.operand or ABSENT for step in site.masks())]
    others = ("is_causal", "block_mask", "score_mod", "**")
    return all(is_none(one) or _is_of_keys(one) for one in masks) and all(_is_off(site.output[one]) for one in others)


def _is_of_keys(mask: Term) -> bool:
    """Whether a mask of (batch, keys) is broadcast along heads and queries: `mask[:, None, None, :]`."""
    mask = through(mask, "cast", "invert", "equal", "not_equal", "bool", "masked_fill")
    if mask.op in ("mul", "sub", "add"):
        inner = [one for one in mask.operands() if number(one) is None and lowest_of_dtype(one) is None]
        return len(inner) == 1 and _is_of_keys(inner[0])
    if mask.op == "unsqueeze" and mask.input.op == "unsqueeze":
        return [number(one["dim"]) for one in (mask.input, mask)] == [1.0, 2.0]
    return mask.op == "item" and [is_none(one) for one in mask.items] == [False, True, True, False]
