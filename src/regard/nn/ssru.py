"""The SSRU: a recurrent layer in the place of a decoder's self-attention, and its state as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Observation, observe
from ..errors import ConfigurationError, ShapeError
from ..lenses import Lens
from ..masks import Mask, causal
from ..utils.numbers import whole_number
from .caches.base import Cache, check_rows
from .input_checks import check_input, refuse_scripting
from .linear import Linear


@dataclass(frozen=True, eq=False)
class SSRUCache(Cache):
    """c_t = f_t c_{t-1} + (1 - f_t) z_t of all tokens so far, for one layer; its size does not grow with them.

    Args:
        state: c_t, (batch, dim); None before the first token, where it is 0.
        next_position: how many tokens there were.

    >>> import torch
    >>> half, ones = torch.full((1, 2, 1), 0.5), torch.ones(1, 2, 1)
    >>> states, cache = SSRUCache().advance(half, ones)
    >>> states.flatten(), cache.next_position
    (tensor([0.5000, 0.7500]), 2)
    """

    state: Tensor | None = field(default=None, repr=False)
    next_position: int = 0  # a property of the protocol

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first token."""
        return 0 if self.state is None else self.state.nbytes

    def advance(self, forget: Tensor, written: Tensor) -> tuple[Tensor, SSRUCache]:
        """The state after each of M more tokens, (batch, M, dim), and the cache after the last.

        Shapes: forget and written are f and z, (batch, M, dim).

        Raises:
            ShapeError: another batch than that of the state.
        """
        state = written.new_zeros(written.shape[0], written.shape[2]) if self.state is None else self.state
        if len(state) != len(written):
            raise ShapeError(
                f"the cache has {len(state)} rows, and the tokens are of {len(written)}: reorder the cache"
            )
        states = []
        for f, z in zip(forget.unbind(1), written.unbind(1), strict=True):
            state = torch.lerp(z, state, f)
            states.append(state)
        after = SSRUCache(state, self.next_position + len(states))
        return torch.stack(states, dim=1) if states else written, after

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> SSRUCache:
        """The cache after M more tokens, whose gates f are `keys` and whose z are `values`, (batch, 1, M, dim)."""
        return self.advance(keys.squeeze(1), values.squeeze(1))[1]

    def evict(self) -> SSRUCache:
        """The cache itself: all tokens are in its state."""
        return self

    def reorder(self, rows: Tensor) -> SSRUCache:
        """The cache for these rows of the batch, in this order; rows may repeat. An empty cache fits any batch.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        if self.state is None:
            return self
        check_rows(rows, len(self.state))
        return replace(self, state=self.state[rows])


class SSRU(nn.Module):
    """ReLU(c_t), c_t = f_t c_{t-1} + (1 - f_t) W x_t, f_t = σ(W_f x_t + b_f): a recurrent layer for decoders.

    A simpler simple recurrent unit, in the place of self-attention: a step costs two products with matrices, and keeps
    one vector for each sequence, whatever the number of tokens before. c_0 is 0. A `TransformerBlock` takes it as its
    attention. It has no heads, and lenses show the weights of none.

    Shapes: query (batch, M, dim), output (batch, M, dim).

    Args:
        dim: features of a token, of the state, and of the output.

    Source: Kim et al. 2019, "From Research to Production and Back: Ludicrously Fast Neural Machine Translation"
    (Workshop on Neural Generation and Translation), section 3.2. As in Marian, W has no bias.

    >>> import torch
    >>> layer = SSRU(4)
    >>> x = torch.randn(2, 5, 4)
    >>> first, cache = layer.step(x[:, :3], layer.make_cache())
    >>> last, cache = layer.step(x[:, 3:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), layer(x), atol=1e-6), cache.state.shape
    (True, torch.Size([2, 4]))
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        dim = whole_number("dim", dim)
        self.value = Linear(dim, dim, bias=False)
        self.forget = Linear(dim, dim)
        for linear in (self.value, self.forget):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(self.forget.bias)

    @property
    def mask(self) -> Mask:
        """What each token reads: itself, and those before it."""
        return causal()

    def forward(self, query: Tensor, **call: Any) -> Tensor:
        """The output for a whole sequence; time and memory are linear in its length.

        Raises:
            ShapeError, DtypeError, DeviceError: a query that does not fit.
            ConfigurationError: a mask, bias, positions or rotation, which are of attention.
        """
        return self.step(query, SSRUCache(), **call)[0]

    def make_cache(self, max_length: int | None = None) -> SSRUCache:
        """An empty cache for decoding; its size depends on no `max_length`."""
        return SSRUCache()

    def step(self, query: Tensor, cache: SSRUCache, **call: Any) -> tuple[Tensor, SSRUCache]:
        """The output for the next tokens, (batch, M, dim), and the cache after them; errors are those of `forward`.

        Raises:
            ConfigurationError: a cache of another kind.
        """
        if not isinstance(cache, SSRUCache):
            raise ConfigurationError(
                f"step needs an SSRUCache, as make_cache() returns; it got a {type(cache).__name__}"
            )
        for name, value in call.items():
            if value is not None:
                raise ConfigurationError(
                    f"an SSRU reads all tokens in their order, and has no use for {name}=: leave it out, or use "
                    "regard.nn.Attention"
                )
        check_input("query", query, self.value.in_features, self)
        written = self.value(query)
        precise = torch.promote_types(written.dtype, torch.float32)  # the state is rounded at each step
        states, cache = cache.advance(self.forget(query).to(precise).sigmoid(), written.to(precise))
        return states.relu().to(written.dtype), cache

    def observe(self, query: Tensor, *lenses: Lens, **call: Any) -> Observation:
        """`forward`, with the lenses' results for no heads."""
        return self.observe_step(query, SSRUCache(), *lenses, **call)[0]

    def observe_step(
        self, query: Tensor, cache: SSRUCache, *lenses: Lens, **call: Any
    ) -> tuple[Observation, SSRUCache]:
        """`step`, with the lenses' results for no heads."""
        output, after = self.step(query, cache, **call)
        read, tokens = (output.new_empty(len(output), 0, count, 1) for count in (output.shape[1], after.next_position))
        return replace(observe(read, tokens, tokens, *lenses), output=output), after

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        return f"dim={self.value.in_features}"
