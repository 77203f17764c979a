"""The attention function by itself: layouts, masks, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import softmax
from transformers.masking_utils import sliding_window_bidirectional_mask_function

from regard.errors import ConfigurationError, MaskError
from regard.huggingface.attention_function import attention_forward
from regard.huggingface.mask_tensor import symbolic_mask
from regard.masks import causal, window

B, H, K, M, N, D, V = 2, 6, 3, 5, 7, 4, 11


class Attention(nn.Module):
    """A module as transformers has them; `is_causal` only where it is said."""

    def __init__(self, is_causal=None):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def tensors(queries=M, keys=N):
    return torch.randn(B, H, queries, D), torch.randn(B, K, keys, D), torch.randn(B, K, keys, V)


def with_weights(*arguments, **keywords) -> tuple[torch.Tensor, torch.Tensor]:
    output, weights = attention_forward(*arguments, output_attentions=True, **keywords)
    assert weights is not None
    return output, weights


def formula(query, key, value, keep=None, added: torch.Tensor | float = 0.0, scale=D**-0.5):
    key, value = (tensor.repeat_interleave(H // K, 1) for tensor in (key, value))
    scores = query @ key.mT * scale + added
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return (softmax(scores, -1) @ value).transpose(1, 2)


def test_layouts_go_in_by_head_and_come_out_by_token():
    q, k, v = tensors()
    output, weights = attention_forward(Attention(False), q, k, v, None)
    assert output.shape == (B, M, H, V)
    assert output.is_contiguous()
    assert weights is None
    torch.testing.assert_close(output, formula(q, k, v))


def test_no_mask_is_causal_where_the_module_is():
    q, k, v = tensors(N)
    lower = torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close(attention_forward(Attention(True), q, k, v, None)[0], formula(q, k, v, lower))
    torch.testing.assert_close(attention_forward(Attention(False), q, k, v, None)[0], formula(q, k, v))


def test_the_keyword_is_causal_overrides_the_modules():
    q, k, v = tensors(N)
    lower = torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close(
        attention_forward(Attention(False), q, k, v, None, is_causal=True)[0], formula(q, k, v, lower)
    )
    torch.testing.assert_close(attention_forward(Attention(True), q, k, v, None, is_causal=False)[0], formula(q, k, v))


@pytest.mark.parametrize("module", [Attention(), Attention(True)], ids=["unsaid", "causal"])
def test_one_query_without_a_mask_sees_all_keys(module):
    q, k, v = tensors(1)
    torch.testing.assert_close(attention_forward(module, q, k, v, None)[0], formula(q, k, v))


def test_a_mask_is_all_there_is_to_say_also_for_a_causal_module():
    q, k, v = tensors()
    keep = torch.rand(B, 1, M, N) < 0.7
    keep[..., 0] = True
    torch.testing.assert_close(attention_forward(Attention(True), q, k, v, keep)[0], formula(q, k, v, keep))


@pytest.mark.parametrize("keys", [N, 40], ids=["dynamic", "static"])
def test_after_a_cache_causal_is_aligned_to_the_last_query(keys):
    q, k, v = tensors(M, keys)
    mask = symbolic_mask(batch_size=B, q_length=M, kv_length=keys, q_offset=N - M)
    output, weights = with_weights(Attention(True), q, k, v, mask)
    lower_right = torch.ones(M, keys, dtype=torch.bool).tril(N - M)
    torch.testing.assert_close(output, formula(q, k, v, lower_right))
    assert weights.shape == (B, H, M, keys)
    assert torch.equal(weights[0, 0] > 0, lower_right)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_queries_sit_where_the_mask_function_was_told(first):
    q, k, v = tensors()
    both_ways = sliding_window_bidirectional_mask_function(1)
    mask = symbolic_mask(batch_size=B, q_length=M, kv_length=N, q_offset=first, mask_function=both_ways)
    near = (torch.arange(M)[:, None] + first - torch.arange(N)).abs() <= 1
    torch.testing.assert_close(attention_forward(Attention(False), q, k, v, mask)[0], formula(q, k, v, near))


def test_a_window_of_four_shows_four_keys():
    q, k, v = tensors(N)
    _, weights = with_weights(Attention(True), q, k, v, None, sliding_window=4)
    assert (weights[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4]
    assert torch.equal(weights[0, 0] > 0, (causal() & window(before=3)).dense(N, N))


def test_a_mask_has_the_window_already():
    q, k, v = tensors(N)
    mask = symbolic_mask(batch_size=B, q_length=N, kv_length=N)
    torch.testing.assert_close(
        attention_forward(Attention(True), q, k, v, mask, sliding_window=2)[0],
        attention_forward(Attention(True), q, k, v, mask)[0],
    )


def test_scaling_softcap_sinks_and_bias():
    q, k, v = tensors()
    sinks, bias = torch.randn(H), torch.randn(1, H, M, N)
    output, weights = with_weights(
        *(Attention(False), q, k, v, None), scaling=0.7, softcap=1.5, s_aux=sinks, position_bias=bias
    )
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(H // K, 1).mT * 0.7 / 1.5) + bias
    with_sink = torch.cat([scores, sinks[:, None, None].expand(B, H, M, 1)], -1)
    expected = softmax(with_sink, -1)[..., :-1]
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(output, (expected @ v.repeat_interleave(H // K, 1)).transpose(1, 2))


def test_a_bias_is_cut_where_a_static_cache_is():
    q, k, v = tensors(M, 40)
    bias = torch.randn(1, H, M, 40)
    mask = symbolic_mask(batch_size=B, q_length=M, kv_length=40, q_offset=2)
    output, _ = attention_forward(Attention(True), q, k, v, mask, position_bias=bias)
    torch.testing.assert_close(output, formula(q, k, v, torch.ones(M, 40, dtype=torch.bool).tril(2), bias))


def test_numbers_as_a_mask_are_added():
    q, k, v = tensors()
    added = torch.randn(B, 1, M, N)
    torch.testing.assert_close(attention_forward(Attention(True), q, k, v, added)[0], formula(q, k, v, added=added))


def test_a_row_with_nothing_to_attend_to_is_zero():
    q, k, v = tensors()
    keep = torch.ones(B, 1, M, N, dtype=torch.bool)
    keep[0, 0, 2] = False
    output, weights = with_weights(Attention(False), q, k, v, keep)
    assert not output[0, 2].any()
    assert not weights[0, :, 2].any()


def test_a_block_mask_of_flex_attention_counts_rows():
    q, k, v = tensors()
    mask = create_block_mask(lambda b, h, i, j: j <= i, B, None, M, N, device="cpu", BLOCK_SIZE=4)
    upper_left = torch.ones(M, N, dtype=torch.bool).tril()
    torch.testing.assert_close(attention_forward(Attention(True), q, k, v, mask)[0], formula(q, k, v, upper_left))


def test_a_sequence_index_makes_documents():
    q, k, v = tensors(N)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
    keep = (ids[:, :, None] == ids[:, None])[:, None]
    torch.testing.assert_close(
        attention_forward(Attention(False), q, k, v, None, seq_idx=ids)[0], formula(q, k, v, keep)
    )


def test_selected_keys_and_blocks_of_keys():
    q, k, v = tensors()
    indices = torch.tensor([[0, 1, -1], [2, 2, 3], [6, 0, 4], [1, 5, 2], [3, -1, -1]]).repeat(2, 1, 1)
    keep = (indices.unsqueeze(-1) == torch.arange(N)).any(-2).unsqueeze(1)
    mask = torch.ones(2, 1, M, N, dtype=torch.bool).tril(N - M)
    module = Attention(True)
    torch.testing.assert_close(
        attention_forward(module, q, k, v, mask, indices=indices.int())[0], formula(q, k, v, keep & mask)
    )
    blocks = torch.tensor([[0, -1], [1, 1], [3, 0], [2, 1], [-1, 0]]).repeat(2, 1, 1, 1)
    with pytest.raises(ConfigurationError, match="has no indexer.block_size that says how many keys a block has"):
        attention_forward(module, q, k, v, mask, block_indices=blocks)
    vars(module)["indexer"] = SimpleNamespace(block_size=2)
    keep = (blocks.unsqueeze(-1) == torch.arange(N) // 2).any(-2)
    torch.testing.assert_close(
        attention_forward(module, q, k, v, mask, block_indices=blocks)[0], formula(q, k, v, keep & mask)
    )


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("temperature", 0.5, "0.5"),
        ("choices", torch.zeros(2, 3), r"<Tensor \(2, 3\)>"),
        ("cache", Attention(), "Attention"),
        ("sinks", torch.zeros(1), r"<Tensor \(1,\)>"),
        ("long", "x" * 50, "<str>"),
    ],
)
def test_an_unknown_keyword_is_named(name, value, shown):
    with pytest.raises(
        ConfigurationError, match=f"Attention gives its attention {name}={shown}.*may change the result"
    ):
        attention_forward(Attention(True), *tensors(N), None, **{name: value})


@pytest.mark.parametrize("value", [None, False])
def test_an_unknown_keyword_that_asks_for_nothing_is_none(value):
    attention_forward(Attention(True), *tensors(N), None, temperature=value)


CLEAR_AS_MUD = {
    "unsaid": (Attention(), M, N, {}, "it has no is_causal to say whether it is causal"),
    "more keys": (Attention(True), M, N, {}, "it is causal, with 5 queries and 7 keys, which may sit at the first"),
    "a window": (Attention(False), M, N, {"sliding_window": 3}, "its sliding_window=3 does not say where"),
    "a window and a cache": (
        Attention(True),
        1,
        N,
        {"sliding_window": 3},
        "its sliding_window=3 does not say where the 1 q",
    ),
}


@pytest.mark.parametrize(("module", "queries", "keys", "keywords", "why"), CLEAR_AS_MUD.values(), ids=CLEAR_AS_MUD)
def test_what_is_not_clear_is_not_guessed(module, queries, keys, keywords, why):
    with pytest.raises(MaskError, match=f"Attention gives its attention no mask, and {why}"):
        attention_forward(module, *tensors(queries, keys), None, **keywords)


MASKS = {
    "of tokens": (
        torch.ones(B, N, dtype=torch.bool),
        r"a torch.bool tensor \(2, 7\)",
        ", which are added to the scores$",
    ),
    "of whole numbers": (
        torch.ones(B, 1, M, N, dtype=torch.long),
        r"a torch.int64 tensor \(2, 1, 5, 7\)",
        r", which are added to the scores. Where 1 = attend, give mask.bool\(\)$",
    ),
    "no tensor": ("causal", "a str", ", which are added to the scores$"),
}


@pytest.mark.parametrize(("mask", "has", "end"), MASKS.values(), ids=MASKS)
def test_other_masks_are_refused(mask, has, end):
    with pytest.raises(MaskError, match=f"gives its attention {has} as attention_mask; it needs .* 5, 7.*{end}"):
        attention_forward(Attention(True), *tensors(), mask)


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(MaskError, match="does not"):
        attention_forward(Attention(True), *tensors(), torch.ones(B, 1, M, N + 1, dtype=torch.bool))


ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKINGS = {
    "of queries alone": {"cu_seq_lens_q": ENDS},
    "not the same": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS + 1},
    "a batch": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
}


@pytest.mark.parametrize("keywords", PACKINGS.values(), ids=PACKINGS)
def test_packing_that_is_not_clear_is_refused(keywords):
    with pytest.raises(MaskError, match="gives cu_seq_lens_q and cu_seq_lens_k for a batch of 2, 7 queries and 7 keys"):
        attention_forward(Attention(False), *tensors(N), None, **keywords)


def test_a_sequence_index_over_a_cache_is_refused():
    with pytest.raises(MaskError, match="gives seq_idx for 5 queries and 7 keys"):
        attention_forward(Attention(False), *tensors(), None, seq_idx=torch.zeros(B, M, dtype=torch.long))
