"""Published attention patterns as expressions of masks, against the definitions of their papers in plain Python."""

import pytest
import torch

from regard import masks

N = 40


def dense(attended) -> torch.Tensor:
    """From what each query i attends to."""
    keep = torch.zeros(N, N, dtype=torch.bool)
    for i in range(N):
        for j in attended(i):
            if 0 <= j < N:
                keep[i, j] = True
    return keep


@pytest.mark.parametrize("stride", [1, 3, 6])
def test_sparse_transformer_strided(stride):
    """Child et al. 2019, section 4.3: A(1) = {t, ..., i} for t = max(0, i - l), A(2) = {j : (i - j) mod l = 0}."""
    mask = masks.causal() & (masks.window(before=stride) | masks.strided(stride))
    near = dense(lambda i: range(max(0, i - stride), i + 1))
    far = dense(lambda i: [j for j in range(i + 1) if (i - j) % stride == 0])
    assert mask.dense(N, N).equal(near | far)


@pytest.mark.parametrize(("block", "summary"), [(8, 1), (8, 3), (5, 5)])
def test_sparse_transformer_fixed(block, summary):
    """Section 4.3: A(1) = {j : floor(j / l) = floor(i / l)}, A(2) = {j : j mod l in the last c}; j <= i."""
    mask = masks.causal() & masks.fixed(block, summary)
    own = dense(lambda i: [j for j in range(i + 1) if j // block == i // block])
    last = dense(lambda i: [j for j in range(i + 1) if j % block in range(block - summary, block)])
    assert mask.dense(N, N).equal(own | last)


def test_longformer():
    """Beltagy et al. 2020, section 3.1: w / 2 tokens on each side, and global tokens symmetrically."""
    mask = masks.window(4, 4) | masks.global_tokens([0, 7])
    local = dense(lambda i: range(i - 4, i + 5))
    seen = dense(lambda i: range(N) if i in (0, 7) else [0, 7])
    assert mask.dense(N, N).equal(local | seen)


def test_longformer_dilated():
    mask = masks.dilated(3, 2, after=3)
    assert mask.dense(N, N).equal(dense(lambda i: range(i - 6, i + 7, 2)))


def test_big_bird():
    """Zaheer et al. 2020, appendix D, in blocks: the neighbours on each side, the first and last, random ones."""
    block, blocks = 4, N // 4
    ends = [*range(block), *range(N - block, N)]
    drawn = masks.random_blocks(N, block, 2, seed=5)
    near = masks.from_mod(lambda b, h, q, k: (q // block - k // block).abs() <= 1)
    mask = near | masks.global_tokens(ends) | drawn
    chosen = drawn.dense(N, N)[::block, ::block]

    def attended(i: int) -> list[int]:
        own = i // block
        if own in (0, blocks - 1):
            return list(range(N))
        seen = {own - 1, own, own + 1, 0, blocks - 1, *chosen[own].nonzero().flatten().tolist()}
        return [j for j in range(N) if j // block in seen]

    assert mask.dense(N, N).equal(dense(attended))
    assert mask.tiles(N, N, block).equal(mask.dense(N, N)[::block, ::block].to(torch.int8) * 2)


def test_mistral():
    """Jiang et al. 2023: a window of W = 8 tokens, the position itself among them."""
    mask = masks.causal() & masks.window(before=7)
    assert mask.dense(N, N).equal(dense(lambda i: range(i - 7, i + 1)))
    assert mask.dense(N, N).sum(-1).max() == 8


def test_streaming_llm():
    """Xiao et al. 2024: four attention sinks, and the most recent tokens."""
    mask = masks.causal() & (masks.window(before=9) | masks.prefix(4))
    assert mask.dense(N, N).equal(dense(lambda i: [j for j in range(i + 1) if j < 4 or i - j <= 9]))


def test_prefix_language_model():
    """Raffel et al. 2020: the first p tokens see each other, the rest what is before them."""
    mask = masks.causal() | masks.prefix(6)
    assert mask.dense(N, N).equal(dense(lambda i: range(max(6, i + 1))))


def test_packed_documents():
    lengths = [5, 1, 20, 14]
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    mask = masks.causal() & masks.documents(ids)
    assert mask.dense(N, N).equal(torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool())
