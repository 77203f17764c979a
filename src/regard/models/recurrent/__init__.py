"""Recurrent translators: a bidirectional encoder, and the decoders of Bahdanau (2015) and Luong (2015)."""

from .decoders import BahdanauDecoder as BahdanauDecoder
from .decoders import LuongDecoder as LuongDecoder
from .encoder import BidirectionalEncoder as BidirectionalEncoder
from .encoder import LastStates as LastStates
from .pointer import PointerGenerator as PointerGenerator
from .recurrent_state import ObservedRecurrentStep as ObservedRecurrentStep
from .recurrent_state import RecurrentMemory as RecurrentMemory
from .recurrent_state import RecurrentState as RecurrentState
from .recurrent_state import RecurrentStep as RecurrentStep
from .recurrent_translator import RecurrentTranslator as RecurrentTranslator
from .recurrent_translator import copies_words as copies_words
from .source_attention import Covered as Covered
from .source_attention import Fertility as Fertility
from .source_attention import GlobalWindow as GlobalWindow
from .source_attention import MonotonicWindow as MonotonicWindow
from .source_attention import PredictiveWindow as PredictiveWindow
from .source_attention import RecurrentCoverage as RecurrentCoverage
from .source_attention import SourceCoverage as SourceCoverage

__all__ = [
    "BahdanauDecoder",
    "BidirectionalEncoder",
    "Covered",
    "Fertility",
    "GlobalWindow",
    "LastStates",
    "LuongDecoder",
    "MonotonicWindow",
    "ObservedRecurrentStep",
    "PointerGenerator",
    "PredictiveWindow",
    "RecurrentCoverage",
    "RecurrentMemory",
    "RecurrentState",
    "RecurrentStep",
    "RecurrentTranslator",
    "SourceCoverage",
    "copies_words",
]
