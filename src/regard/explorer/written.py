"""Arrays written into a page as text: compressed, in half precision, as `explorer/src/sources/arrays.ts` reads them."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

DIGITS = 8
"""Binary digits of a weight that are written, of the 11 that half precision has: to within 0.4 % of it."""

GZIP = 31
"""For zlib: in the frame of gzip, without a time in it."""


def written(values: Floats, digits: int = DIGITS) -> dict[str, Any]:
    """Numbers as text: half precision with that many binary digits, through gzip, in base64.

    Digits that are not written compress away. A number v is off by at most |v| · 2^-digits, or
    2^-(14 + digits) where that is more: 2.4e-7 with 8. NaN stays.
    What half precision cannot hold, above 65504, is written in single precision.

    >>> import numpy
    >>> sorted(written(numpy.ones((2, 2), numpy.float32)).items())[1:]
    [('gzip', True), ('type', 'f2')]
    """
    finite = values[np.isfinite(values)]
    if finite.size and float(np.abs(finite).max()) > 65504:
        return _text("f4", values.astype("<f4").tobytes())
    return _text("f2", rounded(values, digits).astype("<f2").tobytes())


def rounded(values: Floats, digits: int = DIGITS) -> NDArray[np.float16]:
    """The nearest numbers of half precision with so many binary digits.

    >>> import numpy
    >>> rounded(numpy.array([1.0, 1 / 3, 0.0], numpy.float32), 3).tolist()
    [1.0, 0.3125, 0.0]
    """
    dropped = 24 - digits
    singles = np.ascontiguousarray(values, dtype=np.float32)
    bits = singles.view(np.uint32).astype(np.uint64)
    # To the nearest, ties to even; a carry goes on into the exponent, as it should.
    half_up = bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    kept = (half_up >> dropped << dropped).astype(np.uint32).view(np.float32)
    step = 2.0 ** (-13 - digits)  # of what is smaller than the smallest normal number of half precision, 2^-14
    kept = np.where(np.abs(singles) < 2.0**-14, np.rint(singles / step) * step, kept)
    return np.where(np.isfinite(singles), kept, singles).astype(np.float16)


def _text(kind: str, data: bytes) -> dict[str, Any]:
    # Digits repeat by chance alone, so that what matches for a few bytes is no gain.
    packer = zlib.compressobj(9, zlib.DEFLATED, GZIP, 9, zlib.Z_FILTERED)
    packed = packer.compress(data) + packer.flush()
    return {"type": kind, "gzip": True, "data": base64.b64encode(packed).decode("ascii")}
