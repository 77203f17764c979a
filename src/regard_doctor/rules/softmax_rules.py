"""Rules about the softmax: over the keys, and over more than one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, WeightedAverage, WrittenFormula, equation_axes, path, poolings, source_of
from ..finding import Severity
from ..module_facts import ModuleFacts
from ..term import ABSENT, Term, is_none, lineage, moved_axes, number, same, text, through, walk
from .base import Report, formulas, rule


@rule("ATT111", Severity.ERROR)
def wrong_axis(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax normalizes another axis than that of the keys, over which the values are summed."""
    for site in formulas(facts):
        axis, summed, rank = number(site.softmax["dim"]), summed_axis(site), scores_rank(site)
        if axis is None or summed is None or (axis >= 0 and rank is None and (axis > 0 or not _is_matrix(site))):
            continue
        from_end = axis if axis < 0 else axis - rank if rank is not None else None
        if from_end != summed and not _has_another_axis(site.softmax, facts):
            yield Report(
                site.softmax.node,
                f"softmax over axis {axis:.0f}, but the product with the values sums over axis {summed}: "
                f"the weights of a query do not sum to 1; use dim={summed}",
            )
    for event in facts.operations("softmax"):
        shared = _flattened_with_keys(event.term)
        if shared:
            yield Report(
                event.node,
                f"this softmax runs over axis {shared} too, which queries and keys share: flatten the axes of the keys",
            )
    for pooled in poolings(facts):
        normalized, summed = _pooled_axes(pooled, facts)
        if normalized != summed:
            yield Report(
                pooled.softmax.node,
                f"softmax over axis {normalized}, but the values are summed over {summed}: the weights of an average "
                "do not sum to 1",
            )


def _flattened_with_keys(softmax: Term) -> str:
    """The letter of an axis that queries and keys share, of an einsum whose axes from there on are made one; or ""."""
    flat = softmax.input
    *_, scores = lineage(flat.input, "choice", "masked_fill", "cast", "mul", "div", "dropout")
    if flat.op != "flatten" or number(softmax.get("dim")) != -1 or scores.op != "einsum" or flat.get("end_dim"):
        return ""
    axes, first = equation_axes(scores), number(flat.get("start_dim"))
    if axes is None or first is None or first < 0:
        return ""
    return next((one for one in axes[2][int(first) :] if one in axes[0] and one in axes[1]), "")


def _has_another_axis(softmax: Term, facts: ModuleFacts) -> bool:
    """Whether the same scores have a softmax over another axis too, as where queries and keys read each other."""
    scores = (softmax.input, *(softmax.input.items if softmax.input.op == "choice" else ()))
    others = (one for term in scores for one in facts.uses(term, "softmax"))
    return any(not same(one["dim"], softmax["dim"]) for one in others)


def _is_learned_alone(scores: Term) -> bool:
    """Whether scores are a parameter of the model, with axes of their own and not those of the values."""
    scores = through(scores, "cast", "mul", "div")
    return scores.op == "attribute" or (scores.op == "call" and str(scores.value).endswith("Parameter"))


def _is_read_by_queries(state: Term, softmax: Term, facts: ModuleFacts) -> bool:
    """Whether queries with a softmax of their own read a product of keys and values, the state of linear attention."""

    def has_another(product: Term) -> bool:
        wanted = (path(one, lambda found: found.op == "softmax" and found is not softmax) for one in product.items)
        return any(one is not None for one in wanted)

    return not has_another(state) and any(map(has_another, facts.uses(state, "einsum")))


def _is_sigmoid(term: Term) -> bool:
    """Whether a term is a probability of its own, as a map of pixels is, and no value that is averaged."""
    return term.op in ("method", "call") and str(term.value).rpartition(".")[2] == "sigmoid"


def _pooled_axes(pooled: WeightedAverage, facts: ModuleFacts) -> tuple[str | int | None, str | int | None]:
    """The axis that a softmax normalizes and the one that its average sums, by letters of an einsum or by numbers."""
    dim = number(pooled.softmax["dim"])
    known = all(step.op in ("cast", "dropout", "masked_fill", "unsqueeze", "item") for step in pooled.after)
    if dim is None or not known or _is_learned_alone(pooled.softmax.input):
        return None, None
    moved = [step for step in pooled.after if step.op in ("unsqueeze", "item")]
    if pooled.output.op == "sum":
        summed = number(pooled.output["dim"])
        appended = bool(moved) and all(map(_appends_axis, moved))
        if summed is None or dim < 0 or summed < 0 or not appended or facts.uses(pooled.output, "sum"):
            return None, None
        return int(dim), int(summed)
    return (None, None) if moved else _einsum_axes(pooled, int(dim), facts)


