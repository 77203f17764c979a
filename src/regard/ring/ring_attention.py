"""Exact attention over a sequence that is cut over processes: keys and values travel, queries stay.

Forward, each process receives the keys that its queries attend to, one other process after the other, while it computes
with those that it has; partial results are merged by log-sum-exp (Liu et al. 2023, Ring Attention, arXiv 2310.01889).
Backward, keys travel again, and their gradients travel home; with the final log-sum-exp those of each part are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ..biases import Bias
from ..core.batched_problem import BatchedProblem, Saved
from ..core.problem import Problem
from ..errors import ConfigurationError, KernelError, MaskError, RegardError
from ..kernels.custom_op import add_sinks, sinks_gradient
from ..kernels.validation import ScoreLike, make_problem
from ..masks import Mask
from ..tiles.memo import ForwardState
from ..utils.numbers import whole_number
from ..utils.pytree import tree_flatten, tree_tensors, tree_unflatten
from .block_attention import (
    ShardGradients,
    ShardRows,
    block_kernel,
    block_problem,
    is_tame,
    largest_query_norm,
    shared_tensors,
    with_float32,
)
from .handshake import TAGS, Agreement, agree
from .head_exchange import HeadExchange, check_heads, with_heads
from .hops import plan_hops
from .key_exchange import KINDS, GradientReturn, HopPart, KeyExchange, exchange_limits, hop_parts
from .layout import Contiguous, RingLayout
from .peers import Group, Peers

QUERY_KIND, KEY_KIND, VALUE_KIND, OUTPUT_KIND, LSE_KIND = range(5)


class RingOptions(TypedDict, total=False):
    """The keyword arguments of `attention` that all processes share."""

    score: ScoreLike | None
    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: RingLayout | None = None,
    group: Group = None,
    head_parallel: int = 1,
    kernel: str | None = None,
    **options: Unpack[RingOptions],
) -> Tensor:
    """softmax( f(Q, K) + B, where M ) · V over a sequence cut over processes: each has a shard, and gets its rows.

    Every process of the group calls it with its shard, as `shard` cuts it, and the same other arguments; the result is
    the shard of what `regard.attention` computes of the whole. Masks, biases and dropout are functions of positions in
    the whole sequence. Keys travel to the processes whose queries attend to them and to no other; two messages are
    under way while one is computed with. Partial results are float32 at least, merged by log-sum-exp.

    Shapes: those of `regard.attention`, with the lengths of the shard. The key lengths of all processes together are
    the sequence, at 0..N-1; queries, where they are fewer, are at its last positions.

    Args:
        query: the shard's queries, (..., heads, m, Dq).
        key: its keys, (..., key heads, n, Dk).
        value: its values, (..., key heads, n, Dv).
        layout: which positions each process has, `Contiguous()` unless given.
        group: a process group or a one-dimensional DeviceMesh; the default group without it.
        head_parallel: U, which divides the heads over teams of U neighbouring ranks by an all-to-all; the teams are a
            ring, over 1/U as many processes. U divides query heads, key heads and the number of processes.
        kernel: the kernel of all blocks, by name; without it the fastest for each.
        options: `score`, `mask`, `bias`, `scale`, `softcap`, `sinks`, `dropout_p`, as of `regard.attention`. The
            dropout pattern is that of one process with the seed of rank 0. A mask or bias that is a tensor over pairs
            has no global positions, and is refused.

    Gradients of query, key and value are those of the sum of all processes' losses. Parameters (of scores, biases,
    sinks) get this process's part, to be summed over processes as data-parallel training does for every parameter.
    Backward is a second round of messages: every process has to run it.

    Raises:
        RingError: processes disagree (the message names rank and argument), or one is lost, within the group's timeout.
        ShapeError: shards that have not the lengths of the layout; more processes than tokens.
        MaskError, ConfigurationError: a mask or bias without global positions; no process group.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard import ring
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> layout = ring.Zigzag()
    >>> q0, k0, v0 = (ring.shard(tensor, 2, layout) for tensor in (q, k, v))
    >>> out = ring.attention(q0, k0, v0, mask=regard.masks.causal(), layout=layout)
    >>> torch.allclose(ring.unshard(out, 2, layout), regard.attention(q, k, v, mask=regard.masks.causal()), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    return attention_with_lse(
        query, key, value, layout=layout, group=group, head_parallel=head_parallel, kernel=kernel, **options
    )[0]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: RingLayout | None = None,
    group: Group = None,
    head_parallel: int = 1,
    kernel: str | None = None,
    **options: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]:
    """`ring.attention` and the log-sum-exp of each row's scores over the whole sequence, (..., heads, m).

    Both have gradients. Arguments and errors are those of `attention`.
    """

    def compute() -> tuple[Tensor, Tensor]:
        return ShardSettings.checked(layout, group, head_parallel, kernel).run(
            lambda: make_problem(query, key, value, wants_lse=True, **options)
        )

    if "torch._dynamo" in sys.modules:  # torch.compile breaks its graph here: messages are no part of one
        undivided: Any = torch.compiler.disable(fn=compute)
        return undivided()
    return compute()


