"""The planted files are read and run by tests, and are none themselves; tests import the modules beside them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["planted", "planted_blind", "planted_fresh", "planted_pairs"]


@pytest.fixture
def own_registrations() -> Iterator[None]:
    """Attention functions that a file registers with transformers are there for its test alone."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        yield
        return
    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [dict(table) for table in tables]
    yield
    for table, earlier in zip(tables, before, strict=True):
        table.clear()
        table.update(earlier)
