"""The agreement of all processes on one call of the ring: a checksum of its arguments, lengths and the dropout seed.

Eight bytes of each process say whether it makes the same call as the others; only where they differ are the arguments
themselves exchanged, and every process ends in an error that names the rank and the argument.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs
from ..core.symbolic_positions import Positions, positions_tensor
from ..errors import RegardError, RingError, ShapeError
from ..masks import Mask
from ..tiles.memo import memo_of
from ..utils.pytree import tree_tensors
from .layout import Pieces, RingLayout, Shards, place
from .peers import Peers

MESSAGES = 1
"""The version of what processes send to each other in a call; versions of regard with others cannot form a ring."""
FAULT = -1
"""The checksum of a process whose own arguments are wrong."""
CALL_NUMBERS = 2**20
"""Numbers of calls repeat after so many: they are tags of messages."""
TAGS = 9
"""Tags of messages that a call takes at most."""
CHECKSUM = ("checksum",)
"""The key of a mask's checksum in what is remembered of it."""
NUMBERS = 8
"""Numbers that a process sends with the checksum, the same for every kind of call: unlike calls end in an error."""

_calls = itertools.count()


@dataclass(frozen=True)
class Agreement:
    """What all processes agree on: the positions of queries and keys, the number of the call, the dropout seed."""

    queries: Shards
    keys: Shards
    number: int
    seed: int


def agree(peers: Peers, problem: Problem | RegardError, layout: RingLayout, settings: Mapping[str, str]) -> Agreement:
    """Exchange the checksums of a call, and return what follows from all of them.

    problem: this process's part of the call, or the error that its arguments ended in. settings: other arguments that
    need to be the same, by their names.

    Raises:
        RingError: the processes disagree, one of them is lost, or the arguments of another process are wrong.
        ShapeError: the shards do not have the lengths of the layout, or there are more processes than tokens.
        RegardError: the error of this process's own arguments.
    """
    described, own = {}, [0] * NUMBERS
    if not isinstance(problem, RegardError):
        described = {"layout": repr(layout), **describe(problem), **settings}
        seed = 0 if problem.dropout is None else int(problem.dropout.seed)
        own = [problem.queries, problem.keys, next_call_number(), seed]
        own += [*_ends(problem.query_positions), *_ends(problem.key_positions)]
    every = agree_on(peers, problem, described, own)
    queries, keys = (tuple(numbers[at] for numbers in every) for at in (0, 1))
    found = Agreement(*query_and_key_shards(layout, queries, keys), number=every[0][2], seed=every[0][3])
    for name, shards, at in (("queries", found.queries, 4), ("keys", found.keys, 6)):
        for rank, numbers in enumerate(every):
            _check_ends(layout, name, rank, shards.pieces[rank], numbers[at : at + 2])
    return found


def next_call_number() -> int:
    """A number for a call of this process; the call takes that of rank 0."""
    return next(_calls) % CALL_NUMBERS


def _ends(positions: Positions | None) -> list[int]:
    """The first and the last of positions, -1 where none are given."""
    if positions is None:
        return [-1, -1]
    whole = positions_tensor(positions, None)
    return [int(whole[0]), int(whole[-1])] if len(whole) else [-1, -1]


def _check_ends(layout: RingLayout, name: str, rank: int, pieces: Pieces, ends: list[int]) -> None:
    """Check the ends of positions that were given for a shard."""
    expected = [pieces[0][0], pieces[-1][-1]]
    if ends not in ([-1, -1], expected):
        raise ShapeError(
            f"the {name} of rank {rank} are given at the positions {ends[0]}..{ends[1]}, but {layout!r} gives it "
            f"{expected[0]}..{expected[1]}: pass ring.shard(torch.arange(length), 0, layout)"
        )


def agree_on(peers: Peers, problem: object, described: Mapping[str, str], numbers: list[int]) -> list[list[int]]:
    """The numbers of all processes, whose descriptions of a call are the same.

    problem: anything, or the RegardError that this process's arguments ended in. numbers: at most NUMBERS.

    Raises:
        RingError: they are not, a process is lost, or the arguments of another one are wrong.
        RegardError: the error of this process's own arguments.
    """
    if isinstance(problem, RegardError):
        described = {"error": str(problem)}
    described = {"version of messages": str(MESSAGES), **described}
    checksum = FAULT if isinstance(problem, RegardError) else _checksum(described)
    every = peers.gather_numbers([checksum, *numbers, *[0] * (NUMBERS - len(numbers))])
    if any(first != checksum or first == FAULT for first, *_ in every):
        _raise_difference(peers, problem, described)
    return [rest[: len(numbers)] for _, *rest in every]


