"""A cache that keeps the keys to which queries gave most weight, seen through a lens after each step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...attention import Observation, observe
from ...errors import ConfigurationError
from ...kernels.validation import AttentionOptions
from ...lenses import Lens, Received, Weights
from ..input_checks import check_positions
from .attending_cache import AttendingCache, Heads
from .base import check_rows
from .buffers import check_fits
from .weight_policies import ALWAYS, WeightPolicy


@dataclass(frozen=True, eq=False)
class WeighedCache(AttendingCache):
    """Keys and values of which a `WeightPolicy` keeps the heaviest after each step: an immutable value.

    `regard.nn.Attention.step` appends the keys of the next tokens, attends, and gives the policy the weights that the
    keys received (`regard.lenses.Received`). So memory stays constant, however long the text: the `capacity` of the
    policy, and the keys of one step. What is evicted is gone for all later queries: outputs are those of attention over
    the keys that are left, and depend on how many tokens a step has. Where heads keep keys of their own, masks are
    decided by positions alone, and there are no biases and no sinks.

    Args:
        policy: `H2O`, `SnapKV` or `TOVA`.
        contents: None before the first token.

    >>> import torch, regard
    >>> from regard.nn import Attention, Projections, TOVA, WeighedCache
    >>> layer = Attention(Projections(16, num_heads=4, num_kv_heads=2), mask=regard.masks.causal()).eval()
    >>> cache = WeighedCache(TOVA(size=8))
    >>> with torch.no_grad():
    ...     for token in torch.randn(100, 2, 1, 16):
    ...         output, cache = layer.step(token, cache)
    >>> cache.next_position, len(cache), cache.keys.shape
    (100, 8, torch.Size([2, 2, 8, 4]))
    """

    policy: WeightPolicy
    contents: WeighedKeys | None = field(default=None, repr=False)

    mask = None

    def __len__(self) -> int:
        return 0 if self.contents is None else self.contents.keys.shape[2]

    def __bool__(self) -> bool:
        return True

    @property
    def keys(self) -> Tensor:
        """(batch, key heads, N, key dim)."""
        return self._filled.keys

    @property
    def values(self) -> Tensor:
        """(batch, key heads, N, value dim)."""
        return self._filled.values

    @property
    def positions(self) -> Tensor:
        """Positions of the keys: (batch, N); (batch, key heads, N) once heads keep keys of their own."""
        contents = self._filled
        return contents.positions if contents.evicted and self.policy.per_head else contents.positions[:, 0]

    @property
    def weights(self) -> Tensor:
        """What the keys received in the steps that count, (batch, key heads, N), or (batch, 1, N) for all heads."""
        return self._filled.weights

    @property
    def next_position(self) -> int | Tensor:
        """Default position of the next token: one number, or (batch,) where the sequences differ."""
        return 0 if self.contents is None else self.contents.next_position

    @property
    def has_default_positions(self) -> bool:
        """Whether the keys are at positions 0..N-1: nothing was evicted, and no positions were given."""
        return self.contents is None or self.contents.has_default_positions

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        contents = self.contents
        return 0 if contents is None else contents.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> WeighedCache:
        """The cache with M more keys and values, at the next positions or at the given ones, which weigh 0 so far.

        Shapes and errors are those of `KVCache.append`.
        """
        check_fits(keys, values, self.contents)
        batch, heads, added = keys.shape[0], keys.shape[1] if self.policy.per_head else 1, keys.shape[2]
        next_position, default = self.next_position, self.has_default_positions and positions is None
        if positions is None:
            positions, next_position = self.next_positions(added, keys.device), next_position + added
        else:
            check_positions("positions", positions, batch, added)
            positions = positions.to(keys.device, torch.int64).expand(batch, added)
            next_position = positions.amax(-1) + 1 if added else next_position
        at = (positions if positions.ndim == 1 else positions.unsqueeze(1)).expand(batch, heads, added)
        new = WeighedKeys(keys, values, at, torch.zeros(at.shape, device=keys.device), next_position, default)
        return replace(self, contents=new if self.contents is None else self.contents.followed_by(new))

    def evict(self) -> WeighedCache:
        """The cache itself: what is evicted follows from weights, by `observe`."""
        return self

    def reorder(self, rows: Tensor) -> WeighedCache:
        """The cache for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows that are not integers in 0..batch-1, or bool for each row of the batch.
        """
        if self.contents is None:
            return self
        check_rows(rows, self.contents.keys.shape[0])
        return replace(self, contents=self.contents.take_rows(rows))

    def attend(self, heads: Heads, options: AttentionOptions) -> tuple[Tensor, WeighedCache]:
        """The output of `observe`, and the cache after eviction."""
        seen, cache = self.observe(heads, options)
        return seen.output, cache

    def observe(self, heads: Heads, options: AttentionOptions, *lenses: Lens) -> tuple[Observation, WeighedCache]:
        """Attention of a step whose keys were appended, with lenses, and the cache after eviction.

        heads, options: arguments of `regard.observe`: queries (batch, heads, M, key dim), keys and values of the cache.

        Raises:
            ConfigurationError: a bias, sinks or a tensor over pairs as mask where heads keep keys of their own.
        """
        if self.policy.per_head:
            _check_alike(options)
        count = heads[0].shape[2]
        asked = self.policy.queries(count)
        lens = Received() if asked == count else Weights(slice(count - asked, None))
        if self._filled.evicted and self.policy.per_head:
            seen = _observe_apart(heads, options, *lenses, lens)
        else:
            seen = observe(*heads, *lenses, lens, **options)
        received = seen[lens].detach() if asked == count else seen[lens].detach().sum(-2)  # [batch, heads, N]
        return seen, self._weighed(received, count)

    def _weighed(self, received: Tensor, count: int) -> WeighedCache:
        """The cache after a step of `count` queries, from what each key received in each head, (batch, heads, N)."""
        contents, policy = self._filled, self.policy
        kinds = contents.weights.shape[1]  # key heads, or 1 for all
        weights = received.unflatten(1, (kinds, -1)).sum(2)
        if policy.accumulates:
            weights = contents.weights + weights
        contents = replace(contents, weights=weights)
        ranks = policy.ranks(weights, count) if len(self) > policy.capacity else None
        if ranks is not None:
            padding = contents.positions < 0  # on the left of a batch: what no query sees
            contents = contents.take(_largest(ranks.masked_fill(padding, -ALWAYS), policy.capacity))
        return replace(self, contents=contents)

    @property
    def _filled(self) -> WeighedKeys:
        if self.contents is None:
            raise ConfigurationError("the cache is empty: keys, values and positions are there after the first append")
        return self.contents


@dataclass(frozen=True, eq=False)
class WeighedKeys:
    """The contents of a `WeighedCache` that is not empty.

    keys, values: (batch, key heads, N, ·). positions, weights: (batch, key heads, N), or (batch, 1, N) where all heads
    keep the same. evicted: whether any key was.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    weights: Tensor
    next_position: int | Tensor
    has_default_positions: bool
    evicted: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.positions, self.weights))

    def followed_by(self, new: WeighedKeys) -> WeighedKeys:
        """These keys and new ones after them."""
        return replace(
            new,
            keys=torch.cat([self.keys, new.keys], 2),
            values=torch.cat([self.values, new.values], 2),
            positions=torch.cat([self.positions, new.positions], 2),
            weights=torch.cat([self.weights, new.weights], 2),
            evicted=self.evicted,
        )

    def take(self, columns: Tensor) -> WeighedKeys:
        """These columns of each head, (batch, key heads or 1, count)."""
        batch, heads, length = self.keys.shape[:3]
        # Whole rows are copied several times as fast as `gather` copies numbers.
        rows = columns.expand(batch, heads, -1)
        rows = rows + length * torch.arange(batch * heads, device=rows.device).view(batch, heads, 1)

        def of_heads(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, 2).index_select(0, rows.flatten()).view(*rows.shape, tensor.shape[-1])

        positions, weights = (tensor.gather(2, columns) for tensor in (self.positions, self.weights))
        taken = replace(self, keys=of_heads(self.keys), values=of_heads(self.values), positions=positions)
        return replace(taken, weights=weights, has_default_positions=False, evicted=True)

    def take_rows(self, rows: Tensor) -> WeighedKeys:
        """These rows of the batch."""
        next_position = self.next_position
        if isinstance(next_position, Tensor) and next_position.ndim:
            next_position = next_position[rows]
        taken = replace(self, keys=self.keys[rows], values=self.values[rows], positions=self.positions[rows])
        return replace(taken, weights=self.weights[rows], next_position=next_position)


