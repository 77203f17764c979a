"""What the processes of a ring do in the tests; each function is run in every process of a group."""

from __future__ import annotations

import datetime
import importlib
import itertools
import os
import signal
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lens_cases import Coverage, ShardedCoverage, all_lenses, far_below, last_inputs, last_lenses, last_results, parts
from linear_cases import LinearCase, cut_axis, results
from ring_cases import RingCase
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import regard
import regard.ring as ring
import regard.ring.demo as ring_demo
from regard import explorer, lenses, masks
from regard.errors import RegardError
from regard.linear import FixedDecay
from regard.models import language_model as lm
from regard.positions import Rotary
from regard.ring import key_exchange
from regard.ring.handshake import TAGS
from regard.ring.peers import Peers

PART_BYTES = key_exchange.PART_BYTES
groups: dict[int, Any] = {}


def start(rank: int, processes: int, store: str, timeout: float) -> None:
    """Join the group of all processes, and make a group of the first p of them for each p."""
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=patience)
    for among in range(1, processes + 1):
        groups[among] = dist.new_group(range(among), timeout=patience)


def attention(
    among: int, case: RingCase, create_graph: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, np.ndarray] | None:
    """Output, log-sum-exp and gradients of a case, gathered; from rank 0 alone."""
    group, layout = groups[among], case.layout
    whole, options, parameters = case.tensors(dtype)
    local = {name: ring.shard(tensor, -2, layout, group).detach().requires_grad_() for name, tensor in whole.items()}
    above = local.pop("above").detach()
    torch.manual_seed(case.seed)
    settings = {"layout": layout, "group": group, "kernel": case.kernel, "head_parallel": case.head_parallel}
    key_exchange.PART_BYTES = 1 if case.in_parts else PART_BYTES
    try:
        output, lse = ring.attention_with_lse(*local.values(), **settings, **options)
    finally:
        key_exchange.PART_BYTES = PART_BYTES  # the next job may have processes that this one does not
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    loss = (output * above).sum() + 0.1 * finite.sum()
    inputs = {**local, **parameters}
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, create_graph=create_graph)
    results = {
        "output": ring.unshard(output.detach(), -2, layout, group),
        "lse": ring.unshard(lse.detach(), -1, layout, group),
    }
    for name, gradient in zip(inputs, gradients, strict=True):
        if name in parameters:
            total = torch.zeros_like(parameters[name]) if gradient is None else gradient.clone()
            dist.all_reduce(total, group=group)
            results[name] = total
        else:
            results[name] = ring.unshard(gradient, -2, layout, group)
    at_least = torch.promote_types(dtype, torch.float32)
    return {name: t.detach().to(at_least).numpy() for name, t in results.items()} if not dist.get_rank() else None


def observe(
    among: int,
    case: RingCase,
    names: list[str],
    infinite: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    below: list[int] | None = None,
) -> dict[str, np.ndarray]:
    """Output, log-sum-exp and the results of lenses of a case; those of rows are gathered.

    infinite: keys of NaN. below: keys whose scores are -infinity.
    """
    group, layout = groups[among], case.layout
    whole, options, _ = case.tensors(dtype)
    whole["key"][..., infinite or [], :] = float("nan")
    if below:
        far_below(whole, below)
    query, key, value, _ = (ring.shard(tensor, -2, layout, group).clone() for tensor in whole.values())
    chosen = {name: lens for name, lens in all_lenses(case.length, case.seed).items() if name in names}
    settings = {"layout": layout, "group": group, "kernel": case.kernel, "head_parallel": case.head_parallel}
    torch.manual_seed(case.seed)
    with torch.no_grad():
        seen = ring.observe(query, key, value, *chosen.values(), **settings, **options)
    by_row, others = {"output": (seen.output, -2), "lse": (seen.lse, -1)}, {}
    if dtype == torch.bfloat16:
        by_row.pop("output")  # NumPy has no such numbers
    for name, lens in chosen.items():
        own = parts(name, seen[lens])
        by_row, others = by_row | own[0], others | own[1]
    gathered = {name: ring.unshard(tensor, dim, layout, group) for name, (tensor, dim) in by_row.items()}
    return {name: tensor.numpy() for name, tensor in (gathered | others).items()}


