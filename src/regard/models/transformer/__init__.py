"""The Transformer of Vaswani et al. (2017): an encoder, and a decoder that attends to it."""

from .embedding import Embedding as Embedding
from .embedding import TiedOutput as TiedOutput
from .memory import Memory as Memory
from .memory import SeenStep as SeenStep
from .memory import SeenTransformer as SeenTransformer
from .memory import State as State
from .memory import Step as Step
from .model import Transformer as Transformer
from .stacks import Decoder as Decoder
from .stacks import Encoder as Encoder

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
