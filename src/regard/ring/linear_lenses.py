"""Lenses and records of linear attention over a sequence that is cut over processes.

The weights of a row are products of its features with those of all keys, over their sum. For lenses the features of
keys travel from process to process, as keys of softmax attention do; for a record, queries and keys are sent to the
process of rank 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Unpack

import torch
from torch import Tensor

from ..attention import Observation
from ..core.grid import Blocks, Grid
from ..core.problem import Problem
from ..core.score_forms import DecayedDotPairs, DotPairs
from ..errors import RegardError
from ..kernels import zero_nonfinite_inputs
from ..kernels.hooks import AttentionHook, attention_hook, no_hook
from ..lenses import Lens
from ..linear.linear_arguments import LinearOptions
from ..linear.linear_mask import read_mask
from ..linear.linear_operator import LINEAR, log_of_positive
from ..linear.linear_plans import FeaturePlan
from ..linear.linear_weights import check_has_weights, check_nonnegative, marked_features, report_to_hook
from ..masks import Mask, causal
from ..masks.base import Kept, Pairs
from ..masks.documents import Documents
from ..masks.tensor_mask import TensorMask
from .handshake import TAGS, Agreement, agree_on, query_and_key_shards
from .layout import RingLayout
from .linear_ring import LinearCall, agreed_linear_call, tensor_length
from .peers import Group, Peers
from .shard_hooks import described_hook, gather_to_first
from .shard_lenses import check_lenses, described_lenses, reduce_blocks, start_shard_lenses
from .sharding import gather_shards

QUERY_TAG, KEY_TAG, DECAY_TAG, VALUE_TAG = 2, 3, 4, 5
"""Tags of the messages of a record, after those of states."""


def observe_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lenses: Lens,
    layout: RingLayout | None = None,
    group: Group = None,
    **options: Unpack[LinearOptions],
) -> Observation:
    """`ring.linear_attention`, with results of lenses over its weights: `seen.output`, `seen.lse`, `seen[lens]`.

    Every process of the group calls it with its shard and the same lenses. The results are those of
    `regard.observe_linear_attention` of the whole sequence, to rounding, in the shapes of `ring.observe`: of the own
    rows where there is one for each row, else the same in every process. The features of keys travel to the processes
    whose rows weigh them: time is that of exact attention over P processes, memory linear in the shard.

    Arguments and errors are those of `ring.linear_attention`, and:

    Raises:
        ConfigurationError: what is no lens, or no `regard.lenses.ShardedLens`; weights that may be negative, or do not
            sum to 1; a state, whose keys are gone.
        RingError: processes with other lenses.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard import lenses, ring
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, received = torch.zeros(1, 2, 3, 4), lenses.Received()
    >>> local = ring.shard(q, 2)
    >>> ring.observe_linear_attention(local, local, local, received, causal=True)[received][0, 0]
    tensor([1.8333, 0.8333, 0.3333])
    >>> dist.destroy_process_group()
    """
    return observe_linear_shard(query, key, value, options, lenses, layout, Peers.from_group(group))


def observe_linear_shard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: LinearOptions,
    lenses: Sequence[Lens],
    layout: RingLayout | None,
    peers: Peers,
    hook: AttentionHook | None = None,
) -> Observation:
    """Output, log-sum-exp and the results of lenses for a shard of linear attention."""

    def check() -> None:
        check_lenses(lenses)
        check_has_weights(options)

    named, hooked = described_lenses(lenses), described_hook(hook)
    call = agreed_linear_call(query, key, value, options, layout, peers, check=check, lenses=named, hook=hooked)
    agreed = Agreement(*query_and_key_shards(call.layout, call.queries, call.keys.lengths), call.number, seed=0)
    plan = call.feature_plan()
    call = replace(call, shard=replace(call.shard, plan=plan))
    with torch.no_grad():
        problem = _weights_problem(call, plan, options, value)
    states = start_shard_lenses(peers, problem, agreed, lenses)
    result = call.run()
    if result.total is None:
        raise AssertionError("sums of given features have totals")
    with torch.no_grad():
        if hook is not None:
            call_linear_hook(call, hook, query, key, value, options)
        lse = torch.where(result.total.isnan(), math.nan, log_of_positive(result.total))
        problem = zero_nonfinite_inputs(problem)
        reductions = [reduction for state in states.values() for reduction in state.reductions]
        if reductions:
            reduce_blocks(peers, problem, agreed, lse, reductions)
        return Observation(result.output, lse, {lens: state.finish(problem, lse) for lens, state in states.items()})


def _weights_problem(call: LinearCall, plan: FeaturePlan, options: LinearOptions, value: Tensor) -> Problem:
    """The `Problem` over the features of a shard, at positions in the whole sequence.

    Raises:
        ConfigurationError: features that are negative in some process.
    """
    fault, (queries, keys) = None, marked_features(plan)
    try:
        check_nonnegative(options, queries, keys)
    except RegardError as error:
        fault = error  # raised once the others know
    agree_on(call.peers, fault, {}, [])
    unflatten, decay = plan.problem.axes.unflatten, plan.sequences.decay
    pairs: DotPairs | DecayedDotPairs = DotPairs(unflatten(queries), unflatten(keys), 1.0)
    if decay is not None:
        sums = _decay_sums(call, decay if decay.ndim == 4 else decay.unsqueeze(-1))
        pairs = DecayedDotPairs.from_sums(pairs.query, pairs.key, unflatten(sums))
    masks = [
        KeysOfSequence(part.pairs) if isinstance(part, TensorMask) else part for part in whole_masks(call, options)
    ]
    mask = reduce(and_, masks) if masks else None
    return Problem(pairs, value.expand(*pairs.key.shape[:-1], -1), mask, normalizer=LINEAR)


def _decay_sums(call: LinearCall, decay: Tensor) -> Tensor:
    """g_1 + ... + g_i at the positions i of the shard, float64, from g (B, Hk, n, 1 or D) of the shard."""
    rank, own = call.peers.rank, call.keys.rows(call.peers.rank)
    sums = [decay[:, :, rows].double().cumsum(2) for rows, _ in own]
    totals = decay.new_zeros(len(call.pieces), *decay.shape[:2], decay.shape[-1], dtype=torch.float64)
    places = [call.pieces.index((rank, positions)) for _, positions in own]
    for place_of_piece, found in zip(places, sums, strict=True):
        totals[place_of_piece] = found[:, :, -1]
    through = call.peers.sum(totals, "while decays were summed").cumsum(0)
    before = torch.cat([torch.zeros_like(through[:1]), through[:-1]])
    return torch.cat([found + before[at].unsqueeze(2) for at, found in zip(places, sums, strict=True)], 2)


def call_linear_hook(
    call: LinearCall, hook: AttentionHook, query: Tensor, key: Tensor, value: Tensor, options: LinearOptions
) -> None:
    """Call a hook in the process of rank 0 with the weights of all processes; where there are none, warn.

    Queries, keys, values and decays are sent there. Memory: that of the whole sequence in the process of rank 0, which
    also computes the exact attention that a record may want beside the linear one.
    """
    peers, first = call.peers, call.number * TAGS
    try:
        check_has_weights(options)
        queries, _ = query_and_key_shards(call.layout, call.queries, call.keys.lengths)
    except RegardError as error:
        if peers.rank == 0:
            warnings.warn(f"weights of linear attention are not recorded: {error}", stacklevel=4)
        return
    with torch.no_grad():
        masks = whole_masks(call, options)
        decay = options.get("decay")
        whole_query = gather_to_first(peers, query, queries, first + QUERY_TAG)
        whole_key = gather_to_first(peers, key, call.keys, first + KEY_TAG)
        whole_value = gather_to_first(peers, value, call.keys, first + VALUE_TAG)
        whole_decay = None
        if decay is not None:
            rows = decay if decay.ndim == key.ndim else decay.unsqueeze(-1)
            rows = rows.expand(*rows.shape[:-2], key.shape[-2], rows.shape[-1])
            found = gather_to_first(peers, rows, call.keys, first + DECAY_TAG)
            whole_decay = found if found is None or decay.ndim == key.ndim else found.squeeze(-1)
        if whole_query is None or whole_key is None or whole_value is None:
            return
        mask = reduce(and_, masks) if masks else None
        arguments: LinearOptions = {**options, "causal": False, "mask": mask, "decay": whole_decay}
        with no_hook(), attention_hook(hook):
            report_to_hook(whole_query, whole_key, whole_value, arguments)


def whole_masks(call: LinearCall, options: LinearOptions) -> list[Mask]:
    """The masks of a call over all positions, joined by &: the tensors of shards are gathered, in every process."""
    peers, shards = call.peers, call.keys
    mask = read_mask(options.get("mask"), options.get("causal", False))
    total, own = sum(shards.lengths), shards.lengths[peers.rank]
    device = call.shard.problem.key.device
    found: list[Mask] = [causal()] if mask.causal else []
    for part in mask.of_keys:
        if tensor_length(part) in (None, total):
            found.append(part)
            continue
        kept = part.evaluate(Grid.from_lengths(1, own, heads=call.shard.problem.axes.has_heads, device=device))
        kept = kept.expand(*kept.shape[:-1], own).to(torch.uint8)  # which every backend gathers
        found.append(TensorMask(gather_shards(kept, kept.ndim - 1, shards, peers).bool()))
    if mask.documents is not None:
        ids = mask.documents.ids
        if ids.shape[-1] != total:
            ids = gather_shards(ids.to(device), ids.ndim - 1, shards, peers)
        found.append(Documents(ids))
    return found


@dataclass(frozen=True, eq=False, repr=False)
class KeysOfSequence(Mask):
    """The keys where a tensor (..., 1, N) over the positions of a sequence is True."""

    pairs: Tensor

    def keep(self, grid: Pairs) -> Kept:
        positions = (grid.grid if isinstance(grid, Blocks) else grid).key_positions
        return grid.cut(self.pairs[..., positions])

    def __repr__(self) -> str:
        return f"keys of a sequence, <bool {tuple(self.pairs.shape)}>"
