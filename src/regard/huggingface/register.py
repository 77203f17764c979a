"""Register "regard" with transformers, and select it for a loaded model.

A call is computed by `attention_function.attention_forward`. Its mask is made by `mask_tensor.symbolic_mask`, where
`mask_functions.convert` converts it. Checkpoints are read elsewhere, in models/language_model/huggingface/.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType

from torch import nn

from ..errors import ConfigurationError, require
from .attention_function import NAME, UNSUPPORTED_KEYWORDS, attention_forward
from .mask_tensor import symbolic_mask
from .paged_batches import take_batches

DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2"
"""The module of DeBERTa-v2 and v3, which is imported where a model has one."""


def register() -> None:
    """Register the attention function and the mask function, so that `attn_implementation="regard"` works.

    Calling it again has no effect. Models select it at construction, `from_pretrained(...,
    attn_implementation="regard")`, or later by `swap`.

    It computes what `attn_implementation="eager"` does: windows, softcap, sinks, packed sequences, grouped heads, every
    cache, position biases, cross-attention, dropout, keys that an indexer selects. An unknown keyword that may change
    the result raises. It differs from eager attention in three points:

    - A row that may attend to nothing gives 0 (eager: the mean of all values). Such rows are padded positions, whose
      outputs are not used, with one exception: with left padding, the loss that transformers computes from `labels`
      predicts the first token from the last padded position. There it differs from eager's, as with sdpa, unless the
      label of the first token is -100, as those of the padding are.
    - `output_attentions` gives weights before dropout (eager: after).
    - With sinks it gives the weights that multiply the values, which sum to less than 1. Eager attention of Granite SWA
      and GraniteMoe SWA gives those before the sink is taken into account.

    Weights are requested per call, `model(..., output_attentions=True)`; transformers refuses that setting in the
    configuration of any but eager attention. `generate_batch` and its managers take such a model too ("paged|regard" is
    the same name: transformers removes the prefix), with the tokens of `generate` and eager attention, also with
    windows, sinks, and softcap, which transformers' own batches leave out. torch.compile compiles a model as one graph,
    `fullgraph=True`, in evaluation and in training; requested weights and lenses break that graph.

    Raises:
        MissingExtra: transformers is not installed.

    >>> import regard.huggingface
    >>> regard.huggingface.register()
    """
    modeling = require("transformers.modeling_utils", extra="huggingface")
    masking = require("transformers.masking_utils", extra="huggingface")
    # On the class, not on its instance: transformers looks a mask function up on the class.
    masking.AttentionMaskInterface.register(NAME, symbolic_mask)
    modeling.AttentionInterface.register(NAME, attention_forward)
    take_batches()


@dataclass(frozen=True)
class AttentionSwapReport:
    """Result of `swap`; `print` it.

    replaced: names of the attention modules that now use "regard". skipped: by name, why each other does not.
    warnings: by name, why one of the former may raise when it is called. Names are those of `model.named_modules()`.
    """

    replaced: tuple[str, ...]
    skipped: Mapping[str, str]
    warnings: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} attention modules use {NAME!r}, {len(self.skipped)} do not"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in {**self.skipped, **self.warnings}.items()])


def swap(model: nn.Module) -> AttentionSwapReport:
    """Select "regard" for a loaded model of transformers, in place; calls `register` first.

    A module that contains such models, as a `SentenceTransformer` does, has it selected for each of them. The result
    names the attention modules that use it now, and those that do not: they compute attention themselves instead of
    through transformers' attention interface, or pass it what "regard" does not know, as those with a sink of its own
    for each query. A model with such modules keeps the implementation that it has, and so do all modules that
    share its configuration, from which they read it. `model.set_attn_implementation("sdpa")` undoes it.

    DeBERTa-v2 and v3 have no such setting: their attention modules and their encoder get classes of ours over the same
    parameters, in linear memory, which only a model that is loaded again has not. They equal eager attention for
    tokens; at padded positions, whose outputs are not used, they differ.

    Raises:
        ConfigurationError: neither a model of transformers nor a module with one inside.
        MissingExtra: transformers is not installed.

    >>> import torch, regard.huggingface
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> print(regard.huggingface.swap(BertModel(config)))
    1 attention modules use 'regard', 0 do not
    """
    require("transformers", extra="huggingface")
    from transformers import PreTrainedModel

    inside = model.modules() if isinstance(model, nn.Module) else ()
    pretrained = [module for module in inside if isinstance(module, PreTrainedModel)]
    if not pretrained:
        raise ConfigurationError(
            f"swap needs a model of transformers (a PreTrainedModel), or a module with one inside; this is a "
            f"{type(model).__name__} without one"
        )
    register()
    left = _left_configurations(model)
    before = {id(part.config): _other_than_ours(part.config._attn_implementation) for part in pretrained}
    for part in pretrained:  # the outer ones first, which set their inner ones
        wanted = NAME
        if id(part.config) in left:
            wanted = before[id(part.config)]
        if part.config._attn_implementation != wanted:
            part.set_attn_implementation(wanted)  # it skips modules that do not support it, and warns
    if DEBERTA in sys.modules:
        from .disentangled import use_regard

        use_regard(model)
    return _report(model, left)


def _other_than_ours(implementation: str | None) -> str:
    return "eager" if implementation in (None, NAME) else implementation


def _left_configurations(model: nn.Module) -> dict[int, str]:
    """By the id of a configuration: which of its attention modules passes keywords that "regard" does not know."""
    left: dict[int, str] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and _uses_attention_interface(module) and (keywords := _unsupported_keywords(module)):
            left.setdefault(id(config), f"{type(module).__name__} passes {keywords}")
    return left


def _report(model: nn.Module, left: Mapping[int, str]) -> AttentionSwapReport:
    """Which attention modules of a model use "regard" now; left: as `_left_configurations` returns it."""
    replaced, skipped, warnings = [], {}, {}
    for name, module in model.named_modules():
        if _computes_with_regard(module):
            replaced.append(name)
        elif _uses_attention_interface(module):
            config = getattr(module, "config", None)
            selected = getattr(config, "_attn_implementation", None)
            if selected == NAME:
                replaced.append(name)
                if keywords := _unsupported_keywords(module):
                    warnings[name] = f"{type(module).__name__} raises where it passes {keywords}, unknown to {NAME!r}"
            elif id(config) in left:
                skipped[name] = f"{left[id(config)]}, unknown to {NAME!r}: it keeps attn_implementation={selected!r}"
            else:
                skipped[name] = f"{type(module).__name__} has attn_implementation={selected!r} in its own configuration"
        elif _is_attention(module) and not any(map(_is_attention, _descendants(module))):
            skipped[name] = f"{type(module).__name__} computes attention by itself"
    return AttentionSwapReport(tuple(replaced), skipped, warnings)


def check_uses_regard(model: nn.Module) -> None:
    """Check that some attention module of a model calls this attention, whatever name it is registered under.

    Raises:
        ConfigurationError: none does.
    """
    if any(map(_computes_with_regard, model.modules())):
        return
    modeling = require("transformers.modeling_utils", extra="huggingface")
    named = {name: module for name, module in model.named_modules() if _uses_attention_interface(module)}
    selected = [getattr(getattr(module, "config", None), "_attn_implementation", None) for module in named.values()]
    functions = [modeling.ALL_ATTENTION_FUNCTIONS.get(name) for name in selected]
    if attention_forward in functions:
        return
    has = "it has none that calls transformers' attention interface"
    if named:
        has = f"the first of {len(named)}, {next(iter(named))!r}, has attn_implementation={selected[0]!r}"
    raise ConfigurationError(
        f"no attention module of this {type(model).__name__} uses {NAME!r}: {has}. Call regard.huggingface.swap(model) "
        "first, and print what it returns: it says which modules it leaves, and why"
    )


KINDS = "attention", "deltanet"
"""Parts of the class names of attention modules in transformers: softmax attention, and linear attention."""


def _computes_with_regard(module: nn.Module) -> bool:
    """Whether a module is of a class of ours."""
    return getattr(type(module), "computes_with_regard", False)


def _uses_attention_interface(module: nn.Module) -> bool:
    """Whether the forward of a module looks its attention function up by name."""
    code = _forward_code(module)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _unsupported_keywords(module: nn.Module) -> str:
    """Refused keywords that the forward of a module passes: keyword names are constants of its code object."""
    code = _forward_code(module)
    constants = () if code is None else code.co_consts
    names = {name for part in constants for name in (part if isinstance(part, tuple) else (part,))}
    return ", ".join(f"{name} ({UNSUPPORTED_KEYWORDS[name]})" for name in sorted(UNSUPPORTED_KEYWORDS.keys() & names))


def _forward_code(module: nn.Module) -> CodeType | None:
    """The code object of the forward of a module."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention by its class name, or by its code; it may be a wrapper around another one."""
    name = type(module).__name__.lower()
    return any(kind in name for kind in KINDS) or _uses_attention_interface(module)


def _descendants(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside another, at any depth."""
    return (part for part in module.modules() if part is not module)
