"""Checks of how far attention reaches: windows that a module states and does not keep, and positions that never mix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .examination_report import ModelFinding, finding
from .finding_map import attention_of_module, influence_map, moves
from .formula_trace import trace_formulas
from .module_trace import ModuleCall, length_axis, trace
from .rounding_noise import Noise
from .subject import SkippedCheck, Subject, largest

WINDOWS = ("window", "window_size", "sliding_window", "local_window", "attention_window")
"""Attributes by which modules state how many positions they see."""


def stated_window(module: nn.Module) -> int | None:
    """The number of positions that a module says to see."""
    for name in WINDOWS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def check_window(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN108: most outputs of a module move with a position that is farther away than the window that it states.

    One position of its input is changed at a time. Positions of global attention move few outputs, or few move all,
    and are not reported. A window of n · n tokens is a window of a picture, n wide.
    """
    found, seen = [], set[type[nn.Module]]()
    for call in trace(subject):
        window = stated_window(call.module)
        if window is None or type(call.module) in seen or call.output is None:
            continue
        if window + 1 >= subject.length or window**2 == subject.length:
            continue
        seen.add(type(call.module))
        for changed in (subject.length // 2, 0, subject.length - 1):
            far = _far_moves(subject, call, changed, window, noise)
            if far is not None:
                message = f"a window of {window} is stated, and most outputs farther away move"
                maps = attention_of_module(subject, call.name, lambda query, key, far=window: (query - key).abs() > far)
                found.append(finding("RUN108", message, call.place(), changed=changed, maps=maps, **far))
                break
    return found


def _far_moves(subject: Subject, call: ModuleCall, changed: int, window: int, noise: Noise) -> dict[str, Any] | None:
    """The evidence of the farthest position that moves, where most positions beyond the window do."""

    def change(value: Tensor) -> Tensor:
        other = value.clone()
        other[:, changed] = subject.others(value)[:, changed]
        return other

    output = call.again(subject, change)
    axis = length_axis(call.output, subject) if call.output is not None else None
    if output is None or call.output is None or axis is None or output.shape != call.output.shape:
        return None
    by_position = moves(output - call.output, axis)
    away = torch.arange(subject.length, device=by_position.device) - changed
    far, moved = away.abs() > window, by_position > noise.other_shape
    for beyond in (far & (away > 0), far):
        if int((beyond & moved).sum()) * 2 > int(beyond.sum()):
            position = int((away.abs() * (beyond & moved)).argmax())
            return {"moved": position, "by": float(by_position[position]), "tolerance": noise.other_shape}
    return None


def check_mixing(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN109: no output depends on another position, though the model has an attention."""
    if subject.pooled:
        raise SkippedCheck(subject.outputs_in_words)
    if noise.is_random:
        raise SkippedCheck("evaluation is random")
    base, changed = subject.outputs(), subject.others(subject.sequence)
    for position in {0, subject.length // 2, subject.length - 1}:
        other = changed.clone()
        other[:, position] = subject.sequence[:, position]
        if largest((subject.outputs(other) - base)[:, position]) > noise.same_shape:
            return []
    softmaxes = trace_formulas(subject).softmaxes
    attends = any(isinstance(one, nn.MultiheadAttention) for one in subject.model.modules()) or bool(softmaxes)
    if not attends:
        raise SkippedCheck("the model has no softmax")
    message = "no output depends on another position of the sequence: attention runs over another axis"
    return [finding("RUN109", message, maps=influence_map(subject, noise.same_shape, at=(0, 0)))]
