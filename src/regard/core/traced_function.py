"""Trace a function of one pair: the indices that it reads, the tensors that it captures, and whether it broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# Functions that treat every element by itself, by the names under which torch tells of them. Of these, and of numbers
# alone, a function for one pair is also a function for many pairs at once: it may be broadcast. Any other is mapped.
NAMES = """
    __abs__ __add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__ __le__ __lshift__ __lt__
    __mod__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__
    __rmul__ __ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __sub__ __truediv__ __xor__ abs
    absolute add and bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp clamp_max clamp_min clip cos div
    divide double eq exp exp2 expm1 float floor floor_divide fmod full_like ge greater greater_equal gt int le less
    less_equal log log10 log1p log2 logical_and logical_not logical_or logical_xor logsigmoid long lt masked_fill
    maximum minimum mul multiply ne neg negative new_full new_ones new_zeros not_equal ones_like pow reciprocal relu
    remainder round rsqrt rsub sigmoid sign sin softplus sqrt square sub subtract tanh to true_divide trunc type_as
    where zeros_like
"""
ELEMENTWISE = frozenset(NAMES.split())
# What asks a number for no more than its kind.
METADATA = (Tensor.device.__get__, Tensor.dtype.__get__)  # type: ignore[attr-defined]
NEW_LIKE = frozenset({Tensor.new_ones, Tensor.new_zeros, Tensor.new_full})
# Functions of two numbers that their difference alone decides.
DIFFERENCES = """
    __eq__ __ge__ __gt__ __le__ __lt__ __ne__ __rsub__ __sub__ eq ge greater greater_equal gt le less less_equal lt ne
    not_equal rsub sub subtract
"""
OF_DIFFERENCES = frozenset(DIFFERENCES.split())


class PairFunctionTrace(TorchFunctionMode):
    """A TorchFunctionMode that traces a function at one pair, whose numbers are tensors of shape ().

    reads: the names of the numbers that the function reads. by_distance: whether it reads `query` and `key` by their
    difference alone, and no table at a place that depends on that: it is then defined at every distance.
    """

    def __init__(self, **numbers: Tensor):
        super().__init__()
        self.numbers = numbers
        self.reads: set[str] = set()
        self.by_distance = True
        self._of_distance: set[int] = set()  # ids of what was computed from a difference
        self.captured: dict[int, Tensor] = {}
        self.elementwise = True
        # Also what the function makes on its way: a tensor that is gone would leave its id to another.
        self._known = {id(number): number for number in numbers.values()}

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        inputs, outputs = list(_tensors((args, kwargs or {}))), list(_tensors(result))
        self.captured |= {id(tensor): tensor for tensor in inputs if id(tensor) not in self._known}
        self._known |= {id(tensor): tensor for tensor in outputs if id(tensor) not in self.captured}
        if function in METADATA:
            return result
        if function not in NEW_LIKE:
            self.reads |= {name for name, number in self.numbers.items() if any(tensor is number for tensor in inputs)}
            self._note_distances(function.__name__, args, kwargs or {}, inputs, outputs)
        if function.__name__ == "__getitem__":
            inputs = inputs[1:]  # the table is no number, what is found in it has to be
        numbers = all(tensor.ndim == 0 for tensor in (*inputs, *outputs))
        self.elementwise &= numbers and bool(outputs) and function.__name__ in ELEMENTWISE
        return result

    def _note_distances(
        self, name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Note whether a function reads positions apart, or a table by their difference, and what depends on that."""
        positions = [self.numbers[name] for name in ("query", "key") if name in self.numbers]
        read = [tensor for tensor in inputs if any(tensor is position for position in positions)]
        differ = name in OF_DIFFERENCES and len(args) == len(read) == 2 and not kwargs and read[0] is not read[1]
        depends = differ or any(id(tensor) in self._of_distance for tensor in inputs)
        if (read and not differ) or (depends and name == "__getitem__"):
            self.by_distance = False
        if depends:
            self._of_distance |= {id(tensor) for tensor in outputs}


class TensorSubstitution(TorchFunctionMode):
    """A TorchFunctionMode that substitutes captured tensors by others."""

    def __init__(self, captured: Sequence[Tensor], others: Sequence[Tensor]):
        super().__init__()
        self.others = {id(tensor): other for tensor, other in zip(captured, others, strict=True)}

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return function(*self._substitute(args), **self._substitute(kwargs or {}))

    def _substitute(self, nested: Any) -> Any:
        match nested:
            case Tensor():
                return self.others.get(id(nested), nested)
            case tuple() | list() if type(nested) in (tuple, list):
                return type(nested)(self._substitute(part) for part in nested)
            case dict():
                return {name: self._substitute(part) for name, part in nested.items()}
            case _:
                return nested


def _tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    match nested:
        case Tensor():
            yield nested
        case tuple() | list():
            for part in nested:
                yield from _tensors(part)
        case dict():
            for part in nested.values():
                yield from _tensors(part)
