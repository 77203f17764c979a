"""The oracle: attention in float64, independent of the library's pair forms, masks, kernels and dropout.

Its scores are as in the papers (`compute_scores`), its masks and biases plain index arithmetic (`mask_and_bias_cases`),
its inputs and its dropout seed those of `case_inputs`. `Oracle.truth` computes rows from the keys that they attend to
and from nothing else, those that attend to the same keys together; cases of more than 2¹² pairs (`long_cases`) all at
once, where masked scores are filled and NaN counts as 0.
`Oracle.approximations` are the same formula in the precision of the inputs: their error shows what error a kernel may
have (see `tolerance`). An oracle of another normalizer than softmax says how its weights follow from its
scores, and inherits the rest:

>>> class ReluOracle(Oracle):
...     '''output = relu(S) V / Σ relu(S).'''
...
...     def weights(self, scores, sinks):
...         positive = scores.relu()
...         total = positive.sum(-1, keepdim=True)
...         divisor = total.masked_fill(total == 0, 1.0)
...         return positive / divisor, divisor.log().masked_fill(total == 0, -torch.inf).squeeze(-1)
>>> weights, log_normaliser = ReluOracle().weights(torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([0.0]))
>>> weights, log_normaliser.exp()
(tensor([[0.2500, 0.0000, 0.7500]]), tensor([4.]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.normalizer import Normalizer
from .case_inputs import DROPOUT, SCALE, SOFTCAP, Inputs
from .cases import MAX_ROWWISE_PAIRS
from .mask_and_bias_cases import BIAS_CASES

Leaves = Mapping[str, Tensor]
Positions = tuple[tuple[int, ...], ...]
AnyInteger = TypeVar("AnyInteger", int, Tensor)

ENOUGH_ELEMENTS = 1000
"""The number of elements, of all approximations together, whose largest error stands for the working precision.

