from collections.abc import Iterator

import pytest

from regard import native


@pytest.fixture(autouse=True)
def on_two_threads(two_threads: None) -> None:
    """Native code shares its work among threads."""


@pytest.fixture(params=native.variants() or [pytest.param("", marks=pytest.mark.skip(str(native.why_not())))])
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each variant of the native code that runs here is in use, one after the other."""
    with native.using(request.param):
        yield request.param


@pytest.fixture
def built() -> None:
    """Skips where there is no native code."""
    if not native.available():
        pytest.skip(str(native.why_not()))
