"""What an operator of regard is in operators of torch, for ONNX and for programs that run without regard.

An exported program has `regard::attend` and `regard::linear_recurrence` as single nodes, computed by the kernels.
`decompose` tells torch the same in its own operators: `torch.onnx.export(dynamo=True)` finds it in torch's table of
decompositions, `ExportedProgram.run_decompositions` in that of `regard.export.decompositions`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, meta_table
from torch._ops import OperatorBase, OpOverload
from torch.fx.traceback import get_current_meta
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import ExportError

DECOMPOSITIONS: dict[OperatorBase, Callable[..., Any]] = {}
"""Of each operator of regard that has one."""


def decompose(operator: OpOverload, fake: Callable[..., Any], formula: Callable[..., Any]) -> None:
    """Register an operator's formula in operators of torch; fake: its results without numbers.

    The formula may write in place, and make constants by `torch.tensor`.
    """

    def decomposition(*arguments: Any) -> Any:
        with naming_module(), keeping_sizes(arguments):
            return _functional(formula)(*arguments)

    # Without this entry torch would run the formula wherever it needs but the shape of a result of symbolic sizes.
    meta_table[operator] = fake
    DECOMPOSITIONS[operator] = decomposition_table[operator] = decomposition


def compiled_whole(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake implementation of an operator that Inductor calls as it is, though it has a decomposition.

    Inductor does so by itself, except where the variable `CI` is set: there it takes an operator with a decomposition
    for a mistake of its own and raises. It asks every operator for its fake results before it compiles it.
    """

    @wraps(fake)
    def noted(*arguments: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None:
            _call_whole(lowering, name)
        return fake(*arguments)

    return noted


def _call_whole(lowering: Any, name: str) -> None:
    """Register the call of an operator as its lowering, with the strides that Inductor keeps for any other."""
    namespace, packet = name.split("::")
    operator = getattr(getattr(torch.ops, namespace), packet).default
    if operator not in lowering.lowerings:
        strides = lowering.tag_to_layout_constraint(lowering.get_layout_constraint_tag(operator, with_default=True))
        lowering.make_fallback(operator, layout_constraint=strides, warn=False)


def _functional(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula by operators that write nothing in place, traced as torch.export traces."""
    from torch._export.utils import _compiling_state_context  # only where a program is there, and this loaded
    from torch._subclasses.functional_tensor import dispatch_functionalize

    def traced(*arguments: Any) -> Any:
        with _compiling_state_context(), FilledConstants():
            return formula(*arguments)

    return dispatch_functionalize(traced)


class FilledConstants(TorchFunctionMode):
    """Makes tensors of numbers by filling: a graph that is being decomposed takes no new constants."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and not isinstance(args[0], Tensor):
            return _filled(args[0], kwargs.get("dtype"), kwargs.get("device"))
        if function is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            args = (*args[:2], _filled(args[2], args[0].dtype, args[0].device))
        return function(*args, **kwargs)


def _filled(data: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    """`torch.tensor(data)` of numbers, or of nested sequences of them."""
    numbers, shape = _numbers(data)
    if dtype is None:
        with torch._C.DisableTorchFunction():
            kinds = [torch.result_type(torch.empty((), dtype=torch.bool, device="meta"), number) for number in numbers]
        dtype = (
            torch.get_default_dtype()
            if not kinds
            else max(kinds, key=lambda kind: (kind.is_floating_point, kind.itemsize))
        )
    if not numbers:
        return torch.full(shape, 0, dtype=dtype, device=device)
    filled = [torch.full((), number, dtype=dtype, device=device) for number in numbers]
    return torch.stack(filled).view(shape)


def _numbers(data: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The numbers of nested sequences, in order, and their shape."""
    if not isinstance(data, Sequence):
        return [data], ()
    parts = [_numbers(part) for part in data]
    return [number for numbers, _ in parts for number in numbers], (len(parts), *(parts[0][1] if parts else ()))


@contextmanager
def naming_module() -> Iterator[None]:
    """Raise what a formula raises as an `ExportError` that names the module whose call it is."""
    try:
        yield
    except ExportError as error:
        raise ExportError(f"{_current_module()} has no form in standard operators: {error}") from error
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ExportError(
            f"{_current_module()} has no form in standard operators: its mask, bias or normalizer cannot be traced "
            f"without the values of its tensors ({type(error).__name__}: {first}). Write it in operations on tensors, "
            "or run the program with torch and regard, as torch.export gives it"
        ) from error


@contextmanager
def keeping_sizes(arguments: Any) -> Iterator[None]:
    """Refuse a formula that is one for each length, such as a loop over rows: the graph would be wrong for others.

    Raises:
        ExportError: a size that may vary has become a number.
    """
    varying = [size for tensor in _tensors_in(arguments) for size in tensor.shape if varies(size)]
    yield
    if not all(map(varies, varying)):
        raise ExportError(
            "it is another graph for each length, and the length may vary. Export it with fixed sizes, or run the "
            "program with torch and regard, as torch.export gives it"
        )


def _tensors_in(arguments: Any) -> list[Tensor]:
    """The tensors among the arguments of an operator, and in lists of these."""
    return [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]


def varies(size: Any) -> bool:
    """Whether a size is a symbol and no number."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def _current_module() -> str:
    """The innermost module of the node that is being decomposed, by its path in the model and its class."""
    stack = get_current_meta().get("nn_module_stack") or {}
    if not stack:
        return "a call of attention"
    path, kind = list(stack.values())[-1]
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return f"module {path!r} ({name})" if path else f"the model itself ({name})"
