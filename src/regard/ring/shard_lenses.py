"""Lenses over a sequence that is cut over processes: each has the weights of its rows, sums are those of all rows.

After the forward round the log-sum-exp of a shard's rows is final. Keys then travel once more, without values, and the
weights of each block, exp(scores - lse), are passed to the lenses' reductions at global rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from ..attention import Observation
from ..core.log_sum_exp import coarse_rows, in_float64
from ..core.problem import Problem
from ..errors import ConfigurationError, RegardError
from ..kernels import zero_nonfinite_inputs
from ..kernels.hooks import AttentionHook
from ..kernels.lens_pass import run_reductions
from ..kernels.nan_safety import finite_problem
from ..kernels.part_reductions import BlockReduction
from ..kernels.validation import make_problem
from ..lenses import Lens, LensState, Reduction, ShardedLens
from .block_attention import block_problem
from .handshake import TAGS, Agreement, agree_on, value_checksum
from .hops import plan_hops
from .key_exchange import KeyExchange, hop_parts
from .layout import RingLayout, Shards
from .peers import Group, Peers
from .ring_attention import RingOptions, ShardSettings
from .shard_hooks import call_hook, described_hook

LENSES = (
    "Entropy, TopK, Weights, Received, Distance, Pooled, Mass, MaxLogit, and Metrics, Roles, JensenShannon, Values of "
    "heads"
)
WHEN = "while the results of lenses were summed"


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lenses: Lens,
    layout: RingLayout | None = None,
    group: Group = None,
    head_parallel: int = 1,
    kernel: str | None = None,
    **options: Unpack[RingOptions],
) -> Observation:
    """`ring.attention`, with results of lenses over its weights: `seen.output`, `seen.lse`, `seen[lens]`.

    Every process of the group calls it with its shard and the same lenses. The results are those of `regard.observe`
    of the whole sequence, to rounding: where there is one for each row (Entropy, TopK, `Distance.mean`, Weights of all
    rows, `MaxLogit("row")`), those of the own rows, which `ring.unshard` gathers; what is summed over rows (Received,
    `Distance.histogram`, Pooled, Mass, MaxLogit, Weights of chosen rows; of `regard.heads` Metrics, Roles and
    JensenShannon), the same in every process. `regard.heads.Values` are those of the own keys. Rows and columns of
    lenses, segments and tokens are those of the whole sequence. Keys travel a second time, so that memory is that of
    `ring.attention` and of the results. No result of a lens has a gradient, of Weights either.

    Arguments and errors are those of `attention`, and:

    Raises:
        ConfigurationError: what is no lens, or no `regard.lenses.ShardedLens`, such as Alignment, whose path runs
            through the rows of all processes; a lens that does not fit the problem.
        RingError: processes with other lenses.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard import lenses, ring
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, received = torch.zeros(1, 2, 4, 8), lenses.Received()
    >>> local = ring.shard(q, 2)
    >>> ring.observe(local, local, local, received, mask=regard.masks.causal())[received][0, 0]
    tensor([2.0833, 1.0833, 0.5833, 0.2500])
    >>> dist.destroy_process_group()
    """

    def make() -> Problem:
        return make_problem(query, key, value, wants_lse=True, **options)

    return observe_shard(ShardSettings.checked(layout, group, head_parallel, kernel), make, lenses)


def observe_shard(
    settings: ShardSettings, make: Any, lenses: Sequence[Lens], hook: AttentionHook | None = None
) -> Observation:
    """Output, log-sum-exp and the results of lenses for a shard's problem, which `make` returns."""

    def checked() -> Problem:
        check_lenses(lenses)
        return make()

    problem, agreed = settings.agreed_problem(checked, lenses=described_lenses(lenses), hook=described_hook(hook))
    states = start_shard_lenses(settings.peers, problem, agreed, lenses)
    output, lse = settings.compute(problem, agreed)
    with torch.no_grad():
        if hook is not None:
            call_hook(settings.peers, hook, problem, agreed, lse)
        wide, exact = _with_exact_lse(settings, problem, agreed, lse) if states else (problem, lse)
        reductions = [reduction for state in states.values() for reduction in state.reductions]
        if reductions:
            reduce_blocks(settings.peers, wide, agreed, exact, reductions)
        return Observation(output, lse, {lens: state.finish(problem, exact) for lens, state in states.items()})


def check_lenses(lenses: Sequence[Lens]) -> None:
    """Check that all are lenses which several processes can compute.

    Raises:
        ConfigurationError: one is not.
    """
    for lens in lenses:
        if isinstance(lens, type) or not isinstance(lens, Lens):
            raise ConfigurationError(f"observe needs lenses from regard.lenses, such as Entropy(); one is {lens!r}")
        if not isinstance(lens, ShardedLens):
            raise ConfigurationError(
                f"{lens!r} has no start_shard, which says how processes combine its results: over a ring there are "
                f"{LENSES}; give it one, as regard.lenses.ShardedLens describes, or observe in one process"
            )


def described_lenses(lenses: Sequence[Lens]) -> str:
    """The lenses as text that is the same in all processes that have the same ones."""
    return ", ".join(f"{repr(lens)[:80]} {value_checksum(lens)}" for lens in lenses) or "none"


