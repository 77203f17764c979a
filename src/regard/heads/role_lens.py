"""`Roles`, the lens that accumulates evidence for roles in one pass over the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.batched_problem import BatchedProblem
from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from ..lenses import Reduction, RowShard, WeightTile
from ..lenses.base import WeightsLayout, select_batches
from ..masks import Mask
from .dense_weights import observe_weights
from .roles import AnyRole, AtOffset, Diffuse, Finding, Role, RoleEvidence, TokenPairs, text_roles
from .token_classes import Tokens

Text = Tokens | Sequence[str] | Sequence[int] | Sequence[Sequence[str]] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True, eq=False)
class Roles:
    """The lens for `RoleEvidence` of each head, summed over the rows of all sequences of the batch.

    A role's score for a row is the weight on the keys that the role counts; rows without such a key, and padding, are
    not counted. Pairs that the mask removes are not counted either. For self-attention: the queries are the last M
    of the N tokens. Memory is linear in the lengths. `regard.huggingface.observing` applies it to a whole model.

    Args:
        tokens: `Tokens`, or what `Tokens.from_lists` takes: the tokens of one sequence, or one list each.
        roles: the roles to test for; by default `text_roles()`.

    Raises:
        ConfigurationError: no roles, or something else than roles.
        ShapeError: when it starts, not one token for each key, another batch, or more queries than keys.

    >>> import torch, regard
    >>> lens, q = regard.heads.Roles(["a", "b", "a", "c"]), torch.zeros(1, 2, 4, 8)
    >>> evidence = regard.observe(q, q, q, lens, mask=regard.masks.causal())[lens]
    >>> print(evidence.holding()[0][0])
    diffuse 1.00 (n = 3): mean entropy over ln(keys), of rows with two keys and more, at least 0.9
    """

    tokens: Text
    roles: Sequence[AnyRole] = field(default_factory=text_roles)

    def __post_init__(self) -> None:
        roles = tuple(self.roles)
        if not roles or any(isinstance(role, type) or not hasattr(role, "rule") for role in roles):
            raise ConfigurationError(f"Roles needs roles such as text_roles(), at least one; they are {self.roles!r}")
        object.__setattr__(self, "roles", roles)
        if not isinstance(self.tokens, Tokens):
            object.__setattr__(self, "tokens", Tokens.from_lists(self.tokens))

    def start(self, problem: Problem) -> _RolesState:
        """The state of one run."""
        return self._start(problem, WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _RolesState:
        """The state of one run over the rows of one process; tokens are those of all keys."""
        return self._start(problem, WeightsLayout.from_problem(problem, shard))

    def _start(self, problem: Problem, layout: WeightsLayout) -> _RolesState:
        tokens = self.tokens
        if not isinstance(tokens, Tokens):
            raise AssertionError("__post_init__ converts tokens")
        batch, queries, keys = layout.batch, layout.all_queries, layout.keys
        if tokens.ids.shape[1] != keys or len(tokens.ids) not in (1, batch) or queries > keys:
            raise ShapeError(
                f"Roles has {tokens.ids.shape[1]:,} tokens of {len(tokens.ids):,} sequences, for {queries:,} "
                f"queries, {keys:,} keys and a batch of {batch:,}: self-attention needs one token for each "
                "key, of one sequence or of each of the batch, and the queries are the last ones"
            )
        return _RolesState(layout, problem, tokens, tuple(self.roles))


class _RolesState:
    """Per role: Σ w on the keys that it counts, and the number of such keys in each row."""

    def __init__(self, layout: WeightsLayout, problem: Problem, tokens: Tokens, roles: tuple[AnyRole, ...]) -> None:
        self.layout, self.roles = layout, roles
        self.pairs = _all_pairs(layout, problem, tokens)
        self.needs_entropy_terms = any(isinstance(role, Diffuse) for role in roles)
        # With consecutive key positions the key at an offset is found by its index, without comparing all keys.
        consecutive = bool((self.pairs.key_positions.diff() == 1).all())
        self.offsets = {n: role.offset for n, role in enumerate(roles) if isinstance(role, AtOffset) and consecutive}
        self.counting: dict[int, Role] = {
            n: role for n, role in enumerate(roles) if not isinstance(role, Diffuse) and n not in self.offsets
        }
        self.batched = BatchedProblem.from_problem(problem) if problem.mask is not None else None
        sizes = (len(roles), layout.batch, layout.heads)
        self.mass = torch.zeros(sizes, dtype=layout.zeros().dtype, device=layout.device)
        self.entropies = layout.zeros(layout.queries if self.needs_entropy_terms else 0)
        # Counts of keys per row, and of keys per row and role. They have one head while the mask is the same for all.
        self.keys: Tensor | None = None
        self.counted: Tensor | None = None

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        pairs = _tile_pairs(self.pairs, tile)
        exist = self._exist(pairs, tile)  # [b, 1 or H, m, n]
        keys, counted = self._counts(exist.shape[1])
        keys[tile.batch, :, tile.rows] += exist.sum(-1)
        if tile.entropy_terms is not None:
            self.entropies[tile.batch, :, tile.rows].add_(tile.entropy_terms.sum(-1))
        if self.offsets:
            self._add_offsets(tile, pairs, exist, counted)
        for number, role in self.counting.items():
            targets = exist & role.targets(pairs).unsqueeze(1)
            if bool(targets.any()):
                counted[number, tile.batch, :, tile.rows] += targets.sum(-1)
                self.mass[number, tile.batch] += (tile.weights * targets).sum((-1, -2))

    def _add_offsets(self, tile: WeightTile, pairs: TokenPairs, exist: Tensor, counted: Tensor) -> None:
        """Add the pairs at fixed offsets: at most one key of a row for each, `step` keys of the text apart."""
        step = tile.columns.step or 1
        numbers, offsets = list(self.offsets), torch.tensor(list(self.offsets.values()), device=exist.device)
        columns = pairs.query_positions + offsets - pairs.key_positions[..., :1]  # [b or 1, m, offsets]
        inside = (columns >= 0) & (columns % step == 0)
        columns = columns // step
        inside &= columns < exist.shape[-1]
        if not bool(inside.any()):
            return
        columns = columns.clamp(0, exist.shape[-1] - 1).unsqueeze(1)
        found = exist.gather(-1, columns.expand(*exist.shape[:3], -1)) & inside.unsqueeze(1)  # [b, 1 or H, m, offsets]
        weights = tile.weights.gather(-1, columns.expand(*tile.weights.shape[:3], -1)) * found
        for place, number in enumerate(numbers):
            counted[number, tile.batch, :, tile.rows] += found[..., place]
            self.mass[number, tile.batch] += weights[..., place].sum(-1)

    def finish(self, problem: Problem, lse: Tensor) -> RoleEvidence:
        keys, counted = self._counts(1)
        keys, counted = (count.expand(*count.shape[:-2], self.layout.heads, -1) for count in (keys, counted))
        rows, chances = counted > 0, counted / keys.clamp(min=1)
        scores = self.mass.masked_fill(self.layout.nan_rows(lse).any(-1), float("nan"))
        scores, rows, chances = (sums.double() for sums in (scores, rows.sum(-1), chances.sum(-1)))
        for number, role in enumerate(self.roles):
            if isinstance(role, Diffuse):
                spread = keys >= 2
                ratio = self._entropy(lse) / keys.clamp(min=2).log()
                scores[number], rows[number] = (ratio * spread).sum(-1), spread.sum(-1)
                chances[number] = rows[number]
        queries = int(self.layout.total((keys.amax(1) > 0).sum()))
        scores, rows, chances = (self.layout.total(each.sum(1)) for each in (scores, rows, chances))
        return RoleEvidence(self.roles, scores, rows, chances, queries)

    def _entropy(self, lse: Tensor) -> Tensor:
        """The entropy of each row in nats, (B, H, M); NaN where the row attends to NaN."""
        entropy = -torch.tensor(2.0).log().item() * self.entropies
        return entropy.masked_fill(self.layout.nan_rows(lse), float("nan"))

    def _counts(self, heads: int) -> tuple[Tensor, Tensor]:
        """Counts of keys (B, 1 or H, M) and of each role's keys (roles, B, 1 or H, M); H if masks differ by head."""
        if self.keys is None or self.counted is None:
            sizes = self.layout.batch, heads, self.layout.queries
            self.keys = torch.zeros(sizes, dtype=torch.int64, device=self.layout.device)
            self.counted = torch.zeros(len(self.roles), *sizes, dtype=torch.int32, device=self.layout.device)
        elif heads > self.keys.shape[1]:
            self.keys, self.counted = (
                count.expand(*count.shape[:-2], heads, -1).clone() for count in (self.keys, self.counted)
            )
        return self.keys, self.counted

    def _exist(self, pairs: TokenPairs, tile: WeightTile) -> Tensor:
        """The unmasked pairs of a tile without padding: bool (b, 1 or H, m, n)."""
        exist = ((pairs.query_ids >= 0) & (pairs.key_ids >= 0)).unsqueeze(1)
        keep = None if self.batched is None else self.batched.part(tile.batch).keep(tile.rows, tile.columns)
        exist = exist if keep is None else exist & keep
        return exist.expand(tile.weights.shape[0], -1, *tile.weights.shape[2:])


