"""Base class of masks: symbolic boolean functions of query and key positions, combined with `&`, `|` and `~`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, overload

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.grid import Blocks, Grid, broadcast_together
from ..core.intervals import FULL, PARTIAL, Ternary, evaluate_tiles
from ..core.mixed_devices import refuse_mixed_devices
from ..core.torch_modes import is_causal_bias
from ..errors import MaskError, RegardError, ShapeError
from ..utils.numbers import whole_number
from ..utils.other_types import name_type
from .drawing import Drawing, draw
from .key_spans import ONE, KeySpan, Terms, count_pairs, product, weighted_sum
from .parts import Part, intersect_parts, unite_parts

Pairs: TypeAlias = Grid | Blocks
"""The argument of `Mask.keep`: single pairs (`Grid`), or tiles of pairs (`Blocks`)."""
Kept: TypeAlias = Tensor | Ternary
"""The result of `Mask.keep`: a bool tensor, True = attend, for a `Grid`; a `Ternary` for `Blocks`."""


class Mask(ABC):
    """Which pairs of query and key exist, as a function of their positions; True = attend.

    A mask is a formula, not a tensor. Subclasses implement `keep(grid)` with the positions `grid.query` and `grid.key`
    and the operators + - * // % < <= == & | ~ abs, `clamp`, torch.minimum, torch.maximum, torch.where and indexing of
    tensors. The same formula runs on single pairs, where positions are int64 tensors that broadcast, and on tiles of
    pairs, where they are intervals; a kernel skips the tiles that interval arithmetic shows to be empty. A tile on
    which an operation is undefined, because a divisor may be 0 or below, counts as PARTIAL: it is computed, pair by
    pair. A formula with any other function, such as torch.remainder or torch.gcd, makes every tile PARTIAL.

    Everything else evaluates a mask through `evaluate`, which checks the result.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> from regard.masks import Mask
    >>> @dataclass(frozen=True)
    ... class SameParity(Mask):
    ...     def keep(self, grid):
    ...         return grid.query % 2 == grid.key % 2
    >>> SameParity().dense(2, 4).int()
    tensor([[1, 0, 1, 0],
            [0, 1, 0, 1]], dtype=torch.int32)
    """

    @property
    def by_distance(self) -> bool:
        """Whether the mask depends on *query position - key position* alone, so that each diagonal has one value."""
        return False

    @property
    def by_position(self) -> bool:
        """Whether positions decide, so that rows and columns may be reordered; not of a tensor over all pairs."""
        return all(operand.by_position for operand in self.operands)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Disjoint dense parts whose union is the mask; () for a mask that is computed best by its tiles.

        >>> from regard import masks
        >>> for part in (masks.causal() & (masks.window(before=2) | masks.strided(3))).parts:
        ...     print(part)
        causal() & window(before=2)
        residues mod 3 of causal() & ~window(before=2)
        """
        return ()

    @property
    def is_of_library(self) -> bool:
        """Whether no code of a user's class decides what `parts` and `key_span` are: they are the same in each call."""
        return type(self).__module__.startswith("regard.") and all(each.is_of_library for each in self.operands)

    def key_span(self) -> KeySpan | None:
        """A function from query positions to the contiguous keys that each attends to; None where they are not that."""
        return None

    def span_terms(self) -> Terms | None:
        """The mask as a polynomial of masks that have a `key_span`; None where a part of it has none."""
        span = self.key_span()
        return None if span is None else {frozenset((span,)): 1}

    @abstractmethod
    def keep(self, grid: Pairs) -> Kept:
        """The formula: bool, broadcastable to (..., heads, M, N), on a `Grid`; a `Ternary` per tile on `Blocks`."""

    @overload
    def evaluate(self, grid: Grid) -> Tensor: ...

    @overload
    def evaluate(self, grid: Blocks) -> Ternary: ...

    def evaluate(self, grid: Pairs) -> Kept:
        """The checked result of `keep`: bool, broadcastable to (..., heads, M, N), or a `Ternary` per tile.

        A tile for which `keep` fails is PARTIAL.

        Raises:
            MaskError: on pairs, `keep` fails or returns anything but a bool tensor over them.
        """
        if isinstance(grid, Blocks):
            return self._evaluate_tiles(grid)
        try:
            kept = self.keep(grid)
        except (RegardError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a mask may be the user's, and raise anything
            self.check_operands(grid)
            refuse_mixed_devices(self, error, grid.device)
            raise MaskError(
                f"{self!r} cannot be evaluated: {type(error).__name__}: {error}. `keep` gets the positions of many "
                "pairs as tensors of whole numbers, 0 among them, and returns a bool tensor; & | ~ and torch.where "
                "stand for and, or, not and if"
            ) from error
        if isinstance(grid, Grid):
            if not _is_over(kept, *grid.shape):
                self.check_operands(grid)
                raise self._wrong_result(kept, *grid.shape)
            if kept.ndim < 2:
                return kept.reshape(1, -1)
        return kept

    @property
    def operands(self) -> tuple[Mask, ...]:
        """The masks that this one combines by & | ~; none for other masks."""
        return ()

    def _evaluate_tiles(self, blocks: Blocks) -> Ternary:
        """The verdict of `keep` on each tile; PARTIAL, which is always valid, where it cannot be evaluated on tiles."""
        try:
            return evaluate_tiles(lambda: self.keep(blocks))
        except RegardError:
            raise
        except Exception:  # Undecided, or an operation that intervals do not have; pairs show what is wrong
            return Ternary(torch.full((1, 1), PARTIAL, dtype=torch.int8, device=blocks.device))

    def check_operands(self, grid: Pairs) -> None:
        """Raise the error of the operand that fails, if one of them does."""
        for operand in self.operands:
            operand.evaluate(grid)

    def _wrong_result(self, kept: object, queries: int, keys: int) -> MaskError:
        has = f"{kept.dtype} of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else f"a {type(kept).__name__}"
        return MaskError(
            f"{self!r}: keep returned {has} for {queries} queries and {keys} keys; it needs a bool tensor, True = "
            "attend, that broadcasts to (queries, keys). `grid.query` is a column and `grid.key` a row, which "
            "comparisons broadcast"
        )

    def dense(
        self,
        queries: int,
        keys: int,
        *,
        query_positions: Tensor | range | None = None,
        key_positions: Tensor | range | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The mask as a bool tensor (M, N), or (..., M, N) with batch and heads if it depends on them; True = attend.

        Default positions: keys 0..N-1, queries the last M of these.

        Raises:
            ShapeError: lengths that are no whole numbers of at least 0, or positions that do not fit them.
        """
        for name, length in (("queries", queries), ("keys", keys)):
            whole_number(name, length, least=0, error=ShapeError)
        grid = Grid.from_lengths(
            queries, keys, query_positions=query_positions, key_positions=key_positions, device=device
        )
        keep = self.evaluate(grid)
        return keep.expand(*keep.shape[:-2], queries, keys)

    def tiles(
        self,
        queries: int,
        keys: int,
        size: int | tuple[int, int] = 128,
        *,
        query_positions: Tensor | range | None = None,
        key_positions: Tensor | range | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The state of each tile, 0 = EMPTY, 1 = PARTIAL, 2 = FULL: int8 (..., ⌈M/rows⌉, ⌈N/columns⌉).

        `size` is the rows and columns of a tile, or one number for both; tiles at the end are smaller. EMPTY and FULL
        are exact; a PARTIAL tile may turn out to be either. Time and memory are O(M + N + number of tiles), and for a
        mask that holds a tensor also O(its size). Leading axes are those of `dense`.

        Raises:
            ShapeError: a size that is no whole number of at least 1.

        >>> from regard import masks
        >>> masks.causal().tiles(256, 384)
        tensor([[2, 1, 0],
                [2, 2, 1]], dtype=torch.int8)
        """
        grid = Grid.from_lengths(
            queries, keys, query_positions=query_positions, key_positions=key_positions, device=device
        )
        return self.verdicts(Blocks.from_grid(grid, size))

    def verdicts(self, blocks: Blocks) -> Tensor:
        """The state of each tile of `blocks`, expanded to all tiles: int8 (..., ⌈M/rows⌉, ⌈N/columns⌉)."""
        verdicts = self.evaluate(blocks).verdicts
        return verdicts.expand(*verdicts.shape[:-2], *blocks.shape)

    def density(
        self,
        queries: int,
        keys: int,
        size: int | tuple[int, int] = 128,
        *,
        query_positions: Tensor | range | None = None,
        key_positions: Tensor | range | None = None,
        device: torch.device | None = None,
    ) -> float:
        """The exact fraction of pairs that exist, over batch and heads; 0.0 if there are no pairs.

        O(M + N) over consecutive positions where rows are spans of keys (causal, windows, prefixes, sorted documents,
        and their combinations), or where distances decide. For other masks tiles of `size` are evaluated, and the
        PARTIAL ones pair by pair, one tile at a time.

        >>> from regard import masks
        >>> masks.causal().density(4, 4)
        0.625
        """
        grid = Grid.from_lengths(
            queries, keys, query_positions=query_positions, key_positions=key_positions, device=device
        )
        blocks = Blocks.from_grid(grid, size)
        if queries and keys and (counted := self._count_pairs(grid, query_positions, key_positions)) is not None:
            return counted / (queries * keys)
        verdicts = self.verdicts(blocks)
        if (verdicts == PARTIAL).any():  # tiles that nothing is known of lack the leading axes of their pairs
            one = self.evaluate(grid.tile(slice(0, 1), slice(0, 1)))
            verdicts = verdicts.expand(*broadcast_shapes(one.shape[:-2], verdicts.shape[:-2]), *blocks.shape)
        leading = verdicts.shape[:-2]
        kept = int(((verdicts == FULL) * blocks.areas).sum())
        for row, column in (verdicts == PARTIAL).unsqueeze(0).flatten(0, -3).any(0).nonzero().tolist():
            tile = blocks.tile(row, column)
            some = (verdicts[..., row, column] == PARTIAL)[..., None, None]
            kept += int((self.evaluate(tile) & some).expand(*leading, *tile.shape).sum())
        pairs = leading.numel() * queries * keys
        return kept / pairs if pairs else 0.0

    def _count_pairs(self, grid: Grid, queries: Tensor | range | None, keys: Tensor | range | None) -> int | None:
        """The number of pairs of a batch and head by spans or by distances; None where neither is known.

        queries, keys: the positions that the grid was made of; they are known to be consecutive where they are ranges.
        """
        keys = range(grid.shape[1]) if keys is None else keys
        if isinstance(keys, range) and queries is None:
            queries = range(keys.stop - grid.shape[0], keys.stop)
        if not (isinstance(keys, range) and isinstance(queries, range) and keys.step == queries.step == 1):
            return None
        first_and_last = (slice(None, None, max(count - 1, 1)) for count in grid.shape)
        self.evaluate(grid.tile(*first_and_last))  # says so if positions are out of its range
        if (terms := self.span_terms()) is not None:
            return count_pairs(terms, queries, keys)
        if not self.by_distance:
            return None
        distances = torch.arange(keys.start - queries.stop + 1, keys.stop - queries.start, device=grid.device)
        keep = self.evaluate(Grid(torch.zeros_like(distances[:1]), distances, heads=False))
        if keep.ndim > 2:
            return None
        number = torch.arange(1, len(distances) + 1, device=grid.device)
        pairs = torch.minimum(number, number.flip(0)).clamp_(max=min(grid.shape))
        return int(pairs[keep.expand(1, len(distances))[0]].sum())

    def draw(
        self,
        queries: int,
        keys: int,
        *,
        batch: int = 0,
        head: int = 0,
        query_positions: Tensor | range | None = None,
        key_positions: Tensor | range | None = None,
    ) -> Drawing:
        """A picture of the mask: `print` it, or save it with `draw(M, N).figure().savefig("mask.png")`.

        If the mask depends on batch or heads, `batch` and `head` select which one is drawn. Memory is not quadratic: a
        large mask is drawn from its tiles.

        Raises:
            MaskError: `batch` or `head` is out of range.
            ShapeError: there are no pairs.

        >>> from regard import masks
        >>> print(masks.causal().draw(3, 6))
        causal()
        3 × 6 pairs; 83.3 % exist
             keys 0   4
        queries 3 ████··
                  █████·
                  ██████
        █ exists  · does not exist
        """
        grid = Grid.from_lengths(queries, keys, query_positions=query_positions, key_positions=key_positions)
        return draw(self, grid, batch, head)

    def __and__(self, other: Mask) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, as_mask(other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __getstate__(self) -> object:
        """What is copied and pickled: all but what is remembered of the mask (`tiles.memo`)."""
        state = super().__getstate__()
        if isinstance(state, dict):
            return {name: value for name, value in state.items() if not name.startswith("_memo")}
        return state

    def __bool__(self) -> bool:
        raise MaskError("a mask has no truth value of its own: combine masks with & | ~, not with and, or, not")


@dataclass(frozen=True, repr=False)
class BinaryMask(Mask):
    """Base class of the masks that combine two others pair by pair."""

    left: Mask
    right: Mask

    @property
    def by_distance(self) -> bool:
        return self.left.by_distance and self.right.by_distance

    @property
    def operands(self) -> tuple[Mask, ...]:
        return self.left, self.right

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of both operands, combined once: those of a user's mask in each call, as its code may change."""
        if not self.is_of_library:
            return self._combined_parts()
        known = vars(self).get("_parts")
        return known if known is not None else vars(self).setdefault("_parts", self._combined_parts())

    def _combined_parts(self) -> tuple[Part, ...]:
        """`parts`, combined anew."""
        return ()


@dataclass(frozen=True, repr=False)
class And(BinaryMask):
    """Intersection: pairs that exist in both masks."""

    def _combined_parts(self) -> tuple[Part, ...]:
        return intersect_parts(self.left, self.right)

    def span_terms(self) -> Terms | None:
        left, right = self.left.span_terms(), self.right.span_terms()
        return None if left is None or right is None else product(left, right)

    def keep(self, grid: Pairs) -> Kept:
        left, right = _evaluated(self, grid)
        return left & right

    def __repr__(self) -> str:
        return f"{_operand(self.left, And, Not)} & {_operand(self.right, Not)}"


@dataclass(frozen=True, repr=False)
class Or(BinaryMask):
    """Union: pairs that exist in either mask."""

    def _combined_parts(self) -> tuple[Part, ...]:
        return unite_parts(self.left, self.right)

    def span_terms(self) -> Terms | None:
        left, right = self.left.span_terms(), self.right.span_terms()
        if left is None or right is None:
            return None
        return weighted_sum((1, left), (1, right), (-1, product(left, right)))

    def keep(self, grid: Pairs) -> Kept:
        left, right = _evaluated(self, grid)
        return left | right

    def __repr__(self) -> str:
        return f"{_operand(self.left, And, Or, Not)} | {_operand(self.right, And, Not)}"


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Complement: pairs that do not exist in the mask."""

    mask: Mask

    @property
    def by_distance(self) -> bool:
        return self.mask.by_distance

    @property
    def operands(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def span_terms(self) -> Terms | None:
        terms = self.mask.span_terms()
        return None if terms is None else weighted_sum((1, ONE), (-1, terms))

    def keep(self, grid: Pairs) -> Kept:
        return ~self.mask.keep(grid)

    def __repr__(self) -> str:
        return f"~{_operand(self.mask, Not)}"


def as_mask(mask: object) -> Mask:
    """The mask itself; a MaskError with the conversion to use for anything else."""
    if isinstance(mask, Mask):
        return mask
    if is_causal_bias(mask):
        raise MaskError("a CausalBias of torch joins a mask through masks.from_sdpa(bias)")
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        raise MaskError(
            "a bool tensor joins a mask through masks.where(keep=tensor), where True = attend, or "
            "masks.where(ignore=tensor), where True = leave out"
        )
    has = name_type("mask", mask, of_function="masks.from_mod(mask)")
    raise MaskError(f"a mask is needed here, such as masks.causal(); this is {has}")


def _is_over(kept: object, queries: int, keys: int) -> TypeGuard[Tensor]:
    """Whether a result is a bool tensor whose last two axes broadcast to (M, N)."""
    if not isinstance(kept, Tensor) or kept.dtype is not torch.bool:
        return False
    shape = kept.shape
    return (len(shape) < 1 or shape[-1] in (1, keys)) and (len(shape) < 2 or shape[-2] in (1, queries))


def _evaluated(both: And | Or, grid: Pairs) -> tuple[Kept, Kept]:
    """The results of both operands of `&` or `|`; a MaskError if their shapes do not broadcast."""
    if isinstance(grid, Blocks):  # what one operand tells of tiles is of use where the other one has no answer
        left, right = both.left.evaluate(grid), both.right.evaluate(grid)
    else:
        left, right = both.left.keep(grid), both.right.keep(grid)
    if left.shape != right.shape and not broadcast_together(left, right):
        both.check_operands(grid)
        raise MaskError(
            f"{both.left!r} has the shape {tuple(left.shape)} and {both.right!r} {tuple(right.shape)} (batch and "
            "heads, queries, keys): they do not broadcast"
        )
    return left, right


def _operand(mask: Mask, *tighter: type[Mask]) -> str:
    """The `repr` of an operand, in parentheses unless its operator binds at least as tightly."""
    bare = not isinstance(mask, And | Or | Not) or isinstance(mask, tighter)
    return repr(mask) if bare else f"({mask!r})"
