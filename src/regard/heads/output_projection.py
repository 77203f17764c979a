"""The output projection of attention modules, and norm-based analysis: weights times the norms of projected values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, ShapeError, nearest
from ..lenses.value_norms import projections_by_head, transformed_norms
from ..nn import MultiheadAttention

OUTPUTS = ("projections.output", "out_proj", "o_proj", "c_proj", "out_lin", "Wo", "o", "wo", "dense", "output.dense")
"""Names of output projections inside an attention module."""
PARENT_OUTPUTS = ("output.dense",)
"""Names of output projections in the parent of an attention module, as in BERT."""
HEADS = ("projections.num_heads", "num_heads", "num_attention_heads", "n_heads", "n_head")
"""Names of the number of query heads, in a module or its configuration."""


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """The output projection of an attention module: head h is h · width to (h + 1) · width - 1 of its input."""

    module: nn.Module
    heads: int
    width: int


def head_projections(
    model: nn.Module, outputs: Mapping[str, nn.Module | str] | None = None
) -> dict[str, HeadProjection]:
    """The output projection of every attention module of a model, by the module's name.

    Found are modules with a known attribute for the number of heads and a known name of the output projection: those of
    `regard.nn`, and of nearly all models of transformers. For others `outputs` maps the name of the attention module
    to its output projection, a module or its name in the model.

    Raises:
        ConfigurationError: an output projection whose input heads do not divide, a name that does not exist.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(16, num_heads=4))
    >>> [(name, found.heads, found.width) for name, found in head_projections(torch.nn.Sequential(layer)).items()]
    [('0', 4, 4)]
    """
    found, modules = {}, dict(model.named_modules())
    for name, module in modules.items():
        override = (outputs or {}).get(name)
        if override is None and not _is_attention(module):
            continue
        projection = _projection(name, modules) if override is None else _module_of(modules, override)
        if projection is not None and _number_of_heads(module):
            found[name] = _head_projection(name, module, projection)
    for name in outputs or {}:
        if name not in found:
            known = "it does not say how many heads it has" if name in modules else nearest(name, modules)
            raise ConfigurationError(f"outputs names the attention module {name!r}: {known}")
    return found


def head_projection(
    model: nn.Module, name: str, outputs: Mapping[str, nn.Module | str] | None = None
) -> HeadProjection:
    """The output projection of the attention module of that name.

    Raises:
        ConfigurationError: there is no such module, or its output projection is not found.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        raise ConfigurationError(f"there is no module {name!r}; {nearest(name, head_projections(model))}")
    override = (outputs or {}).get(name)
    module = modules[name]
    if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
        raise ConfigurationError(
            f"{name!r} is torch's MultiheadAttention, which never calls its output projection, so that no hook sees "
            "its heads: put regard's in its place with regard.nn.swap(model)"
        )
    projection = _projection(name, modules) if override is None else _module_of(modules, override)
    if projection is None or not _number_of_heads(module):
        lacks = "its number of heads" if projection is not None else "its output projection"
        raise ConfigurationError(
            f"{name!r}, a {type(module).__name__}, does not say which is {lacks}: name one of "
            f"{', '.join(head_projections(model)) or 'none is known in this model'}; or give the projection, as "
            f"outputs={{{name!r}: 'name.of.linear'}}, of a module that has num_heads"
        )
    return _head_projection(name, module, projection)


def _is_attention(module: nn.Module) -> bool:
    called = "attention" in type(module).__name__.lower()
    torchs = isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention)
    return called and not torchs and bool(_number_of_heads(module))


def _projection(name: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The output projection inside a module, or in its parent."""
    parent = name.rpartition(".")[0]
    places = [f"{name}.{output}" if name else output for output in OUTPUTS]
    places += [f"{parent}.{output}" if parent else output for output in PARENT_OUTPUTS]
    return next((modules[place] for place in places if place in modules), None)


def _module_of(modules: Mapping[str, nn.Module], projection: nn.Module | str) -> nn.Module:
    if isinstance(projection, nn.Module):
        return projection
    if projection not in modules:
        raise ConfigurationError(
            f"outputs names the projection {projection!r}, which is not there: {nearest(projection, modules)}"
        )
    return modules[projection]


def _number_of_heads(module: nn.Module) -> int:
    """The number of query heads of a module; 0 where it is not found."""
    for owner in (module, getattr(module, "config", None)):
        for name in HEADS:
            number = owner
            for part in name.split("."):
                number = getattr(number, part, None)
            if isinstance(number, int) and number > 0:
                return number
    return 0


def _head_projection(name: str, module: nn.Module, projection: nn.Module) -> HeadProjection:
    heads, weight = _number_of_heads(module), getattr(projection, "weight", None)
    width = getattr(projection, "in_features", None)
    if width is None and weight is not None and weight.ndim == 2:
        width = weight.shape[0]  # transformers' Conv1D
    if not isinstance(width, int) or width % heads:
        raise ConfigurationError(
            f"{name!r} has {heads} heads, and its output projection, a {type(projection).__name__}, takes "
            f"{width} features: heads need to divide them. Give another, as outputs={{{name!r}: 'name.of.linear'}}"
        )
    return HeadProjection(projection, heads, width // heads)


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
    parts = projections_by_head(value, output_weight)
    return value.repeat_interleave(len(parts) // value.shape[-3], dim=-3) @ parts


def norm_weighted(weights: Tensor, value: Tensor, output_weight: Tensor) -> Tensor:
    """‖α_ij f(x_j)‖ = α_ij · ‖f(x_j)‖, the norm of key j's contribution to output i: (..., heads, M, N).

    A large weight on a key with a small value, as often on separators, contributes little. For long texts, without the
    weights in memory: the lens `regard.lenses.Contribution`.

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
