"""Models built on attention: translators that are trained, searched and saved by the same machinery."""

from .recurrent import RecurrentTranslator as RecurrentTranslator

__all__ = ["RecurrentTranslator"]
