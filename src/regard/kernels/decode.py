"""The decode kernel: few queries over many keys, which are read once per group of query heads."""

from __future__ import annotations

from torch import Tensor

from ..backends.base import FewQueries, PreparedStep
from ..backends.registry import BACKENDS, is_nan_safe
from ..backends.torch.dense_block import EXPONENTIAL, Rectangle, dense_reasons
from ..backends.torch.key_parts import PART, KeyParts
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.finite import all_finite, waits
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.torch_modes import under_transform
from ..masks.causal import Causal
from ..tiles.dense_mask import dense_mask_added, is_one_causal_query
from ..tiles.mask_tiles import distinct_matrices, union_layout
from ..tiles.row_spans import last_keys_of_step, over_last_keys
from .base import INPUT_GRADIENTS, Cost, FlashWork, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import (
    MASK,
    OPERATOR,
    RESULT,
    bias_passes,
    bytes_read,
    evaluated,
    heads_per_key,
    torch_flash_startup,
    torch_flash_work,
    total_width,
)
from .planning.unit_prices import price

STEP_CALLS = price("decode.step_calls")
STEP_MASK_CALLS = price("decode.step_mask_calls")
MASK_CALLS = price("decode.mask_calls")
FEW_KEYS = 256
"""Up to so many keys a step reads all of them: to find those that a mask leaves would take longer."""
MAX_EVALUATED_PAIRS = 2**18
"""The most pairs for which a mask is evaluated pair by pair: with one key more at each call, nothing is memoized."""