def linear(among: int, case: LinearCase, dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray] | None:
    """Output, final state and gradients of a case of linear attention, gathered; from rank 0 alone."""
    group, layout = groups[among], case.layout
    whole, options, sums = case.tensors(dtype)
    axes = {name: cut_axis(name, tensor, whole["key"]) for name, tensor in whole.items()}
    local = {name: ring.shard(t, axes[name], layout, group).clone() for name, t in whole.items()}
    above = local.pop("above")
    inputs = {name: tensor.requires_grad_() for name, tensor in (local | sums).items()}
    output, state = case.call(ring, inputs, options | {"layout": layout, "group": group})
    found = results(case, inputs, output, state, above, 1 / among)
    for name, tensor in found.items():
        if name == "state":
            dist.all_reduce(tensor, group=group)
        elif name == "output" or name in axes:
            found[name] = ring.unshard(tensor.detach(), axes.get(name, -2), layout, group)
    at_least = torch.promote_types(dtype, torch.float32)
    return {name: tensor.to(at_least).numpy() for name, tensor in found.items()} if not dist.get_rank() else None


def observe_linear(among: int, case: LinearCase, names: list[str], own_masks: bool) -> dict[str, np.ndarray]:
    """Output, log-sum-exp and lenses of linear attention; own_masks: masks that are tensors have the shard's keys."""
    group, layout = groups[among], case.layout
    whole, options, _ = case.tensors(torch.float32)
    local = {
        name: ring.shard(tensor, cut_axis(name, tensor, whole["key"]), layout, group).clone()
        for name, tensor in whole.items()
        if name != "above"
    }
    mask = options["mask"]
    if own_masks and case.mask == "keys":
        options["mask"] = masks.where(keep=ring.shard(mask.pairs, -1, layout, group))
    elif own_masks and "documents" in case.mask and case.mask != "padded documents":
        options["mask"] = masks.documents(ring.shard(mask.ids, -1, layout, group))
    chosen = {name: lens for name, lens in all_lenses(case.length, case.seed).items() if name in names}
    with torch.no_grad():
        seen = ring.observe_linear_attention(
            local.pop("query"),
            local.pop("key"),
            local.pop("value"),
            *chosen.values(),
            layout=layout,
            group=group,
            **local,
            **options,
        )
    by_row, others = {"output": (seen.output, -2), "lse": (seen.lse, -1)}, {}
    for name, lens in chosen.items():
        own = parts(name, seen[lens])
        by_row, others = by_row | own[0], others | own[1]
    gathered = {name: ring.unshard(tensor, dim, layout, group) for name, (tensor, dim) in by_row.items()}
    return {name: tensor.numpy() for name, tensor in (gathered | others).items()}


def observe_last(among: int, length: int, queries: int, layout: ring.RingLayout) -> dict[str, np.ndarray]:
    """Lenses of fewer queries than keys."""
    group, chosen = groups[among], last_lenses(length)
    query, key, value = last_inputs(length, queries)
    query, key, value = (ring.shard(tensor, 2, layout, group) for tensor in (query, key, value))
    seen = ring.observe(query, key, value, *chosen.values(), mask=masks.causal(), layout=layout, group=group)
    return last_results(seen, chosen)


def own_lens(among: int, length: int, with_shards: bool) -> np.ndarray:
    """A lens that the library does not have."""
    query, lens = torch.zeros(1, 2, length, 8), (ShardedCoverage if with_shards else Coverage)(0.3)
    own = ring.shard(query, 2, None, groups[among])
    seen = ring.observe(own, own, own, lens, mask=masks.causal(), group=groups[among])
    return ring.unshard(seen[lens] > 0, 2, None, groups[among]).float().numpy()


