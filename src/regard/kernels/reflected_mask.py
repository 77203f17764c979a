"""Masks that parts of reflected attention can have: causal, with a window and the keys that exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from ..core.grid import WHOLE
from ..core.problem import Problem
from ..masks import Mask, causal, where
from ..masks.base import And
from ..masks.causal import Causal
from ..masks.padding import Padding
from ..masks.tensor_mask import TensorMask
from ..masks.window import Window


@dataclass(frozen=True, eq=False)
class ReflectedMask:
    """0 <= query position - key position <= before, for keys that exist.

    Shapes: keys bool (batch or 1, heads or 1, N, 1); None where all exist. before: None for no limit.
    """

    before: int | None
    keys: Tensor | None

    @staticmethod
    def fits(mask: Mask | None) -> bool:
        """Whether a mask is causal, alone or joined by & to windows and masks of keys."""
        masks = list(_joined(mask))
        return any(isinstance(each, Causal) for each in masks) and all(
            isinstance(each, Causal | Window) or _is_of_keys(each) for each in masks
        )

    @classmethod
    def of_problem(cls, problem: Problem) -> ReflectedMask:
        """That of a problem whose mask fits; a window's other side lets all pass that a causal mask does."""
        masks, keys = list(_joined(problem.mask)), None
        limits = [each.before for each in masks if isinstance(each, Window) and each.before is not None]
        for mask in masks:
            if _is_of_keys(mask):
                kept = mask.evaluate(problem.grid().tile(slice(0, 1), WHOLE)).mT
                keys = kept if keys is None else keys & kept
        if keys is not None:
            keys = keys.reshape(*(1,) * (4 - keys.ndim), *keys.shape)
        return cls(min(limits, default=None), keys)

    def filled(self, batch: int, rows: int) -> ReflectedMask:
        """The same for so many sequences, with so many rows more, of keys that do not exist."""
        if self.keys is None:
            return self
        return ReflectedMask(self.before, pad(self.keys.expand(batch, -1, -1, -1), (0, 0, 0, rows)))

    def of_part(self, distance: int, shape: tuple[int, int], keys: Tensor | None) -> Mask | None:
        """The mask of a part of so many queries and keys, its first query so far behind its first key.

        Shapes: keys (batch · blocks, heads or 1, keys of the part, 1), those that exist; None for all.
        """
        queries, columns = shape
        mask = causal() if distance == 0 else None
        if self.before is not None and self.before < distance + queries - 1:
            # Positions of a part count from the last query and the last key together.
            of_window = Window(self.before - distance + columns - queries, None)
            mask = of_window if mask is None else mask & of_window
        if keys is not None:
            mask = where(keep=keys.mT) if mask is None else mask & where(keep=keys.mT)
        return mask


def _joined(mask: Mask | None) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _joined(mask.left)
        yield from _joined(mask.right)
    elif mask is not None:
        yield mask


def _is_of_keys(mask: Mask) -> bool:
    """Whether a mask is the same for all queries."""
    return isinstance(mask, Padding) or (isinstance(mask, TensorMask) and mask.pairs.shape[-2] == 1)
