"""A captured call of attention: queries and keys as stored, log-sum-exp, mask, bias, positions, rounding errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...biases import Bias
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...core.score_forms import AdditivePairs, DecayedDotPairs, DotPairs, PairForm
from ...lenses.base import WeightsLayout
from ...masks import Mask
from ...masks.base import And
from ...masks.causal import Causal
from ...masks.window import Window
from ...utils.pytree import tree_flatten, tree_unflatten


@dataclass(eq=False)
class CapturedCall:
    """One call of attention, or several decode steps merged into one; batch axes are flattened to sequences.

    query (B, H, M, ·) and key (B, Hk, N, ·) as they are stored, lse (B, H, M); weight of `AdditivePairs`; features of
    `DecayedDotPairs`; errors: what rounding did to query and key, (4, H) as `_errors` has it, None where they are as
    they were;
    norms: of the transformed values, (B, H, N) float32, None where they are not known;
    leading: the axes (*batch, heads), or (*batch,) where there are no heads, that masks and biases broadcast to;
    positions (B or 1, M) and (B or 1, N); guessed: whether the kind is.
    """

    name: str
    number: int
    kind: str
    query: Tensor
    key: Tensor
    lse: Tensor
    scale: float
    weight: Tensor | None
    softcap: float | None
    normalizer: Normalizer | None
    sinks: Tensor | None
    mask: Mask | None
    bias: Bias | None
    leading: tuple[int, ...]
    has_heads: bool
    positions: tuple[Tensor, Tensor]
    errors: Tensor | None
    guessed: bool
    features: int | None = None
    steps: int = 1
    norms: Tensor | None = None

    @property
    def rounding(self) -> float:
        """Bound on the relative error of a weight: exp(2 · largest error of a score) - 1.

        The log-sum-exp of a row differs by no more than its scores do. tanh and a softcap make differences smaller.
        """
        if self.errors is None:
            return 0.0
        query, query_error, key, key_error = self.errors.double()
        if self.weight is not None:
            most = (query_error + key_error) * self.weight.double().norm()
        else:
            most = abs(self.scale) * (query_error * key + query * key_error)
        return min(math.expm1(min(2 * float(most.max()), 100.0)), 1e30)

    @property
    def form(self) -> PairForm:
        """The pair form with the original batch axes, to which mask and bias broadcast."""
        query = self.query.view(*self.leading, *self.query.shape[2:])
        heads = (*self.leading[:-1], self.key.shape[1]) if self.has_heads else self.leading
        key = self.key.view(*heads, *self.key.shape[2:])
        return self.form_of(query, key)

    def form_of(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form of this call over queries and keys of some of its sequences and heads."""
        if self.weight is not None:
            return AdditivePairs(query, key, self.weight)
        if self.features is not None:
            return DecayedDotPairs(query, key, self.features)
        return DotPairs(query, key, self.scale)

    def problem(self) -> Problem:
        """The call as a `Problem` whose values have no columns."""
        form = self.form
        batch = self.leading[:-1] if self.has_heads else self.leading
        placed = [
            of[0] if len(of) == 1 else of.view(*batch, of.shape[-1]) for of in self.positions
        ]  # what differs between sequences has the axes of the batch
        return Problem(
            pairs=form,
            value=form.key.new_empty(*form.key.shape[:-1], 0),
            mask=self.mask,
            bias=self.bias,
            softcap=self.softcap,
            normalizer=self.normalizer,
            query_positions=placed[0],
            key_positions=placed[1],
        )