def describe(problem: Problem) -> dict[str, str]:
    """The arguments that need to be the same in all processes, by their names, as text."""
    pairs, value, dropout = problem.pairs, problem.value, problem.dropout
    score = f"dot product × {pairs.scale}" if isinstance(pairs, DotPairs) else type(pairs).__name__
    if isinstance(pairs, AdditivePairs):
        score += f" {tuple(pairs.weight.shape)}"
    gradients = torch.is_grad_enabled() and {
        "query": pairs.query.requires_grad,
        "key": pairs.key.requires_grad,
        "value": value.requires_grad,
        "parameters": any(each.requires_grad for each in tree_tensors((problem.bias, problem.sinks))),
    }
    return {
        "operator": problem.normalizer_name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "query shape": without_length(pairs.query),
        "key shape": without_length(pairs.key),
        "value shape": without_length(value),
        "score": score,
        "mask": f"{problem.mask!r} {mask_checksum(problem.mask)}",
        "bias": structure(problem.bias, contents=False),
        "softcap": repr(problem.softcap),
        "sinks": "None" if problem.sinks is None else str(tuple(problem.sinks.shape)),
        "dropout_p": "0" if dropout is None else repr(dropout.probability),
        "requires_grad": repr(gradients),
    }


def without_length(tensor: Tensor) -> str:
    """The shape of a tensor (..., length, dim) with a dot in place of the length, in which processes may differ."""
    return f"({', '.join([*map(str, tensor.shape[:-2]), '·', str(tensor.shape[-1])])})"


def _raise_difference(peers: Peers, problem: object, described: Mapping[str, str]) -> None:
    """Raise the error of the first argument in which processes differ."""
    every = peers.gather_objects(dict(described))
    if isinstance(problem, RegardError):
        raise problem
    for rank, other in enumerate(every):
        if "error" in other:
            raise RingError(f"rank {rank} of the ring has wrong arguments: {other['error']}")
    for name in described:
        values = [str(other.get(name)) for other in every]
        if len(set(values)) > 1:
            usual = max(values, key=values.count)
            odd = [rank for rank, value in enumerate(values) if value != usual]
            like = values.index(usual)
            raise RingError(
                f"the processes of the ring disagree on {name}: rank {odd[0]} has {values[odd[0]]}, rank {like} has "
                f"{usual}; all need the same" + (f" (other ranks that differ: {odd[1:]})" if odd[1:] else "")
            )
    raise RingError("the checksums of the processes differ, but their arguments do not: report this as a bug of regard")


def query_and_key_shards(layout: RingLayout, queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[Shards, Shards]:
    """The positions of queries and keys of all processes; fewer queries are at the last positions of the keys.

    Raises:
        ShapeError: more queries than keys, or lengths that are not those of the layout.
    """
    if sum(queries) > sum(keys):
        raise ShapeError(
            f"the ring has {sum(queries):,} queries and {sum(keys):,} keys: the queries are at the last positions of "
            "the keys, so it needs at least as many keys"
        )
    key_shards = shards_of_lengths("keys", layout, keys)
    return shards_of_lengths("queries", layout, queries).shifted(sum(keys) - sum(queries)), key_shards


def shards_of_lengths(name: str, layout: RingLayout, lengths: tuple[int, ...]) -> Shards:
    """The positions of all processes, which have these lengths; `name` is for the message.

    Raises:
        ShapeError: they are not those of the layout.
    """
    shards = place(layout, sum(lengths), len(lengths))
    if shards.lengths != lengths:
        rank = next(r for r in range(len(lengths)) if shards.lengths[r] != lengths[r])
        raise ShapeError(
            f"rank {rank} has {lengths[rank]:,} {name}, but {layout!r} gives it {shards.lengths[rank]:,} of "
            f"{sum(lengths):,} positions: cut tensors with regard.ring.shard(tensor, dim, layout), or give the "
            f"lengths that they have, {tuple(lengths)}, as Contiguous(lengths)"
        )
    return shards


def _checksum(described: Mapping[str, str]) -> int:
    """A number of 63 bits, never FAULT."""
    text = "\n".join(f"{name}={value}" for name, value in described.items())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def mask_checksum(mask: Mask | None) -> str:
    """A checksum of a mask, of its tensors too, memoized until something has changed that it reads."""
    if mask is None:
        return ""
    memo = memo_of(mask)
    if memo.state is None:
        return value_checksum(mask)
    if (known := memo.values.get(CHECKSUM)) is None:
        known = memo.values[CHECKSUM] = value_checksum(mask)
    return known


def value_checksum(value: Any) -> str:
    """A checksum of a mask, a lens or another value of settings, of its tensors too."""
    return hashlib.blake2b(structure(value, contents=True).encode(), digest_size=8).hexdigest()


def tensor_checksum(tensor: Tensor) -> str:
    """A checksum of a tensor's numbers."""
    numbers = tensor.detach().cpu().flatten().clone().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(numbers, digest_size=8).hexdigest()


def structure(value: Any, *, contents: bool) -> str:
    """A value as text that is the same in every process; of tensors the numbers too if `contents` is true.

    A function is its name, its code and what it has captured.
    """
    if isinstance(value, Tensor):
        shape = f"{value.dtype} {tuple(value.shape)}"
        return f"{shape} {tensor_checksum(value)}" if contents else shape
    if is_dataclass(value):
        parts = (f"{each.name}={structure(getattr(value, each.name), contents=contents)}" for each in fields(value))
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if isinstance(value, tuple | list):
        return f"({', '.join(structure(part, contents=contents) for part in value)})"
    if isinstance(value, FunctionType):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        return f"{value.__qualname__} {value.__code__.co_code.hex()} {structure(captured, contents=contents)}"
    if value is None or isinstance(value, bool | int | float | str | range | slice):
        return repr(value)
    return type(value).__qualname__
