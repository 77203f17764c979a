"""Positions: what tells attention where each query and key stands, added to the input or turning queries and keys."""

from .by_parts import Llama3 as Llama3
from .by_parts import YaRN as YaRN
from .by_parts import yarn_attention_factor as yarn_attention_factor
from .learned import Learned as Learned
from .rotary import Rotary as Rotary
from .rotary import Rotation as Rotation
from .scaling import NTK as NTK
from .scaling import DynamicNTK as DynamicNTK
from .scaling import Linear as Linear
from .scaling import LongRoPE as LongRoPE
from .scaling import Scaling as Scaling
from .sinusoidal import Sinusoidal as Sinusoidal
from .sinusoidal import Tensor2TensorSinusoidal as Tensor2TensorSinusoidal

__all__ = [
    "NTK",
    "DynamicNTK",
    "Learned",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Rotary",
    "Rotation",
    "Scaling",
    "Sinusoidal",
    "Tensor2TensorSinusoidal",
    "YaRN",
    "yarn_attention_factor",
]
