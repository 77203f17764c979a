"""Interval arithmetic and three-valued logic, which evaluate a mask on whole tiles of pairs at once.

Range queries on tables: minimum and maximum over ranges of indices in O(1) each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .broadcasting import broadcast_shapes


def extremes(table: Tensor, before: Sequence[Tensor | int], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest entry in low..high of the last axis, for indices `before` into the axes before it.

    Each stretch is covered by two whose length is a power of two; those are known for every start, from O(L log L).

    >>> extremes(torch.tensor([5, 3, 4, 8]), (), torch.tensor([0, 2]), torch.tensor([2, 2]))
    (tensor([3, 4]), tensor([5, 4]))
    """
    lengths = high - low + 1
    longest = int(lengths.max()) if lengths.numel() else 1
    least, greatest = table, table
    levels = [(least, greatest)]
    for doubled in (2**level for level in range(longest.bit_length() - 1)):
        later = torch.arange(table.shape[-1], device=table.device).add(doubled).clamp(max=table.shape[-1] - 1)
        least, greatest = torch.minimum(least, least[..., later]), torch.maximum(greatest, greatest[..., later])
        levels.append((least, greatest))
    powers = 2 ** torch.arange(len(levels), device=table.device)
    level = torch.searchsorted(powers, lengths, right=True) - 1
    first, second = (level, *before, low), (level, *before, high - powers[level] + 1)
    least, greatest = (torch.stack(kind) for kind in zip(*levels, strict=True))
    return torch.minimum(least[first], least[second]), torch.maximum(greatest[first], greatest[second])


