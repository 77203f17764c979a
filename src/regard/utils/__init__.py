"""Atomic files, pytrees, and checks of numbers: what is not about attention."""
