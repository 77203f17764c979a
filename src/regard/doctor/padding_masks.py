"""How a model is told of padding: the argument that masks its sequence, or its source, and rows that are padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    named = subject.names.padding
    if callable(named):
        keywords = named(keep)
        if keywords is None:
            raise SkippedCheck("the model cannot be told of padding here")
        return dict(keywords)
    if isinstance(named, str):
        given = subject.keywords.get(named)
        return {named: keep.to(given.dtype) if isinstance(given, Tensor) else keep}
    if subject.names.pad_token is not None:
        return {}
    own = subject.argument([f"{subject.key}_key_padding_mask", f"{subject.key}_padding_mask"])
    if own is not None:
        return {own: ~keep}
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


def padded_row(subject: Subject, amount: int, side: str) -> tuple[Tensor, Tensor, slice]:
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
    sequence[0, outside] = subject.others(subject.sequence)[0, outside]
    pad = padding_token(subject)
    if pad is not None:
        sequence[0, outside] = pad
    return sequence, keep, place


def padding_token(subject: Subject) -> int | None:
    """The token that the model is padded with, where it says so and reads tokens."""
    pad = subject.names.pad_token
    if pad is None:
        pad = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    return pad if subject.is_tokens and isinstance(pad, int) and 0 <= pad < (subject.vocabulary or 0) else None


def source_of(subject: Subject) -> tuple[str, Tensor]:
    """The name of the source and the source.

    Raises:
        SkippedCheck: the model reads one sequence.
    """
    masked = [name for name in subject.keywords if subject.argument([f"{name}{end}" for end in MASK_ENDINGS])]
    for name in dict.fromkeys((*SOURCES, *masked)):
        source = subject.keywords.get(name)
        if name == subject.key or not isinstance(source, Tensor):
            continue
        if source.ndim == (3 if source.is_floating_point() else 2):
            return name, source
    raise SkippedCheck(f"the model has no source ({', '.join(SOURCES)}, or an input with a mask of its own)")


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
        given = subject.keywords.get(kept)
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
    shape = subject.keywords[source].shape[:2]
    for name, value in subject.keywords.items():
        is_mask = "mask" in name and isinstance(value, Tensor) and value.shape == shape != subject.sequence.shape[:2]
        if is_mask and bool(value.all()):
            return lambda keep, name=name, dtype=value.dtype: {name: keep.to(dtype)}
        if is_mask and not bool(value.any()):
            return lambda keep, name=name, dtype=value.dtype: {name: (~keep).to(dtype)}
    return None


def without_last(subject: Subject, amount: int) -> dict[str, Any]:
    """Keywords of the batch that have one entry for each position, cut to the shorter length.

    The source of an encoder-decoder stays whole, and so does its mask: it may be as long as the sequence by chance.
    """
    cut = {}
    for name, value in subject.keywords.items():
        if not isinstance(value, Tensor) or name == subject.key or is_of_source(subject, name):
            continue
        for axis in range(1, value.ndim):
            if value.shape[axis] == subject.length:
                cut[name] = cut.get(name, value).narrow(axis, 0, subject.length - amount)
    return cut


def reads_source(subject: Subject) -> bool:
    """Whether the model has a source beside its sequence, as an encoder-decoder."""
    try:
        source_of(subject)
    except SkippedCheck:
        return False
    return True


def is_of_source(subject: Subject, name: str) -> bool:
    """Whether a keyword is the source of an encoder-decoder, a mask of it, or what the encoder has made of it."""
    try:
        source, _ = source_of(subject)
    except SkippedCheck:
        return False
    masks = {f"{source}{ending}" for ending in MASK_ENDINGS} | ({"attention_mask"} if source == "input_ids" else set())
    return name == source or name in masks or name.startswith(("memory", "encoder_"))