def observe_lens(among: int, lenses: list[Any]) -> str:
    """A call with another lens in each process, over 24 tokens."""
    query = torch.ones(1, 2, 24 // among, 8)
    ring.observe(query, query, query, lenses[dist.get_rank()], mask=masks.causal(), group=groups[among])
    return "computed"


def observe_linear_lens(among: int, changes: list[dict[str, Any]]) -> str:
    """A lens of linear attention with arguments for each process; features of rank 1 are negative as they are."""
    change = dict(changes[dist.get_rank()])
    query = torch.ones(1, 2, 6, 8) * (1 - 2 * dist.get_rank())
    lens = change.pop("lens", lenses.Received())
    if change.pop("softmax", False):
        ring.observe(query, query, query, lens, group=groups[among])
    else:
        options: dict[str, Any] = {"causal": True} | change
        ring.observe_linear_attention(query, query, query, lens, group=groups[among], **options)
    return "computed"


def lens_traffic(among: int, case: RingCase) -> int:
    """Bytes that this process sends to others in messages of keys and values, with a lens."""
    sent: list[Tensor] = []
    post = ring.ring_attention.Peers.post

    def counting(self, sends, receives):
        sends = list(sends)
        sent.extend(tensor for _, tensor, _ in sends)
        return post(self, sends, receives)

    ring.ring_attention.Peers.post = counting
    try:
        whole, options, _ = case.tensors(torch.float32)
        query, key, value, _ = (ring.shard(t, -2, case.layout, groups[among]) for t in whole.values())
        with torch.no_grad():
            ring.observe(query, key, value, lenses.Entropy(), layout=case.layout, group=groups[among], **options)
    finally:
        ring.ring_attention.Peers.post = post
    return sum(tensor.numel() * tensor.element_size() for tensor in sent)


def mesh(among: int, dimensions: tuple[int, ...]) -> list[int]:
    """A shard over a device mesh of all processes."""
    device_mesh = init_device_mesh("cpu", dimensions)
    return ring.shard(torch.arange(11), 0, group=device_mesh).tolist()


def shards(among: int, length: int, layout: ring.RingLayout) -> list[Any]:
    """Shards of 0..length-1 along an inner axis, what unshard makes of them, and the gradient of both."""
    group = groups[among]
    numbers = torch.arange(2.0 * length).view(1, length, 2)
    own = ring.shard(numbers, 1, layout, group).clone().requires_grad_()
    whole = ring.unshard(own, 1, layout, group)
    (gradient,) = torch.autograd.grad((whole * numbers).sum(), own)
    same_gradient = bool(gradient.equal(among * ring.shard(numbers, 1, layout, group)))
    return [own.detach().flatten().tolist(), bool(whole.equal(numbers)), same_gradient]


def traffic(among: int, case: RingCase, backward: bool) -> tuple[int, list[int]]:
    """Bytes that this process sends in a call, and the processes that it sends to."""
    sent: list[tuple[int, Tensor]] = []
    post = ring.ring_attention.Peers.post

    def counting(self, sends, receives):
        sends = list(sends)
        sent.extend((peer, tensor) for peer, tensor, _ in sends if tensor.numel())
        return post(self, sends, receives)

    ring.ring_attention.Peers.post = counting
    try:
        whole, options, _ = case.tensors(torch.float32)
        group = groups[among]
        query, key, value, _ = (ring.shard(t, -2, case.layout, group).clone() for t in whole.values())
        for tensor in (query, key, value):
            tensor.requires_grad_(backward)
        output = ring.attention(query, key, value, layout=case.layout, group=group, **options)
        if backward:
            output.sum().backward()
    finally:
        ring.ring_attention.Peers.post = post
    return sum(tensor.numel() * tensor.element_size() for _, tensor in sent), sorted({peer for peer, _ in sent})


def message_order(among: int, case: RingCase) -> list[tuple[str, int, str, int]]:
    """The messages of a call, forward and backward, as this process posts them to a backend without tags."""
    kinds = {key_exchange.KEY: "key", key_exchange.VALUE: "value"}
    kinds |= {key_exchange.KEY_GRADIENT: "key gradient", key_exchange.VALUE_GRADIENT: "value gradient"}
    posted, post, matches_tags = [], Peers.post, Peers.matches_tags

    def noting(self, sends, receives):
        both = [("send", *message) for message in sends], [("receive", *message) for message in receives]
        for kind, peer, tensor, tag in (*both[0], *both[1]):
            if tensor.numel():
                posted.append((kind, peer, kinds[tag % TAGS], tensor.numel()))
        return post(self, *([message[1:] for message in messages] for messages in both))

    Peers.post, Peers.matches_tags = noting, False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        attention(among, case)
    finally:
        Peers.post, Peers.matches_tags = post, matches_tags  # pyright: ignore[reportAttributeAccessIssue]
    return posted


def linear_traffic(among: int, case: LinearCase, backward: bool) -> tuple[int, int, list[int]]:
    """Bytes of messages and of sums of a call of linear attention on this process, and where messages go."""
    sent, summed = [], []
    post, add = Peers.post, Peers.sum

    def counting_post(self, sends, receives):
        sends = list(sends)
        sent.extend((peer, tensor.nbytes) for peer, tensor, _ in sends if tensor.numel())
        return post(self, sends, receives)

    def counting_sum(self: Peers, tensor: torch.Tensor, when: str = "") -> torch.Tensor:
        summed.append(tensor.nbytes)
        return add(self, tensor, when)

    Peers.post, Peers.sum = counting_post, counting_sum
    try:
        whole, options, sums = case.tensors(torch.float32)
        axes = {name: cut_axis(name, tensor, whole["key"]) for name, tensor in whole.items()}
        group = groups[among]
        inputs = {name: ring.shard(t, axes[name], case.layout, group).clone() for name, t in whole.items()}
        inputs = {name: tensor.requires_grad_(backward) for name, tensor in (inputs | sums).items() if name != "above"}
        output, _ = case.call(ring, inputs, options | {"layout": case.layout, "group": group})
        if backward:
            output.sum().backward()
    finally:
        Peers.post, Peers.sum = post, add
    return sum(size for _, size in sent), sum(summed), sorted({peer for peer, _ in sent})


def differing_linear(among: int, rank: int, change: dict[str, Any], length: int = 24) -> str:
    """A call of linear attention in which one process has other arguments than the others."""
    own = dict(change) if dist.get_rank() == rank else {}
    shape = own.pop("shape", (1, 2, length // among, 8))
    dtype = getattr(torch, own.pop("dtype", "float32"))
    query = torch.ones(shape, dtype=dtype, requires_grad=own.pop("requires_grad", False))
    arguments = {"causal": True, "normalize": False, **own}
    if arguments.pop("softmax", False):
        ring.attention(query, query, query, mask=masks.causal(), group=groups[among])
    elif arguments.pop("with_state", False):
        ring.linear_attention_with_state(query, query, query, group=groups[among], **arguments)
    else:
        ring.linear_attention(query, query, query, group=groups[among], **arguments)
    return "computed"


def bad_decay(among: int, rank: int) -> str:
    """A call in which one process has a decay above 0."""
    query = torch.ones(1, 2, 8, 8)
    decay = torch.full((1, 2, 8), 1.0 if dist.get_rank() == rank else -1.0)
    ring.linear_attention(query, query, query, causal=True, decay=decay, group=groups[among])
    return "computed"


def linear_twice(among: int, causal: bool) -> str:
    """Second derivatives of linear attention."""
    query = torch.ones(1, 2, 8, 8, requires_grad=True)
    output = ring.linear_attention(query, query, query, causal=causal, group=groups[among])
    torch.autograd.grad(output.sum(), query, create_graph=True)
    return "computed"


def lose_linear(among: int, victim: int) -> str:
    """A call of linear attention in whose backward pass one process does not take part."""
    query = torch.ones(1, 2, 64, 8, requires_grad=True)
    output = ring.linear_attention(query, query, query, causal=True, group=groups[among])
    try:
        if dist.get_rank() != victim:
            output.sum().backward()
    except RegardError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def differing(among: int, rank: int, change: dict[str, Any], length: int = 24) -> str:
    """A call in which one process has other arguments than the others."""
    own = dict(change) if dist.get_rank() == rank else {}
    shape = own.pop("shape", (1, 2, length // among, 8))
    dtype = getattr(torch, own.pop("dtype", "float32"))
    query = torch.ones(shape, dtype=dtype, requires_grad=own.pop("requires_grad", False))
    arguments = {"mask": masks.causal(), "layout": ring.Contiguous(), **own}
    ring.attention(query, query, query, group=groups[among], **arguments)
    return "computed"


def differing_constant(among: int, rank: int, module: str, name: str) -> str:
    """A call in which one process has another constant of a module."""
    own = importlib.import_module(module)
    query, before = torch.ones(1, 2, 8, 8), getattr(own, name)
    if dist.get_rank() == rank:
        setattr(own, name, before + 1)
    try:
        ring.attention(query, query, query, group=groups[among])
    finally:
        setattr(own, name, before)
    return "computed"


def differing_unshard(among: int, shapes: list[tuple[int, ...]], dim: int = 0, **arguments: Any) -> str:
    """Shards of these shapes, gathered."""
    rank = dist.get_rank()
    ring.unshard(torch.ones(shapes[rank], **(arguments if rank else {})), dim, group=groups[among])
    return "computed"


def call(
    among: int, lengths: list[int], key_lengths: list[int] | None = None, key_heads: int = 2, **arguments: Any
) -> str:
    """A call with shards of these lengths."""
    rank = dist.get_rank()
    query = torch.ones(1, 2, lengths[rank], 8)
    key = torch.ones(1, key_heads, (key_lengths or lengths)[rank], 8)
    ring.attention(query, key, key, group=groups[among], **arguments)
    return "computed"


def compiled(among: int) -> list[float]:
    """Errors of a compiled function around a call, of its output and gradients, beside the same uncompiled."""
    group, layout = groups[among], ring.Zigzag()
    torch.manual_seed(0)
    tensors = [ring.shard(tensor, 2, layout, group).clone().requires_grad_() for tensor in torch.randn(3, 1, 2, 40, 8)]

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = ring.attention(2 * query, key, value, mask=masks.causal(), layout=layout, group=group)
        return mixed.sin() + query

    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        output = function(*tensors)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), tensors)])
    return [float((one - other).abs().max()) for one, other in zip(*results, strict=True)]


def nonfinite(among: int, case: RingCase, where: list[int]) -> dict[str, np.ndarray] | None:
    """A case whose keys at some positions are NaN."""
    group = groups[among]
    whole, options, _ = case.tensors(torch.float32)
    whole["key"][..., where, :] = float("nan")
    query, key, value, above = (ring.shard(t, -2, case.layout, group).clone() for t in whole.values())
    for tensor in (query, key, value):
        tensor.requires_grad_()
    output = ring.attention(query, key, value, layout=case.layout, group=group, **options)
    gradients = torch.autograd.grad(output, (query, key, value), above)
    tensors = {"output": output.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}
    gathered = {name: ring.unshard(t, -2, case.layout, group) for name, t in tensors.items()}
    return {name: tensor.numpy() for name, tensor in gathered.items()} if not dist.get_rank() else None


def killed_at_post(number: int) -> None:
    """Kill this process when it is about to start its messages for the `number`th time from now on."""
    posts, post = itertools.count(1), Peers.post

    def deadly(self, sends, receives):
        if next(posts) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(self, sends, receives)

    Peers.post = deadly


def lose(among: int, how: str, victim: int, ends_in: str | None = None) -> tuple[str, float]:
    """Two calls, in the second of which one process is killed, or does not take part: what the others end with.

    ends_in: a file to which they add it before they end their processes.
    """
    query = torch.ones(1, 2, 64, 8, requires_grad=True)
    ring.attention(query, query, query, group=groups[among])
    begun = time.monotonic()
    try:
        if how == "killed in backward":
            output = ring.attention(query, query, query, group=groups[among])
            if dist.get_rank() == victim:
                killed_at_post(3)  # it has computed its own keys, and the first part of another process's
            output.sum().backward()
        elif how == "backward":
            output = ring.attention(query, query, query, group=groups[among])
            if dist.get_rank() != victim:
                output.sum().backward()
        elif dist.get_rank() == victim:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            ring.attention(query, query, query, group=groups[among])
    except RegardError as error:
        if ends_in is not None:
            with Path(ends_in).open("a", encoding="utf-8") as file:
                file.write(f"{error}\n")
            os._exit(1)
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "done", time.monotonic() - begun


def decode(among: int, case: RingCase, queries: int, owner: list[int], seed: int = 0) -> np.ndarray:
    """The last queries of a case over keys of which each process has those that `owner` gives it."""
    whole, options, _ = case.tensors(torch.float32)
    options.pop("dropout_p")
    rank = dist.get_rank()
    positions = (torch.tensor(owner) == rank).nonzero().flatten()
    query = whole["query"][..., -queries:, :] + (seed if rank == 1 else 0)
    key, value = whole["key"][..., positions, :], whole["value"][..., positions, :]
    with torch.no_grad():
        return ring.decode(query, key, value, key_positions=positions, group=groups[among], **options).numpy()


def small_model() -> lm.LanguageModel:
    """A language model of two layers: windows with sinks, then all tokens before."""
    torch.manual_seed(1)
    layers = (lm.LayerConfig(before=9, prefix=2, rotary=Rotary(8)), lm.LayerConfig(rotary=Rotary(8)))
    attention = lm.AttentionConfig(4, num_kv_heads=2, sinks=True)
    return lm.LanguageModel(lm.LanguageModelConfig(23, 32, layers, attention, lm.GatedFeedForwardConfig(40)))


def mixed_model() -> lm.LanguageModel:
    """A language model of softmax attention, with windows and sinks and without, between kinds of linear attention."""
    torch.manual_seed(2)
    layers = (
        lm.LayerConfig(before=9, prefix=2, rotary=Rotary(8)),
        lm.LayerConfig(linear=lm.LinearAttentionConfig()),
        lm.LayerConfig(rotary=Rotary(8)),
        lm.LayerConfig(linear=lm.LinearAttentionConfig("identity", decay="feature", normalize=False), rotary=Rotary(8)),
        lm.LayerConfig(linear=lm.LinearAttentionConfig(decay="head", delta_rule=True)),
    )
    attention = lm.AttentionConfig(4, num_kv_heads=2, sinks=True)
    return lm.LanguageModel(lm.LanguageModelConfig(23, 32, layers, attention, lm.GatedFeedForwardConfig(40)))


def recorded_model() -> lm.LanguageModel:
    """A language model of windows, all tokens before, and linear attention without decay and with both kinds of it."""
    torch.manual_seed(3)
    layers = (
        lm.LayerConfig(before=9, prefix=2, rotary=Rotary(8)),
        *(lm.LayerConfig(linear=lm.LinearAttentionConfig(decay=decay)) for decay in (None, "head", "feature")),
        lm.LayerConfig(linear=lm.LinearAttentionConfig("softmax"), rotary=Rotary(8)),
        lm.LayerConfig(rotary=Rotary(8)),
    )
    attention = lm.AttentionConfig(4, num_kv_heads=2, sinks=True)
    return lm.LanguageModel(lm.LanguageModelConfig(23, 32, layers, attention, lm.GatedFeedForwardConfig(40)))


MODELS = {"softmax": small_model, "mixed": mixed_model, "recorded": recorded_model}


def model_gradients(
    among: int, model: str, length: int, layout: ring.RingLayout, head_parallel: int, again: bool = False
) -> dict[str, np.ndarray]:
    """Loss and gradients of a language model over a sequence that is cut, summed over processes.

    again: whether activations are computed again in the backward pass, in a thread of its own as on an accelerator.
    """
    group, trained = groups[among], MODELS[model]()
    text = torch.randint(23, (2, length + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets, positions = (
        ring.shard(tensor, -1, layout, group) for tensor in (text[:, :-1], text[:, 1:], torch.arange(length))
    )

    def block() -> AbstractContextManager[None]:
        return ring.sharded(layout, group=group, head_parallel=head_parallel)

    call = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), block())) if again else None
    with block():
        logits = trained.logits(trained.features(tokens, positions=positions, call_block=call))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / text.numel()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    sums = {"loss": loss.detach(), **{name: p.grad for name, p in trained.named_parameters()}}
    for tensor in sums.values():
        dist.all_reduce(tensor, group=group)
    return {name: tensor.numpy() for name, tensor in sums.items()}