def filled(
    table: Tensor, before: Sequence[Tensor | int], rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Whether every entry and whether some entry is True, in low..high of the last two axes of a bool table.

    It counts them from sums over all that lies above and to the left: O(size of the table), and four of these for each.

    >>> whole = torch.tensor(0), torch.tensor(1)
    >>> filled(torch.tensor([[True, True], [True, False]]), (), whole, whole)
    (tensor(False), tensor(True))
    """
    sums = table.cumsum(-2, dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    sums = torch.nn.functional.pad(sums, (1, 0, 1, 0))
    (top, bottom), (left, right) = (rows[0], rows[1] + 1), (columns[0], columns[1] + 1)
    held = (
        sums[(*before, bottom, right)]
        - sums[(*before, top, right)]
        - sums[(*before, bottom, left)]
        + sums[(*before, top, left)]
    )
    return held == (bottom - top) * (right - left), held > 0


# What a mask says of a tile: no pair exists, every pair does, or neither is certain. PARTIAL promises nothing.
EMPTY, PARTIAL, FULL = 0, 1, 2

Number: TypeAlias = "Interval | Tensor | int"


class Undecided(Exception):
    """Raised where interval arithmetic can decide no tile; all tiles are then PARTIAL."""


_undecided_tiles: ContextVar[list[Tensor] | None] = ContextVar("undecided_tiles", default=None)


def evaluate_tiles(formula: Callable[[], Ternary | Tensor | bool]) -> Ternary:
    """The verdicts of a formula over intervals; PARTIAL on the tiles where one of its operations is undefined.

    Undefined are a divisor that may be 0 or below, and an index that may be outside of a table. Outside of this
    function they raise `Undecided`.

    >>> evaluate_tiles(lambda: 7 % Interval(torch.tensor([-3, 3, 7]), torch.tensor([3, 3, 7])) == 0)
    Ternary(verdicts=tensor([1, 0, 2], dtype=torch.int8))
    """
    token = _undecided_tiles.set(undecided := [])
    try:
        verdicts = Ternary.convert(formula()).verdicts
    finally:
        _undecided_tiles.reset(token)
    for tiles in undecided:
        verdicts = torch.where(tiles, PARTIAL, verdicts)
    return Ternary(verdicts)


def _require(defined: Tensor, reason: str) -> bool:
    """Whether an operation is defined on all tiles; the others are undecided.

    Raises:
        Undecided: there are others, and this is outside of `evaluate_tiles`.
    """
    if defined.all():
        return True
    if (undecided := _undecided_tiles.get()) is None:
        raise Undecided(reason)
    undecided.append(~defined)
    return False


class _TorchLike:
    """Base class of values that torch's functions accept through `__torch_function__`, computed by the rules below."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        rule = _RULES.get(function)
        return NotImplemented if rule is None else rule(*args, **(kwargs or {}))

    def __bool__(self) -> bool:
        raise Undecided("what is known of many pairs at once is neither true nor false")


@dataclass(frozen=True, eq=False)
class Ternary(_TorchLike):
    """Verdicts on tiles, int8: EMPTY = no pair exists, FULL = every pair does, PARTIAL = not known.

    `&` is the minimum, `|` the maximum and `~x` is 2 - x (Kleene's strong logic), so that EMPTY and FULL are never
    wrong: a formula over verdicts says nothing that the formula over the pairs themselves does not say.

    >>> (Interval.convert(torch.tensor([0, 4])) <= 3) & ~Ternary(torch.tensor([1, 1], dtype=torch.int8))
    Ternary(verdicts=tensor([1, 0], dtype=torch.int8))
    """

    verdicts: Tensor

    @classmethod
    def convert(cls, kept: Ternary | Tensor | bool) -> Ternary:
        """Convert booleans that are constant within each tile to EMPTY and FULL; verdicts are returned unchanged."""
        if isinstance(kept, Ternary):
            return kept
        kept = kept if isinstance(kept, Tensor) else torch.tensor(kept, device="cpu")
        if kept.dtype != torch.bool:
            raise Undecided(f"{kept.dtype} is no verdict")
        return cls(kept.to(torch.int8) * FULL)

    @classmethod
    def between(cls, every: Tensor, some: Tensor) -> Ternary:
        """FULL where every pair exists, EMPTY where not even some pair can; `every` implies `some`."""
        return cls(every.to(torch.int8) + some.to(torch.int8))

    @property
    def shape(self) -> torch.Size:
        """The shape of the verdicts: (..., tile rows, tile columns)."""
        return self.verdicts.shape

    def choose(self, chosen: Number, otherwise: Number) -> Interval:
        """`chosen` where all pairs exist, `otherwise` where none does, and the hull of both where that is not known."""
        chosen, otherwise = Interval.convert(chosen), Interval.convert(otherwise)
        low = torch.minimum(chosen.low, otherwise.low).where(self.verdicts == PARTIAL, otherwise.low)
        high = torch.maximum(chosen.high, otherwise.high).where(self.verdicts == PARTIAL, otherwise.high)
        return Interval(chosen.low.where(self.verdicts == FULL, low), chosen.high.where(self.verdicts == FULL, high))

    def __and__(self, other: Ternary | Tensor | bool) -> Ternary:
        return Ternary(torch.minimum(self.verdicts, Ternary.convert(other).verdicts))

    def __or__(self, other: Ternary | Tensor | bool) -> Ternary:
        return Ternary(torch.maximum(self.verdicts, Ternary.convert(other).verdicts))

    def __invert__(self) -> Ternary:
        return Ternary(FULL - self.verdicts)

    def __xor__(self, other: Ternary | Tensor | bool) -> Ternary:
        other = Ternary.convert(other)
        return (self & ~other) | (~self & other)

    def __eq__(self, other: Ternary | Tensor | bool) -> Ternary:  # type: ignore[override]
        return ~(self ^ other)

    def __ne__(self, other: Ternary | Tensor | bool) -> Ternary:  # type: ignore[override]
        return self ^ other

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Interval(_TorchLike):
    """Whole numbers known to lie in the closed interval [low, high]; tensors that broadcast as ordinary ones do.

    Arithmetic gives an interval that holds every result, comparisons give a `Ternary`. Ends are int64: numbers whose
    sums and products leave it are not looked after.

    >>> distance = Interval(torch.tensor(128), torch.tensor(255)) - Interval(torch.tensor(0), torch.tensor(127))
    >>> distance
    Interval(low=tensor(1), high=tensor(255))
    >>> distance > 0, distance % 300 <= 200, distance < 1
    (Ternary(verdicts=tensor(2, dtype=torch.int8)), Ternary(verdicts=tensor(1, dtype=torch.int8)),
     Ternary(verdicts=tensor(0, dtype=torch.int8)))
    """

    low: Tensor
    high: Tensor

    @classmethod
    def convert(cls, number: Number) -> Interval:
        """Convert a number to the interval that contains it alone; an interval is returned unchanged."""
        if isinstance(number, Interval):
            return number
        if not isinstance(number, Tensor | int):
            raise Undecided(f"{number!r} is no whole number")
        number = number if isinstance(number, Tensor) else torch.tensor(number, device="cpu")
        if number.is_floating_point() or number.is_complex():
            raise Undecided(f"{number.dtype} are no whole numbers")
        number = number.long()
        return cls(number, number)

    @property
    def shape(self) -> torch.Size:
        """The shape of both ends, broadcast."""
        return broadcast_shapes(self.low.shape, self.high.shape)

    def __add__(self, other: Number) -> Interval:
        other = Interval.convert(other)
        return Interval(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Number) -> Interval:
        other = Interval.convert(other)
        return Interval(self.low - other.high, self.high - other.low)

    def __rsub__(self, other: Tensor | int) -> Interval:
        return Interval.convert(other) - self

    def __mul__(self, other: Number) -> Interval:
        return self._corners(torch.mul, Interval.convert(other))

    def __floordiv__(self, other: Number) -> Interval:
        return self._corners(torch.floor_divide, _positive(other))

    def __mod__(self, other: Number) -> Interval:
        divisor = _positive(other)
        first, last = self.low // divisor.high, self.high // divisor.low
        one_period = (divisor.low == divisor.high) & (first == last)
        return Interval(
            torch.where(one_period, self.low % divisor.low, 0),
            torch.where(one_period, self.high % divisor.low, divisor.high - 1),
        )

    def __rfloordiv__(self, other: Tensor | int) -> Interval:
        return Interval.convert(other) // self

    def __rmod__(self, other: Tensor | int) -> Interval:
        return Interval.convert(other) % self

    __radd__ = __add__
    __rmul__ = __mul__

    def _corners(self, operator: Callable[[Tensor, Tensor], Tensor], other: Interval) -> Interval:
        """The result of an operator that is monotone in each operand: its extremes are at the ends."""
        if other.low is other.high:
            first, last = operator(self.low, other.low), operator(self.high, other.low)
            return Interval(torch.minimum(first, last), torch.maximum(first, last))
        corners = [operator(own, its) for own in (self.low, self.high) for its in (other.low, other.high)]
        return Interval(
            torch.minimum(torch.minimum(*corners[:2]), torch.minimum(*corners[2:])),
            torch.maximum(torch.maximum(*corners[:2]), torch.maximum(*corners[2:])),
        )

    def __abs__(self) -> Interval:
        through_zero = (self.low < 0) & (self.high > 0)
        first, last = self.low.abs(), self.high.abs()
        return Interval(torch.where(through_zero, 0, torch.minimum(first, last)), torch.maximum(first, last))

    def minimum(self, other: Number) -> Interval:
        """The smaller of two numbers."""
        other = Interval.convert(other)
        return Interval(torch.minimum(self.low, other.low), torch.minimum(self.high, other.high))

    def maximum(self, other: Number) -> Interval:
        """The larger of two numbers."""
        other = Interval.convert(other)
        return Interval(torch.maximum(self.low, other.low), torch.maximum(self.high, other.high))

    def clamp(self, min: Number | None = None, max: Number | None = None) -> Interval:  # noqa: A002
        """Numbers moved into [min, max], by torch's names for the two."""
        raised = self if min is None else self.maximum(min)
        return raised if max is None else raised.minimum(max)

    def abs(self) -> Interval:
        """The distance from 0."""
        return self.__abs__()

    def __lt__(self, other: Number) -> Ternary:
        other = Interval.convert(other)
        return Ternary.between(self.high < other.low, self.low < other.high)

    def __le__(self, other: Number) -> Ternary:
        other = Interval.convert(other)
        return Ternary.between(self.high <= other.low, self.low <= other.high)

    def __gt__(self, other: Number) -> Ternary:
        return Interval.convert(other) < self

    def __ge__(self, other: Number) -> Ternary:
        return Interval.convert(other) <= self

    def __eq__(self, other: Number) -> Ternary:  # type: ignore[override]
        other = Interval.convert(other)
        meet = (self.low <= other.high) & (other.low <= self.high)
        return Ternary.between((self.high == other.low) & (self.low == other.high), meet)

    def __ne__(self, other: Number) -> Ternary:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]


