"""Each method's output and weights are those of its formula, and it says what it cannot compute."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, scores
from regard.approximations import Linearized, Linformer, Masked, Nystrom, RandomProjection, Rounded, SegmentMeans
from regard.approximations.methods import as_method
from regard.core.batched_problem import BatchedProblem
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.kernels import zero_nonfinite_inputs
from regard.kernels.validation import make_problem
from regard.linear import Elu, FavorPlus, Identity, Relu, Softmax


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 37, 8), (2, 2, 37, 8), (2, 2, 37, 5)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


def whole_weights(method, problem):
    """All weights of a method, from tiles of uneven sizes, (B, H, M, N)."""
    weights = method.weights(zero_nonfinite_inputs(problem))
    batch, heads, queries, keys = BatchedProblem.from_problem(problem).shape
    whole = torch.full((batch, heads, queries, keys), math.nan, dtype=torch.float64)
    for b in (slice(0, 1), slice(1, batch)):
        for rows in (slice(0, queries // 2), slice(queries // 2, queries)):
            for columns in (slice(0, 2), slice(2, keys)):
                if b.start < batch:
                    whole[b, :, rows, columns] = weights.tile(b, rows, columns)
    return whole


METHODS = [
    *(Elu(), Relu(), Softmax(), FavorPlus(8, 16, seed=1), FavorPlus(8, 16, seed=1, kernel="relu")),
    *(Linformer(RandomProjection(6)), Linformer(SegmentMeans(6)), Linformer(torch.rand(2, 6, 40), torch.rand(6, 50))),
    *(masks.window(before=3, after=2), torch.float32, Nystrom(6)),
]
MASKS = {
    "all": None,
    "causal": masks.causal(),
    "padding": masks.padding(lengths=[37, 11]),
    "causal and padding": masks.causal() & masks.padding(lengths=[20, 37]),
    "documents": masks.documents(torch.arange(37) // 10),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_output_is_the_values_by_the_weights(method, mask):
    method = as_method(method)
    query, key, value = tensors()
    problem = make_problem(query, key, value, mask=MASKS[mask], scale=0.4)
    if method.why_not(problem):
        assert isinstance(method, Linformer | Nystrom)
        assert mask in ("causal", "causal and padding", "documents") or isinstance(method, Nystrom)
        return
    weights, output = whole_weights(method, problem), method.run(problem)
    assert output.dtype == torch.float64
    tolerance = 1e-5 if isinstance(method, Rounded) else 1e-10
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), output, rtol=tolerance, atol=tolerance)
    if not isinstance(method, Linformer | Nystrom):
        # A row whose features have no product above 0, or that has no keys, has no weights.
        sums = weights.sum(-1)
        assert bool((((sums - 1).abs() < 1e-5) | (weights == 0).all(-1)).all())
        keep = True if MASKS[mask] is None else MASKS[mask].dense(37, 37)
        assert bool((weights[(~torch.as_tensor(keep)).expand_as(weights)] == 0).all())


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 2, 5)], ids=["no batch", "no heads", "two batch axes"])
@pytest.mark.parametrize(
    "method",
    [Elu(), Linformer(SegmentMeans(3)), Linformer(torch.rand(1, 3, 5)), Nystrom(3), masks.window(1), torch.float32],
    ids=str,
)
def test_any_leading_axes(shape, method):
    query, key, value = torch.randn(3, *shape, 4, dtype=torch.float64)
    method, problem = as_method(method), make_problem(query, key, value)
    expected = whole_weights(method, problem) @ BatchedProblem.from_problem(problem).value
    torch.testing.assert_close(expected.reshape(value.shape), method.run(problem), rtol=1e-5, atol=1e-5)
    found = regard.approximation(query, key, value, method, lengths=(5,))
    assert found.rows.shape == expected.shape[:3]


def test_favor_plus_follows_the_scale():
    query, key, value = tensors()
    exact = regard.attention(query, key, value, scale=0.11)
    features = FavorPlus(8, 2**14, seed=0)
    errors = [
        float((as_method(features).run(make_problem(query, key, value, scale=scale)) - exact).norm())
        for scale in (0.11, None)
    ]
    assert errors[0] < errors[1] / 3


def test_sparse_attention_is_attention_with_both_masks():
    query, key, value = tensors()
    problem = make_problem(query, key, value, mask=masks.causal(), bias=biases.alibi(4), softcap=3.0)
    expected = regard.attention(
        query, key, value, mask=masks.causal() & masks.window(before=4), bias=biases.alibi(4), softcap=3.0
    )
    assert torch.equal(Masked(masks.window(before=4)).run(problem), expected)


def test_what_stands_for_a_method():
    assert as_method(Elu()) == Linearized(Elu())
    assert as_method(masks.causal()) == Masked(masks.causal())
    assert as_method(torch.bfloat16) == Rounded(torch.bfloat16)
    assert as_method(torch.relu) == Linearized(torch.relu)
    method = Linformer(SegmentMeans(3))
    assert as_method(method) is method


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("performer", "method is 'performer': it needs a feature map such as .* a mask such as .*Linformer"),
        (None, "method is None: it needs a feature map"),
        (Elu, r"make one, as Elu\(\.\.\.\)"),
        (torch.zeros(3), "it needs a feature map"),
    ],
)
def test_no_method(method, message):
    with pytest.raises(ConfigurationError, match=message):
        as_method(method)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Rounded(torch.int8), DtypeError, "method is torch.int8; attention is computed in torch.float32"),
        (lambda: RandomProjection(0), ConfigurationError, "rank"),
        (lambda: SegmentMeans(0), ConfigurationError, "rank"),
        (
            lambda: Linformer(cast("Any", 64)),
            ConfigurationError,
            r"projection is 64; it needs .*RandomProjection\(rank\)",
        ),
        (lambda: Linformer(cast("Any", SegmentMeans)), ConfigurationError, "projection is <class"),
        (lambda: Linformer(torch.zeros(4)), ShapeError, r"projection is \(4,\); it needs \(rank, length\)"),
    ],
)
def test_settings_that_do_not_fit(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (Elu(), {"bias": biases.alibi(4)}, "linear attention has no scores of single pairs, so it cannot have a bias"),
        (Elu(), {"softcap": 2.0, "sinks": torch.zeros(4).double()}, "cannot have a softcap or sinks"),
        (Elu(), {"mask": masks.window(3)}, "is no mask for linear attention"),
        (Elu(), {"mask": masks.causal(), "query_positions": range(1, 38)}, "a query for each key, at its position"),
        (FavorPlus(16), {}, r"the feature map has dim=16, but queries and keys have 8: FavorPlus\(8\)"),
        (Linformer(SegmentMeans(4)), {"mask": masks.causal()}, "Linformer cannot be causal"),
        (Linformer(SegmentMeans(4)), {"mask": masks.window(3)}, "is no mask for Linformer.* it takes padding"),
        (Linformer(SegmentMeans(4)), {"mask": MASKS["documents"]}, "pass each as a sequence of its own"),
        (Linformer(torch.zeros(4, 30)), {}, "there are 37 keys, and the projection is for at most 30"),
        (Linformer(torch.zeros(3, 4, 40)), {}, "the projection has 3 heads and there are 2 key heads"),
        (Linformer(torch.zeros(4, 40), SegmentMeans(5)), {}, "the projection has the rank 4 and that of values 5"),
        (torch.float64, {}, "torch.float64 does not have fewer bits"),
        (masks.padding(lengths=[1, 2, 3]), {}, "padding"),
    ],
)
def test_a_problem_that_a_method_cannot_compute(method, options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        regard.approximation(*tensors(), method, lengths=(), **options)


def test_additive_scores_have_no_linear_attention():
    query, key, value = torch.randn(3, 5, 4)
    score = scores.Additive(4, 4, hidden_dim=3)
    with pytest.raises(ConfigurationError, match="approximates dot products, and the score is additive"):
        regard.approximation(query, key, value, Elu(), score=score, lengths=())
    assert regard.approximation(query, key, value, masks.window(2), score=score, lengths=()).error > 0
    assert 0 < regard.approximation(query, key, value, torch.bfloat16, score=score, lengths=()).error < 0.1


def test_projections():
    assert torch.equal(SegmentMeans(2)(3), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    assert SegmentMeans(8)(3).equal(torch.eye(3))
    drawn = RandomProjection(50, seed=3)(400)
    assert drawn.equal(RandomProjection(50, seed=3)(400))
    assert not drawn.equal(RandomProjection(50, seed=3).redraw(4)(400))
    assert abs(float(drawn.std()) * 50**0.5 - 1) < 0.02


def test_linformer_is_the_layer():
    torch.manual_seed(0)
    layer = regard.nn.LinformerAttention(
        regard.nn.Projections(16, num_heads=4),
        regard.nn.LengthProjection(30, rank=7),
        regard.nn.LengthProjection(30, rank=7),
    )
    x = torch.randn(2, 20, 16)
    seen = []
    with torch.no_grad():
        query, (key, value) = layer.projections.queries(x), layer.projections.keys_and_values(x)
        method = Linformer(layer.key_length.weight, layer.value_length.weight)
        context = method.run(make_problem(query, key, value))
        seen = layer.projections.project_output(context)
        torch.testing.assert_close(seen, layer(x))


def test_features_below_0_have_no_weights_that_are_shares():
    found = regard.approximation(*tensors(), Identity(), lengths=())
    assert found.weights is None
    assert "weights" in str(found)
    assert "not compared" in str(found)
