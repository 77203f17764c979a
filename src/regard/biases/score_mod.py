"""Biases from Python functions: the score_mod of FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.finite import all_finite, waits
from ..core.grid import Grid
from ..core.mixed_devices import refuse_mixed_devices
from ..core.state_search import state_of
from ..core.torch_modes import under_transform
from ..core.traced_function import PairFunctionTrace, TensorSubstitution
from ..errors import ConfigurationError, ShapeError
from ..utils.pytree import object_token
from .base import Bias, is_floating
from .relative import RelativeBias

if TYPE_CHECKING:
    from ..core.problem import Problem

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# A score far enough from 0 for a cap or a factor to show, and the share by which float32 may round what is added.
PROBE, TOLERANCE = 64.0, 1e-4


class TracedScoreMod:
    """A score_mod with the result of tracing it: whether it may be broadcast, and the tensors that it uses."""

    def __init__(self, score_mod: ScoreMod, trace: PairFunctionTrace):
        self.score_mod = score_mod
        self.elementwise = trace.elementwise
        self.captured = _floating(trace)
        self._memo_of_trace = state_of(score_mod)
        self.checked: set[tuple[torch.Size, ...]] = set()
        """Shapes of indices off the CPU of which the values were checked: to do it each time would wait."""

    def trace_again(self) -> None:
        """Trace the function again where something has changed that it reads.

        Raises:
            ConfigurationError: it now uses another tensor with a gradient, which a bias has from when it was made.
        """
        if under_transform() or self._memo_of_trace is None or self._memo_of_trace.is_current():
            return
        trace = _trace(self.score_mod)
        known = {id(tensor) for tensor in self.captured}
        if any(tensor.requires_grad and id(tensor) not in known for tensor in _floating(trace)):
            raise ConfigurationError(
                f"from_mod({self!r}): the function uses another tensor with a gradient than when the bias was made, "
                "which would get none: make the bias anew, biases.from_mod(function), after replacing a tensor"
            )
        self.elementwise, self._memo_of_trace = trace.elementwise, state_of(self.score_mod)
        self.checked.clear()

    def call_with(self, tensors: Sequence[Tensor], score: Tensor, *indices: Tensor) -> Tensor:
        """The function's value, with other tensors substituted for the captured ones."""
        if all(own is other for own, other in zip(self.captured, tensors, strict=True)):
            return self.score_mod(score, *indices)  # type: ignore[call-arg]
        with TensorSubstitution(self.captured, tensors):
            return self.score_mod(score, *indices)  # type: ignore[call-arg]

    def __repr__(self) -> str:
        return getattr(self.score_mod, "__name__", None) or repr(self.score_mod)


