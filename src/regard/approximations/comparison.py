"""Measure an approximation of attention against exact attention on queries, keys and values of the user's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..attention import observe_problem, run_problem
from ..core.batched_problem import BatchedProblem
from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from ..kernels import choose, zero_nonfinite_inputs
from ..kernels.nan_safety import finite_problem
from ..kernels.validation import AttentionOptions, make_problem
from ..lenses import Entropy, Lens, Pooled
from ..masks import causal as causal_mask
from ..masks import where
from ..plots import approximation_plot, save
from ..utils.numbers import whole_number
from ..utils.units import format_bytes, format_seconds
from .deviation import LensResults, WeightErrors, check_lenses, compare_weights, head_errors, row_errors
from .methods import Method, MethodLike, as_method
from .timing import Timings, measure_times, peak_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = 32
"""Rows and columns of the pooled maps that are compared by default."""


@dataclass(frozen=True, eq=False)
class Approximation:
    """The result of `approximation`; print it for a table, `plot` it for a picture.

    Letters: R draws of the random numbers, B all leading axes together, H heads (1 without a head axis), M queries.

    method: what was measured. kernel: the name of the kernel that computed exact attention. queries, keys: M and N.
    draws: the relative error of the output of each head in each draw, (R, B, H). rows: the error of each row, as a
    share of the root mean square of the exact rows of its head, (B, H, M); with several draws their root mean square.
    weights: differences of the weights in the first draw; None for a method without weights. total_variation: the mean
    over all rows in each draw, (R,). timings: seconds at some lengths. memory: bytes that the exact attention and the
    approximation hold at once, None where they are not known. remark: what was not timed, and why.
    """

    method: Method
    kernel: str
    queries: int
    keys: int
    draws: Tensor
    rows: Tensor
    weights: WeightErrors | None
    total_variation: Tensor
    timings: Timings
    memory: tuple[int | None, int | None]
    remark: str

    @property
    def heads(self) -> Tensor:
        """The relative error of each head, (B, H): the root mean square over the draws."""
        return self.draws.square().mean(0).sqrt()

    @property
    def error(self) -> float:
        """The relative error of all heads together: the root mean square of `heads`."""
        return float(self.heads.square().mean().sqrt())

    @property
    def spread(self) -> float | None:
        """The standard deviation of the error from draw to draw; None for a single draw."""
        return None if len(self.draws) == 1 else float(self._error_of_draws().std())

    @property
    def crossover(self) -> float | None:
        """The number of keys from which the approximation is faster on this machine; None for none measured."""
        return self.timings.crossover

    def __getitem__(self, lens: Lens) -> LensResults:
        """The results of a lens on the exact and on the approximate weights.

        Raises:
            ConfigurationError: it was not measured.
        """
        if self.weights is None or lens not in self.weights.lenses:
            had = ", ".join(map(repr, self.weights.lenses if self.weights else ())) or "no lens"
            raise ConfigurationError(f"{lens!r} was not measured, but {had}: pass it as lenses=[...]")
        return self.weights.lenses[lens]

    def worst_heads(self, count: int = 3) -> list[tuple[int, int, float]]:
        """The heads with the largest errors, as (batch, head, error), the largest first."""
        return [(*divmod(at, self.heads.shape[1]), value) for at, value in _largest(self.heads, count)]

    def worst_rows(self, count: int = 5) -> list[tuple[int, int, int, float]]:
        """The rows with the largest errors, as (batch, head, query, error), the largest first."""
        heads, queries = self.rows.shape[1:]
        found = _largest(self.rows, count)
        return [(at // (heads * queries), at // queries % heads, at % queries, value) for at, value in found]

    def plot(self) -> Figure:
        """A matplotlib figure: errors of heads and rows, pooled weights of the worst head, and times.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        batch, head, _ = self.worst_heads(1)[0]
        pooled = (
            next((lens for lens in self.weights.lenses if isinstance(lens, Pooled)), None) if self.weights else None
        )
        maps = None
        if pooled is not None:
            exact, approximate = (
                self._head_of(part, batch, head) for part in (self[pooled].exact, self[pooled].approximate)
            )
            maps = exact, approximate
        return approximation_plot.draw(
            str(self.method),
            draws=self.draws.flatten(1).numpy(),
            rows=self.rows.flatten(0, 1).numpy(),
            worst=batch * self.heads.shape[1] + head,
            maps=maps,
            timings=(self.timings.lengths, self.timings.exact, self.timings.approximate),
            crossover=self.crossover,
            names=[self._head_name(*divmod(at, self.heads.shape[1])) for at in range(self.heads.numel())],
        )

    def save(self, path: str | Path, *, dpi: float = 200) -> None:
        """Save the picture as PNG, SVG or PDF, by the ending of the path.

        Raises:
            ConfigurationError, CheckpointError, MissingExtra: as `regard.plots.save`.
        """
        save(self.plot(), path, dpi=dpi)

    def __str__(self) -> str:
        lines = [
            f"{self.method}, against exact attention ({self.kernel}), {self.queries:,} queries, {self.keys:,} keys",
            *_columns([*self._output_lines(), *self._weight_lines(), *self._cost_lines()]),
        ]
        return "\n".join(lines)

    def _output_lines(self) -> list[tuple[str, str]]:
        """The errors of the output, of heads and of rows."""
        draws = "" if self.spread is None else f" ± {self.spread:.2g} from draw to draw ({len(self.draws)} draws)"
        heads = ", ".join(f"{self._head_name(b, h)}: {error:.3g}" for b, h, error in self.worst_heads())
        rows = ", ".join(f"query {i} of {self._head_name(b, h)}: {error:.3g}" for b, h, i, error in self.worst_rows(3))
        return [("output error", f"{self.error:.3g}{draws}"), ("  worst heads", heads), ("  worst rows", rows)]

    def _weight_lines(self) -> list[tuple[str, str]]:
        """The differences of the weights."""
        if self.weights is None:
            return [("weights", "not compared: the method has none that are shares of a row")]
        spread = "" if len(self.draws) == 1 else f" ± {float(self.total_variation.std()):.2g}"
        mean, most = float(self.total_variation.mean()), float(self.weights.total_variation.max())
        lines = [("total variation", f"{mean:.3g}{spread} of a row's weights on average, {most:.3g} at most")]
        for lens, results in self.weights.lenses.items():
            if results.difference is not None:
                exact, other = (float(part.double().mean()) for part in (results.exact, results.approximate))
                text = f"mean {exact:.3g} exact, {other:.3g} approximate, mean difference {results.difference:.3g}"
                if math.isnan(other) and not math.isnan(exact):
                    text = f"mean {exact:.3g} exact, not defined for the approximation: it has weights below 0"
                lines.append((repr(lens), text))
        return lines

    def _cost_lines(self) -> list[tuple[str, str]]:
        """Times, memory and crossover."""
        at = self.timings.lengths.index(self.keys)
        exact, other = self.timings.exact[at], self.timings.approximate[at]
        ratio = f"{exact / other:.3g} times faster" if exact >= other else f"{other / exact:.3g} times slower"
        lines = [("time", f"{format_seconds(exact)} exact, {format_seconds(other)} approximate: {ratio}")]
        if None not in self.memory:
            lines.append(
                ("memory", "{} exact, {} approximate".format(*(format_bytes(each or 0) for each in self.memory)))
            )
        if len(self.timings.lengths) > 1:
            shortest, longest = self.timings.lengths[0], self.timings.lengths[-1]
            found = (
                f"faster from about {self.crossover:,.0f} keys on" if self.crossover else "not faster at the longest"
            )
            if self.crossover == shortest:
                found = "faster at all of them"
            lines.append(("crossover", f"{found}; measured at {shortest:,} to {longest:,} keys"))
        return [*lines, *([("remark", self.remark)] if self.remark else [])]

    def _error_of_draws(self) -> Tensor:
        """The relative error of all heads together in each draw, (R,)."""
        return self.draws.square().flatten(1).mean(1).sqrt()

    def _head_name(self, batch: int, head: int) -> str:
        """The name of a head, with its batch where there are several."""
        return f"head {head}" if len(self.heads) == 1 else f"batch {batch}, head {head}"

    def _head_of(self, values: Tensor, batch: int, head: int) -> Any:
        """One head of a lens's result (..., heads, rows, columns), as an array."""
        return values.reshape(*self.heads.shape, *values.shape[-2:])[batch, head].float().cpu().numpy()


