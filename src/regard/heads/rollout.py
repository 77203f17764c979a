"""Attention through all layers: rollout, as a matrix and for texts of any length, and attention flow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from ..attention import attention
from ..errors import ConfigurationError, ShapeError
from ..kernels.validation import AttentionOptions


def attention_rollout(layers: Sequence[Tensor], *, residual: float = 0.5) -> Tensor:
    """Â_L · ... · Â_2 · Â_1 with Â = (1 - r) · mean over heads of A + r · I: (..., N, N), outputs × inputs.

    Shapes: the weights of each layer (..., heads, N, N), from the first layer to the last. r is the share of the
    residual connection. Rows that sum to less than 1, because of a sink, stay so.

    Raises:
        ShapeError: no layers, or weights that are not of self-attention and of one length.
        ConfigurationError: a residual outside 0 to 1.

    Source: Abnar and Zuidema 2020 (arXiv 2005.00928), section 3: r = 0.5, and the mean of the heads.

    >>> import torch
    >>> look_back = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    >>> attention_rollout([look_back, look_back])
    tensor([[1.0000, 0.0000],
            [0.7500, 0.2500]])
    """
    mixed = mixed_layers(layers, residual)
    total = mixed[0]
    for layer in mixed[1:]:
        total = layer @ total
    return total


def mixed_layers(layers: Sequence[Tensor], residual: float) -> list[Tensor]:
    """Â = (1 - r) · mean over heads of A + r · I, for each layer."""
    residual = checked_residual(residual)
    layers = list(layers)
    if not layers or any(layer.ndim < 3 or layer.shape[-2:] != (layers[0].shape[-1],) * 2 for layer in layers):
        raise ShapeError(
            f"the layers have the shapes {[tuple(layer.shape) for layer in layers]}; they need to be (..., heads, N, "
            "N), at least one and all of one N: rollout and flow are of self-attention"
        )
    identity = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device)
    return [(1 - residual) * layer.mean(-3) + residual * identity for layer in layers]


def checked_residual(residual: float) -> float:
    """The residual share, if it is in 0 to 1.

    Raises:
        ConfigurationError: it is outside.
    """
    if not 0.0 <= residual <= 1.0:
        raise ConfigurationError(
            f"residual is {residual}; it needs a share from 0 to 1, such as 0.5 where a layer adds its input to its "
            "attention, 0 where it does not"
        )
    return residual


def rollout_from_sources(
    sources: Tensor,
    layers: Iterable[tuple[Tensor, Tensor]],
    *,
    residual: float = 0.5,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Rollout at any length, of the columns that `sources` selects: (..., N, S), without a matrix N × N.

    X_l = (1 - r) · mean over heads of A_l · X_(l-1) + r · X_(l-1), by `regard.attention` with X as the values. X_0 is
    `sources` (..., N, S): a column of zeros and ones selects a token, or a segment of tokens. The identity matrix gives
    `attention_rollout`.

    Args:
        sources: (..., N, S), of the dtype of the queries.
        layers: query (..., heads, N, D) and key (..., key heads, N, D) of each layer, from the first to the last.
        residual: r, the share of the residual connection.
        options: further arguments of `regard.attention`, the same for all layers, such as `mask`.

    Raises:
        ConfigurationError: a residual outside 0 to 1; and what `regard.attention` raises.

    >>> import torch, regard
    >>> q = torch.zeros(1, 3, 4)
    >>> rollout_from_sources(torch.eye(3)[:, :1], [(q, q), (q, q)], mask=regard.masks.causal())
    tensor([[1.0000],
            [0.4375],
            [0.3194]])
    """
    residual = checked_residual(residual)
    for query, key in layers:
        values = sources.unsqueeze(-3).expand(*sources.shape[:-2], key.shape[-3], *sources.shape[-2:])
        lead = (1,) * (4 - query.ndim)
        query, key, values = (x.reshape(*lead, *x.shape) if lead else x for x in (query, key, values))
        attended = attention(query, key, values, **options).mean(-3)
        sources = (1 - residual) * attended.reshape(*attended.shape[len(lead) :]) + residual * sources
    return sources


MOST_WORK = 10**8
"""Pairs of an output and an input, times edges of the graph: one or two minutes of one core."""
LEAST_CAPACITY = 1e-12
"""Residual capacities up to this count as 0."""


