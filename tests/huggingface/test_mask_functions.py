"""Mask functions of transformers become symbols, and these are the pairs that transformers itself makes of them."""

import pytest
import torch
from transformers import masking_utils as theirs

from regard.errors import MaskError
from regard.huggingface.mask_tensor import LazyMaskTensor, symbolic_mask
from regard.masks.base import And, Or
from regard.masks.mask_mod import MaskModMask
from regard.masks.tensor_mask import TensorMask

# Sizes and offsets of queries and keys: (queries, keys, first query, first key).
FRAMES = {
    "as many queries as keys": (9, 9, 0, 0),
    "a chunk after a cache": (4, 9, 5, 0),
    "one query after a cache": (1, 9, 8, 0),
    "a static cache, at its start": (4, 11, 0, 0),
    "a static cache, one query": (1, 11, 5, 0),
    "a static cache that is full": (3, 11, 8, 0),
    "a cache that dropped its first keys": (4, 9, 12, 7),
    "one query after dropped keys": (1, 5, 20, 16),
}
LEFT = torch.tensor([0, 3])
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1] + [-1] * 12, [0, 0] + [-1] * 10 + [3] * 9])
IMAGES = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 0, 0] + [0] * 12, [0] * 9 + [1] * 12], dtype=torch.bool)


def images(batch, head, query, key):
    return IMAGES[batch, query] & IMAGES[batch, key]


def every_third(batch, head, query, key):
    return (query - key) % 3 == 0


FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(4),
    "window of one": theirs.sliding_window_causal_mask_function(1),
    "window of none": theirs.sliding_window_causal_mask_function(0),
    "window as wide as the keys": theirs.sliding_window_causal_mask_function(9),
    "window to both sides": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "chunks after padding": theirs.chunked_causal_mask_function(4, LEFT),
    "blocks": theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)),
    "a user's or": theirs.or_masks(theirs.causal_mask_function, images),
    "a user's and": theirs.and_masks(theirs.causal_mask_function, every_third),
    "padding inside": theirs.and_masks(
        theirs.causal_mask_function, theirs.padding_mask_function(torch.arange(21) < torch.tensor([[21], [6]]))
    ),
}
SYMBOLS = [name for name in FUNCTIONS if name not in ("a user's or", "a user's and")]
TOKENS = {
    "no padding": None,
    "tokens alone": torch.ones(2, 21, dtype=torch.bool),
    "left": torch.arange(21) >= torch.tensor([[0], [4]]),
    "right": torch.arange(21) < torch.tensor([[21], [6]]),
    "in between": torch.arange(21) % 4 != torch.tensor([[9], [2]]),
    "shorter than the keys": torch.ones(2, 7, dtype=torch.bool),
}


def both(function, frame, tokens=None, **options):
    queries, keys, first_query, first_key = frame
    arguments = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": first_query,
        "kv_offset": first_key,
        "mask_function": function,
        "attention_mask": tokens,
    }
    expected = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False, **options)
    assert expected is not None
    mine = symbolic_mask(**arguments, allow_is_causal_skip=True, **options)
    assert isinstance(mine, LazyMaskTensor)
    return mine, expected


def leaves(mask):
    if isinstance(mask, And | Or):
        return leaves(mask.left) + leaves(mask.right)
    return [mask]


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_pairs_are_theirs(name, frame):
    wrong = []
    for kind, tokens in TOKENS.items():
        mine, expected = both(FUNCTIONS[name], frame, tokens, use_vmap=name not in SYMBOLS)
        if not torch.equal(mine.dense(), expected.expand(2, 1, *frame[:2])):
            wrong.append(f"{kind}: {mine!r}")
    assert wrong == []


@pytest.mark.parametrize("name", SYMBOLS)
def test_what_transformers_defines_is_never_evaluated(name):
    mask = both(FUNCTIONS[name], (9, 9, 0, 0))[0].symbol
    assert not any(isinstance(leaf, MaskModMask) for leaf in leaves(mask))
    assert all(leaf.pairs.shape[-2] == 1 for leaf in leaves(mask) if isinstance(leaf, TensorMask))


