"""Language models: decoder-only Transformers of Llama's kind, from scratch or from a Hugging Face checkpoint."""

from .config import AttentionConfig as AttentionConfig
from .config import ExpertsConfig as ExpertsConfig
from .config import FeedForwardConfig as FeedForwardConfig
from .config import GatedExpertsConfig as GatedExpertsConfig
from .config import GatedFeedForwardConfig as GatedFeedForwardConfig
from .config import LanguageModelConfig as LanguageModelConfig
from .config import LayerConfig as LayerConfig
from .config import LayerNormConfig as LayerNormConfig
from .config import LinearAttentionConfig as LinearAttentionConfig
from .config import NormalizerConfig as NormalizerConfig
from .config import RMSNormConfig as RMSNormConfig
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
    "AttentionConfig",
    "ExpertsConfig",
    "FeedForwardConfig",
    "GatedExpertsConfig",
    "GatedFeedForwardConfig",
    "GatedMixtureOfExperts",
    "LanguageModel",
    "LanguageModelCache",
    "LanguageModelConfig",
    "LanguageModelObservation",
    "LayerConfig",
    "LayerNormConfig",
    "LinearAttentionConfig",
    "LinearHeadsConfig",
    "MixtureOfExperts",
    "NormalizerConfig",
    "OutputGateConfig",
    "RMSNormConfig",
    "Sampling",
    "ShortConvolutionConfig",
    "TokenShiftConfig",
    "next_token_loss",
]
