"""Linear attention over a sequence that is cut over processes: states travel, of a size that no length changes.

Not causal, the sums over keys are summed over processes. Causal, each process computes what its pieces, ranges of
consecutive positions, add to the state; these travel (`state_exchange`), and each process composes those before its
own and runs the recurrence of `regard.linear` from there. Of sums with decay the addition is one product of keys and
values. Of the delta rule the state is also multiplied by a matrix: a product of factors, one for each key, which the
recurrence yields as D more columns of the values, in one pass of (Dv + D) / Dv times the work. The alternative, a state
that goes from process to process, takes the time of one process, whatever their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional

from ..core.grid import Grid
from ..core.torch_modes import without_autocast
from ..errors import ConfigurationError, RegardError
from ..kernels.validation import check_same_kind, check_shapes
from ..linear import FavorPlus, LinearState
from ..linear.chunks import SMALLEST_DECAY
from ..linear.linear_arguments import LinearOptions
from ..linear.linear_attention import check_has_state
from ..linear.linear_mask import LinearMask, read_mask
from ..linear.linear_plans import (
    EluRecurrence,
    FeaturePlan,
    LinearPlan,
    LinearResult,
    LinearSequences,
    choose_plan,
    feature_plan,
)
from ..linear.linear_problem import LinearProblem, make_linear_problem
from ..linear.nonfinite_rows import NonfiniteRows
from ..linear.recurrence import recurrence
from ..linear.sums_over_keys import read_state
from ..masks import Mask, causal
from ..masks.base import Not
from ..masks.documents import Documents
from ..masks.tensor_mask import TensorMask
from .handshake import (
    NUMBERS,
    TAGS,
    agree_on,
    mask_checksum,
    next_call_number,
    shards_of_lengths,
    structure,
    tensor_checksum,
    without_length,
)
from .layout import Contiguous, RingLayout, Shards
from .peers import Group, Peers
from .segments import DocumentTable, PieceCut, Segments, cut_pieces
from .state_exchange import PieceStates, StatePlan, sum_over_processes


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: RingLayout | None = None,
    group: Group = None,
    **options: Unpack[LinearOptions],
) -> Tensor:
    """Σ_j w_ij v_j / Σ_j w_ij, with w_ij = φ(q_i) · φ(k_j) where M, over a sequence cut over processes.

    Every process of the group calls it with its shard, as `shard` cuts it, and the same other arguments; the result is
    the shard of what `regard.linear_attention` computes of the whole. What travels are states, (features, Dv) for each
    key head and sequence, whatever the length: of causal attention one to each process with later positions, and its
    gradient back; else one sum over all processes.

    Shapes: those of `regard.linear_attention`, with the lengths of the shard.

    Args:
        query: the shard's queries, (..., heads, m, D).
        key: its keys, (..., key heads, n, D).
        value: its values, (..., key heads, n, Dv).
        layout: which positions each process has, `Contiguous()` unless given. Causal attention needs ranges of
            consecutive positions, as `Contiguous` and `Zigzag` have them.
        group: a process group or a one-dimensional DeviceMesh; the default group without it.
        options: those of `regard.linear_attention`. decay, beta, removal and bonus are those of the shard's keys. A
            mask is one of the whole sequence; `masks.where` and `masks.documents` may also have the keys of the shard
            alone. state, what the sums of the whole sequence start from, is the same in all processes.

    Gradients of what is cut are those of the sum of all processes' losses. A state, and parameters that gates were
    computed from, get this process's part, to be summed over processes. Backward sends messages, too: every process has
    to run it.

    Raises:
        RingError: processes disagree (the message names rank and argument), or one is lost, within the group's timeout.
        ShapeError: shards that have not the lengths of the layout; more processes than tokens.
        ConfigurationError: causal attention over interleaved positions, as `Striped` has them; no process group.
        RegardError: the errors of `regard.linear_attention`.

    Source: sums over processes of states are those of Sun et al. 2025 (arXiv 2502.07563), Algorithms 1 and 2; the
    products of the delta rule those of Yang et al. 2024 (arXiv 2406.06484), Eq. 7.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard import ring
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> shards = [ring.shard(tensor, 2) for tensor in (q, k, v)]
    >>> out = ring.linear_attention(*shards, causal=True)
    >>> torch.allclose(ring.unshard(out, 2), regard.linear_attention(q, k, v, causal=True), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    return run_linear(query, key, value, options, layout, Peers.from_group(group))[0]


def linear_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: RingLayout | None = None,
    group: Group = None,
    **options: Unpack[LinearOptions],
) -> tuple[Tensor, LinearState]:
    """Causal `ring.linear_attention`, and the state after the whole sequence, the same in every process.

    `regard.linear_attention(..., state=state)` continues from it in any process, and `ring.linear_attention` in all.
    Arguments and errors are those of `linear_attention`, and:

    Raises:
        ConfigurationError, MaskError: attention that is not causal, documents: there is no state to continue from.
    """
    output, state = run_linear(query, key, value, options, layout, Peers.from_group(group), wants_state=True)
    if state is None:
        raise AssertionError("causal linear attention without documents has a state")
    return output, state


