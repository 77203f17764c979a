"""Numbers that become codes in C, with the same scales and offsets, to the last bit, as by `CodeRows.write`.

`write_codes` calls `regard_code_writing` of code_writing.c; the structure is explained in packed_decode.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

from torch import Tensor

from ...core.packed_rows import CodeRows, KeyCodes
from . import library
from .threads import run_units, thread_count

CODES = {"int8": 8, "int4": 4, "float8_e4m3fn": 43, "float8_e5m2": 52}
"""The numbers of packed_decode.h for the codes of `Packing`."""
LEAST_WORK = 2**16
"""The fewest numbers a thread."""


class CodeWritingStruct(ctypes.Structure):
    """The structure `code_writing` of packed_decode.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "tokens", "first", "of_keys", "by_channel")),
        *(("code", c_int64), ("dim", c_int64), ("numbers", c_void_p), ("codes", c_void_p), ("parameters", c_void_p)),
        *(("unit_codes", c_int64), ("unit_parameters", c_int64)),
    )
    failed = 0  # no memory is asked for


def write_codes(codes: CodeRows, first: int, rows: Tensor) -> None:
    """Store rows (B, H, T, D) from a token on, as `CodeRows.write`; of codes on the CPU, in memory of their own."""
    packing = codes.packing
    rows = packing.rotate(rows.detach().float()).contiguous()
    batch, heads, tokens, dim = rows.shape
    work = CodeWritingStruct(
        *(0, batch * heads, tokens, first, isinstance(codes, KeyCodes), packing.by_channel, CODES[packing.code], dim),
        *(rows.data_ptr(), codes.words.data_ptr(), codes.parameters.data_ptr()),
        *(codes.words[0, 0].numel(), codes.parameters[0, 0].numel()),
    )
    run_units(library.current().code_writing, work, thread_count(rows.numel(), LEAST_WORK))
