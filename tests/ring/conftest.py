"""The processes of a ring, started once for all tests that use them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import MOST, Pool, Program


@pytest.fixture(scope="session")
def program() -> Iterator[Program]:
    with Program() as started:
        yield started


@pytest.fixture(scope="session")
def pool(program, tmp_path_factory) -> Iterator[Pool]:
    with Pool(program, tmp_path_factory.mktemp("ring"), MOST) as started:
        yield started
