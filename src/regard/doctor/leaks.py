"""Checks that change tokens which outputs must not depend on: future, padding, documents, batch; and their order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard_doctor.finding import Severity

from .examination_report import ModelFinding, finding
from .finding_map import IsWrong, Maps, attention_of_module, difference_map, disagreement, influence_map
from .module_trace import ModuleCall, first_moved, first_moved_by, length_axis, trace
from .padding_masks import (
    padded_row,
    padding_keywords,
    padding_token,
    reads_source,
    source_mask,
    source_of,
    without_last,
)
from .subject import DOCUMENTS, Noise, SkippedCheck, Subject, largest

PREFIXES = (1, 3, 7, 15, 31, 32, 63)
"""Lengths of the prefixes whose outputs must not move: before, at and behind the borders of blocks."""


def _with_suffix(subject: Subject, start: int, stop: int | None = None) -> Tensor:
    changed = subject.sequence.clone()
    changed[:, start:stop] = subject.others(subject.sequence)[:, start:stop]
    return changed


def _place(call: ModuleCall | None) -> dict[str, Any]:
    return {} if call is None else call.place()


def _largest_move(difference: Tensor, axis: int = 1) -> tuple[int, float]:
    """The position of the largest difference, and its size."""
    moves = difference.abs().nan_to_num(nan=torch.inf).movedim(axis, 0).flatten(1).amax(1)
    return int(moves.argmax()), float(moves.max())


def check_future(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN101: outputs before a position move when tokens from it on change.

    Without knowledge whether the model is causal, one whose outputs move at every prefix is taken for an
    encoder. Where an output predicts the token of its own position (`predicts_own`), it must not move with that, too.
    """
    if subject.causal is False:
        raise SkippedCheck("the model is bidirectional")
    if subject.pooled:
        raise SkippedCheck(subject.outputs_in_words)
    prefixes = [prefix for prefix in PREFIXES if prefix < subject.length]
    if not prefixes:
        raise SkippedCheck("the sequence has one position")
    base, leaking = subject.outputs(), []
    for prefix in prefixes:
        until = slice(prefix + subject.names.predicts_own)
        moved = subject.outputs(_with_suffix(subject, prefix))[:, until] - base[:, until]
        if largest(moved) > noise.same_shape:
            leaking.append(prefix)
    if not leaking:
        return []
    if subject.causal is None and len(leaking) == len(prefixes):
        raise SkippedCheck(
            "every output depends on later tokens, as in an encoder: for a decoder pass causal=True (--causal)"
        )
    prefix = leaking[0]
    until = slice(prefix + subject.names.predicts_own)
    token = _first_token_that_moves(subject, base, prefix, until, noise)
    other = _with_suffix(subject, token, token + 1)
    position, by = _largest_move(subject.outputs(other)[:, until] - base[:, until])
    if by <= noise.same_shape:  # only several tokens together move it
        other = _with_suffix(subject, prefix)
        position, by = _largest_move(subject.outputs(other)[:, until] - base[:, until])
    call = first_moved_by(subject, (None, _with_suffix(subject, prefix)), until, noise.same_shape)
    where = "up to" if subject.names.predicts_own else "before"
    return [
        finding(
            "RUN101",
            f"outputs {where} position {', '.join(map(str, leaking))} depend on tokens from there on",
            changed=token,
            moved=position,
            by=by,
            tolerance=noise.same_shape,
            maps=_leak_maps(subject, call, noise, at=(position, token), is_wrong=lambda query, key: key > query),
            **_place(call),
        )
    ]


def _leak_maps(
    subject: Subject,
    call: ModuleCall | None,
    noise: Noise,
    *,
    at: tuple[int, int],
    is_wrong: IsWrong,
    row: int | None = None,
    **inputs: Any,
) -> Maps:
    """The influence of tokens on outputs, and the weights of the module that a leak enters by."""
    attention = attention_of_module(subject, "" if call is None else call.name, is_wrong, **inputs)
    return influence_map(subject, noise.same_shape, at=at, row=row, **inputs) + attention


