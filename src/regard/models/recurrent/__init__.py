"""Recurrent translators: a bidirectional encoder, and the decoders of Bahdanau (2015) and Luong (2015)."""

from .decoders import BahdanauDecoder as BahdanauDecoder
from .decoders import LuongDecoder as LuongDecoder
from .encoder import Encoder as Encoder
from .recurrent_state import Memory as Memory
from .recurrent_state import State as State
from .recurrent_state import Step as Step
from .recurrent_translator import RecurrentTranslator as RecurrentTranslator
from .source_attention import GlobalWindow as GlobalWindow
from .source_attention import MonotonicWindow as MonotonicWindow
from .source_attention import PredictiveWindow as PredictiveWindow

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