def run_linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: LinearOptions,
    layout: RingLayout | None,
    peers: Peers,
    *,
    wants_state: bool = False,
) -> tuple[Tensor, LinearState | None]:
    """Output of this process's queries, and the state after all positions where it is wanted."""
    result = agreed_linear_call(query, key, value, options, layout, peers, wants_state=wants_state).run()
    return result.output, result.state


def agreed_linear_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: LinearOptions,
    layout: RingLayout | None,
    peers: Peers,
    *,
    wants_state: bool = False,
    lenses: str = "none",
    hook: str = "none",
    check: Callable[[], None] | None = None,
) -> LinearCall:
    """The call that all processes agree on.

    lenses, hook: descriptions of the lenses of the call and of its attention hook, which need to be the same. check:
    raises an error of this process's other arguments.
    """
    layout = Contiguous() if layout is None else layout
    own: LinearShard | RegardError | None = None
    described, numbers = {}, [0] * NUMBERS
    try:
        if check is not None:
            check()
        peers.check_device(value.device)
        described = {"operator": "linear" + " with state" * wants_state, "layout": repr(layout)}
        described |= {**_describe(query, key, value, options), "lenses": lenses, "attention hook": hook}
        numbers[:3] = key.shape[-2], next_call_number(), query.shape[-2]
    except RegardError as error:
        own = error  # raised once the others know
    every = agree_on(peers, own, described, numbers)
    peers.connect(value.device)
    shards = shards_of_lengths("keys", layout, tuple(length for length, *_ in every))
    is_causal = read_mask(options.get("mask"), options.get("causal", False)).causal
    pieces = _pieces_in_order(layout, shards) if is_causal else [(r, range(0)) for r in range(peers.size)]
    try:
        own = LinearShard.from_arguments(query, key, value, options, shards, pieces, peers.rank)
        if wants_state:
            check_has_state(causal=is_causal, documents=own.table is not None)
    except RegardError as error:
        own = error
    counts = [count for (count,) in agree_on(peers, own, {}, [own.documents if isinstance(own, LinearShard) else 0])]
    if not isinstance(own, LinearShard):
        raise AssertionError("the processes agreed on a call with wrong arguments")
    queries = tuple(numbers[2] for numbers in every)
    return LinearCall(peers, layout, own, shards, queries, pieces, counts, every[0][1], wants_state)


def _describe(query: Tensor, key: Tensor, value: Tensor, options: LinearOptions) -> dict[str, str]:
    """The arguments that need to be the same in all processes, by their names, as text.

    Raises:
        RegardError: tensors that do not fit each other, or a mask that linear attention cannot take.
    """
    check_same_kind(query, key, value)
    check_shapes(query, key, value)
    mask = read_mask(options.get("mask"), options.get("causal", False))
    feature_map, state = options.get("feature_map"), options.get("state")
    if isinstance(feature_map, FavorPlus):
        feature_map = replace(feature_map, seed=0)  # its rows decide
    gates = {name: options.get(name) for name in ("decay", "beta", "removal", "bonus")}
    tensors = {"query": query, "key": key, "value": value, **gates, "state": getattr(state, "sums", None)}
    needs = {name: isinstance(tensor, Tensor) and tensor.requires_grad for name, tensor in tensors.items()}
    decay = gates["decay"]
    per = "feature" if isinstance(decay, Tensor) and decay.ndim == key.ndim else "head"
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "query shape": without_length(query),
        "key shape": without_length(key),
        "value shape": without_length(value),
        "feature_map": structure(feature_map, contents=True),
        "normalize": repr(options.get("normalize", True)),
        "mask": _describe_mask(mask, key.shape[-2]),
        "decay": "None" if decay is None else f"one for each {per}",
        **{name: "None" if gates[name] is None else "one for each key" for name in ("beta", "removal", "bonus")},
        "scale": repr(options.get("scale")),
        "state": f"sums {tensor_checksum(state.sums)}" if isinstance(state, LinearState) else "None",
        "requires_grad": repr(torch.is_grad_enabled() and needs),
    }


