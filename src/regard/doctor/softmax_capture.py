"""Statistics of the weights of every attention in a run: torch's softmax, SDPA and MultiheadAttention, regard's own.

They are computed from some rows of weights at a time, and are linear in the lengths.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..attention import scaled_dot_product_attention
from ..core.problem import Problem
from ..core.torch_modes import functorch_active
from ..kernels.hooks import attention_hook
from .examination_report import Place
from .subject import Subject, hooks

SOFTMAX = {torch.softmax, functional.softmax, Tensor.softmax}
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])
CELLS = 512
"""Rows and columns of the weights that are stored: of longer sequences, the largest of some neighbouring weights."""
MOST_READ = 1 << 20
"""Weights that are read at once."""


@dataclass(frozen=True)
class CapturedWeights:
    """Statistics of the weights of one attention, (batch, heads, queries, keys), linear in queries and keys.

    shape: (batch, heads, queries, keys). visible_keys: the keys that the mask leaves to each query. top, first: the
    largest weight of each query, and that of the first key. off_uniform: the largest difference of a query's weights
    from equal ones. These are (batch, heads, queries). apart: (heads, heads), the largest difference of the weights of
    two heads, where heads are compared.
    weights, visible: the largest weight of each cell, and whether the mask leaves any pair of it, (batch, heads, rows,
    columns), where the subject has maps. cell: the queries and keys of a cell, 1 up to CELLS of them.
    kind: 'softmax' of scores in the model's own code, 'sdpa', 'multihead' or 'regard'. place: the innermost module that
    ran, and where it was called from.
    """

    shape: tuple[int, int, int, int]
    visible_keys: Tensor
    top: Tensor
    first: Tensor
    off_uniform: Tensor
    apart: Tensor | None
    cell: tuple[int, int]
    kind: str
    place: Place
    weights: Tensor | None = None
    visible: Tensor | None = None

    @property
    def is_nan(self) -> bool:
        """Whether any weight is NaN."""
        return bool(self.top.isnan().any())


ReadRows: TypeAlias = Callable[[slice], tuple[Tensor, Tensor]]
"""read(rows): the weights of some queries, (batch, heads, rows, keys), and which pairs the mask leaves."""


def _statistics(
    shape: tuple[int, int, int, int], read: ReadRows, *, stores_cells: bool, compares_heads: bool
) -> dict[str, Any]:
    """The fields of `CapturedWeights` that are computed from the weights, read some rows at a time."""
    batch, heads, queries, keys = shape
    cell = (-(-queries // CELLS), -(-keys // CELLS))
    step = max(1, MOST_READ // max(1, batch * heads * keys) // cell[0]) * cell[0]
    parts: list[dict[str, Tensor]] = []
    apart: Tensor | None = None
    for start in range(0, queries, step):
        weights, visible = read(slice(start, start + step))
        weights, visible = weights.detach(), visible.expand_as(weights)
        count = visible.sum(-1)
        part = {"visible_keys": count, "top": weights.amax(-1), "first": weights[..., 0].clone()}
        part["off_uniform"] = (weights - visible / count.unsqueeze(-1).clamp(min=1)).abs().amax(-1)
        if stores_cells:
            part |= {"weights": _largest_of_cells(weights, cell), "visible": _largest_of_cells(visible, cell)}
        parts.append(part)
        if compares_heads:
            differences = _head_differences(weights)
            apart = differences if apart is None else torch.maximum(apart, differences)
    columns = {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}
    return {"shape": shape, "cell": cell, "apart": apart, **columns}


def _head_differences(weights: Tensor) -> Tensor:
    """(heads, heads): the largest difference of the weights of two heads."""
    return torch.stack(
        [(weights - weights[:, head : head + 1]).abs().amax((0, 2, 3)) for head in range(weights.shape[1])]
    )


def _largest_of_cells(pairs: Tensor, cell: tuple[int, int]) -> Tensor:
    """The largest entry of each cell of (..., rows, columns), of which the last ones may be smaller."""
    if cell == (1, 1):
        return pairs.clone()
    rows, columns = pairs.shape[-2:]
    padded = functional.pad(pairs, (0, -columns % cell[1], 0, -rows % cell[0]))
    return padded.unflatten(-1, (-1, cell[1])).amax(-1).unflatten(-2, (-1, cell[0])).amax(-2)


def _calling_line() -> tuple[str | None, int | None]:
    """File and line that called a function of torch, outside torch and regard."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, OURS)):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


