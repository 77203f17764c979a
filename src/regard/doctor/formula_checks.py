"""Checks of the formula that a model computes: scale, sums of the weights, finite masks, precision of the softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard_doctor.finding import Severity

from .examination_report import ModelFinding, Place, finding
from .finding_map import attention_of_module
from .formula_trace import FormulaTrace, trace_formulas
from .leaks import second_document
from .module_trace import ModuleCall, trace
from .padding_masks import padded_row, padding_keywords
from .rounding_noise import Noise
from .subject import SkippedCheck, Subject

LEAST_MASK, MOST_MASK = -1e6, -50.0
"""Scores between these, far from all others, are those of a mask that trained scores can reach."""
TABLES = 1e-3
"""Relative differences below this come from tables of sines and cosines in float32 or in half precision."""


def _once(found: list[ModelFinding]) -> list[ModelFinding]:
    """Findings of different lines."""
    by_line = {(one.evidence.file, one.evidence.line, one.message): one for one in found}
    return list(by_line.values())


def _with_weights(subject: Subject, code: str, message: str, place: Place, **settings: Any) -> ModelFinding:
    """A finding with the weights of its module."""
    return finding(code, message, place, maps=attention_of_module(subject, place.module), **settings)


def check_scale(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN115: dot products reach the softmax with another factor than 1/√d, d the length of their vectors.

    All numbers that multiply queries, keys and scores after the last layer are multiplied; what a norm or a learned
    temperature does to them is not known, and not reported.
    """
    found, config = [], getattr(subject.model, "config", None)
    for one in trace_formulas(subject).softmaxes:
        factor, dim = one.origin.factor, one.origin.dim
        if math.isnan(factor) or dim is None or dim < 2 or math.isclose(factor * dim**0.5, 1.0, rel_tol=1e-2):
            continue
        message = f"dot products of {dim} numbers are multiplied by {factor:.4g} before the softmax; "
        message += f"1/√d is {dim**-0.5:.4g}"
        why, severity = _published(factor, dim, config), None
        if why is not None:
            message, severity = f"{message}: so it is published, {why}", Severity.HINT
        found.append(_with_weights(subject, "RUN115", message, one.place, severity=severity))
    return _once(found)


WITHOUT_SCALE = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop", "pix2struct_text_model")
"""Kinds of transformers' models without 1/√d: Raffel et al. 2020 let the initialization of the queries have it."""


def _published(factor: float, dim: int, config: Any) -> str | None:
    """Why a model of transformers has this factor, where that is known."""
    kind, stated = getattr(config, "model_type", ""), getattr(config, "query_pre_attn_scalar", None)
    if kind in WITHOUT_SCALE and math.isclose(factor, 1.0):
        return "with weights that begin smaller"
    parts = 1 + len(getattr(config, "pos_att_type", None) or ())
    if kind.startswith("deberta") and math.isclose(factor, (parts * dim) ** -0.5, rel_tol=1e-3):
        return f"for a sum of {parts} products"  # He et al. 2021, equation 4
    if isinstance(stated, (int, float)) and stated > 0 and math.isclose(factor, stated**-0.5, rel_tol=1e-3):
        return f"with query_pre_attn_scalar={stated:g}"
    return None


