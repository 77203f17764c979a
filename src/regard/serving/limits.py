"""What a server takes at most."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigurationError
from ..utils.numbers import whole_number


@dataclass(frozen=True)
class ServingLimits:
    """What a server takes at most; it refuses more with 413, 429 or 503.

    Args:
        body: bytes of a request, else 413.
        tokens: new tokens of an answer, and `prompt` tokens of a text before it, else 413; of a translation the
            characters of all lines.
        queue: requests that wait or are computed, else 429.
        seconds: of a request, from its arrival to its end, else 503; an answer that streams ends with an error then.

    Raises:
        ConfigurationError: a number that is none of these.
    """

    body: int = 2**20
    prompt: int = 32_768
    tokens: int = 4096
    queue: int = 256
    seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("body", "prompt", "tokens", "queue"):
            whole_number(name, getattr(self, name))
        if not 0 < self.seconds < float("inf"):
            raise ConfigurationError(f"seconds is {self.seconds}; a limit of time needs a number above 0")
