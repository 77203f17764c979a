"""The processes of a ring, started once for all tests that use them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import MOST, Pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("ring"), MOST) as started:
        yield started
