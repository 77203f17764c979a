"""Layers and models over a sequence that is cut over processes: every attention in a block is that of a ring."""

from __future__ import annotations

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
from ..linear.linear_arguments import LinearOptions
from .layout import RingLayout
from .linear_lenses import call_linear_hook, observe_linear_shard
from .linear_ring import agreed_linear_call
from .peers import Group
from .ring_attention import ShardSettings
from .shard_hooks import call_hook, described_hook
from .shard_lenses import observe_shard

NO_MIXTURES = (
    "Linformer in ring.sharded would mix the keys of this process alone, by the projection of the first positions, but "
    "each of its projected keys is a learned mixture of all positions. Use regard.nn.Attention or LinearAttention over "
    "a sequence that is cut, or leave the block for this layer and pass it the whole sequence"
)

NO_CONVOLUTIONS = (
    "a convolution or a token shift in ring.sharded would read zeros in place of the tokens of the process before: "
    "make the layer of linear attention without it, or leave the block for this layer and pass it the whole sequence"
)


@contextmanager
def sharded(
    layout: RingLayout | None = None, *, group: Group = None, head_parallel: int = 1, kernel: str | None = None
) -> Iterator[None]:
    """Compute attention in the block as `ring.attention` and `ring.linear_attention` do: of layers and models, too.

    Tokens and their positions are those of this process: `ring.shard(tokens, 1, layout)` and
    `ring.shard(torch.arange(N), 0, layout)`, which rotary embeddings and masks need. Sums over tokens, such as a loss,
    are this process's part. The backward pass may run outside of the block.

    `regard.attention_with_lse`, `regard.observe` and `regard.observe_linear_attention` return what those of `ring` do,
    also as `layer.observe`. `regard.explorer.record`, around the block or in it, and in every process, records the
    whole sequence in the process of rank 0: its atlas is that of a single process, to rounding. The exact attention of
    `record(model, exact=True)` is computed by that process alone.

    Arguments and errors are those of `attention`, `linear_attention` and their lenses, and:

    Raises:
        ConfigurationError: another operator of attention; positions of a batch dimension; `nn.LinformerAttention`; a
            layer of linear attention with a convolution or a token shift.
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
        own = query, key, value, options
        described = described_hook(hook)
        call = agreed_linear_call(*own, settings.layout, settings.peers, wants_state=wants_state, hook=described)
        result = call.run()
        if hook is not None:
            call_linear_hook(call, hook, *own)
        return result.output, result.state

    def observe_linear(
        query: Tensor, key: Tensor, value: Tensor, options: LinearOptions, lenses: Sequence[Lens]
    ) -> Observation:
        return observe_linear_shard(query, key, value, options, lenses, settings.layout, settings.peers, hook)

    def observe(problem: Problem, lenses: Sequence[Lens]) -> Observation:
        with no_hook():
            return observe_shard(settings, lambda: _of_softmax(problem), lenses, hook)

    return AttentionSubstitute(
        compute,
        linear=compute_linear,
        observe_linear=observe_linear,
        no_mixtures=NO_MIXTURES,
        no_convolutions=NO_CONVOLUTIONS,
        observe=observe,
        hook=hook,
        with_hook=lambda other: _substitute(settings, other),
    )


def _of_softmax(problem: Problem) -> Problem:
    """The problem with its log-sum-exp, by which results of softmax attention are merged."""
    if problem.normalizer is not None:
        raise ConfigurationError(
            f"ring.sharded computes softmax and linear attention, and this is {problem.normalizer_name}: "
            "leave the block for it, and pass it the whole sequence"
        )
    return replace(problem, wants_lse=True)
