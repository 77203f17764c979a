"""The sizes of a case, and numbers from its seed."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import DTYPES, LAYOUTS, Case

QUERY_DIM, KEY_DIM, VALUE_DIM = 11, 13, 17
EQUAL_DIMS = ("default", "dot", "scaled")


class Draw:
    """The sizes of a case, and numbers from its seed, always in the same order.

    `query_at` and `key_at` are the positions, (*batch, 1, M, 1) and (*batch, 1, 1, N), or without the axes in front.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, LAYOUTS[case.layout]
        self.queries, self.keys = case.sizes
        self.dtype = DTYPES[case.dtype]
        self.generator = torch.Generator().manual_seed(case.seed)
        self.query_at = torch.arange(self.keys - self.queries, self.keys)[:, None]
        self.key_at = torch.arange(self.keys)[None, :]

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers in the dtype of the case."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Whole numbers from 0 on."""
        return torch.randint(below, shape, generator=self.generator)

    def coins(self, *shape: int) -> Tensor:
        """Booleans, six of ten true."""
        return torch.rand(shape, generator=self.generator) < 0.6

    @property
    def heads(self) -> int:
        """How many heads, 1 where there is no head axis."""
        return self.layout.heads or 1

    @property
    def reach(self) -> int:
        """A distance that parts near keys from far ones: 2, or a quarter of many keys."""
        return max(self.keys // 4, 2)

    @property
    def positions_end(self) -> int:
        """All positions from 0 on are below this."""
        return max(self.queries, self.keys) + 1

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """(*batch, heads, M, N), without heads where the layout has none."""
        heads = () if self.layout.heads is None else (self.layout.heads,)
        return (*self.layout.batch, *heads, self.queries, self.keys)

    def whole(self, pairs: Tensor) -> Tensor:
        """Booleans over pairs, as (*batch, heads or 1, M, N)."""
        return pairs.expand(*self.layout.batch, self.heads, self.queries, self.keys)

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        """The shape of query's, key's or value's leaf, before `Inputs.arranged`."""
        key_dim = QUERY_DIM if self.case.score in EQUAL_DIMS else KEY_DIM
        length = self.queries if name == "query" else self.keys
        value_dim = VALUE_DIM if self.case.dims == "unequal" else key_dim
        dim = {"query": QUERY_DIM, "key": key_dim, "value": value_dim}[name]
        shared = self.case.memory in ("expanded", "broadcast") and name != "query"
        batch = (1,) * len(self.layout.batch) if shared else self.layout.batch
        if self.layout.heads is None:
            return (*batch, dim, length) if self.case.memory == "strided" else (*batch, length, dim)
        heads = (self.layout.heads if name == "query" else self.layout.key_heads) or 1
        return (*batch, length, heads, dim) if self.case.memory == "strided" else (*batch, heads, length, dim)

    def positions(self) -> tuple[Tensor | None, Tensor | None]:
        """What the call is told of positions; `query_at` and `key_at` become what that means."""
        if self.case.positions == "start":
            self.query_at = torch.arange(self.queries)[:, None]
            return torch.arange(self.queries), None
        if self.case.positions == "scattered":
            queries = self.integers(self.keys + 1, *self.layout.batch, self.queries)
            keys = torch.rand(*self.layout.batch, self.keys, generator=self.generator).argsort(-1)
            self.query_at, self.key_at = queries[..., None, :, None], keys[..., None, None, :]
            return queries, keys
        return None, None