@dataclass(frozen=True)
class ShardSettings:
    """The arguments of a ring that do not depend on the tensors: layout, processes, heads over processes, kernel."""

    layout: RingLayout
    peers: Peers
    head_parallel: int
    kernel: str | None

    @classmethod
    def checked(cls, layout: RingLayout | None, group: Group, head_parallel: int, kernel: str | None) -> ShardSettings:
        """Settings from the arguments of `attention`."""
        own = Contiguous() if layout is None else layout
        return cls(own, Peers.from_group(group), whole_number("head_parallel", head_parallel), kernel)

    def run(self, make: Callable[[], Problem]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the own rows of a shard's problem, which `make` returns or raises the error of."""
        return self.compute(*self.agreed_problem(make))

    def agreed_problem(
        self, make: Callable[[], Problem], *, lenses: str = "none", hook: str = "none"
    ) -> tuple[Problem, Agreement]:
        """The checked problem that `make` returns, and what all processes agree on about it.

        lenses, hook: descriptions of the lenses of the call and of its attention hook, which need to be the same.
        """
        try:
            problem: Problem | RegardError = make()
            self.peers.check_device(problem.value.device)
            _check_shard(problem, self.kernel)
            check_heads(problem, self.head_parallel, self.peers.size)
        except RegardError as error:
            problem = error  # raised once the others know
        same = {"kernel": repr(self.kernel), "head_parallel": str(self.head_parallel), "lenses": lenses}
        same["attention hook"] = hook
        agreed = agree(self.peers, problem, self.layout, same | exchange_limits())
        if isinstance(problem, RegardError):
            raise problem
        self.peers.connect(problem.value.device)
        # `agree` has held the positions to the layout, which from here on says what they are.
        problem = replace(problem, query_positions=None, key_positions=None)
        if problem.dropout is not None:
            seed = torch.full_like(problem.dropout.seed, agreed.seed)
            problem = replace(problem, dropout=replace(problem.dropout, seed=seed))
        return problem, agreed

    def compute(self, problem: Problem, agreed: Agreement) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the own rows of an agreed problem."""
        if self.head_parallel > 1:
            return _head_parallel(problem, self.peers, agreed, self.head_parallel, self.kernel)
        return _ring(problem, self.peers, agreed, self.kernel)


def _ring(problem: Problem, peers: Peers, agreed: Agreement, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this process's rows."""
    plan = plan_hops(problem, agreed.queries, agreed.keys, peers.rank)
    parts = hop_parts(plan, problem, max(agreed.keys.lengths))
    call = RingCall(peers, parts, agreed.number * TAGS, kernel)
    return _RingAttention.apply(call, problem, *tree_tensors(problem))


def _head_parallel(
    problem: Problem, peers: Peers, agreed: Agreement, teams_of: int, kernel: str | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this process's rows, from a ring of teams, each over some of the heads."""
    part, first = peers.rank % teams_of, peers.rank // teams_of * teams_of
    team = range(first, first + teams_of)
    exchange = HeadExchange(peers.some(team), agreed.number * TAGS + KINDS)
    queries, keys = (tuple(shards.lengths[member] for member in team) for shards in (agreed.queries, agreed.keys))
    pairs = problem.pairs
    query = exchange.to_positions(pairs.query, queries, QUERY_KIND)
    key = exchange.to_positions(pairs.key, keys, KEY_KIND)
    value = exchange.to_positions(problem.value, keys, VALUE_KIND)
    own = with_heads(replace(problem, pairs=replace(pairs, query=query, key=key), value=value), part, teams_of)
    agreed = replace(agreed, queries=agreed.queries.teams(teams_of), keys=agreed.keys.teams(teams_of))
    output, lse = _ring(own, peers.some(range(part, peers.size, teams_of)), agreed, kernel)
    lse = exchange.to_heads(lse.unsqueeze(-1), queries, LSE_KIND).squeeze(-1)
    return exchange.to_heads(output, queries, OUTPUT_KIND), lse


def _check_shard(problem: Problem, kernel: str | None) -> None:
    """Check what a ring needs of a shard's problem beside what one process needs."""
    if problem.normalizer is not None:
        raise ConfigurationError(
            f"a ring computes softmax attention, whose parts are merged by their log-sum-exp; this is "
            f"{problem.normalizer_name} attention: leave normalizer out, or attend over the whole sequence"
        )
    check_positions(problem)
    for name, positions in (("query", problem.query_positions), ("key", problem.key_positions)):
        if isinstance(positions, Tensor) and positions.ndim > 1:
            raise ConfigurationError(
                f"the {name} positions have the shape {tuple(positions.shape)}; in a ring all sequences of a batch "
                "have the positions of the layout: give them once, ring.shard(torch.arange(length), 0, layout)"
            )
    if kernel is not None:
        block_kernel(replace(problem, sinks=None), kernel)  # raises before anything is sent


def check_positions(problem: Problem) -> None:
    """Check that mask and bias are functions of positions.

    Raises:
        MaskError, ConfigurationError: one is a tensor over pairs.
    """
    mask, bias = problem.mask, problem.bias
    if mask is not None and not mask.by_position:
        raise MaskError(
            f"mask {mask!r} has a tensor over pairs, which has no global positions: in a ring give a mask that is a "
            "function of positions, such as masks.documents(ids), masks.padding(lengths) or masks.from_mod(function)"
        )
    if bias is not None and not bias.by_position:
        raise ConfigurationError(
            f"bias {bias!r} has a tensor over pairs or rows, which has no global positions: in a ring give a bias that "
            "is a function of positions, such as biases.alibi, biases.relative or biases.from_mod"
        )


@dataclass(frozen=True)
class RingCall:
    """One call of the ring on this process: whom it exchanges messages with, the parts of its hops, the kernel.

    tag: of the first message.
    """

    peers: Peers
    parts: list[HopPart]
    tag: int
    kernel: str | None


class _RingAttention(torch.autograd.Function):
    """Two rounds of the ring: keys and values forward; backward keys, values and their gradients."""

    @staticmethod
    def forward(ctx: Any, call: RingCall, problem: Problem, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        wide = with_float32(replace(problem, sinks=None))
        rows = ShardRows.from_problem(wide)
        query_norm = largest_query_norm(wide)
        for part, key, value in KeyExchange(call.peers, problem, call.parts, call.tag).received():
            key, value = key.to(wide.value.dtype), value.to(wide.value.dtype)
            in_place = bool(part.hop.blocks) and is_tame(wide, query_norm, key, value)
            for block in part.hop.blocks:
                own = block_problem(wide, block, part.query_heads, key, value)
                rows.merge(own, block.rows, part.query_heads, call.kernel, in_place=in_place)
        output, lse = rows.output, rows.lse
        if problem.sinks is not None:
            output, lse = add_sinks(output, lse, problem.sinks)
        output = output.to(problem.value.dtype)
        ctx.call, ctx.problem, ctx.met_nonfinite = call, _without_sequences(problem), rows.met_nonfinite
        ctx.state = ForwardState(problem)
        ctx.save_for_backward(output, lse, *tensors)
        return output, lse.to(torch.promote_types(problem.value.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise KernelError(
                "a ring has no second derivatives: take them over shorter sequences, with regard.attention in one "
                "process, or leave out create_graph=True"
            )
        call, (output, lse, *tensors) = ctx.call, ctx.saved_tensors
        ctx.state.require_unchanged()
        problem = _with_saved(ctx.problem, tensors)
        needed = ctx.needs_input_grad[2:]
        by_id = {id(tensor): need for tensor, need in zip(tensors, needed, strict=True)}
        bias = problem.bias is not None and any(by_id[id(each)] for each in problem.bias.parameters())
        own = ShardGradients.from_results(
            with_float32(replace(problem, sinks=None)),
            *(output, lse, grad_output, grad_lse),
            needs_bias=bias,
            kernel=call.kernel,
            met_nonfinite=ctx.met_nonfinite,
        )
        travels = by_id[id(problem.pairs.key)] or by_id[id(problem.value)]
        key, value = _round_backward(call, problem, own, travels=travels)
        found = [own.query, key, value]
        sources = [problem.pairs.query, problem.pairs.key, problem.value]
        sources += shared_tensors(problem, bias=bias)
        found += own.shared
        if problem.sinks is not None:
            batched = BatchedProblem.from_problem(problem)
            flat = batched.flatten_batch
            saved = Saved(flat(own.output), flat(own.lse), flat(own.grad_output), flat(own.grad_lse))
            sources, found = [*sources, problem.sinks], [*found, sinks_gradient(problem, problem.sinks, saved)]
        gradients: dict[int, list[Tensor]] = {}
        for tensor, gradient in zip(sources, found, strict=True):
            gradients.setdefault(id(tensor), []).append(gradient)
        return (
            None,
            None,
            *(
                gradients[id(tensor)].pop(0).to(tensor.dtype) if need and gradients.get(id(tensor)) else None
                for tensor, need in zip(tensors, needed, strict=True)
            ),
        )


def _without_sequences(problem: Problem) -> Problem:
    """The problem without its queries, keys and values, which autograd saves; activation checkpoints free them."""
    pairs, value = problem.pairs, problem.value
    query, key, value = (tensor.new_empty(0) for tensor in (pairs.query, pairs.key, value))
    return replace(problem, pairs=replace(pairs, query=query, key=key), value=value)


def _with_saved(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """A problem of `_without_sequences` with the tensors of the whole one, in the order of `tree_tensors`.

    Parameters, too, are other objects where an activation checkpoint has computed them again.
    """
    pairs, before = problem.pairs, tree_tensors(problem)
    sequences = [
        next(at for at, old in enumerate(before) if old is mine) for mine in (pairs.query, pairs.key, problem.value)
    ]
    if any(old is not new for at, (old, new) in enumerate(zip(before, tensors, strict=True)) if at not in sequences):
        return tree_unflatten(tree_flatten(problem)[1], tensors)
    query, key, value = (tensors[at] for at in sequences)
    return replace(problem, pairs=replace(pairs, query=query, key=key), value=value)


def _round_backward(call: RingCall, problem: Problem, own: ShardGradients, *, travels: bool) -> tuple[Tensor, Tensor]:
    """The gradients of this process's keys and values, from all processes; those of its queries are added to `own`."""
    dtype = own.problem.value.dtype
    own_key, own_value = problem.pairs.key, problem.value
    # Contiguous whatever the strides of keys and values: blocks add to views of them.
    sums = own_key.new_zeros(own_key.shape, dtype=dtype), own_value.new_zeros(own_value.shape, dtype=dtype)
    exchange = KeyExchange(call.peers, problem, call.parts, call.tag)
    home = GradientReturn(exchange, sums)
    query_norm = largest_query_norm(own.problem)
    for part, key, value in exchange.received(gradients_return=travels):
        key, value = key.to(dtype), value.to(dtype)
        is_own = part.hop.source == call.peers.rank
        gradients = list(sums) if is_own else home.zeros(part)
        in_place = bool(part.hop.blocks) and is_tame(own.problem, query_norm, key, value)
        for block in part.hop.blocks:
            pairs = block_problem(own.problem, block, part.query_heads, key, value)
            own.add(pairs, block, part.query_heads, *gradients, in_place=in_place)
        if travels and not is_own:
            home.send(part, gradients)
    home.wait()
    return sums
