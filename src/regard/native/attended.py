"""Attention by additive scores, tile after tile with the online softmax, by the C functions of `library`.

The layouts and what the fields of the structures mean are in additive.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..errors import ShapeError
from .additive import LEAST_WORK, WHOLE, Prepared, check_float32, interval
from .library import last_contiguous
from .threads import together, workers

BAND = 32  # additive.h has the same
ROWS = 8
EACH = 4
"""Bands of rows that each thread should get at least, so that all end at about the same time."""


class _Pairs(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("heads", c_int64), ("batch", c_int64), ("head", c_int64), ("row", c_int64))


class AttendedWork(ctypes.Structure):
    """The structure `attended` of additive.h."""

    _fields_ = (
        *(("taken", c_int64), ("units", c_int64), ("failed", c_int64), ("of", c_void_p)),
        *((name, c_int64) for name in ("row_begin", "row_end", "column_begin", "column_end", "band")),
        *(("added", _Pairs), ("kept", _Pairs), ("softcap", c_float)),
        *(("value", c_void_p), ("value_head", c_int64), ("value_row", c_int64), ("value_dim", c_int64)),
        *((name, c_void_p) for name in ("output", "lse", "largest", "total")),
    )


class Attended:
    """Attention to the tiles that were added so far, `output` (H, M, Dv) and `lse` (H, M); no scores are kept.

    s_ij = softcap(score(i, j)) + added_ij, lse_i = log Σ_j exp(s_ij), output_i = Σ_j exp(s_ij - lse_i) · kept_ij · v_j,
    by the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Rows that attend to nothing: 0 and -inf. A row's numbers do not depend on the number of threads.

    prepared: of queries (H, M, A) and keys (Hk, N, A). value (Hk, N, Dv): float32 on the CPU, of any strides but in the
    last axis, where what is not contiguous is copied. It must not change while this is in use. Autograd does not see
    what is done here.

    NaN in what a row meets gives NaN in its output, and so does NaN in a value of weight 0.

    Raises:
        ShapeError, DtypeError, DeviceError: `value` is not as above.
    """

    def __init__(self, prepared: Prepared, value: Tensor, softcap: float | None = None) -> None:
        check_float32("value", value)
        heads, keys = prepared.key_heads, prepared.columns
        if value.ndim != 3 or value.shape[:2] != (heads, keys):
            raise ShapeError(f"value has shape {tuple(value.shape)}; it needs to be (Hk, N, Dv) with {(heads, keys)}")
        self.prepared, self.value, self.softcap = prepared, last_contiguous(value.detach()), softcap or 0.0
        rows = prepared.heads, prepared.rows
        self.output, self.lse = torch.zeros(*rows, value.shape[-1]), torch.full(rows, float("-inf"))
        self._largest, self._total = self.lse.clone(), torch.zeros(rows)

    def add(
        self, rows: slice = WHOLE, columns: slice = WHOLE, added: Tensor | None = None, kept: Tensor | None = None
    ) -> None:
        """A tile more: some rows attend to some columns. No pair may be in two tiles.

        rows and columns: slices of step 1. added and kept: (B, H / B, rows, columns) float32, of any strides but in
        the last axis. added: -inf where there is no pair. kept: 1, and 0 for weights that are dropped.

        Raises:
            ShapeError, DtypeError, DeviceError: a slice has another step, or a tensor is not as above.
            MemoryError: there was none for a few rows of the output.
        """
        of, value = self.prepared, self.value
        (top, bottom), (left, right) = interval(rows, of.rows), interval(columns, of.columns)
        size = bottom - top, right - left
        added, kept = self._laid("added", added, size), self._laid("kept", kept, size)
        pairs = of.heads * size[0] * size[1]
        if not pairs:
            return
        threads = workers(pairs * (of.features + value.shape[-1]), LEAST_WORK)
        band = BAND if of.heads * size[0] >= EACH * threads * BAND else ROWS
        work = AttendedWork(
            *(0, of.heads * -(-size[0] // band), 0, ctypes.addressof(of.work), top, bottom, left, right, band),
            *(_place(added), _place(kept), self.softcap, value.data_ptr(), *value.stride()[:2], value.shape[-1]),
            *(tensor.data_ptr() for tensor in (self.output, self.lse, self._largest, self._total)),
        )
        together(of.library.attend, work, threads)

    def _laid(self, name: str, tensor: Tensor | None, size: tuple[int, int]) -> Tensor | None:
        if tensor is None:
            return None
        check_float32(name, tensor)
        if tensor.ndim != 4 or tensor.shape[:2].numel() != self.prepared.heads or tensor.shape[2:] != size:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; the tile needs (B, H / B, rows, columns) with "
                f"{self.prepared.heads} heads and {size}"
            )
        return last_contiguous(tensor.detach())


def _place(tensor: Tensor | None) -> _Pairs:
    return _Pairs() if tensor is None else _Pairs(tensor.data_ptr(), tensor.shape[1], *tensor.stride()[:3])
