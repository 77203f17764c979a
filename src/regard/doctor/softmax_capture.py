"""The weights of every attention in a run: torch's softmax, SDPA and MultiheadAttention, and regard's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..core.problem import Problem
from ..kernels.hooks import attention_hook
from .subject import Subject

SOFTMAX = {torch.softmax, functional.softmax, Tensor.softmax}
TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class CapturedWeights:
    """Weights of one attention: (batch, heads, queries, keys), and which pairs its mask leaves.

    kind: 'softmax' of scores in the model's own code, 'sdpa', 'multihead' or 'regard'. module: the innermost module
    that ran. file, line: where it was called from, outside torch.
    """

    weights: Tensor
    visible: Tensor
    kind: str
    module: str
    file: str | None
    line: int | None

    def place(self) -> dict[str, Any]:
        """Module, file and line, as evidence takes them."""
        return {"module": self.module, "file": self.file, "line": self.line}


def _caller() -> tuple[str | None, int | None]:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((TORCH, OURS)):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


class _Capture(TorchFunctionMode):
    """Records weights of torch's functions; `names` holds the modules that are running, outermost first."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.names: list[str] = []
        self.found: list[CapturedWeights] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self._sdpa(*args, **kwargs)
        elif func is functional.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            output, weights = func(*args, **kwargs)
            if weights is not None:
                weights = weights if weights.ndim == 4 else weights.unsqueeze(0)
                self.add(weights, weights > 0, "multihead")
            return output, weights
        result = func(*args, **kwargs)
        if func in SOFTMAX:
            self._softmax(args[0] if args else kwargs["input"], result, args, kwargs)
        return result

    def _softmax(self, scores: Tensor, weights: Any, args: Any, kwargs: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if not isinstance(weights, Tensor) or not isinstance(dim, int) or weights.ndim < 3:
            return
        if dim % weights.ndim != weights.ndim - 1 or weights.shape[-1] < self.length != weights.shape[-2]:
            return
        least = torch.finfo(scores.dtype).min / 2 if scores.is_floating_point() else -torch.inf
        while weights.ndim > 4:  # grouped heads
            weights, scores = weights.flatten(1, 2), scores.flatten(1, 2)
        if weights.ndim == 3:
            weights, scores = weights.unsqueeze(1), scores.unsqueeze(1)
        # A finite mask leaves weights of 0 in all heads, a saturated head in its own alone.
        self.add(weights, (scores > least) & (weights > 0).any(1, keepdim=True), "softmax")

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if enable_gqa and key.ndim > 3:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query @ key.transpose(-1, -2) * factor
        visible = torch.ones_like(scores, dtype=torch.bool)
        if is_causal:
            visible = visible.tril()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                visible = visible & attn_mask
            else:
                scores = scores + attn_mask
                visible = visible & (attn_mask > torch.finfo(scores.dtype).min / 2)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        while weights.ndim < 4:
            weights, visible = weights.unsqueeze(-3), visible.unsqueeze(-3)
        self.add(weights.flatten(0, -4), visible.flatten(0, -4), "sdpa")

    def on_problem(self, problem: Problem, log_sum_exp: Tensor) -> None:
        """Record the weights of `regard.attention`."""
        weights = torch.exp(problem.scores() - log_sum_exp.unsqueeze(-1))
        empty = torch.isneginf(log_sum_exp).unsqueeze(-1)
        weights = weights.masked_fill(empty, 0.0)
        while weights.ndim < 4:
            weights = weights.unsqueeze(0)
        self.add(weights, weights > 0, "regard")

    def add(self, weights: Tensor, visible: Tensor, kind: str) -> None:
        """Record weights of (batch, heads, queries, keys), with the module that is running."""
        file, line = _caller()
        name = self.names[-1] if self.names else ""
        weights = weights.detach()
        self.found.append(CapturedWeights(weights, visible.expand_as(weights), kind, name, file, line))


@contextmanager
def _naming(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Append the name of each module while it runs."""

    def enter(name: str) -> Any:
        return lambda module, arguments: names.append(name)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        names.pop()

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def capture_weights(subject: Subject, sequence: Tensor | None = None, **changes: Any) -> list[CapturedWeights]:
    """The weights of every attention in one run, in the order of the calls.

    A softmax counts as attention where it runs over the last of at least three axes, and the one before it is as long
    as the sequence. Weights of SDPA are computed from its queries and keys.
    """
    capture = _Capture(subject.length)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it computes an encoder layer in one call
    try:
        with _naming(subject.model, capture.names), attention_hook(capture.on_problem), capture:
            subject.run(sequence, **changes)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return capture.found
