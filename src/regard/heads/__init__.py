"""What heads do: metrics, roles with their evidence, similarity, flow through layers, ablation, syntax, coreference.

Most of it is lenses, and so holds at any length: `Metrics`, `Roles` and `JensenShannon` are given to `regard.observe`,
to a layer's `observe`, or to `regard.huggingface.observing`. Weights that are there as numbers are looked at by `look`.
"""

from .ablation import ablating as ablating
from .ablation import head_effects as head_effects
from .ablation import head_gradients as head_gradients
from .apply_lenses import look as look
from .coreference import CoreferenceEvidence as CoreferenceEvidence
from .evidence import Evidence as Evidence
from .evidence import Finding as Finding
from .evidence import report as report
from .gradients import Values as Values
from .gradients import catching_gradients as catching_gradients
from .gradients import gradient_times_weights as gradient_times_weights
from .gradients import weight_gradients as weight_gradients
from .metrics import HeadMetrics as HeadMetrics
from .metrics import Metrics as Metrics
from .metrics import head_metrics as head_metrics
from .output_projection import HeadProjection as HeadProjection
from .output_projection import head_projections as head_projections
from .role_lens import Roles as Roles
from .role_lens import evidence_of as evidence_of
from .role_lens import roles_of as roles_of
from .roles import AtOffset as AtOffset
from .roles import Delimiter as Delimiter
from .roles import Diffuse as Diffuse
from .roles import DuplicateToken as DuplicateToken
from .roles import Induction as Induction
from .roles import RareWord as RareWord
from .roles import Role as Role
from .roles import Sink as Sink
from .roles import probe_roles as probe_roles
from .roles import text_roles as text_roles
from .rollout import attention_flow as attention_flow
from .rollout import attention_rollout as attention_rollout
from .rollout import rollout_of as rollout_of
from .similarity import JensenShannon as JensenShannon
from .similarity import head_divergence as head_divergence
from .similarity import similar_order as similar_order
from .syntax import Sentence as Sentence
from .syntax import SyntaxEvidence as SyntaxEvidence
from .syntax import SyntaxTable as SyntaxTable
from .syntax import Tracked as Tracked
from .syntax import parse_conllu as parse_conllu
from .syntax import read_conllu as read_conllu
from .token_classes import Tokens as Tokens
from .token_classes import is_delimiter as is_delimiter
from .token_classes import repeat_probe as repeat_probe
from .value_norms import effective_attention as effective_attention
from .value_norms import norm_weighted as norm_weighted
from .value_norms import transformed_norms as transformed_norms
from .value_norms import transformed_values as transformed_values
from .word_alignment import word_weights as word_weights

__all__ = [
    "AtOffset",
    "CoreferenceEvidence",
    "Delimiter",
    "Diffuse",
    "DuplicateToken",
    "Evidence",
    "Finding",
    "HeadMetrics",
    "HeadProjection",
    "Induction",
    "JensenShannon",
    "Metrics",
    "RareWord",
    "Role",
    "Roles",
    "Sentence",
    "Sink",
    "SyntaxEvidence",
    "SyntaxTable",
    "Tokens",
    "Tracked",
    "Values",
    "ablating",
    "attention_flow",
    "attention_rollout",
    "catching_gradients",
    "effective_attention",
    "evidence_of",
    "gradient_times_weights",
    "head_divergence",
    "head_effects",
    "head_gradients",
    "head_metrics",
    "head_projections",
    "is_delimiter",
    "look",
    "norm_weighted",
    "parse_conllu",
    "probe_roles",
    "read_conllu",
    "repeat_probe",
    "report",
    "roles_of",
    "rollout_of",
    "similar_order",
    "text_roles",
    "transformed_norms",
    "transformed_values",
    "weight_gradients",
    "word_weights",
]
