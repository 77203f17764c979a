"""Calls of attention in ONNX Runtime: masks, biases, scores, normalizers, with batch and lengths that may vary."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import regard
from regard import biases, masks, normalizers, scores

from .exporting import OnnxModel, Together, assert_agrees_in_onnx, assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter

HEADS, DIM = 4, 8
SIZES = [(2, 5, 7), (3, 37, 53), (1, 1, 11)]
SHAPES = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},) * 2

documents = torch.arange(64) // 3
"""The documents of positions, read by a function too."""
chosen_keys = torch.tensor([0, 2, 5, -1]).expand(1, 1, 1, 4)
pairs_of_heads = torch.arange(HEADS)[:, None, None] != 1
"""The second head attends to nothing."""

MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(before=3, after=1),
    "padding": masks.padding(lengths=torch.tensor(4)),
    "prefix": masks.prefix(3),
    "strided": masks.strided(3),
    "fixed": masks.fixed(4, 1),
    "dilated": masks.dilated(3, 2, after=1),
    "global": masks.global_tokens([0, 2]),
    "documents": masks.documents(documents),
    "blocks": masks.random_blocks(64, 4, 2, seed=3),
    "blocks of heads": masks.random_blocks(64, 4, 2, heads=HEADS),
    "chosen": masks.chosen(chosen_keys),
    "chosen blocks": masks.blocks(torch.tensor([0, 1]).expand(1, 1, 1, 2), (1, 3)),
    "mod": masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k < 3) | (k % 3 == 0)),
    "mod of heads": masks.from_mod(lambda b, h, q, k: (q - k).abs() <= 2 * h, heads=HEADS),
    "mod with a table": masks.from_mod(lambda b, h, q, k: (documents[q] == documents[k]) & (k <= q)),
    "keep": masks.where(keep=pairs_of_heads),
    "algebra": (masks.causal() & masks.window(before=3) | masks.global_tokens([0])) & ~masks.strided(5),
    "nothing": masks.causal() & ~masks.causal(),
}

torch.manual_seed(0)
additive, table = scores.Additive(DIM, DIM, 6), torch.randn(256)
"""A score with parameters, and the numbers that a function adds."""
OTHERS = {
    "alibi": lambda q, k: regard.attention(q, k, k, bias=biases.alibi(HEADS), mask=masks.causal()),
    "gaussian": lambda q, k: regard.attention(q, k, k, bias=biases.gaussian(2.0, 1.5)),
    "score_mod": lambda q, k: regard.attention(q, k, k, bias=score_mod),
    "softcap": lambda q, k: regard.attention(q, k, k, softcap=2.0, mask=masks.causal()),
    "sinks": lambda q, k: regard.attention(q, k, k, sinks=table[:HEADS], mask=masks.causal()),
    "groups": lambda q, k: regard.attention(q, k[:, :2], k[:, 2:], mask=masks.causal()),
    "lse": lambda q, k: regard.attention_with_lse(q, k, k, mask=masks.window(before=60))[1],
    "positions": lambda q, k: regard.attention(
        q, k, k, mask=masks.causal(), query_positions=torch.arange(q.shape[2]) + 2
    ),
    "torch's": lambda q, k: regard.scaled_dot_product_attention(q, k, k, is_causal=True),
    "additive": lambda q, k: regard.attention(q, k, k, score=additive, mask=masks.causal()),
    "no heads": lambda q, k: regard.attention(q[:, 0], k[:, 0], k[:, 1], mask=masks.causal()),
    "more axes": lambda q, k: regard.attention(q.unflatten(1, (2, 2)), k.unflatten(1, (2, 2)), k.unflatten(1, (2, 2))),
    "sigmoid": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.Sigmoid()),
    "softmax1": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.Softmax1(), mask=masks.causal()),
    "softpick": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.Softpick(), mask=masks.causal()),
    "relu": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.ReLU(), mask=masks.causal()),
    "stick": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.StickBreaking(), mask=masks.causal()),
    "top": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.TopScores(3), mask=masks.causal()),
    "hard": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.Hard(), mask=masks.causal()),
}
score_mod = biases.from_mod(lambda score, b, h, q, k: score + table[q - k + 128])


def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, queries, DIM), torch.randn(batch, HEADS, keys, DIM)


@pytest.mark.parametrize("opset", [20, 23])
def test_every_mask(opset):
    module = Together({name: lambda q, k, m=mask: regard.attention(q, k, k, mask=m) for name, mask in MASKS.items()})
    model = assert_agrees_in_onnx(module, inputs, SHAPES, SIZES, opset=opset)
    assert ("Attention" in model.operators) == (opset == 23)
    assert not {"Loop", "If", "Scan"} & set(model.operators)


def test_biases_scores_and_normalizers():
    assert_agrees_in_onnx(Together(OTHERS), inputs, SHAPES, SIZES)


def test_without_a_mask_it_is_one_operator():
    model = OnnxModel(Together({"plain": lambda q, k: regard.attention(q, k, k)}), inputs(2, 5, 7), SHAPES, opset=23)
    assert model.operators == ["Attention"]


@pytest.mark.parametrize("opset", [20, 23])
def test_numbers_that_are_not_finite_in_padding(opset):
    """Kernels keep them out. A graph does not, which the guide says, and does if the module fills its padding."""

    def padded(q: Tensor, k: Tensor, *, filled: bool) -> Tensor:
        mask = masks.padding(lengths=torch.tensor(4))
        if filled:
            k = k.masked_fill((torch.arange(k.shape[2]) >= 4)[:, None], 0.0)
        return regard.attention(q, k, k, mask=mask)

    parts = {"as they are": lambda q, k: padded(q, k, filled=False), "filled": lambda q, k: padded(q, k, filled=True)}
    model = OnnxModel(Together(parts), inputs(2, 5, 7), SHAPES, opset=opset)
    query, key = inputs(3, 37, 53)
    expected = regard.attention(query, key[:, :, :4], key[:, :, :4])
    for nothing in (torch.nan, torch.inf):
        key[:, :, 4:] = nothing
        assert_same(padded(query, key, filled=False), expected)
        as_they_are, filled = model(query, key)
        assert as_they_are.isnan().all()
        assert_same(filled, expected)


@pytest.mark.slow
def test_sparsemax():
    """In a graph of its own: the steps to its threshold are many nodes."""
    module = Together({"sparsemax": lambda q, k: regard.attention(q, k, k, normalizer=normalizers.Sparsemax())})
    assert_agrees_in_onnx(module, inputs, SHAPES, SIZES)


def test_linear_attention():
    """The recurrence is a scan; keys of length 1 keep the delta rule from growing."""

    def causal(q: Tensor, k: Tensor, **options: object) -> Tensor:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k[:, :2], dim=-1)
        gates = {"decay": -k[..., 0].abs(), "features": -k.abs(), "beta": k[..., 1].sigmoid()}
        if "features" in options:
            options["decay"] = "features"
            del options["features"]
        given = {name: gates[value] if isinstance(value, str) else value for name, value in options.items()}
        return regard.linear_attention(q, k, k, causal=True, **given)  # type: ignore[arg-type]

    module = Together(
        {
            "all": lambda q, k: regard.linear_attention(q, k[:, :2], k[:, 2:]),
            "causal": causal,
            "decay": lambda q, k: causal(q, k, decay="decay"),
            "features": lambda q, k: causal(q, k, features=True),
            "delta": lambda q, k: causal(q, k, beta="beta", normalize=False),
            "gated delta": lambda q, k: causal(q, k, beta="beta", decay="decay", normalize=False),
        }
    )
    model = assert_agrees_in_onnx(
        module,
        lambda batch, length: (torch.randn(batch, HEADS, length, DIM), torch.randn(batch, HEADS, length, DIM)),
        SHAPES,
        [(2, 5), (3, 67), (1, 1)],
    )
    assert model.operators.count("Scan") == 5


def test_rows_without_keys_are_zero():
    model = OnnxModel(
        Together({"padding": lambda q, k: regard.attention(q, k, k, mask=masks.padding(lengths=torch.tensor([0, 3])))}),
        inputs(2, 5, 7),
        ({2: Dim.DYNAMIC},) * 2,
    )
    query, key = inputs(2, 3, 9)
    (found,) = model(query, key)
    assert (found[0] == 0).all()
    assert_same(found[1:], regard.attention(query[1:], key[1:, :, :3], key[1:, :, :3]))
