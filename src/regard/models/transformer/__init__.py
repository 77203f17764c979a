"""The Transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to it."""

from .embedding import Embedding as Embedding
from .embedding import TiedOutput as TiedOutput
from .encoder_decoder import Decoder as Decoder
from .encoder_decoder import Encoder as Encoder
from .transformer import Transformer as Transformer
from .transformer_state import Memory as Memory
from .transformer_state import SeenStep as SeenStep
from .transformer_state import SeenTransformer as SeenTransformer
from .transformer_state import State as State
from .transformer_state import Step as Step

__all__ = [
    "Decoder",
    "Embedding",
    "Encoder",
    "Memory",
    "SeenStep",
    "SeenTransformer",
    "State",
    "Step",
    "TiedOutput",
    "Transformer",
]