def approximation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    method: MethodLike,
    *,
    causal: bool = False,
    redraws: int = 1,
    lenses: Sequence[Lens] | None = None,
    lengths: Sequence[int] | None = None,
    **options: Unpack[AttentionOptions],
) -> Approximation:
    """Measure |Ô - O| / |O|, the error of an approximation Ô of the exact attention O of these tensors, and its cost.

    Errors are relative: of a head √(Σ_i |ô_i - o_i|² / Σ_i |o_i|²), of a row |ô_i - o_i| over the root mean square of
    |o_i| of its head, so that a head's error is the root mean square of its rows'. Weights are compared in one pass
    over tiles, in memory linear in the lengths: the total variation ½ Σ_j |ŵ_ij - w_ij| of each row, and the results
    of lenses on both. Times are medians of runs in turn; nothing is measured with gradients.

    Shapes: as of `regard.attention`: query (..., heads, M, D), key (..., key heads, N, D), value (..., key heads, N,
    Dv).

    Args:
        query: (..., heads, M, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        method: a feature map of `regard.linear` (linear attention), a mask of `regard.masks` (attention to the pairs
            that it leaves), a dtype of fewer bits, or a method of `regard.approximations`, such as
            `Linformer(SegmentMeans(64))`.
        causal: whether masks.causal() is joined to the mask.
        redraws: how many draws of its random numbers a random method is measured with; the first is its own.
        lenses: compared on both weights; Entropy() and Pooled((32, 32)) by default.
        lengths: numbers of keys at which both are timed, beside N, for the crossover; the tensors' rows are then evenly
            spaced or repeated. By default 128 and its doubles until the approximation is faster at two of them, or a
            call takes 1 s; () for N alone.
        options: mask, bias, scale and others of the exact attention, as of `regard.attention`.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError: tensors that do not fit, as `regard.attention`.
        ConfigurationError: an unknown method, or one that cannot compute this problem, with the reason; redraws of a
            method that is not random; lengths below 1; a lens that cannot show the weights of an approximation.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 1, 2, 64, 16)
    >>> found = regard.approximation(q, k, v, regard.linear.FavorPlus(16, 256, seed=0), causal=True, redraws=4)
    >>> found.draws.shape, found.rows.shape
    (torch.Size([4, 1, 2]), torch.Size([1, 2, 64]))
    """
    method = as_method(method)
    redraws = whole_number("redraws", redraws)
    if redraws > 1 and not method.is_random:
        raise ConfigurationError(f"redraws is {redraws}, but {method} is not random: leave redraws out")
    if options.get("dropout_p"):
        raise ConfigurationError(
            "dropout_p drops other weights in each run, which is no error of a method: leave it out"
        )
    problem = make_problem(query, key, value, **{**options, "mask": _joined_mask(options.get("mask"), causal)})
    if not problem.weights_shape.numel():
        raise ShapeError(f"the weights have the shape {tuple(problem.weights_shape)}: there is nothing to measure")
    with torch.no_grad():
        if reason := method.why_not(problem):
            raise ConfigurationError(f"{method} cannot compute this attention: {reason}")
        return _measure(problem, method, redraws, _checked_lenses(problem, lenses), lengths)