def _reads_padding(keep: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Where a token attends to padding."""
    return keep[query] & ~keep[key]


def _reads_before(border: int, query: Tensor, key: Tensor) -> Tensor:
    """Where a position from `border` on attends to one before it."""
    return (query >= border) & (key < border)


def _first_token_that_moves(subject: Subject, base: Tensor, prefix: int, until: slice, noise: Noise) -> int:
    """The last start from which a changed suffix still moves outputs `until` a position, by bisection."""
    low, high = prefix, subject.length
    while high - low > 1:
        middle = (low + high) // 2
        moved = subject.outputs(_with_suffix(subject, middle))[:, until] - base[:, until]
        low, high = (middle, high) if largest(moved) > noise.same_shape else (low, middle)
    return low


def check_batch(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN107: the outputs of a row move when the other rows change."""
    if subject.batch_size < 2:
        raise SkippedCheck("the batch has one row")
    changed = subject.sequence.clone()
    changed[1:] = subject.others(subject.sequence)[1:]
    difference = subject.outputs(changed)[:1] - subject.outputs()[:1]
    position, by = _largest_move(difference)
    if by <= noise.same_shape:
        return []
    call = _first_batch_leak(subject, changed, noise)
    message = "the first row of the batch moves when the others change"
    maps = difference_map(subject, difference, noise.same_shape, title="Outputs of the first row when others change")
    return [finding("RUN107", message, moved=position, by=by, tolerance=noise.same_shape, maps=maps, **_place(call))]


def _first_batch_leak(subject: Subject, changed: Tensor, noise: Noise) -> ModuleCall | None:
    def moved(first: Tensor, second: Tensor) -> bool:
        same = first.shape == second.shape and first.is_floating_point() and first.ndim > 1
        if not same or first.shape[0] != subject.batch_size:
            return False
        return largest(torch.nan_to_num(second[0] - first[0])) > noise.same_shape

    for call, other in zip(trace(subject), trace(subject, changed), strict=False):
        if call.name != other.name or call.output is None or other.output is None:
            continue
        inputs = zip(call.inputs(), other.inputs(), strict=False)
        if moved(call.output, other.output) and not any(moved(one, two) for one, two in inputs):
            return call
    return None


def _severity(subject: Subject, side: str) -> Severity:
    """Padding on the right is everyone's; that on the left is of those who continue texts in batches.

    The target of an encoder-decoder begins with one token in every row.
    """
    continues = hasattr(subject.model, "generate") and not reads_source(subject)
    return Severity.ERROR if side == "right" or continues else Severity.WARNING


def check_padding(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN103, 104, 105 and 110: padding moves outputs of tokens, by what it is or where it is, or makes them NaN."""
    amount = max(1, min(5, subject.length // 3))
    if subject.length < 3:
        raise SkippedCheck("the sequence is shorter than 3")
    alone = _shorter_outputs(subject, amount)
    found = []
    for side in ("right", "left"):
        sequence, keep, place = padded_row(subject, amount, side)
        try:
            mask = padding_keywords(subject, keep)
        except SkippedCheck:
            if side == "right":
                raise
            continue  # lengths say nothing of padding on the left
        if subject.pooled:
            place = slice(None)
        first = subject.outputs(sequence, **mask)[0, place]
        if first.shape != alone.shape:
            raise SkippedCheck("the outputs of a shorter sequence have another shape")
        if bool(first.isnan().any()):
            message = f"outputs of tokens are NaN with masked padding on the {side}, in {first.dtype}"
            moved = int(first.isnan().any(-1).nonzero()[0]) + (place.start or 0)
            found.append(finding("RUN110", message, severity=_severity(subject, side), moved=moved))
            continue
        other = sequence.clone()
        inside = torch.where(keep[0])[0]
        other[0] = subject.others(sequence)[0]
        other[0, inside] = sequence[0, inside]
        by_token = subject.names.padding is None and subject.names.pad_token is not None
        if by_token:  # padding is this token, and no other
            other = sequence
        position, by = _largest_move(subject.outputs(other, **mask)[0, place] - first, axis=0)
        # A model may find padding by its token: then other tokens there are no padding, and its own changes nothing.
        told_by_token = padding_token(subject) is not None and largest(first - alone) <= noise.other_shape
        if by > noise.same_shape and not told_by_token:
            call = first_moved_by(subject, (sequence, other), place, noise.same_shape, **mask)
            message = f"outputs of tokens depend on what the padding on the {side} is, though it is masked"
            evidence = {"moved": position + (place.start or 0), "by": by, "tolerance": noise.same_shape}
            at = position + (place.start or 0), int((~keep[0]).nonzero()[0])
            is_wrong = partial(_reads_padding, keep[0])
            maps = _leak_maps(subject, call, noise, at=at, is_wrong=is_wrong, row=0, sequence=sequence, **mask)
            # An output for each row may be that of the first position, which is padding then.
            severity = Severity.WARNING if side == "left" and subject.pooled else Severity.ERROR
            found.append(finding("RUN103", message, severity=severity, maps=maps, **evidence, **_place(call)))
            continue
        position, by = _largest_move(first - alone, axis=0)
        if by > noise.other_shape:
            maps = difference_map(
                subject,
                (first - alone)[None],
                noise.other_shape,
                title="Outputs of tokens with and without padding",
                first=place.start or 0,
            )
            moves = _padding_moves(subject, side, sequence, mask, alone, place, position, by, noise)
            found.append(replace(moves, maps=maps))
    return found


def _shorter_outputs(subject: Subject, amount: int) -> Tensor:
    """The outputs of the first row without its last tokens, unpadded."""
    sequence = subject.sequence[:, : subject.length - amount]
    keywords = without_last(subject, amount)
    if subject.names.padding is not None:
        whole = torch.ones(sequence.shape[:2], dtype=torch.bool, device=sequence.device)
        keywords |= padding_keywords(subject, whole)
    return subject.outputs(sequence, **keywords)[0]


def _padding_moves(
    subject: Subject,
    side: str,
    sequence: Tensor,
    mask: dict[str, Tensor],
    alone: Tensor,
    place: slice,
    position: int,
    by: float,
    noise: Noise,
) -> ModelFinding:
    why, severity = "", _severity(subject, side)
    if "position_ids" in subject.parameters and side == "left":
        positions = torch.arange(subject.length, device=sequence.device).repeat(subject.batch_size, 1)
        positions[0] = (positions[0] - (place.start or 0)).clamp(min=0)
        try:
            shifted: dict[str, Any] = {**mask, "position_ids": positions}
            again = subject.outputs(sequence, **shifted)[0, place]
            if largest(again - alone) <= noise.other_shape:
                why = ": positions count the padding; position_ids of the tokens alone mend it"
                severity = Severity.WARNING  # `generate` passes them
        except Exception:
            why = ""
    return finding(
        "RUN104" if side == "left" else "RUN105",
        f"masked padding on the {side} changes results{why}",
        severity=severity,
        moved=position + (place.start or 0),
        by=by,
        tolerance=noise.other_shape,
    )


def check_source(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN103, 104 and 105 of an encoder-decoder: masked padding of the source moves outputs."""
    name, source = source_of(subject)
    mask = source_mask(subject, name)
    amount = max(1, source.shape[1] // 4)
    whole = torch.ones(source.shape[:2], dtype=torch.bool, device=source.device)
    words = 0 if source.is_floating_point() else int(source.max()) + 1
    alone = subject.outputs(**{name: source, **mask(whole)})
    first, second = (subject.others(source, seed, words)[:, :amount] for seed in (3, 4))
    if not mask(whole):  # padding is one token, and no other
        first = second = torch.full_like(first, subject.names.pad_token or 0)
    found = []
    for side, code in (("right", "RUN105"), ("left", "RUN104")):
        parts, again, keep = [source, first], [source, second], [whole, ~whole[:, :amount]]
        if side == "left":
            parts, again, keep = parts[::-1], again[::-1], keep[::-1]
        severity = Severity.WARNING if side == "left" else Severity.ERROR  # sources are padded on the right
        keywords = mask(torch.cat(keep, 1))
        padded = subject.outputs(**{name: torch.cat(parts, 1), **keywords})
        same = subject.outputs(**{name: torch.cat(again, 1), **keywords})
        message = f"outputs depend on what the padding on the {side} of the source is, though it is masked"
        moves = disagreement(subject, "RUN103", message, same - padded, noise.same_shape, severity=severity)
        if not moves:
            message = f"{amount} tokens of masked padding on the {side} of the source change results"
            title = "Outputs with and without padding of the source"
            settings = {"title": title, "severity": severity}
            moves = disagreement(subject, code, message, padded - alone, noise.other_shape, **settings)
        found += moves
    return found


def check_documents(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN102: outputs of a document move when the one packed before it changes.

    Documents are told apart by an argument of their own, or by positions that start again: without a mask, and with
    the mask of ones that tokenizers return.
    """
    name = subject.argument(DOCUMENTS)
    by_positions = "position_ids" in subject.parameters
    border = second_document(subject)
    if subject.packed is False or (subject.packed is None and name is None and border is None):
        raise SkippedCheck("the batch has no packed documents: positions that start again, or document ids")
    if name is None and not by_positions:
        raise SkippedCheck("the model takes neither position_ids nor document ids")
    if subject.pooled:
        raise SkippedCheck(subject.outputs_in_words)
    if subject.length < 2:
        raise SkippedCheck("the sequence has one position")
    without = {"use_cache": False} if "use_cache" in subject.parameters else {}  # transformers' packing wants none
    if border is not None:
        ways: list[tuple[str, dict[str, Any]]] = [("as in the batch", {})]
    else:
        border = subject.length // 2
        ways = _ways_to_pack(subject, border, name)
    found = []
    for words, changes in ways:
        keywords = {**changes, **without}
        other = _with_suffix(subject, 0, border)
        difference = subject.outputs(other, **keywords)[:, border:] - subject.outputs(**keywords)[:, border:]
        position, by = _largest_move(difference)
        if by > noise.same_shape:
            call = first_moved_by(subject, (None, other), slice(border, None), noise.same_shape, **keywords)
            message = f"the second of two documents packed {words} depends on the first"
            evidence = {"changed": border - 1, "moved": border + position, "by": by, "tolerance": noise.same_shape}
            is_wrong = partial(_reads_before, border)
            at = border + position, border - 1
            maps = _leak_maps(subject, call, noise, at=at, is_wrong=is_wrong, **keywords)
            found.append(finding("RUN102", message, maps=maps, **evidence, **_place(call)))
    return found


def second_document(subject: Subject) -> int | None:
    """Where the second document of the batch begins, in every row; None where there is none."""
    for name in (*DOCUMENTS, "position_ids"):
        given = subject.keywords.get(name)
        if isinstance(given, Tensor) and given.shape == subject.sequence.shape[:2]:
            starts = given[:, 1:] < given[:, :-1] if name == "position_ids" else given[:, 1:] != given[:, :-1]
            common = starts.all(0).nonzero()
            if len(common):
                return int(common[0]) + 1
    return None


def _ways_to_pack(subject: Subject, border: int, name: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Two documents in each row, by document ids or by positions that start again, and keywords that say so."""
    index = torch.arange(subject.length, device=subject.sequence.device).repeat(subject.batch_size, 1)
    positions = torch.where(index < border, index, index - border)
    if name is not None:
        keywords: dict[str, Any] = {name: (index >= border).long()}
        if "position_ids" in subject.parameters:
            keywords["position_ids"] = positions
        return [(f"by {name}", keywords)]
    ways: list[tuple[str, dict[str, Any]]] = [
        ("by position_ids, without a mask", {"position_ids": positions, "attention_mask": None})
    ]
    if "attention_mask" in subject.parameters:
        ones = {"position_ids": positions, "attention_mask": torch.ones_like(index)}
        ways.append(("by position_ids, with a mask of ones", ones))
    return ways


def check_positions(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN106: another order of the tokens gives the same outputs in that order.

    Of a causal model the modules are checked: the output at the last position of the first that mixes tokens, and of
    every module of its class for permuted inputs.
    """
    if subject.length < 4:
        raise SkippedCheck("the sequence is shorter than 4")
    generator = torch.Generator().manual_seed(2)
    last = subject.length - 1
    order = torch.randperm(last, generator=generator).to(subject.sequence.device)
    if bool((order == order.sort().values).all()):
        order = order.flip(0)
    order = torch.cat([order, torch.tensor([last], device=order.device)])
    permuted = subject.sequence[:, order]
    if bool((permuted == subject.sequence).all()):
        raise SkippedCheck("all tokens are the same")
    base, other = subject.outputs(), subject.outputs(permuted)
    moved = largest((subject.outputs(_with_suffix(subject, 0, last)) - base)[:, -1])
    if moved <= noise.other_shape:
        raise SkippedCheck("other tokens move the last output no more than rounding does")
    difference = largest(other - (base if subject.pooled else base[:, order]))
    if difference <= noise.other_shape:
        message = "permuted tokens give permuted outputs: the model knows no order"
        if subject.pooled:
            message = "the same output for permuted tokens, the last in its place: the model knows no order"
        maps = attention_of_module(subject, "")
        # Positions may be given from outside to what has no embedding: to a layer, a block, a Set Transformer.
        embeds = any(isinstance(module, nn.Embedding) for module in subject.model.modules())
        severity = Severity.ERROR if embeds else Severity.HINT
        return [finding("RUN106", message, severity=severity, by=difference, tolerance=noise.other_shape, maps=maps)]
    if subject.causal is False or subject.pooled:
        return []
    return _order_in_modules(subject, permuted, order, noise)


def _order_in_modules(subject: Subject, permuted: Tensor, order: Tensor, noise: Noise) -> list[ModelFinding]:
    """RUN106 of a causal model, whose later layers know an order from the mask alone."""
    last = subject.length - 1
    calls = trace(subject)
    changed = trace(subject, _with_suffix(subject, 0, last))
    mixing = first_moved(subject, calls, changed, slice(last, None), noise.same_shape)
    if mixing is None or mixing.output is None:
        return []
    again = next((call for call in trace(subject, permuted) if call.name == mixing.name), None)
    if again is None or again.output is None or again.output.shape != mixing.output.shape:
        return []
    axis = length_axis(mixing.output, subject)
    if axis is None or largest((again.output - mixing.output).select(axis, last)) > noise.other_shape:
        return []
    for call in calls:
        if type(call.module) is type(mixing.module) and _module_knows_order(subject, call, order, noise):
            return []
    message = "no attention module knows the order of the tokens: it follows from the causal mask alone"
    maps = attention_of_module(subject, mixing.name)
    place = mixing.place()
    return [finding("RUN106", message, severity=Severity.WARNING, tolerance=noise.other_shape, maps=maps, **place)]


def _module_knows_order(subject: Subject, call: ModuleCall, order: Tensor, noise: Noise) -> bool:
    """Whether the last output of a module moves when its hidden inputs are permuted; True where it cannot be told."""

    def change(value: Any) -> Any:
        hidden = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
        return value[:, order] if hidden and value.shape[:2] == subject.sequence.shape[:2] else value

    try:
        outputs = []
        for function in (lambda value: value, change):
            found = call.again(function)
            outputs.append(found[0] if isinstance(found, tuple) else found)
        return largest((outputs[0] - outputs[1])[:, -1]) > noise.other_shape
    except Exception:
        return True  # with a state of its own, as a cache
