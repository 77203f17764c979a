"""Language models: decoder-only Transformers of Llama's kind, from scratch or from a Hugging Face checkpoint."""

from .config import AlternatingUpdatesConfig as AlternatingUpdatesConfig
from .config import AttentionConfig as AttentionConfig
from .config import DenseAndExpertsConfig as DenseAndExpertsConfig
from .config import ExpertsConfig as ExpertsConfig
from .config import FeedForwardConfig as FeedForwardConfig
from .config import GatedExpertsConfig as GatedExpertsConfig
from .config import GatedFeedForwardConfig as GatedFeedForwardConfig
from .config import GatedInputStreamConfig as GatedInputStreamConfig
from .config import IndexerConfig as IndexerConfig
from .config import LanguageModelConfig as LanguageModelConfig
from .config import LatentAttentionConfig as LatentAttentionConfig
from .config import LayerConfig as LayerConfig
from .config import LayerInputsConfig as LayerInputsConfig
from .config import LayerNormConfig as LayerNormConfig
from .config import LinearAttentionConfig as LinearAttentionConfig
from .config import NormalizerConfig as NormalizerConfig
from .config import RMSNormConfig as RMSNormConfig
from .config import RouterConfig as RouterConfig
from .continuation import Continuation as Continuation
from .continuation import NewToken as NewToken
from .continuation import TokenChances as TokenChances
from .continuous_batch import BatchCounts as BatchCounts
from .continuous_batch import ContinuousBatch as ContinuousBatch
from .drafts import Draft as Draft
from .drafts import DraftModel as DraftModel
from .drafts import PromptLookup as PromptLookup
from .expert_router import ExpertRouter as ExpertRouter
from .expert_router import SigmoidRouter as SigmoidRouter
from .expert_router import SoftmaxRouter as SoftmaxRouter
from .generation import Sampling as Sampling
from .language_model import LanguageModel as LanguageModel
from .language_model import LanguageModelObservation as LanguageModelObservation
from .language_model import next_token_loss as next_token_loss
from .language_model_cache import LanguageModelCache as LanguageModelCache
from .layer_positions import PathPositionsConfig as PathPositionsConfig
from .layer_positions import RelativePositionsConfig as RelativePositionsConfig
from .linear_parts import LinearHeadsConfig as LinearHeadsConfig
from .linear_parts import OutputGateConfig as OutputGateConfig
from .linear_parts import ShortConvolutionConfig as ShortConvolutionConfig
from .linear_parts import TokenShiftConfig as TokenShiftConfig
from .mixture_of_experts import GatedMixtureOfExperts as GatedMixtureOfExperts
from .mixture_of_experts import MixtureOfExperts as MixtureOfExperts
from .paged_model import PagedModel as PagedModel

__all__ = [
    "AlternatingUpdatesConfig",
    "AttentionConfig",
    "BatchCounts",
    "Continuation",
    "ContinuousBatch",
    "DenseAndExpertsConfig",
    "Draft",
    "DraftModel",
    "ExpertRouter",
    "ExpertsConfig",
    "FeedForwardConfig",
    "GatedExpertsConfig",
    "GatedFeedForwardConfig",
    "GatedInputStreamConfig",
    "GatedMixtureOfExperts",
    "IndexerConfig",
    "LanguageModel",
    "LanguageModelCache",
    "LanguageModelConfig",
    "LanguageModelObservation",
    "LatentAttentionConfig",
    "LayerConfig",
    "LayerInputsConfig",
    "LayerNormConfig",
    "LinearAttentionConfig",
    "LinearHeadsConfig",
    "MixtureOfExperts",
    "NewToken",
    "NormalizerConfig",
    "OutputGateConfig",
    "PagedModel",
    "PathPositionsConfig",
    "PromptLookup",
    "RMSNormConfig",
    "RelativePositionsConfig",
    "RouterConfig",
    "Sampling",
    "ShortConvolutionConfig",
    "SigmoidRouter",
    "SoftmaxRouter",
    "TokenChances",
    "TokenShiftConfig",
    "next_token_loss",
]
