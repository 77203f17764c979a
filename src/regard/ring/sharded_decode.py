"""Decoding over sharded keys: the same few queries in every process, each over its own keys, merged by log-sum-exp.

Nothing of the keys is sent, only an output and a log-sum-exp for each query (Shyam et al. 2024, Tree Attention,
arXiv 2408.04093, without its tree).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from ..attention import run_problem
from ..core.log_sum_exp import merge_softmax
from ..core.problem import Problem
from ..core.score_forms import at_least_float32
from ..core.symbolic_positions import positions_tensor
from ..errors import ConfigurationError, RegardError
from ..kernels.custom_op import add_sinks
from ..kernels.validation import make_problem
from .handshake import agree_on, describe, tensor_checksum
from .peers import Group, Peers
from .ring_attention import RingOptions, check_positions


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_positions: Tensor | range,
    query_positions: Tensor | range | None = None,
    group: Group = None,
    kernel: str | None = None,
    **options: Unpack[RingOptions],
) -> Tensor:
    """softmax( f(Q, K) + B, where M ) · V of the same queries in every process, over keys cut over processes.

    For text that is generated after a sequence that a ring has read: every process has its keys of the cache, at any
    positions, and any of them appends the next one. All get the same output.

    Shapes: query (..., heads, M, Dq), the same in all processes; key (..., key heads, n, Dk) and value (..., key heads,
    n, Dv), of which a process may have none; the output is (..., heads, M, Dv).

    Args:
        query: the same in all processes.
        key: this process's keys.
        value: this process's values.
        key_positions: (n,), the positions of this process's keys in the whole sequence.
        query_positions: (M,); without them the last M positions that any process has.
        group: a process group or a one-dimensional DeviceMesh; the default group without it.
        kernel: by name; without it the fastest.
        options: those of `ring.attention` but dropout.

    No gradient is computed.

    Raises:
        RingError: processes disagree, in their queries too, or one is lost.
        ConfigurationError: dropout, or inputs that require a gradient while autograd records.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard import ring
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8)
    >>> out = ring.decode(q, k, v, key_positions=range(10), mask=regard.masks.window(before=3))
    >>> torch.allclose(out, regard.attention(q, k, v, mask=regard.masks.window(before=3)), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    peers = Peers.from_group(group)
    try:
        peers.check_device(value.device)
        problem: Problem | RegardError = _own_problem(query, key, value, options, key_positions, query_positions)
    except RegardError as error:
        problem = error  # raised once the others know
    described = {} if isinstance(problem, RegardError) else {**describe(problem), "query": tensor_checksum(query)}
    last = -1 if isinstance(problem, RegardError) else _last(problem)
    end = 1 + max(numbers[0] for numbers in agree_on(peers, problem, described, [last]))
    if isinstance(problem, RegardError):
        raise problem
    if problem.query_positions is None:
        problem = replace(problem, query_positions=range(end - problem.queries, end))
    with torch.no_grad():
        result = run_problem(replace(problem, sinks=None), kernel)
        if result.lse is None:
            raise AssertionError("a problem that wants the log-sum-exp was computed without it")
        outputs = peers.all_gather(at_least_float32(result.output).contiguous(), "while outputs were gathered")
        lses = peers.all_gather(result.lse.contiguous(), "while outputs were gathered")
        output, lse = merge_softmax(torch.stack(outputs), torch.stack(lses), dim=0)
        if problem.sinks is not None:
            output, lse = add_sinks(output, lse, problem.sinks)
    return output.to(problem.value.dtype)


def _own_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: RingOptions,
    key_positions: Tensor | range,
    query_positions: Tensor | range | None,
) -> Problem:
    """The checked problem of the own keys; `query_positions` is None where none are given."""
    if dropout_p := options.get("dropout_p"):
        raise ConfigurationError(f"dropout_p is {dropout_p}; decoding has no dropout: leave it out")
    placed = query_positions if query_positions is not None else range(query.shape[-2])
    problem = make_problem(
        query, key, value, wants_lse=True, key_positions=key_positions, query_positions=placed, **options
    )
    check_positions(problem)
    if problem.requires_grad():
        raise ConfigurationError(
            "decoding over sharded keys computes no gradient, but an input requires one: call it under "
            "torch.no_grad(), or train with ring.attention"
        )
    return problem if query_positions is not None else replace(problem, query_positions=None)


def _last(problem: Problem) -> int:
    """The last position of the own keys, -1 of none."""
    if not problem.keys or problem.key_positions is None:
        return -1
    return int(positions_tensor(problem.key_positions, None).max())
