"""Merging parts of a softmax by their log-sum-exp, and log-sum-exps that are too large for float32.

Next to a score of 10⁷, where neighbouring float32 numbers are 1 apart, log Σ exp(score) cannot express how many keys
share the row: weights recomputed from it sum to 1.4, and to infinity at 10⁹. In float64 that begins at 10¹².
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..utils.pytree import tree_flatten, tree_tensors, tree_unflatten
from .finite import waits
from .grid import EMPTY, WHOLE, Blocks
from .problem import Problem
from .score_forms import AdditivePairs, at_least_float32, per_head

INFINITY = float("inf")


WITHOUT_FLOAT64 = ("mps",)
"""Types of devices that have no numbers of 64 bits."""


def lse_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which torch's operators compute log-sum-exps, by a problem's value: float32 at least.

    On a device where to see whether float32 is enough would wait for it, that is float64: of each row one number.
    """
    exact = waits(value) and value.device.type not in WITHOUT_FLOAT64
    return torch.float64 if exact else torch.promote_types(value.dtype, torch.float32)


def merge_softmax(outputs: Tensor, lses: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Lse = log Σ_p exp(lse_p) and output = Σ_p exp(lse_p - lse) · output_p, over parts p stacked along `dim`.

    Shapes: outputs (..., P, ..., Dv) and lses (..., P, ...), where `dim` counts from the front; the results lack that
    axis. Rows without keys in any part have output 0 and lse -inf. Differentiable; in float32 at least.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), the online softmax.

    >>> merge_softmax(torch.tensor([[1.0], [3.0]]), torch.zeros(2), dim=0)
    (tensor([2.]), tensor(0.6931))
    """
    peak = lses.detach().amax(dim, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    shares = torch.exp(lses - peak)
    total = shares.sum(dim, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # neither the quotient nor the gradient of the log divides by 0
    wide = at_least_float32(outputs)
    output = ((shares / total).to(wide.dtype).unsqueeze(-1) * wide).sum(dim)
    return output, (total.log() + peak).masked_fill(empty, -INFINITY).squeeze(dim)


LARGEST_LSE = 2.0**14
"""Up to this magnitude a float32 log-sum-exp is rounded by at most 2⁻¹¹, and so are weights computed from it."""

PAIRS_AT_ONCE = 2**20
"""Scores, or their features, that are in memory at once while log-sum-exps are computed again."""
TILE_WIDTH = 64
"""Columns of the tiles of which a mask says that they have no pairs."""


def within_float32(lse: Tensor) -> bool:
    """Whether all log-sum-exps are finite and small enough for float32: one pass, true of nearly every problem."""
    if not lse.numel():
        return True
    low, high = torch.aminmax(lse)
    if not lse.is_cpu:
        low, high = torch.stack((low, high)).cpu()  # one transfer from the device
    low, high = low.item(), high.item()
    return low > -LARGEST_LSE and high < LARGEST_LSE


def split_float64(lse: Tensor) -> tuple[Tensor, Tensor]:
    """A log-sum-exp of float64 as one of float32, and the factor that weights which follow from it lack.

    Weights of a float32 score are exp(score - rounded) · exp(rounded - lse): gradients are linear in the weights, so
    that the second factor may be that of the gradients from above. It is 1 where float32 is exact enough.

    >>> split_float64(torch.tensor([2.0**25 + 1], dtype=torch.float64))
    (tensor([33554432.]), tensor([0.3679]))
    """
    rounded = lse.float()
    left = (rounded.double() - lse).masked_fill(rounded.isinf(), 0.0)
    return rounded, left.exp().float()


def coarse_rows(problem: Problem, lse: Tensor) -> Tensor | None:
    """Which rows have a finite log-sum-exp that float32 rounds by more than their weights may be off; None if none has.

    Shapes: lse and the result are (..., heads, M). Softmax alone has such rows.
    """
    if problem.normalizer is not None or lse.dtype != torch.float32 or within_float32(lse):
        return None
    coarse = lse.isfinite() & (lse.abs() > LARGEST_LSE)
    return coarse if coarse.any() else None


def with_exact_lse(problem: Problem, lse: Tensor, rows: slice = WHOLE) -> tuple[Problem, Tensor]:
    """The problem and its log-sum-exp; in float64, and recomputed, where `rows` has some of `coarse_rows`."""
    coarse = coarse_rows(problem, lse[..., rows])
    if coarse is None:
        return problem, lse
    chosen = torch.zeros(lse.shape, dtype=torch.bool, device=lse.device)
    chosen[..., rows] = coarse
    wide, exact = in_float64(problem), lse.double()
    for part, columns in _row_blocks(problem, chosen):
        finite = lse[..., part].isfinite()
        scores = wide.scores(part, columns).masked_fill(~finite.unsqueeze(-1), 0.0)
        exact[..., part] = torch.where(finite, _softmax(scores, wide.sinks)[0], exact[..., part])
    return wide, exact


def add_exact_gradients(
    problem: Problem, rows: Tensor, grad_output: Tensor, grad_lse: Tensor, needed: Set[int], into: Problem
) -> None:
    """Add the gradients of Σ grad_output · output + Σ grad_lse · lse over some rows, computed in float64.

    Shapes: rows, bool, and grad_lse (..., heads, M), grad_output (..., heads, M, Dv). `into` has the gradients of the
    problem's tensors, each in its tensor's shape; only those whose tensor's id is in `needed` are added to. Block by
    block of rows, differentiated by autograd; a bias adds its own gradient from that of the scores.
    """
    wide, grid = replace(problem, bias=_widened(problem.bias, problem.value.numel())), problem.grid()
    whole = tree_tensors((problem.pairs, problem.value, problem.sinks))
    biases = [] if problem.bias is None else [id(tensor) in needed for tensor in problem.bias.parameters()]
    for part, columns in _row_blocks(problem, rows):
        here, tile = rows[..., part], grid.tile(part, columns)
        narrow, form = tree_flatten((problem.pairs.tile(part, columns), problem.value[..., columns, :], problem.sinks))
        targets = tree_tensors((into.pairs.tile(part, columns), into.value[..., columns, :], into.sinks))
        leaves = [tensor.detach().double() for tensor in narrow]
        wanted = [
            (leaf.requires_grad_(), target)
            for leaf, target, tensor in zip(leaves, targets, whole, strict=True)
            if id(tensor) in needed
        ]
        with torch.enable_grad():
            pairs, value, sinks = tree_unflatten(form, leaves)
            scores = wide.complete_scores(pairs.scores(), tile).masked_fill(~here.unsqueeze(-1), 0.0)
            if any(biases):
                added = torch.zeros_like(scores, requires_grad=True)  # its gradient is that of the bias's values
                wanted, scores = [*wanted, (added, torch.zeros_like(scores))], scores + added
            lse, weights = _softmax(scores, sinks)
            if problem.dropout is not None:
                kept = problem.dropout.dropout_mask(*problem.dropout_indices(tile)).view(weights.shape)
                weights = weights * kept / (1 - problem.dropout.probability)
            output = per_head(lambda folded, value=value: folded @ value, weights, value)
            total = (output * grad_output[..., part, :].masked_fill(~here.unsqueeze(-1), 0.0)).sum()
            total = total + (lse * grad_lse[..., part].masked_fill(~here, 0.0)).sum()
        for (_, target), gradient in zip(wanted, torch.autograd.grad(total, [w for w, _ in wanted]), strict=True):
            target += gradient
        if any(biases) and wide.bias is not None and into.bias is not None:
            parameters = zip(into.bias.parameters(), biases, strict=True)
            wide.bias.accumulate(tile, wanted[-1][1], [target if need else None for target, need in parameters])


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The log-sum-exp (..., heads, m) of scores (..., heads, m, n), of which each row has one, and their weights.

    The weights are not computed from the log-sum-exp, which is too coarse in float64 as well beside a score of 10³⁸.
    """
    sink = scores.new_full((*scores.shape[:-1], 1), -INFINITY)
    if sinks is not None:
        sink = sinks.view(-1, *[1] * min(scores.ndim - 1, 2)).expand_as(sink)
    logits = torch.cat([scores, sink], -1)
    peak = logits.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(logits - peak)
    total = exponentials.sum(-1, keepdim=True)
    return (total.log() + peak).squeeze(-1), (exponentials / total)[..., :-1]