def _describe_mask(mask: LinearMask, length: int) -> str:
    """A mask as text, without the tensors of a shard's `length` keys, in which processes differ."""
    parts = ["causal()"] * mask.causal
    for part in (*mask.of_keys, *([] if mask.documents is None else [mask.documents])):
        is_own = tensor_length(part) in (1, length)
        parts.append(f"{type(part).__name__} of the shard" if is_own else f"{part!r} {mask_checksum(part)}")
    return " & ".join(parts) or "None"


def tensor_length(mask: Mask) -> int | None:
    """The number of positions of a mask that is a tensor of keys or documents; None of other masks."""
    while isinstance(mask, Not):
        mask = mask.mask
    if isinstance(mask, Documents):
        return mask.ids.shape[-1]
    return mask.pairs.shape[-1] if isinstance(mask, TensorMask) else None


def _pieces_in_order(layout: RingLayout, shards: Shards) -> list[tuple[int, range]]:
    """The process and the positions of each piece, in the order of positions.

    Raises:
        ConfigurationError: pieces that are not consecutive positions.
    """
    pieces = [(process, piece) for process, own in enumerate(shards.pieces) for piece in own]
    for process, piece in pieces:
        if len(piece) > 1 and piece.step != 1:
            raise ConfigurationError(
                f"causal linear attention passes a state from each range of consecutive positions to the next, but "
                f"{layout!r} gives process {process} the positions {piece[0]}, {piece[1]}, ...: cut the sequence with "
                "Contiguous() or Zigzag(). Any layout is right for regard.ring.attention, and for linear attention "
                "that is not causal"
            )
    return sorted(pieces, key=lambda each: each[1].start)


@dataclass(frozen=True, eq=False)
class LinearShard:
    """A process's part of one call, checked: its problem, in which each piece of a document is a document of its own.

    plan: how the part would be computed alone. table: these documents; None where there are none.
    """

    plan: LinearPlan
    table: DocumentTable | None

    @classmethod
    def from_arguments(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: LinearOptions,
        shards: Shards,
        pieces: list[tuple[int, range]],
        rank: int,
    ) -> LinearShard:
        """The part of a process with masks at the positions of its keys.

        Raises:
            RegardError: as `make_linear_problem`.
        """
        mask, length = read_mask(options.get("mask"), options.get("causal", False)), key.shape[-2]
        positions = shards.positions(rank, key.device)
        masks: list[Mask] = [causal()] if mask.causal else []
        keep = _own_keys(mask, positions, sum(shards.lengths), heads=key.ndim > 3)
        if keep is None and length == 1:  # so that NaN in a single key does not enter the state
            keep = torch.ones(1, dtype=torch.bool, device=key.device)
        if keep is not None:
            masks.append(TensorMask(keep.unsqueeze(-2)))
        ids, piece_of = None, torch.zeros(length, dtype=torch.int64)
        if mask.documents is not None:
            in_shard = mask.documents.ids.shape[-1] == length
            ids = mask.documents.ids.to(key.device) if in_shard else mask.documents.ids_of(positions)
            numbers = {piece: number for number, (_, piece) in enumerate(pieces)}
            for rows, piece in shards.rows(rank):
                piece_of[rows] = numbers[piece] if mask.causal else rank
            _, distinct = ids.unique(return_inverse=True)
            masks.append(Documents(distinct * len(pieces) + piece_of.to(key.device)))
        own: LinearOptions = {**options, "mask": reduce(and_, masks) if masks else None, "causal": False}
        problem = make_linear_problem(query, key, value, **own).widened()
        plan = choose_plan(problem)
        if problem.documents is None or ids is None:
            return cls(plan, None)
        ids = ids.reshape(-1, length).expand(len(problem.key), length)
        return cls(plan, DocumentTable.from_batches(problem.documents, ids.long(), piece_of))

    @property
    def problem(self) -> LinearProblem:
        """The problem of the plan."""
        return self.plan.problem

    @property
    def documents(self) -> int:
        """How many documents the process has, those in several of its pieces once for each."""
        return 0 if self.table is None else len(self.table.rows)


