"""Sizes and seeded random tensors of a case."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import DTYPES, LAYOUTS, Case

QUERY_DIM, KEY_DIM, VALUE_DIM = 11, 13, 17
EQUAL_DIMS = ("default", "dot", "scaled")


class CaseGenerator:
    """Sizes of a case, and random tensors from its seed; the same calls in the same order draw the same numbers.

    `row_positions` (*batch, 1, M, 1) and `column_positions` (*batch, 1, 1, N) are the positions of queries and keys,
    without the leading axes where all batches share them.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, LAYOUTS[case.layout]
        self.queries, self.keys = case.sizes
        self.dtype = DTYPES[case.dtype]
        self.generator = torch.Generator().manual_seed(case.seed)
        self.row_positions = torch.arange(self.keys - self.queries, self.keys)[:, None]
        self.column_positions = torch.arange(self.keys)[None, :]

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers in the dtype of the case."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Uniform integers from 0 to below - 1."""
        return torch.randint(below, shape, generator=self.generator)

    def booleans(self, *shape: int) -> Tensor:
        """Booleans, true with probability 0.6."""
        return torch.rand(shape, generator=self.generator) < 0.6

    @property
    def heads(self) -> int:
        """The number of query heads, 1 where there is no head axis."""
        return self.layout.heads or 1

    @property
    def near_distance(self) -> int:
        """The size of windows, blocks and buckets: a quarter of the keys, 2 at least."""
        return max(self.keys // 4, 2)

    @property
    def positions_end(self) -> int:
        """A bound above all positions."""
        return max(self.queries, self.keys) + 1

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """(*batch, heads, M, N), without heads where the layout has none."""
        heads = () if self.layout.heads is None else (self.layout.heads,)
        return (*self.layout.batch, *heads, self.queries, self.keys)

    def expand_pairs(self, pairs: Tensor) -> Tensor:
        """Booleans over pairs, expanded to (*batch, heads or 1, M, N)."""
        return pairs.expand(*self.layout.batch, self.heads, self.queries, self.keys)

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the leaf of query, key or value, of which `Inputs.argument` is a view."""
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

    def call_positions(self) -> tuple[Tensor | None, Tensor | None]:
        """The position arguments of the call; sets `row_positions` and `column_positions` to the same positions."""
        if self.case.positions == "start":
            self.row_positions = torch.arange(self.queries)[:, None]
            return torch.arange(self.queries), None
        if self.case.positions == "scattered":
            queries = self.integers(self.keys + 1, *self.layout.batch, self.queries)
            keys = torch.rand(*self.layout.batch, self.keys, generator=self.generator).argsort(-1)
            self.row_positions, self.column_positions = queries[..., None, :, None], keys[..., None, None, :]
            return queries, keys
        return None, None
