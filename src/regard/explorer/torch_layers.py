"""torch.nn.MultiheadAttention heard without being touched: after a call its attention is computed again, by ours.

torch's layers take other paths, with other rounding, where a module has hooks. So none is hung on any module: torch's
hooks for all modules are not looked at there, and tell of every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ..nn import MultiheadAttention

_ATTENTION, _LAYER = (inspect.signature(of.forward) for of in (nn.MultiheadAttention, nn.TransformerEncoderLayer))


class TorchLayers:
    """Repeats the attention of torch's layers by regard's, which tell whoever listens; `within` names the layer."""

    def __init__(self, names: Mapping[nn.Module, str], within: Callable[[str, str], Any]) -> None:
        self.names, self.within = names, within
        self.called: set[nn.Module] = set()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear of every call of these layers in the block."""
        handle = register_module_forward_hook(self._after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            # torch forgets the hook, but not that it took keywords; to torch.compile it would look as if it were there.
            getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)

    def _after(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any], output: Any) -> None:
        if module not in self.names or torch.compiler.is_compiling():
            return
        if _is_torchs(module):
            self.called.add(module)
            given = _bound(_ATTENTION, module, arguments, keywords)
            self._repeat(module, given)
        elif isinstance(module, nn.TransformerEncoderLayer) and _is_torchs(module.self_attn):
            if module.self_attn in self.called:
                self.called.discard(module.self_attn)
            else:  # torch computed the whole layer in one go, and never called its attention
                given = _bound(_LAYER, module, arguments, keywords)
                self._repeat(module.self_attn, _of_layer(module, given))

    def _repeat(self, module: nn.Module, given: dict[str, Any]) -> None:
        """The attention of one call, by a twin that has the module's parameters and nothing else of it."""
        kind = "self" if given["query"] is given["key"] else "cross"
        given |= {"need_weights": False}
        name = self.names.get(module) or type(module).__name__
        with torch.no_grad(), self.within(name, kind):
            # In evaluation: no dropout is drawn, and torch's generator stays as it is.
            _twin(module).forward(**_plain(given))


def _is_torchs(module: Any) -> bool:
    """Whether a module is torch's own layer: regard's tells by itself."""
    return isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention)


def _bound(
    signature: inspect.Signature, module: nn.Module, arguments: tuple, keywords: dict[str, Any]
) -> dict[str, Any]:
    """What a layer was called with, by name."""
    given = signature.bind(module, *arguments, **keywords)
    given.apply_defaults()
    return {name: value for name, value in given.arguments.items() if name != "self"}


def _of_layer(layer: nn.TransformerEncoderLayer, given: dict[str, Any]) -> dict[str, Any]:
    """What an encoder layer hands its attention."""
    with torch.no_grad():
        x = given["src"]
        x = layer.norm1(x) if layer.norm_first else x
    return {
        "query": x,
        "key": x,
        "value": x,
        "key_padding_mask": given["src_key_padding_mask"],
        "attn_mask": given["src_mask"],
    }


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Nested tensors, which torch's encoder makes of padded batches, as padded ones; and no hint."""
    given = {name: value for name, value in given.items() if name != "is_causal"}
    query = given["query"]
    if not query.is_nested:
        return given
    lengths = torch.tensor([len(part) for part in query.unbind()], device=query.device)
    padded = query.to_padded_tensor(0.0)
    ignored = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]
    return given | {"query": padded, "key": padded, "value": padded, "key_padding_mask": ignored}


def _twin(module: nn.Module) -> MultiheadAttention:
    """A layer of regard's over the same parameters, in evaluation, with none of the module's hooks."""
    twin = MultiheadAttention.__new__(MultiheadAttention)
    state = {name: held.copy() if isinstance(held, dict) else held for name, held in vars(module).items()}
    twin.__setstate__(state | {"training": False})
    return twin
