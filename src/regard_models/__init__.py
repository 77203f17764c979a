"""Trained translators for `regard demo`, `regard translate`, `regard explore --translate` and `regard steps`.

english_french and english_french_longer are small Transformers, korean_english two recurrent translators; the README.md
of each tells what it learned from, how good it is, and what it is not for. `regard.translation.Translator.load` takes
each folder.
"""

from __future__ import annotations

__version__ = "0.1.0"