Up to as many pairs of a case, roundings are computed together.
"""


@dataclass(frozen=True, eq=False)
class OracleResult:
    """output (..., heads, M, Dv), lse (..., heads, M), and the gradient of each leaf.

    The gradients are of Σ output · g, or of Σ output · g + Σ lse · h, with the g and h of `upstream_gradients`.
    """

    output: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]


class Oracle:
    """Attention by a normalizer: output = D · w(S) V of masked scores S, with dropout factors D and weights w.

    Shapes: scores (..., M, N), weights (..., M, N), output (..., M, Dv). A subclass defines `weights`,
    and `normalizer`, that of the problems of the cases; None for softmax.
    """

    normalizer: Normalizer | None = None

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of scores (..., M, N), and the log of each row's normaliser (..., M), both differentiable.

        Scores are -inf where the mask excludes the pair. Sinks broadcast to (..., M) and are -inf where there are none.
        A row whose scores are all -inf has weights 0; its log is -inf, or the log of what its sink contributes.
        """
        raise NotImplementedError

    def truth(self, inputs: Inputs, *, with_lse: bool) -> OracleResult:
        """The result in float64 on the CPU.

        Above `MAX_ROWWISE_PAIRS` pairs per head all rows are computed at once, and NaN in masked entries counts as 0.
        with_lse: whether the gradients are those of Σ output · g + Σ lse · h; else without the second sum.
        """
        leaves = {name: leaf.detach().cpu().double().requires_grad_() for name, leaf in inputs.leaves.items()}
        if inputs.keep.shape[-2:].numel() > MAX_ROWWISE_PAIRS:
            finite_leaves = {name: _finite(name, leaf) for name, leaf in leaves.items()}
            output, lse = self._all_rows(inputs, compute_terms(inputs, finite_leaves))
        else:
            output, lse = self._row_by_row(inputs, leaves)
        g, h = upstream_gradients(inputs, output.detach())
        finite = output.isfinite().all(-1)
        return _differentiated(leaves, output, lse, (output * g)[finite], (lse * h)[finite] if with_lse else None)

    def approximations(self, inputs: Inputs, truth: OracleResult, *, with_lse: bool) -> Iterator[OracleResult]:
        """The formula in the working precision, in two orders, on the inputs and on several roundings of the inputs.

        Rounding an input changes the result by as much as the problem is sensitive: no kernel can have a smaller error.
        For float64 the working precision is float32, and `tolerance` scales the error. NaN and infinity count as 0.
        All roundings are computed at once, stacked on a leading axis.
        """
        rounded = round_leaves(inputs, self._perturbed_shapes(inputs))
        g, h = (gradient.to(rounded.dtype) for gradient in upstream_gradients(inputs, truth.output))
        output, lse = self._all_rows(inputs, rounded.terms(inputs))
        yield from _unstacked(_differentiated(rounded.leaves, output, lse, output * g, lse * h if with_lse else None))
        yield from _unstacked(self._in_another_order(inputs, rounded, g, h if with_lse else torch.zeros_like(h)))

    def _perturbed_shapes(self, inputs: Inputs) -> Sequence[torch.Size]:
        """The shapes of the tensors, besides the leaves, that `_in_another_order` changes at random."""
        return ()

    def _in_another_order(self, inputs: Inputs, rounded: RoundedLeaves, g: Tensor, h: Tensor) -> OracleResult:
        """Approximations with other rounding errors, stacked; the gradients are of Σ output · g + Σ lse · h."""
        output, lse = self._all_rows(inputs, rounded.terms(inputs, reordered=True))
        return _differentiated(rounded.leaves, output, lse, output * g, lse * h)

    def _row_by_row(self, inputs: Inputs, leaves: Leaves) -> tuple[Tensor, Tensor]:
        """Output and log of the normaliser; rows that attend to the same keys are computed together."""
        query, key, value = (expanded(inputs, name, leaves[name]) for name in ("query", "key", "value"))
        *batch, heads, queries, _ = query.shape
        group = heads // key.shape[-3]
        pairs = (*batch, heads, queries, inputs.keep.shape[-1])
        # Unbound once: an index into a large tensor costs a gradient of its size.
        query_heads, key_heads, value_heads = (tensor.flatten(0, -3).unbind() for tensor in (query, key, value))
        biases = bias_values(inputs, leaves).expand(pairs).flatten(0, -3).unbind()
        factors = dropout_factors(inputs, value).expand(pairs).flatten(0, -3).unbind()
        sinks = sink_logits(leaves, heads, value).flatten().unbind()
        outputs, logs, order = [value.new_zeros(0, value.shape[-1])], [value.new_zeros(0)], []
        for head, keep in enumerate(inputs.keep.expand(pairs).flatten(0, -3)):  # of all batches
            for columns, rows in _rows_by_attended_keys(keep):
                scores = value.new_zeros(len(rows), 0)
                if len(columns):  # a query without keys has no part in any gradient
                    scores = compute_scores(
                        inputs, leaves, query_heads[head][rows], key_heads[head // group][columns], columns
                    )
                    scores = scores + biases[head][rows][:, columns]
                weights, log = self.weights(scores, sinks[head % heads])
                outputs.append(weights * factors[head][rows][:, columns] @ value_heads[head // group][columns])
                logs.append(log)
                order.extend(head * queries + row for row in rows)
        inverse = torch.tensor(order, dtype=torch.int64).argsort()
        return without_head_axis(
            inputs,
            torch.cat(outputs)[inverse].view(*batch, heads, queries, value.shape[-1]),
            torch.cat(logs)[inverse].view(*batch, heads, queries),
        )

    def _all_rows(self, inputs: Inputs, terms: Terms) -> tuple[Tensor, Tensor]:
        """Output and log of the normaliser, with masked scores of -inf."""
        weights, log = self.weights(terms.scores.masked_fill(~inputs.keep, -math.inf), terms.sinks)
        return without_head_axis(inputs, weights * dropout_factors(inputs, terms.value) @ terms.value, log)


class Terms(NamedTuple):
    """Scores with their bias (*batch, heads, M, N), value (*batch, heads, N, Dv), sinks (..., heads, 1).

    Of stacked leaves each tensor has one more leading axis, and sinks as many axes as the log-sum-exp.
    """

    scores: Tensor
    value: Tensor
    sinks: Tensor


def compute_terms(inputs: Inputs, leaves: Leaves, *, widened: bool = False, reordered: bool = False) -> Terms:
    """The terms of all rows; `widened` and `reordered` as for `compute_scores`, the mask is left to the caller."""
    query, key, value = with_repeated_heads(inputs, leaves)
    scores = compute_scores(inputs, leaves, query, key, widened=widened, reordered=reordered)
    scores = scores + bias_values(inputs, leaves)
    sinks = sink_logits(leaves, query.shape[-3], value)
    sinks = sinks.view(*[1] * len(inputs.layout.batch), *sinks.shape)
    return Terms(scores, widen(value), widen(sinks)) if widened else Terms(scores, value, sinks)


@dataclass(frozen=True, eq=False)
class RoundedLeaves:
    """Finite leaves in the working precision, roundings stacked on a leading axis R: each number times 1 ± `change`.

    change: (R,). signs: random numbers -1 and 1, (R, *shape) for each shape that `round_leaves` was called with.
    """

    leaves: dict[str, Tensor]
    dtype: torch.dtype
    change: Tensor
    signs: list[Tensor]

    def terms(self, inputs: Inputs, *, widened: bool = False, reordered: bool = False) -> Terms:
        """`compute_terms` of each rounding, stacked."""

        def terms_of_one(leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return tuple(compute_terms(inputs, leaves, widened=widened, reordered=reordered))

        if inputs.keep.numel() <= ENOUGH_ELEMENTS:
            return Terms(*torch.func.vmap(terms_of_one)(self.leaves))
        # A gradient summed over thousands of pairs has the error of one long sum: vmap would make it of shorter ones.
        ones = ({name: leaf[index] for name, leaf in self.leaves.items()} for index in range(len(self.change)))
        return Terms(*map(torch.stack, zip(*map(terms_of_one, ones), strict=True)))

    def changes(self, signs: Tensor) -> Tensor:
        """± the change of each rounding, for signs (R, ...)."""
        return self.change.view(-1, *[1] * (signs.dim() - 1)) * signs


def round_leaves(inputs: Inputs, shapes: Sequence[torch.Size] = ()) -> RoundedLeaves:
    """The leaves of a case as they are, then several times with each number rounded up or down at random.

    Four to ten times, more for fewer pairs, so that there are enough errors to take the largest of; twice above
    `MAX_ROWWISE_PAIRS` pairs.
    """
    times = 2
    if inputs.keep.shape[-2:].numel() <= MAX_ROWWISE_PAIRS:
        times = min(max(ENOUGH_ELEMENTS // max(inputs.keep.numel(), 1), 4), 10)
    dtype = inputs.leaves["value"].dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    generator = torch.Generator().manual_seed(inputs.case.seed + 2)
    exact = {name: _finite(name, leaf.detach().cpu().double()) for name, leaf in inputs.leaves.items()}
    shapes = [*(leaf.shape for leaf in exact.values()), *shapes]
    drawn = [[torch.randint(2, shape, generator=generator) for shape in shapes] for _ in range(1 + times)]
    signs = [torch.stack(numbers) * 2 - 1 for numbers in zip(*drawn, strict=True)]
    change = torch.tensor([0.0] + [torch.finfo(dtype).eps / 2] * times)
    rounded = RoundedLeaves({}, dtype, change, signs[len(exact) :])
    for (name, leaf), leaf_signs in zip(exact.items(), signs, strict=False):
        rounded.leaves[name] = (leaf * (1 + rounded.changes(leaf_signs))).to(dtype).requires_grad_()
    return rounded


def upstream_gradients(inputs: Inputs, output: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients g of the output and h of the log-sum-exp: seeded, and 0 in rows with NaN or infinity."""
    generator = torch.Generator().manual_seed(inputs.case.seed + 1)
    not_finite = ~output.isfinite().all(-1)
    dtype = inputs.leaves["value"].dtype
    g = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(dtype)
    h = torch.randn(not_finite.shape, generator=generator, dtype=torch.float64).to(dtype)
    return g.masked_fill(not_finite.unsqueeze(-1), 0), h.masked_fill(not_finite, 0)


class SoftmaxOracle(Oracle):
    """Softmax attention: w(S) = exp(S - lse) with lse = log(Σ exp(S) + exp(sink)) over the keys of a row."""

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """exp(scores - lse) and lse; 0 and -inf where all scores of a row are -inf."""
        terms = torch.cat([scores, sinks.expand(*scores.shape[:-1]).unsqueeze(-1)], dim=-1)
        empty = (terms == -math.inf).all(-1, keepdim=True)
        largest = terms.detach().amax(-1, keepdim=True).masked_fill(empty, 0.0)
        total = (terms - largest).exp().sum(-1, keepdim=True)
        lse = total.masked_fill(empty, 1.0).log() + largest
        weights = (terms - lse).exp()[..., :-1]
        return weights, lse.masked_fill(empty, -math.inf).squeeze(-1)

    def _perturbed_shapes(self, inputs: Inputs) -> Sequence[torch.Size]:
        """Of dP and of Σ g · output."""
        return inputs.keep.shape, inputs.keep.shape[:-1]

    def _in_another_order(self, inputs: Inputs, rounded: RoundedLeaves, g: Tensor, h: Tensor) -> OracleResult:
        """Gradients by P = exp(S - lse), dP = D · (g Vᵀ), dS = P · (dP - Σ g · output + h), as FlashAttention has them.

        Output and lse come from blocks of keys that are merged. The projections of half precision are rounded, all sums
        are in float32, as in kernels. The scores of P are computed anew after those of lse, and so rounded anew. dP and
        Σ g · output may cancel and leave their rounding errors: each is changed by that share of the sizes of its
        terms, up or down at random, as sums in other orders are.
        """
        g, h = widen(g), widen(h)
        scores, value, sinks = rounded.terms(inputs, widened=True, reordered=True)
        scores = scores.masked_fill(~inputs.keep, -math.inf)
        factors = dropout_factors(inputs, value)
        with torch.no_grad():
            first = rounded.terms(inputs, widened=True).scores.masked_fill(~inputs.keep, -math.inf)
            output, lse = self._in_blocks(first, factors.expand_as(first), value, sinks)
            if inputs.layout.heads is None:
                g, h = g.unsqueeze(-3), h.unsqueeze(-2)
            finite_lse = lse.masked_fill(lse == -math.inf, math.inf)  # a row without keys has no weights
            weights = torch.exp2((scores - finite_lse.unsqueeze(-1)) * math.log2(math.e))
            of_weights, of_lse = (rounded.changes(signs) for signs in rounded.signs)
            delta = (g * output).sum(-1) + of_lse * (g * output).abs().sum(-1) - h.masked_fill(lse == -math.inf, 0)
            grad_weights = g @ value.mT + of_weights * (g.abs() @ value.abs().mT)
            grad_scores = weights * (factors * grad_weights - delta.unsqueeze(-1))
            grad_value, grad_sinks = (weights * factors).mT @ g, -torch.exp(sinks - finite_lse) * delta
        gradients = _backward(rounded.leaves, (scores, grad_scores), (value, grad_value), (sinks, grad_sinks))
        output, lse = without_head_axis(inputs, output, lse)
        return OracleResult(output, lse, gradients)

    def _in_blocks(self, scores: Tensor, factors: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp from blocks of √N keys, merged by lse = log(exp(lse₁) + exp(lse₂))."""
        lse = scores.new_full(scores.shape[:-1], -math.inf)
        output = value.new_zeros(*lse.shape, value.shape[-1])
        for keys in torch.arange(scores.shape[-1]).split(math.isqrt(scores.shape[-1]) + 1):
            weights, block_lse = self.weights(scores[..., keys], torch.full_like(sinks, -math.inf))
            output, lse = _merged(output, lse, weights * factors[..., keys] @ value[..., keys, :], block_lse)
        return _merged(output, lse, torch.zeros_like(output), sinks.expand_as(lse))


SOFTMAX = SoftmaxOracle()
"""The oracle of `regard.attention`."""


def _merged(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, other_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)
    return torch.exp(lse - finite).unsqueeze(-1) * output + torch.exp(other_lse - finite).unsqueeze(-1) * other, total


def _finite(name: str, leaf: Tensor) -> Tensor:
    """Query, key and value with 0 for NaN and infinity; -inf in a bias stays."""
    return leaf.nan_to_num(0.0, 0.0, 0.0) if name in ("query", "key", "value") else leaf


def _unstacked(stacked: OracleResult) -> Iterator[OracleResult]:
    """The results along the leading axis."""
    for index, (output, lse) in enumerate(zip(stacked.output, stacked.lse, strict=True)):
        yield OracleResult(output, lse, {name: gradient[index] for name, gradient in stacked.gradients.items()})


def _differentiated(
    leaves: Leaves, output: Tensor, lse: Tensor, output_terms: Tensor, lse_terms: Tensor | None
) -> OracleResult:
    """The result with the gradients of the sum of all terms; an lse of -inf is a constant."""
    total = output_terms.sum()
    if lse_terms is not None:
        total = total + lse_terms[lse_terms.isfinite()].sum()
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    else:  # there is no row at all
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
    return OracleResult(output.detach(), lse.detach(), dict(zip(leaves, gradients, strict=True)))


def _backward(leaves: Leaves, *results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The gradients of the leaves from pairs of a tensor and its gradient, which may be larger by broadcast axes."""
    differentiable = [(tensor, gradient) for tensor, gradient in results if tensor.requires_grad]
    gradients = torch.autograd.grad(
        [tensor for tensor, _ in differentiable],
        list(leaves.values()),
        [gradient.sum_to_size(tensor.shape) for tensor, gradient in differentiable],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, gradients, strict=True))


def _rows_by_attended_keys(keep: Tensor) -> list[tuple[Tensor, list[int]]]:
    """The indices of attended keys, with the rows that attend to exactly these, for booleans (M, N)."""
    rows: dict[tuple[bool, ...], list[int]] = {}
    for row, attended in enumerate(keep.tolist()):
        rows.setdefault(tuple(attended), []).append(row)
    return [(torch.tensor(attended, dtype=torch.bool).nonzero().squeeze(-1), rows[attended]) for attended in rows]


def with_repeated_heads(inputs: Inputs, leaves: Leaves) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (*batch, heads, length, dim), with key and value heads repeated for each query head."""
    query, key, value = (expanded(inputs, name, leaves[name]) for name in ("query", "key", "value"))
    group = query.shape[-3] // key.shape[-3]
    return query, key.repeat_interleave(group, dim=-3), value.repeat_interleave(group, dim=-3)


def expanded(inputs: Inputs, name: str, leaf: Tensor) -> Tensor:
    """Query, key or value with every batch axis at its full size and a head axis."""
    tensor = inputs.argument(name, leaf)
    if inputs.layout.heads is None:
        tensor = tensor.unsqueeze(-3)
    return tensor.expand(*inputs.layout.batch, *tensor.shape[-3:])


def without_head_axis(inputs: Inputs, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output (..., 1, M, Dv) and lse (..., 1, M) without their head axis, where the layout of the case has none."""
    return (output.squeeze(-3), lse.squeeze(-2)) if inputs.layout.heads is None else (output, lse)


def bias_values(inputs: Inputs, leaves: Leaves) -> Tensor:
    """The bias that is added to the scores, broadcastable to (*batch, heads, M, N)."""
    dtype = leaves["value"].dtype
    if inputs.case.bias == "unbiased":
        return torch.zeros(1, inputs.keep.shape[-1], dtype=dtype)
    constants = {name: constant.cpu().to(dtype) for name, constant in inputs.constants.items()}
    return BIAS_CASES[inputs.case.bias].values({**leaves, **constants}, inputs.pair_positions)


def sink_logits(leaves: Leaves, heads: int, like: Tensor) -> Tensor:
    """The sink of each head, (heads, 1); -inf where there is no sink."""
    return (leaves["sinks"] if "sinks" in leaves else like.new_full((heads,), -math.inf)).unsqueeze(-1)


def dropout_factors(inputs: Inputs, like: Tensor) -> Tensor:
    """The factors of the weights, (*batch, heads, M, N): 0 or 1/(1 - p); one factor of 1 without dropout."""
    if inputs.case.dropout != "dropout":
        return torch.ones(1, 1, dtype=like.dtype)
    *batch, heads, queries, keys = inputs.keep.shape

    def positions(tensor: Tensor, length: int) -> Positions:
        rows = tensor.expand(*batch, 1, *tensor.shape[-2:]).reshape(math.prod(batch), length)
        return tuple(tuple(row) for row in rows.tolist())

    query_positions, key_positions = positions(inputs.row_positions, queries), positions(inputs.column_positions, keys)
    kept = _dropout_pattern(inputs.seed, heads, query_positions, key_positions, DROPOUT)
    return kept.view(inputs.keep.shape).to(like.dtype) / (1 - DROPOUT)


def dropout_keeps(seed: int, head: int, query: int, key: int, probability: float) -> bool:
    """Whether dropout retains one weight, computed with Python's integers.

    `head` counts the heads of all batches, `query` and `key` are positions.

    One 64-bit number for the row of a head and one for the column are hashed separately; the low halves of both hashes
    are added, and hashed again. The weight is dropped if the signed result is among the lowest `probability` of all
    32-bit numbers. All numbers are signed: `>>` shifts copies of the sign in.

    >>> [dropout_keeps(7, 0, 0, key, 0.5) for key in range(6)]
    [True, False, False, False, False, False]
    """
    return _pair_hash(_row_hash(seed, head, query), _column_hash(seed, key)) >= round(probability * 2**32) - 2**31


@lru_cache(maxsize=64)
def _dropout_pattern(
    seed: int, heads: int, query_positions: Positions, key_positions: Positions, probability: float
) -> Tensor:
    """`dropout_keeps` of all weights, (batch, heads, M, N), for positions (batch, M) and (batch, N)."""
    threshold = round(probability * 2**32) - 2**31
    lengths = [len(positions[0]) if positions else 0 for positions in (query_positions, key_positions)]
    pattern = torch.zeros(len(query_positions), heads, *lengths, dtype=torch.bool)
    for batch, (queries, keys) in enumerate(zip(query_positions, key_positions, strict=True)):
        columns = torch.tensor([_column_hash(seed, key) for key in keys], dtype=torch.int64)
        for head in range(heads):
            rows = [_row_hash(seed, batch * heads + head, query) for query in queries]
            pattern[batch, head] = _pair_hash(torch.tensor(rows, dtype=torch.int64)[:, None], columns) >= threshold
    return pattern


def _row_hash(seed: int, head: int, query: int) -> int:
    return _splitmix64(_splitmix64(seed + head) + query)


def _column_hash(seed: int, key: int) -> int:
    return _splitmix64(seed - 1 - key)


def _splitmix64(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on a signed 64-bit number."""
    number = _signed(number * 0x9E3779B97F4A7C15, 64)
    number = _signed((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9, 64)
    number = _signed((number ^ (number >> 27)) * 0x94D049BB133111EB, 64)
    return number ^ (number >> 31)


def _pair_hash(row: AnyInteger, column: AnyInteger) -> AnyInteger:
    """A signed 32-bit hash of a row's and a column's, or of those of many, whose sums of 64 bits may overflow."""
    number = _signed(row + column, 32)
    number = _signed((number ^ (number >> 16)) * 0x7FEB352D, 32)
    return _signed((number ^ (number >> 15)) * 0x846CA68B, 32)


def _signed(number: AnyInteger, bits: int) -> AnyInteger:
    """The lowest bits of a number in two's complement."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


def widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return tensor.float() if tensor.dtype.itemsize == 2 else tensor


def compute_scores(
    inputs: Inputs,
    leaves: Leaves,
    query: Tensor,
    key: Tensor,
    columns: Tensor | None = None,
    *,
    widened: bool = False,
    reordered: bool = False,
) -> Tensor:
    """softcap(f(q, k)) of queries (..., M, Dq) and of keys (..., A, Dk) at the indices `columns`: (..., M, A).

    widened: projections are computed in the dtype of the inputs, all else in float32 at least. reordered: computed in
    another order, with other rounding errors: sums run backwards, and additive scores are
    Σ w - 2 Σ w / (1 + e^2x · e^2y), from tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y).
    """
    cast = widen if widened else lambda tensor: tensor

    def product(query: Tensor, key: Tensor) -> Tensor:
        query, key = cast(query), cast(key)
        return query.flip(-1) @ key.flip(-1).mT if reordered else query @ key.mT

    match inputs.case.score:
        case "dot":
            scores = product(query, key)
        case "default" | "scaled":
            has_scale = inputs.case.score == "scaled" or inputs.case.variant == "scale"
            scores = product(query, key) * (SCALE if has_scale else 1 / math.sqrt(query.shape[-1]))
        case "general":
            scores = product(query @ leaves["score.weight"], key)
        case "additive" | "concat":
            scores = (_by_exponentials if reordered else _by_tanh)(inputs, leaves, query, key, cast)
        case "location":
            scores = cast(query @ leaves["score.weight"].T)
            scores = scores[..., : key.shape[-2]] if columns is None else scores[..., columns]
        case other:
            raise ValueError(f"the oracle has no score {other!r}")
    return SOFTCAP * torch.tanh(scores / SOFTCAP) if "softcap" in inputs.case.variant else scores


def _by_tanh(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, cast: Callable) -> Tensor:
    """Σ w · tanh(W · query + U · key), or Σ w · tanh(W · [query; key]): (..., M, A)."""
    if inputs.case.score == "additive":
        query, key = cast(query @ leaves["score.query_weight"].T), cast(key @ leaves["score.key_weight"].T)
        return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ cast(leaves["score.weight"])
    size = (*query.shape[:-1], key.shape[-2], -1)
    joined = torch.cat([query.unsqueeze(-2).expand(size), key.unsqueeze(-3).expand(size)], dim=-1)
    return torch.tanh(cast(joined @ leaves["score.matrix"].T)) @ cast(leaves["score.weight"])


def _by_exponentials(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, cast: Callable) -> Tensor:
    """The same scores from one exponential per query feature and one per key feature."""
    if inputs.case.score == "additive":
        query_matrix, key_matrix = leaves["score.query_weight"], leaves["score.key_weight"]
    else:
        query_matrix, key_matrix = leaves["score.matrix"].split([query.shape[-1], key.shape[-1]], dim=-1)
    query, key = (2 * cast(query @ query_matrix.T)).exp(), (2 * cast(key @ key_matrix.T)).exp()
    weight = cast(leaves["score.weight"])
    return weight.sum() - 2 * ((1 + query.unsqueeze(-2) * key.unsqueeze(-3)).reciprocal() @ weight)