def _joined_mask(mask: Any, causal: bool) -> Any:
    """The mask, and the causal one."""
    if not causal:
        return mask
    if isinstance(mask, Tensor):
        mask = where(keep=mask)
    return causal_mask() if mask is None else causal_mask() & mask


def _checked_lenses(problem: Problem, lenses: Sequence[Lens] | None) -> list[Lens]:
    """The lenses, by default Entropy and Pooled.

    Raises:
        ConfigurationError: a lens that cannot show the weights of an approximation.
    """
    if lenses is None:
        return [Entropy(), Pooled((min(CELLS, problem.queries), min(CELLS, problem.keys)))]
    check_lenses(problem, lenses)
    return list(lenses)


def _measure(
    problem: Problem, method: Method, redraws: int, lenses: Sequence[Lens], lengths: Sequence[int] | None
) -> Approximation:
    """All measurements of a method that can compute the problem."""
    timings, remark = measure_times(problem, method, lengths)
    batched, seen = BatchedProblem.from_problem(problem), observe_problem(problem, lenses)
    exact, clean = _as_4d(batched, seen.output), finite_problem(problem)
    # A method whose mask cannot be that of infinite scores has the weights of the others.
    own = zero_nonfinite_inputs(problem) if method.why_not(clean) else clean
    squares, heads, distances, weights = torch.zeros(()), [], [], None
    for number in range(redraws):
        drawn = method.redraw(number) if number else method
        rows = row_errors(exact, _as_4d(batched, drawn.run(problem))).cpu()
        squares = squares + rows.square()
        heads.append(head_errors(rows))
        approximate = drawn.weights(own)
        if approximate is not None:
            found = compare_weights(clean, seen.lse, approximate, {} if number else seen.results)
            weights = weights or found
            distances.append(float(found.total_variation.mean()))
    return Approximation(
        method=method,
        kernel=choose(problem).name,
        queries=problem.queries,
        keys=problem.keys,
        draws=torch.stack(heads),
        rows=(squares / redraws).sqrt(),
        weights=weights,
        total_variation=torch.tensor(distances),
        timings=timings,
        memory=_memory(problem, method),
        remark=remark,
    )


def _memory(problem: Problem, method: Method) -> tuple[int | None, int | None]:
    """Peak bytes of exact and approximate attention."""
    device = problem.value.device
    exact = peak_memory(partial(run_problem, replace(problem)), device)
    return exact, peak_memory(partial(method.run, problem), device)


def _as_4d(batched: BatchedProblem, output: Tensor) -> Tensor:
    """An output (..., heads, M, Dv) as (B, H, M, Dv)."""
    return output.reshape(*batched.shape[:3], output.shape[-1])


def _largest(values: Tensor, count: int) -> list[tuple[int, float]]:
    """The largest numbers and their places in the flattened tensor, NaN first."""
    found = values.flatten().nan_to_num(nan=torch.inf).topk(min(count, values.numel()))
    places = found.indices.tolist()
    return [(place, float(values.flatten()[place])) for place in places]


def _columns(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a label and a text, the texts one below the other."""
    width = max(len(label) for label, _ in lines) + 2
    return [f"  {label:<{width}}{text}" for label, text in lines]
