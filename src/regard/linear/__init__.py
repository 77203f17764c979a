"""Linear attention: time and memory linear in the length, by feature maps of queries and keys."""

from .corrected_values import delta_former as delta_former
from .decays import Decay as Decay
from .decays import FeatureDecay as FeatureDecay
from .decays import FixedDecay as FixedDecay
from .decays import HeadDecay as HeadDecay
from .decays import SigmoidFeatureDecay as SigmoidFeatureDecay
from .decays import SoftplusDecay as SoftplusDecay
from .decays import SoftplusFeatureDecay as SoftplusFeatureDecay
from .delta_product import delta_product as delta_product
from .delta_product import delta_product_with_state as delta_product_with_state
from .diagonal_state_space import diagonal_state_space as diagonal_state_space
from .diagonal_state_space import diagonal_state_space_with_state as diagonal_state_space_with_state
from .feature_maps import Elu as Elu
from .feature_maps import FavorPlus as FavorPlus
from .feature_maps import FeatureMap as FeatureMap
from .feature_maps import Identity as Identity
from .feature_maps import Relu as Relu
from .feature_maps import Softmax as Softmax
from .feature_maps import UnitNorm as UnitNorm
from .fenwick_states import log_linear_attention as log_linear_attention
from .generalized_delta_rule import GeneralizedDeltaRule as GeneralizedDeltaRule
from .linear_attention import linear_attention as linear_attention
from .linear_attention import linear_attention_with_state as linear_attention_with_state
from .linear_state import LinearState as LinearState
from .linear_weights import linear_attention_weights as linear_attention_weights
from .linear_weights import observe_linear_attention as observe_linear_attention
from .momentum_memory import MomentumState as MomentumState
from .momentum_memory import titans_attention as titans_attention
from .momentum_memory import titans_attention_with_state as titans_attention_with_state
from .ridge_regression import mesa_attention as mesa_attention
from .slot_memory import running_softmax as running_softmax
from .slot_memory import slot_attention as slot_attention
from .state_space import selective_scan as selective_scan
from .state_space import selective_scan_with_state as selective_scan_with_state
from .trained_state import ttt_attention as ttt_attention
from .trapezoidal_rule import trapezoidal_attention as trapezoidal_attention
from .update_rules import BonusRule as BonusRule
from .update_rules import DecoupledDeltaRule as DecoupledDeltaRule
from .update_rules import DeltaRule as DeltaRule
from .update_rules import StateSpaceRule as StateSpaceRule
from .update_rules import SumRule as SumRule
from .update_rules import UpdateRule as UpdateRule

__all__ = [
    "BonusRule",
    "Decay",
    "DecoupledDeltaRule",
    "DeltaRule",
    "Elu",
    "FavorPlus",
    "FeatureDecay",
    "FeatureMap",
    "FixedDecay",
    "GeneralizedDeltaRule",
    "HeadDecay",
    "Identity",
    "LinearState",
    "MomentumState",
    "Relu",
    "SigmoidFeatureDecay",
    "Softmax",
    "SoftplusDecay",
    "SoftplusFeatureDecay",
    "StateSpaceRule",
    "SumRule",
    "UnitNorm",
    "UpdateRule",
    "delta_former",
    "delta_product",
    "delta_product_with_state",
    "diagonal_state_space",
    "diagonal_state_space_with_state",
    "linear_attention",
    "linear_attention_weights",
    "linear_attention_with_state",
    "log_linear_attention",
    "mesa_attention",
    "observe_linear_attention",
    "running_softmax",
    "selective_scan",
    "selective_scan_with_state",
    "slot_attention",
    "titans_attention",
    "titans_attention_with_state",
    "trapezoidal_attention",
    "ttt_attention",
]