class TensorSnapshots:
    """Copies of the tensors of masks, biases and normalizers, made once for all calls that share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def copy(self, value: Any) -> Any:
        """Copy a mask, a bias or a normalizer with its tensors."""
        if value is None:
            return None
        tensors, form = tree_flatten(value)
        return tree_unflatten(form, [self._copy(tensor) for tensor in tensors]) if tensors else value

    def _copy(self, tensor: Tensor) -> Tensor:
        version = -1 if tensor.is_inference() else tensor._version
        kept = self._known.get((id(tensor), version))
        if kept is None:  # the tensor is kept too: its id is its own for as long as it is alive
            kept = self._known[id(tensor), version] = tensor, tensor.detach().cpu().clone()
        return kept[1]


def capture(
    problem: Problem,
    lse: Tensor,
    *,
    name: str,
    number: int,
    kind: tuple[str, bool],
    snapshots: TensorSnapshots,
    half: bool,
    norms: Tensor | None = None,
) -> CapturedCall:
    """Copy a problem to the CPU, with q and k in half precision if `half` and if their values fit.

    Only of softmax attention: there a rounded score changes a weight by a bounded factor. The log-sum-exp is kept in
    the precision that goes with them: float32 for half precision, whatever the model computes in.
    """
    layout = WeightsLayout.from_problem(problem)
    heads = problem.pairs.key.shape[-3] if problem.heads else 1
    query = _batched(problem.pairs.query, problem, layout.heads)
    key = _batched(problem.pairs.key, problem, heads)
    half = half and problem.normalizer is None and _fits_float16(query, key)
    dtype = torch.float16 if half else query.dtype
    queries, keys = layout.positions(problem)
    mine, theirs = _copied(query, dtype), _copied(key, dtype)
    weight = problem.pairs.weight if isinstance(problem.pairs, AdditivePairs) else None
    return CapturedCall(
        name=name,
        number=number,
        kind=kind[0],
        query=mine,
        key=theirs,
        lse=_copied(lse.reshape(layout.batch, layout.heads, -1), torch.promote_types(dtype, torch.float32)),
        scale=problem.pairs.scale if isinstance(problem.pairs, DotPairs) else 1.0,
        weight=None if weight is None else _copied(weight, weight.dtype),
        softcap=problem.softcap,
        normalizer=snapshots.copy(problem.normalizer),
        sinks=None if problem.sinks is None else _copied(problem.sinks, torch.float32),
        mask=snapshots.copy(problem.mask),
        bias=snapshots.copy(problem.bias),
        leading=tuple(layout.leading),
        has_heads=problem.heads,
        positions=(queries.detach().cpu().clone(), keys.detach().cpu().clone()),
        errors=None if dtype == query.dtype else _errors(query, mine, key, theirs),
        guessed=kind[1],
        features=problem.pairs.features if isinstance(problem.pairs, DecayedDotPairs) else None,
        norms=norms,
    )


def _batched(tensor: Tensor, problem: Problem, heads: int) -> Tensor:
    """Reshape (*batch, heads, length, ·) to (B, heads, length, ·), expanding a broadcast batch."""
    own = tensor.shape[-3:] if problem.heads else tensor.shape[-2:]
    tensor = tensor.expand(*problem.batch, *own)
    return tensor.reshape(problem.batch.numel(), heads, *tensor.shape[-2:])


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A detached copy on the CPU in another dtype."""
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())


def _errors(query: Tensor, kept_query: Tensor, key: Tensor, kept_key: Tensor) -> Tensor:
    """Largest norms of each head's vectors and of their rounding errors, (4, H): queries, then keys."""

    def of(tensor: Tensor, rounded: Tensor) -> Tensor:
        tensor, rounded = tensor.detach().float(), rounded.to(tensor.device).float()
        norms = torch.stack([torch.maximum(tensor.norm(dim=-1), rounded.norm(dim=-1)), (tensor - rounded).norm(dim=-1)])
        return norms.amax((1, -1)).cpu()  # over sequences and positions

    return torch.cat([of(query, kept_query), of(key, kept_key).repeat_interleave(query.shape[1] // key.shape[1], -1)])


def _fits_float16(*tensors: Tensor) -> bool:
    """Whether all values are within the range of float16."""
    most = torch.finfo(torch.float16).max
    return all(float(of.detach().abs().amax()) <= most if of.numel() else True for of in tensors)


CORNER = 128
"""The number of last rows and of last keys that are evaluated where a mask or a bias has no symbol."""
MASKED_BELOW = -1e4
"""The bound below which a number added to a score is a mask, also in half precision."""


def is_causal(problem: Problem) -> bool:
    """Whether no query attends to a key after its own position, where the queries are the last of the keys.

    A mask that says so by its symbol is believed. Of others, and of biases, the corner of the last rows and keys tells.
    """
    if problem.queries > problem.keys:
        return False
    if problem.queries == 1 or any(_is_back(part) for part in conjunction(problem.mask)):
        return True
    if problem.mask is None and problem.bias is None:
        return False
    side = min(problem.queries, CORNER)
    rows, columns = slice(problem.queries - side, problem.queries), slice(problem.keys - side, problem.keys)
    grid = problem.grid().tile(rows, columns)
    exists = torch.ones(side, side, dtype=torch.bool, device=problem.pairs.key.device)
    if (keep := problem.keep(grid)) is not None:
        exists = exists & keep
    if problem.bias is not None and (added := problem.bias_values(grid)) is not None:
        exists = exists & (added > MASKED_BELOW)
    return not bool(exists.triu(1).any())


def conjunction(mask: Mask | None) -> list[Mask]:
    """The operands of a conjunction of masks; [] of None."""
    if mask is None:
        return []
    return [*conjunction(mask.left), *conjunction(mask.right)] if isinstance(mask, And) else [mask]


def _is_back(mask: Mask) -> bool:
    return isinstance(mask, Causal) or (isinstance(mask, Window) and mask.after == 0)
