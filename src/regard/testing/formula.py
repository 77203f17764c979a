"""The formula, as slow and as plain as it can be written: row after row, over the keys that the row attends to.

Nothing here goes through the library's pair forms, masks or kernels, so that it can judge them. `truth` is the formula
in float64, rows together only where they attend to the same keys; `attempts` are the same formula in the precision that
a kernel works in, all rows at once: how far those are off shows how far a kernel may be off (see `compare`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import SCALE, SOFTCAP, Inputs

Leaves = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Answer:
    """output (..., heads, M, Dv), lse (..., heads, M), and gradients by leaf: of Σ output · g, or + Σ lse · h."""

    output: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]


def truth(inputs: Inputs, *, with_lse: bool) -> Answer:
    """The answer in float64, each row from the keys it attends to and from nothing else, on the CPU.

    The gradients are those of Σ output · g, and + Σ lse · h `with_lse`; g and h come from `upstream`.
    """
    leaves = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in inputs.leaves.items()}
    output, lse = _by_rows(inputs, leaves)
    g, h = upstream(inputs, output.detach())
    finite = output.isfinite().all(-1)
    return _answer(inputs, leaves, output, lse, (output * g)[finite], (lse * h)[finite], with_lse)


def attempts(inputs: Inputs, known: Answer, *, with_lse: bool, moved: int = 4) -> list[Answer]:
    """The plain formula in the working precision: on the inputs as they are, and each moved to a number next to it.

    Rounding an input moves the answer by as much as the problem is sensitive: no kernel can be held to less. It is
    done `moved` times, up or down at random. Each time the gradients are taken twice: of the formula as it is written,
    and with the weights computed again from the log-sum-exp, as whoever does not keep the weights has to. For float64
    the working precision is float32, and `compare` scales what that is off. NaN and infinity count as 0.
    """
    dtype = inputs.leaves["value"].dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    g, h = (gradient.to(dtype) for gradient in upstream(inputs, known.output))
    generator = torch.Generator().manual_seed(inputs.case.seed + 2)
    answers = []
    for move in [0.0] + [torch.finfo(dtype).eps / 2] * moved:
        leaves = {}
        for name, leaf in inputs.leaves.items():
            exact = leaf.detach().cpu().double()
            if name in ("query", "key", "value"):
                exact = exact.nan_to_num(0.0, 0.0, 0.0)
            up_or_down = torch.randint(2, exact.shape, generator=generator) * 2 - 1
            leaves[name] = (exact * (1 + up_or_down * move)).to(dtype).requires_grad_()
        output, lse = _at_once(inputs, leaves)
        answers.append(_answer(inputs, leaves, output, lse, output * g, lse * h, with_lse))
        answers.append(_recomputed(inputs, leaves, g, h if with_lse else torch.zeros_like(h)))
    return answers


def upstream(inputs: Inputs, output: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of output and lse that come from above: seeded, and 0 in rows that hold NaN or infinity."""
    generator = torch.Generator().manual_seed(inputs.case.seed + 1)
    bad = ~output.isfinite().all(-1)
    dtype = inputs.leaves["value"].dtype
    g = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    h = torch.randn(bad.shape, generator=generator, dtype=torch.float64).to(dtype)
    return g.masked_fill(bad.unsqueeze(-1), 0), h.masked_fill(bad, 0)


def _answer(
    inputs: Inputs, leaves: Leaves, output: Tensor, lse: Tensor, from_output: Tensor, from_lse: Tensor, with_lse: bool
) -> Answer:
    """The answer, its gradients taken; a log-sum-exp of -inf is a constant."""
    total = from_output.sum() + (from_lse[from_lse.isfinite()].sum() if with_lse else 0)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    else:  # there is no row at all
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
    return Answer(output.detach(), lse.detach(), dict(zip(leaves, gradients, strict=True)))