class ModuleWatch(TorchFunctionMode):
    """Sees the functions of torch that the modules of a model call; `names` are those that run, outermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def place(self) -> Place:
        """The innermost module, and the line that calls, outside torch and regard."""
        return Place(self.names[-1] if self.names else "", *_calling_line())

    def of(self, model: nn.Module) -> AbstractContextManager[None]:
        """The context in which `names` are those of this model."""

        def leave(*_: Any) -> None:
            self.names.pop()

        return hooks(model, leave, self.names.append)


class _Capture(ModuleWatch):
    """Records weights of torch's functions, and of regard."""

    def __init__(self, lengths: set[int], *, stores_cells: bool, compares_heads: bool) -> None:
        super().__init__()
        self.lengths, self.stores_cells, self.compares_heads = lengths, stores_cells, compares_heads
        self.kind = "regard"
        self.found: list[CapturedWeights] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self._sdpa(*args, **kwargs)
        elif func is functional.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            output, weights = func(*args, **kwargs)
            if weights is not None:
                captured = weights if weights.ndim == 4 else weights.unsqueeze(0)
                self.add(captured.shape, lambda rows: (captured[:, :, rows], captured[:, :, rows] > 0), "multihead")
            return output, weights
        result = func(*args, **kwargs)
        if func in SOFTMAX and not functorch_active():  # the numbers of a mapped tensor cannot be read
            self._softmax(args[0] if args else kwargs["input"], result, args, kwargs)
        return result

    def _softmax(self, scores: Tensor, weights: Any, args: Any, kwargs: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if not isinstance(weights, Tensor) or not isinstance(dim, int) or weights.ndim < 3:
            return
        queries, keys = weights.shape[-2:]
        is_of_positions = queries in self.lengths or any(keys >= length for length in self.lengths)
        if dim % weights.ndim != weights.ndim - 1 or not is_of_positions:
            return
        least = torch.finfo(scores.dtype).min / 2 if scores.is_floating_point() else -torch.inf
        while weights.ndim > 4:  # grouped heads
            weights, scores = weights.flatten(1, 2), scores.flatten(1, 2)
        if weights.ndim == 3:
            weights, scores = weights.unsqueeze(1), scores.unsqueeze(1)

        def read(rows: slice) -> tuple[Tensor, Tensor]:
            part = weights[:, :, rows]
            # A finite mask leaves weights of 0 in all heads, a saturated head in its own alone.
            return part, (scores[:, :, rows] > least) & (part > 0).any(1, keepdim=True)

        self.add(weights.shape, read, "softmax")

    def _sdpa(self, *args: Any, **kwargs: Any) -> None:
        """Record the weights of torch's SDPA: those of the same call of regard, without dropout."""
        settings = inspect.signature(scaled_dot_product_attention).bind(*args, **kwargs).arguments
        self.kind = "sdpa"
        try:
            scaled_dot_product_attention(**{**settings, "dropout_p": 0.0})
        finally:
            self.kind = "regard"

    def on_problem(self, problem: Problem, log_sum_exp: Tensor) -> None:
        """Record the weights of `regard.attention`, exp(score - lse)."""
        kind, least = self.kind, torch.finfo(problem.value.dtype).min / 2

        def read(rows: slice) -> tuple[Tensor, Tensor]:
            scores, lse = problem.scores(rows), log_sum_exp[..., rows].unsqueeze(-1)
            weights = torch.exp(scores - lse).masked_fill(torch.isneginf(lse), 0.0)
            if kind == "sdpa":  # without sinks; exp(score - lse) of scores above 10,000 is rounded far from 1
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
            visible = scores > least
            while weights.ndim < 4:
                weights, visible = weights.unsqueeze(-3), visible.unsqueeze(-3)
            return weights.flatten(0, -4), visible.flatten(0, -4)

        sizes = problem.weights_shape
        while len(sizes) < 4:
            sizes = torch.Size((*sizes[:-2], 1, *sizes[-2:]))
        self.add(torch.Size((sizes[:-3].numel(), *sizes[-3:])), read, kind)

    def add(self, shape: torch.Size, read: ReadRows, kind: str) -> None:
        """Record the weights of (batch, heads, queries, keys), with the module that is running."""
        settings = {"stores_cells": self.stores_cells, "compares_heads": self.compares_heads}
        found = _statistics(tuple(shape), read, **settings)  # type: ignore[arg-type]
        self.found.append(CapturedWeights(**found, kind=kind, place=self.place()))


def capture_weights(
    subject: Subject, sequence: Tensor | None = None, *, compares_heads: bool = False, **changes: Any
) -> list[CapturedWeights]:
    """Statistics of the weights of every attention in one run, in the order of the calls.

    A softmax counts as attention where it runs over the last of at least three axes, and the one before it is as long
    as the sequence. Weights of SDPA are those of `regard.scaled_dot_product_attention` for its arguments.
    """
    lengths = {subject.length, subject.output_length}
    capture = _Capture(lengths, stores_cells=subject.maps, compares_heads=compares_heads)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it computes an encoder layer in one call
    try:
        with capture.of(subject.model), attention_hook(capture.on_problem), capture:
            subject.run(sequence, **changes)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return capture.found