def check_sums(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN117: the weights that multiply the values do not sum to 1 over them, or are a softmax over one number.

    So it is where the softmax runs over another axis than that of the keys, or is changed afterwards.
    """
    if noise.is_random:
        raise SkippedCheck("evaluation is random: a dropout changes the sums")
    trace, found = trace_formulas(subject), []
    for total in trace.sums:
        # A softmax may be computed in float32 and converted.
        tolerance = max(torch.finfo(total.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
        if max(abs(total.least - 1), abs(total.most - 1)) > tolerance:
            message = f"the weights that multiply the values sum to {total.least:.3g} to {total.most:.3g}, not to 1"
            found.append(_with_weights(subject, "RUN117", message, total.place, tolerance=tolerance))
    for one in trace.softmaxes:
        if one.length == 1 and one.rows is not None and one.rows > 1:
            found.append(finding("RUN117", "the softmax runs over an axis of length 1: every weight is 1", one.place))
    return _once(found)


def beatable_mask(scores: Tensor) -> float | None:
    """The finite number that a mask has put in scores, if scores could become as low; None where there is none.

    Scores of a mask are those between LEAST_MASK and MOST_MASK that are close together, and far below all others.
    """
    finite = scores[scores.isfinite()].double()
    if finite.numel() < 2:
        return None
    lowest = float(finite.min())
    low, rest = finite[finite < lowest / 2], finite[finite >= lowest / 2]
    if not LEAST_MASK < lowest < MOST_MASK or not rest.numel():
        return None
    is_apart = float(rest.min()) > lowest / 4 and float(low.max()) - lowest <= -lowest / 4
    return float(low.mean()) if is_apart else None


def check_finite_masks(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN118: masked pairs have a score of some hundreds or thousands below 0, which other scores can reach."""
    found, places = [], set[Place]()
    runs = [trace_formulas(subject, mask_of=beatable_mask)]
    try:
        sequence, keep, _ = padded_row(subject, max(1, subject.length // 4), "right")
        runs.append(trace_formulas(subject, sequence, mask_of=beatable_mask, **padding_keywords(subject, keep)))
    except SkippedCheck:  # without a padding mask
        pass
    for one in (softmax for run in runs for softmax in run.softmaxes):
        if one.mask is not None and one.place not in places:
            places.add(one.place)
            message = f"masked scores are about {one.mask:.4g}: "
            message += "scores that training makes as low are attended to instead"
            found.append(_with_weights(subject, "RUN118", message, one.place))
    return found


def check_precision(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN119: the softmax of scores is computed in half precision, in the model's own dtype."""
    found = []
    for one in trace_formulas(subject.original or subject).softmaxes:
        if one.rows is not None and one.dtype in (torch.float16, torch.bfloat16) and one.origin.dim is not None:
            words = str(one.dtype).removeprefix("torch.")
            message = f"the softmax of scores is computed in {words}: sums over many keys lose their small weights"
            found.append(finding("RUN119", message, one.place))
    return _once(found)


def check_rotary(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN116: rotary positions that do not act by distance alone, or are in the values.

    Each module that computes rotary attention is called with one vector at all positions: its scores may then depend on
    the distance of two positions alone, and its values on nothing.
    """
    if second_document(subject) is not None:
        raise SkippedCheck("positions of the batch start again")
    found, seen = [], set[type[torch.nn.Module]]()
    attending = {one.place.module for one in trace_formulas(subject).softmaxes}
    calls = [call for call in trace(subject) if call.name in attending and _is_rotary(call)]
    if not calls:
        raise SkippedCheck("no module with rotary positions attends")
    for call in calls:
        if type(call.module) in seen:
            continue
        seen.add(type(call.module))
        words = _rotary_fault(subject, call)
        if words is not None:
            found.append(finding("RUN116", f"with one vector at all positions, {words}", call.place()))
    return found


def _is_rotary(call: ModuleCall) -> bool:
    names = [*vars(call.module), *call.keywords, *(name for name, _ in call.module.named_children())]
    return any(word in name.lower() for name in names for word in ("rope", "rotary", "position_embeddings"))


def _rotary_fault(subject: Subject, call: ModuleCall) -> str | None:
    """What is wrong with the positions in a module's scores and values; None where nothing is, or it does not run."""
    found = FormulaTrace(keeps_tensors=True)
    with found:
        if call.again(subject, lambda value: value[:, :1].expand_as(value).contiguous()) is None:
            return None
    for value in found.values:
        if value.ndim > 2 and value.shape[-2] == subject.length:
            moves = (value[..., 1:, :] - value[..., :-1, :]).abs().max() if subject.length > 1 else 0.0
            if float(moves) > TABLES * float(value.abs().max()):
                return "values differ from position to position: the rotation is applied to them, too"
    for one in found.softmaxes:
        scores = one.scores
        if scores is None or scores.shape[-2:] != (subject.length, subject.length):
            continue
        scores = scores.masked_fill(scores < torch.finfo(scores.dtype).min / 2, -torch.inf)
        moves = (scores[..., 1:, 1:] - scores[..., :-1, :-1]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
        size = scores[scores.isfinite()].abs().max() if bool(scores.isfinite().any()) else moves
        if float(moves) > TABLES * float(size):
            return "scores of pairs at the same distance differ: the rotation does not fit its table"
    return None
