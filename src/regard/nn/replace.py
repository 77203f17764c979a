"""Layers of torch inside a model replaced by regard's, with their parameters: all attention, or all linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import nn

from ..errors import ConfigurationError
from .linear import Linear
from .multihead import MultiheadAttention

Kind = type[nn.Module]

# The tables of a module that its twin has as its own. All else is one for both: a hook's handle still removes it.
_OWN_TABLES = ("_parameters", "_buffers", "_modules")

_MOST_LINES = 12  # of a kind that a report has


@dataclass(frozen=True, eq=False)
class Swapped:
    """What `swap` or `swap_linear` did: `print` it.

    model: the model that was given, now with regard's layers; where it was such a layer itself, the new one. kind: the
    name of the layers, torch's and regard's. replaced: their names, as of `model.named_modules()`; '' is the model
    itself. left: by name, the layers that stay torch's or others', and why. notes: what else is to be known, a sentence
    each.
    """

    model: nn.Module
    kind: str
    replaced: tuple[str, ...]
    left: Mapping[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.replaced)
        lines = [f"{count} of {count + len(self.left)} nn.{self.kind} replaced by regard.nn.{self.kind}"]
        lines += _first([f"  replaced {_said(name)}" for name in self.replaced])
        lines += _first([f"  left {_said(name)}: {why}" for name, why in self.left.items()])
        return "\n".join(lines + _first([f"  {note}" for note in self.notes]))

    def __repr__(self) -> str:
        return (
            f"Swapped(model=<{type(self.model).__name__}>, kind={self.kind!r}, replaced={list(self.replaced)}, "
            f"left={dict(self.left)}, notes={list(self.notes)})"
        )


def swap(model: nn.Module) -> Swapped:
    """Replace every `torch.nn.MultiheadAttention` inside a model by `regard.nn.MultiheadAttention`, in place.

    The new layers have the very parameters of the old ones, so optimisers go on as before; they have their names,
    `training`, hooks and whatever else was set on them. A layer that the model has in several places stays one. A
    second `swap` finds nothing to do.

    torch's encoder layer computes attention by itself in evaluation; after `swap` it calls the new layer, as it does in
    training. An `nn.TransformerEncoder` above them no longer turns padded batches into nested tensors: its
    `use_nested_tensor` becomes False, and padded positions of its output are what the layers make of them, and not 0.

    Left as they are, and told of: instances of subclasses, which have a meaning of their own; layers whose `forward`
    was replaced on the instance; layers that are compiled. A layer that the model holds in a plain list or a closure
    is one that torch does not know of, and is not found.

    Raises:
        ConfigurationError: the model is no `nn.Module`.

    >>> import torch
    >>> from regard.nn import swap
    >>> model = torch.nn.TransformerDecoderLayer(8, 2)
    >>> print(swap(model))
    2 of 2 nn.MultiheadAttention replaced by regard.nn.MultiheadAttention
      replaced self_attn
      replaced multihead_attn
    """
    swapped = _replaced("swap", model, nn.MultiheadAttention, MultiheadAttention)
    return replace(swapped, notes=(*swapped.notes, *_without_nested(swapped.model)))


def swap_linear(model: nn.Module) -> Swapped:
    """Replace every `torch.nn.Linear` inside a model by `regard.nn.Linear`, in place, as `swap` does with attention.

    The weights are the same, the products are faster where `regard.nn.Linear` says so, and equal but for the order in
    which they are added up. In a model of transformers whose attention is regard's, these products are what remains.

    Left as they are, and told of: what `swap` leaves, subclasses included, such as those of quantised or parametrised
    layers.

    Raises:
        ConfigurationError: the model is no `nn.Module`.

    >>> import torch
    >>> from regard.nn import swap_linear
    >>> print(swap_linear(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))))
    2 of 2 nn.Linear replaced by regard.nn.Linear
      replaced 0
      replaced 2
    """
    return _replaced("swap_linear", model, nn.Linear, Linear)


def _replaced(asked: str, model: nn.Module, theirs: Kind, ours: Kind) -> Swapped:
    """What came of replacing torch's layers of a kind by regard's, a subclass that adds nothing to what they hold."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigurationError(f"{asked} needs a torch.nn.Module, such as nn.Transformer(...); this is {given}")
    twins: dict[nn.Module, nn.Module] = {}
    replaced: list[str] = []
    left: dict[str, str] = {}
    notes: list[str] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, theirs) or isinstance(module, ours):
            continue
        if reason := _why_not(module, name, theirs):
            left[name] = reason
            continue
        if module not in twins:
            if count := _hooks(module):
                notes.append(f"{_said(name)}: {count} hook{'s' * (count > 1)} came along")
            twins[module] = _twin(module, ours)
        model = _put(model, name, twins[module])
        replaced.append(name)
    return Swapped(model, ours.__name__, tuple(replaced), MappingProxyType(left), tuple(notes))


def _why_not(module: nn.Module, name: str, theirs: Kind) -> str:
    """Why a layer cannot be replaced; empty if it can."""
    kind = type(module)
    if kind is not theirs:
        return f"it is a {kind.__module__}.{kind.__qualname__}, a subclass with a meaning of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if vars(module).get("_compiled_call_impl") is not None or name.rpartition(".")[2] == "_orig_mod":
        return "it is compiled: swap first, then compile"
    if module._load_state_dict_pre_hooks:
        return "it has hooks for load_state_dict, which know it as it is: swap first, then register them"
    return ""


def _twin(module: nn.Module, ours: Kind) -> nn.Module:
    """A layer of regard's with all that the module holds, made as an unpickled one is."""
    twin = ours.__new__(ours)
    twin.__setstate__({name: held.copy() if name in _OWN_TABLES else held for name, held in vars(module).items()})
    return twin


def _put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module of that name: itself, or where the name is '' the module."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


def _without_nested(model: nn.Module) -> list[str]:
    """Encoders over regard's layers, kept from handing them nested tensors; a note on each that would have."""
    notes = []
    for name, encoder in model.named_modules():
        if not isinstance(encoder, nn.TransformerEncoder) or not getattr(encoder, "use_nested_tensor", False):
            continue
        if any(isinstance(inner, MultiheadAttention) for inner in encoder.modules()):
            encoder.use_nested_tensor = False
            notes.append(f"{_said(name)}: use_nested_tensor is False now")
    return notes


def _hooks(module: nn.Module) -> int:
    """How many hooks run where the module is called."""
    tables = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return sum(len(table) for table in tables)


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"  and {more:,} more"] if more > 0 else lines


def _said(name: str) -> str:
    return name or "the model itself"
