"""Making "regard" known to transformers, and choosing it for a model that is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType

from torch import nn

from ..errors import ConfigurationError, require
from .attention_function import NOT_KNOWN, attend
from .mask_tensor import symbolic_mask

NAME = "regard"
"""The name under which transformers knows this attention: `attn_implementation="regard"`."""


def register() -> None:
    """Make `attn_implementation="regard"` work: the attention function and the mask function, under one name.

    It may be called more than once. Models choose it when they are made, `from_pretrained(...,
    attn_implementation="regard")`, or later by `swap`.

    What it computes is what `attn_implementation="eager"` does: windows, softcap, sinks, packed sequences, grouped
    heads, every cache, position biases, cross-attention, dropout. A keyword that changes the result and is not known
    raises. It differs from eager attention in three things:

    - A row that may attend to nothing gives 0 (eager: the mean of all values). Such rows are padded positions, whose
      outputs no one reads but one: with padding on the left, the loss that transformers computes from `labels`
      predicts the first token from the last padded position. There it differs from eager's, as with sdpa; where the
      label of the first token is -100, as those of the padding are, it does not.
    - `output_attentions` gives weights before dropout (eager: after).
    - With sinks it gives the weights that multiply the values, which sum to less than 1. Eager attention of Granite SWA
      and GraniteMoe SWA gives those before the sink is taken into account.

    Weights are asked for by the call, `model(..., output_attentions=True)`; transformers itself refuses to have it in
    the configuration of any but eager attention. torch.compile takes a model as one graph, `fullgraph=True`, in
    evaluation and in training; weights and lenses, where they are asked for, break that graph.

    Raises:
        MissingExtra: transformers is not installed.

    >>> import regard.huggingface
    >>> regard.huggingface.register()
    """
    modeling = require("transformers.modeling_utils", extra="huggingface")
    masking = require("transformers.masking_utils", extra="huggingface")
    # Of the class, not of its instance: whether there is a mask function is asked of the class.
    masking.AttentionMaskInterface.register(NAME, symbolic_mask)
    modeling.AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class Swapped:
    """What `swap` did: the names of the attention modules that now use "regard", and why each other does not.

    `doubtful` names those of the former that may raise when they are called, and why.
    """

    plugged: tuple[str, ...]
    left: Mapping[str, str]
    doubtful: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.plugged)} attention modules use {NAME!r}, {len(self.left)} do not"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in {**self.left, **self.doubtful}.items()])


def swap(model: nn.Module) -> Swapped:
    """Choose "regard" for a loaded model of transformers, in place; `register` is done too.

    The value says which attention modules use it now, and which cannot: those that compute attention by themselves
    instead of through transformers' attention interface. `model.set_attn_implementation("sdpa")` undoes it.

    Raises:
        ConfigurationError: the model is none of transformers'.
        MissingExtra: transformers is not installed.

    >>> import torch, regard.huggingface
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> print(regard.huggingface.swap(BertModel(config)))
    1 attention modules use 'regard', 0 do not
    """
    require("transformers", extra="huggingface")
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigurationError(
            f"swap needs a model of transformers (a PreTrainedModel); this is a {type(model).__name__}. Give it the "
            "part of it that is one"
        )
    register()
    model.set_attn_implementation(NAME)  # it leaves out what cannot be plugged, and warns
    plugged, left, doubtful = [], {}, {}
    for name, module in model.named_modules():
        if _uses_the_interface(module):
            chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if chosen == NAME:
                plugged.append(name)
                if handed := _not_known(module):
                    doubtful[name] = f"{type(module).__name__} raises where it hands over {handed}, not known here"
            else:
                left[name] = f"{type(module).__name__} has attn_implementation={chosen!r} in its own configuration"
        elif _is_attention(module) and not any(map(_is_attention, _inside(module))):
            left[name] = f"{type(module).__name__} computes attention by itself"
    return Swapped(tuple(plugged), left, doubtful)


def _uses_the_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention function up by name."""
    code = _code(module)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _not_known(module: nn.Module) -> str:
    """The keywords in the code of a module that its attention refuses: the names in a call are constants there."""
    code = _code(module)
    constants = () if code is None else code.co_consts
    names = {name for part in constants for name in (part if isinstance(part, tuple) else (part,))}
    return ", ".join(sorted(NOT_KNOWN & names))


def _code(module: nn.Module) -> CodeType | None:
    """That of its forward."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is called an attention; it may be no more than a frame around one."""
    return "attention" in type(module).__name__.lower() or _uses_the_interface(module)


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside another, at any depth."""
    return (part for part in module.modules() if part is not module)
