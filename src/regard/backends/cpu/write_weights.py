"""Writing of the weights of dot products in C: of a tile, or of all tiles of a problem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from . import library
from .flash_tiles import LEAST_WORK, FlashProblem, FlashStruct, check_written, rows_struct, split_rows
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous
from .threads import run_units, thread_count


def write_weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    lse: Tensor,
    weights: Tensor,
    *,
    entropy_terms: Tensor | None = None,
    keep: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """w_ij = exp(softcap(scale · q_i · k_j) - lse_i), 0 where `keep` is False, written into `weights` and returned.

    query (B, H, M, D) and key (B, Hk, N, D), both of one of `DTYPES`, Hk divides H; lse (B, H, M) float32, +inf
    for rows whose weights are to be 0; weights and entropy_terms (B, H, M, N) float32, whose last axis is contiguous;
    keep (B or 1, H or 1, M or 1, N or 1) bool. All are on the CPU. entropy_terms: w · log₂ w is written there.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    (batch, heads, rows, dim), (_, shared, columns, _) = query.shape, key.shape
    _check_weights(query, key, lse, weights, entropy_terms)
    query, key, lse = last_contiguous(query.detach()), last_contiguous(key.detach()), lse.contiguous()
    if keep is not None:
        keep = last_contiguous(keep.expand(*keep.shape[:3], columns)).expand(batch, heads, rows, columns)
    threads = thread_count(2 * batch * heads * rows * columns * dim, LEAST_WORK)
    units, row_blocks = split_rows(batch * heads, rows, 2 * threads)
    options: dict[str, Any] = {} if keep is None else {"keep": rows_struct(keep)}
    work = FlashStruct(
        unit_count=units if columns else 0,
        heads=heads,
        group=heads // max(shared, 1),
        rows=rows,
        columns=columns,
        dim=dim,
        dtype=DTYPES.index(query.dtype),
        row_blocks=row_blocks,
        scale=scale,
        softcap=softcap or 0.0,
        query=rows_struct(query),
        key=rows_struct(key),
        lse=rows_struct(lse),
        weights=rows_struct(weights),
        **(options if entropy_terms is None else options | {"entropy_terms": rows_struct(entropy_terms)}),
    )
    run_units(library.current().flash_weights, work, threads)
    return weights


def write_all(problem: FlashProblem, lse: Tensor, weights: Tensor) -> None:
    """w_ij = exp(s_ij - lse_i) for the pairs of the problem's tiles, written into zeros.

    lse (B, H, M) float32: rows where it is no finite number have weights 0. weights (B, H, M, N) float32, contiguous.
    """
    batch, heads, rows, _ = problem.query.shape
    lse = torch.where(lse.isfinite(), lse, float("inf")).contiguous()
    threads = thread_count(problem.flops(), LEAST_WORK)
    units, row_blocks = split_rows(batch * heads, rows, 2 * threads)
    work, _held = problem.arguments(units, row_blocks=row_blocks, lse=rows_struct(lse), weights=rows_struct(weights))
    run_units(library.current().flash_weights, work, threads)


def _check_weights(query: Tensor, key: Tensor, lse: Tensor, weights: Tensor, entropy_terms: Tensor | None) -> None:
    named = {"query": query, "key": key, "lse": lse, "weights": weights}
    if entropy_terms is not None:
        named["entropy_terms"] = entropy_terms
    for name, tensor in named.items():
        check_cpu(name, tensor)
    if query.dtype not in DTYPES or key.dtype != query.dtype:
        raise DtypeError(f"query is {query.dtype} and key {key.dtype}; native code takes both as {DTYPE_NAMES}")
    (batch, heads, rows, dim), (columns, shared) = query.shape, (key.shape[2], key.shape[1])
    if heads % max(shared, 1):
        raise ShapeError(f"key has {shared} heads; they need to divide the {heads} query heads")
    wanted = {
        "key": (batch, shared, columns, dim),
        "lse": (batch, heads, rows),
        "weights": (batch, heads, rows, columns),
        "entropy_terms": (batch, heads, rows, columns),
    }
    for name, tensor in named.items():
        if name != "query" and tuple(tensor.shape) != wanted[name]:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs {wanted[name]}")
        if name in ("lse", "weights", "entropy_terms") and tensor.dtype != torch.float32:
            raise DtypeError(f"{name} is {tensor.dtype}; native code takes torch.float32")
    check_written(weights=weights, entropy_terms=entropy_terms)
