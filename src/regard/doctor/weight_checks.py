"""Checks of attention weights: empty rows, saturation, dead, duplicate and sink-only heads, and sparse masks."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from .examination_report import ModelFinding, finding
from .finding_map import attention_map
from .padding_masks import without_last
from .rounding_noise import Noise
from .softmax_capture import CapturedWeights, capture_weights
from .subject import SkippedCheck, Subject

SINK_MASS = 0.95
"""A head is sink-only where the first key has this much of the weight of every row, as in papers on attention sinks."""


def captured(subject: Subject, *, compares_heads: bool = False) -> list[CapturedWeights]:
    """The weights of all attentions.

    Raises:
        SkippedCheck: no attention that is known ran.
    """
    found = capture_weights(subject, compares_heads=compares_heads)
    if not found:
        raise SkippedCheck("no softmax over keys, SDPA, MultiheadAttention or regard.attention ran")
    return found


def _tokens(subject: Subject, queries: int) -> Tensor:
    """(batch, queries): True where the batch's mask has a token."""
    mask = subject.inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == (subject.batch_size, queries):
        return mask.bool()
    return torch.ones(subject.batch_size, queries, dtype=torch.bool, device=subject.sequence.device)


def check_rows(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN110: rows of tokens that attend to nothing, and outputs that are NaN."""
    found = []
    outputs = subject.outputs()
    lost = outputs.isnan().any(-1)
    if bool(lost.any()):
        row, position = (int(index) for index in lost.nonzero()[0])
        found.append(finding("RUN110", f"outputs are NaN, first in row {row} of the batch", moved=position))
    for one in capture_weights(subject) if found else captured(subject):
        empty = one.visible_keys == 0
        if empty.shape[0] != subject.batch_size:
            continue
        empty = empty & _tokens(subject, empty.shape[-1])[:, None]
        if bool(empty.any()):
            row, head, position = (int(index) for index in empty.nonzero()[0])
            message = f"{int(empty.sum())} rows have no key, first head {head} in row {row} of the batch"
            maps = attention_map(subject, one, head, (position, 0), row)
            return [*found, finding("RUN110", message, one.place, moved=position, maps=maps)]
    return found


def _heads(which: Tensor) -> str:
    numbers = [int(index) for index in which.nonzero().flatten()]
    return ("head " if len(numbers) == 1 else "heads ") + ", ".join(map(str, numbers))


def check_heads(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN111 to 114: heads whose weights are saturated, uniform, those of another head, or all on the first key."""
    found: list[ModelFinding] = []
    unit = torch.finfo(next(subject.model.parameters(), torch.zeros(())).dtype).eps
    tolerance = max(unit, torch.finfo(torch.float32).eps) * 8  # a softmax may be computed in float32
    for one in captured(subject, compares_heads=True):
        eligible = one.visible_keys >= 2
        if one.is_nan or not bool(eligible.any()):
            continue
        rows = eligible.sum((0, 2))
        saturated = ((1 - one.top <= tolerance) & eligible).sum((0, 2)) * 2 > rows
        dead = ((one.off_uniform * eligible).amax((0, 2)) <= tolerance) & (rows > 0)
        sink = ((one.first >= SINK_MASS) | ~eligible).all(2).all(0) & (rows > 0) & ~saturated
        on_first = ((one.first >= 1 - tolerance) | ~eligible).all(2).all(0) & (rows > 0)
        sink, saturated = sink | on_first, saturated & ~on_first
        for which, code, words in (
            (saturated, "RUN111", "more than half of the rows of {} have one weight of 1: no gradient passes"),
            (dead, "RUN112", "{}: all weights of a row are equal, whatever the input"),
            (sink, "RUN114", "{}: every row attends to the first key alone"),
        ):
            if bool(which.any()):
                maps = attention_map(subject, one, int(which.nonzero()[0]))
                message = words.format(_heads(which))
                found.append(finding(code, message, one.place, tolerance=tolerance, maps=maps))
        found += _duplicates(subject, one, dead | sink | saturated, tolerance)
    return found


def _duplicates(subject: Subject, one: CapturedWeights, known: Tensor, tolerance: float) -> list[ModelFinding]:
    if one.apart is None:
        return []
    pairs = [
        (first, second)
        for first in range(one.shape[1])
        for second in range(first + 1, one.shape[1])
        if not bool(known[first] | known[second]) and float(one.apart[first, second]) <= tolerance
    ]
    if not pairs:
        return []
    named = "; ".join(f"{first} and {second}" for first, second in pairs)
    maps = attention_map(subject, one, pairs[0][0]) + attention_map(subject, one, pairs[0][1])
    return [finding("RUN113", f"heads {named} have the same weights", one.place, tolerance=tolerance, maps=maps)]


def check_sparse(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN130: the pairs that a mask leaves grow like the length, those that are computed like its square.

    Counted at the whole and at half the length of the batch: twice as many, or four times.
    """
    half = subject.length // 2
    if half < 8:
        raise SkippedCheck("the sequence is shorter than 16")
    whole = [one for one in captured(subject) if one.kind != "regard"]
    shorter = _half(subject, half)
    found, seen = [], set()
    for one, other in zip(whole, shorter, strict=False):
        left, left_half = float(one.visible_keys.sum()), float(other.visible_keys.sum())
        computed, computed_half = math.prod(one.shape), math.prod(other.shape)
        is_square = computed >= 3 * computed_half
        if not is_square or left_half == 0 or left / left_half > 3 or one.place[1:] in seen:
            continue
        seen.add(one.place[1:])
        message = (
            f"{left / computed:.0%} of {computed:,} pairs exist and all are computed; from {half} to {subject.length} "
            f"tokens the pairs of the mask grow {left / left_half:.1f} times, the computed ones "
            f"{computed / computed_half:.1f} times"
        )
        found.append(finding("RUN130", message, one.place, maps=attention_map(subject, one)))
    return found


def _half(subject: Subject, half: int) -> list[CapturedWeights]:
    short, cut = copy.copy(subject), without_last(subject, subject.length - half)
    short.inputs = {**subject.inputs, subject.key: subject.sequence[:, :half]}
    return [one for one in capture_weights(short, short.sequence, **cut) if one.kind != "regard"]
