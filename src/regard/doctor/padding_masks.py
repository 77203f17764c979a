"""How a model is told of padding: the argument that masks its sequence, or its source, and rows that are padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .subject import DROP_MASKS, KEEP_MASKS, SOURCES, SkippedCheck, Subject

MASK_ENDINGS = ("_mask", "_padding_mask", "_key_padding_mask")
"""Endings by which the argument that masks an input has the name of that input."""


def padding_keywords(subject: Subject, keep: Tensor) -> dict[str, Any]:
    """The keywords by which the model knows where tokens are; `keep` is True at tokens.

    Raises:
        SkippedCheck: the model takes no padding mask, or none of this kind.
    """
    named, key = subject.names.padding, str(subject.key)
    if callable(named):
        keywords = named(keep)
        if keywords is None:
            raise SkippedCheck("the model cannot be told of padding here")
        return dict(keywords)
    if isinstance(named, str):
        given = subject.inputs.get(named)
        return {named: keep.to(given.dtype) if isinstance(given, Tensor) else keep}
    if subject.names.pad_token is not None:
        return {}
    own = subject.argument([f"{key}_key_padding_mask", f"{key}_padding_mask"])
    if own is not None:
        return {own: ~keep}
    name = subject.argument(KEEP_MASKS if "decoder" not in key else ["decoder_attention_mask"])
    if name is not None:
        given = subject.inputs.get(name)
        if isinstance(given, Tensor) and given.ndim != 2:
            raise SkippedCheck(f"{name} of the batch is of pairs, not of tokens")
        return {name: keep if isinstance(given, Tensor) and given.dtype == torch.bool else keep.long()}
    name = subject.argument(DROP_MASKS)
    if name is not None:
        return {name: ~keep}
    raise SkippedCheck(f"the model takes no padding mask ({', '.join((*KEEP_MASKS, *DROP_MASKS))})")


class PaddedRow(NamedTuple):
    """The sequence with padding in the first row alone; keep is True at tokens; place: of the tokens of that row."""

    sequence: Tensor
    keep: Tensor
    place: slice


def padded_row(subject: Subject, amount: int, side: str) -> PaddedRow:
    """The sequence with `amount` tokens of padding; the last tokens of the first row go, so that the shape stays."""
    length, start = subject.length - amount, amount if side == "left" else 0
    place = slice(start, start + length)
    keep = torch.ones(subject.sequence.shape[:2], dtype=torch.bool, device=subject.sequence.device)
    keep[0] = False
    keep[0, place] = True
    pad, sequence = padding_token(subject), subject.sequence.clone()
    sequence[0] = subject.others(sequence)[0] if pad is None else pad
    sequence[0, place] = subject.sequence[0, :length]
    return PaddedRow(sequence, keep, place)


def padding_token(subject: Subject) -> int | None:
    """The token that the model is padded with, where it says so and reads tokens."""
    pad = subject.names.pad_token
    if pad is None:
        pad = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    return pad if subject.is_tokens and isinstance(pad, int) and 0 <= pad < (subject.vocabulary or 0) else None


def source_of(subject: Subject) -> str | None:
    """The name of the source that the model has beside its sequence, as an encoder-decoder; None where it has none."""
    masked = [name for name in subject.keywords if subject.argument([f"{name}{end}" for end in MASK_ENDINGS])]
    for name in dict.fromkeys((*SOURCES, *masked)):
        source = subject.inputs.get(name)
        is_source = isinstance(source, Tensor) and source.ndim == (3 if source.is_floating_point() else 2)
        if is_source and name != subject.key:
            return name
    return None


def source_mask(subject: Subject, name: str) -> Callable[[Tensor], dict[str, Any]]:
    """The keyword that masks padding of the source, from where its tokens are; by the pad token there is none.

    Raises:
        SkippedCheck: the model takes no such mask.
    """
    dropped = subject.argument([f"{name}_key_padding_mask", f"{name}_padding_mask"])
    if dropped is not None:
        return lambda keep: {dropped: ~keep}
    names = [f"{name}_mask"] + (["attention_mask"] if name == "input_ids" else [])
    kept = subject.argument(names)
    if kept is not None:
        given = subject.inputs.get(kept)
        dtype = given.dtype if isinstance(given, Tensor) else torch.long if kept == "attention_mask" else torch.bool
        return lambda keep: {kept: keep.to(dtype)}
    given = _mask_like(subject, name)
    if given is not None:
        return given
    if subject.names.pad_token is not None:
        return lambda keep: {}
    raise SkippedCheck(f"the model takes no padding mask of its source ({', '.join(names)})")


def _mask_like(subject: Subject, source: str) -> Callable[[Tensor], dict[str, Any]] | None:
    """The mask of the batch that has the shape of the source, and not of the sequence: True, or False, everywhere."""
    shape = subject.inputs[source].shape[:2]
    for name, value in subject.keywords.items():
        is_mask = "mask" in name and isinstance(value, Tensor) and value.shape == shape != subject.sequence.shape[:2]
        if is_mask and bool(value.all()) == bool(value.any()):
            drops, dtype = not bool(value.any()), value.dtype
            return lambda keep, name=name: {name: (keep ^ drops).to(dtype)}
    return None


def of_positions(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the batch with a name that may have an entry for each position, without the sequence itself.

    The source of an encoder-decoder, its mask and what the encoder has made of it stay out: they may be as long as the
    sequence by chance.
    """
    source = source_of(subject)
    masks = {f"{source}{ending}" for ending in MASK_ENDINGS} | ({"attention_mask"} if source == "input_ids" else set())
    for name, value in subject.keywords.items():
        is_of_source = name == source or name in masks or name.startswith(("memory", "encoder_"))
        if isinstance(value, Tensor) and name not in subject.same and not (source is not None and is_of_source):
            yield name, value


def without_last(subject: Subject, amount: int) -> dict[str, Any]:
    """Keywords of the batch that have one entry for each position, cut to the shorter length."""
    cut = {}
    for name, value in of_positions(subject):
        for axis in range(1, value.ndim):
            if value.shape[axis] == subject.length:
                cut[name] = cut.get(name, value).narrow(axis, 0, subject.length - amount)
    return cut
