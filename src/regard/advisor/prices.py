"""The predicted cost of a workload: products, bytes, memory and time, by the rates that kernels are chosen by."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..core.problem import Problem
from ..kernels import Cost
from ..kernels.base import FlashWork
from ..kernels.planning.choice import kernels_of, uncompared_kernel
from ..kernels.planning.rates import predicted_seconds, seconds_on
from ..kernels.validation import AttentionOptions, make_problem
from ..masks import causal
from ..scores import Additive
from .cards import ADDITIVE_RATE, DELTA_SHARE, TILE, Card, CardWork
from .workload import DTYPES, Workload

BACKWARD_PRODUCTS = 2.5
"""Backward over forward of softmax attention: five matrix products for two (Dao 2023, arXiv 2307.08691)."""
LINEAR_BACKWARD = 2.0
"""The same of linear attention, whose matrix products have two gradients each."""
CHUNK = 64
"""Positions that attend to each other in linear attention; others meet in the state."""
LINEAR_EFFICIENCY = 0.38
"""The share of the native flash kernel's rate of products that causal linear attention reaches, measured."""
DELTA_RULE = 1.6
"""Time of the gated delta rule over that of linear attention, measured at 1,024 and 4,096 tokens (Zen 5, AVX-512)."""
TTT_LINEAR, TITANS, S4D = 7.0, 14.0, 16.0
"""The same of TTT-Linear, Titans and S4D, forward (Zen 3, AVX2): 6 to 8, 9 to 18 and 13 to 19 by length."""
LARA, SOFT = 2.0, 2.0
"""Time over that of linear attention with as many features as landmarks, likewise; of SOFT 1.3 to 3.4, falling."""
LINEAR_CALLS, LINEAR_GRADIENT = 55.0, 57.0
"""Overhead of linear attention in calls of torch's operators, and that of its gradient."""


@dataclass(frozen=True)
class Price:
    """The cost of a step, of all layers together.

    kernel: what computes it. flops: of the pairs that the mask leaves. bytes: of queries, keys, values, outputs and
    states that main memory reads and writes at least. cache: bytes of keys and values, or of states, that are stored
    for later tokens. memory: bytes that attention holds at once. seconds: predicted.
    """

    kernel: str
    flops: float
    bytes: float
    cache: float
    memory: float
    seconds: float


