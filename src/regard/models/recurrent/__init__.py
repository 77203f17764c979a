"""Recurrent translators: a bidirectional encoder, and the decoders of Bahdanau (2015) and Luong (2015)."""

from .bahdanau import BahdanauDecoder as BahdanauDecoder
from .encoder import Encoder as Encoder
from .luong import LuongDecoder as LuongDecoder
from .memory import Memory as Memory
from .memory import State as State
from .memory import Step as Step
from .translator import RecurrentTranslator as RecurrentTranslator
from .windows import GlobalWindow as GlobalWindow
from .windows import MonotonicWindow as MonotonicWindow
from .windows import PredictiveWindow as PredictiveWindow

__all__ = [
    "BahdanauDecoder",
    "Encoder",
    "GlobalWindow",
    "LuongDecoder",
    "Memory",
    "MonotonicWindow",
    "PredictiveWindow",
    "RecurrentTranslator",
    "State",
    "Step",
]