def _largest(ranks: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest ranks (..., N), in their order; of equal ranks the later ones."""
    falling = ranks.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return (ranks.shape[-1] - 1 - falling).sort(dim=-1).values


def _check_alike(options: AttentionOptions) -> None:
    """Check that a call has nothing that differs between heads or pairs beside positions.

    Raises:
        ConfigurationError: it has.
    """
    has = {
        "a bias": options.get("bias") is not None,
        "sinks": options.get("sinks") is not None,
        "a tensor as mask": isinstance(options.get("mask"), Tensor),
    }
    for name, given in has.items():
        if given:
            raise ConfigurationError(
                f"the layer or the call has {name}, but each head of this cache keeps keys of its own, of which masks "
                "know the positions alone: TOVA keeps the same keys for all heads"
            )


def _observe_apart(heads: Heads, options: AttentionOptions, *lenses: Lens) -> Observation:
    """`observe` where each key head has keys at positions of its own: key heads as an axis of the batch."""
    query, key, value = heads
    batch, key_heads = key.shape[:2]
    positions: Tensor = options["query_positions"]  # type: ignore[assignment]  # a cache that has evicted passes them
    at = positions if positions.ndim == 1 else positions.unsqueeze(1).expand(batch, key_heads, -1)
    apart: AttentionOptions = {**options, "query_positions": at}
    query = query.unflatten(1, (key_heads, -1))
    seen = observe(query, key.unsqueeze(2), value.unsqueeze(2), *lenses, **apart)

    def joined(result: Any) -> Any:
        if isinstance(result, tuple):  # the named tuples of lenses
            return type(result)._make(map(joined, result))  # type: ignore[attr-defined]
        return result.flatten(1, 2) if result.shape[:2] == key.shape[:2] else result

    results = {lens: joined(result) for lens, result in seen.results.items()}
    return Observation(joined(seen.output), joined(seen.lse), results)