def _positive(divisor: Number) -> Interval:
    """The divisor as an interval above 0; where it may be 0 or below, the tile is undecided."""
    divisor = Interval.convert(divisor)
    if _require(divisor.low > 0, "a divisor may be 0 or below"):
        return divisor
    return Interval(divisor.low.clamp(min=1), divisor.high.clamp(min=1))


def look_up(table: Tensor, index: tuple[Number, ...]) -> Interval | Ternary | Tensor:
    """table[index] for whole indices that broadcast, one for each axis of the table; intervals among them may be two.

    One interval: the least and the greatest entry of that stretch. Two, into booleans: whether the rectangle holds
    none, some or nothing but True. It costs O(size of the table · log of the longest stretch) and O(1) a tile.

    >>> look_up(torch.tensor([5, 3, 4, 8]), (Interval(torch.tensor([0, 1]), torch.tensor([2, 2])),))
    Interval(low=tensor([3, 3]), high=tensor([5, 4]))
    """
    at = [axis for axis, chosen in enumerate(index) if isinstance(chosen, Interval)]
    stretches = [chosen for chosen in index if isinstance(chosen, Interval)]
    others = [chosen for chosen in index if not isinstance(chosen, Interval)]
    if not at:
        return table[tuple(others)]
    if len(index) != table.ndim or len(at) > 2 or table.is_floating_point() or table.is_complex():
        raise Undecided(f"{len(at)} intervals into {table.dtype} {tuple(table.shape)}")
    for number, axis in enumerate(at):
        low, high, length = stretches[number].low, stretches[number].high, table.shape[axis]
        if not _require((low >= 0) & (high < length), f"positions beyond a table of {tuple(table.shape)}"):
            stretches[number] = Interval(low.clamp(0, length - 1), high.clamp(0, length - 1))
    table = table.movedim(at, list(range(-len(at), 0)))
    if len(at) == 1:
        low, high = extremes(table, others, stretches[0].low, stretches[0].high)
        return Ternary.between(low, high) if table.dtype == torch.bool else Interval(low.long(), high.long())
    if table.dtype != torch.bool:
        raise Undecided("a rectangle of numbers")
    rows, columns = stretches
    return Ternary.between(*filled(table, others, (rows.low, rows.high), (columns.low, columns.high)))


