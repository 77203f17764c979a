"""NaN safety: NaN and infinity in a masked position affect no output; a row that attends to one is NaN.

Forward it is `run_nan_safe` here that sees to it, backward `custom_op.compute_gradients`. A weight of exactly 0 times
NaN is NaN, forward and backward, in every kernel. A kernel's result is finite only if all inputs that it read were (it
reads no keys of skipped tiles): checking the result is enough, and the slower path runs only where it is not finite.
Native flash code checks what it writes (`Result.checked`, `ProblemGradients.checked`); the results of others are read
once more. A tanh, of a softcap or of an additive score, makes infinity finite: there queries and keys are checked
beforehand. Where numbers can be read, a pair of softmax attention that infinity in query or key scores -infinity counts
as masked (`infinite_scores`): gradients are those of the other pairs.

On a device that computes asynchronously nothing is read, as that waits for it. A `NanSafeKernel` needs no care there.
For any other the slower path is the only one: inputs are set to finite ones, a pass over each. Which rows attend to NaN
follows, of a mask of spans, from sums over the keys, about four passes over the values; of any other mask from
attention itself, up to three times the work. Backward there is a pass over each input, output and gradient from above.

All places that see to it. Kernels leave it to these; two only make sure that torch's flash kernel does not lose NaN
over few keys: `SdpaKernel.run` passes `propagates_nan`, or tests `all_finite` before its bare call, and
`dense_block.Rectangle` tests it.

- forward: `run_nan_safe` here, called by `custom_op.compute_forward` for all kernels with a backward of their own, by
  `ReferenceKernel.run`, `ReflectedKernel.run`, and by `SdpaKernel.run` where that does not go through `custom_op`;
- one call of C that is tried before the rest: `short.attend_without_gradient` and `short._AttendShort`, both by way of
  `small_calls` too, where C says whether what it wrote is finite; `decode._attend_step`, which reads its output once
  more where there is a mask. What is not finite goes the way of all kernels, `custom_op`; where nothing is masked, by
  softmax, and no gradient is wanted, it is right as it is;
- backward: `custom_op.compute_gradients`, which computes again from the finite inputs of
  `custom_op._without_nonfinite`, with the mask of `mask_without_infinity`; the second derivative likewise,
  `custom_op._second_derivative`, and many gradients at once, `custom_op._mapped_gradients`. Where autograd
  differentiates (`reference`; `sdpa` off the CPU, with a bias that has a gradient, or under a transform), none of these
  is reached: `run_nan_safe` passes finite inputs already forward;
- lenses and hooks: `finite_problem` here, called by `attention.observe_problem`, `hooks.run_with_hook`,
  `approximations.methods` and `approximations.comparison`, in a ring by `ring.shard_lenses`, for each block, and
  `ring.shard_hooks`, and where terms are edited by `AttentionCall.key_sums` and `attention_edits._Editor.observe`;
  `zero_nonfinite_inputs`, which leaves the mask as it is, by `ring.linear_lenses`. Rows that attend to NaN have the
  log-sum-exp NaN;
- parameters of a score, whose gradients are sums over masked positions too:
  `validation._pairs_with_finite_gradients`; those of projections in torch's twin: `nn.multihead`, `forward`;
- rings: `ring.block_attention` calls `custom_op` for each block, or a kernel in place where all inputs are finite
  (`is_tame`). `ShardRows` records whether a block met NaN, `ShardGradients` sets results and gradients of such rows to
  finite ones, as `compute_gradients` does;
- linear attention has code of its own: `linear.nonfinite_rows.NonfiniteRows` sets rows with NaN to 0 before the feature
  map, and marks output, totals and state; `linear.linear_weights` marks the features that lenses read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.batched_problem import BatchedProblem
from ..core.finite import all_finite, waits
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, zero_nonfinite
from ..core.torch_modes import functorch_active, under_transform
from ..tiles.row_spans import device_spans
from .base import Result
from .infinite_scores import has_infinite_scores, mask_without_infinity, rows_with_infinity

Compute = Callable[[Problem], Result]


def run_nan_safe(problem: Problem, compute: Compute, *, propagates_nan: bool = True) -> Result:
    """Run `compute` on a problem, without autocast, so that NaN or infinity in a masked position affects nothing.

    propagates_nan: whether NaN in a query or key is certain to appear in the result.

    If any may be present, the problem is computed with them set to 0; the rows that attend to one are found by
    attention itself (uniform weights over indicators: above 0 where one is attended to) and set to NaN. The same is
    done with infinity where the tanh of a softcap or of an additive score would make it a finite score.
    """
    value = problem.value
    propagates_nan = propagates_nan and problem.softcap is None and not isinstance(problem.pairs, AdditivePairs)
    propagates_nan = propagates_nan and problem.normalizer is None  # others may give NaN a weight of 0
    if torch.is_autocast_enabled(value.device.type):
        with torch.autocast(value.device.type, enabled=False):
            return run_nan_safe(problem, compute, propagates_nan=propagates_nan)
    all_pairs_exist = problem.mask is None and value.shape[-2] > 0
    if torch.compiler.is_compiling() or functorch_active() or not value.is_cpu:  # where no value is read
        if all_pairs_exist and propagates_nan:
            return compute(problem)
        return _run_on_finite_inputs(problem, _finite(problem), compute)
    if propagates_nan or all_finite(problem.pairs.query, problem.pairs.key):
        # Where autograd differentiates `compute`, NaN may be in a gradient though not in the result.
        differentiated = problem.requires_grad()
        if all_pairs_exist and not (differentiated and has_infinite_scores(problem)):
            return compute(problem)
        if not differentiated:
            result = compute(problem)
            if result.checked or all_finite(result.output):
                return result
    clean = finite_problem(problem)
    return compute(problem) if clean is problem else _run_on_finite_inputs(problem, clean, compute)


def _run_on_finite_inputs(problem: Problem, clean: Problem, compute: Compute) -> Result:
    """The result for finite inputs, with NaN in the rows that attend to an entry that was not finite."""
    result = compute(clean)
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    if clean.mask is not problem.mask:
        bad_row = rows_with_infinity(problem)
        bad = bad_row | _attends_to(replace(clean, mask=problem.mask), ~value.isfinite(), compute)
        return _with_nan(result, bad, bad_row)
    bad_query = ~query.isfinite().all(-1, keepdim=True)  # [..., H, M, 1]
    bad_key = ~key.isfinite().all(-1, keepdim=True)  # [..., Hk, N, 1]
    sees_key = _attends_to(clean, bad_key, compute)
    sees_value = _attends_to(clean, bad_key | ~value.isfinite(), compute)
    sees_any = _attends_to(clean, torch.ones_like(bad_key), compute)
    bad_row = _affected(problem, sees_key | (bad_query & sees_any))
    return _with_nan(result, sees_value | bad_row, bad_row)


def _with_nan(result: Result, bad: Tensor, bad_row: Tensor) -> Result:
    """The result with NaN in these entries (..., heads, M, Dv or 1) of the output, and in these rows of the other."""
    output = result.output.masked_fill(bad, float("nan"))
    if result.lse is None:
        return Result(output)
    return Result(output, result.lse.masked_fill(bad_row.squeeze(-1), float("nan")))


def _affected(problem: Problem, rows: Tensor) -> Tensor:
    """The rows (..., heads, M, 1) whose weights depend on the scores of some rows."""
    if problem.normalizer is None:
        return rows
    if problem.heads:
        return problem.normalizer.affected(rows)
    return problem.normalizer.affected(rows.unsqueeze(-3)).squeeze(-3)


def finite_problem(problem: Problem) -> Problem:
    """`zero_nonfinite_inputs`, with a mask that leaves out the pairs whose score infinity made -infinity."""
    clean = zero_nonfinite_inputs(problem)
    if clean is problem or (mask := mask_without_infinity(problem)) is problem.mask:
        return clean
    return replace(clean, mask=mask)


def zero_nonfinite_inputs(problem: Problem) -> Problem:
    """The problem with NaN and infinity in query, key and value set to 0; the problem itself where none is found."""
    tensors = problem.pairs.query, problem.pairs.key, problem.value
    readable = not (under_transform() or waits(problem.value))
    return problem if readable and all_finite(*tensors) else _finite(problem)


def _finite(problem: Problem) -> Problem:
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return replace(
        problem,
        pairs=replace(problem.pairs, query=zero_nonfinite(query), key=zero_nonfinite(key)),
        value=zero_nonfinite(value),
    )


def _attends_to(problem: Problem, marked: Tensor, compute: Compute) -> Tensor:
    """For each query and each column of `marked` (..., key heads, N, ·): whether it attends to a marked key.

    The mask alone decides: a bias or a sink may leave a key a weight that underflows, and NaN passes through it. Of
    normalizers without log-sum-exp, which may leave most keys without weight, it is softmax attention that is asked.
    Without a mask all queries attend to all keys, and have one row for all: (..., heads, 1, ·).
    """
    if problem.mask is None:
        found = marked.any(-2, keepdim=True)
        if not problem.heads or problem.pairs.query.shape[-3] == found.shape[-3]:
            return found
        return found.repeat_interleave(problem.pairs.query.shape[-3] // found.shape[-3], -3)
    if waits(marked) and not under_transform() and (spans := device_spans(problem)) is not None:
        return _spans_with(problem, marked, spans)
    with torch.no_grad():
        uniform = replace(
            problem,
            pairs=problem.pairs.uniform(),
            value=marked.to(problem.value.dtype),
            bias=None,
            softcap=None,
            sinks=None,
            dropout=None,
            wants_lse=False,
            normalizer=problem.normalizer if problem.has_lse else None,
        )
        return compute(uniform).output > 0


def _spans_with(problem: Problem, marked: Tensor, spans: Tensor) -> Tensor:
    """Which rows have a marked key in their span, by the number of those before its end and before its start."""
    batched = BatchedProblem.from_problem(replace(problem, value=marked))
    counts = pad(batched.value.cumsum(-2, dtype=torch.int32), (0, 0, 1, 0))  # [B, Hk, N + 1, ·]
    batch, heads = batched.shape[:2]
    at = spans.long()[:, None, :, :, None].expand(batch, counts.shape[1], -1, -1, counts.shape[-1])
    before_start, before_stop = (counts.gather(2, at[..., side, :]) for side in (0, 1))
    return batched.unflatten_batch((before_stop > before_start).repeat_interleave(heads // max(counts.shape[1], 1), 1))
