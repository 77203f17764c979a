"""Rules about the softmax: over the keys, and over more than one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, WeightedAverage, equation_axes, path, poolings, source_of
from ..finding import Severity
from ..module_facts import ModuleFacts
from ..term import Term, is_none, moved_axes, number, text, through, walk
from .base import Report, formulas, function_around, rule


@rule("ATT111", Severity.ERROR)
def wrong_axis(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax normalizes another axis than that of the keys, over which the values are summed."""
    for site in formulas(facts):
        if site.softmax is None or site.weighted is None or site.softmax.get("dim") is None:
            continue
        axis, summed, rank = number(site.softmax.get("dim")), summed_axis(site), scores_rank(site)
        if axis is None or summed is None:
            continue
        if axis >= 0 and rank is None and (axis > 0 or not _is_matrix(site)):
            continue
        wrong = (axis - rank != summed if rank is not None else True) if axis >= 0 else axis != summed
        if wrong and not _has_another_axis(site.softmax, facts):
            yield Report(
                site.softmax.node,
                f"softmax over axis {axis:.0f}, but the product with the values sums over axis {summed}: "
                f"the weights of a query do not sum to 1; use dim={summed}",
            )

    for event in facts.operations("softmax"):
        shared = _flattened_with_keys(event.term)
        if shared:
            yield Report(
                event.term.node,
                f"this softmax runs over axis {shared} too, which queries and keys share: flatten the axes of the keys",
            )
    for pooled in poolings(facts):
        normalized, summed = _pooled_axes(pooled, facts)
        if normalized is not None and normalized != summed:
            yield Report(
                pooled.softmax.node,
                f"softmax over axis {normalized}, but the values are summed over {summed}: the weights of an average "
                "do not sum to 1",
            )


def _flattened_with_keys(softmax: Term) -> str:
    """The letter of an axis that queries and keys share, of an einsum whose axes from there on are made one; or ""."""
    flat = softmax.input
    if flat.op != "flatten" or number(softmax.get("dim")) != -1 or flat.input.op != "einsum" or flat.get("end_dim"):
        return ""
    axes, first = equation_axes(flat.input), number(flat.get("start_dim"))
    if axes is None or first is None or first < 0:
        return ""
    return next((one for one in axes[2][int(first) :] if one in axes[0] and one in axes[1]), "")


def _has_another_axis(softmax: Term, facts: ModuleFacts) -> bool:
    """Whether the same scores have a softmax over another axis too, as where queries and keys read each other."""
    scores = (softmax.input, *(softmax.input.items if softmax.input.op == "choice" else ()))
    return any(
        one.op == "softmax" and one is not softmax and text(one.get("dim")) != text(softmax.get("dim"))
        for term in scores
        for one in facts.consumers.get(id(term), [])
    )


def _is_learned_alone(scores: Term) -> bool:
    """Whether scores are a parameter of the model, with axes of their own and not those of the values."""
    scores = through(scores, "cast", "mul", "div")
    return scores.op == "attribute" or (scores.op == "call" and str(scores.value).endswith("Parameter"))


def _is_read_by_queries(state: Term, softmax: Term, facts: ModuleFacts) -> bool:
    """Whether a product of keys and values is the state of linear attention: queries with a softmax of their own read
    it, and no other softmax is in it.
    """

    def has_another(product: Term) -> bool:
        wanted = (path(one, lambda found: found.op == "softmax" and found is not softmax) for one in product.items)
        return any(one is not None for one in wanted)

    readers = (one for one in facts.consumers.get(id(state), []) if one.op == "einsum")
    return not has_another(state) and any(map(has_another, readers))


def _is_sigmoid(term: Term) -> bool:
    """Whether a term is a probability of its own, as a map of pixels is, and no value that is averaged."""
    return term.op in ("method", "call") and str(term.value).rpartition(".")[2] == "sigmoid"


def _pooled_axes(pooled: WeightedAverage, facts: ModuleFacts) -> tuple[str | int | None, str | int | None]:
    """The axis that a softmax normalizes and the one that its average sums, by letters of an einsum or by numbers."""
    dim = number(pooled.softmax.get("dim"))
    if (
        dim is None
        or _is_learned_alone(pooled.softmax.input)
        or any(step.op not in ("cast", "dropout", "masked_fill", "unsqueeze", "item") for step in pooled.after)
    ):
        return None, None
    moved = [step for step in pooled.after if step.op in ("unsqueeze", "item")]
    if pooled.output.op == "sum":
        summed = number(pooled.output.get("dim"))
        trailing = all(_appends_axis(step) for step in moved)
        again = any(one.op == "sum" for one in facts.consumers.get(id(pooled.output), []))
        if summed is None or dim < 0 or summed < 0 or not trailing or not moved or again:
            return None, None
        return int(dim), int(summed)
    axes = equation_axes(pooled.output)
    operands = [one for one in pooled.output.items if one.op != "constant"]
    led = (path(one, lambda found: found is pooled.softmax) for one in operands)
    weights = next((index for index, one in enumerate(led) if one is not None), None)
    if (
        axes is None
        or weights is None
        or moved
        or len(operands) != 2
        or _is_sigmoid(operands[1 - weights])
        or not -len(axes[weights]) <= dim < len(axes[weights])
    ):
        return None, None
    letter = axes[weights][int(dim)]
    shared_out = letter in axes[2] and letter not in axes[1 - weights]  # to classes, slots or clusters
    if shared_out and not _is_read_by_queries(pooled.output, pooled.softmax, facts):
        return None, None
    summed_letters = [one for one in axes[weights] if one in axes[1 - weights] and one not in axes[2]]
    if "..." in axes[weights] or len(summed_letters) != 1:
        return None, None
    return letter, summed_letters[0] if letter in axes[2] else letter


