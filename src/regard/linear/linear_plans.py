"""The ways to compute linear attention, and the choice among them.

Two apply φ to all rows first, and compute sums of features: `FeatureSums` over all keys, `FeatureRecurrence` over those
before each query, as `FavorRecurrence` where features of keys are far apart. Two never have all features in memory,
which is faster: `EluRecurrence` and `FavorBlocks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..core.torch_modes import without_autocast
from .elu_recurrence import elu_recurrence, runs_in_one_pass
from .favor_attention import favor_attention, takes_features_in_blocks
from .feature_maps import Elu, FavorPlus, are_far_apart, key_features, query_features
from .linear_arguments import (
    bonus_features,
    check_features,
    checked_decay,
    delta_features,
    has_values,
    initial_sums,
)
from .linear_problem import LinearProblem
from .linear_state import LinearState
from .recurrence import recurrence
from .sums_over_keys import by_key_head, divide_by_totals, read_state


def choose_plan(problem: LinearProblem) -> LinearPlan:
    """The first plan that takes the problem; `FeatureSums` and `FeatureRecurrence` take any.

    Raises:
        RegardError: a feature map with other features than rows, a decay or a state that does not fit them.
    """
    if EluRecurrence.takes(problem):
        return EluRecurrence.from_problem(problem)
    if FavorBlocks.takes(problem):
        return FavorBlocks.from_problem(problem)
    plan = feature_plan(problem)
    return FavorRecurrence.from_plan(plan) if FavorRecurrence.is_needed(plan) else plan


def feature_plan(problem: LinearProblem) -> FeaturePlan:
    """The plan that has all features in memory."""
    return (FeatureRecurrence if problem.causal else FeatureSums).from_problem(problem)


@dataclass(frozen=True, eq=False)
class LinearResult:
    """What a plan computes, in the caller's shapes.

    Args:
        output: (..., heads, M, Dv).
        state: after all keys; None for documents and without an order.
        total: Σ_j w_ij of each row, (..., heads, M), by a `FeaturePlan`; None where weights are not normalised.
    """

    output: Tensor
    state: LinearState | None
    total: Tensor | None


class LinearSequences(NamedTuple):
    """The tensors that are cut along the positions: query (B, H, M, ·), key and value (B, Hk, N, ·), and the gates.

    own: the features u ⊙ φ(k) by which a token's own value is weighed, where it has a bonus, (B, Hk, N, ·).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    beta: Tensor | None
    removal: Tensor | None = None
    own: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LinearPlan(ABC):
    """One way to compute a problem: `rows` has its formula, and `run` what all ways have in common.

    Args:
        problem: what is computed.
        sequences: its sequences as `rows` reads them.
        state: what the sums start from, (B, Hk, D, ·); None for 0.
        key_scale: the logarithm of a factor that the features of keys lack, (B, Hk, 1, 1); None for 0.
    """

    problem: LinearProblem
    sequences: LinearSequences
    state: Tensor | None = None
    key_scale: Tensor | None = None

    absent_key: ClassVar[float] = 0.0
    """What a key has in each dim that adds nothing to the sums, and gets no gradient."""

    @abstractmethod
    def rows(self, sequences: LinearSequences, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The row of each query, which `finish` makes the output of, and the state after all keys, if there is one.

        Shapes: sequences as the plan's, of any batch and length; rows (B, H, M, ·), state (B, Hk, D, ·).
        """

    def finish(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output (B, H, M, Dv), and the sums of weights (B, H, M, 1) where they are known."""
        return rows, None

    def run(self) -> LinearResult:
        """Output, final state and sums of weights, in the caller's shapes."""
        problem, unflatten = self.problem, self.problem.axes.unflatten
        with without_autocast(problem.query.device.type):
            if problem.documents is None:
                rows, final = self.rows(self.sequences, self.state)
            else:
                rows, final = problem.documents.map(self._rows_of_documents, self.sequences), None
            output, total = self.finish(rows)
            return LinearResult(
                unflatten(problem.mark_nonfinite(output)).to(problem.dtype),
                None if final is None else self.linear_state(final),
                None if total is None else unflatten(problem.mark_nonfinite(total)).squeeze(-1),
            )

    def _rows_of_documents(self, *sequences_and_exists: Any) -> Tensor:
        """The rows of documents of different lengths; after the end of each, exists is False."""
        *sequences, exists = sequences_and_exists
        sequences = LinearSequences(*sequences)
        return self.rows(sequences._replace(key=self.hide_keys(sequences.key, exists)), None)[0]

    @classmethod
    def hide_keys(cls, key: Tensor, exists: Tensor | None) -> Tensor:
        """Keys (B, Hk, N, ·) that add nothing to the sums where `exists` (B, Hk, N) is False; None for nowhere."""
        return key if exists is None else key.where(exists.unsqueeze(-1), cls.absent_key)

    def linear_state(self, sums: Tensor) -> LinearState:
        """The state of sums (B, Hk, D, ·), with NaN where a key had NaN or infinity."""
        problem = self.problem
        if problem.nonfinite is not None:
            sums = problem.nonfinite.mark_state(sums)
        scale = None if self.key_scale is None else problem.axes.unflatten(self.key_scale)
        return LinearState(problem.axes.unflatten(sums), problem.normalize, scale)


class EluRecurrence(LinearPlan):
    """o_t = S_tᵀ φ(q_t) / z_tᵀ φ(q_t), for φ = elu + 1: φ, the recurrence and the division in one pass of a backend.

        S_t = e^{g_t} S_{t-1} + φ(k_t) v_tᵀ,    z_t = e^{g_t} z_{t-1} + φ(k_t)

    The state has z as the last column of S. Queries, keys and values stay in the dtype of the caller.
    """

    absent_key = -torch.inf  # where elu + 1 is 0, and its gradient

    @staticmethod
    def takes(problem: LinearProblem) -> bool:
        """Whether a backend computes the problem."""
        return (
            type(problem.feature_map) is Elu
            and problem.normalize
            and problem.causal
            and problem.bonus is None
            and (problem.scale == 1.0 or problem.query.dtype == torch.float32)
            and problem.key.shape[2] > 1
            and runs_in_one_pass(problem.query, problem.key, problem.value)
        )

    @classmethod
    def from_problem(cls, problem: LinearProblem) -> EluRecurrence:
        """The plan of a problem that it takes."""
        key, state = problem.key, problem.state
        decay = checked_decay(problem.decay, problem.axes, key, problem.keep)
        sequences = LinearSequences(
            problem.scaled_query(), cls.hide_keys(key, problem.keep), problem.value, decay, None
        )
        sums = None if state is None else initial_sums(state, key, problem.value.shape[-1] + 1, None)
        return cls(problem, sequences, sums)

    def rows(self, sequences: LinearSequences, state: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value, decay, *_ = sequences
        return elu_recurrence(query, key, value, decay, state)

    def sums_over_keys(self, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
        """Σ_j f_j φ(k_j) v_jᵀ as the state has them, with factors (B, Hk, N, 1 or D): (B, Hk, D, ·)."""
        key = _times(Elu()(key), factors)
        return torch.cat([key.mT @ value, key.sum(2).unsqueeze(-1)], -1)


class FavorBlocks(LinearPlan):
    """o_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) over all keys, for φ = FAVOR+: φ of some positions at a time."""

    @staticmethod
    def takes(problem: LinearProblem) -> bool:
        """Whether keys have no order and there is code for the feature map and the tensors."""
        feature_map = problem.feature_map
        return (
            type(feature_map) is FavorPlus
            and problem.normalize
            and not problem.causal
            and problem.documents is None
            and takes_features_in_blocks(
                cast("FavorPlus", problem.feature_map), problem.query, problem.key, problem.value
            )
        )

    @classmethod
    def from_problem(cls, problem: LinearProblem) -> FavorBlocks:
        """The plan of a problem that it takes."""
        problem = problem.without_masked_keys().widened()
        return cls(problem, LinearSequences(problem.scaled_query(), problem.key, problem.value, None, None))

    def rows(self, sequences: LinearSequences, state: Tensor | None) -> tuple[Tensor, None]:
        features = cast("FavorPlus", self.problem.feature_map)
        return favor_attention(*sequences[:3], features, self.problem.keep), None


@dataclass(frozen=True, eq=False)
class FeaturePlan(LinearPlan):
    """φ of all queries and keys first. Where normalised, values have a column of ones, whose sums are the totals.

    query_scale: as key_scale, of queries, (B, H, M, 1).
    """

    query_scale: Tensor | None = None

    @classmethod
    def from_problem(cls, problem: LinearProblem) -> Self:
        """The plan of any problem, causal for `FeatureRecurrence` alone."""
        problem = problem.without_masked_keys().widened()
        feature_map, state, value = problem.feature_map, problem.state, problem.value
        with without_autocast(value.device.type):
            at_least = None if state is None else state.log_scale
            query, query_scale = query_features(feature_map, problem.scaled_query())
            key, key_scale = key_features(feature_map, problem.key, problem.keep, at_least)
        check_features(feature_map, query, key, value)
        if problem.normalize:
            value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1)
        decay = checked_decay(problem.decay, problem.axes, key, problem.keep)
        sums = None if state is None else initial_sums(state, key, value.shape[-1], key_scale)
        key, beta, removal = delta_features(key, problem.beta, problem.removal)
        sequences = LinearSequences(query, key, value, decay, beta, removal, bonus_features(key, problem.bonus))
        return cls(problem, sequences, sums, key_scale, query_scale)

    def finish(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows divided by their last column, the totals; else multiplied by the factors that their features lack."""
        if self.problem.normalize:
            return divide_by_totals(rows), rows[..., -1:]
        if self.query_scale is None or self.key_scale is None:
            return rows, None
        group = rows.shape[1] // max(self.key_scale.shape[1], 1)
        return rows * (self.query_scale + self.key_scale.repeat_interleave(group, 1)).exp(), None

    def sums_over_keys(self, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
        """Σ_j f_j φ(k_j) v_jᵀ as the state has them, with factors (B, Hk, N, 1 or D): (B, Hk, D, ·)."""
        return _times(key, factors).mT @ value


class FeatureSums(FeaturePlan):
    """o_i = Sᵀ φ(q_i) with S = Σ_j φ(k_j) v_jᵀ over all keys, which have no order."""

    def rows(self, sequences: LinearSequences, state: Tensor | None) -> tuple[Tensor, None]:
        return read_state(sequences.query, sequences.key.mT @ sequences.value), None


class FeatureRecurrence(FeaturePlan):
    """o_t = S_tᵀ φ(q_t), with a state S for the keys up to each position.

    S_t = e^{g_t} S_{t-1} + φ(k_t) u_tᵀ,    u_t = v_t  or  β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t)

    With a bonus o_t = S_{t-1}ᵀ φ(q_t) + φ(q_t) · (u ⊙ φ(k_t)) v_t: the query of each token is read one token earlier.
    """

    def rows(self, sequences: LinearSequences, state: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta, removal, own = sequences
        if own is None or not key.shape[2]:
            return recurrence(query, key, value, decay, beta, state, removal)
        earlier = functional.pad(query[:, :, 1:], (0, 0, 0, 1))
        rows, final = recurrence(earlier, key, value, decay, beta, state, removal)
        start = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]) if state is None else state
        rows = torch.cat([read_state(query[:, :, :1], start), rows[:, :, :-1]], 2)
        shares = (by_key_head(query, key.shape[1]) * own.unsqueeze(2)).sum(-1, keepdim=True)  # (B, Hk, r, N, 1)
        return rows + (shares * value.unsqueeze(2)).flatten(1, 2), final


class FavorRecurrence(FeatureRecurrence):
    """`FeatureRecurrence` of FAVOR+ with features relative to the largest of the keys so far, e^{c_t}, not of all.

    S_t e^{-c_t} = e^{g_t + c_{t-1} - c_t} S_{t-1} e^{-c_{t-1}} + φ(k_t) e^{-c_t} v_tᵀ

    A row is divided by its total, where e^{-c_t} cancels. Relative to the largest feature of a later key, those of all
    keys that a row attends to may be 0 in float32.
    """

    @staticmethod
    def is_needed(plan: FeaturePlan) -> bool:
        """Whether a key has features that are too small relative to all; False where the numbers cannot be read."""
        problem, sequences = plan.problem, plan.sequences
        if not isinstance(plan, FeatureRecurrence) or plan.key_scale is None or not problem.normalize:
            return False
        if sequences.beta is not None or sequences.own is not None or not has_values(sequences.key):
            return False
        return are_far_apart(sequences.key.detach(), problem.keep)

    @classmethod
    def from_plan(cls, plan: FeaturePlan) -> Self:
        """The plan of the same problem."""
        problem, sequences, state = plan.problem, plan.sequences, plan.problem.state
        with without_autocast(problem.value.device.type):
            logarithms = cast("FavorPlus", problem.feature_map).logarithms(problem.key)
        if problem.keep is not None:
            logarithms = logarithms.masked_fill(~problem.keep.unsqueeze(-1), -torch.inf)
        largest = logarithms.detach().amax(-1)  # [B, Hk, N]
        before = None if state is None or state.log_scale is None else state.log_scale.flatten(2)
        if before is not None:
            largest = largest.maximum(before)
        largest = largest.cummax(-1).values
        if before is None:  # masked keys in front have none
            before = largest.masked_fill(largest == -torch.inf, torch.inf).amin(-1, keepdim=True)
        largest = largest.maximum(before)
        steps = -largest.diff(dim=-1, prepend=before)
        decay = sequences.decay
        decay = steps if decay is None else decay + (steps if decay.ndim == 3 else steps.unsqueeze(-1))
        sequences = sequences._replace(key=(logarithms - largest.unsqueeze(-1)).exp(), decay=decay)
        sums = None if state is None else state.sums
        return cls(problem, sequences, sums, largest[..., -1:].unsqueeze(-1), plan.query_scale)


def _times(key: Tensor, factors: Tensor | None) -> Tensor:
    return key if factors is None else key * factors
