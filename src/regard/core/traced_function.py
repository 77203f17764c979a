"""What a function of one pair does: which numbers it reads, what else it uses, whether it may be broadcast."""

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
KIND = (Tensor.device.__get__, Tensor.dtype.__get__)  # type: ignore[attr-defined]
OF_ITS_KIND = frozenset({Tensor.new_ones, Tensor.new_zeros, Tensor.new_full})


class Reading(TorchFunctionMode):
    """Watches a function at one pair, whose numbers are tensors without axes."""

    def __init__(self, **numbers: Tensor):
        super().__init__()
        self.numbers = numbers
        self.reads: set[str] = set()
        self.captured: dict[int, Tensor] = {}
        self.elementwise = True
        # Also what the function makes on its way: a tensor that is gone would leave its id to another.
        self._known = {id(number): number for number in numbers.values()}

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        taken, given = list(_tensors((args, kwargs or {}))), list(_tensors(result))
        self.captured |= {id(tensor): tensor for tensor in taken if id(tensor) not in self._known}
        self._known |= {id(tensor): tensor for tensor in given if id(tensor) not in self.captured}
        if function in KIND:
            return result
        if function not in OF_ITS_KIND:
            self.reads |= {name for name, number in self.numbers.items() if any(tensor is number for tensor in taken)}
        if function.__name__ == "__getitem__":
            taken = taken[1:]  # the table is no number, what is found in it has to be
        numbers = all(tensor.ndim == 0 for tensor in (*taken, *given))
        self.elementwise &= numbers and bool(given) and function.__name__ in ELEMENTWISE
        return result


class Swapped(TorchFunctionMode):
    """Within it, a function computes with other tensors in the place of those that it captured."""

    def __init__(self, captured: Sequence[Tensor], others: Sequence[Tensor]):
        super().__init__()
        self.others = {id(tensor): other for tensor, other in zip(captured, others, strict=True)}

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return function(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, nested: Any) -> Any:
        match nested:
            case Tensor():
                return self.others.get(id(nested), nested)
            case tuple() | list() if type(nested) in (tuple, list):
                return type(nested)(self._swap(part) for part in nested)
            case dict():
                return {name: self._swap(part) for name, part in nested.items()}
            case _:
                return nested


def _tensors(nested: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dictionaries, and in those that are in them."""
    match nested:
        case Tensor():
            yield nested
        case tuple() | list():
            for part in nested:
                yield from _tensors(part)
        case dict():
            for part in nested.values():
                yield from _tensors(part)
