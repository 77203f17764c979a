"""Record torch.nn.MultiheadAttention by recomputing each call with regard, without hooks on the modules.

torch's layers take other paths, with other rounding, where a module has hooks. So none is hung on any module: torch's
hooks for all modules are not looked at there, and tell of every call, of every thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..nn import MultiheadAttention
from ..utils.call_site import variables_of

_ATTENTION, _LAYER = (inspect.signature(of.forward) for of in (nn.MultiheadAttention, nn.TransformerEncoderLayer))


class TorchLayerRecorder:
    """Recomputes the attention of torch's layers with regard's layer, so that it is recorded.

    names: the modules to record. recording_as: context manager that sets name and kind of the calls in its block.
    is_active: whether this call is recorded. on_model_end: called when the whole model has returned. missed: why layers
    that were called could not be recorded.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str],
        *,
        recording_as: Callable[[str, str], AbstractContextManager[None]],
        is_active: Callable[[], bool],
        on_model_end: Callable[[], None],
    ) -> None:
        self.names, self.recording_as, self.is_active, self.on_model_end = names, recording_as, is_active, on_model_end
        self.missed: dict[str, str] = {}
        self._called: set[tuple[int, nn.Module]] = set()  # by thread, since their layer was entered

    @contextmanager
    def listening_to_calls(self) -> Iterator[None]:
        """Record the calls of these layers in the block."""
        before = register_module_forward_pre_hook(self._before)
        after = register_module_forward_hook(self._after, with_kwargs=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            # torch forgets the hook, but not that it took keywords; to torch.compile it would look as if it were there.
            getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {}).pop(after.id, None)

    def _before(self, module: nn.Module, arguments: Any) -> None:
        if isinstance(module, nn.TransformerEncoderLayer) and self.is_active():
            self._called.discard((get_ident(), getattr(module, "self_attn", None)))  # type: ignore[arg-type]

    def _after(self, module: nn.Module, arguments: tuple, *rest: Any) -> None:
        # A thread that was on its way here when the record of another one ended comes without the keywords.
        if len(rest) != 2 or not self.is_active() or torch.compiler.is_compiling():
            return
        try:
            self._on_call(module, arguments, rest[0])
        except Exception as error:  # a model must not fail because it is listened to
            self._report_missed(module, f"whose attention could not be repeated: {type(error).__name__}: {error}")

    def _on_call(self, module: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
        if self.names.get(module) == "":
            self.on_model_end()
        if _is_torch_layer(module):
            self._called.add((get_ident(), module))
            if module not in self.names:
                return
            if _has_forward_of(module, nn.MultiheadAttention):
                self._recompute(module, _bound(_ATTENTION, module, arguments, keywords))
            else:
                self._report_missed(
                    module, f"a {type(module).__name__} with a forward of its own: call regard.attention in it"
                )
        elif isinstance(module, nn.TransformerEncoderLayer) and _is_torch_layer(getattr(module, "self_attn", None)):
            self._on_encoder_layer(module, arguments, keywords)

    def _on_encoder_layer(self, layer: nn.TransformerEncoderLayer, arguments: tuple, keywords: dict[str, Any]) -> None:
        """Recompute the attention of an encoder layer that torch ran on its fast path."""
        attention = layer.self_attn
        if (get_ident(), attention) in self._called or attention not in self.names:
            return
        is_torchs = type(layer)._sa_block is nn.TransformerEncoderLayer._sa_block
        if is_torchs and _has_forward_of(layer, nn.TransformerEncoderLayer):
            self._recompute(attention, _attention_arguments(layer, _bound(_LAYER, layer, arguments, keywords)))
        else:
            self._report_missed(
                attention,
                f"in a {type(layer).__name__} with methods of its own that torch computed without calling it: "
                "torch.backends.mha.set_fastpath_enabled(False) makes torch call it",
            )

    def _report_missed(self, module: nn.Module, why: str) -> None:
        self.missed.setdefault(self.names.get(module) or type(module).__name__, why)

    def _recompute(self, module: nn.Module, given: dict[str, Any]) -> None:
        """Recompute one call with a regard layer that shares the module's parameters."""
        kind = "self" if given["query"] is given["key"] else "cross"
        given |= {"need_weights": False}
        name = self.names.get(module) or type(module).__name__
        with torch.no_grad(), self.recording_as(name, kind):
            # In evaluation: no dropout is drawn, and torch's generator stays as it is.
            _regard_layer(module).forward(**_without_nested_tensors(given))


def _is_torch_layer(module: Any) -> bool:
    """Whether a module is torch's own attention layer; calls of regard's are recorded anyway."""
    return isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention)


def _has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has the `forward` of a class, so that its inputs are those of its attention."""
    return type(module).forward is kind.forward and "forward" not in vars(module)


def _bound(
    signature: inspect.Signature, module: nn.Module, arguments: tuple, keywords: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name."""
    given = signature.bind(module, *arguments, **keywords)
    given.apply_defaults()
    return {name: value for name, value in given.arguments.items() if name != "self"}


def _attention_arguments(layer: nn.TransformerEncoderLayer, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that an encoder layer passes to its attention."""
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


def _without_nested_tensors(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with nested tensors padded again, and without `is_causal`."""
    given = {name: value for name, value in given.items() if name != "is_causal"}
    query = given["query"]
    if not query.is_nested:
        return given
    lengths = torch.tensor([len(part) for part in query.unbind()], device=query.device)
    size = (len(lengths), _length(lengths), query.size(-1))
    padded = query.to_padded_tensor(0.0, size)
    ignored = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]
    return given | {"query": padded, "key": padded, "value": padded, "key_padding_mask": ignored}


def _length(lengths: Tensor) -> int:
    """The padded length of a batch, including padding that torch's encoder removed."""
    longest = int(lengths.max())
    variables = variables_of(nn.TransformerEncoder)
    padding = variables.get("src_key_padding_mask") if variables.get("convert_to_nested") else None
    if isinstance(padding, Tensor) and padding.ndim == 2 and len(padding) == len(lengths):
        return max(longest, padding.shape[1])
    return longest


def _regard_layer(module: nn.Module) -> MultiheadAttention:
    """A regard layer over the same parameters, in evaluation mode, without the module's hooks."""
    twin = MultiheadAttention.__new__(MultiheadAttention)
    state = {name: held.copy() if isinstance(held, dict) else held for name, held in vars(module).items()}
    twin.__setstate__(state | {"training": False})
    return twin
