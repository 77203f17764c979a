"""Checks that change tokens which outputs must not depend on: future, padding, documents, batch; and their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .examination_report import ModelFinding, finding
from .finding import Severity
from .module_trace import ModuleCall, first_moved, length_axis, trace
from .subject import DOCUMENTS, DROP_MASKS, KEEP_MASKS, Noise, Subject, largest

PREFIXES = (1, 3, 7, 15, 31, 32, 63)
"""Lengths of the prefixes whose outputs must not move: before, at and behind the borders of blocks."""


class SkippedCheck(Exception):
    """A check that this model or batch has no use for, with the reason."""


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


def check_future(subject: Subject, noise: Noise, causal: bool | None) -> list[ModelFinding]:
    """RUN101: outputs before a position move when tokens from it on change.

    Without knowledge whether the model is causal (None), one whose outputs move at every prefix is taken for an
    encoder.
    """
    if causal is False:
        raise SkippedCheck("the model is bidirectional")
    prefixes = [prefix for prefix in PREFIXES if prefix < subject.length]
    if not prefixes:
        raise SkippedCheck("the sequence has one position")
    base = subject.outputs()
    leaking = []
    for prefix in prefixes:
        moved = subject.outputs(_with_suffix(subject, prefix))[:, :prefix] - base[:, :prefix]
        if largest(moved) > noise.same_shape:
            leaking.append(prefix)
    if not leaking:
        return []
    if causal is None and len(leaking) == len(prefixes):
        raise SkippedCheck("every output depends on later tokens, as in an encoder: pass causal=True for a decoder")
    prefix = leaking[0]
    token = _first_token_that_moves(subject, base, prefix, noise)
    other = _with_suffix(subject, token, token + 1)
    position, by = _largest_move(subject.outputs(other)[:, :prefix] - base[:, :prefix])
    if by <= noise.same_shape:  # only several tokens together move it
        other = _with_suffix(subject, prefix)
        position, by = _largest_move(subject.outputs(other)[:, :prefix] - base[:, :prefix])
    calls = trace(subject), trace(subject, _with_suffix(subject, prefix))
    call = first_moved(subject, *calls, slice(prefix), noise.same_shape)
    return [
        finding(
            "RUN101",
            f"outputs before position {', '.join(map(str, leaking))} depend on tokens from there on",
            changed=token,
            moved=position,
            by=by,
            tolerance=noise.same_shape,
            **_place(call),
        )
    ]


def _first_token_that_moves(subject: Subject, base: Tensor, prefix: int, noise: Noise) -> int:
    """The last start from which a changed suffix still moves outputs before `prefix`, by bisection."""
    low, high = prefix, subject.length
    while high - low > 1:
        middle = (low + high) // 2
        moved = subject.outputs(_with_suffix(subject, middle))[:, :prefix] - base[:, :prefix]
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
    return [finding("RUN107", message, moved=position, by=by, tolerance=noise.same_shape, **_place(call))]


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


def padding_keywords(subject: Subject, keep: Tensor) -> dict[str, Any]:
    """The keyword that tells the model where tokens are; `keep` is True at tokens.

    Raises:
        SkippedCheck: the model takes no padding mask.
    """
    name = subject.argument(KEEP_MASKS) if "decoder" not in str(subject.key) else "decoder_attention_mask"
    if name in subject.parameters:
        given = subject.keywords.get(str(name))
        if isinstance(given, Tensor) and given.ndim != 2:
            raise SkippedCheck(f"{name} of the batch is of pairs, not of tokens")
        return {str(name): keep if isinstance(given, Tensor) and given.dtype == torch.bool else keep.long()}
    name = subject.argument(DROP_MASKS)
    if name is not None:
        return {name: ~keep}
    raise SkippedCheck(f"the model takes no padding mask ({', '.join((*KEEP_MASKS, *DROP_MASKS))})")


def _padded(subject: Subject, amount: int, side: str) -> tuple[Tensor, Tensor, slice]:
    """The sequence with `amount` tokens of padding in the first row alone, its mask, and where its tokens are.

    The last tokens of the first row go, so that the shape stays.
    """
    length = subject.length - amount
    keep = torch.ones(subject.sequence.shape[:2], dtype=torch.bool, device=subject.sequence.device)
    sequence, place = subject.sequence.clone(), slice(0, length)
    if side == "left":
        place = slice(amount, subject.length)
        sequence[0, amount:] = subject.sequence[0, :length]
        keep[0, :amount] = False
        outside = slice(0, amount)
    else:
        keep[0, length:] = False
        outside = slice(length, None)
    pad = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    sequence[0, outside] = subject.others(subject.sequence)[0, outside]
    if subject.is_tokens and isinstance(pad, int) and 0 <= pad < (subject.vocabulary or 0):
        sequence[0, outside] = pad
    return sequence, keep, place


def check_padding(subject: Subject, noise: Noise, causal: bool | None) -> list[ModelFinding]:
    """RUN103, 104, 105 and 110: padding moves outputs of tokens, by what it is or where it is, or makes them NaN."""
    amount = max(1, min(5, subject.length // 3))
    if subject.length < 3:
        raise SkippedCheck("the sequence is shorter than 3")
    alone = subject.outputs(*[subject.sequence[:, : subject.length - amount]], **_no_mask(subject, amount))[0]
    found = []
    for side in ("right", "left"):
        sequence, keep, place = _padded(subject, amount, side)
        mask = padding_keywords(subject, keep)
        first = subject.outputs(sequence, **mask)[0, place]
        if bool(first.isnan().any()):
            message = f"outputs of tokens are NaN with masked padding on the {side}, in {first.dtype}"
            found.append(finding("RUN110", message, moved=int(first.isnan().any(-1).nonzero()[0]) + (place.start or 0)))
            continue
        other = sequence.clone()
        inside = torch.where(keep[0])[0]
        other[0] = subject.others(sequence)[0]
        other[0, inside] = sequence[0, inside]
        position, by = _largest_move(subject.outputs(other, **mask)[0, place] - first, axis=0)
        if by > noise.same_shape:
            calls = trace(subject, sequence, **mask), trace(subject, other, **mask)
            call = first_moved(subject, *calls, place, noise.same_shape)
            message = f"outputs of tokens depend on what the padding on the {side} is, though it is masked"
            evidence = {"moved": position + (place.start or 0), "by": by, "tolerance": noise.same_shape}
            found.append(finding("RUN103", message, **evidence, **_place(call)))
            continue
        position, by = _largest_move(first - alone, axis=0)
        if by > noise.other_shape:
            found.append(_padding_moves(subject, side, sequence, mask, alone, place, position, by, noise))
    return found


def _no_mask(subject: Subject, amount: int) -> dict[str, Any]:
    """Keywords of the batch that have one entry for each position, cut to the shorter length."""
    cut = {}
    for name, value in subject.keywords.items():
        is_text = isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == subject.length
        if is_text and name != subject.key:
            cut[name] = value[:, : subject.length - amount]
    return cut


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
    why = ""
    if "position_ids" in subject.parameters and side == "left":
        positions = torch.arange(subject.length, device=sequence.device).repeat(subject.batch_size, 1)
        positions[0] = (positions[0] - (place.start or 0)).clamp(min=0)
        try:
            shifted: dict[str, Any] = {**mask, "position_ids": positions}
            again = subject.outputs(sequence, **shifted)[0, place]
            if largest(again - alone) <= noise.other_shape:
                why = ": positions count the padding; position_ids of the tokens alone mend it"
        except Exception:
            why = ""
    return finding(
        "RUN104" if side == "left" else "RUN105",
        f"{place.start or 0} tokens of masked padding on the left change results{why}"
        if side == "left"
        else f"masked padding on the right changes results{why}",
        moved=position + (place.start or 0),
        by=by,
        tolerance=noise.other_shape,
    )


def check_source(subject: Subject, noise: Noise) -> list[ModelFinding]:
    """RUN103, 104 and 105 of an encoder-decoder: masked padding of the source moves outputs."""
    source = subject.keywords.get("input_ids")
    if not str(subject.key).startswith("decoder") or not isinstance(source, Tensor) or source.is_floating_point():
        raise SkippedCheck("the model has no source of token ids")
    amount = max(1, source.shape[1] // 4)
    alone = subject.outputs(input_ids=source, attention_mask=torch.ones_like(source))
    other = subject.others(source, seed=3)
    found = []
    for side, code in (("right", "RUN105"), ("left", "RUN104")):
        parts, again = [source, other[:, :amount]], [source, subject.others(source, seed=4)[:, :amount]]
        ones, zeros = torch.ones_like(source), torch.zeros_like(source[:, :amount])
        masks = [ones, zeros]
        if side == "left":
            parts, again, masks = parts[::-1], again[::-1], masks[::-1]
        keywords: dict[str, Any] = {"attention_mask": torch.cat(masks, 1)}
        first = subject.outputs(**{"input_ids": torch.cat(parts, 1), **keywords})
        position, by = _largest_move(subject.outputs(**{"input_ids": torch.cat(again, 1), **keywords}) - first)
        if by > noise.same_shape:
            message = f"outputs depend on what the padding on the {side} of the source is, though it is masked"
            found.append(finding("RUN103", message, moved=position, by=by, tolerance=noise.same_shape))
            continue
        position, by = _largest_move(first - alone)
        if by > noise.other_shape:
            message = f"{amount} tokens of masked padding on the {side} of the source change results"
            found.append(finding(code, message, moved=position, by=by, tolerance=noise.other_shape))
    return found


def check_documents(subject: Subject, noise: Noise, packed: bool | None) -> list[ModelFinding]:
    """RUN102: outputs of a document move when the one packed before it changes.

    Documents are told apart by an argument of their own, or by positions that start again: without a mask, and with
    the mask of ones that tokenizers return.
    """
    name = subject.argument(DOCUMENTS)
    by_positions = "position_ids" in subject.parameters
    given = subject.keywords.get("position_ids")
    restarts = isinstance(given, Tensor) and given.ndim == 2 and bool((given[:, 1:] < given[:, :-1]).any())
    if packed is False or (packed is None and name is None and not restarts):
        raise SkippedCheck("the batch has no packed documents: positions that start again, or document ids")
    if name is None and not by_positions:
        raise SkippedCheck("the model takes neither position_ids nor document ids")
    border = subject.length // 2
    if border < 1:
        raise SkippedCheck("the sequence has one position")
    rows, device = subject.batch_size, subject.sequence.device
    index = torch.arange(subject.length, device=device).repeat(rows, 1)
    positions = torch.where(index < border, index, index - border)
    ways: list[tuple[str, dict[str, Any]]] = []
    if name is not None:
        keywords: dict[str, Any] = {name: (index >= border).long()}
        if by_positions:
            keywords["position_ids"] = positions
        ways.append((f"by {name}", keywords))
    else:
        ways.append(("by position_ids, without a mask", {"position_ids": positions, "attention_mask": None}))
        if "attention_mask" in subject.parameters:
            ones = {"position_ids": positions, "attention_mask": torch.ones_like(index)}
            ways.append(("by position_ids, with a mask of ones", ones))
    found = []
    without = {"use_cache": False} if "use_cache" in subject.parameters else {}  # transformers' packing wants none
    for words, changes in ways:
        keywords = {**changes, **without}
        other = _with_suffix(subject, 0, border)
        difference = subject.outputs(other, **keywords)[:, border:] - subject.outputs(**keywords)[:, border:]
        position, by = _largest_move(difference)
        if by > noise.same_shape:
            calls = trace(subject, **keywords), trace(subject, other, **keywords)
            call = first_moved(subject, *calls, slice(border, None), noise.same_shape)
            message = f"the second of two documents packed {words} depends on the first"
            evidence = {"changed": border - 1, "moved": border + position, "by": by, "tolerance": noise.same_shape}
            found.append(finding("RUN102", message, **evidence, **_place(call)))
    return found


def check_positions(subject: Subject, noise: Noise, causal: bool | None) -> list[ModelFinding]:
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
    depends = largest(subject.outputs(_with_suffix(subject, 0, last))[:, last] - base[:, last]) > noise.same_shape
    if not depends:
        raise SkippedCheck("the last output does not depend on other tokens")
    if largest(other - base[:, order]) <= noise.other_shape:
        message = "permuted tokens give permuted outputs: the model knows no order"
        return [finding("RUN106", message, by=largest(other - base[:, order]), tolerance=noise.other_shape)]
    if causal is False:
        return []
    return _order_in_modules(subject, permuted, order, noise)


def _order_in_modules(subject: Subject, permuted: Tensor, order: Tensor, noise: Noise) -> list[ModelFinding]:
    """RUN106 of a causal model, whose later layers know an order from the mask alone."""
    last = subject.length - 1
    calls = trace(subject)
    changed = trace(subject, _with_suffix(subject, 0, last))
    mixing = first_moved(subject, calls, changed, slice(last, None), noise.same_shape)
    if mixing is None or mixing.output is None or not mixing.name:
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
    return [finding("RUN106", message, severity=Severity.WARNING, tolerance=noise.other_shape, **mixing.place())]


def _module_knows_order(subject: Subject, call: ModuleCall, order: Tensor, noise: Noise) -> bool:
    """Whether the last output of a module moves when its hidden inputs are permuted; True where it cannot be told."""

    def change(value: Any) -> Any:
        hidden = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
        return value[:, order] if hidden and value.shape[:2] == subject.sequence.shape[:2] else value

    try:
        outputs = []
        for arguments, keywords in (
            (call.arguments, dict(call.keywords)),
            (tuple(map(change, call.arguments)), {name: change(value) for name, value in call.keywords.items()}),
        ):
            with torch.no_grad():
                found = call.module(*arguments, **keywords)
            outputs.append(found[0] if isinstance(found, tuple) else found)
        return largest((outputs[0] - outputs[1])[:, -1]) > noise.other_shape
    except Exception:
        return True  # with a state of its own, as a cache
