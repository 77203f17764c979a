"""Models built on attention: translators that share training, search and files, and language models."""

from .language_model import LanguageModel as LanguageModel
from .recurrent import RecurrentTranslator as RecurrentTranslator
from .transformer import Transformer as Transformer

__all__ = ["LanguageModel", "RecurrentTranslator", "Transformer"]
