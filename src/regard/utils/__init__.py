"""Utilities: atomic files, pytrees, checks of numbers."""
