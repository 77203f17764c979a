"""Position embeddings: absolute (sinusoidal, learned), rotary (RoPE), and RoPE scalings for longer contexts."""

from .absolute import Learned as Learned
from .absolute import Sinusoidal as Sinusoidal
from .absolute import SplitSinusoidal as SplitSinusoidal
from .absolute import Tensor2TensorSinusoidal as Tensor2TensorSinusoidal
from .frequencies import NTK as NTK
from .frequencies import DynamicNTK as DynamicNTK
from .frequencies import LinearScaling as LinearScaling
from .frequencies import Llama3 as Llama3
from .frequencies import LongRoPE as LongRoPE
from .frequencies import Proportional as Proportional
from .frequencies import Scaling as Scaling
from .frequencies import YaRN as YaRN
from .frequencies import yarn_attention_factor as yarn_attention_factor
from .rotary import Rotary as Rotary
from .rotary import Rotation as Rotation
from .sections import Axial as Axial
from .sections import InterleavedSections as InterleavedSections
from .sections import RotarySections as RotarySections
from .sections import Sections as Sections

__all__ = [
    "NTK",
    "Axial",
    "DynamicNTK",
    "InterleavedSections",
    "Learned",
    "LinearScaling",
    "Llama3",
    "LongRoPE",
    "Proportional",
    "Rotary",
    "RotarySections",
    "Rotation",
    "Scaling",
    "Sections",
    "Sinusoidal",
    "SplitSinusoidal",
    "Tensor2TensorSinusoidal",
    "YaRN",
    "yarn_attention_factor",
]