WRITTEN = {
    "causal": "causal()",
    "bidirectional": "window()",
    "window": "window(before=3) & causal()",  # a window of 4 keys with the query's own
    "window of one": "window(before=0) & causal()",
    "window as wide as the keys": "causal()",
    "window to both sides": "window(before=2, after=2)",
    "chunks": "documents(<int64 (2, 9)>) & causal()",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_symbols(name):
    assert repr(both(FUNCTIONS[name], (9, 9, 0, 0))[0].symbol) == WRITTEN[name]


@pytest.mark.parametrize("name", ["causal", "window as wide as the keys"])
def test_one_query_at_the_end_needs_no_mask(name):
    assert repr(both(FUNCTIONS[name], (1, 9, 8, 0))[0].symbol) == "window()"


def test_padding_is_a_symbol_too():
    mask = both(theirs.causal_mask_function, (9, 9, 0, 0), torch.arange(9) < torch.tensor([[9], [4]]))[0].symbol
    assert repr(mask) == "causal() & padding(lengths=[9, 4])"


def test_keys_that_no_query_reaches_are_left_out():
    mask = both(theirs.causal_mask_function, (4, 1000, 3, 0), TOKENS["shorter than the keys"])[0]
    assert (mask.reachable_keys, repr(mask.symbol), mask.query_positions) == (7, "causal()", None)
    wide = both(theirs.bidirectional_mask_function, (4, 11, 3, 0))[0]
    assert wide.reachable_keys == 11
    assert wide.query_positions == range(3, 7)


def packed(function, positions):
    documents = theirs.find_packed_sequence_indices(positions)
    assert documents is not None
    return theirs.packed_sequence_compatibility_function(function, positions, documents)


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0], [0, 1, 0, 1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "a user's and"])
def test_packed_sequences(name):
    mine, expected = both(packed(FUNCTIONS[name], POSITIONS), (9, 9, 0, 0), use_vmap=name == "a user's and")
    assert torch.equal(mine.dense(), expected)


def test_packed_sequences_are_documents():
    mask = both(packed(theirs.sliding_window_causal_mask_function(4), POSITIONS), (9, 9, 0, 0))[0].symbol
    assert repr(mask) == "documents(<int64 (2, 9)>) & (window(before=3) & causal())"


def test_positions_that_jump_within_a_document_are_not_taken_for_a_distance():
    documents = torch.tensor([[0, 0, 0, 0, 1, 1]])
    jumping = torch.tensor([[0, 1, 5, 6, 0, 1]])
    function = theirs.packed_sequence_compatibility_function(
        theirs.sliding_window_causal_mask_function(3), jumping.expand(2, -1), documents.expand(2, -1)
    )
    mine, expected = both(function, (6, 6, 0, 0))
    assert torch.equal(mine.dense(), expected)
    assert not mine.dense()[0, 0, 2, 1]  # 4 apart, as it counts


def test_documents_that_go_on_after_another():
    function = theirs.packed_sequence_compatibility_function(
        theirs.sliding_window_causal_mask_function(2),
        torch.tensor([[0, 1, 0, 2]]).expand(2, -1),
        torch.tensor([[0, 0, 1, 0]]).expand(2, -1),
    )
    mine, expected = both(function, (4, 4, 0, 0))
    assert torch.equal(mine.dense(), expected)
    assert mine.dense()[0, 0, 3, 1]  # one apart in its document, two in the sequence


def test_a_function_of_the_head_is_evaluated_by_transformers_for_the_one_head_it_knows():
    table = torch.rand(21, 21) < 0.5

    def stubborn(batch, head, query, key):
        return table[query, key] & (head == 0)

    mine, expected = both(stubborn, (9, 9, 0, 0), use_vmap=True)
    assert isinstance(mine.symbol, TensorMask)
    assert torch.equal(mine.dense(), expected)


def test_a_layer_of_another_length_is_named(pair):
    model = pair("llama")[1]
    mask = both(theirs.causal_mask_function, (9, 9, 0, 0))[0]
    with pytest.raises(
        MaskError, match="LlamaAttention has 13 queries and 13 keys, but its mask .* was made for 9 and 9"
    ):
        model(torch.randint(3, 60, (2, 13)), attention_mask=mask)


def test_while_a_graph_is_traced_the_mask_is_booleans():
    def masked(tokens):
        return symbolic_mask(
            batch_size=2,
            q_length=9,
            kv_length=9,
            mask_function=theirs.causal_mask_function,
            attention_mask=tokens,
            allow_is_causal_skip=True,
            use_vmap=False,
        )

    tokens = torch.arange(9) < torch.tensor([[9], [4]])
    traced = torch.compile(masked, backend="eager")(tokens)
    assert type(traced) is torch.Tensor
    assert torch.equal(traced, masked(tokens).clone())
