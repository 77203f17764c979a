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
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicallyQuantizedLinear
from torch.ao.quantization.quantization_mappings import get_default_dynamic_quant_module_mappings
from torch.nn import Parameter, functional

from .. import native
from ..backends.cpu.gemv import matmul_few_rows
from ..core.torch_modes import no_mode_active, under_dispatch_mode, under_transform

MIN_ONEDNN_PRODUCTS = 2**25
"""Multiplications below which the code generation of oneDNN for each new shape costs more than it saves."""


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product x Wᵀ + b by oneDNN or torch, x (..., in), W (out, in), b (out,), with all of torch's derivatives."""
    if uses_onednn(x, weight, bias):
        return _OneDnnLinear.apply(x, weight, bias)  # type: ignore[return-value]
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN computes a product: a large one in float32, where it is available, enabled and the faster one."""
    return (
        not (under_transform() or under_dispatch_mode())  # first: a compiled or traced graph must not depend on sizes
        and _is_large(x, weight, bias)  # before the other checks, as a small product takes only microseconds
        and are_plain_tensors(x, weight, bias)
        and all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in (x, weight, bias) if tensor is not None)
        and not torch.is_autocast_enabled("cpu")
        and _onednn_is_faster()
        and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]
    )


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether all are strided tensors or parameters and no dispatch mode is active, so that no dispatch is needed."""
    return not under_dispatch_mode() and all(_is_plain(tensor) for tensor in tensors)


def _is_plain(tensor: Tensor | None) -> bool:
    return tensor is None or (type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided)


class _OneDnnLinear(torch.autograd.Function):
    """y = x Wᵀ + b; dx = dy W, dW = dyᵀ x, db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_x, for_weight, _ = ctx.needs_input_grad
        # Inputs that no gradient needs may be changed or freed before the backward pass.
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        ctx.save_for_forward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = upstream[0].flatten(0, -2)
        return (
            batched_linear(upstream[0], weight.T) if for_x else None,
            _transposed_product(rows, x.flatten(0, -2)) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        (x, weight), (dx, dweight, dbias) = ctx.saved_tensors, tangents
        parts = [
            None if dx is None else functional.linear(dx, weight),
            None if dweight is None else functional.linear(x, dweight),
            None if dbias is None else dbias.expand(*x.shape[:-1], weight.shape[0]),
        ]
        return sum(part for part in parts if part is not None)  # type: ignore[return-value]


def _transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right; the wider operand is passed to oneDNN as the weight, which takes half the time."""
    if left.shape[1] <= right.shape[1]:
        return batched_linear(left.T, right.T)
    return batched_linear(right.T, left.T).T.contiguous()


def _is_large(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the shapes fit, and the product has enough multiplications for oneDNN."""
    return (
        weight.ndim == 2
        and x.numel() * weight.shape[0] >= MIN_ONEDNN_PRODUCTS
        and x.ndim > 1
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


@cache
def _onednn_is_faster() -> bool:
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


MAX_NATIVE_ROWS = {torch.float32: 64, torch.bfloat16: 8, torch.float16: 16}
"""Positions, over the whole batch, up to which native code is faster than torch."""

MAX_NATIVE_ROWS_WITH_ONEDNN = 24
"""The same for products that oneDNN could compute."""

MIN_NATIVE_WEIGHTS = 2**18
"""With fewer weights, starting native code takes longer than it saves of reading them from memory."""


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
    multiply = matmul_few_rows if _uses_native_code(x, weight, bias) else batched_linear
    return multiply(x, weight, bias)


def _uses_native_code(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether native code computes a product: few positions, many weights, a dtype it reads, and no gradient."""
    return (
        not torch.compiler.is_compiling()  # first: a compiled or traced graph must not depend on sizes
        and no_mode_active()
        and weight.numel() >= MIN_NATIVE_WEIGHTS
        and (_is_plain(x) and _is_plain(weight) and _is_plain(bias))
        and x.shape[-1] == weight.shape[-1]
        and 0 < x.numel() <= MAX_NATIVE_ROWS.get(x.dtype, 0) * x.shape[-1]
        and not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)))
        and native.supports(x, weight)
        and (x.numel() <= MAX_NATIVE_ROWS_WITH_ONEDNN * x.shape[-1] or not uses_onednn(x, weight, bias))
    )