def _einsum_axes(pooled: WeightedAverage, dim: int, facts: ModuleFacts) -> tuple[str | None, str | None]:
    """As `_pooled_axes`, where the average is an einsum of weights and values."""
    axes = equation_axes(pooled.output)
    operands = [one for one in pooled.output.items if one.op != "constant"]
    led = (path(one, lambda found: found is pooled.softmax) for one in operands)
    weights = next((index for index, one in enumerate(led) if one is not None), None)
    if axes is None or weights is None or len(operands) != 2 or _is_sigmoid(operands[1 - weights]):
        return None, None
    own, others, out = axes[weights], axes[1 - weights], axes[2]
    summed = [one for one in own if one in others and one not in out]
    if "..." in own or len(summed) != 1 or not -len(own) <= dim < len(own):
        return None, None
    letter = own[dim]
    shared_out = letter in out and letter not in others  # to classes, slots or clusters
    if shared_out and not _is_read_by_queries(pooled.output, pooled.softmax, facts):
        return None, None
    return letter, summed[0] if letter in out else letter


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


def summed_axis(site: WrittenFormula) -> int | None:
    """The axis of the softmax, from the end, over which the product with the values sums; None if unclear."""
    axis = site.weighted.summed_left
    for step in reversed(site.after):
        pair = _transposed_pair(step.term) if step.op == "transpose" else None
        scaled = step.op in ("mul", "div") and number(step.operand) is not None
        if pair is not None:
            axis = {pair[0]: pair[1], pair[1]: pair[0]}.get(axis, axis)
        elif step.op not in ("cast", "dropout", "masked_fill", "carried") and not scaled:
            return None
    return axis


def _transposed_pair(term: Term) -> tuple[int, int] | None:
    if term.value in ("T", "mT", "t", "H", "mH"):
        return (-1, -2)
    first, second = number(term["dim0"]), number(term["dim1"])
    return (int(first), int(second)) if first is not None and second is not None and first < 0 > second else None


def scores_rank(site: WrittenFormula) -> int | None:
    """The number of axes of the scores, where it is plain from how they are computed."""
    moving = ("reshape", "unsqueeze", "squeeze", "permute", "expand", "repeat", "rearrange", "flatten")
    if any(step.op in moving for step in site.before):
        return None
    term = site.scores.term
    if term.op == "einsum":
        axes = equation_axes(term)
        return len(axes[2]) if axes and "..." not in axes[2] else None
    spelled = str(term.value).rpartition(".")[2]
    if spelled in ("bmm", "baddbmm", "mm"):
        return 2 if spelled == "mm" else 3
    exchanged = moved_axes(site.key) if site.key.op == "transpose" else []
    return exchanged[1] + 1 if exchanged in ([1, 2], [2, 3]) else None


@rule("ATT112", Severity.WARNING)
def implicit_axis(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax of scores is called without an axis."""
    message = "softmax without an axis takes axis 0 of three axes and axis 1 of four: pass dim=-1"
    for site in formulas(facts):
        if "dim" not in site.softmax.arguments and site.softmax.value != "softmax":
            yield Report(site.softmax.node, message)


@rule("ATT113", Severity.ERROR)
def softmax_of_one(facts: ModuleFacts) -> Iterator[Report]:
    """The softmax is taken over an axis of length 1, so that all weights are 1."""
    for event in facts.operations("softmax"):
        source = through(event.term.input, "masked_fill", "dropout", "cast", "div", "mul")
        module = source["module"] if source.op == "apply" else ABSENT
        while module.value == "torch.nn.Sequential" and module.items:
            module = module.items[-1]
        of_one = module.value == "torch.nn.Linear" and number(module["out_features"]) == 1
        if of_one and _is_last_of_average(event.term, facts):
            yield Report(
                event.node, "softmax over an axis of length 1: all weights are 1; normalize the axis of the keys"
            )


def _is_last_of_average(softmax: Term, facts: ModuleFacts) -> bool:
    """Whether a softmax is over the last axis: -1, or the one after the axis that the average sums."""
    dim = number(softmax["dim"])
    sums = (one for product in facts.uses(softmax, "mul") for one in facts.uses(product, "sum"))
    return dim == -1 or (dim is not None and dim > 1 and any(number(one["dim"]) == dim - 1 for one in sums))


@rule("ATT115", Severity.WARNING)
def weights_with_a_gradient_to_numpy(facts: ModuleFacts) -> Iterator[Report]:
    """Weights that have a gradient are converted to an array of NumPy, which torch refuses."""
    if re.search(r"no_grad|inference_mode|set_grad_enabled|requires_grad_\(False", facts.source):
        return
    for event in facts.operations("method"):
        around = facts.function_around(event.node)
        detached = around is not None and re.search(r"\.(detach\(|data\b)", ast.unparse(around))
        if event.term.value == "numpy" and not detached and _has_gradient(event.term.input):
            unless = "the caller computes them under torch.no_grad()"
            yield Report(event.node, "these weights have a gradient: .detach().cpu().numpy()", unless=unless)


def _has_gradient(term: Term) -> bool:
    """Whether a term is made of weights, and those of parameters of a model."""
    made = list(walk(term))
    layers = [str(one.value) for one in made if one.op == "apply"]
    weighs = "torch.nn.MultiheadAttention" in layers or any(one.op == "softmax" for one in made)
    return weighs and any(name.startswith("torch.nn.") for name in layers)
