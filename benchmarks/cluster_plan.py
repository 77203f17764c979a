"""What a ring on a cluster would cost, computed: hops, bytes, operations and time of each kind of layer.

Nothing here is measured. Hops and keys are those of the plan that `regard.ring` makes for these lengths and processes
(`plan_hops`); bytes, operations and times follow by the formulas below, at the rates of `Cluster`.

    python benchmarks/cluster_plan.py

Per layer, of n tokens over P processes, H heads and Hk key heads of D features, in bfloat16, with r the keys that a
process receives (r ≤ n, from the plan):

    bytes received, softmax   r · 2 Hk D · (2 + 2 + 4): keys and values forward, again backward, their gradients in
                              float32 the other way
    bytes received, linear    (P - 1) · Hk D (D + 1) · 4: a state in float32 from each process before, forward, and its
                              gradient from each process after, backward: P - 1 of both together
    operations, softmax       14 H D · pairs / P: 2 products forward and 5 backward, 2 operations each per feature
    operations, linear        12 H D² · n / P: 2 products with the state forward, 4 backward
    operations, the rest      6 · parameters · n / P
    time of a layer           the longer of computing and of sending, which overlap: operations / (peak · reached), and
                              bytes / bandwidth + messages · latency
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from _report import table

from regard import masks
from regard.kernels.validation import make_problem
from regard.masks import Mask
from regard.ring import Contiguous, RingLayout, Zigzag
from regard.ring.hops import count, plan_hops
from regard.ring.layout import place

LENGTHS = (1_000_000, 10_000_000)


@dataclass(frozen=True)
class Cluster:
    """Processes, a GPU each: operations a second at most (an H100 in bfloat16, by its data sheet), the part of them
    that is reached, bytes a second of its network card (400 Gbit), and seconds of a message."""

    processes: int = 64
    peak: float = 989e12
    reached: float = 0.4
    bandwidth: float = 50e9
    latency: float = 10e-6


@dataclass(frozen=True)
class Model:
    """A decoder of the size of Llama 3 8B: heads of D features, key heads, width, hidden width, layers."""

    heads: int = 32
    key_heads: int = 8
    features: int = 128
    dim: int = 4096
    hidden: int = 14336
    layers: int = 32

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: projections of queries and outputs, of keys and values, three of the SwiGLU."""
        key_dim = self.key_heads * self.features
        return 2 * self.dim * self.dim + 2 * self.dim * key_dim + 3 * self.dim * self.hidden


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs the busiest process in one training step, forward and backward."""

    hops: int
    received: float
    attention: float
    """Operations of the attention."""
    rest: float
    """Operations of projections and feed-forward."""

    def computing(self, cluster: Cluster) -> float:
        """Seconds of computing."""
        return (self.attention + self.rest) / (cluster.peak * cluster.reached)

    def sending(self, cluster: Cluster) -> float:
        """Seconds of the network, forward and backward: three rounds of messages."""
        return self.received / cluster.bandwidth + 3 * self.hops * cluster.latency

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of the layer, in which both overlap."""
        return max(self.computing(cluster), self.sending(cluster))


def softmax_layer(
    mask: Mask, layout: RingLayout, pairs: float, length: int, model: Model, cluster: Cluster
) -> LayerCost:
    """The cost of a layer of softmax attention, by the ring's own plan for this mask."""
    shards = place(layout, length, cluster.processes)
    hops, keys = 0, 0
    for rank in (0, cluster.processes // 2, cluster.processes - 1):
        own = torch.zeros(()).expand(1, model.heads, shards.lengths[rank], model.features)  # shapes alone: no memory
        key = own[:, : model.key_heads]
        plan = plan_hops(make_problem(own, key, key, mask=mask), shards, shards, rank)
        received = sum(count(hop.received) for hop in plan.hops if hop.source != rank)
        hops, keys = max(hops, len(plan.sources)), max(keys, received)
    return LayerCost(
        hops,
        keys * 2 * model.key_heads * model.features * (2 + 2 + 4),
        14 * model.heads * model.features * pairs / cluster.processes,
        6 * model.layer_parameters * length / cluster.processes,
    )


def linear_layer(length: int, model: Model, cluster: Cluster) -> LayerCost:
    """The cost of a layer of linear attention."""
    others, features = cluster.processes - 1, model.features
    return LayerCost(
        others,
        others * model.key_heads * features * (features + 1) * 4,
        12 * model.heads * features**2 * length / cluster.processes,
        6 * model.layer_parameters * length / cluster.processes,
    )


def layers(length: int, model: Model, cluster: Cluster) -> dict[str, LayerCost]:
    """The cost of each kind of layer."""
    window, first = 4096, 4
    near = masks.causal() & (masks.window(before=window - 1) | masks.prefix(first))
    return {
        "causal, zigzag": softmax_layer(masks.causal(), Zigzag(), length**2 / 2, length, model, cluster),
        "window of 4,096 and 4 sinks": softmax_layer(
            near, Contiguous(), length * (window + first), length, model, cluster
        ),
        "linear": linear_layer(length, model, cluster),
    }


def size(count: float) -> str:
    """Bytes in megabytes or gigabytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds, with milliseconds below one."""
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def main() -> None:
    """Print both tables."""
    model, cluster = Model(), Cluster()
    rows, steps = [], []
    for length in LENGTHS:
        found = layers(length, model, cluster)
        for name, cost in found.items():
            rows.append(
                [
                    f"{length:,}",
                    name,
                    str(cost.hops),
                    size(cost.received),
                    f"{cost.attention / 1e12:,.1f}",
                    f"{cost.rest / 1e12:,.1f}",
                    duration(cost.computing(cluster)),
                    duration(cost.sending(cluster)),
                ]
            )
        causal, near, far = found.values()
        quarter = model.layers // 4
        for name, parts in {
            "all causal": [causal] * model.layers,
            "every fourth causal, windows": [causal] * quarter + [near] * (model.layers - quarter),
            "every fourth linear, windows": [far] * quarter + [near] * (model.layers - quarter),
        }.items():
            spent = sum(cost.seconds(cluster) for cost in parts)
            steps.append([f"{length:,}", name, duration(spent), f"{length / spent / cluster.processes:,.0f}"])
    table(
        f"A layer on {cluster.processes} GPUs, forward and backward, for the busiest of them",
        ["tokens", "layer", "hops", "receives", "TFLOP attention", "TFLOP rest", "computing", "network"],
        rows,
    )
    table(
        f"A step of {model.layers} layers on {cluster.processes} GPUs",
        ["tokens", "layers", "time", "tokens a second and GPU"],
        steps,
    )


if __name__ == "__main__":
    main()
