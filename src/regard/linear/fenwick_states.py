"""Log-linear attention: a state for each of the log N blocks that the positions before a query fall into."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import ShapeError
from ..kernels.validation import check_same_kind, check_shapes
from .chunks import CHUNK, SMALLEST_DECAY, decayed_products, in_chunks
from .feature_maps import Identity
from .linear_arguments import BatchAxes, checked_decay, checked_scale
from .token_numbers import check_token_numbers


def log_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    levels: Tensor,
    decay: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """o_t = Σ_l λ_t^(l) (S_t^(l))ᵀ q_t, with a state for each block of a Fenwick tree over the positions up to t.

    Level 0 is the token itself, and level l the block of 2^(l-1) positions that ends before t where bit l - 1 of t,
    counted from 0, is set: position j is of the level of the highest bit in which j and t differ. So

        o_t = Σ_{j <= t} λ_t^(l(t, j)) e^{g_{j+1} + ... + g_t} (q_t · k_j) v_j,    l(t, j) = number of bits of t xor j

    With λ = 1 everywhere it is `regard.linear_attention` with `Identity()` and without a sum to divide by. Time and the
    memory of the gradient are O(N log N); chunks are computed by pairs, and all blocks of one level above them in one
    product.

    Shapes:
        query (..., heads, N, D), key (..., key heads, N, D), value (..., key heads, N, Dv); the output is
        (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        levels: λ, (..., heads, N, levels), of which the number of bits of N - 1, and one more, are read.
        decay: g, a logarithm, at most 0, one number for each token, (..., key heads, N).
        scale: what queries are multiplied by, 1/√D by default.

    Raises:
        ShapeError: levels for other tokens, or fewer than the length needs; a decay for each feature; others as of
            `regard.linear_attention`.
        DtypeError, DeviceError, ConfigurationError: as of `regard.linear_attention`.

    Source: Guo et al. 2025 (arXiv 2506.04761), section 3; with a decay it is their log-linear Mamba-2.

    >>> import torch, regard
    >>> q = k = v = torch.ones(4, 1)
    >>> regard.linear.log_linear_attention(q, k, v, levels=torch.tensor([[1.0, 10.0, 100.0]]).expand(4, 3))
    tensor([[  1.],
            [ 11.],
            [201.],
            [211.]])
    """
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    dtype, axes = value.dtype, BatchAxes.from_tensors(query, key, value)
    levels = _checked_levels(levels, query, key)
    scale = checked_scale(scale, Identity(), False, query.shape[-1])
    query, key, value = (at_least_float32(axes.as_4d(tensor)) for tensor in (query, key, value))
    decay = checked_decay(decay, axes, key, None)
    if decay is not None and decay.ndim == 4:
        raise ShapeError(
            f"decay has the shape {tuple(decay.shape)}, one number for each feature: log-linear attention takes one "
            f"for each token, {tuple(key.shape[:3])}"
        )
    if not query.numel() or not value.numel():
        return axes.unflatten(value.new_zeros(*query.shape[:3], value.shape[-1])).to(dtype)
    decay = key.new_zeros(key.shape[:3]) if decay is None else decay
    with without_autocast(query.device.type):
        rows = _rows(query * scale, key, value, at_least_float32(axes.as_4d(levels)), decay)
    return axes.unflatten(rows).to(dtype)


def level_of_pairs(length: int, device: torch.device | None = None) -> Tensor:
    """l(t, j), the level of each pair of positions: the number of bits of t xor j, (length, length)."""
    at = torch.arange(length, device=device)
    powers = 2 ** torch.arange(max(length - 1, 1).bit_length(), device=device)
    return ((at[:, None] ^ at).unsqueeze(-1) >= powers).sum(-1)


def _rows(query: Tensor, key: Tensor, value: Tensor, levels: Tensor, decay: Tensor) -> Tensor:
    """The outputs (B, H, N, Dv) of query (B, H, N, D), key and value (B, Hk, N, ·), levels (B, H, N, L) and a decay."""
    length, key_heads = query.shape[2], key.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    by_head = (key_heads, query.shape[1] // key_heads)
    # (B, Hk, r, m, C, ·) of queries and levels, (B, Hk, m, C, ·) of keys and values
    q, weight = (in_chunks(tensor, size).unflatten(1, by_head) for tensor in (query, levels))
    k, v = in_chunks(key, size), in_chunks(value, size)
    sums = in_chunks(decay.clamp(min=SMALLEST_DECAY).double().unsqueeze(-1), size).cumsum(-2)  # (B, Hk, m, C, 1)
    pairs = level_of_pairs(size, query.device).expand(*q.shape[:-1], size)
    within = decayed_products(q, k.unsqueeze(2), sums.unsqueeze(2)) * weight.gather(-1, pairs)
    rows = within @ v.unsqueeze(2)  # (B, Hk, r, m, C, Dv)
    ends = sums[..., -1, :].cumsum(-2)  # (B, Hk, m, 1), from the first position to the end of each chunk
    states = (k * (sums[..., -1:, :] - sums).exp().to(k.dtype)).mT @ v  # (B, Hk, m, D, Dv), at the ends of chunks
    since = (ends - sums[..., -1, :]).unsqueeze(-2) + sums  # (B, Hk, m, C, 1), from the first position to each
    level, width = size.bit_length(), 1
    while width < q.shape[3]:
        rows = rows + _read_level(q, weight[..., level : level + 1], states[:, :, ::2], since, width)
        states = _of_pairs(states, ends, width)
        level, width = level + 1, 2 * width
    return rows.flatten(3, 4).flatten(1, 2)[:, :, :length]


def _read_level(q: Tensor, weight: Tensor, states: Tensor, since: Tensor, width: int) -> Tensor:
    """What the second of each two blocks of `width` chunks reads of the first one's state, (B, Hk, r, m, C, Dv).

    Shapes: q and weight (B, Hk, r, m, C, ·), states of the first blocks at their ends (B, Hk, blocks, D, Dv), since
    (B, Hk, m, C, 1).
    """
    chunks, groups = q.shape[3], -(-q.shape[3] // (2 * width))
    missing = 2 * width * groups - chunks

    def seconds(tensor: Tensor) -> Tensor:
        """(..., m, C, ·) as (..., blocks, width · C, ·) of the second blocks."""
        padded = functional.pad(tensor, (0, 0, 0, 0, 0, missing))
        return padded.unflatten(-3, (groups, 2, width))[..., 1, :, :, :].flatten(-3, -2)

    own = seconds(since)
    before = since[:, :, width - 1 :: 2 * width, -1:]  # at the end of each first block
    before = functional.pad(before, (0, 0, 0, 0, 0, groups - before.shape[2]))
    # Padding is below what it is counted from: at most 0, so that it is no infinity.
    factor = (own - before).clamp(max=0).exp().to(q.dtype).unsqueeze(2) * seconds(weight)
    read = (seconds(q) @ states.unsqueeze(2)) * factor
    read = torch.stack([torch.zeros_like(read), read], -3)  # (B, Hk, r, blocks, 2, width · C, Dv)
    return read.unflatten(-2, (width, -1)).flatten(3, 5)[:, :, :, :chunks]


def _of_pairs(states: Tensor, ends: Tensor, width: int) -> Tensor:
    """The states of each two blocks of `width` chunks at the end of the second, with the sums `ends` of all chunks."""
    if states.shape[2] % 2:
        states = functional.pad(states, (0, 0, 0, 0, 0, 1))
    first, second = states[:, :, ::2], states[:, :, 1::2]
    blocks = first.shape[2]
    index = (torch.arange(blocks, device=ends.device) * 2 + 1) * width - 1
    last = ends.shape[2] - 1
    lasted = ends[:, :, (index + width).clamp(max=last)] - ends[:, :, index.clamp(max=last)]  # (B, Hk, blocks, 1)
    return first * lasted.exp().to(states.dtype).unsqueeze(-1) + second


def _checked_levels(levels: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The levels for each query, at least as many as the length has.

    Raises:
        ShapeError, DtypeError, DeviceError: they do not fit.
    """
    levels = check_token_numbers("levels", levels, query, each="levels")
    length = query.shape[-2]
    if length != key.shape[-2]:
        raise ShapeError(f"query has {length} positions and key {key.shape[-2]}: log-linear attention needs as many")
    needs = max(length - 1, 0).bit_length() + 1
    if levels.shape[-1] < needs:
        raise ShapeError(
            f"levels has {levels.shape[-1]} numbers for each query; {length} positions need {needs}: one for the token "
            "itself, and one for each bit of the last position"
        )
    return levels
