"""Position embeddings: absolute (sinusoidal, learned), rotary (RoPE), and RoPE scalings for longer contexts."""

from .absolute import Learned as Learned
from .absolute import Sinusoidal as Sinusoidal
from .absolute import Tensor2TensorSinusoidal as Tensor2TensorSinusoidal
from .rotary import Rotary as Rotary
from .rotary import Rotation as Rotation
from .scaling import NTK as NTK
from .scaling import DynamicNTK as DynamicNTK
from .scaling import LinearScaling as LinearScaling
from .scaling import Llama3 as Llama3
from .scaling import LongRoPE as LongRoPE
from .scaling import Scaling as Scaling
from .scaling import YaRN as YaRN
from .scaling import yarn_attention_factor as yarn_attention_factor

__all__ = [
    "NTK",
    "DynamicNTK",
    "Learned",
    "LinearScaling",
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
