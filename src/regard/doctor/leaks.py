"""Checks that change tokens which outputs must not depend on: future, padding, documents, batch; and their order."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor, nn

from regard_doctor.finding import Severity

from .examination_report import ModelFinding, Place, finding
from .finding_map import IsWrong, Maps, attention_of_module, disagreement, influence_map, moved
from .module_trace import ModuleCall, at_positions, first_moved, first_moved_by, trace
from .padding_masks import (
    PaddedRow,
    padded_row,
    padding_keywords,
    padding_token,
    source_mask,
    source_of,
    without_last,
)
from .rounding_noise import Noise
from .subject import DOCUMENTS, SOURCES, SkippedCheck, Subject, largest

PREFIXES = (1, 3, 7, 15, 31, 32, 63)
"""Lengths of the prefixes whose outputs must not move: before, at and behind the borders of blocks."""


def _with_suffix(subject: Subject, start: int, stop: int | None = None) -> Tensor:
    changed = subject.sequence.clone()
    changed[:, start:stop] = subject.others(subject.sequence)[:, start:stop]
    return changed


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
    base, own = subject.outputs(), int(subject.names.predicts_own)

    def evidence(prefix: int, start: int, stop: int | None = None) -> dict[str, Any]:
        """How outputs of a prefix move when tokens from `start` on change; empty where they do not."""
        difference = subject.outputs(_with_suffix(subject, start, stop)) - base
        return moved(difference[:, : prefix + own], noise.same_shape)

    leaking = [prefix for prefix in prefixes if evidence(prefix, prefix)]
    if not leaking:
        return []
    if subject.causal is None and len(leaking) == len(prefixes):
        raise SkippedCheck(
            "every output depends on later tokens, as in an encoder: for a decoder pass causal=True (--causal)"
        )
    prefix = leaking[0]
    # The last token from which a changed suffix still moves the outputs.
    token = prefix + bisect_left(range(prefix + 1, subject.length), True, key=lambda start: not evidence(prefix, start))
    found = evidence(prefix, token, token + 1) or evidence(prefix, prefix)  # only several tokens together may move it
    part = at_positions(subject, slice(prefix + own))
    place = first_moved_by(subject, (None, _with_suffix(subject, prefix)), part, noise.same_shape)
    message = f"outputs {'up to' if own else 'before'} position {', '.join(map(str, leaking))} depend on tokens from"
    at = found["moved"], token
    maps = _leak_maps(subject, place, noise, at=at, is_wrong=lambda query, key: key > query)
    return [finding("RUN101", f"{message} there on", place, changed=token, maps=maps, **found)]


def _leak_maps(
    subject: Subject,
    place: Place | None,
    noise: Noise,
    *,
    at: tuple[int, int],
    is_wrong: IsWrong,
    row: int | None = None,
    **inputs: Any,
) -> Maps:
    """The influence of tokens on outputs, and the weights of the module that a leak enters by."""
    attention = attention_of_module(subject, place.module if place else "", is_wrong, **inputs)
    return influence_map(subject, noise.same_shape, at=at, row=row, **inputs) + attention


def check_batch(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN107: the outputs of a row move when the other rows change."""
    if subject.batch_size < 2:
        raise SkippedCheck("the batch has one row")
    changed = subject.sequence.clone()
    changed[1:] = subject.others(subject.sequence)[1:]
    difference = subject.outputs(changed)[:1] - subject.outputs()[:1]
    if not moved(difference, noise.same_shape):
        return []

    def first_row(tensor: Tensor) -> Tensor | None:
        return tensor[0] if tensor.ndim > 1 and tensor.shape[0] == subject.batch_size else None

    place = first_moved_by(subject, (None, changed), first_row, noise.same_shape)
    settings = {"title": "Outputs of the first row when others change", "place": place}
    message = "the first row of the batch moves when the others change"
    return disagreement(subject, "RUN107", message, difference, noise.same_shape, **settings)


def _severity(subject: Subject, side: str) -> Severity:
    """Padding on the right is everyone's; that on the left is of those who continue texts in batches.

    The target of an encoder-decoder begins with one token in every row.
    """
    continues = hasattr(subject.model, "generate") and source_of(subject) is None
    return Severity.ERROR if side == "right" or continues else Severity.WARNING


