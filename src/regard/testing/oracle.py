"""The formula, as slow and as plain as it can be written: row after row, over the keys that the row attends to.

Nothing here goes through the library's pair forms, masks, kernels or dropout, so that it can judge them. `truth` is the
formula in float64, rows together only where they attend to the same keys; `attempts` are the same formula in the
precision that a kernel works in, all rows at once: how far those are off shows how far a kernel may be off (see
`compare`).

Which weights dropout keeps, in whole numbers of Python: what the library's tensors have to say, pair by pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .bias_cases import ADDING
from .case_inputs import DROPPED, Inputs
from .cases import LARGE
from .score_cases import Leaves, scores_of, wide

Positions = tuple[tuple[int, ...], ...]


def kept(seed: int, head: int, query: int, key: int, probability: float) -> bool:
    """Whether one weight is kept; `head` counts the heads of all batches, query and key are positions.

    Two numbers of 64 bits, one for the row of a head and one for the column, are mixed each by itself; the low halves
    of both are added, and mixed again; the weight is dropped where what comes out, with its sign, is among the lowest
    `probability` of all numbers of 32 bits. A number has its sign throughout: `>>` draws it in from the left.

    >>> [kept(7, 0, 0, key, 0.5) for key in range(6)]
    [True, False, False, False, False, False]
    """
    return _bits(_row(seed, head, query), _column(seed, key)) >= round(probability * 2**32) - 2**31


@lru_cache(maxsize=64)
def kept_weights(seed: int, heads: int, queries: Positions, keys: Positions, probability: float) -> Tensor:
    """The same for all weights, (batch, heads, M, N), of queries and keys at positions (batch, M) and (batch, N)."""
    least, pattern = round(probability * 2**32) - 2**31, []
    for batch, (query_positions, key_positions) in enumerate(zip(queries, keys, strict=True)):
        columns = [_column(seed, key) for key in key_positions]
        for head in range(heads):
            rows = [_row(seed, batch * heads + head, query) for query in query_positions]
            pattern += [_bits(row, column) >= least for row in rows for column in columns]
    sizes = len(queries), heads, len(queries[0]) if queries else 0, len(keys[0]) if keys else 0
    return torch.tensor(pattern, dtype=torch.bool).view(sizes)


def _row(seed: int, head: int, query: int) -> int:
    return _mixed(_mixed(seed + head) + query)


def _column(seed: int, key: int) -> int:
    return _mixed(seed - 1 - key)


def _mixed(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), of numbers with a sign."""
    number = _signed(number * 0x9E3779B97F4A7C15, 64)
    number = _signed((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9, 64)
    number = _signed((number ^ (number >> 27)) * 0x94D049BB133111EB, 64)
    return number ^ (number >> 31)


def _bits(row: int, column: int) -> int:
    """32 bits of a pair."""
    number = _signed(row + column, 32)
    number = _signed((number ^ (number >> 16)) * 0x7FEB352D, 32)
    return _signed((number ^ (number >> 15)) * 0x846CA68B, 32)


def _signed(number: int, bits: int) -> int:
    """The lowest bits of a number, the first of them its sign."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


ENOUGH = 1000
"""So many pairs, of all attempts together, tell how far the worst of them is off."""


@dataclass(frozen=True, eq=False)
class Answer:
    """output (..., heads, M, Dv), lse (..., heads, M), and gradients by leaf: of Σ output · g, or + Σ lse · h."""

    output: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]


def truth(inputs: Inputs, *, with_lse: bool) -> Answer:
    """The answer in float64, each row from the keys it attends to and from nothing else, on the CPU.

    Where there are many pairs, all rows are computed at once, and NaN in what is masked counts as 0. The gradients are
    those of Σ output · g, and + Σ lse · h `with_lse`; g and h come from `upstream`.
    """
    leaves = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in inputs.leaves.items()}
    if inputs.keep.shape[-2:].numel() > LARGE:
        output, lse = _at_once(inputs, {name: _finite(name, leaf) for name, leaf in leaves.items()})
    else:
        output, lse = _by_rows(inputs, leaves)
    g, h = upstream(inputs, output.detach())
    finite = output.isfinite().all(-1)
    return _answer(inputs, leaves, output, lse, (output * g)[finite], (lse * h)[finite], with_lse)


def attempts(inputs: Inputs, known: Answer, *, with_lse: bool, moved: int | None = None) -> list[Answer]:
    """The plain formula in the working precision: on the inputs as they are, and each moved to a number next to it.

    Rounding an input moves the answer by as much as the problem is sensitive: no kernel can be held to less. It is
    done `moved` times, up or down at random: four to ten times, the more the fewer pairs there are to take the worst
    of; twice where there are very many. Each time it is computed twice: as it is written; and as whoever does not keep
    the weights has to, some keys at a time, put together by their log-sum-exp, from which the weights are computed
    again. For float64 the working precision is float32, and `compare` scales what that is off. NaN and infinity count
    as 0.
    """
    if moved is None:
        few = min(max(ENOUGH // max(inputs.keep.numel(), 1), 4), 10)
        moved = 2 if inputs.keep.shape[-2:].numel() > LARGE else few
    dtype = inputs.leaves["value"].dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    g, h = (gradient.to(dtype) for gradient in upstream(inputs, known.output))
    generator = torch.Generator().manual_seed(inputs.case.seed + 2)
    answers = []
    for move in [0.0] + [torch.finfo(dtype).eps / 2] * moved:
        leaves = {}
        for name, leaf in inputs.leaves.items():
            exact = _finite(name, leaf.detach().cpu().double())
            up_or_down = torch.randint(2, exact.shape, generator=generator) * 2 - 1
            leaves[name] = (exact * (1 + up_or_down * move)).to(dtype).requires_grad_()
        output, lse = _at_once(inputs, leaves)
        answers.append(_answer(inputs, leaves, output, lse, output * g, lse * h, with_lse))
        answers.append(_recomputed(inputs, leaves, g, h if with_lse else torch.zeros_like(h), move, generator))
    return answers


def _finite(name: str, leaf: Tensor) -> Tensor:
    """Query, key and value with 0 for NaN and infinity; -inf in a bias stays."""
    return leaf.nan_to_num(0.0, 0.0, 0.0) if name in ("query", "key", "value") else leaf


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
    factors = _dropout(inputs, value).expand(*outer, heads, queries, inputs.keep.shape[-1]).flatten(0, -3).unbind()
    outputs, sums, places = [value.new_zeros(0, value.shape[-1])], [value.new_zeros(0)], []
    for head, keep in enumerate(inputs.keep.expand(*outer, heads, queries, -1).flatten(0, -3)):  # of all batches
        for attended, rows in _rows_by_attended(keep):
            scores = value.new_zeros(len(rows), 0)
            if len(attended):  # a query that asks nobody has no part in anything
                scores = scores_of(inputs, leaves, asking[head][rows], keys[head // group][attended], attended)
                scores = scores + biases[head][rows][:, attended]
            weights, lse = _softmax(scores, sinks[head % heads])
            weights = weights * factors[head][rows][:, attended]
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
    scores = scores_of(inputs, leaves, query, key)
    scores = (scores + _bias(inputs, leaves)).masked_fill(~inputs.keep, -math.inf)
    weights, lse = _softmax(scores, _sinks(leaves, query.shape[-3], value))
    return _without_head_axis(inputs, weights * _dropout(inputs, value) @ value, lse)


def _recomputed(
    inputs: Inputs, leaves: Leaves, g: Tensor, h: Tensor, move: float, generator: torch.Generator
) -> Answer:
    """The answer by P = exp(scores - lse), dP = D · (g · Vᵀ), dS = P · (dP - Σ g · output + h): weights are not kept.

    The projections of half precision are rounded, all sums are in float32, as kernels have them. The scores that the
    weights come from are computed anew, and rounded anew, after those that the log-sum-exp is of. D is what dropout
    multiplies the weights by. dP and Σ g · output may cancel, and leave what they were rounded by: so each is moved by
    that share of the sizes of its terms, up or down at random, as sums in other orders are.
    """
    query, key, value = (_whole(inputs, name, leaves[name]) for name in ("query", "key", "value"))
    group = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)
    g, h, value = wide(g), wide(h), wide(value)
    first, scores = (
        (scores_of(inputs, leaves, query, key, widened=True, again=again) + _bias(inputs, leaves)).masked_fill(
            ~inputs.keep, -math.inf
        )
        for again in (False, True)
    )
    sinks = wide(_sinks(leaves, query.shape[-3], value))
    factors = _dropout(inputs, value)
    with torch.no_grad():
        output, lse = _in_parts(first, factors.expand_as(first), value, sinks)
        if inputs.layout.heads is None:
            g, h = g.unsqueeze(-3), h.unsqueeze(-2)
        alive = lse.masked_fill(lse == -math.inf, math.inf)  # a row without keys has no weights
        weights = torch.exp2((scores - alive.unsqueeze(-1)) * math.log2(math.e))
        moved = [move * (torch.randint(2, shape, generator=generator) * 2 - 1) for shape in (weights.shape, lse.shape)]
        delta = (g * output).sum(-1) + moved[1] * (g * output).abs().sum(-1) - h.masked_fill(lse == -math.inf, 0)
        grad_weights = g @ value.mT + moved[0] * (g.abs() @ value.abs().mT)
        grad_scores = weights * (factors * grad_weights - delta.unsqueeze(-1))
        above = [grad_scores, (weights * factors).mT @ g, -torch.exp(sinks - alive) * delta]
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


def _in_parts(scores: Tensor, factors: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, √N keys at a time: lse = log(exp(lse₁) + exp(lse₂)), outputs by their shares."""
    lse = scores.new_full(scores.shape[:-1], -math.inf)
    output = value.new_zeros(*lse.shape, value.shape[-1])
    for keys in torch.arange(scores.shape[-1]).split(math.isqrt(scores.shape[-1]) + 1):
        weights, own = _softmax(scores[..., keys], torch.full_like(sinks, -math.inf))
        output, lse = _joined(output, lse, weights * factors[..., keys] @ value[..., keys, :], own)
    return _joined(output, lse, torch.zeros_like(output), sinks.expand_as(lse))


def _joined(output: Tensor, lse: Tensor, other: Tensor, its_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, its_lse)
    some = total.masked_fill(total == -math.inf, 0.0)
    return torch.exp(lse - some).unsqueeze(-1) * output + torch.exp(its_lse - some).unsqueeze(-1) * other, total


def _whole(inputs: Inputs, name: str, leaf: Tensor) -> Tensor:
    """Query, key or value with every batch axis at its full size and a head axis."""
    tensor = inputs.arranged(name, leaf)
    if inputs.layout.heads is None:
        tensor = tensor.unsqueeze(-3)
    return tensor.expand(*inputs.layout.batch, *tensor.shape[-3:])


def _without_head_axis(inputs: Inputs, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return (output.squeeze(-3), lse.squeeze(-2)) if inputs.layout.heads is None else (output, lse)


def _bias(inputs: Inputs, leaves: Leaves) -> Tensor:
    """What is added to the scores, broadcastable to (*batch, heads, M, N)."""
    dtype = leaves["value"].dtype
    if inputs.case.bias == "unbiased":
        return torch.zeros(1, inputs.keep.shape[-1], dtype=dtype)
    constants = {name: constant.cpu().to(dtype) for name, constant in inputs.constants.items()}
    return ADDING[inputs.case.bias].mean({**leaves, **constants}, inputs.places)


def _dropout(inputs: Inputs, like: Tensor) -> Tensor:
    """What dropout multiplies the weights by, (*batch, heads, M, N): 0 or 1/(1 - p); a 1 without it."""
    if inputs.case.dropout == "whole":
        return torch.ones(1, 1, dtype=like.dtype)
    *batch, heads, queries, keys = inputs.keep.shape

    def positions(at: Tensor, length: int) -> Positions:
        rows = at.expand(*batch, 1, *at.shape[-2:]).reshape(math.prod(batch), length)
        return tuple(tuple(row) for row in rows.tolist())

    kept = kept_weights(
        inputs.seed, heads, positions(inputs.query_at, queries), positions(inputs.key_at, keys), DROPPED
    )
    return kept.view(inputs.keep.shape).to(like.dtype) / (1 - DROPPED)


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