def softmax_price(
    workload: Workload,
    key_heads: int,
    keys: int,
    *,
    kernel: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Price:
    """The price of softmax attention, by the fastest kernel or by the one of that name.

    keys: positions in memory; while decoding, a rolling cache has fewer than the sequence. options: of `attention`.
    """
    problem = describe_problem(workload, key_heads, keys, **options)
    if workload.card is not None:
        return card_price(workload, workload.card, problem, additive=isinstance(options.get("score"), Additive))
    able = [each for each in kernels_of(problem) if kernel in (None, each.name) and not each.why_not(problem)]
    costs = {each: each.cost(problem) for each in able}
    fastest = min(able, key=lambda each: predicted_seconds(costs[each], problem))
    if kernel is None:
        fastest = uncompared_kernel(problem) or fastest
    pairs = problem.weights_shape.numel() * (
        1.0 if problem.mask is None else problem.mask.density(problem.queries, keys)
    )
    passes = 1 + BACKWARD_PRODUCTS * (workload.task == "train")
    stored = workload.bytes_of_keys(key_heads, keys)
    rows = 2 * workload.bytes_of_rows()  # queries and outputs
    in_memory = rows if workload.task == "train" else rows / workload.layers  # without gradients, of one layer
    return Price(
        fastest.name,
        4.0 * pairs * workload.head_dim * workload.layers * passes,
        (stored + rows) * passes,
        0.0 if workload.task == "train" else stored,
        stored + in_memory + costs[fastest].bytes,
        predicted_seconds(costs[fastest], problem) * workload.layers,
    )


def card_price(workload: Workload, card: Card, problem: Problem, *, additive: bool = False) -> Price:
    """The price of softmax attention on a card, by its data sheet: of torch's kernel, or where a mask leaves out blocks
    of pairs that of FlexAttention; of additive scores that of the compiled formula.

    On the edge of a mask whole blocks are computed: of a triangle's half of each, of a band's two edges together one.
    """
    mask = problem.mask
    key_heads, keys = problem.value.shape[1], problem.value.shape[2]
    pairs = problem.weights_shape.numel() * (1.0 if mask is None else mask.density(problem.queries, keys))
    sparse = mask is not None and mask != causal()
    on_edge = 0.0 if mask is None else problem.weights_shape.numel() / keys * TILE * (1.0 if sparse else 0.5)
    training = workload.task == "train"
    flops = 4.0 * pairs * workload.head_dim
    stored, rows = workload.bytes_of_keys(key_heads, keys), 2 * workload.bytes_of_rows()
    moved = (stored + rows) * (1 + BACKWARD_PRODUCTS * training)
    backward = BACKWARD_PRODUCTS * flops * training
    work = CardWork(flops, moved / workload.layers, backward, (pairs + on_edge) / pairs, sparse)
    seconds = work.seconds(card, DTYPES[workload.dtype])
    if additive:
        features = pairs * workload.head_dim * (1 + 2 * training)
        seconds = max(seconds, features / (ADDITIVE_RATE * card.flops(torch.float32)))
    return Price(
        "additive" if additive else "flex" if sparse else "sdpa",
        (flops + backward) * workload.layers,
        moved,
        0.0 if training else stored,
        stored + (rows if training else rows / workload.layers),
        seconds * workload.layers,
    )


def describe_problem(workload: Workload, key_heads: int, keys: int, **options: Unpack[AttentionOptions]) -> Problem:
    """The problem of one layer, over tensors that take no memory: each has one row, repeated by a stride of 0."""

    def tensor(heads: int, length: int) -> Tensor:
        row = torch.zeros(workload.head_dim, dtype=DTYPES[workload.dtype], device=workload.device)
        return row.expand(workload.batch, heads, length, -1)

    elsewhere = workload.device_type != "cpu"
    with FakeTensorMode() if elsewhere else nullcontext():  # a device that need not be here
        if elsewhere and isinstance(score := options.get("score"), Additive):
            for module in score.modules():
                for name, weight in list(module.named_parameters(recurse=False)):
                    there = torch.empty(weight.shape, dtype=weight.dtype, device=workload.device)
                    module.register_parameter(name, torch.nn.Parameter(there, requires_grad=False))
        query, key = tensor(workload.heads, workload.queries), tensor(key_heads, keys)
        if workload.task == "train":
            query, key = query.requires_grad_(), key.requires_grad_()
        return make_problem(query, key, key, **options)


def linear_price(workload: Workload, features: int, key_heads: int) -> Price:
    """The price of linear attention with a state of features × (head dim + 1) numbers for each key head.

    A token adds to the state and reads it, 4 · features · dim; in a causal pass it also attends to half of a chunk.
    """
    numbers = features * (workload.head_dim + 1)
    passes = 1 + LINEAR_BACKWARD * (workload.task == "train")
    rows = workload.batch * workload.heads * workload.queries * workload.layers
    of_chunk = CHUNK * (features + workload.head_dim) if workload.causal else 0
    flops = rows * (4.0 * numbers + of_chunk) * passes
    states = 4.0 * workload.layers * workload.batch * key_heads * numbers
    inputs = 2 * workload.bytes_of_rows() * (1 + key_heads / workload.heads)
    moved = (2 * states if workload.task == "decode" else inputs) * passes
    calls = workload.layers * (LINEAR_CALLS + LINEAR_GRADIENT * (workload.task == "train"))
    # Of many tokens, reading is hidden behind products.
    read = moved if workload.task == "decode" else 0.0
    cost = Cost(0.0, 0.0, moved=read, calls=calls, flash={"cpu": FlashWork(flops / LINEAR_EFFICIENCY)})
    if workload.card is None:
        seconds = seconds_on(workload.device_type, cost, torch.float32)
    else:  # of linear attention, which the delta rule takes `DELTA_RULE` times as long as
        work = CardWork(0.0, moved / workload.layers, edge=1.0)
        products = flops / (DELTA_RULE * DELTA_SHARE * workload.card.flops(DTYPES[workload.dtype]))
        seconds = max(products, work.seconds(workload.card, DTYPES[workload.dtype]) * workload.layers)
    stored = 0.0 if workload.task == "train" else states
    in_memory = inputs if workload.task == "train" else inputs / workload.layers
    return Price("recurrence", flops, moved, stored, states + in_memory, seconds)


def ring_price(workload: Workload, single: Price, processes: int, bandwidth: float) -> Price:
    """The price for one of several processes, each with a share of the sequence.

    Keys and values of all others arrive, in training twice, and their gradients once; messages are hidden behind work.
    """
    keys = workload.bytes_of_keys(workload.key_heads or workload.heads, workload.keys)
    sent = keys * (1 - 1 / processes) * (3 if workload.task == "train" else 1)
    seconds = max(single.seconds / processes, sent / bandwidth)
    return Price(
        f"{single.kernel}, {processes} processes",
        single.flops / processes,
        single.bytes / processes,
        single.cache / processes,
        single.memory / processes,
        seconds,
    )
