"""The decay and the gates of a layer of linear attention: functions of a token that are learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, ShapeError
from ..linear import Decay, FeatureMap, FixedDecay, SoftplusDecay, SoftplusFeatureDecay, UpdateRule
from ..linear.decays import initial_log_rates, initial_step_bias
from ..linear.linear_arguments import LinearOptions
from ..linear.update_rules import RuleTokens
from .linear import Linear
from .output_gate import low_rank
from .projections import Projections, init_xavier
from .token_shift import MixedTokens


class LearnedGates(nn.Module):
    """Base class of layers of linear attention: what a decay and a rule learn, and what they make of tokens.

    Args:
        projections: dims and heads.
        feature_map: φ.
        decay: of `regard.linear`, or None.
        rule: of `regard.linear`.

    Raises:
        ConfigurationError: a decay or a rule that is none; a rule that needs the step of another decay.
        ShapeError: a fixed decay that has not one number for each key head.
    """

    fixed_decay: Tensor | None
    log_decay_rates: nn.Parameter | None
    rule_constants: nn.Parameter | None

    def __init__(
        self, projections: Projections, feature_map: FeatureMap, decay: Decay | None, rule: UpdateRule
    ) -> None:
        super().__init__()
        self.projections = projections
        self.rule = rule
        self._feature_map = feature_map
        self._make_decay(decay)
        self._make_gates(rule)

    def _gates(
        self, mixed: MixedTokens, keys: Tensor, values: Tensor, feature_map: FeatureMap
    ) -> tuple[LinearOptions, RuleTokens]:
        """The decay of the source's tokens as an option, and what the rule reads of them."""
        options, step = self._decay(mixed.decay)
        logits = None if self.beta_gate is None else self._per_head(self.beta_gate(mixed.rule))
        return options, RuleTokens(keys, values, feature_map, logits, self.rule_constants, step, options.get("decay"))

    def _decay(self, source: Tensor) -> tuple[LinearOptions, Tensor | None]:
        """The decay of the source's tokens as an option, and its step Δ where the rule reads it."""
        if self.fixed_decay is not None:
            return {"decay": self.fixed_decay[None, :, None]}, None
        decay = self._learned_decay
        if self.decay_gate is None or decay is None:
            return {}, None
        logits = self._per_head(self.decay_gate(source))
        if not isinstance(decay, SoftplusDecay | SoftplusFeatureDecay):
            return {"decay": decay(logits)}, None
        step = decay.step(logits) if isinstance(decay, SoftplusDecay) and self.rule.needs_step else None
        return {"decay": decay(logits, self.log_decay_rates)}, step  # type: ignore[arg-type]  # there with such a decay

    def _per_head(self, logits: Tensor) -> Tensor:
        """(batch, N, key heads · count) to (batch, key heads, N, count)."""
        return logits.unflatten(-1, (self.projections.num_kv_heads, -1)).transpose(1, 2)

    def _make_decay(self, decay: Decay | None) -> None:
        """Register what a decay needs."""
        heads, dim = self.projections.num_kv_heads, self.projections.dim
        self.decay_gate: nn.Module | None = None
        self._learned_decay = None if isinstance(decay, FixedDecay) else decay
        self.log_decay_rates = None
        if isinstance(decay, FixedDecay):
            self.register_buffer("fixed_decay", _of_heads(decay, heads))
            return
        self.fixed_decay = None
        if decay is not None:
            self.decay_gate = low_rank(dim, heads * decay.gates_per_head(self._features()), decay.rank, bias=True)
            if isinstance(decay, SoftplusDecay | SoftplusFeatureDecay):
                self.log_decay_rates = nn.Parameter(initial_log_rates(heads))
                last = self.decay_gate if decay.rank is None else self.decay_gate[-1]  # type: ignore[index]
                last.bias = nn.Parameter(initial_step_bias(len(last.bias)))  # type: ignore[union-attr, arg-type]

    def _make_gates(self, rule: UpdateRule) -> None:
        """Register what a rule needs.

        Raises:
            ConfigurationError: it needs the step of a decay that the layer has not.
        """
        if rule.needs_step and not isinstance(self._learned_decay, SoftplusDecay):
            raise ConfigurationError(
                f"rule={rule!r} reads the step of a decay: make the layer with decay=regard.linear.SoftplusDecay()"
            )
        heads, features = self.projections.num_kv_heads, self._features()
        count, constants = rule.gates_per_head(features, self.projections.value_dim), rule.initial_constants(features)
        self.beta_gate = _gate(self.projections.dim, heads * count) if count else None
        self.rule_constants = None
        if constants is not None:
            self.rule_constants = nn.Parameter(constants.expand(heads, *constants.shape).clone())

    def _features(self) -> int:
        """The number of features of φ."""
        return self._feature_map(torch.zeros(1, self.projections.head_dim)).shape[-1]


def check_kinds(decay: object, rule: object) -> None:
    """Check that decay and rule are those of `regard.linear`.

    Raises:
        ConfigurationError: one is not, such as a class in place of an object.
    """
    if decay is not None and not isinstance(decay, Decay):
        raise ConfigurationError(
            f"decay is {decay!r}; it needs FixedDecay(logarithms), HeadDecay() or another of regard.linear, or None"
        )
    if not isinstance(rule, UpdateRule):
        raise ConfigurationError(
            f"rule is {rule!r}; it needs SumRule(), DeltaRule() or another of regard.linear, or None"
        )


def _of_heads(decay: FixedDecay, heads: int) -> Tensor:
    """The logarithms of a fixed decay, in memory of the layer's own: loading writes into it.

    Raises:
        ShapeError: they are not one for each of the key heads.
    """
    if len(decay.logarithms) != heads:
        raise ShapeError(f"decay has {len(decay.logarithms)} logarithms; it needs one for each of {heads} key heads")
    return decay.logarithms.detach().clone()


def _gate(dim: int, count: int) -> Linear:
    """The linear map of gates, initialised as projections are."""
    gate = Linear(dim, count)
    init_xavier(gate)
    return gate
