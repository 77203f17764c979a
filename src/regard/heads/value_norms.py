"""Norm-based analysis: weights times the norms of the values after the output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError


def transformed_values(value: Tensor, output_weight: Tensor) -> Tensor:
    """f(x_j) = v_j · W_h of each head h, the contribution of key j at weight 1 to the output: (..., heads, N, dim).

    Shapes: value (..., key heads, N, Dv), with the bias of its projection in it; output_weight (dim, heads · Dv), as
    `torch.nn.Linear` stores it: W_h are the Dv columns of head h. Query heads that share a value head are consecutive.

    Raises:
        ShapeError: the heads of the output weight are no multiple of those of the values.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 2.

    >>> import torch
    >>> transformed_values(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([[1.0, -1.0]]))[..., 0]
    tensor([[ 1.,  2.],
            [-3., -4.]])
    """
    parts = _per_head(value, output_weight)
    return value.repeat_interleave(len(parts) // value.shape[-3], dim=-3) @ parts


def transformed_norms(value: Tensor, output_weight: Tensor) -> Tensor:
    """‖f(x_j)‖ of `transformed_values`, without them in memory: (..., heads, N).

    ‖v W‖² is v (W Wᵀ) vᵀ, so that it takes O(N · Dv²) for each head and any output dim. For long texts: with
    the logarithm of these norms as a bias on the keys, every lens computes weights · norms, each row normalised to 1:
    `regard.observe(q, k, v, lens, bias=transformed_norms(v, w).log()[..., None, :])`.

    Arguments and errors are those of `transformed_values`.

    >>> import torch
    >>> transformed_norms(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    tensor([[5.]])
    """
    parts = _per_head(value, output_weight)
    value = value.repeat_interleave(len(parts) // value.shape[-3], dim=-3)
    return ((value @ (parts @ parts.mT)) * value).sum(-1).clamp(min=0.0).sqrt()


def norm_weighted(weights: Tensor, value: Tensor, output_weight: Tensor) -> Tensor:
    """‖α_ij f(x_j)‖ = α_ij · ‖f(x_j)‖, the norm of what key j adds to output i: (..., heads, M, N).

    A large weight on a key with a small value, as often on separators, contributes little.

    Shapes: weights (..., heads, M, N); the rest and the errors are those of `transformed_values`.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 3, norm-based analysis.

    >>> import torch
    >>> norm_weighted(torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[0.0], [3.0]]]), torch.tensor([[2.0]]))
    tensor([[[0., 3.]]])
    """
    norms = transformed_norms(value, output_weight)
    if weights.ndim < 3 or weights.shape[-3] != norms.shape[-2] or weights.shape[-1] != norms.shape[-1]:
        raise ShapeError(
            f"weights have the shape {tuple(weights.shape)} for {norms.shape[-2]} heads and {norms.shape[-1]} values; "
            f"they need (..., {norms.shape[-2]}, queries, {norms.shape[-1]})"
        )
    return weights * norms.unsqueeze(-2)


def effective_attention(weights: Tensor, transformed: Tensor) -> Tensor:
    """A - A·P, the weights without the part that does not affect the output; P projects on the left null space of T.

    T (N, dim) are the transformed values of a head: adding x with x · T = 0 to a row of A does not change the output.
    Where N exceeds the rank of T, weights are not identifiable, and this is the solution with the least norm. It may be
    negative, and rows need not sum to 1.

    Shapes: weights (..., heads, M, N), transformed (..., heads, N, dim) or any vectors of which T is a linear map;
    values (..., heads, N, Dv) themselves do where the output projection loses nothing.

    Source: Brunner et al. 2020 (arXiv 1908.04211), section 3.

    >>> import torch
    >>> effective_attention(torch.tensor([[[0.9, 0.1]]]), torch.tensor([[[1.0], [1.0]]]))
    tensor([[[0.5000, 0.5000]]])
    """
    if weights.ndim < 2 or transformed.ndim < 2 or weights.shape[-1] != transformed.shape[-2]:
        raise ShapeError(
            f"weights {tuple(weights.shape)} and transformed values {tuple(transformed.shape)}: each key needs one "
            "vector, (..., heads, M, N) and (..., heads, N, dim)"
        )
    left, sizes, _ = torch.linalg.svd(transformed, full_matrices=False)  # [..., N, r]
    smallest = sizes[..., :1] * max(transformed.shape[-2:]) * torch.finfo(sizes.dtype).eps
    left = left * (sizes > smallest).unsqueeze(-2)
    return (weights @ left) @ left.mT


def _per_head(value: Tensor, output_weight: Tensor) -> Tensor:
    """The slice of the output projection for each head: (heads, Dv, dim)."""
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
