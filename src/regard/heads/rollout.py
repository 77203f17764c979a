"""What an output attends to through all layers: rollout, as short text's matrices and at any length.

Attention flow: how much can run from an output token to an input token, exactly, for short texts.
"""

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

    Shapes: the weights of each layer (..., heads, N, N), from the first layer to the last. The residual connection
    keeps a share r of each token. Rows that sum to less than 1, where a sink took a part, stay so.

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
    """Â = (1 - r) · mean over heads of A + r · I of each layer: what rollout and flow are made of."""
    residual = checked_residual(residual)
    layers = list(layers)
    if not layers or any(layer.ndim < 3 or layer.shape[-2:] != (layers[0].shape[-1],) * 2 for layer in layers):
        raise ShapeError(
            f"the layers have the shapes {[tuple(layer.shape) for layer in layers]}; they need to be (..., heads, N, "
            "N), at least one and all of one N: rollout and flow are of self-attention"
        )
    token = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device)
    return [(1 - residual) * layer.mean(-3) + residual * token for layer in layers]


def checked_residual(residual: float) -> float:
    """A share between 0 and 1.

    Raises:
        ConfigurationError: it is not that.
    """
    if not 0.0 <= residual <= 1.0:
        raise ConfigurationError(
            f"residual is {residual}; it needs a share from 0 to 1, such as 0.5 where a layer adds its input to its "
            "attention, 0 where it does not"
        )
    return residual


def rollout_of(
    sources: Tensor,
    layers: Iterable[tuple[Tensor, Tensor]],
    *,
    residual: float = 0.5,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Rollout of any length: how much each output takes from each source, (..., N, S), without a matrix N × N.

    X_l = (1 - r) · mean over heads of A_l · X_(l-1) + r · X_(l-1), by `regard.attention` with X as the values. X_0, the
    sources, is (..., N, S): columns of ones and zeros for single tokens or whole segments of them; the identity gives
    `attention_rollout` itself.

    Args:
        sources: (..., N, S), of the dtype of the queries.
        layers: query (..., heads, N, D) and key (..., key heads, N, D) of each layer, from the first to the last.
        residual: r, the share of each token that the residual connection keeps.
        options: what `regard.attention` takes beside, the same for all layers, such as `mask`.

    Raises:
        ConfigurationError: a residual outside 0 to 1; and what `regard.attention` raises.

    >>> import torch, regard
    >>> q = torch.zeros(1, 3, 4)
    >>> rollout_of(torch.eye(3)[:, :1], [(q, q), (q, q)], mask=regard.masks.causal())
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
"""Pairs of an output and an input, times edges of the graph: a minute or two of one core."""
LEAST_CAPACITY = 1e-12


def attention_flow(layers: Sequence[Tensor], *, outputs: Sequence[int] | None = None, residual: float = 0.5) -> Tensor:
    """The maximum flow from output i to input j through the layers: (outputs, N), exact to 1e-9, float64.

    The graph has a node for each token at each layer, and an edge from token a above to token b below with the capacity
    Â_ab = (1 - r) · mean over heads of A_ab + r · I_ab. Each pair is a flow of its own, so that a row need not sum to
    1: what many paths share counts for each of them. The time grows with N⁴: all pairs of 6 layers may have 63 tokens.

    Args:
        layers: the weights (heads, N, N) of each layer, from the first to the last.
        outputs: the output tokens asked about; all without it.
        residual: r, the share of each token that the residual connection keeps.

    Raises:
        ShapeError: weights that are no self-attention of one sequence, an output that is not there.
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
    asked = range(tokens) if outputs is None else list(outputs)
    if any(not -tokens <= output < tokens for output in asked):
        raise ShapeError(f"outputs are {asked}, and there are {tokens} tokens: they need to lie in 0 to {tokens - 1}")
    work = len(asked) * len(mixed) * tokens**3
    if work > MOST_WORK:
        raise ConfigurationError(
            f"attention_flow from {len(asked):,} outputs through {len(mixed)} layers of {tokens:,} tokens is "
            f"{work:,} steps, and the most is {MOST_WORK:,}: ask for fewer outputs, as outputs=[{tokens - 1}], or for "
            "attention_rollout(layers), which takes one product a layer"
        )
    network = _Network(mixed)
    flows = [[network.flow(output % tokens, source) for source in range(tokens)] for output in asked]
    return torch.tensor(flows, dtype=torch.float64).reshape(len(asked), tokens)


class _Network:
    """The graph of all layers: node l · N + t is token t after l layers; edge e and e ^ 1 are each other's return."""

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
        left, total = self.capacities.copy(), 0.0
        while (levels := self._levels(left, start, end)) is not None:
            total += self._blocking(left, levels, start, end)
        return total

    def _levels(self, left: list[float], start: int, end: int) -> list[int] | None:
        """How many edges with room each node is from the start; None where the end is not reached."""
        levels = [-1] * len(self.leaving)
        levels[start], front = 0, [start]
        while front and levels[end] < 0:
            reached = []
            for node in front:
                for edge in self.leaving[node]:
                    if left[edge] > LEAST_CAPACITY and levels[self.ends[edge]] < 0:
                        levels[self.ends[edge]] = levels[node] + 1
                        reached.append(self.ends[edge])
            front = reached
        return levels if levels[end] >= 0 else None

    def _blocking(self, left: list[float], levels: list[int], start: int, end: int) -> float:
        """Send what can be sent along edges that go one level on, until no such way has room."""
        tried, path, node, total = [0] * len(self.leaving), [], start, 0.0
        while True:
            if node == end:
                room = min(left[edge] for edge in path)
                total += room
                for edge in path:
                    left[edge] -= room
                    left[edge ^ 1] += room
                full = next(place for place, edge in enumerate(path) if left[edge] <= LEAST_CAPACITY)
                node = self.ends[path[full] ^ 1]
                del path[full:]
            elif tried[node] < len(self.leaving[node]):
                edge = self.leaving[node][tried[node]]
                if left[edge] > LEAST_CAPACITY and levels[self.ends[edge]] == levels[node] + 1:
                    path.append(edge)
                    node = self.ends[edge]
                else:
                    tried[node] += 1
            elif path:
                node = self.ends[path.pop() ^ 1]
                tried[node] += 1
            else:
                return total
