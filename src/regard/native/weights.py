"""The weights of dot-product attention from the log-sum-exp of their rows, by the C functions of `library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import library
from .flash import LEAST_WORK, FlashProblem, FlashWork, place, shares
from .library import DTYPES, check_cpu, last_contiguous
from .threads import together, workers


def write_weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    lse: Tensor,
    weights: Tensor,
    *,
    terms: Tensor | None = None,
    keep: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """w_ij = exp(softcap(scale · q_i · k_j) - lse_i), 0 where `keep` is False; `weights`, which they are written into.

    query (B, H, M, D) and key (B, Hk, N, D), both float32 or both bfloat16, Hk divides H; lse (B, H, M) float32, +inf
    for rows whose weights are to be 0; weights and terms (B, H, M, N) float32, whose last axis is contiguous; keep
    (B or 1, H or 1, M or 1, N or 1) bool. All are on the CPU; autograd sees nothing. terms: w · log₂ w is put there.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    (batch, heads, rows, dim), (_, shared, columns, _) = query.shape, key.shape
    _check(query, key, lse, weights, terms)
    query, key, lse = last_contiguous(query.detach()), last_contiguous(key.detach()), lse.contiguous()
    if keep is not None:
        keep = last_contiguous(keep.expand(*keep.shape[:3], columns)).expand(batch, heads, rows, columns)
    threads = workers(2 * batch * heads * rows * columns * dim, LEAST_WORK)
    units, segment = shares(batch * heads, rows, 2 * threads)
    given: dict[str, Any] = {} if keep is None else {"keep": place(keep)}
    work = FlashWork(
        units=units if columns else 0,
        heads=heads,
        group=heads // max(shared, 1),
        rows=rows,
        columns=columns,
        dim=dim,
        narrow=query.dtype == torch.bfloat16,
        segment=segment,
        scale=scale,
        softcap=softcap or 0.0,
        query=place(query),
        key=place(key),
        lse=lse.data_ptr(),
        weights=place(weights),
        **(given if terms is None else given | {"terms": place(terms)}),
    )
    together(library.current().flash_weights, work, threads)
    return weights


def write_all(problem: FlashProblem, lse: Tensor, weights: Tensor) -> None:
    """w_ij = exp(s_ij - lse_i) for the pairs of the problem's tiles, written into zeros.

    lse (B, H, M) float32: rows where it is no finite number have weights 0. weights (B, H, M, N) float32, contiguous.
    """
    batch, heads, rows, _ = problem.query.shape
    lse = torch.where(lse.isfinite(), lse, float("inf")).contiguous()
    threads = workers(problem.flops(), LEAST_WORK)
    units, segment = shares(batch * heads, rows, 2 * threads)
    work, _held = problem.arguments(units, segment, lse=lse.data_ptr(), weights=place(weights))
    together(library.current().flash_weights, work, threads)


def _check(query: Tensor, key: Tensor, lse: Tensor, weights: Tensor, terms: Tensor | None) -> None:
    named = {"query": query, "key": key, "lse": lse, "weights": weights} | ({} if terms is None else {"terms": terms})
    for name, tensor in named.items():
        check_cpu(name, tensor)
    if query.dtype not in DTYPES or key.dtype != query.dtype:
        raise DtypeError(
            f"query is {query.dtype} and key {key.dtype}; native code takes both as torch.float32 or both as "
            "torch.bfloat16"
        )
    (batch, heads, rows, dim), (columns, shared) = query.shape, (key.shape[2], key.shape[1])
    if heads % max(shared, 1):
        raise ShapeError(f"key has {shared} heads; they need to divide the {heads} query heads")
    wanted = {
        "key": (batch, shared, columns, dim),
        "lse": (batch, heads, rows),
        "weights": (batch, heads, rows, columns),
        "terms": (batch, heads, rows, columns),
    }
    for name, tensor in named.items():
        if name != "query" and tuple(tensor.shape) != wanted[name]:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs {wanted[name]}")
        if name in ("lse", "weights", "terms") and tensor.dtype != torch.float32:
            raise DtypeError(f"{name} is {tensor.dtype}; native code takes torch.float32")
        if name in ("weights", "terms") and columns > 1 and tensor.stride(-1) != 1:
            raise ShapeError(f"{name} needs its last axis contiguous; its strides are {tensor.stride()}")