@dataclass(frozen=True, eq=False)
class LinearCall:
    """One call of linear attention on this process, which all processes agree on.

    keys: the positions of the keys of all processes. queries: how many each has. pieces: the process and the positions
    of each piece. counts: documents of each process. number: of the call, from which the tags of its messages follow.
    """

    peers: Peers
    layout: RingLayout
    shard: LinearShard
    keys: Shards
    queries: tuple[int, ...]
    pieces: list[tuple[int, range]]
    counts: list[int]
    number: int
    wants_state: bool

    def run(self) -> LinearResult:
        """Output and, where they are computed, each row's sum of weights, and the state that is wanted."""
        plan = self.shard.plan
        if len(self.pieces) == 1:
            result = plan.run()
            return result if self.wants_state else replace(result, state=None)
        with without_autocast(plan.problem.query.device.type):
            return self._run(plan if isinstance(plan, EluRecurrence) else self.feature_plan())

    def feature_plan(self) -> FeaturePlan:
        """The plan with all features, of which those of FAVOR+ lack the largest factor of the keys of all processes."""
        plan = self.shard.plan
        return _with_common_scale(plan if isinstance(plan, FeaturePlan) else feature_plan(plan.problem), self.peers)

    def _run(self, own: EluRecurrence | FeaturePlan) -> LinearResult:
        problem, segments = own.problem, self._segments(own.problem)
        parts = [_part(own, sequences, exists) for sequences, exists in segments.cut.split(own.sequences)]
        marks, final = _marks(problem, segments), None
        processes, tag = tuple(process for process, _ in self.pieces), self.number * TAGS
        states = StatePlan(self.peers, processes, segments.present, self.wants_state, (tag, tag + 1))
        if problem.causal:
            outputs, marks, final = _causal(own, parts, segments, states, marks)
        else:
            outputs, marks = _unordered(parts, segments, states, marks)
        output, total = own.finish(segments.cut.join(outputs, len(problem.key)))
        unflatten, state = problem.axes.unflatten, None
        output = _mark_nonfinite(problem, output, parts, segments, marks)
        if total is not None:
            total = unflatten(_mark_nonfinite(problem, total, parts, segments, marks)).squeeze(-1)
        if self.wants_state and final is not None:
            kept = final.own.masked_fill((final.marks[..., 0] > 0)[..., None, None], torch.nan)
            scale = None if own.key_scale is None else unflatten(own.key_scale)
            state = LinearState(unflatten(kept), problem.normalize, scale)
        return LinearResult(unflatten(output).to(problem.dtype), state, total)

    def _segments(self, problem: LinearProblem) -> Segments:
        """The segments of this process."""
        batch, rank = len(problem.key), self.peers.rank
        if self.shard.table is not None:
            return self.shard.table.gather(self.peers, self.counts, len(self.pieces))
        if problem.causal:
            return cut_pieces(self.keys, rank, self.pieces, batch)
        present = torch.ones(len(self.pieces), batch, dtype=torch.bool)
        return Segments(PieceCut((slice(None),)), (batch,), present, torch.arange(batch))


def _own_keys(mask: LinearMask, positions: Tensor, total: int, *, heads: bool) -> Tensor | None:
    """Which keys at these positions exist, bool, (..., n) or with heads (..., heads, n); None for all."""
    kept, length = None, len(positions)
    for part in mask.of_keys:
        if part.by_position:
            keys = part.evaluate(Grid(positions[-1:], positions, heads))
        elif tensor_length(part) == total:
            keys = part.evaluate(Grid.from_lengths(1, total, heads=heads, device=positions.device))[..., positions]
        else:
            keys = part.evaluate(Grid.from_lengths(1, length, heads=heads, device=positions.device))
        kept = keys if kept is None else kept & keys
    return None if kept is None else kept.squeeze(-2)


