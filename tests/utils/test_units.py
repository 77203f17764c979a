"""Numbers with readable units."""

import pytest

from regard.utils.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "nothing"),
        (1, "1 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**60, "1,024 PiB"),
    ],
)
def test_bytes(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7200, "2 h"),
        (7199, "120 min"),
        (119, "119 s"),
        (1, "1 s"),
        (0.9996, "1,000 ms"),
        (2e-3, "2 ms"),
        (4.5e-8, "0.045 µs"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1e3, "1 k"), (2.5e12, "2.5 T"), (3e21, "3,000 E")]
)
def test_counts(number, text):
    assert format_count(number) == text