class DecodeKernel:
    """Grouped heads as rows of one product, and flash decoding over parts of the keys, for few queries and many keys.

    Query heads of a group become rows (Ainslie et al. 2023, arXiv 2305.13245, put to use); parts of the keys are
    merged by log-sum-exp (flash decoding: Dao, Haziza, Massa and Sizov 2023). C, where it is there, takes scores and
    values in one pass; torch's dense kernel has the parts as heads.

    part: the keys of a part, which torch computes; without it another backend does where one can.
    """

    exponential = EXPONENTIAL

    def __init__(self, part: int | None = None) -> None:
        self.name = "decode" if part is None else f"decode({part})"
        self.part, self.by_torch = part or PART, part is not None
        register(self, exact_lse=True)

    def why_not(self, problem: Problem) -> list[str]:
        """Features that the dense kernel does not support, or more rows than this kernel is meant for."""
        reasons = dense_reasons(problem)
        rows = heads_per_key(problem) * problem.queries
        most = self._maker(problem.pairs.key, problem.value)[1].most_rows
        if rows > most:
            reasons.append(
                f"it is for few queries: {problem.queries} of {heads_per_key(problem)} heads are {rows} rows for each "
                f"key head, more than {most}"
            )
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The time to read keys and values once; in training that of torch's kernel, by which the gradient is."""
        columns = _columns_in_runs(problem)
        leading, wide = problem.weights_shape[:-2].numel(), columns.stop - columns.start
        visited, group = problem.queries * wide, heads_per_key(problem)
        masks, biases = distinct_matrices(problem)
        backend, few_queries = self._maker(problem.pairs.key, problem.value)
        fused = few_queries.fused and not problem.inputs_require_grad()
        step = self.is_one_call(problem)
        if fused and _causal_limits(problem) is not None:
            masks = 0
        rows, pairs = group * problem.queries, float(leading * visited)
        work = torch_flash_work(problem, pairs, rows)
        if fused:
            numbers = pairs / max(rows, 1) * total_width(problem)
            work = FlashWork(2.0 * pairs * total_width(problem), pairs, streamed=numbers)
        return Cost(
            flops=0.0,
            flash={backend if fused else "torch": work},
            bytes=4.0 * leading * problem.queries * problem.value.shape[-1] * (1 if fused else 1 + wide / self.part),
            passes=(0.0 if fused else torch_flash_startup(problem, rows, leading / max(group, 1)))
            + RESULT * leading * problem.queries * problem.value.shape[-1]
            + evaluated(problem, visited * (MASK * masks + bias_passes(problem) * biases)),
            moved=bytes_read(problem, again=wide / max(problem.keys, 1)),
            calls=(STEP_CALLS if step else OPERATOR)
            + (STEP_MASK_CALLS if step else MASK_CALLS) * bool(masks or biases),
        )

    def is_one_call(self, problem: Problem) -> bool:
        """Whether the problem is computed by one fused call, and nothing around it."""
        return self._maker(problem.pairs.key, problem.value)[1].fused and _is_bare_step(problem)

    def prepare_step(self, problem: Problem) -> PreparedStep | None:
        """What computes a problem and all of its kind, where they are one call; None where nothing is known of it."""
        pairs, value = problem.pairs, problem.value
        every_key = problem.mask is None or is_one_causal_query(problem)
        if not isinstance(pairs, DotPairs) or not every_key or not self.is_one_call(problem):
            return None
        return self._maker(pairs.key, value)[1].prepare_step(pairs.query, pairs.key, value, pairs.scale)

    def _maker(self, key: Tensor, value: Tensor) -> tuple[str, FewQueries]:
        """Who computes keys and values of this kind: the backend's name and its methods."""
        return ("torch", KeyParts(self.part)) if self.by_torch else _maker(key, value)

    def gradients(self, problem: Problem) -> frozenset[str]:
        """All but those of a bias."""
        return INPUT_GRADIENTS

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes it is; the gradient is that of torch's dense kernel."""
        return not backward and is_nan_safe(self._maker(problem.pairs.key, problem.value)[0])

    def run(self, problem: Problem) -> Result:
        """Output, and the log-sum-exp if it is requested.

        A step of decoding that needs nothing but a fused call is one, without what other problems need.
        """
        if self.is_one_call(problem):
            output = _attend_step(problem, *self._maker(problem.pairs.key, problem.value))
            if output is not None:
                return Result(output)
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """The rows of each key head in one pass over its keys."""
        limits, (_, few_queries) = _causal_limits(batched.problem), self._maker(batched.pairs.key, batched.value)
        if limits is not None and few_queries.fused:
            rectangle = _folded(batched, slice(0, limits[-1]), masked=False)
        else:
            rectangle, limits = _folded(batched, *_attended_columns(batched)), None
        output, lse = few_queries.forward(
            rectangle.query, rectangle.key, rectangle.value, rectangle.scale, rectangle.added, limits
        )
        rows = batched.shape[:3]
        return output.reshape(*rows, output.shape[-1]), lse.reshape(rows)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """One rectangle: the gradient of a group's key is a product over its rows."""
        columns, masked = _attended_columns(batched)
        rectangle = _folded(batched, columns, masked)
        rows = rectangle.query.shape[:3]
        output, grad_output = (t.reshape(*rows, t.shape[-1]) for t in (saved.output, saved.grad_output))
        lse, grad_lse = saved.lse.reshape(rows), saved.grad_lse.reshape(rows)
        gradients = batched.zero_gradients()
        if rectangle.key.shape[2]:
            query, key, value = rectangle.backward(output, lse, grad_output, grad_lse, has_lse_grad=saved.has_lse_grad)
            gradients.query.add_(query.reshape(gradients.query.shape))
            gradients.key[:, :, columns] += key
            gradients.value[:, :, columns] += value
        return gradients


def _maker(key: Tensor, value: Tensor) -> tuple[str, FewQueries]:
    """Who computes few queries over keys and values of this kind: the backend's name and its methods."""
    found = (
        (each.name, each.few_queries) for each in BACKENDS if each.few_queries is not None and each.runs(key, value)
    )
    return next(found)