def layer_observation(among: int, length: int, layout: ring.RingLayout) -> dict[str, np.ndarray]:
    """Lenses of a layer in a block of `ring.sharded`, its log-sum-exp, and the gradient of its output."""
    group, layer, x = groups[among], small_layer(), small_input(length)
    positions = ring.shard(torch.arange(length), 0, layout, group)
    own = ring.shard(x, 1, layout, group).clone().requires_grad_()
    entropy, received, weights = lenses.Entropy(), lenses.Received(), lenses.Weights()
    with ring.sharded(layout, group=group):
        seen = layer.observe(own, entropy, received, weights, positions=positions)
        query = own.detach().view(1, -1, 4, 8).transpose(1, 2)
        output, lse = regard.attention_with_lse(query, query, query, mask=masks.causal())
    (gradient,) = torch.autograd.grad(seen.output.square().sum(), own)
    found = {
        "output": (seen.output, 1),
        "gradient": (gradient, 1),
        "entropy": (seen[entropy], -1),
        "weights": (seen[weights], -2),
        "with lse": (output, -2),
        "lse": (lse, -1),
    }
    gathered = {name: ring.unshard(tensor.detach(), dim, layout, group) for name, (tensor, dim) in found.items()}
    return {name: tensor.numpy() for name, tensor in (gathered | {"received": seen[received]}).items()}


