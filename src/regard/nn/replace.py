"""Replace torch's attention or linear layers inside a model by regard's, which share their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import nn

from ..errors import ConfigurationError
from .linear import Linear
from .multihead import MultiheadAttention

Kind = type[nn.Module]

# Dicts of a module that are copied for its replacement. All else is shared, so that hook handles still remove hooks.
_COPIED_TABLES = ("_parameters", "_buffers", "_modules")

_MAX_LINES = 12  # of each kind in a printed report


@dataclass(frozen=True, eq=False)
class SwapReport:
    """Result of `swap` or `swap_linear`; `print` it.

    model: the same model, now with regard's layers; the new layer where the model was one itself. kind: class name of
    the layers, torch's and regard's. replaced: their names in `model.named_modules()`; '' is the model itself. skipped:
    by name, why other layers of the kind were not replaced. notes: side effects, a sentence each.
    """

    model: nn.Module
    kind: str
    replaced: tuple[str, ...]
    skipped: Mapping[str, str]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.replaced)
        lines = [f"{count} of {count + len(self.skipped)} nn.{self.kind} replaced by regard.nn.{self.kind}"]
        lines += _shortened([f"  replaced {_label(name)}" for name in self.replaced])
        lines += _shortened([f"  skipped {_label(name)}: {why}" for name, why in self.skipped.items()])
        return "\n".join(lines + _shortened([f"  {note}" for note in self.notes]))

    def __repr__(self) -> str:
        return (
            f"SwapReport(model=<{type(self.model).__name__}>, kind={self.kind!r}, replaced={list(self.replaced)}, "
            f"skipped={dict(self.skipped)}, notes={list(self.notes)})"
        )


def swap(model: nn.Module) -> SwapReport:
    """Replace every `torch.nn.MultiheadAttention` inside a model by `regard.nn.MultiheadAttention`, in place.

    The new layers share the parameters of the old ones, so optimisers continue as before; names, `training`, hooks and
    all other attributes are preserved. A layer that occurs in several places stays one. A second `swap` replaces
    nothing.

    torch's encoder layer computes attention by itself in evaluation; after `swap` it calls the new layer, as it does in
    training. An `nn.TransformerEncoder` above them no longer turns padded batches into nested tensors: its
    `use_nested_tensor` becomes False, and its output at padded positions is computed by the layers, and not 0.

    Skipped, and reported: instances of subclasses, which may compute something else; layers whose `forward` was
    replaced on the instance; compiled layers. A layer in a plain list or a closure is not registered with torch, and is
    not found.

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
    report = _replace_layers("swap", model, nn.MultiheadAttention, MultiheadAttention)
    return replace(report, notes=(*report.notes, *_disable_nested_tensors(report.model)))


def swap_linear(model: nn.Module) -> SwapReport:
    """Replace every `torch.nn.Linear` inside a model by `regard.nn.Linear`, in place, as `swap` does with attention.

    The weights are the same; the products are faster where `regard.nn.Linear` says so, and equal up to the order of
    summation. In a model of transformers that uses regard's attention, these products take most of the remaining time.

    Dynamic quantisation by torch needs the new type by name; see `regard.nn.Linear`.

    Skipped, and reported: the same cases as by `swap`, subclasses included, such as quantised or parametrised layers.

    Raises:
        ConfigurationError: the model is no `nn.Module`.

    >>> import torch
    >>> from regard.nn import swap_linear
    >>> print(swap_linear(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))))
    2 of 2 nn.Linear replaced by regard.nn.Linear
      replaced 0
      replaced 2
    """
    return _replace_layers("swap_linear", model, nn.Linear, Linear)


def _replace_layers(function: str, model: nn.Module, theirs: Kind, ours: Kind) -> SwapReport:
    """Replace torch's layers of one class by regard's, a subclass with the same attributes."""
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigurationError(f"{function} needs a torch.nn.Module, such as nn.Transformer(...); this is {found}")
    replacements: dict[nn.Module, nn.Module] = {}
    replaced: list[str] = []
    skipped: dict[str, str] = {}
    notes: list[str] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, theirs) or isinstance(module, ours):
            continue
        if reason := _why_not(module, name, theirs):
            skipped[name] = reason
            continue
        if module not in replacements:
            if count := _hooks(module):
                notes.append(f"{_label(name)}: preserved {count} hook{'s' * (count > 1)}")
            replacements[module] = _replacement(module, ours)
        model = _set_submodule(model, name, replacements[module])
        replaced.append(name)
    return SwapReport(model, ours.__name__, tuple(replaced), MappingProxyType(skipped), tuple(notes))


def _why_not(module: nn.Module, name: str, theirs: Kind) -> str:
    """The reason why a layer cannot be replaced; empty if it can."""
    kind = type(module)
    if kind is not theirs:
        return f"it is {kind.__module__}.{kind.__qualname__}, a subclass with a meaning of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if vars(module).get("_compiled_call_impl") is not None or name.rpartition(".")[2] == "_orig_mod":
        return "it is compiled: swap first, then compile"
    if module._load_state_dict_pre_hooks:
        return "it has hooks for load_state_dict, which refer to this object: swap first, then register them"
    return ""


def _replacement(module: nn.Module, ours: Kind) -> nn.Module:
    """A layer of regard's with the attributes of the module, constructed as by unpickling."""
    ours_layer = ours.__new__(ours)
    state = {name: value.copy() if name in _COPIED_TABLES else value for name, value in vars(module).items()}
    ours_layer.__setstate__(state)
    return ours_layer


def _set_submodule(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Set a submodule by its dotted name; returns the model, or the module where the name is ''."""
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
    return model


def _disable_nested_tensors(model: nn.Module) -> list[str]:
    """Set `use_nested_tensor` of encoders with regard's layers to False, as these refuse them; a note on each."""
    notes = []
    for name, encoder in model.named_modules():
        if not isinstance(encoder, nn.TransformerEncoder) or not getattr(encoder, "use_nested_tensor", False):
            continue
        if any(isinstance(inner, MultiheadAttention) for inner in encoder.modules()):
            encoder.use_nested_tensor = False
            notes.append(f"{_label(name)}: use_nested_tensor is False now")
    return notes


def _hooks(module: nn.Module) -> int:
    """Number of hooks that run when the module is called."""
    tables = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return sum(len(table) for table in tables)


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"  and {more:,} more"] if more > 0 else lines


def _label(name: str) -> str:
    return name or "the model itself"
