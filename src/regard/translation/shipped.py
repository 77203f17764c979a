"""The translator that regard is installed with: no training, no network."""

from __future__ import annotations

from pathlib import Path

ENGLISH_FRENCH = Path(__file__).parent / "english_french"
"""A small Transformer for everyday sentences, exported from `recipes/tatoeba-english-french.yaml`: a folder for
`Translator.load`. Its README.md tells what it learned from, how good it is, and what it is not for."""

LANGUAGES = ("English", "French")
"""From and to."""
