"""Layers and models over a sequence that is cut over processes: every attention in a block is that of a ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..attention import Observation
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels import Result
from ..kernels.hooks import AttentionHook, AttentionSubstitute, active_substitute, current_hook, no_hook
from ..lenses import Lens
from .layout import RingLayout
from .peers import Group
from .ring_attention import ShardSettings
from .shard_hooks import call_hook, described_hook
from .shard_lenses import observe_shard

NO_LINEAR = (
    "linear attention in ring.sharded would read this process's tokens alone: a ring computes softmax attention; leave "
    "the block for a layer of linear attention, or the layer out of the model"
)


@contextmanager
def sharded(
    layout: RingLayout | None = None, *, group: Group = None, head_parallel: int = 1, kernel: str | None = None
) -> Iterator[None]:
    """Compute every `regard.attention` in the block as `ring.attention`: of layers and models, too.

    Tokens and their positions are those of this process: `ring.shard(tokens, 1, layout)` and
    `ring.shard(torch.arange(N), 0, layout)`, which rotary embeddings and masks need. Sums over tokens, such as a loss,
    are this process's part. The backward pass may run outside of the block.

    `regard.attention_with_lse` and `regard.observe` return what `ring.attention_with_lse` and `ring.observe` do, also
    as `layer.observe`. `regard.explorer.record`, around the block or in it, and in every process, records the whole
    sequence in the process of rank 0: its atlas is that of a single process, to rounding.

    Arguments and errors are those of `attention` and `observe`, and:

    Raises:
        ConfigurationError: positions of a batch dimension; linear attention.
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

    def observe(problem: Problem, lenses: Sequence[Lens]) -> Observation:
        with no_hook():
            return observe_shard(settings, lambda: _of_softmax(problem), lenses, hook)

    return AttentionSubstitute(
        compute,
        no_linear=NO_LINEAR,
        observe=observe,
        hook=hook,
        with_hook=lambda other: _substitute(settings, other),
    )


def _of_softmax(problem: Problem) -> Problem:
    """The problem with its log-sum-exp, which softmax attention has."""
    if problem.operator != "softmax":
        raise ConfigurationError(NO_LINEAR)
    return replace(problem, wants_lse=True)
