"""A mistake on the command line itself, told without loading the library."""

from __future__ import annotations


class CommandError(ValueError):
    """Options or arguments that do not go together, or that cannot be read; the message says what to write instead."""