def check_padding(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN103, 104, 105 and 110: padding moves outputs of tokens, by what it is or where it is, or makes them NaN."""
    amount = max(1, min(5, subject.length // 3))
    if subject.length < 3:
        raise SkippedCheck("the sequence is shorter than 3")
    alone = _shorter_outputs(subject, amount)
    found = []
    for side in ("right", "left"):
        row = padded_row(subject, amount, side)
        try:
            mask = padding_keywords(subject, row.keep)
        except SkippedCheck:
            if side == "right":
                raise
            continue  # lengths say nothing of padding on the left
        tokens = slice(None) if subject.pooled else row.place
        start = tokens.start or 0
        first = subject.outputs(row.sequence, **mask)[:1, tokens]
        if first.shape != alone.shape:
            raise SkippedCheck("the outputs of a shorter sequence have another shape")
        if bool(first.isnan().any()):
            message = f"outputs of tokens are NaN with masked padding on the {side}, in {first.dtype}"
            position = int(first[0].isnan().any(-1).nonzero()[0]) + start
            found.append(finding("RUN110", message, severity=_severity(subject, side), moved=position))
            continue
        other = _with_other_padding(subject, row)
        evidence = moved(subject.outputs(other, **mask)[:1, tokens] - first, noise.same_shape, first=start)
        # A model may find padding by its token: then other tokens there are no padding, and its own changes nothing.
        told_by_token = padding_token(subject) is not None and largest(first - alone) <= noise.other_shape
        if evidence and not told_by_token:
            part = at_positions(subject, tokens)
            place = first_moved_by(subject, (row.sequence, other), part, noise.same_shape, **mask)
            message = f"outputs of tokens depend on what the padding on the {side} is, though it is masked"
            at = evidence["moved"], int((~row.keep[0]).nonzero()[0])
            inputs = {"row": 0, "sequence": row.sequence, **mask}
            maps = _leak_maps(
                subject,
                place,
                noise,
                at=at,
                is_wrong=lambda query, key, keep=row.keep[0]: keep[query] & ~keep[key],
                **inputs,
            )
            # An output for each row may be that of the first position, which is padding then.
            severity = Severity.WARNING if side == "left" and subject.pooled else Severity.ERROR
            found.append(finding("RUN103", message, place, severity=severity, maps=maps, **evidence))
        elif moved(first - alone, noise.other_shape):
            message, severity = f"masked padding on the {side} changes results", _severity(subject, side)
            if side == "left" and _positions_mend(subject, row, mask, alone, noise):
                message += ": positions count the padding; position_ids of the tokens alone mend it"
                severity = Severity.WARNING  # `generate` passes them
            code, title = _CODES[side], "Outputs of tokens with and without padding"
            settings = {"title": title, "first": start, "severity": severity}
            found += disagreement(subject, code, message, first - alone, noise.other_shape, **settings)
    return found


_CODES = {"right": "RUN105", "left": "RUN104"}


def _shorter_outputs(subject: Subject, amount: int) -> Tensor:
    """The outputs of the first row without its last tokens, unpadded."""
    sequence = subject.sequence[:, : subject.length - amount]
    keywords = without_last(subject, amount)
    if subject.names.padding is not None:
        whole = torch.ones(sequence.shape[:2], dtype=torch.bool, device=sequence.device)
        keywords |= padding_keywords(subject, whole)
    return subject.outputs(sequence, **keywords)[:1]


def _with_other_padding(subject: Subject, row: PaddedRow) -> Tensor:
    """The sequence with other padding; the same where one token is padding, and no other."""
    other = row.sequence.clone()
    if subject.names.padding is not None or subject.names.pad_token is None:
        other[0, ~row.keep[0]] = subject.others(other)[0, ~row.keep[0]]
    return other


def _positions_mend(subject: Subject, row: PaddedRow, mask: dict[str, Any], alone: Tensor, noise: Noise) -> bool:
    """Whether padding on the left changes nothing once the model is told the positions of tokens."""
    if "position_ids" not in subject.parameters:
        return False
    positions = torch.arange(subject.length, device=row.sequence.device).repeat(subject.batch_size, 1)
    positions[0] = (positions[0] - row.place.start).clamp(min=0)
    place = slice(None) if subject.pooled else row.place
    try:
        again = subject.outputs(row.sequence, **{**mask, "position_ids": positions})[:1, place]
    except Exception:
        return False
    return largest(again - alone) <= noise.other_shape


def check_source(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN103, 104 and 105 of an encoder-decoder: masked padding of the source moves outputs."""
    name = source_of(subject)
    if name is None:
        raise SkippedCheck(f"the model has no source ({', '.join(SOURCES)}, or an input with a mask of its own)")
    source, mask = subject.inputs[name], source_mask(subject, name)
    amount = max(1, source.shape[1] // 4)
    whole = torch.ones(source.shape[:2], dtype=torch.bool, device=source.device)
    words = 0 if source.is_floating_point() else int(source.max()) + 1
    alone = subject.outputs(**{name: source, **mask(whole)})
    first, second = (subject.others(source, seed, words)[:, :amount] for seed in (3, 4))
    if not mask(whole):  # padding is one token, and no other
        first = second = torch.full_like(first, subject.names.pad_token or 0)
    found = []
    for side, code in _CODES.items():
        parts, again, keep = [source, first], [source, second], [whole, ~whole[:, :amount]]
        if side == "left":
            parts, again, keep = parts[::-1], again[::-1], keep[::-1]
        severity = Severity.WARNING if side == "left" else Severity.ERROR  # sources are padded on the right
        keywords = mask(torch.cat(keep, 1))
        padded = subject.outputs(**{name: torch.cat(parts, 1), **keywords})
        same = subject.outputs(**{name: torch.cat(again, 1), **keywords})
        message = f"outputs depend on what the padding on the {side} of the source is, though it is masked"
        moves = disagreement(subject, "RUN103", message, same - padded, noise.same_shape, severity=severity)
        message = f"{amount} tokens of masked padding on the {side} of the source change results"
        settings = {"title": "Outputs with and without padding of the source", "severity": severity}
        found += moves or disagreement(subject, code, message, padded - alone, noise.other_shape, **settings)
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
        difference = subject.outputs(other, **keywords) - subject.outputs(**keywords)
        evidence = moved(difference[:, border:], noise.same_shape, first=border)
        if evidence:
            part = at_positions(subject, slice(border, None))
            place = first_moved_by(subject, (None, other), part, noise.same_shape, **keywords)
            message = f"the second of two documents packed {words} depends on the first"
            maps = _leak_maps(
                subject,
                place,
                noise,
                at=(evidence["moved"], border - 1),
                is_wrong=lambda query, key, border=border: (query >= border) & (key < border),
                **keywords,
            )
            found.append(finding("RUN102", message, place, changed=border - 1, maps=maps, **evidence))
    return found


def second_document(subject: Subject) -> int | None:
    """Where the second document of the batch begins, in every row; None where there is none."""
    for name in (*DOCUMENTS, "position_ids"):
        given = subject.inputs.get(name)
        if isinstance(given, Tensor) and given.shape == subject.sequence.shape[:2]:
            starts = given[:, 1:] < given[:, :-1] if name == "position_ids" else given[:, 1:] != given[:, :-1]
            common = starts.all(0).nonzero()
            if len(common):
                return int(common[0]) + 1
    return None


def _ways_to_pack(subject: Subject, border: int, name: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Two documents in each row, by document ids or by positions that start again, and keywords that say so."""
    index = torch.arange(subject.length, device=subject.sequence.device).repeat(subject.batch_size, 1)
    positions: dict[str, Any] = {}
    if "position_ids" in subject.parameters:
        positions["position_ids"] = torch.where(index < border, index, index - border)
    if name is not None:
        return [(f"by {name}", {**positions, name: (index >= border).long()})]
    ways = [("by position_ids, without a mask", {**positions, "attention_mask": None})]
    if "attention_mask" in subject.parameters:
        ways.append(("by position_ids, with a mask of ones", {**positions, "attention_mask": torch.ones_like(index)}))
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
        # Positions may be given from outside to what has no embedding: to a layer, a block, a Set Transformer. A class
        # for a text may be meant of its words in any order.
        embeds = any(isinstance(module, nn.Embedding) for module in subject.model.modules())
        severity = Severity.HINT if not embeds else Severity.WARNING if subject.pooled else Severity.ERROR
        return [finding("RUN106", message, severity=severity, by=difference, tolerance=noise.other_shape, maps=maps)]
    if subject.causal is False or subject.pooled:
        return []
    return _order_in_modules(subject, permuted, order, noise)


def _order_in_modules(subject: Subject, permuted: Tensor, order: Tensor, noise: Noise) -> list[ModelFinding]:
    """RUN106 of a causal model, whose later layers know an order from the mask alone."""
    last = subject.length - 1
    part = at_positions(subject, slice(last, None))
    calls = trace(subject)
    mixing = first_moved(calls, trace(subject, _with_suffix(subject, 0, last)), part, noise.same_shape)
    if mixing is None or mixing.output is None:
        return []
    again = next((call for call in trace(subject, permuted) if call.name == mixing.name), None)
    if again is None or again.output is None or again.output.shape != mixing.output.shape:
        return []
    before, after = part(mixing.output), part(again.output)
    if before is None or after is None or largest(after - before) > noise.other_shape:
        return []
    for call in calls:
        if type(call.module) is type(mixing.module) and _knows_order(subject, call, order, noise):
            return []
    message = "no attention module knows the order of the tokens: it follows from the causal mask alone"
    settings = {"severity": Severity.WARNING, "maps": attention_of_module(subject, mixing.name)}
    return [finding("RUN106", message, mixing.place(), tolerance=noise.other_shape, **settings)]


def _knows_order(subject: Subject, call: ModuleCall, order: Tensor, noise: Noise) -> bool:
    """Whether the last output of a module moves when its hidden inputs are permuted; True where it cannot be told."""
    first, second = (call.again(subject, change) for change in (Tensor.clone, lambda value: value[:, order]))
    return first is None or second is None or largest((first - second)[:, -1]) > noise.other_shape
