"""Tensors on a device that there is not: they compute on the CPU, and whatever would wait for a device is recorded.

`DeviceTensor` says that it is on "cuda:0". A call on it may make and compute tensors there, as on a GPU. It may not
read a number back (`.item()`, a tensor as a condition, `.tolist()`, `.cpu()`), compute what has a size that follows
from numbers (`nonzero`, indices that are a mask), or bring a tensor from the host: torch waits in each.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

PACKAGE = os.sep + os.path.join("src", "regard") + os.sep
DEVICE = torch.device("cuda", 0)
INSIDE = torch.device("lazy")
"""The device that torch is told of: one that has autograd in every build, and no code of its own."""
aten = torch.ops.aten
Module = TypeVar("Module", bound=nn.Module)
READS = {
    aten._local_scalar_dense,
    aten.is_nonzero,
    aten.item,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique,
    aten._unique2,
    aten.unique_consecutive,
    aten.bincount,
    aten.allclose,
}
"""What waits for the device in any case."""


_found: list[str] = []


def _waits(what: str) -> None:
    frames = [each for each in traceback.extract_stack() if PACKAGE in each.filename]
    _found.append(what if not frames else f"{what}, {frames[-1].filename.split(PACKAGE)[-1]}:{frames[-1].lineno}")


class DeviceTensor(Tensor):
    """A tensor that says it is on `DEVICE`; its numbers are in one of the CPU, `inner`."""

    inner: Tensor
    device = property(lambda self: DEVICE)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    is_cuda = property(lambda self: True)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=INSIDE,
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


def _inner(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type in (DEVICE.type, INSIDE.type)


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator gives for tensors of the device, and of the host where torch takes them too."""
    flat = tree_flatten((args, kwargs))[0]
    ours = [each for each in flat if isinstance(each, DeviceTensor)]
    to_device = bool(ours)
    packet = function.overloadpacket
    if packet in READS and ours:
        _waits(str(function))
    elif packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
            _waits(f"{function} at a mask")
        if any(each is not None and not isinstance(each, DeviceTensor) for each in args[1]) and ours:
            _waits(f"{function} at indices of the host")
    elif packet is aten.repeat_interleave and kwargs.get("output_size") is None and isinstance(args[0], DeviceTensor):
        _waits(str(function))
    elif packet in (aten._to_copy, aten.copy_):
        source = args[0] if packet is aten._to_copy else args[1]
        target = kwargs.get("device") if packet is aten._to_copy else args[0].device
        to_device = isinstance(source, DeviceTensor) if target is None else _is_device(target)
        back = isinstance(source, DeviceTensor) and not to_device
        over = to_device and not isinstance(source, DeviceTensor) and source.ndim > 0
        without = kwargs.get("non_blocking") or args[2:] == (True,)
        if back or (over and not without):
            _waits(f"{function} to {target}")
    elif "device" in kwargs and kwargs["device"] is not None:
        to_device = _is_device(kwargs["device"])
    elif ours and any(isinstance(each, Tensor) and not isinstance(each, DeviceTensor) and each.ndim for each in flat):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device")
    result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if isinstance(result, Tensor) and args and isinstance(args[0], DeviceTensor) and result is args[0].inner:
        return args[0]  # changed in place
    if not to_device:
        return result
    return tree_map(lambda each: DeviceTensor(each) if isinstance(each, Tensor) else each, result)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> DeviceTensor:
    return DeviceTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


READERS: dict[Any, Callable] = {
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: Tensor.numpy,
    Tensor.__array__: Tensor.numpy,
}
"""Methods that read a tensor without an operator, and what they give for one of the host."""


class _Calls(TorchFunctionMode):
    """Has tensors made on the device, and watches what reads them without an operator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.backward:  # it calls the library
            with self:
                given = args[1] if len(args) > 1 else kwargs.get("gradient")
                return backward(args[0], given)
        if function is torch.autograd.grad:
            with self:
                return gradients(*args, **kwargs)
        if function in READERS and isinstance(args[0], DeviceTensor):
            _waits(f"Tensor.{function.__name__}")
            return READERS[function](args[0].inner)
        if _is_device(kwargs.get("device")) and not any(isinstance(each, Tensor) for each in args):
            if function in (torch.tensor, torch.as_tensor):
                _waits(f"torch.{function.__name__}(..., device=)")
            return DeviceTensor(function(*args, **{**kwargs, "device": "cpu"}))
        if function is Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            _waits("Tensor.new_tensor")
            return DeviceTensor(args[0].inner.new_tensor(*args[1:], **kwargs))
        if function is Tensor.to or _is_device(kwargs.get("device")):
            args, kwargs = tree_map(_as_inside, args), tree_map(_as_inside, kwargs)
        return function(*args, **kwargs)


def backward(output: Tensor, gradient: Tensor | None = None) -> None:
    """`Tensor.backward`, in which torch's modes stay as they are."""
    gradient = torch.ones_like(output) if gradient is None else gradient
    torch.autograd.graph._engine_run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, in which torch's modes stay as they are."""
    outputs, inputs = ((each,) if isinstance(each, Tensor) else tuple(each) for each in (outputs, inputs))
    above = (None,) * len(outputs) if grad_outputs is None else grad_outputs
    above = (above,) if isinstance(above, Tensor) else above
    above = tuple(torch.ones_like(of) if own is None else own for own, of in zip(above, outputs, strict=True))
    found = torch.autograd.graph._engine_run_backward(
        outputs,
        above,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs,
        allow_unreachable=bool(allow_unused) or materialize_grads,
        accumulate_grad=False,
    )
    return tuple(
        torch.zeros_like(each) if own is None and materialize_grads else own
        for own, each in zip(found, inputs, strict=True)
    )


def _as_inside(value: Any) -> Any:
    is_ours = (isinstance(value, torch.device) and value.type == DEVICE.type) or (
        isinstance(value, str) and value.startswith("cuda")
    )
    return INSIDE if is_ours else value


def on_device(tensor: Tensor, *, requires_grad: bool = False) -> DeviceTensor:
    """A copy of a tensor of the host on the device."""
    return DeviceTensor(tensor.detach().clone(), requires_grad)


def on_host(tensor: Tensor) -> Tensor:
    """A tensor of the device on the host: for comparisons."""
    return tensor.inner if isinstance(tensor, DeviceTensor) else tensor


@contextmanager
def device() -> Iterator[None]:
    """Tensors can be made on the device, and autograd stays in this thread."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        # All that torch makes there, for itself too, begins with one of these.
        library.impl("empty.memory_format", _empty, "Lazy")
        library.impl("empty_strided", _empty_strided, "Lazy")
        with torch.autograd.set_multithreading_enabled(False), _Calls():
            yield


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """What waits for the device within the block, and where in the library."""
    _found.clear()
    yield _found


def to_device(module: Module) -> Module:
    """A module, whose parameters and buffers are replaced by ones on the device."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = on_device(parameter, requires_grad=True)  # type: ignore[assignment]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = on_device(buffer)
    return module
