"""Under autocast the inputs are cast as by torch, and sums stay in float32."""

import math

import pytest
import torch

import regard
from regard import masks, scores

KERNELS = ["reference", "sdpa"]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def whole(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two batches and three heads."""
    return rand(2, 3, m, 11), rand(2, 3, n, 11), rand(2, 3, n, 13)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_cast_as_by_torch(kernel):
    query, key, value = whole()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = regard.attention(query, key, value, mask=masks.causal(), kernel=kernel)
    assert output.dtype == torch.bfloat16
    expected = regard.attention(query, key, value, mask=masks.causal())
    torch.testing.assert_close(output.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    "score",
    [scores.General(11, 11), scores.Additive(11, 11, 5), scores.Concat(11, 11, 5), scores.Location(11, 9)],
    ids=lambda score: type(score).__name__,
)
def test_scores_train_under_autocast(score):
    query, key, value = whole()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = regard.attention(query, key, value, score=score)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in score.parameters())


def test_sums_stay_in_float32():
    # 4096 keys of weight 1/4096: in bfloat16 the sum of the exponentials stops at 256.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, lse = regard.attention_with_lse(torch.zeros(1, 8), torch.zeros(4096, 8), torch.ones(4096, 1))
    assert lse.dtype == torch.float32
    close(lse, torch.tensor([math.log(4096)]))
    close(output.float(), torch.ones(1, 1))


def test_mixed_dtypes_are_welcome():
    query, key, value = whole()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.attention(query, key.bfloat16(), value).dtype == torch.bfloat16


def test_float64_stays():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regard.attention(*(tensor.double() for tensor in whole())).dtype == torch.float64
