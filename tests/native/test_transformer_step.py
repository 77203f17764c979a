"""A native step of a Transformer's decoder against the formula in float64, in each variant."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from regard.backends.cpu.transformer_step import (
    Activation,
    Affine,
    DecoderShape,
    LayerNormWeights,
    LayerWeights,
    Source,
    StepResult,
    TransformerDecoder,
)

pytestmark = pytest.mark.usefixtures("built")


class Sizes(NamedTuple):
    """Sizes of a decoder, its source and its rows."""

    layers: int
    heads: int
    key_heads: int
    head_dim: int
    dim: int
    hidden: int
    sentences: int
    shared: int
    keys: int
    steps: int


# Primes, so that no two axes can be taken for each other; grouped heads, heads wider than a vector, rows of many units.
SIZES = [
    Sizes(1, 1, 1, 1, 1, 1, 1, 1, 1, 2),
    Sizes(2, 3, 3, 7, 13, 17, 3, 5, 11, 4),
    Sizes(2, 6, 2, 11, 37, 53, 67, 2, 19, 3),
    Sizes(1, 2, 1, 67, 29, 131, 5, 1, 37, 19),
]


class Form(NamedTuple):
    """What layers are like: where their norms are, their activation, and what reads the target."""

    norm_first: bool
    activation: Activation
    recurrent: bool = False


FORMS = {
    "post": Form(False, Activation.RECTIFIED),
    "pre": Form(True, Activation.SILU),
    "post, recurrent": Form(False, Activation.RECTIFIED, recurrent=True),
    "pre, recurrent": Form(True, Activation.SILU, recurrent=True),
}


class Case(NamedTuple):
    """A decoder and a source, whose keys and values behind its lengths are NaN."""

    sizes: Sizes
    shape: DecoderShape
    layers: list[LayerWeights]
    last: LayerNormWeights | None
    source: Source


def affine(columns: int, terms: int, *, bias: bool = True) -> Affine:
    return Affine(torch.randn(columns, terms) / terms**0.5, torch.randn(columns) if bias else None)


def norm(dim: int, *, shift: bool = True) -> LayerNormWeights:
    return LayerNormWeights(torch.randn(dim), torch.randn(dim) if shift else None, 1e-3)


def layer(sizes: Sizes, form: Form) -> LayerWeights:
    inner, width, dim = sizes.heads * sizes.head_dim, sizes.key_heads * sizes.head_dim, sizes.dim
    if form.recurrent:
        read = Affine.joined(affine(dim, dim, bias=False), affine(dim, dim)), None
    else:
        own = (affine(columns, dim, bias=columns == inner) for columns in (inner, width, width))
        read = Affine.joined(*own), affine(dim, inner)
    return LayerWeights(
        *read,
        affine(inner, sizes.dim),
        affine(sizes.dim, inner, bias=False),
        affine(sizes.hidden, sizes.dim),
        affine(sizes.dim, sizes.hidden),
        *(norm(sizes.dim, shift=shift) for shift in (True, False, True)),
    )


def case(sizes: Sizes, form: Form) -> Case:
    torch.manual_seed(sum(sizes))
    lengths = torch.randint(0, sizes.keys + 1, (sizes.sentences,))
    lengths[0] = sizes.keys
    behind = (torch.arange(sizes.keys) >= lengths[:, None])[:, None, :, None]
    shape = sizes.sentences, sizes.keys, sizes.key_heads, sizes.head_dim
    layers = [
        (torch.randn(shape).transpose(1, 2).masked_fill(behind, math.nan), torch.randn(shape).transpose(1, 2))
        for _ in range(sizes.layers)
    ]
    layers = [(keys, values.masked_fill(behind, math.inf)) for keys, values in layers]
    return Case(
        sizes,
        DecoderShape(sizes.heads, sizes.key_heads, sizes.head_dim, *form),
        [layer(sizes, form) for _ in range(sizes.layers)],
        norm(sizes.dim) if form.norm_first else None,
        Source(layers, lengths),
    )


def normalized(x: Tensor, weights: LayerNormWeights | None) -> Tensor:
    if weights is None:
        return x
    gain, shift = weights.gain.to(x.dtype), 0.0 if weights.shift is None else weights.shift.to(x.dtype)
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.square().mean(-1, keepdim=True) + weights.epsilon).sqrt() + shift


def mapped(x: Tensor, weights: Affine) -> Tensor:
    bias = 0.0 if weights.bias is None else weights.bias.to(x.dtype)
    return x @ weights.weight.to(x.dtype).T + bias


def attended(query: Tensor, keys: Tensor, values: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The context of one row, query (heads * d), keys and values (key heads, tokens, d), and the weights."""
    query = query.unflatten(-1, (heads, -1))
    keys, values = (one.repeat_interleave(heads // len(keys), 0).to(query.dtype) for one in (keys, values))
    weights = torch.einsum("hd,htd->ht", query, keys).div(query.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("ht,htd->hd", weights, values).flatten(), weights


class Row:
    """One row of the search by the formula: the tokens that it has read, and what each layer keeps of them."""

    def __init__(self, told: Case, dtype: torch.dtype, sentence: int, kept: list[list[Tensor]] | None = None) -> None:
        self.told, self.dtype, self.sentence = told, dtype, sentence
        self.kept = [[] for _ in told.layers] if kept is None else [[*tokens] for tokens in kept]

    def step(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The features of a token, and its weights to target and source in each layer."""
        told, x, own, seen = self.told, x.to(self.dtype), [], []
        for number, weights in enumerate(told.layers):
            for norm_weights, sublayer in (
                (weights.own_norm, lambda x, n=number: self.read_target(x, n, own)),
                (weights.norm, lambda x, n=number: self.read_source(x, n, seen)),
                (weights.feed_forward_norm, lambda x, n=number: self.feed_forward(x, n)),
            ):
                if told.shape.norm_first:
                    x = x + sublayer(normalized(x, norm_weights))
                else:
                    x = normalized(x + sublayer(x), norm_weights)
        return normalized(x, told.last), own, seen

    def read_target(self, x: Tensor, number: int, found: list[Tensor]) -> Tensor:
        heads, key_heads, dim = self.told.shape[:3]
        joined = mapped(x, self.told.layers[number].own)
        if self.told.shape.recurrent:
            written, gates = joined.chunk(2)
            state = self.kept[number][-1] if self.kept[number] else torch.zeros_like(written)
            self.kept[number].append(gates.sigmoid() * state + (-gates).sigmoid() * written)
            return self.kept[number][-1].clamp(min=0.0)
        query, key, value = joined.split([heads * dim, key_heads * dim, key_heads * dim])
        self.kept[number].append(torch.stack([key, value]).unflatten(-1, (key_heads, dim)))
        keys, values = torch.stack(self.kept[number], 2)
        context, weights = attended(query, keys, values, heads)
        found.append(weights)
        output = self.told.layers[number].own_output
        assert output is not None
        return mapped(context, output)

    def read_source(self, x: Tensor, number: int, found: list[Tensor]) -> Tensor:
        (keys, values), length = self.told.source.layers[number], int(self.told.source.lengths[self.sentence])
        query = mapped(x, self.told.layers[number].query)
        keys, values = (one[self.sentence, :, :length] for one in (keys, values))
        context, weights = attended(query, keys, values, self.told.shape.heads)
        found.append(functional.pad(weights, (0, self.told.sizes.keys - length)))
        return mapped(context, self.told.layers[number].output)

    def feed_forward(self, x: Tensor, number: int) -> Tensor:
        hidden = mapped(x, self.told.layers[number].up)
        hidden = hidden * hidden.sigmoid() if self.told.shape.activation is Activation.SILU else hidden.clamp(min=0.0)
        return mapped(hidden, self.told.layers[number].down)


def searched(told: Case) -> list[tuple[Tensor, Tensor]]:
    """The inputs of each step, and the rows of the step before that they continue: moved, repeated and dropped."""
    rows = told.sizes.sentences * told.sizes.shared
    of_sentence = torch.arange(rows) // told.sizes.shared * told.sizes.shared
    return [
        (torch.randn(rows, told.sizes.dim), of_sentence + torch.randint(0, told.sizes.shared, (rows,)))
        for _ in range(told.sizes.steps)
    ]


def natively(told: Case, steps: list[tuple[Tensor, Tensor]], *, in_bytes: bool = False) -> StepResult:
    """The result of the last step."""
    decoder = TransformerDecoder.pack_weights(told.shape, told.layers, told.last, in_bytes=in_bytes)
    past, rows = [], len(steps[0][0])
    table, result = torch.zeros(rows, 0, dtype=torch.int32), None
    for number, (x, parents) in enumerate(steps):
        table = table[parents] if number else table
        result = decoder.step(x, past, table, told.source, observe=True)
        past.append(result.own)
        table = torch.cat([table, torch.arange(rows, dtype=torch.int32)[:, None]], 1)
    assert result is not None
    return result


def by_formula(told: Case, steps: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
    rows, results = [Row(told, dtype, row // told.sizes.shared) for row in range(len(steps[0][0]))], []
    for number, (x, parents) in enumerate(steps):
        if number:
            rows = [Row(told, dtype, rows[parent].sentence, rows[parent].kept) for parent in parents.tolist()]
        results = [row.step(one) for row, one in zip(rows, x, strict=True)]
    features, own, seen = zip(*results, strict=True)
    weights = (seen,) if told.shape.recurrent else (seen, own)
    return [torch.stack(features), *(torch.stack([torch.stack(of_row) for of_row in each]) for each in weights)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_features_and_weights(sizes, form, variant):
    told = case(sizes, FORMS[form])
    steps = searched(told)
    result = natively(told, steps)
    all_found = result.features, result.weights, result.self_weights
    assert result.weights is not None
    assert (result.self_weights is None) == told.shape.recurrent
    found = [one for one in all_found if one is not None]
    true, plain = (by_formula(told, steps, dtype) for dtype in (torch.float64, torch.float32))
    for has, one, other in zip(found, true, plain, strict=True):
        assert has.shape == one.shape
        budget = 5 * (other - one).abs().max() + 8 * torch.finfo(torch.float32).eps * one.abs().max().clamp(min=1.0)
        assert (has - one).abs().max() <= budget


@pytest.mark.parametrize("form", FORMS)
def test_steps_in_bytes_are_near(form, variant):
    told = case(SIZES[2], FORMS[form])
    steps = searched(told)
    found, plain = natively(told, steps, in_bytes=True).features, natively(told, steps).features
    (true, *_) = by_formula(told, steps, torch.float64)
    # A rounding changes a number by up to 1/254 of the largest of its row, some three of its deviations. As many of
    # these errors as there are products on the way, of two factors in 6 maps of 2 layers, add up like noise.
    assert (found - true).norm() <= 24**0.5 * 3 / 254 * true.norm()
    assert (found - true).norm() >= 100 * (plain - true).norm()


@pytest.mark.parametrize("form", ["post", "post, recurrent"])
def test_a_row_does_not_depend_on_its_batch(form, variant):
    told = case(SIZES[2], FORMS[form])
    steps = searched(told)[:1]
    together = natively(told, steps)
    part = slice(100, 110)
    few = told._replace(
        source=Source([(k[50:55], v[50:55]) for k, v in told.source.layers], told.source.lengths[50:55])
    )
    alone = natively(few, [(steps[0][0][part], steps[0][1][:10])])
    assert torch.equal(alone.features, together.features[part])


@pytest.mark.parametrize("form", ["post", "post, recurrent"])
def test_nan_stays_in_its_row(form, variant):
    told = case(SIZES[1], FORMS[form])
    ((x, parents),) = searched(told)[:1]
    expected = natively(told, [(x, parents)]).features
    poisoned = x.index_fill(0, torch.tensor([4]), math.nan)
    found = natively(told, [(poisoned, parents)]).features
    assert found[4].isnan().all()
    others = torch.arange(len(x)) != 4
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("form", ["post, recurrent", "pre, recurrent"])
def test_a_recurrent_decoder_reads_the_last_step_alone(form, variant):
    told = case(SIZES[2], FORMS[form])
    steps = searched(told)
    decoder = TransformerDecoder.pack_weights(told.shape, told.layers, told.last)
    result = decoder.step(steps[0][0], [], torch.zeros(len(steps[0][0]), 0, dtype=torch.int32), told.source)
    for x, parents in steps[1:]:
        result = decoder.step(x, [result.own], parents[:, None].to(torch.int32), told.source)
    assert torch.equal(result.features, natively(told, steps).features)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_state_that_is_no_number_stays_in_its_row(value, variant):
    told = case(SIZES[1], FORMS["pre, recurrent"])
    (first, _), (second, _) = searched(told)[:2]
    rows = len(first)
    decoder = TransformerDecoder.pack_weights(told.shape, told.layers, told.last)
    kept = decoder.step(first, [], torch.zeros(rows, 0, dtype=torch.int32), told.source).own
    table = torch.arange(rows, dtype=torch.int32)[:, None]
    expected = decoder.step(second, [kept], table, told.source)
    kept = kept.clone()
    kept[0, 0, 4, 5] = value
    found = decoder.step(second, [kept], table, told.source)
    # Its gate is neither 0 nor 1: the state stays as it is, of either sign.
    torch.testing.assert_close(found.own[0, 0, 4, 5], torch.tensor(value), equal_nan=True)
    others = torch.arange(rows) != 4
    assert torch.equal(found.features[others], expected.features[others])
