"""Bad input: each error by its text, which names the argument, what it has, what it needs, and the mend."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard import biases, masks, scores
from regard.errors import ConfigurationError, DeviceError, DtypeError, MaskError, ShapeError
from regard.lenses import Weights


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def whole(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two batches and three heads."""
    return rand(2, 3, m, 11), rand(2, 3, n, 11), rand(2, 3, n, 13)


NO = torch.zeros(5, 7)


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (DtypeError, r"key needs a torch.Tensor; it is a list", {"key": [1.0]}, {}),
        (DtypeError, r"query needs floating-point numbers .* torch.int64: call query.float\(\)",
         {"query": torch.zeros(2, 3, 5, 11, dtype=torch.int64)}, {}),
        (DtypeError, "value needs floating-point .* torch.bool", {"value": torch.zeros(2, 3, 7, 13).bool()}, {}),
        (DtypeError, "query needs floating-point .* torch.float8_e5m2",
         {"query": torch.zeros(2, 3, 5, 11).to(torch.float8_e5m2)}, {}),
        (DtypeError, r"query is torch.float32, key torch.float64, value torch.float32: they need one dtype",
         {"key": torch.zeros(2, 3, 7, 11).double()}, {}),
        (DeviceError, r"query is on meta, key on cpu, value on cpu: they need one device",
         {"query": torch.zeros(2, 3, 5, 11, device="meta")}, {}),
        (ShapeError, r"query \(3, 5, 11\), key \(2, 3, 7, 11\).*the same number of dimensions",
         {"query": torch.zeros(3, 5, 11)}, {}),
        (ShapeError, "same number of dimensions, two at least",
         {"query": torch.zeros(1), "key": torch.zeros(1), "value": torch.zeros(1)}, {}),
        (ShapeError, "key has 7 positions and value 6 .*each key needs one value",
         {"value": torch.zeros(2, 3, 6, 13)}, {}),
        (ShapeError, "query has 3 heads, key 2, value 2 .*it must divide the query's",
         {"key": torch.zeros(2, 2, 7, 11), "value": torch.zeros(2, 2, 7, 13)}, {}),
        (ShapeError, "query has 3 heads, key 3, value 1 .*the same number", {"value": torch.zeros(2, 1, 7, 13)}, {}),
        (ShapeError, "query has 3 heads, key 0, value 0",
         {"key": torch.zeros(2, 0, 7, 11), "value": torch.zeros(2, 0, 7, 13)}, {}),
        (ShapeError, r"do not broadcast\. Each needs to be the same in all three, or 1: repeat .*\(times, 0\)\.$",
         {"query": torch.zeros(4, 3, 5, 11)}, {}),
        (ShapeError, r"do not broadcast.*Three-dimensional input is \(batch, length, dim\); heads need a fourth",
         {"query": torch.zeros(4, 5, 11), "key": torch.zeros(2, 7, 11), "value": torch.zeros(2, 7, 13)}, {}),
        (ShapeError, r"query has the dim 9 and key 11 .*score=scores.General\(9, 11\)",
         {"query": torch.zeros(2, 3, 5, 9)}, {}),
        (ConfigurationError, "score needs a score such as .*it is 'additive'", {}, {"score": "additive"}),
        (ConfigurationError, "they are made before the call", {}, {"score": scores.Additive}),
        (ConfigurationError, r"scale=0.5 goes with the default score; Dot\(\) has a scale of its own",
         {}, {"score": scores.Dot(), "scale": 0.5}),
        (MaskError, r"mask is a torch.float32 tensor \(5, 7\), but a mask is bool \(True = attend\).*go to bias=",
         {}, {"mask": NO}),
        (MaskError, r"mask needs a mask .*; it is a torch.int64 tensor \(5, 7\)", {}, {"mask": NO.long()}),
        (MaskError, "mask needs a mask .*; it is a str", {}, {"mask": "causal"}),
        (MaskError, r"mask where\(keep=<bool \(4, 7\)>\) does not fit: .*5 queries and 7 keys", {},
         {"mask": torch.ones(4, 7).bool()}),
        (MaskError, r"mask where\(keep=<bool \(4, 1, 5, 7\)>\) has the shape \(4, 1, 5, 7\), which does not broadcast",
         {}, {"mask": torch.ones(4, 1, 5, 7).bool()}),
        (MaskError, r"mask padding\(lengths=\[1, 2, 3\]\) has the shape \(3, 1, 5, 7\)", {},
         {"mask": masks.padding(lengths=[1, 2, 3])}),
        (DtypeError, r"a bias needs a floating-point tensor; this is torch.bool.*mask=masks.where\(keep=", {},
         {"bias": NO.bool()}),
        (ShapeError, r"bias tensor\(<float32 \(4, 5, 7\)>\) has the shape \(4, 5, 7\), which does not broadcast", {},
         {"bias": torch.zeros(4, 5, 7)}),
        (ShapeError, r"bias tensor\(<float32 \(5, 6\)>\) does not fit: .* there are 5 queries and 7 keys", {},
         {"bias": torch.zeros(5, 6)}),
        (DeviceError, r"bias tensor\(<float32 \(5, 7\)>\) is on meta, but query, key and value are on cpu", {},
         {"bias": NO.to("meta")}),
        (ConfigurationError, "^scale is '0.5'; it needs a finite number, or None for 1/√dim$", {}, {"scale": "0.5"}),
        (ConfigurationError, r"^scale is \[0.5\]; it needs a finite number", {}, {"scale": [0.5]}),
        (ConfigurationError, "^scale is True; it needs a finite number", {}, {"scale": True}),
        (ConfigurationError, "^softcap is True; it needs a finite number above 0", {}, {"softcap": True}),
        (ConfigurationError, "^softcap is '30'; it needs a finite number above 0", {}, {"softcap": "30"}),
        (ConfigurationError, r"^dropout_p is '0.1'; it needs a probability in \[0, 1\)$", {}, {"dropout_p": "0.1"}),
        (ConfigurationError, "softcap is 0; it needs a finite number above 0", {}, {"softcap": 0}),
        (ConfigurationError, "softcap is inf", {}, {"softcap": math.inf}),
        (ConfigurationError, "softcap is nan", {}, {"softcap": math.nan}),
        (ConfigurationError, r"dropout_p is 1.0; it needs a probability in \[0, 1\)", {}, {"dropout_p": 1.0}),
        (ConfigurationError, r"dropout_p is -0.1", {}, {"dropout_p": -0.1}),
        (ShapeError, r"sinks is torch.float32 \(2,\); it needs one floating-point logit per query head, \(3,\)$", {},
         {"sinks": torch.zeros(2)}),
        (ShapeError, r"sinks is float; it needs", {}, {"sinks": 0.5}),
        (DeviceError, "sinks is on meta, but query, key and value are on cpu", {},
         {"sinks": torch.zeros(3, device="meta")}),
        (DtypeError, "query_positions needs a tensor of whole numbers, or a range; it is torch.float32", {},
         {"query_positions": torch.arange(5.0)}),
        (DtypeError, "key_positions needs a tensor of whole numbers, or a range; it is a list", {},
         {"key_positions": [0]}),
        (ShapeError, r"key_positions is range\(0, 6\); it needs 7 consecutive positions, range\(start, start", {},
         {"key_positions": range(6)}),
        (ShapeError, r"query_positions is range\(0, 10, 2\); it needs 5 consecutive positions", {},
         {"query_positions": range(0, 10, 2)}),
        (ShapeError, "5 queries cannot sit where the last of the 3 keys sit", {"key": rand(2, 3, 3, 11),
         "value": rand(2, 3, 3, 13)}, {"key_positions": range(3)}),
        (ShapeError, r"key_positions has the shape \(6,\); it needs \(7,\) or \(batch, 7\), .* the 7 keys", {},
         {"key_positions": torch.arange(6)}),
        (ShapeError, r"query_positions has the shape \(\); it needs \(5,\) or .* 5 queries", {},
         {"query_positions": torch.tensor(0)}),
        (DeviceError, "query_positions is on meta", {}, {"query_positions": torch.arange(5, device="meta")}),
        (MaskError, r"mask causal\(\) has the shape \(4, 1, 5, 7\), which does not broadcast", {},
         {"mask": masks.causal(), "query_positions": torch.zeros(4, 5, dtype=torch.int64)}),
    ],
)  # fmt: skip
def test_bad_input(error, match, arguments, options):
    tensors = dict(zip(("query", "key", "value"), whole(), strict=True)) | arguments
    with pytest.raises(error, match=match):
        regard.attention(**tensors, **options)