def attention_flow(layers: Sequence[Tensor], *, outputs: Sequence[int] | None = None, residual: float = 0.5) -> Tensor:
    """The maximum flow from output i to input j through the layers: (outputs, N), exact to 1e-9, float64.

    The graph has a node for each token at each layer, and an edge from token a above to token b below with the capacity
    Â_ab = (1 - r) · mean over heads of A_ab + r · I_ab. Each pair is a maximum flow by itself, so that rows need not
    sum to 1. The time grows with N⁴: all pairs of 6 layers may have 63 tokens.

    Args:
        layers: the weights (heads, N, N) of each layer, from the first to the last.
        outputs: the output tokens, by default all.
        residual: r, the share of the residual connection.

    Raises:
        ShapeError: weights that are no self-attention of one sequence, an output that does not exist.
        ConfigurationError: a residual outside 0 to 1; more work than `MOST_WORK`.

    Source: Abnar and Zuidema 2020 (arXiv 2005.00928), section 3; the algorithm is that of Dinitz 1970.

    >>> import torch
    >>> look_back = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    >>> attention_flow([look_back, look_back])
    tensor([[1.0000, 0.0000],
            [1.0000, 0.5000]], dtype=torch.float64)
    """
    mixed = mixed_layers(layers, residual)
    if mixed[0].ndim != 2:
        raise ShapeError(
            f"attention_flow is of one sequence: layers need (heads, N, N); they are "
            f"{tuple(layers[0].shape)}: call it for each sequence"
        )
    tokens = len(mixed[0])
    chosen = range(tokens) if outputs is None else list(outputs)
    if any(not -tokens <= output < tokens for output in chosen):
        raise ShapeError(f"outputs are {chosen}, and there are {tokens} tokens: they need to lie in 0 to {tokens - 1}")
    work = len(chosen) * len(mixed) * tokens**3
    if work > MOST_WORK:
        raise ConfigurationError(
            f"attention_flow from {len(chosen):,} outputs through {len(mixed)} layers of {tokens:,} tokens is "
            f"{work:,} steps, and the most is {MOST_WORK:,}: ask for fewer outputs, as outputs=[{tokens - 1}], or for "
            "attention_rollout(layers), which takes one product a layer"
        )
    network = _FlowNetwork(mixed)
    flows = [[network.flow(output % tokens, source) for source in range(tokens)] for output in chosen]
    return torch.tensor(flows, dtype=torch.float64).reshape(len(chosen), tokens)


class _FlowNetwork:
    """The graph of all layers: node l · N + t is token t after l layers; edge e ^ 1 is the reverse of edge e."""

    def __init__(self, mixed: list[Tensor]) -> None:
        self.tokens, self.depth = len(mixed[0]), len(mixed)
        self.leaving: list[list[int]] = [[] for _ in range((self.depth + 1) * self.tokens)]
        self.ends: list[int] = []
        self.capacities: list[float] = []
        for number, layer in enumerate(mixed):
            for above, row in enumerate(layer.tolist()):
                for below, capacity in enumerate(row):
                    if capacity > LEAST_CAPACITY:
                        self._connect((number + 1) * self.tokens + above, number * self.tokens + below, capacity)

    def _connect(self, start: int, end: int, capacity: float) -> None:
        self.leaving[start].append(len(self.ends))
        self.leaving[end].append(len(self.ends) + 1)
        self.ends += [end, start]
        self.capacities += [capacity, 0.0]

    def flow(self, output: int, source: int) -> float:
        """The maximum flow from an output token to an input token."""
        start, end = self.depth * self.tokens + output, source
        residual, total = self.capacities.copy(), 0.0
        while (levels := self._levels(residual, start, end)) is not None:
            total += self._blocking_flow(residual, levels, start, end)
        return total

    def _levels(self, residual: list[float], start: int, end: int) -> list[int] | None:
        """The distance of each node from the start over edges with capacity left; None if the end is not reached."""
        levels = [-1] * len(self.leaving)
        levels[start], frontier = 0, [start]
        while frontier and levels[end] < 0:
            reached = []
            for node in frontier:
                for edge in self.leaving[node]:
                    if residual[edge] > LEAST_CAPACITY and levels[self.ends[edge]] < 0:
                        levels[self.ends[edge]] = levels[node] + 1
                        reached.append(self.ends[edge])
            frontier = reached
        return levels if levels[end] >= 0 else None

    def _blocking_flow(self, residual: list[float], levels: list[int], start: int, end: int) -> float:
        """Saturate the paths whose edges each go one level on, by depth-first search; the flow that was added."""
        tried, path, node, total = [0] * len(self.leaving), [], start, 0.0
        while True:
            if node == end:
                capacity = min(residual[edge] for edge in path)
                total += capacity
                for edge in path:
                    residual[edge] -= capacity
                    residual[edge ^ 1] += capacity
                saturated = next(place for place, edge in enumerate(path) if residual[edge] <= LEAST_CAPACITY)
                node = self.ends[path[saturated] ^ 1]
                del path[saturated:]
            elif tried[node] < len(self.leaving[node]):
                edge = self.leaving[node][tried[node]]
                if residual[edge] > LEAST_CAPACITY and levels[self.ends[edge]] == levels[node] + 1:
                    path.append(edge)
                    node = self.ends[edge]
                else:
                    tried[node] += 1
            elif path:
                node = self.ends[path.pop() ^ 1]
                tried[node] += 1
            else:
                return total
