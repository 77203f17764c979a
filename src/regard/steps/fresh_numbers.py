"""Fresh whole numbers in place of the inputs of a worked example, a function of a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random

import torch
from torch import Tensor

_ACTIVE: ContextVar[FreshNumbers | None] = ContextVar("fresh_numbers", default=None)
MOST_TRIES = 1000
"""Draws of a matrix until its rows differ; of few numbers there may be no such draw."""
LARGE = 4


class FreshNumbers:
    """Whole numbers in the range of an example's own; the same matrix is drawn once, wherever it is used.

    Rows that are the same in the example stay the same and others differ; none is zero unless one of those is. Unit
    vectors of which some repeat stay unit vectors: the delta rule and rotations are about them.

    >>> import torch
    >>> fresh = FreshNumbers("seed 7")
    >>> keys = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> drawn = fresh.in_place_of(keys)
    >>> torch.equal(drawn, fresh.in_place_of(keys)), drawn.min() >= 0, drawn.max() <= 2
    (True, tensor(True), tensor(True))
    """

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)  # of a text: the same on all machines and in all versions of Python 3
        self._drawn: dict[str, Tensor] = {}

    @classmethod
    def active(cls) -> FreshNumbers | None:
        """What draws the inputs of the example that is made now; None: it has its own numbers."""
        return _ACTIVE.get()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, examples are made with these numbers."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def in_place_of(self, numbers: Tensor) -> Tensor:
        """A tensor of the shape and dtype of `numbers`, (..., rows, features)."""
        name = str(numbers.tolist())
        if name not in self._drawn:
            self._drawn[name] = self._draw(numbers)
        return self._drawn[name]

    def draw_again(self) -> None:
        """Forget what was drawn: the next example has other numbers."""
        self._drawn.clear()

    def _draw(self, numbers: Tensor) -> Tensor:
        rows, places = numbers.reshape(-1, numbers.shape[-1]).unique(dim=0, return_inverse=True)
        units = len(rows) < len(places) and bool(((rows != 0).sum(-1) == 1).all()) and int(rows.max()) == 1
        for _ in range(MOST_TRIES):
            drawn = self._unit_rows(rows) if units else self._rows(rows)
            if len(drawn.unique(dim=0)) == len(rows) and (bool(drawn.any(-1).all()) or not bool(rows.any(-1).all())):
                break
        return drawn[places].reshape(numbers.shape).to(numbers.dtype)

    def _rows(self, rows: Tensor) -> Tensor:
        """Numbers between the least and the largest of `rows`; even ones, if those are even and as large as 4."""
        least, most = int(rows.min()), int(rows.max())
        halved = most >= LARGE and bool((rows % 2 == 0).all())
        choices = range(least, most + 1, 2 if halved else 1)
        return torch.tensor([[self._random.choice(choices) for _ in row] for row in rows.tolist()])

    def _unit_rows(self, rows: Tensor) -> Tensor:
        return torch.tensor([self._random.choice(torch.eye(rows.shape[-1]).tolist()) for _ in rows])