def small_layer() -> regard.nn.Attention:
    """A layer of four heads with windows."""
    torch.manual_seed(2)
    return regard.nn.Attention(regard.nn.Projections(32, num_heads=4), mask=masks.window(before=11), rotary=Rotary(8))


def small_input(length: int) -> Tensor:
    """A sequence for the layer."""
    return torch.randn(1, length, 32, generator=torch.Generator().manual_seed(3))


def record(
    among: int, model: str, length: int, layout: ring.RingLayout, head_parallel: int, order: str
) -> dict[str, Any] | str:
    """The records and arrays of a small language model's atlas, from rank 0; the error of its atlas from others."""
    group, recorded = groups[among], MODELS[model]()
    tokens = torch.randint(23, (2, length), generator=torch.Generator().manual_seed(0))
    own, positions = (ring.shard(tensor, -1, layout, group) for tensor in (tokens, torch.arange(length)))
    blocks = [lambda: ring.sharded(layout, group=group, head_parallel=head_parallel), lambda: explorer.record(recorded)]
    with torch.no_grad(), ExitStack() as stack:
        entered = [stack.enter_context(block()) for block in (blocks if order == "inside" else blocks[::-1])]
        recorded(own, positions=positions)
    recording = entered[1] if order == "inside" else entered[0]
    return atlas_parts(recording.atlas(tokens=[str(n % 7) for n in range(length)]))