def _with_common_scale(plan: FeaturePlan, peers: Peers) -> FeaturePlan:
    """A plan whose stabilised keys lack the largest factor of all processes, as those of one process do."""
    if plan.key_scale is None:
        return plan
    own, keep = plan.key_scale, plan.problem.keep
    if keep is not None and plan.state is None:  # keys that do not exist have no factor
        own = own.masked_fill(~keep.any(-1)[..., None, None], -torch.inf)
    largest = peers.maximum(own.clone(), "while the scales of features were compared")
    largest = largest.where(largest > -torch.inf, plan.key_scale)
    factor = (plan.key_scale - largest).clamp(max=0.0).exp()
    state = None if plan.state is None else plan.state * factor
    sequences = plan.sequences._replace(key=plan.sequences.key * factor)
    return replace(plan, sequences=sequences, state=state, key_scale=largest)


def _part(plan: LinearPlan, sequences: list[Any], exists: Tensor | None) -> LinearSequences:
    """A part of the sequences, with keys that leave the state as it is after the end of each document."""
    part = LinearSequences(*sequences)
    if exists is None:
        return part
    decay = part.decay
    if decay is not None:
        decay = decay.where(exists if decay.ndim == 3 else exists.unsqueeze(-1), 0.0)
    return part._replace(key=plan.hide_keys(part.key, exists), decay=decay)


def _marks(problem: LinearProblem, segments: Segments) -> Tensor:
    """Whether each segment has a key that is NaN or infinite, and whether it has any: (segments, Hk, 2), 1 or 0."""
    bad = problem.key.new_zeros(problem.key.shape[:3], dtype=torch.bool)
    exists = torch.ones_like(bad) if problem.keep is None else problem.keep.expand_as(bad)
    if problem.nonfinite is not None:
        bad = problem.nonfinite.key
    found = []
    for (part,), inside in segments.cut.split([torch.stack([bad, exists], -1)]):
        found.append((part if inside is None else part & inside.unsqueeze(-1)).any(2))
    return torch.cat(found).to(problem.value.dtype)


def _mark_nonfinite(
    problem: LinearProblem, output: Tensor, parts: list[LinearSequences], segments: Segments, marks: Tensor
) -> Tensor:
    """The output with NaN in rows that attend to a key that is NaN or infinite, in any process.

    marks (E, Hk, 2): of the keys of other pieces that the rows of an entry attend to.
    """
    nonfinite = problem.nonfinite
    if nonfinite is None:
        if not marks[..., 0].any():
            return output
        finite = torch.zeros((), dtype=torch.bool, device=output.device)
        nonfinite = NonfiniteRows(
            finite.expand(problem.query.shape[:3]), finite.expand(problem.key.shape[:3]), problem.keep
        )
    rows = [
        each.unsqueeze(2).expand(-1, -1, part.query.shape[2], -1) > 0
        for each, part in zip(segments.per_part(marks), parts, strict=True)
    ]
    bad, any_key = segments.cut.join(rows, len(problem.key)).unbind(-1)
    return nonfinite.mark_rows(output, problem.causal, problem.documents, (bad, any_key))


