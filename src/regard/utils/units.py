"""Numbers with readable units: bytes, seconds and counts."""

from __future__ import annotations

from collections.abc import Sequence

BINARY_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL_UNITS = ("", "k", "M", "G", "T", "P", "E")
TIME_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def format_bytes(number: float) -> str:
    """A number of bytes with a unit of 1024: three digits.

    >>> format_bytes(1536), format_bytes(12), format_bytes(0)
    ('1.5 KiB', '12 bytes', 'nothing')
    """
    return _scaled(number, 1024, BINARY_UNITS) if number else "nothing"


def format_seconds(seconds: float) -> str:
    """A duration in µs to hours: three digits.

    >>> [format_seconds(each) for each in (7200.0, 90.0, 0.25, 3e-5)]
    ['2 h', '90 s', '250 ms', '30 µs']
    """
    for unit, size in TIME_UNITS[:-1]:
        if seconds >= size * (2 if size > 1 else 1):
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def format_count(number: float) -> str:
    """A count with a unit of 1000, such as floating-point operations: three digits.

    >>> format_count(2.5e9), format_count(12)
    ('2.5 G', '12')
    """
    return _scaled(number, 1000, DECIMAL_UNITS)


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < step - 0.5:
            return f"{_digits(number)} {unit}".rstrip()
        number /= step
    return f"{_digits(number)} {units[-1]}"


def _digits(number: float) -> str:
    """Three digits; all digits before the point of a larger number."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