FUNCTIONS = [
    regard.attention,
    regard.attention_with_lse,
    regard.explain,
    regard.observe,
    regard.linear_attention,
    regard.scaled_dot_product_attention,
]


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_no_tensor(function, name):
    q = rand(1, 2, 5, 8)
    for other, has in (
        ([[1.0, 2.0]], rf"it is a list: pass torch\.as_tensor\({name}\)$"),
        (q.numpy(), rf"it is a ndarray: pass torch\.as_tensor\({name}\)$"),
        (1.0, rf"it is a float: pass torch\.as_tensor\({name}\)$"),
        (None, "it is None$"),
        ("q", "it is a str$"),
        (masks.causal(), "it is a Causal$"),
    ):
        with pytest.raises(DtypeError, match=f"^{name} needs a torch.Tensor; {has}"):
            function(**dict.fromkeys(("query", "key", "value"), q) | {name: other})
    with pytest.raises(
        DtypeError, match=rf"^{name} is a tensor of the layout torch.sparse_coo.*pass {name}.to_dense\("
    ):
        function(**dict.fromkeys(("query", "key", "value"), q) | {name: q.to_sparse()})


BLOCK_MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
NO_MASKS: list[tuple[Any, str]] = [
    (BLOCK_MASK, r"a BlockMask of FlexAttention: pass mask=masks\.from_block_mask\(mask\)$"),
    ([[True]], r"a list: pass torch\.as_tensor\(mask\)$"),
    (np.ones((5, 5), dtype=bool), r"a ndarray: pass torch\.as_tensor\(mask\)$"),
    (lambda b, h, q, k: q >= k, r"a function: pass masks\.from_mod\(mask\)$"),
    (1.0, r"a float: pass torch\.as_tensor\(mask\)$"),
    ("causal", "a str$"),
]


