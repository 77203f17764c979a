"""Tokens of many sequences over keys in one memory: which program reads which tiles of keys, and the launches.

A tile is a piece of a run of neighbouring rows, so that keys are read where they are. Sequences are cut into parts of
about as many tiles, whatever their lengths: all programs of a step end at about one time. `paged_parts` has the
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..base import TokenRuns
from .jit_runtime import chip, exact_products, launch
from .kernel_arguments import LOG2E, StridedRows, with_near_rows
from .split_keys import FEW_TILES, MERGED_AT_ONCE, PROGRAMS_AT_ONCE, KeySplit, key_split

MOST_ROWS = 64
"""Tokens of a group times query heads of a key head: the rows of a program."""
MOST_COLUMNS = 64
"""Keys of a tile: as many tokens has a page, and the next page may be anywhere."""
WAVES = 2
"""Programs that each place of the chip computes one after another, where there are so many keys."""


class PageTables(NamedTuple):
    """Of the groups of a step, on the device: `tiles`, `units` and `spans` as `paged_parts` has them.

    sums: of one key head, those of all rows and their parts. most: parts of a group. masked: whether a group has
    several tokens, which attend to different keys.
    """

    tiles: Tensor
    units: Tensor
    spans: Tensor
    sums: int
    most: int
    masked: bool


@lru_cache(maxsize=16)
def page_tables(
    groups: tuple[TokenRuns, ...], tokens: int, group_heads: int, columns: int, places: int, device: torch.device
) -> PageTables:
    """The tables of a step of so many tokens; its layers have the same.

    columns: keys of a tile. places: programs for each key head that the chip computes one after another.
    """
    tiles: list[tuple[int, int, int]] = []
    begins = [0]
    for each in groups:
        tiles += _tiles(each, columns)
        begins.append(len(tiles))
    longest = max(-(-len(tiles) // places), FEW_TILES)
    units: list[tuple[int, ...]] = []
    spans = [(0, 0, 0)] * tokens
    sums = most = 0
    for number, each in enumerate(groups):
        begin, end = begins[number : number + 2]
        parts = -(-(end - begin) // longest)
        cuts = [begin + (end - begin) * part // max(parts, 1) for part in range(parts + 1)]
        of_group = each.token, each.tokens, each.limit
        units += [(*of_group, cuts[part], cuts[part + 1], sums, part, parts) for part in range(parts)]
        for token in range(each.tokens):
            spans[each.token + token] = sums + token * parts, each.tokens * parts, parts
        sums, most = sums + each.tokens * group_heads * parts, max(most, parts)
    tables = _table(tiles, 3, device), _table(units, 8, device), _table(spans, 3, device)
    return PageTables(*tables, sums, most, any(each.tokens > 1 for each in groups))


def _tiles(group: TokenRuns, columns: int) -> list[tuple[int, int, int]]:
    """Of each tile of a group's keys the first row, the number of keys, and the place of the first among them."""
    tiles, place = [], 0
    for first, count in group.runs:
        for begin in range(0, count, columns):
            tiles.append((first + begin, min(columns, count - begin), place + begin))
        place += count
    return tiles


def _table(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(rows), width).to(device)


class PagedInTriton:
    """Two launches for the tokens of a step, whatever the lengths of their sequences; nothing is read back."""

    most_rows = MOST_ROWS

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, groups: Sequence[TokenRuns]
    ) -> tuple[Tensor, Tensor]:
        """Output (H, T, Dv) and log-sum-exp (H, T), float32: 0 and -inf of tokens in no group, or without keys."""
        (heads, tokens, dim), (key_heads, _, value_dim) = query.shape, value.shape
        output = torch.empty(heads, tokens, value_dim, dtype=torch.float32, device=value.device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=value.device)
        if not lse.numel():
            return output, lse
        if query.dtype != key.dtype:
            query = query.float()
        group, at = heads // key_heads, chip(value.device)
        rows = group * max((each.tokens for each in groups), default=1)
        split = key_split(key_heads, rows, dim, value_dim, query.element_size(), at, MOST_COLUMNS)
        places = max(WAVES * PROGRAMS_AT_ONCE * at.processors // split.units, 1)
        tables = page_tables(tuple(groups), tokens, group, split.sizes["BN"], places, value.device)
        sums = output.new_empty(key_heads * tables.sums * (value_dim + 2))
        with torch.cuda.device_of(output):
            if len(tables.units):
                _attend_units(split, tables, (query, key, value), scale, sums)
            _merge_units(split, tables, group, sums, output, lse)
        return output, lse


def _attend_units(
    split: KeySplit, tables: PageTables, inputs: tuple[Tensor, Tensor, Tensor], scale: float, sums: Tensor
) -> None:
    """Write the sums of all parts."""
    from .paged_parts import attend_pages  # imports Triton, which a process without CUDA need not load

    query, key, value = (with_near_rows(each).unsqueeze(0) for each in inputs)
    # Half of the stages of a loop read the table, one tile ahead of the keys and values that it finds.
    options = split.options | {"STAGES": 2 * split.options["STAGES"] - 1}
    launch(
        attend_pages,
        (len(tables.units), key.shape[1], split.blocks),
        *(*(StridedRows.of(each) for each in (query, key, value)), tables.tiles, tables.units, sums),
        *(query.shape[1] // key.shape[1], tables.sums, scale * LOG2E),
        **split.sizes,
        **options,
        MASKED=tables.masked,
        PRECISION=exact_products(),
    )


def _merge_units(split: KeySplit, tables: PageTables, group: int, sums: Tensor, output: Tensor, lse: Tensor) -> None:
    """Write output and log-sum-exp of all tokens."""
    from .paged_parts import merge_pages

    heads, tokens, value_dim = output.shape
    width = split.sizes["BDV"]
    most = 1 << max(tables.most - 1, 0).bit_length()
    constants = {"DV": value_dim, "BDV": width, "BP": min(max(MERGED_AT_ONCE // width, 1), most)}
    launch(merge_pages, (tokens, heads), sums, tables.spans, output, lse, group, tables.sums, **constants)
