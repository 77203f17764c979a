"""The Transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to it."""

from .encoder_decoder import Decoder as Decoder
from .encoder_decoder import Embedding as Embedding
from .encoder_decoder import Encoder as Encoder
from .encoder_decoder import TiedOutput as TiedOutput
from .transformer import ObservedTransformerStep as ObservedTransformerStep
from .transformer import Transformer as Transformer
from .transformer import TransformerObservation as TransformerObservation
from .transformer import TransformerStep as TransformerStep
from .transformer_state import TransformerMemory as TransformerMemory
from .transformer_state import TransformerState as TransformerState

__all__ = [
    "Decoder",
    "Embedding",
    "Encoder",
    "ObservedTransformerStep",
    "TiedOutput",
    "Transformer",
    "TransformerMemory",
    "TransformerObservation",
    "TransformerState",
    "TransformerStep",
]