@pytest.mark.parametrize(("other", "has"), NO_MASKS, ids=[type(other).__name__ for other, _ in NO_MASKS])
def test_what_is_no_mask(other, has):
    q = rand(1, 2, 5, 8)
    with pytest.raises(MaskError, match=f"^mask needs a mask .*; it is {has}"):
        regard.attention(q, q, q, mask=other)
    with pytest.raises(MaskError, match=f"^a mask is needed here.*; this is {has}"):
        _ = masks.causal() & other


NO_BIASES: list[tuple[Any, str]] = [
    (BLOCK_MASK, r"a BlockMask of FlexAttention: pass mask=masks\.from_block_mask\(bias\)\."),
    ([[1.0]], r"a list: pass torch\.as_tensor\(bias\)\."),
    (np.ones((5, 5)), r"a ndarray: pass torch\.as_tensor\(bias\)\."),
    (lambda score, b, h, q, k: score, r"a function: pass biases\.from_mod\(bias\)\."),
    ("alibi", r"a str\."),
]


@pytest.mark.parametrize(("other", "has"), NO_BIASES, ids=[type(other).__name__ for other, _ in NO_BIASES])
def test_what_is_no_bias(other, has):
    q = rand(1, 2, 5, 8)
    with pytest.raises(DtypeError, match=f"^a bias needs a floating-point tensor; this is {has}"):
        regard.attention(q, q, q, bias=other)


@pytest.mark.parametrize("other", [[[True]], np.ones((5, 5), dtype=bool), "causal", masks.causal(), 1.0], ids=repr)
def test_what_is_no_mask_of_torch(other):
    q = rand(1, 2, 5, 8)
    with pytest.raises(
        MaskError, match=r"attn_mask needs a bool .*; it is a .* go to regard\.attention\(mask=\.\.\.\)$"
    ):
        regard.scaled_dot_product_attention(q, q, q, attn_mask=other)


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("function", FUNCTIONS[:4], ids=lambda function: function.__name__)
def test_several_numbers_where_one_is_needed(function, name):
    q = rand(1, 2, 5, 8)
    for other in (np.ones(3), torch.ones(2, 3), torch.zeros(1, 2, dtype=torch.complex64), torch.eye(3).to_sparse()):
        with pytest.raises(
            ConfigurationError, match=rf"(?s){name} is (array|tensor)\(.*; it needs a (finite )?(number|prob)"
        ):
            function(q, q, q, **{name: other})


def test_tensors_without_numbers():
    with pytest.raises(DeviceError, match=r"are on meta, where there are no numbers .*: give the model numbers with"):
        regard.attention(*(tensor.to("meta") for tensor in whole()))


def test_sinks_need_heads():
    with pytest.raises(ShapeError, match=r"sinks is .* and input with a head axis"):
        regard.attention(rand(2, 5, 4), rand(2, 7, 4), rand(2, 7, 4), sinks=torch.zeros(2))


def test_more_queries_than_placed_keys():
    with pytest.raises(ShapeError, match=r"5 queries cannot sit where the last of the 3 keys sit.*query_positions too"):
        regard.attention(*whole(5, 3), mask=masks.causal(), key_positions=torch.arange(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}, {"bias": biases.alibi(2)}, {"softcap": 3.0}])
def test_a_trace_is_refused_for_it_holds_for_one_length_only(options):
    q = rand(1, 2, 5, 8)
    for function in (
        lambda q: regard.attention(q, q, q, **options),
        lambda q: regard.attention_with_lse(q, q, q, **options)[1],
        lambda q: regard.observe(q, q, q, Weights(), **options).output,
    ):
        with pytest.raises(
            ConfigurationError, match=r"torch\.jit\.trace, which would keep the mask.*: use torch\.export"
        ):
            torch.jit.trace(function, q)
    assert regard.attention(q, q, q, **options).shape == q.shape  # afterwards all is as it was