def atlas_parts(atlas: explorer.Atlas) -> dict[str, Any]:
    """Records and arrays of an atlas, and the weights of a head."""
    arrays = {name: tensor.numpy() for name, tensor in atlas._arrays.items()}
    return {"records": atlas._records, "arrays": arrays, "roles": [each.roles for each in atlas.maps]}


LAYERS = ("causal", "two-way", "performer")


def make_layer(kind: str, mask: str) -> tuple[regard.nn.LinearAttention, Tensor, masks.Mask | None]:
    """A layer of linear attention, its input, and a mask of whole sequences."""
    torch.manual_seed(3)
    projections = regard.nn.Projections(16, num_heads=4, num_kv_heads=2)
    if kind == "performer":
        layer = regard.nn.PerformerAttention(projections, num_features=32)
    else:
        decay = FixedDecay(torch.tensor([-0.1, -0.01])) if kind == "causal" else None
        layer = regard.nn.LinearAttention(projections, causal=kind == "causal", decay=decay, rotary=Rotary(4))
    made = {
        "none": None,
        "padding": masks.padding([20, 31]),
        "documents": masks.documents([0] * 4 + [1] * 20 + [2] * 3 + [3] * 5),
    }
    return layer, torch.randn(2, 32, 16, requires_grad=True), made[mask]


