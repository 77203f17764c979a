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
from .expert_router import ExpertRouter as ExpertRouter
from .expert_router import SigmoidRouter as SigmoidRouter
from .expert_router import SoftmaxRouter as SoftmaxRouter
from .generation import Sampling as Sampling
from .language_model import LanguageModel as LanguageModel
from .language_model import LanguageModelObservation as LanguageModelObservation
from .language_model import next_token_loss as next_token_loss
from .language_model_cache import LanguageModelCache as LanguageModelCache
from .linear_parts import LinearHeadsConfig as LinearHeadsConfig
from .linear_parts import OutputGateConfig as OutputGateConfig
from .linear_parts import ShortConvolutionConfig as ShortConvolutionConfig
from .linear_parts import TokenShiftConfig as TokenShiftConfig
from .mixture_of_experts import GatedMixtureOfExperts as GatedMixtureOfExperts
from .mixture_of_experts import MixtureOfExperts as MixtureOfExperts

__all__ = [
    "AlternatingUpdatesConfig",
    "AttentionConfig",
    "DenseAndExpertsConfig",
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
    "NormalizerConfig",
    "OutputGateConfig",
    "RMSNormConfig",
    "RouterConfig",
    "Sampling",
    "ShortConvolutionConfig",
    "SigmoidRouter",
    "SoftmaxRouter",
    "TokenShiftConfig",
    "next_token_loss",
]
