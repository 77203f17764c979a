"""The linear layer x Wᵀ + b on the fastest of three implementations: native code, oneDNN, or torch's own.

- A few positions, as in decoding: the time is that of reading W, and native code reads it at memory bandwidth.
- Many positions in float32 on a CPU with AVX-512: oneDNN. Torch's builds for x86 contain two libraries of matrix
  products. Its float32 `linear` calls MKL, whose fastest code runs on Intel's processors only; oneDNN, which torch uses
  for half precision and compiled models, generates code for any processor with AVX-512: twice as fast on an AMD EPYC of
  the fifth generation (docs/benchmarks.md).
- Everything else: `torch.nn.functional.linear`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicallyQuantizedLinear
from torch.ao.quantization.quantization_mappings import get_default_dynamic_quant_module_mappings
from torch.nn import Parameter, functional

from .. import native
from ..backends.cpu.gemv import FewRowsLayout
from ..core.onednn import batched_linear, is_plain, uses_onednn
from ..core.torch_modes import no_mode_active

MAX_NATIVE_ROWS = {torch.float32: 64, torch.bfloat16: 8, torch.float16: 16}
"""Positions, over the whole batch, up to which native code is faster than torch."""

MAX_ROWS = max(MAX_NATIVE_ROWS.values())

MAX_NATIVE_ROWS_WITH_ONEDNN = 24
"""The same for products that oneDNN could compute."""

MIN_NATIVE_WEIGHTS = 2**18
"""With fewer weights, starting native code takes longer than it saves of reading them from memory."""

PLAIN_TYPES = (Tensor, Parameter)
MAX_LAYOUTS = 4096
"""The number of memoized layouts at which the memo is cleared."""

_layouts: dict[tuple[Any, ...], FewRowsLayout | None] = {}  # None: a product that torch computes


class Linear(nn.Linear):
    """`torch.nn.Linear` with faster products: y = x Wᵀ + b, x (..., in), y (..., out), of the same weights.

    A decoding step reads all weights for a few positions, and its time is that of reading them. There, on a CPU and
    without gradients, native code reads the weights at memory bandwidth. For many positions in float32 on a CPU with
    AVX-512, oneDNN computes the product, unless `torch.backends.mkldnn.enabled` is False. Everything else is torch's.

    Dynamic quantisation selects layers by their exact type, so it needs this one by name; the quantised layers are
    torch's own: `quantize_dynamic(model, {torch.nn.Linear, regard.nn.Linear})`. Without it a warning says so.

    >>> import torch
    >>> layer = Linear(4, 2)
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    __jit_unused_properties__ = ("qconfig",)  # torch.jit.script compiles properties otherwise

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch calls it so)
        """Product x Wᵀ + b."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return functional.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)

    @property
    def qconfig(self) -> Any:
        """The settings that `torch.ao.quantization` assigns to the layers it quantises, None to others."""
        if "qconfig" not in self.__dict__:
            raise AttributeError("this layer has no qconfig: torch.ao.quantization has not seen it")
        return self.__dict__["qconfig"]

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        if value is None:
            warnings.warn(
                "torch.ao.quantization left a regard.nn.Linear as it is: it selects layers by their exact type. To "
                "quantise these too, name the type: quantize_dynamic(model, {torch.nn.Linear, regard.nn.Linear})",
                stacklevel=2,
            )
        self.__dict__["qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]


class _DynamicQuantization:
    """Entry of torch's table of dynamic quantisation for `Linear`: it becomes torch's own quantised layer."""

    @staticmethod
    def from_float(module: Linear, use_precomputed_fake_quant: bool = False) -> nn.Module:
        """The dynamically quantised layer with the weights of this one."""
        plain = nn.Linear.__new__(nn.Linear)
        plain.__dict__.update(module.__dict__)
        return DynamicallyQuantizedLinear.from_float(plain, use_precomputed_fake_quant=use_precomputed_fake_quant)


get_default_dynamic_quant_module_mappings()[Linear] = _DynamicQuantization


def dense_weight(layer: nn.Module) -> Tensor:
    """The weight matrix (out, in) of a linear layer, dequantised where the layer has been quantised."""
    weight: Any = layer.weight
    return weight if isinstance(weight, Tensor) else weight().dequantize()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product x Wᵀ + b, x (..., in), W (out, in), b (out,): `torch.nn.functional.linear` on the fastest implementation.

    >>> import torch
    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 7.]])
    """
    layout = _native_layout(x, weight, bias)
    return batched_linear(x, weight, bias) if layout is None else layout.multiply(x, weight, bias)


def _native_layout(x: Tensor, weight: Tensor, bias: Tensor | None) -> FewRowsLayout | None:
    """How native code computes a product; None where it does not: of many positions, with gradients, in other dtypes.

    What a step checks, and how the tensors lie, is memoized: it takes as long as the product of a small layer.
    """
    if torch.compiler.is_compiling() or not no_mode_active():  # first: a graph must not depend on sizes
        return None
    if not (type(x) in PLAIN_TYPES and type(weight) in PLAIN_TYPES and (bias is None or type(bias) in PLAIN_TYPES)):
        return None
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)):
        return None
    try:
        rows = x.numel() // max(x.shape[-1], 1)
        if rows > MAX_ROWS or (rows > MAX_NATIVE_ROWS_WITH_ONEDNN and uses_onednn(x, weight, bias)):
            return None
        in_use = torch.get_num_threads(), native.variant_in_use()
        known = *_described(x), *_described(weight), None if bias is None else _described(bias), *in_use
    except (RuntimeError, IndexError):  # a nested or a sparse tensor, or one without axes
        return None
    try:
        return _layouts[known]
    except KeyError:
        if len(_layouts) >= MAX_LAYOUTS:
            _layouts.clear()
        found = _layouts[known] = FewRowsLayout.of(x, weight, bias) if _fits_native_code(x, weight, bias) else None
        return found


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _fits_native_code(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether native code reads such tensors, and is worth the call: few positions and many weights."""
    return (
        weight.numel() >= MIN_NATIVE_WEIGHTS
        and (is_plain(x) and is_plain(weight) and is_plain(bias))
        and x.shape[-1] == weight.shape[-1]
        and 0 < x.numel() <= MAX_NATIVE_ROWS.get(x.dtype, 0) * x.shape[-1]
        and native.supports(x, weight)
    )
