"""Find the output projection of attention modules, whose input is the concatenated heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..errors import ConfigurationError, nearest
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