def _all_pairs(layout: WeightsLayout, problem: Problem, tokens: Tokens) -> TokenPairs:
    """The features of all queries (B or 1, M, 1) and keys (B or 1, 1, N)."""
    queries, keys = (positions.expand(max(len(positions), 1), -1) for positions in layout.positions(problem))
    ids = tokens.ids.to(layout.device)
    exist = ids >= 0
    places = keys.expand(max(len(ids), len(keys)), -1)
    earliest = places.masked_fill(~exist, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
    follows = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], -1)
    offset = layout.keys - layout.all_queries
    return TokenPairs(
        query_positions=queries.unsqueeze(-1),
        key_positions=keys.unsqueeze(-2),
        query_ids=layout.own_rows(ids[:, offset:]).unsqueeze(-1),
        key_ids=ids.unsqueeze(-2),
        follows=follows.masked_fill(~exist, -1).unsqueeze(-2),
        first=((places == earliest) & exist).unsqueeze(-2),
        delimiter=tokens.delimiters.to(layout.device).unsqueeze(-2),
        rarest=tokens.rarest.to(layout.device).unsqueeze(-2),
    )


def _tile_pairs(pairs: TokenPairs, tile: WeightTile) -> TokenPairs:
    """The features of the queries and keys of a tile."""

    def rows(tensor: Tensor) -> Tensor:
        return select_batches(tensor, tile.batch)[:, tile.rows]

    def columns(tensor: Tensor) -> Tensor:
        return select_batches(tensor, tile.batch)[..., tile.columns]

    return TokenPairs(
        rows(pairs.query_positions),
        columns(pairs.key_positions),
        rows(pairs.query_ids),
        *map(columns, (pairs.key_ids, pairs.follows, pairs.first, pairs.delimiter, pairs.rarest)),
    )


