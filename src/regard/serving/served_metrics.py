"""Counts of a server, in Prometheus' form of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

BOUNDS = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds of requests that are counted together."""


class ServedMetrics:
    """Requests by path and status, how long they took, and how many are computed now.

    >>> metrics = ServedMetrics()
    >>> metrics.add("/translate", 200, 0.2)
    >>> print(metrics.text({"regard_queue": 3}).splitlines()[2])
    regard_requests_total{path="/translate",status="200"} 1
    """

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[float] = Counter()
        self._seconds, self.running = 0.0, 0

    def add(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._requests[path, status] += 1
        self._seconds += seconds
        for bound in BOUNDS:
            self._buckets[bound] += seconds <= bound

    def text(self, others: Mapping[str, float]) -> str:
        """All counts; `others` are more of them by their names, which end in _total where they only grow."""
        return "\n".join(self._lines(others)) + "\n"

    def _lines(self, others: Mapping[str, float]) -> Iterator[str]:
        yield "# HELP regard_requests_total Requests that have ended, by path and status."
        yield "# TYPE regard_requests_total counter"
        for (path, status), count in sorted(self._requests.items()):
            yield f'regard_requests_total{{path="{path}",status="{status}"}} {count}'
        yield "# HELP regard_request_seconds How long requests took."
        yield "# TYPE regard_request_seconds histogram"
        for bound in BOUNDS:
            yield f'regard_request_seconds_bucket{{le="{bound:g}"}} {self._buckets[bound]}'
        total = sum(self._requests.values())
        yield f'regard_request_seconds_bucket{{le="+Inf"}} {total}'
        yield f"regard_request_seconds_sum {self._seconds:.6f}"
        yield f"regard_request_seconds_count {total}"
        for name, value in {"regard_requests_running": self.running, **others}.items():
            yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
            yield f"{name} {value:g}"