def start_shard_lenses(
    peers: Peers, problem: Problem, agreed: Agreement, lenses: Sequence[Lens]
) -> dict[Lens, LensState[Any]]:
    """Start each lens on the own rows; an error in one process is raised in all."""
    rows, own = ProcessRows(peers, agreed.queries, agreed.keys), _rows_problem(problem, agreed, peers.rank)
    states: dict[Lens, LensState[Any]] = {}
    fault: RegardError | None = None
    try:
        for lens in lenses:
            if lens not in states and isinstance(lens, ShardedLens):
                states[lens] = lens.start_shard(own, rows)
    except RegardError as error:
        fault = error
    agree_on(peers, problem if fault is None else fault, {}, [])
    return states


def _rows_problem(problem: Problem, agreed: Agreement, rank: int) -> Problem:
    """The rows of a process over all keys, without their features and values."""
    keys, pieces = sum(agreed.keys.lengths), agreed.queries.pieces[rank]
    key, value = (tensor.new_empty(*tensor.shape[:-2], keys, 0) for tensor in (problem.pairs.key, problem.value))
    return replace(
        problem,
        pairs=replace(problem.pairs, key=key),
        value=value,
        query_positions=pieces[0] if len(pieces) == 1 else agreed.queries.positions(rank, value.device),
        key_positions=range(keys),
    )


def reduce_blocks(
    peers: Peers, problem: Problem, agreed: Agreement, lse: Tensor, reductions: Sequence[Reduction]
) -> None:
    """Pass the weights of the own rows to reductions, block by block as the keys of each process arrive."""
    problem = replace(problem, value=problem.value[..., :0], dropout=None)
    plan = plan_hops(problem, agreed.queries, agreed.keys, peers.rank)
    parts = hop_parts(plan, problem, max(agreed.keys.lengths), by_heads=False)
    exchange = KeyExchange(peers, problem, parts, agreed.number * TAGS)
    for part, key, value in exchange.received():
        for block in part.hop.blocks:
            own, at = finite_problem(block_problem(problem, block, None, key, value)), block.key_positions
            columns = slice(at.start, at.stop, at.step)
            of_block = [BlockReduction(each, own, block.rows, columns) for each in reductions]
            run_reductions(own, lse[..., block.rows], of_block)
            for each in of_block:
                each.add_to_whole()


def _with_exact_lse(
    settings: ShardSettings, problem: Problem, agreed: Agreement, lse: Tensor
) -> tuple[Problem, Tensor]:
    """The problem and its log-sum-exp; in float64, by another round, where float32 rounds that of some row too far."""
    coarse = coarse_rows(zero_nonfinite_inputs(problem), lse) is not None
    if not any(found for (found,) in settings.peers.gather_numbers([int(coarse)])):
        return problem, lse
    wide = in_float64(problem)
    _, exact = settings.compute(wide, agreed)
    return wide, exact.masked_fill(lse.isnan() | lse.isposinf(), float("nan"))


@dataclass(frozen=True)
class ProcessRows:
    """The rows of one process of a ring: a `RowShard`."""

    peers: Peers
    shards: Shards
    keys: Shards

    @property
    def positions(self) -> range:
        """The positions of all rows."""
        first = min(piece[0] for own in self.shards.pieces for piece in own)
        return range(first, first + sum(self.shards.lengths))

    def select(self, rows: Tensor) -> Tensor:
        """The entries of the own rows of a tensor (..., all rows)."""
        spans = (self.indices(local) for local, _ in self.shards.rows(self.peers.rank))
        return torch.cat([rows[..., span] for span in spans], -1)

    def indices(self, rows: slice) -> slice:
        """The indices among all rows of own rows of one piece."""
        first = self.positions.start
        for local, positions in self.shards.rows(self.peers.rank):
            if local.start <= rows.start < local.stop:
                found = positions[rows.start - local.start : rows.stop - local.start]
                return slice(found.start - first, found.stop - first, found.step)
        raise AssertionError(f"rows {rows} are those of no piece of {self.shards}")

    def gather_rows(self, rows: Tensor, chosen: range) -> Tensor:
        """Chosen rows of all processes, of a tensor over the own ones (..., own rows, ·)."""
        return self._gather(rows, self.shards.positions(self.peers.rank) - self.positions.start, chosen)

    def gather_keys(self, keys: Tensor, chosen: range) -> Tensor:
        """Chosen keys of all processes, of a tensor over the own ones (..., own keys, ·)."""
        return self._gather(keys, self.keys.positions(self.peers.rank), chosen)

    def _gather(self, own: Tensor, indices: Tensor, chosen: range) -> Tensor:
        """The chosen indices of all processes, of a tensor (..., own, ·) that has these indices."""
        places = indices.to(own.device) - chosen.start
        inside = (places >= 0) & (places < chosen.stop - chosen.start) & (places % chosen.step == 0)
        gathered = own.new_zeros(*own.shape[:-2], len(chosen), own.shape[-1])
        gathered[..., places[inside] // chosen.step, :] = own[..., inside, :]
        return self.sum(gathered)

    def finite(self, problem: Problem) -> Problem:
        """A problem of any rows and keys without NaN and infinity, whose mask leaves out the scores of -infinity."""
        return finite_problem(problem)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.peers.sum(tensor.contiguous(), WHEN)

    def maximum(self, tensor: Tensor) -> Tensor:
        """The maximum over all processes."""
        return self.peers.maximum(tensor.contiguous(), WHEN)
