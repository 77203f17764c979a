"""Arguments by which earlier versions of `LinearAttention` were given a decay and a rule, to be deleted with the next.

Each is read as the object that took its place, with a FutureWarning that names it.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from ..errors import ConfigurationError
from ..linear import Decay, DeltaRule, FeatureDecay, FixedDecay, HeadDecay, SumRule, UpdateRule


def decay_of_flag(decay: Decay | Tensor | str | None) -> Decay | None:
    """The object in place of a tensor, "head" or "feature"; anything else as it is."""
    if isinstance(decay, Tensor):
        _warn("a tensor as decay", "decay=regard.linear.FixedDecay(logarithms)")
        return FixedDecay(decay)
    if decay == "head":
        _warn("decay='head'", "decay=regard.linear.HeadDecay()")
        return HeadDecay()
    if decay == "feature":
        _warn("decay='feature'", "decay=regard.linear.FeatureDecay()")
        return FeatureDecay()
    return decay  # type: ignore[return-value]


def rule_of_flags(rule: UpdateRule | None, delta_rule: bool | None, normalize: bool | None) -> UpdateRule:
    """The rule in place of the flags; without them the rule as it is, `SumRule()` by default.

    Raises:
        ConfigurationError: a rule and a flag, or weights of the delta rule that are to be normalised.
    """
    flags = {"delta_rule": delta_rule, "normalize": normalize}
    given = [f"{name}={flag!r}" for name, flag in flags.items() if flag is not None]
    if not given:
        return SumRule() if rule is None else rule
    if rule is not None:
        raise ConfigurationError(f"rule={rule!r} takes the place of {' and '.join(given)}: pass the rule alone")
    if delta_rule and normalize:
        raise ConfigurationError("the weights of the delta rule have no sum to divide by: leave normalize out")
    rule = DeltaRule() if delta_rule else SumRule(normalize is not False)
    _warn(" and ".join(given), f"rule=regard.linear.{rule!r}")
    return rule


def _warn(old: str, new: str) -> None:
    """Warn whoever makes a layer."""
    warnings.warn(
        f"{old} of regard.nn.LinearAttention is an older form, which this version is the last to read: pass {new}",
        FutureWarning,
        stacklevel=4,
    )
