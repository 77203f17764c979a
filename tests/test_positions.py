"""Positions are data: keys sit at 0..N-1, queries at the last M of these, unless the call says otherwise."""

import math

import pytest
import torch

import regard
from regard import masks

KERNELS = ["reference", "sdpa"]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def whole(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two batches and three heads."""
    return rand(2, 3, m, 11), rand(2, 3, n, 11), rand(2, 3, n, 13)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
class TestPositions:
    def rows(self, kernel: str, m: int, n: int, **options) -> list[list[int]]:
        """For each query the keys that it attends to, read off the output with one-hot values."""
        query, key = rand(1, 2, m, 4), rand(1, 2, n, 4)
        value = torch.eye(n).expand(1, 2, n, n)
        output = regard.attention(query, key, value, kernel=kernel, **options)
        return [row.nonzero().flatten().tolist() for row in output[0, 1]]

    def test_equal_lengths(self, kernel):
        assert self.rows(kernel, 3, 3, mask=masks.causal()) == [[0], [0, 1], [0, 1, 2]]

    def test_fewer_queries_than_keys_sit_at_the_end(self, kernel):
        assert self.rows(kernel, 2, 4, mask=masks.causal()) == [[0, 1, 2], [0, 1, 2, 3]]

    def test_one_query_after_a_cache_sees_all(self, kernel):
        assert self.rows(kernel, 1, 5, mask=masks.causal()) == [[0, 1, 2, 3, 4]]

    def test_more_queries_than_keys_leave_the_first_without(self, kernel):
        assert self.rows(kernel, 4, 2, mask=masks.causal()) == [[], [], [0], [0, 1]]

    def test_queries_at_the_start(self, kernel):
        assert self.rows(kernel, 2, 4, mask=masks.causal(), query_positions=torch.arange(2)) == [[0], [0, 1]]

    def test_square_with_positions_is_not_torch_causal(self, kernel):
        query_positions = torch.tensor([2, 0, 1])
        assert self.rows(kernel, 3, 3, mask=masks.causal(), query_positions=query_positions) == [
            [0, 1, 2],
            [0],
            [0, 1],
        ]

    def test_keys_of_a_shard(self, kernel):
        options = {"query_positions": torch.arange(100, 103), "key_positions": torch.arange(99, 103)}
        assert self.rows(kernel, 3, 4, mask=masks.causal(), **options) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]

    def test_queries_follow_the_positions_of_the_keys(self, kernel):
        assert self.rows(kernel, 2, 3, mask=masks.causal(), key_positions=torch.tensor([50, 60, 70])) == [
            [0, 1],
            [0, 1, 2],
        ]

    def test_padding_asks_for_the_position_of_the_key(self, kernel):
        mask = masks.padding(lengths=[10])
        assert self.rows(kernel, 1, 3, mask=mask, key_positions=torch.tensor([10, 3, 9])) == [[1, 2]]

    def test_positions_per_batch(self, kernel):
        query, key, value = rand(2, 3, 2, 4), rand(2, 3, 4, 4), rand(2, 3, 4, 4)
        query_positions, key_positions = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
        output = regard.attention(
            query,
            key,
            value,
            mask=masks.causal(),
            query_positions=query_positions,
            key_positions=key_positions,
            kernel=kernel,
        )
        for batch in range(2):
            keep = key_positions[batch] <= query_positions[batch][:, None]
            alone = (query[batch] @ key[batch].mT / 2).masked_fill(~keep, -math.inf).softmax(-1) @ value[batch]
            close(output[batch], alone)

    def test_chunks_are_rows_of_the_whole(self, kernel):
        query, key, value = whole(6, 6)
        output = regard.attention(query, key, value, mask=masks.causal(), kernel=kernel)
        for start, stop in ((0, 1), (1, 4), (4, 6)):
            chunk = regard.attention(
                query[..., start:stop, :],
                key,
                value,
                mask=masks.causal(),
                kernel=kernel,
                query_positions=torch.arange(start, stop),
            )
            close(chunk, output[..., start:stop, :])

    def test_a_cache_grows(self, kernel):
        query, key, value = whole(6, 6)
        output = regard.attention(query, key, value, mask=masks.causal(), kernel=kernel)
        for end in range(1, 7):
            cached = key[..., :end, :], value[..., :end, :]
            step = regard.attention(query[..., end - 1 : end, :], *cached, mask=masks.causal(), kernel=kernel)
            close(step, output[..., end - 1 : end, :])