def layer(among: int, kind: str, mask: str, layout: ring.RingLayout) -> dict[str, np.ndarray]:
    """Output and gradient of a layer over a sequence that is cut."""
    group = groups[among]
    module, whole, made = make_layer(kind, mask)
    x, positions = ring.shard(whole, 1, layout, group), ring.shard(torch.arange(32), 0, layout, group)
    x = x.detach().requires_grad_()
    with ring.sharded(layout, group=group):
        output = module(x, mask=made, positions=positions)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    found = {"output": output.detach(), "gradient": gradient}
    return {name: ring.unshard(tensor, 1, layout, group).numpy() for name, tensor in found.items()}


def misplaced(among: int, how: str) -> str:
    """Attention in a block of `ring.sharded` that is refused."""
    query = torch.ones(1, 2, 4, 8)
    layout = ring.Striped() if how == "striped" else ring.Zigzag()
    with ring.sharded(layout, group=groups[among]):
        if how == "positions":
            regard.attention(query, query, query, query_positions=torch.arange(4))
        elif how == "batch":
            regard.attention(query, query, query, query_positions=torch.arange(4)[None].expand(1, 4))
        elif how == "striped":
            regard.linear_attention(query, query, query, causal=True)
        elif how == "alignment":
            regard.observe(query, query, query, lenses.Alignment())
        elif how == "hook" and dist.get_rank():
            regard.attention(query, query, query)
        elif how == "hook":
            with explorer.record(torch.nn.Identity()):
                regard.attention(query, query, query)
        elif how == "lenses":
            regard.observe_linear_attention(query, query, query, lenses.Received(), causal=True, normalize=False)
        elif how == "linformer":
            projections = regard.nn.Projections(8, num_heads=2)
            regard.nn.LinformerAttention(projections, regard.nn.LengthProjection(max_length=16, rank=4))(query[0])
        elif how == "convolution":
            projections = regard.nn.Projections(8, num_heads=2)
            convolution = regard.nn.ShortConvolution(projections)
            regard.nn.LinearAttention(projections, causal=True, convolution=convolution)(query[0])
    return "computed"


def demo(among: int, length: int, steps: int) -> list[tuple[float, float]]:
    """The losses of the demonstration, of the ring and of one process."""
    return ring_demo.run(length, steps, window=64)