@dataclass(frozen=True, eq=False, repr=False)
class ScoreModBias(Bias):
    """score_mod(0, batch, head, query position, key position)."""

    function: TracedScoreMod
    batch: int | None
    heads: int | None
    tensors: tuple[Tensor, ...]

    def structure(self, problem: Problem) -> bool:
        """Whether the function computes many pairs at once."""
        return self.function.elementwise

    def values(self, grid: Grid) -> Tensor:
        return self._checked(self.indices(grid))

    def _checked(self, indices: tuple[Tensor, ...]) -> Tensor:
        """The numbers that are added for some indices, of which the function does no more than add."""
        self.function.trace_again()
        values = self._evaluated(torch.zeros((), device=indices[-1].device), indices)
        shapes = tuple(index.shape for index in indices)
        if values.numel() and not under_transform() and shapes not in self.function.checked:
            self._check_score_is_added(indices)
            if not all_finite(values):
                raise ConfigurationError(
                    f"{self!r}: the function takes a score to infinity or NaN. Pairs that do not exist are a mask, "
                    "mask=masks.from_mod(mask_mod); the bias needs a number for every pair"
                )
            if waits(values):
                self.function.checked.add(shapes)
        return values

    def parameters(self) -> tuple[Tensor, ...]:
        """The floating-point tensors that the function used when it was traced: from closure, globals or attributes."""
        return self.tensors

    def with_parameters(self, tensors: Sequence[Tensor]) -> Self:
        return replace(self, tensors=tuple(tensors))

    def indices(self, grid: Grid) -> tuple[Tensor, ...]:
        """Indices of batch and heads, as leading axes if the function reads them, and positions: (..., M|1, N|1)."""
        batch = head = torch.zeros((1, 1), dtype=torch.int64, device=grid.device)
        if self.batch is not None:
            batch = grid.per_batch(torch.arange(self.batch, device=grid.device)[:, None, None])
        if self.heads is not None:
            self._check_heads(grid)
            head = torch.arange(self.heads, device=grid.device)[:, None, None]
        return batch, head, grid.query, grid.key

    def _call(self, score: Tensor, *indices: Tensor) -> Tensor:
        """The function of one score and indices, which broadcast."""
        return self.function.call_with(self.tensors, score, *indices)

    def _check_heads(self, grid: Grid) -> None:
        if self.heads is not None and not grid.heads:
            raise ShapeError(
                f"{self!r} differs between heads, but query, key and value have no head axis: give "
                "(batch, heads, length, dim), or leave heads out"
            )

    def _evaluated(self, score: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
        """The function of one score and many pairs, whose indices broadcast: (..., M|1, N|1)."""
        shape = broadcast_shapes(*(index.shape for index in indices))
        if not shape.numel():
            return score.expand(shape)
        try:
            if self.function.elementwise:
                values = self._call(score, *indices)
            else:
                full = [index.reshape((1,) * (len(shape) - index.ndim) + index.shape) for index in indices]
                values = _mapped(partial(self._call, score), *full)
        except Exception as error:  # the function is the user's, and may raise anything
            refuse_mixed_devices(self, error, indices[-1].device)
            raise ConfigurationError(
                f"{self!r} cannot be evaluated: {type(error).__name__}: {error}. A score_mod gets a score and four "
                "tensors of whole numbers, and returns the score with a number added; torch.where stands for if"
            ) from error
        return values if values.ndim >= 2 else values.expand(1, 1)

    @torch.no_grad()
    def _check_score_is_added(self, indices: tuple[Tensor, ...]) -> None:
        """Evaluate at the corners of the tile with two scores: the number added must be the same for both."""
        batch, head, query, key = indices
        corners = (batch, head, _ends(_ends(query, -2), -1), _ends(key, -1))
        score = torch.zeros((), dtype=torch.float64, device=query.device)
        at_zero = self._evaluated(score, corners)
        at_probe = self._evaluated(score + PROBE, corners) - PROBE
        # If both are the same infinity or NaN, the other check has the better message.
        rounding = 2 * PROBE * torch.finfo(at_probe.dtype).eps  # a table in half precision makes the sum one, too
        apart = (at_probe - at_zero).abs() > max(TOLERANCE, rounding) * at_zero.abs().clamp(min=1.0)
        if bool(apart.any()):
            zero, probe = (values.expand_as(apart)[apart][0].item() for values in (at_zero, at_probe))
            raise ConfigurationError(
                f"{self!r}: a bias is a number that is added to the score, whatever the score is, but the function "
                f"adds {zero:.6g} to a score of 0 and {probe:.6g} to a score of {PROBE:g}. A tanh cap is softcap=, a "
                "factor is scale=, and pairs that do not exist are mask=masks.from_mod(mask_mod)"
            )

    def __repr__(self) -> str:
        sizes = [f", {name}={size}" for name in ("batch", "heads") if (size := getattr(self, name)) is not None]
        return f"from_mod({self.function!r}{''.join(sizes)})"


@dataclass(frozen=True, eq=False, repr=False)
class DistanceModBias(RelativeBias, ScoreModBias):
    """score_mod(0, 0, head, query position, key position) of a function that reads the positions' difference alone."""

    def values(self, grid: Grid) -> Tensor:
        self._check_heads(grid)
        values = super().values(grid)
        return values.squeeze(0) if self.heads is None and values.ndim == 3 else values

    def values_at(self, distances: Tensor) -> Tensor:
        key = distances.reshape(1, -1)
        zero = key.new_zeros(1, 1)
        head = zero if self.heads is None else torch.arange(self.heads, device=key.device)[:, None]
        values = self._checked((zero, head, -key, torch.zeros_like(key)))
        return values.expand(len(values), key.shape[-1]).reshape(len(values), *distances.shape)

    def _call(self, score: Tensor, *indices: Tensor) -> Tensor:
        """Its value, traced again: what the function reads may have changed, and with it what it does."""
        trace = PairFunctionTrace(query=indices[2], key=indices[3])
        with trace:
            values = super()._call(score, *indices)
        if not (trace.by_distance and self.function.elementwise):
            raise ConfigurationError(
                "the function read q and k by their difference alone when the bias was made, and reads them apart now: "
                "make the bias anew, by from_mod, after what the function depends on has changed"
            )
        return values


def from_mod(score_mod: ScoreMod, *, batch: int | None = None, heads: int | None = None) -> Bias:
    """*score_mod(score, b, h, q, k) - score*: the number that a score_mod of FlexAttention adds, with positions q, k.

    The function is written for one pair: its arguments are the score and four whole numbers as tensors without axes,
    the indices of batch and head and the positions of query and key. It returns the score plus a number that does not
    depend on the score; the number is evaluated as score_mod(0, b, h, q, k), with 0 in float32. That it only adds is
    checked at the corners of each tile, not everywhere. (FlexAttention passes rows and columns instead of positions.
    These are the same for M = N, and otherwise with `query_positions=torch.arange(M)`.) A function that reads b or h
    needs `batch` or `heads`, their number.

    Gradients flow into the tensors that the function uses, from its closure, globals or attributes: the function is
    traced at one pair, b = h = q = k = 0, and tiled kernels compute no gradient for a tensor that it does not use
    there. A function of operators, comparisons, torch.where and indexing with all indices at once, `table[h, q]`,
    computes whole tiles; any other, including `table[h][q]`, is mapped over the pairs, which is slower. One of these
    operators that reads neither b nor a table by position, and q and k by `q - k`, `k - q` or comparisons of the two
    alone, is a `RelativeBias`: it is computed once for each distance. Create the bias outside code that torch.compile
    compiles: tracing the function needs values.

    The function is evaluated in each call: whatever it reads may change between calls, by any write. Only a tensor with
    a gradient may not be replaced by another one, which would get none; and a function that reads the difference of q
    and k alone when the bias is made has to go on doing so.

    Raises:
        ConfigurationError: score_mod is not a function, fails, returns anything but one number, reads b or h without
            `batch` or `heads`, or uses a tensor with gradient where torch cannot trace it; at evaluation, it does more
            than add, uses another tensor with gradient than before, or reads q and k apart where it did not before.

    Source: Dong et al. 2024 (arXiv 2412.05496), where a score_mod may be any function of the score.

    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.from_mod(lambda score, b, h, q, k: score - 0.5 * (q - k).abs()).values(Grid.from_lengths(2, 3))
    tensor([[-0.5000,  0.0000, -0.5000],
            [-1.0000, -0.5000,  0.0000]])
    """
    if not callable(score_mod) or isinstance(score_mod, Bias):
        raise ConfigurationError(
            f"from_mod needs a function (score, b, h, q, k) -> score; it was given a {type(score_mod).__name__}"
        )
    sizes = {"batch": batch, "heads": heads}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigurationError(f"from_mod needs at least 1 as {name}; it is {size}")
    trace = _trace(score_mod)
    for name in ("batch", "heads"):
        if name in trace.reads and sizes[name] is None:
            raise ConfigurationError(
                f"from_mod's function reads {'b' if name == 'batch' else 'h'}, so the bias differs between {name}: say "
                f"how many there are, from_mod(function, {name}=...)"
            )
    function = TracedScoreMod(score_mod, trace)
    object_token(function)
    by_distance = trace.elementwise and trace.by_distance and "batch" not in trace.reads
    kind = DistanceModBias if by_distance else ScoreModBias
    return kind(function, batch, heads, function.captured)


def _trace(score_mod: ScoreMod) -> PairFunctionTrace:
    """Trace the function at one pair: the arguments that it reads, the tensors it uses, and whether it broadcasts."""
    score = torch.zeros(())
    batch, heads, query, key = torch.zeros(4, dtype=torch.int64).unbind()
    trace = PairFunctionTrace(score=score, batch=batch, heads=heads, query=query, key=key)
    try:
        with trace:
            value = score_mod(score, batch, heads, query, key)
        used = list(trace.captured.values())
        with torch.enable_grad(), TensorSubstitution(used, [tensor.detach() for tensor in used]):
            unseen = score_mod(score, batch, heads, query, key)
    except Exception as error:  # the function is the user's, and may raise anything
        raise ConfigurationError(
            f"from_mod's function fails for a score of 0 at b = h = q = k = 0: {type(error).__name__}: {error}. It is "
            "called as score_mod(score, b, h, q, k), five tensors without axes"
        ) from error
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        returned = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ConfigurationError(
            f"from_mod's function returned {returned} for one pair; it needs one number in floating point, of shape "
            "(): the score with something added. Booleans are a mask: masks.from_mod"
        )
    if unseen.requires_grad:
        raise ConfigurationError(
            "from_mod's function takes a gradient into a tensor that torch does not see it use, such as one inside an "
            "autograd.Function: read that tensor by indexing, or make it a biases.tensor(...)"
        )
    return trace


def _floating(trace: PairFunctionTrace) -> tuple[Tensor, ...]:
    """The tensors that a function uses and may have a gradient."""
    return tuple(tensor for tensor in trace.captured.values() if is_floating(tensor))


def _ends(positions: Tensor, axis: int) -> Tensor:
    """The first and the last position along an axis."""
    last = positions.shape[axis] - 1
    return positions.index_select(axis, torch.tensor([0, last], device=positions.device)) if last > 1 else positions


def _mapped(function: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """Map a function of single indices over all pairs; the index tensors have equally many axes and broadcast."""
    if not indices[0].ndim:
        return function(*indices)
    several = tuple(0 if len(index) > 1 else None for index in indices)
    rest = [index if len(index) > 1 else index[0] for index in indices]
    if several == (None,) * len(indices):
        return _mapped(function, *rest).unsqueeze(0)

    def one_axis_less(*indices: Tensor) -> Tensor:
        return _mapped(function, *indices)

    return torch.vmap(one_axis_less, several)(*rest)