def find_roles(
    weights: Tensor,
    tokens: Text,
    *,
    roles: Sequence[AnyRole] | None = None,
    mask: Mask | Tensor | None = None,
    **positions: Any,
) -> list[list[Finding]]:
    """The roles of each head whose rule is met, from a tensor of weights (..., heads, M, N).

    Leading axes are sequences, which count together. `gather_role_evidence` returns the sums, which add up over a
    corpus. Pass the mask of a causal model, `mask=regard.masks.causal()`: without it every pair exists, and diffuse and
    the shares by chance are computed over keys that no query could attend to.

    Raises what `Roles` and `observe_weights` raise.

    >>> import torch
    >>> before = torch.eye(5)[None, [0, 0, 1, 2, 3]]
    >>> print(find_roles(before, "a b c d e".split())[0][0])
    previous token 1.00 (n = 4): mean weight on the token before, at least 0.5
    """
    return gather_role_evidence(weights, tokens, roles=roles, mask=mask, **positions).holding()


def gather_role_evidence(
    weights: Tensor,
    tokens: Text,
    *,
    roles: Sequence[AnyRole] | None = None,
    mask: Mask | Tensor | None = None,
    **positions: Any,
) -> RoleEvidence:
    """The `RoleEvidence` for roles in a tensor of weights (..., heads, M, N); arguments are those of `find_roles`.

    >>> import torch
    >>> sentences = [(torch.eye(n)[None], "a b c d".split()[:n]) for n in (3, 4)]
    >>> evidence = RoleEvidence.total(gather_role_evidence(weights, tokens) for weights, tokens in sentences)
    >>> print(evidence.holding()[0][0])
    self 1.00 (n = 7): mean weight on the token itself, at least 0.5
    """
    if isinstance(weights, Tensor) and weights.ndim == 2:
        weights = weights.unsqueeze(0)
    lens = Roles(tokens) if roles is None else Roles(tokens, roles)
    return observe_weights(weights, lens, mask=mask, **positions)[lens]