def _by_rows(inputs: Inputs, leaves: Leaves) -> tuple[Tensor, Tensor]:
    query, key, value = (_whole(inputs, name, leaves[name]) for name in ("query", "key", "value"))
    *outer, heads, queries, _ = query.shape
    group = heads // key.shape[-3]
    # Unbound once: an index into a large tensor costs a gradient of its size.
    asking, keys, values = (tensor.flatten(0, -3).unbind() for tensor in (query, key, value))
    biases = _bias(inputs, leaves).expand(*outer, heads, queries, -1).flatten(0, -3).unbind()
    sinks = _sinks(leaves, heads, value).flatten().unbind()
    outputs, sums, places = [value.new_zeros(0, value.shape[-1])], [value.new_zeros(0)], []
    for head, keep in enumerate(inputs.keep.expand(*outer, heads, queries, -1).flatten(0, -3)):  # of all batches
        for attended, rows in _rows_by_attended(keep):
            scores = value.new_zeros(len(rows), 0)
            if len(attended):  # a query that asks nobody has no part in anything
                scores = _scores(inputs, leaves, asking[head][rows], keys[head // group][attended], attended)
                scores = scores + biases[head][rows][:, attended]
            weights, lse = _softmax(scores, sinks[head % heads])
            outputs.append(weights @ values[head // group][attended])
            sums.append(lse)
            places.extend(head * queries + row for row in rows)
    order = torch.tensor(places, dtype=torch.int64).argsort()
    return _without_head_axis(
        inputs,
        torch.cat(outputs)[order].view(*outer, heads, queries, value.shape[-1]),
        torch.cat(sums)[order].view(*outer, heads, queries),
    )


def _rows_by_attended(keep: Tensor) -> list[tuple[Tensor, list[int]]]:
    """The indices of the keys that some rows attend to, with those rows, for booleans (M, N)."""
    rows: dict[tuple[bool, ...], list[int]] = {}
    for row, kept in enumerate(keep.tolist()):
        rows.setdefault(tuple(kept), []).append(row)
    return [(torch.tensor(kept, dtype=torch.bool).nonzero().squeeze(-1), rows[kept]) for kept in rows]


def _at_once(inputs: Inputs, leaves: Leaves) -> tuple[Tensor, Tensor]:
    query, key, value = (_whole(inputs, name, leaves[name]) for name in ("query", "key", "value"))
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    scores = _scores(inputs, leaves, query, key, torch.arange(key.shape[-2]))
    scores = (scores + _bias(inputs, leaves)).masked_fill(~inputs.keep, -math.inf)
    weights, lse = _softmax(scores, _sinks(leaves, query.shape[-3], value))
    return _without_head_axis(inputs, weights @ value, lse)


def _recomputed(inputs: Inputs, leaves: Leaves, g: Tensor, h: Tensor) -> Answer:
    """The answer by P = exp(scores - lse), dP = g · Vᵀ, dS = P · (dP - Σ g · output + h): weights are not kept."""
    query, key, value = (_whole(inputs, name, leaves[name]) for name in ("query", "key", "value"))
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    scores = _scores(inputs, leaves, query, key, torch.arange(key.shape[-2]))
    scores = (scores + _bias(inputs, leaves)).masked_fill(~inputs.keep, -math.inf)
    sinks = _sinks(leaves, query.shape[-3], value)
    with torch.no_grad():
        weights, lse = _softmax(scores, sinks)
        output = weights @ value
        if inputs.layout.heads is None:
            g, h = g.unsqueeze(-3), h.unsqueeze(-2)
        alive = lse.masked_fill(lse == -math.inf, math.inf)  # a row without keys has no weights
        weights = torch.exp(scores - alive.unsqueeze(-1))
        delta = (g * output).sum(-1) - h.masked_fill(lse == -math.inf, 0)
        above = [weights * (g @ value.mT - delta.unsqueeze(-1)), weights.mT @ g, -torch.exp(sinks - alive) * delta]
    results = [(tensor, g) for tensor, g in zip((scores, value, sinks), above, strict=True) if tensor.requires_grad]
    gradients = torch.autograd.grad(
        [tensor for tensor, _ in results],
        list(leaves.values()),
        [
            g.sum_to_size(tensor.shape) if g.ndim > tensor.ndim or g.shape != tensor.shape else g
            for tensor, g in results
        ],
        allow_unused=True,
        materialize_grads=True,
    )
    output, lse = _without_head_axis(inputs, output, lse)
    return Answer(output, lse, dict(zip(leaves, gradients, strict=True)))


def _whole(inputs: Inputs, name: str, leaf: Tensor) -> Tensor:
    """Query, key or value with every batch axis at its full size and a head axis."""
    tensor = inputs.arranged(name, leaf)
    if inputs.layout.heads is None:
        tensor = tensor.unsqueeze(-3)
    return tensor.expand(*inputs.layout.batch, *tensor.shape[-3:])


def _without_head_axis(inputs: Inputs, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return (output.squeeze(-3), lse.squeeze(-2)) if inputs.layout.heads is None else (output, lse)


def _scores(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, columns: Tensor) -> Tensor:
    """softcap(f(q, k)) of queries (..., M, Dq) and keys (..., A, Dk), which stand at the indices `columns`."""
    match inputs.case.score:
        case "dot":
            scores = query @ key.mT
        case "default" | "scaled":
            given = inputs.case.score == "scaled" or inputs.case.variant == "scale"
            scores = query @ key.mT * (SCALE if given else 1 / math.sqrt(query.shape[-1]))
        case "general":
            scores = query @ leaves["score.weight"] @ key.mT
        case "additive":
            asked, asking = query @ leaves["score.query_weight"].T, key @ leaves["score.key_weight"].T
            scores = torch.tanh(asked.unsqueeze(-2) + asking.unsqueeze(-3)) @ leaves["score.weight"]
        case "concat":
            size = (*query.shape[:-1], key.shape[-2], -1)
            joined = torch.cat([query.unsqueeze(-2).expand(size), key.unsqueeze(-3).expand(size)], dim=-1)
            scores = torch.tanh(joined @ leaves["score.matrix"].T) @ leaves["score.weight"]
        case "location":
            scores = (query @ leaves["score.weight"].T)[..., columns]
        case other:
            raise ValueError(f"the formula has no score {other!r}")
    return SOFTCAP * torch.tanh(scores / SOFTCAP) if inputs.case.variant == "softcap" else scores


def _bias(inputs: Inputs, leaves: Leaves) -> Tensor:
    """What is added to the scores, broadcastable to (*batch, heads, M, N)."""
    headless = inputs.layout.heads is None
    match inputs.case.bias:
        case "unbiased":
            return torch.zeros(1, inputs.keep.shape[-1], dtype=leaves["value"].dtype)
        case "gaussian":
            center = leaves["center"].unsqueeze(-2) if headless else leaves["center"]
            return -((inputs.key_at - center.unsqueeze(-1)) ** 2) / (2 * leaves["sigma"] ** 2)
        case _:
            bias = leaves["bias"]
            return bias.unsqueeze(-3) if headless and bias.ndim > 2 else bias


def _sinks(leaves: Leaves, heads: int, like: Tensor) -> Tensor:
    """One more logit for each head, (heads, 1); -inf where there is no sink."""
    return (leaves["sinks"] if "sinks" in leaves else like.new_full((heads,), -math.inf)).unsqueeze(-1)


def _softmax(scores: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) over the last axis, and lse = log(Σ exp(scores) + exp(sink)); 0 and -inf where all are -inf."""
    terms = torch.cat([scores, sink.expand(*scores.shape[:-1]).unsqueeze(-1)], dim=-1)
    alive = terms != -math.inf
    empty = ~alive.any(-1, keepdim=True)
    peak = terms.detach().amax(-1, keepdim=True).masked_fill(empty, 0.0)
    total = (terms - peak).exp().sum(-1, keepdim=True)
    lse = total.masked_fill(empty, 1.0).log() + peak
    weights = (terms - lse).exp()[..., :-1]
    return weights, lse.masked_fill(empty, -math.inf).squeeze(-1)
