"""Linformer against its formula: shared projections, padding, lengths, and why it cannot be causal."""

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.errors import ConfigurationError, MaskError, ShapeError
from regard.nn import Attention, LengthProjection, LinformerAttention, Projections
from regard.positions import Rotary

DIM, LONGEST, RANK = 12, 11, 3


def formula(layer, x, memory=None, length=None):
    """softmax(Q (E K)ᵀ / √d) F V, one head after the other."""
    q = layer.projections.queries(x)
    k, v = layer.projections.keys_and_values(x if memory is None else memory)
    group, contexts = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        e, f = (w.weight[(head // group) % w.num_heads, :, :length] for w in (layer.key_length, layer.value_length))
        keys, values = (m @ t[:, head // group, :length] for m, t in ((e[:, : k.shape[2]], k), (f[:, : k.shape[2]], v)))
        contexts.append((q[:, head] @ keys.mT / q.shape[-1] ** 0.5).softmax(-1) @ values)
    return layer.projections.project_output(torch.stack(contexts, 1))


@pytest.mark.parametrize("heads", [(1, None), (2, None), (1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("length", [1, 7, LONGEST])
def test_is_the_formula(heads, length):
    own = None if heads[1] is None else LengthProjection(LONGEST, RANK, heads[1])
    layer = LinformerAttention(Projections(DIM, 4, num_kv_heads=2), LengthProjection(LONGEST, RANK, heads[0]), own)
    x = torch.randn(2, length, DIM)
    torch.testing.assert_close(layer(x), formula(layer, x))
    layer(x).square().sum().backward()
    gradient = layer.key_length.weight.grad
    assert gradient is not None
    assert not gradient[..., length:].any()
    assert gradient[..., :length].any() or length == 1


def test_identity_matrices_are_exact_attention():
    exact = Attention(Projections(DIM, 4))
    layer = LinformerAttention(exact.projections, LengthProjection(LONGEST, LONGEST))
    nn.init.eye_(layer.key_length.weight.data[0])
    x = torch.randn(2, LONGEST, DIM)
    torch.testing.assert_close(layer(x), exact(x))


def test_a_projection_is_shared_by_layers():
    shared = LengthProjection(LONGEST, RANK)
    layers = nn.ModuleList(LinformerAttention(Projections(DIM, 4), shared) for _ in range(3))
    assert sum(parameter is shared.weight for parameter in layers.parameters()) == 1
    assert layers[0].value_length is shared


def test_padding_is_the_text_alone():
    layer = LinformerAttention(Projections(DIM, 4, num_kv_heads=2), LengthProjection(LONGEST, RANK))
    x = torch.randn(3, 9, DIM)
    x[1, 6:] = torch.nan
    lengths = torch.tensor([9, 6, 0])
    output = layer(x, mask=masks.padding(lengths))
    torch.testing.assert_close(output[0], formula(layer, x[:1])[0])
    torch.testing.assert_close(output[1, :6], formula(layer, x[1:2, :6])[0])
    torch.testing.assert_close(output[2], layer.projections.project_output(torch.zeros(1, 4, 9, 3))[0])
    as_tensor = (torch.arange(9) < lengths[:, None])[:, None, None]
    torch.testing.assert_close(layer(x, mask=as_tensor), output, equal_nan=True)


def test_attention_to_a_memory():
    layer = LinformerAttention(Projections(DIM, 4, memory_dim=5), LengthProjection(LONGEST, RANK))
    x, memory = torch.randn(2, 30, DIM), torch.randn(2, 7, 5)
    torch.testing.assert_close(layer(x, memory), formula(layer, x, memory))


def test_dropout_is_of_training():
    layer = LinformerAttention(Projections(DIM, 4), LengthProjection(LONGEST, RANK), dropout=0.5)
    x = torch.randn(2, 9, DIM)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_it_cannot_be_causal_and_says_why():
    why = "cannot be causal: each of its projected keys is a mixture of all positions"
    with pytest.raises(ConfigurationError, match=why):
        LinformerAttention(Projections(DIM, 4), LengthProjection(LONGEST, RANK), causal=True)
    layer, x = LinformerAttention(Projections(DIM, 4), LengthProjection(LONGEST, RANK)), torch.randn(2, 9, DIM)
    with pytest.raises(MaskError, match=why):
        layer(x, mask=masks.causal())
    with pytest.raises(ConfigurationError, match=why):
        layer.make_cache()
    with pytest.raises(ConfigurationError, match=why):
        layer.step(x, None)
    with pytest.raises(MaskError, match="separates documents"):
        layer(x, mask=masks.documents([0] * 9))
    with pytest.raises(MaskError, match=r"window\(before=2\) is no mask"):
        layer(x, mask=masks.window(before=2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (LengthProjection(8, 3),),
            ShapeError,
            "has 9 positions, but the projection was built for at most max_length=8",
        ),
        ((LengthProjection(9, 3, 3),), ShapeError, "has 3 heads and the input 4 key heads"),
        ((nn.Linear(9, 3),), ConfigurationError, "key_length needs a LengthProjection; it is a Linear"),
        ((LengthProjection(9, 3), LengthProjection(9, 4)), ConfigurationError, "rank 3 and value_length 4"),
    ],
)
def test_bad_projections(arguments, error, message):
    with pytest.raises(error, match=message):
        LinformerAttention(Projections(DIM, 4), *arguments)(torch.randn(2, 9, DIM))


def test_bad_calls():
    layer, x = LinformerAttention(Projections(DIM, 4), LengthProjection(LONGEST, RANK)), torch.randn(2, 9, DIM)
    with pytest.raises(ConfigurationError, match="Linformer has no bias"):
        layer(x, bias=regard.biases.alibi(4))
    with pytest.raises(ConfigurationError, match="no rotary embedding"):
        layer(x, rotation=Rotary(2).rotation(torch.arange(9)))
    with pytest.raises(ConfigurationError, match="rank is 0"):
        LengthProjection(9, 0)
