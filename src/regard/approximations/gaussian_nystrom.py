"""SOFT: attention by a Gaussian kernel in place of softmax, through landmarks."""

from __future__ import annotations

from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import DtypeError
from ..kernels.validation import make_problem
from ..utils.numbers import whole_number
from ..utils.other_types import needs_tensor
from .nystrom import pseudo_inverse, segment_means


def soft_attention(query: Tensor, value: Tensor, *, landmarks: int, iterations: int = 20) -> Tensor:
    """P Z (Pᵀ V) with P_il = e^{-‖q_i - q̃_l‖² / (2 √D)}: a Gaussian kernel of the tokens, of low rank, by landmarks.

    Queries are the keys too, so that the kernel is symmetric. The q̃ are means of `landmarks` segments of nearly equal
    length, and Z is the inverse of the kernel between them, by `pseudo_inverse`. No sum divides the weights: rows do
    not sum to 1. With as many landmarks as tokens it is Σ_j e^{-‖q_i - q_j‖² / (2 √D)} v_j. Time and memory are linear
    in the length; P is N × landmarks. All is differentiable. There is no mask: landmarks mix all positions.

    Shapes: query (..., heads, N, D), value (..., heads, N, Dv); the output is (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D).
        value: (..., heads, N, Dv), or of a divisor of the heads.
        landmarks: 49 in the paper, for images.
        iterations: of the inverse; near landmarks need more.

    Raises:
        ConfigurationError: landmarks or iterations below 1.
        ShapeError, DtypeError, DeviceError: of tensors that do not fit, as `regard.attention`.

    Source: Lu et al. 2021, SOFT (arXiv 2110.11945), section 3; there landmarks are by a convolution or means, and the
    inverse is by Newton's iteration.

    >>> import torch, regard
    >>> query, value = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [0.0]])
    >>> regard.approximations.soft_attention(query, value, landmarks=2).mT   # 1 and e^-2
    tensor([[1.0000, 0.1353]])
    """
    for name, number in (("landmarks", landmarks), ("iterations", iterations)):
        whole_number(name, number)
    for name, tensor in (("query", query), ("value", value)):
        if refused := needs_tensor(name, tensor):
            raise DtypeError(refused)
    grouped = query[..., : value.shape[-3], :, :] if query.ndim > 3 and value.ndim > 3 else query
    problem = make_problem(query, grouped, value)  # checks the shapes
    query, value = at_least_float32(problem.pairs.query), at_least_float32(problem.value)
    dtype = problem.value.dtype
    if not problem.queries:
        return problem.value.new_zeros(*query.shape[:-1], value.shape[-1])
    if problem.heads:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    with without_autocast(query.device.type):
        query = query - query.mean(-2, keepdim=True)  # distances lose fewer digits near the origin
        means = segment_means(query, landmarks)
        near = gaussian_kernel(query, means)
        return (near @ (pseudo_inverse(gaussian_kernel(means, means), iterations) @ (near.mT @ value))).to(dtype)


def gaussian_kernel(rows: Tensor, columns: Tensor) -> Tensor:
    """e^{-‖r_i - c_j‖² / (2 √D)}, (..., M, N) of (..., M, D) and (..., N, D)."""
    squares = rows.square().sum(-1, keepdim=True) + columns.square().sum(-1).unsqueeze(-2)
    distances = (squares - 2 * rows @ columns.mT).clamp(min=0)
    return (-distances / (2 * rows.shape[-1] ** 0.5)).exp()