def _is_bare_step(problem: Problem) -> bool:
    """Whether nothing but the output is wanted, of tensors that are read as they are."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return (
        (problem.mask is None or value.shape[-2] <= FEW_KEYS or is_one_causal_query(problem))
        and problem.bias is None
        and problem.sinks is None
        and not problem.wants_lse
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and value.shape[2] > 0
        and not under_transform()
        and not problem.inputs_require_grad()
    )


def _attend_step(problem: Problem, backend: str, few_queries: FewQueries) -> Tensor | None:
    """The output of a problem that `_is_bare_step`; None where masked NaN may be in it.

    One query that attends to the last keys alone reads no others, as the same step does in `small_calls`.
    """
    if (most := last_keys_of_step(problem)) is not None:
        problem = over_last_keys(problem, most)
    pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `why_not` lets dot products alone through
    query, key, value = pairs.query, pairs.key, problem.value
    (batch, heads, queries, dim), (_, key_heads, keys, value_dim) = query.shape, value.shape
    masked = problem.mask is not None and not is_one_causal_query(problem)
    added = dense_mask_added(problem) if masked else None
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
    if heads != key_heads:
        rows = batch, key_heads, heads // max(key_heads, 1) * queries
        query, added = query.reshape(*rows, dim), None if added is None else added.reshape(*rows, keys)
    output, _ = few_queries.forward(query, key, value, pairs.scale, added)
    output = output.view(batch, heads, queries, value_dim).to(value.dtype)
    return None if masked and not is_nan_safe(backend) and not all_finite(output) else output


def _folded(batched: BatchedProblem, columns: slice, masked: bool) -> Rectangle:
    """The rectangle of some columns, with the heads of each group folded into rows: query (B, Hk, G·M, D)."""
    pairs = batched.pairs
    batch, heads, queries, _ = batched.shape
    key_heads = pairs.key.shape[1]
    rows = key_heads, heads // max(key_heads, 1) * queries

    def folded(added: Tensor) -> Tensor:
        added = added.expand(-1, heads, -1, -1)
        return added.reshape(added.shape[0], *rows, added.shape[-1])

    added = batched.added(slice(0, queries), columns, masked=masked)
    key, value = pairs.key, batched.value
    if columns != slice(0, batched.shape[3]):
        key, value = key[:, :, columns], value[:, :, columns]
    return Rectangle(
        pairs.query.reshape(batch, *rows, pairs.query.shape[-1]),
        key,
        value,
        pairs.scale,  # type: ignore[union-attr]  # `why_not` lets dot products alone through
        None if added is None else folded(added),
    )


def _causal_limits(problem: Problem) -> list[int] | None:
    """The number of keys that each query attends to under a causal mask of equal steps; None of any other mask."""
    if not isinstance(problem.mask, Causal) or not problem.queries:
        return None
    shift = problem.shift
    if shift is None or problem.step < 0:
        return None
    last = problem.keys - shift
    return [min(max(limit, 0), problem.keys) for limit in range(last - problem.queries + 1, last + 1)]


def _attended_columns(batched: BatchedProblem) -> tuple[slice, bool]:
    """Columns from the first to the last key with an unmasked pair, and whether any pair in them is masked."""
    _, _, queries, keys = batched.shape
    if batched.problem.mask is None or queries * keys > MAX_EVALUATED_PAIRS or waits(batched.value):
        return _columns_in_runs(batched.problem), batched.problem.mask is not None
    keep = batched.keep()
    if keep is None or not keep.numel():
        return slice(0, keys), False
    keep = keep.expand(*keep.shape[:2], queries, keys)
    seen = keep.flatten(0, 2).any(0).nonzero()
    if not len(seen):
        return slice(0, 0), False
    columns = slice(int(seen[0]), int(seen[-1]) + 1)
    return columns, not keep[..., columns].all()


def _columns_in_runs(problem: Problem) -> slice:
    """Columns from the first to the last key with an unmasked pair, by tiles."""
    if problem.mask is None:
        return slice(0, problem.keys)
    runs = [
        run.columns for row in union_layout(problem, (max(problem.queries, 1), PART // 8), 1).rows for run in row.runs
    ]
    return slice(min(run.start for run in runs), max(run.stop for run in runs)) if runs else slice(0, 0)
