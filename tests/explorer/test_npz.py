"""What the page saves for NumPy; its own tests write this file to the byte."""

from pathlib import Path

import numpy as np

ARRAYS = Path(__file__).parents[2] / "explorer" / "test" / "arrays.npz"


def test_numpy_reads_what_the_page_saves():
    with np.load(ARRAYS, allow_pickle=False) as found:
        np.testing.assert_array_equal(found["weights"], np.array([[0.5, 0.25, np.nan], [1, 0, 2**-30]], np.float32))
        assert found["queries"].tolist() == [70_000, 70_001]
        assert found["keys"].tolist() == [0, 1, -1]
        assert found["query_tokens"].tolist() == ["été", "𝒜b"]
        assert found["key_tokens"].tolist() == ["", "a", "x" * 200]
        assert found["nothing"].shape == (0,)
