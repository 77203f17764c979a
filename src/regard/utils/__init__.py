"""Utilities: atomic files, safetensors files, dataclasses as JSON, pytrees, checks of numbers."""