def _where(condition: Ternary | Tensor, chosen: Any, otherwise: Any) -> Interval | Ternary:
    """torch.where of intervals or ternaries."""
    condition = Ternary.convert(condition)
    if any(
        isinstance(value, Ternary | bool) or getattr(value, "dtype", None) == torch.bool
        for value in (chosen, otherwise)
    ):
        chosen, otherwise = Ternary.convert(chosen), Ternary.convert(otherwise)
        return (condition & chosen) | (~condition & otherwise) | (chosen & otherwise)
    return condition.choose(chosen, otherwise)


def _index(table: Tensor, index: Any) -> Interval | Ternary | Tensor:
    return look_up(table, index if isinstance(index, tuple) else (index,))


# Torch's functions of intervals and verdicts; any other, such as torch.remainder, makes every tile PARTIAL.
_RULES: dict[Callable, Callable] = {
    torch.Tensor.__getitem__: _index,
    torch.where: _where,
    torch.abs: Interval.__abs__,
    torch.clamp: Interval.clamp,
    torch.minimum: lambda left, right: Interval.convert(left).minimum(right),
    torch.maximum: lambda left, right: Interval.convert(left).maximum(right),
    torch.logical_not: Ternary.__invert__,
    torch.logical_and: lambda left, right: Ternary.convert(left) & right,
    torch.logical_or: lambda left, right: Ternary.convert(left) | right,
}
