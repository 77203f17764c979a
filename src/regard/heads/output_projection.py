"""Where the heads of a module come together: its output projection, and which part of its input each head is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..errors import ConfigurationError, nearest
from ..nn import MultiheadAttention

OUTPUTS = ("projections.output", "out_proj", "o_proj", "c_proj", "out_lin", "Wo", "o", "wo", "dense", "output.dense")
"""What output projections are called, inside an attention module; and beside it, as BERT has it."""
BESIDE = ("output.dense",)
HEADS = ("projections.num_heads", "num_heads", "num_attention_heads", "n_heads", "n_head")
"""What the number of query heads is called, of a module or of its configuration."""


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

    An attention module is one that says how many heads it has and whose output projection has a known name: those of
    `regard.nn`, and of nearly all models of transformers. Others are told: `outputs` maps the name of an attention
    module to its output projection, the module or its name in the model.

    Raises:
        ConfigurationError: an output projection that heads do not divide, a name that is not there.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(16, num_heads=4))
    >>> [(name, found.heads, found.width) for name, found in head_projections(torch.nn.Sequential(layer)).items()]
    [('0', 4, 4)]
    """
    found, modules = {}, dict(model.named_modules())
    for name, module in modules.items():
        told = (outputs or {}).get(name)
        if told is None and not _is_attention(module):
            continue
        projection = _projection(name, modules) if told is None else _named(modules, told)
        if projection is not None and _number_of_heads(module):
            found[name] = _parted(name, module, projection)
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
        ConfigurationError: there is no such module, or it cannot be told which its output projection is.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        raise ConfigurationError(f"there is no module {name!r}; {nearest(name, head_projections(model))}")
    told = (outputs or {}).get(name)
    module = modules[name]
    if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
        raise ConfigurationError(
            f"{name!r} is torch's MultiheadAttention, which never calls its output projection, so that no hook sees "
            "its heads: put regard's in its place with regard.nn.swap(model)"
        )
    projection = _projection(name, modules) if told is None else _named(modules, told)
    if projection is None or not _number_of_heads(module):
        lacks = "its number of heads" if projection is not None else "its output projection"
        raise ConfigurationError(
            f"{name!r}, a {type(module).__name__}, does not say which is {lacks}: name one of "
            f"{', '.join(head_projections(model)) or 'none is known in this model'}; or give the projection, as "
            f"outputs={{{name!r}: 'name.of.linear'}}, of a module that has num_heads"
        )
    return _parted(name, module, projection)


def _is_attention(module: nn.Module) -> bool:
    called = "attention" in type(module).__name__.lower()
    torchs = isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention)
    return called and not torchs and bool(_number_of_heads(module))


def _projection(name: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The output projection inside a module, or beside it in its parent."""
    parent = name.rpartition(".")[0]
    places = [f"{name}.{output}" if name else output for output in OUTPUTS]
    places += [f"{parent}.{output}" if parent else output for output in BESIDE]
    return next((modules[place] for place in places if place in modules), None)


def _named(modules: Mapping[str, nn.Module], told: nn.Module | str) -> nn.Module:
    if isinstance(told, nn.Module):
        return told
    if told not in modules:
        raise ConfigurationError(f"outputs names the projection {told!r}, which is not there: {nearest(told, modules)}")
    return modules[told]


def _number_of_heads(module: nn.Module) -> int:
    """How many query heads a module has; 0 where it does not say."""
    for owner in (module, getattr(module, "config", None)):
        for name in HEADS:
            number = owner
            for part in name.split("."):
                number = getattr(number, part, None)
            if isinstance(number, int) and number > 0:
                return number
    return 0


def _parted(name: str, module: nn.Module, projection: nn.Module) -> HeadProjection:
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
