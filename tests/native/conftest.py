import os
from collections.abc import Iterator

import pytest

from regard import native
from regard.backends.cpu.library import SETTING


def variants_under_test() -> tuple[str, ...]:
    """Those that run here; the one alone that the environment names, as that of `make test-variant` does."""
    return (native.variant(),) if os.environ.get(SETTING) and native.available() else native.variants()


@pytest.fixture(autouse=True)
def on_two_threads(two_threads: None) -> None:
    """Native code shares its work among threads."""


@pytest.fixture(params=variants_under_test() or [pytest.param("", marks=pytest.mark.skip(str(native.why_not())))])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of `variants_under_test` is in use, one after the other."""
    with native.using(request.param):
        yield request.param


@pytest.fixture
def built() -> None:
    """Skips where there is no native code."""
    if not native.available():
        pytest.skip(str(native.why_not()))