def _unordered(
    parts: list[LinearSequences], segments: Segments, plan: StatePlan, marks: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Outputs of each part from sums over the keys of all processes, and the marks of these."""
    sums = torch.cat([part.key.mT @ part.value for part in parts])
    mine = PieceStates(sums, None, marks)[segments.of_entries.to(sums.device)]
    at = segments.present[plan.peers.rank].nonzero().flatten().to(sums.device)
    rows = mine.flatten()
    every = rows.new_zeros(segments.present.shape[1], rows.shape[1]).index_copy(0, at, rows)
    total = mine.unflatten(sum_over_processes(plan.peers, every)[at])
    is_shared = (segments.entry >= 0).to(sums.device).split(segments.sizes)
    outputs = []
    for part, local, shared, whole in zip(
        parts, sums.split(segments.sizes), is_shared, segments.per_part(total.own), strict=True
    ):
        outputs.append(read_state(part.query, whole.where(shared[:, None, None, None], local)))
    return outputs, total.marks


def _causal(
    own: EluRecurrence | FeaturePlan,
    parts: list[LinearSequences],
    segments: Segments,
    plan: StatePlan,
    marks: Tensor,
) -> tuple[list[Tensor], Tensor, PieceStates]:
    """Rows of each part, the marks of the keys before each entry, and the states after all pieces."""
    if own.sequences.beta is None:
        outputs = None
        added, transitions = zip(*(_decayed_sums(own, part) for part in parts), strict=True)
        anchor = parts[0].query
    else:
        outputs, added, transitions = _delta_runs(own.state, parts, segments, plan)
        anchor = outputs[0]
    of_entries = segments.of_entries.to(anchor.device)
    transition = None if transitions[0] is None else torch.cat(transitions)
    sums = PieceStates(torch.cat(added), transition, marks)[of_entries]
    states, entries, anchor = plan.send(sums, anchor)
    sequences = segments.present.shape[1]
    start = sums.own.new_zeros(sequences, *sums.own.shape[1:]) if own.state is None else own.state
    first = PieceStates(start, None, marks.new_zeros(sequences, *marks.shape[1:]))
    before, final = plan.compose(states, entries, first)
    incoming = segments.per_part(before.own)
    if outputs is not None:
        columns = own.sequences.value.shape[-1]
        outputs = [_with_state(*each, columns) for each in zip([anchor, *outputs[1:]], incoming, strict=True)]
    else:
        parts = [parts[0]._replace(query=anchor), *parts[1:]]
        outputs = [own.rows(part, state)[0] for part, state in zip(parts, incoming, strict=True)]
    return outputs, before.marks, final


def _decayed_sums(plan: EluRecurrence | FeaturePlan, part: LinearSequences) -> tuple[Tensor, Tensor | None]:
    """Σ_j e^{g_{j+1} + ... + g_n} φ(k_j) v_jᵀ, the total beside it where normalised, and e^{g_1 + ... + g_n}.

    Shapes: (rows, Hk, D, Dv or Dv + 1), (rows, Hk, 1 or D, 1).
    """
    decay = part.decay
    if decay is None:
        return plan.sums_over_keys(part.key, part.value), None
    decay = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).clamp(min=SMALLEST_DECAY)
    later = functional.pad(decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
    factors = _normal_exp(decay[:, :, 0] + later[:, :, 0]).unsqueeze(-1)
    return plan.sums_over_keys(part.key, part.value, _normal_exp(later)), factors


def _normal_exp(x: Tensor) -> Tensor:
    """eˣ, and 0 where that is below the smallest normal number: with smaller ones processors compute slowly."""
    return x.masked_fill(x < math.log(torch.finfo(x.dtype).tiny), -torch.inf).exp()


def _delta_runs(
    state: Tensor | None, parts: list[LinearSequences], segments: Segments, plan: StatePlan
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The delta rule from a state of 0: outputs, final states and transitions of each part.

    With D more columns of the values, all 0, that start from the identity, the state is (S_own, T), and the output
    (o_t, T_tᵀ q_t). Parts without pieces before them start from their state, and have a transition of 0.
    """
    piece, sequence = plan.entries(plan.peers.rank, plan.peers.rank).unbind(1)
    has_before = segments.present.cumsum(0)[piece, sequence] > 1
    runs = []
    for part, before in zip(parts, segments.per_part(has_before), strict=True):
        query, key, value, decay, beta, removal, _ = part
        dim, value_dim = key.shape[-1], value.shape[-1]
        if not before.any():
            output, final = recurrence(query, key, value, decay, beta, state, removal)
            runs.append((output, final, final.new_zeros(*final.shape[:2], dim, dim)))
            continue
        identity = torch.eye(dim, dtype=key.dtype, device=key.device).expand(*key.shape[:2], dim, dim)
        start = torch.cat([key.new_zeros(*key.shape[:2], dim, value_dim), identity], -1)
        output, final = recurrence(query, key, functional.pad(value, (0, dim)), decay, beta, start, removal)
        runs.append((output, *final.split([value_dim, dim], -1)))
    outputs, added, transitions = map(list, zip(*runs, strict=True))
    return outputs, added, transitions


def _with_state(output: Tensor, state: Tensor, columns: int) -> Tensor:
    """The output of a run from 0 as one from a state, of which the other columns of the output are read."""
    own, reads = output.tensor_split([columns], -1)
    return own + read_state(reads, state) if reads.shape[-1] else own
