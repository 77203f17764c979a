"""Layers and models over a sequence that is cut over processes: every attention in a block is that of a ring."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from ..attention import Observation
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels import Result
from ..kernels.hooks import AttentionHook, AttentionSubstitute, active_substitute, current_hook, no_hook
from ..lenses import Lens
from ..linear import LinearState
from ..linear.linear_problem import LinearOptions
from .layout import RingLayout
from .linear_ring import run_linear
from .peers import Group
from .ring_attention import ShardSettings
from .shard_hooks import call_hook, described_hook
from .shard_lenses import observe_shard

NO_LINEAR_LENSES = (
    "lenses in ring.sharded read the weights of softmax attention: those of linear attention need all features in one "
    "process. Leave the block, and observe a sequence that one process has"
)
NO_MIXTURES = (
    "Linformer in ring.sharded would mix the keys of this process alone, by the projection of the first positions, but "
    "each of its projected keys is a learned mixture of all positions. Use regard.nn.Attention or LinearAttention over "
    "a sequence that is cut, or leave the block for this layer and pass it the whole sequence"
)


@contextmanager
def sharded(
    layout: RingLayout | None = None, *, group: Group = None, head_parallel: int = 1, kernel: str | None = None
) -> Iterator[None]:
    """Compute attention in the block as `ring.attention` and `ring.linear_attention` do: of layers and models, too.

    Tokens and their positions are those of this process: `ring.shard(tokens, 1, layout)` and
    `ring.shard(torch.arange(N), 0, layout)`, which rotary embeddings and masks need. Sums over tokens, such as a loss,
    are this process's part. The backward pass may run outside of the block.

    `regard.attention_with_lse` and `regard.observe` return what `ring.attention_with_lse` and `ring.observe` do, also
    as `layer.observe`. `regard.explorer.record`, around the block or in it, and in every process, records the whole
    sequence in the process of rank 0: its atlas is that of a single process, to rounding, without the layers of linear
    attention.

    Arguments and errors are those of `attention`, `linear_attention` and `observe`, and:

    Raises:
        ConfigurationError: positions of a batch dimension; lenses of linear attention; `nn.LinformerAttention`.
        ShapeError: positions that are not those of the layout.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> from regard import masks, nn, ring
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layer = nn.Attention(nn.Projections(16, num_heads=2), mask=masks.causal())
    >>> x = torch.randn(1, 10, 16)
    >>> with ring.sharded(ring.Zigzag()):
    ...     out = layer(ring.shard(x, 1, ring.Zigzag()), positions=ring.shard(torch.arange(10), 0, ring.Zigzag()))
    >>> torch.allclose(out, layer(x), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    settings = ShardSettings.checked(layout, group, head_parallel, kernel)
    with active_substitute(_substitute(settings, current_hook())):
        yield


def _substitute(settings: ShardSettings, hook: AttentionHook | None) -> AttentionSubstitute:
    """The ring in place of the kernels, and a hook that it calls."""

    def compute(problem: Problem) -> Result:
        problem, agreed = settings.agreed_problem(lambda: _of_softmax(problem), hook=described_hook(hook))
        output, lse = settings.compute(problem, agreed)
        if hook is not None:
            call_hook(settings.peers, hook, problem, agreed, lse.detach())
        return Result(output, lse)

    def compute_linear(
        query: Tensor, key: Tensor, value: Tensor, options: LinearOptions, wants_state: bool
    ) -> tuple[Tensor, LinearState | None]:
        if hook is not None:
            warnings.warn("linear attention in ring.sharded is not recorded: record it in one process", stacklevel=3)
        return run_linear(query, key, value, options, settings.layout, settings.peers, wants_state=wants_state)

    def observe(problem: Problem, lenses: Sequence[Lens]) -> Observation:
        with no_hook():
            return observe_shard(settings, lambda: _of_softmax(problem), lenses, hook)

    return AttentionSubstitute(
        compute,
        linear=compute_linear,
        no_mixtures=NO_MIXTURES,
        observe=observe,
        hook=hook,
        with_hook=lambda other: _substitute(settings, other),
    )


def _of_softmax(problem: Problem) -> Problem:
    """The problem with its log-sum-exp, which softmax attention has."""
    if problem.operator != "softmax":
        raise ConfigurationError(NO_LINEAR_LENSES)
    return replace(problem, wants_lse=True)
