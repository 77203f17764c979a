"""Analysis of attention heads: roles, metrics, similarity, ablation, rollout, word alignment and syntax.

- `Metrics`, `Roles` and `JensenShannon` are lenses, for texts of any length: pass them to `regard.observe`, a layer's
  `observe`, or `regard.huggingface.observing`. `observe_weights` applies lenses to a tensor of weights.
- All layers together: `attention_rollout`, `attention_flow`. What weights carry: `norm_weighted`, gradients, ablation.
- Against annotated text, from weights between words (`word_weights`): `SyntaxEvidence` and `CoreferenceEvidence` for
  whole treebanks and texts; `RelationEvidence`, with intervals, for the relations that textbooks name
  (`english_relations`, `korean_relations`, `repeated_nouns`); word
  alignments of translations and their error rate (`word_links`, `mutual_links`, `alignment_error_rate`).
"""

from ..lenses.value_norms import transformed_norms as transformed_norms
from .ablation import ablating as ablating
from .ablation import head_effects as head_effects
from .ablation import head_gradients as head_gradients
from .ablation import mean_outputs as mean_outputs
from .attention_edits import editing as editing
from .attention_edits import mean_values as mean_values
from .dense_weights import observe_weights as observe_weights
from .gradients import Values as Values
from .gradients import capturing_gradients as capturing_gradients
from .gradients import gradient_times_weights as gradient_times_weights
from .gradients import weight_gradients as weight_gradients
from .interventions import Effect as Effect
from .interventions import Interventions as Interventions
from .interventions import NextTokenEffect as NextTokenEffect
from .interventions import StateEffect as StateEffect
from .interventions import effect_table as effect_table
from .interventions import next_token_effects as next_token_effects
from .interventions import ranked_effects as ranked_effects
from .interventions import state_effects as state_effects
from .linguistics import CoreferenceEvidence as CoreferenceEvidence
from .linguistics import RelationAccuracy as RelationAccuracy
from .linguistics import Sentence as Sentence
from .linguistics import SyntaxEvidence as SyntaxEvidence
from .linguistics import SyntaxTable as SyntaxTable
from .linguistics import parse_conllu as parse_conllu
from .linguistics import read_conllu as read_conllu
from .metrics import HeadMetrics as HeadMetrics
from .metrics import Metrics as Metrics
from .metrics import head_metrics as head_metrics
from .output_projection import HeadProjection as HeadProjection
from .output_projection import effective_attention as effective_attention
from .output_projection import head_projections as head_projections
from .output_projection import norm_weighted as norm_weighted
from .output_projection import transformed_values as transformed_values
from .relation_evidence import RelationEvidence as RelationEvidence
from .relation_evidence import RelationScore as RelationScore
from .relations import Negation as Negation
from .relations import RelationCase as RelationCase
from .relations import WordRelation as WordRelation
from .relations import english_negations as english_negations
from .relations import english_relations as english_relations
from .relations import korean_negations as korean_negations
from .relations import korean_relations as korean_relations
from .relations import repeated_nouns as repeated_nouns
from .replacements import Patch as Patch
from .replacements import capture_patch as capture_patch
from .role_lens import Roles as Roles
from .role_lens import find_roles as find_roles
from .role_lens import gather_role_evidence as gather_role_evidence
from .roles import AtOffset as AtOffset
from .roles import Delimiter as Delimiter
from .roles import Diffuse as Diffuse
from .roles import DuplicateToken as DuplicateToken
from .roles import Finding as Finding
from .roles import Induction as Induction
from .roles import RareWord as RareWord
from .roles import Role as Role
from .roles import RoleEvidence as RoleEvidence
from .roles import Sink as Sink
from .roles import probe_roles as probe_roles
from .roles import report as report
from .roles import text_roles as text_roles
from .rollout import attention_flow as attention_flow
from .rollout import attention_rollout as attention_rollout
from .rollout import rollout_from_sources as rollout_from_sources
from .similarity import JensenShannon as JensenShannon
from .similarity import head_divergence as head_divergence
from .similarity import similarity_order as similarity_order
from .terms import HeadTerms as HeadTerms
from .token_alignment import TokenAlignment as TokenAlignment
from .token_alignment import align_tokens as align_tokens
from .token_classes import Tokens as Tokens
from .token_classes import is_delimiter as is_delimiter
from .token_classes import repeat_probe as repeat_probe
from .word_alignment import SentenceLinks as SentenceLinks
from .word_alignment import alignment_error_rate as alignment_error_rate
from .word_alignment import diagonal_links as diagonal_links
from .word_alignment import format_pharaoh as format_pharaoh
from .word_alignment import mutual_links as mutual_links
from .word_alignment import parse_pharaoh as parse_pharaoh
from .word_alignment import word_links as word_links
from .word_alignment import word_weights as word_weights

__all__ = [
    "AtOffset",
    "CoreferenceEvidence",
    "Delimiter",
    "Diffuse",
    "DuplicateToken",
    "Effect",
    "Finding",
    "HeadMetrics",
    "HeadProjection",
    "HeadTerms",
    "Induction",
    "Interventions",
    "JensenShannon",
    "Metrics",
    "Negation",
    "NextTokenEffect",
    "Patch",
    "RareWord",
    "RelationAccuracy",
    "RelationCase",
    "RelationEvidence",
    "RelationScore",
    "Role",
    "RoleEvidence",
    "Roles",
    "Sentence",
    "SentenceLinks",
    "Sink",
    "StateEffect",
    "SyntaxEvidence",
    "SyntaxTable",
    "TokenAlignment",
    "Tokens",
    "Values",
    "WordRelation",
    "ablating",
    "align_tokens",
    "alignment_error_rate",
    "attention_flow",
    "attention_rollout",
    "capture_patch",
    "capturing_gradients",
    "diagonal_links",
    "editing",
    "effect_table",
    "effective_attention",
    "english_negations",
    "english_relations",
    "find_roles",
    "format_pharaoh",
    "gather_role_evidence",
    "gradient_times_weights",
    "head_divergence",
    "head_effects",
    "head_gradients",
    "head_metrics",
    "head_projections",
    "is_delimiter",
    "korean_negations",
    "korean_relations",
    "mean_outputs",
    "mean_values",
    "mutual_links",
    "next_token_effects",
    "norm_weighted",
    "observe_weights",
    "parse_conllu",
    "parse_pharaoh",
    "probe_roles",
    "ranked_effects",
    "read_conllu",
    "repeat_probe",
    "repeated_nouns",
    "report",
    "rollout_from_sources",
    "similarity_order",
    "state_effects",
    "text_roles",
    "transformed_values",
    "weight_gradients",
    "word_links",
    "word_weights",
]