def _row_blocks(problem: Problem, rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows with some of `rows` (..., heads, M), and the columns from the first to the last that has pairs.

    A block has at most `PAIRS_AT_ONCE` scores, or features of an additive score, and at least one row.
    """
    features = problem.pairs.query.shape[-1] if isinstance(problem.pairs, AdditivePairs) else 1
    height = max(PAIRS_AT_ONCE // max(problem.weights_shape[:-2].numel() * problem.keys * features, 1), 1)
    chosen = rows.reshape(-1, rows.shape[-1]).any(0).nonzero().flatten().tolist()
    grid, first = problem.grid(), 0
    while first < len(chosen):
        after = bisect_left(chosen, chosen[first] + height, first)
        part, first = slice(chosen[first], chosen[after - 1] + 1), after
        columns = slice(0, problem.keys)
        if problem.mask is not None and problem.keys:
            tiles = Blocks.from_grid(grid.tile(part, WHOLE), (part.stop - part.start, TILE_WIDTH))
            some = (problem.mask.verdicts(tiles) != EMPTY).view(-1, tiles.shape[1]).any(0).nonzero().flatten().tolist()
            columns = slice(some[0] * TILE_WIDTH, min((some[-1] + 1) * TILE_WIDTH, problem.keys)) if some else columns
        yield part, columns


def in_float64(problem: Problem) -> Problem:
    """The problem over float64 copies of its floating-point tensors; the mask is the same object."""
    return replace(
        problem,
        pairs=_widened(problem.pairs),
        value=_widened(problem.value),
        bias=_widened(problem.bias, problem.value.numel()),
        sinks=_widened(problem.sinks),
    )


def _widened(parts: Any, most: float = INFINITY) -> Any:
    """The same with float64 for floating-point tensors of at most `most` numbers.

    A larger one among the tensors of a bias has a number for each pair, to which nothing is done before it is added.
    """
    tensors, form = tree_flatten(parts)
    return tree_unflatten(
        form, [each.double() if each.is_floating_point() and each.numel() <= most else each for each in tensors]
    )


MAX_PENDING = 8
"""Parts of some rows that wait in memory until they are merged."""


class RunningMerge:
    """`merge_softmax` of parts that are computed one after another: the output and log-sum-exp of some rows."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, output: Tensor, lse: Tensor) -> None:
        """Add a part, (..., m, Dv) and (..., m)."""
        self._parts.append((output, lse))
        if len(self._parts) == MAX_PENDING:
            self._parts = [self._merged()]

    def write(self, output: Tensor, lse: Tensor, arrange: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        """Write the merged rows, reordered by `arrange`, into a result; 0 and -inf if there were no parts."""
        if not self._parts:
            output.zero_()
            lse.fill_(float("-inf"))
            return
        merged_output, merged_lse = self._merged()
        output.copy_(arrange(merged_output))
        lse.copy_(arrange(merged_lse))

    def _merged(self) -> tuple[Tensor, Tensor]:
        if len(self._parts) == 1:
            return self._parts[0]
        outputs, lses = zip(*self._parts, strict=True)
        return merge_softmax(torch.stack([at_least_float32(output) for output in outputs]), torch.stack(lses), dim=0)
