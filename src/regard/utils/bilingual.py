"""Texts in English and in Korean."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from ..errors import ConfigurationError, nearest

Language = Literal["en", "ko"]


class Wording(NamedTuple):
    """One text in English and in Korean; a text without a Korean form is the same in both."""

    en: str
    ko: str = ""

    def text(self, language: str) -> str:
        """The text in "en" or "ko"."""
        return self.ko or self.en if language == "ko" else self.en


def check_language(language: str) -> None:
    """Raise an error for a language without wording.

    Raises:
        ConfigurationError: the language is neither "en" nor "ko".
    """
    if language not in get_args(Language):
        raise ConfigurationError(f"language is {language!r}; {nearest(language, get_args(Language))}")
