"""Few query rows over keys and values that are stored as codes, in C, which reads them as they are.

`attend_packed` calls `regard_packed_decode` of packed_decode.c for each group of heads of one format; the structure and
its layouts are explained in packed_decode.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ...core.log_sum_exp import merge_softmax
from ...core.packed_rows import CodeRows, PackedHeads, PackedTensor
from ...core.packing import BLOCK
from . import library
from .code_writing import CODES
from .threads import run_units, thread_count

LEAST_WORK = 2**18
"""The fewest codes of keys and values a thread: with twice as many the work is shared."""

AttendWhole = Callable[[Tensor, Tensor, Tensor, float, Tensor | None, Sequence[int] | None], tuple[Tensor, Tensor]]
"""attend(query, key, value, scale, added, limits): what `FewQueries.forward` computes of numbers."""


class PackedRowsStruct(ctypes.Structure):
    """The structure `packed_rows` of packed_decode.h."""

    _fields_ = (
        *(("code", c_int64), ("dim", c_int64)),
        *(("codes", c_void_p), ("code_batch", c_int64), ("code_head", c_int64)),
        *(("parameters", c_void_p), ("parameter_batch", c_int64), ("parameter_head", c_int64)),
    )

    @classmethod
    def of(cls, codes: CodeRows) -> PackedRowsStruct:
        """Codes of some heads; `codes` has to stay in memory as long."""
        words, parameters = codes.words, codes.parameters
        return cls(
            *(CODES[codes.packing.code], codes.dim, words.data_ptr(), *words.stride()[:2]),
            *(parameters.data_ptr(), *parameters.stride()[:2]),
        )


class PackedDecodeStruct(ctypes.Structure):
    """The structure `packed_decode` of packed_decode.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "heads", "rows", "first", "columns")),
        *((name, c_int64) for name in ("parts", "part", "by_channel", "in_bytes")),
        *(("scale", c_float), ("key", PackedRowsStruct), ("value", PackedRowsStruct)),
        *(("pages", c_void_p), ("query", c_void_p)),
        *(("bias", c_void_p), ("bias_batch", c_int64), ("bias_head", c_int64), ("bias_row", c_int64)),
        *(("limits", c_void_p), ("output", c_void_p), ("lse", c_void_p)),
    )


def attend_packed(
    attend_whole: AttendWhole,
    query: Tensor,
    both: tuple[PackedTensor, PackedTensor],
    scale: float,
    added: Tensor | None = None,
    limits: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, Hk, R, Dv) and log-sum-exp (B, Hk, R), float32, over keys and values that are codes.

    Arguments as `FewQueries.forward` has them; both: keys and values, of the same parts. attend_whole: computes the
    tokens of a part that are no codes.
    """
    batch, heads, rows, _ = query.shape
    results = []
    for keys, values in zip(both[0].parts, both[1].parts, strict=True):
        own = slice(None) if len(keys.heads) == heads else list(keys.heads)
        of_added = None if added is None else added.expand(-1, heads, -1, -1)[:, own]
        results.append(_attend_heads(attend_whole, query[:, own], (keys, values), scale, of_added, limits))
    if len(results) == 1:
        return results[0]
    output = torch.empty(batch, heads, rows, both[1].shape[3], device="cpu")
    lse = torch.empty(batch, heads, rows, device="cpu")
    for part, (own_output, own_lse) in zip(both[0].parts, results, strict=True):
        output[:, list(part.heads)], lse[:, list(part.heads)] = own_output, own_lse
    return output, lse


def _attend_heads(
    attend_whole: AttendWhole,
    query: Tensor,
    both: tuple[PackedHeads, PackedHeads],
    scale: float,
    added: Tensor | None,
    limits: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """Heads of one format: their codes, and the newest tokens, which are none, merged by log-sum-exp."""
    keys, values = both
    codes, count = keys.packed - keys.first, keys.whole.shape[2]
    if not codes or keys.codes is None:
        return attend_whole(query, keys.whole, values.whole, scale, added, limits)
    parts = [_attend_codes(query, both, scale, None if added is None else added[..., :codes], limits)]
    if count:
        rest = None if added is None else added[..., codes:]
        later = None if limits is None else [max(limit - codes, 0) for limit in limits]
        output, lse = attend_whole(query, keys.whole, values.whole, scale, rest, later)
        parts.append((output.unsqueeze(2), lse.unsqueeze(2)))
    output, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True)) if count else parts[0]
    return (output.squeeze(2), lse.squeeze(2)) if lse.shape[2] == 1 else merge_softmax(output, lse, dim=2)


def _attend_codes(
    query: Tensor,
    both: tuple[PackedHeads, PackedHeads],
    scale: float,
    added: Tensor | None,
    limits: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """By parts P of the tokens: outputs (B, H, P, R, Dv) and log-sum-exps (B, H, P, R)."""
    keys, values = both[0].codes, both[1].codes
    if keys is None or values is None:
        raise AssertionError("keys and values are codes, or both are none")
    first, columns = both[0].first % BLOCK, both[0].packed
    skipped = both[0].first // BLOCK * BLOCK  # whole blocks, which are not read
    batch, heads, rows, _ = query.shape
    query = keys.packing.rotate(query.float()).contiguous()
    count = thread_count(batch * heads * (columns - skipped) * (keys.dim + values.dim), LEAST_WORK)
    part, part_count = _part(batch * heads, columns - skipped, count)
    output = torch.empty(batch, heads, part_count, rows, values.dim, device="cpu")
    lse = torch.empty(batch, heads, part_count, rows, device="cpu")
    if added is not None:
        added = added.expand(batch, -1, -1, -1).float()
        added = added if added.stride(3) == 1 else added.contiguous()
    each = None if limits is None else _limits(limits, rows, first)
    read = [PackedRowsStruct.of(_from_block(codes, skipped // BLOCK)) for codes in (keys, values)]
    pages = None if keys.pages is None else keys.pages[skipped // BLOCK :].contiguous()
    work = PackedDecodeStruct(
        *(0, batch * heads * part_count, 0, heads, rows, first, columns - skipped, part_count, part),
        *(keys.packing.by_channel, both[0].whole.dtype != torch.float32, scale, *read),
        *(None if pages is None else pages.data_ptr(), query.data_ptr()),
        *((None, 0, 0, 0) if added is None else (added.data_ptr(), *added.stride()[:3])),
        *(None if each is None else each.data_ptr(), output.data_ptr(), lse.data_ptr()),
    )
    run_units(library.current().packed_decode, work, count)
    return values.packing.rotate(output), lse


def _from_block(codes: CodeRows, block: int) -> CodeRows:
    """The codes from a block on, where blocks stand one after another: views."""
    if codes.pages is not None:
        return codes
    return type(codes)(codes.packing, codes.dim, codes.words[:, :, block:], codes.parameters[:, :, block:])


def _limits(limits: Sequence[int], rows: int, first: int) -> Tensor:
    """The limit of each row, of tokens that are counted from a whole block on."""
    each = torch.tensor([limit + first for limit in limits], dtype=torch.int32, device="cpu")
    return each.repeat(rows // len(limits))


def _part(heads: int, columns: int, threads: int) -> tuple[int, int]:
    """Tokens of a part, in whole blocks, and the number of parts; one part if the heads alone occupy all threads."""
    even = heads % threads == 0 or heads >= 8 * threads
    wanted = 1 if even or not heads else -(-2 * threads // heads)
    part = max(-(-columns // (wanted * BLOCK)) * BLOCK, BLOCK)
    return part, max(-(-columns // part), 1)
