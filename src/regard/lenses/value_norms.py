"""Norms of values after the output projection: what a key adds to the output at weight 1."""

from __future__ import annotations

from torch import Tensor

from ..errors import ShapeError


def transformed_norms(value: Tensor, output_weight: Tensor) -> Tensor:
    """‖v_j W_h‖ of each head h and key j, without the products in memory: (..., heads, N).

    ‖v W‖² is v (W Wᵀ) vᵀ, so that it takes O(N · Dv²) for each head and any output dim.

    Shapes: value (..., key heads, N, Dv), with the bias of its projection in it; output_weight (dim, heads · Dv), as
    `torch.nn.Linear` stores it: W_h are the Dv columns of head h. Query heads that share a value head are consecutive.

    Raises:
        ShapeError: the heads of the output weight are no multiple of those of the values.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 2, whose f(x_j) is v_j W_h.

    >>> import torch
    >>> transformed_norms(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    tensor([[5.]])
    """
    parts = projections_by_head(value, output_weight)
    value = value.repeat_interleave(len(parts) // value.shape[-3], dim=-3)
    return ((value @ (parts @ parts.mT)) * value).sum(-1).clamp(min=0.0).sqrt()


def projections_by_head(value: Tensor, output_weight: Tensor) -> Tensor:
    """The slice of the output projection for each head: (heads, Dv, dim).

    Raises:
        ShapeError: it does not fit the values.
    """
    if value.ndim < 3 or output_weight.ndim != 2:
        raise ShapeError(
            f"value has the shape {tuple(value.shape)} and output_weight {tuple(output_weight.shape)}; they need "
            "(..., heads, N, Dv) and (dim, heads · Dv)"
        )
    heads, size = value.shape[-3], value.shape[-1]
    if not heads or not size or output_weight.shape[1] % (heads * size):
        raise ShapeError(
            f"output_weight has the shape {tuple(output_weight.shape)} and value {tuple(value.shape)}: its second axis "
            f"needs {heads} heads of {size}, or a multiple of them; a Conv1D stores the transpose, give .T"
        )
    return output_weight.T.unflatten(0, (-1, size))