def _appends_axis(step: Term) -> bool:
    """Whether a step inserts an axis of one element at the end."""
    if step.op == "unsqueeze":
        return number(step.get("dim")) == -1
    return is_none(step.items[-1]) and not any(is_none(one) for one in step.items[:-1])


def _is_matrix(site: AttentionSite) -> bool:
    """Whether scores have two axes at least: queries and keys are made alike, so that neither is a single vector."""
    query, key = source_of(site.query), source_of(site.key)
    if query.op in ("matmul", "apply") and key.op == query.op:
        return text(query.input) == text(key.input)
    names = [str(one.value).lower()[:1] for one in (query, key) if one.op == "parameter"]
    return names == ["q", "k"]


def summed_axis(site: AttentionSite) -> int | None:
    """The axis of the softmax, from the end, over which the product with the values sums; None if unclear."""
    if site.weighted is None:
        return None
    axis = site.weighted.summed_left
    for step in reversed(site.after):
        if step.op in ("cast", "dropout", "masked_fill", "carried"):
            continue
        if step.op in ("mul", "div") and step.operand is not None and number(step.operand) is not None:
            continue
        if step.op == "transpose":
            pair = _transposed_pair(step.term)
            if pair is None:
                return None
            axis = pair[1] if axis == pair[0] else pair[0] if axis == pair[1] else axis
            continue
        return None
    return axis


def _transposed_pair(term: Term) -> tuple[int, int] | None:
    if term.value in ("T", "mT", "t", "H", "mH"):
        return (-1, -2)
    pair = [number(term.get(name)) for name in ("dim0", "dim1")]
    if any(one is None or one >= 0 for one in pair):
        return None
    return int(pair[0] or 0), int(pair[1] or 0)


def scores_rank(site: AttentionSite) -> int | None:
    """The number of axes of the scores, where it is plain from how they are computed."""
    if site.scores is None:
        return None
    for step in site.before:
        if step.op in ("reshape", "unsqueeze", "squeeze", "permute", "expand", "repeat", "rearrange", "flatten"):
            return None
    term = site.scores.term
    if term.op == "einsum":
        axes = equation_axes(term)
        return len(axes[2]) if axes and "..." not in axes[2] else None
    if str(term.value).endswith("bmm"):
        return 3
    if str(term.value).endswith(".mm") or term.value == "mm":
        return 2
    exchanged = moved_axes(site.key) if site.key.op == "transpose" else []
    return exchanged[1] + 1 if exchanged in ([1, 2], [2, 3]) else None


@rule("ATT112", Severity.WARNING)
def implicit_axis(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax of scores is called without an axis."""
    for site in formulas(facts):
        if site.softmax is not None and site.softmax.get("dim") is None and site.softmax.value != "softmax":
            yield Report(
                site.softmax.node, "softmax without an axis takes axis 0 of three axes and axis 1 of four: pass dim=-1"
            )


@rule("ATT113", Severity.ERROR)
def softmax_of_one(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax is taken over an axis of length 1, so that all weights are 1."""
    for event in facts.operations("softmax"):
        term = event.term
        source = term.input
        source = through(source, "masked_fill", "dropout", "cast", "div", "mul")
        module = source.get("module") if source.op == "apply" else None
        while module is not None and module.value == "torch.nn.Sequential" and module.items:
            module = module.items[-1]
        one = module.get("out_features") if module is not None and module.value == "torch.nn.Linear" else None
        if one is not None and number(one) == 1 and _is_last_of_average(term, facts):
            yield Report(
                term.node, "softmax over an axis of length 1: all weights are 1; normalize the axis of the keys"
            )


def _is_last_of_average(softmax: Term, facts: ModuleFacts) -> bool:
    """Whether a softmax is over the last axis: -1, or the one after the axis that the average sums."""
    dim = number(softmax.get("dim"))
    products = [one for one in facts.consumers.get(id(softmax), []) if one.op == "mul"]
    sums = [one for product in products for one in facts.consumers.get(id(product), []) if one.op == "sum"]
    return dim == -1 or (dim is not None and dim > 1 and any(number(one.get("dim")) == dim - 1 for one in sums))


@rule("ATT115", Severity.WARNING)
def weights_with_a_gradient_to_numpy(facts: ModuleFacts) -> Iterator[Report]:
    """Weights that have a gradient are converted to an array of NumPy, which torch refuses."""
    if re.search(r"no_grad|inference_mode|set_grad_enabled|requires_grad_\(False", facts.source):
        return
    for event in facts.operations("method"):
        around = function_around(event.term.node, facts)
        detached = around is not None and re.search(r"\.(detach\(|data\b)", ast.unparse(around))
        if event.term.value == "numpy" and not detached and _has_gradient(event.term.input):
            unless = "the caller computes them under torch.no_grad()"
            yield Report(event.term.node, "these weights have a gradient: .detach().cpu().numpy()", unless=unless)


def _has_gradient(term: Term) -> bool:
    """Whether a term is made of weights, and those of parameters of a model."""
    made = list(walk(term))
    layers = [str(one.value) for one in made if one.op == "apply"]
    weighs = "torch.nn.MultiheadAttention" in layers or any(one.op == "softmax" for one in made)
    return weighs and any(name.startswith("torch.nn.") for name in layers)
