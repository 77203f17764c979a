"""Each score against its equation, pair by pair."""

import copy
import math
from dataclasses import replace

import pytest
import torch

import regard
from regard import masks, scores
from regard.errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from regard.scores import AdditivePairs, DotPairs, Score

QUERY, KEY, HIDDEN = 3, 5, 7


def by_hand(score: Score, query: torch.Tensor, key: torch.Tensor, j: int) -> torch.Tensor:
    """f(q, k) of one query (Dq,) and one key (Dk,) at index j, as the paper has it."""
    match score:
        case scores.Dot():
            return query @ key
        case scores.ScaledDot():
            return query @ key * (score.scale if score.scale is not None else 1 / math.sqrt(len(query)))
        case scores.General():
            return query @ score.weight @ key
        case scores.Additive():
            return score.weight @ torch.tanh(score.query_weight @ query + score.key_weight @ key)
        case scores.Concat():
            return score.weight @ torch.tanh(score.matrix @ torch.cat([query, key]))
        case scores.Location():
            return (score.weight @ query)[j]
        case _:
            raise ValueError(score)


SCORES = [
    scores.Dot(),
    scores.ScaledDot(),
    scores.ScaledDot(-2.0),
    scores.General(QUERY, KEY),
    scores.Additive(QUERY, KEY, HIDDEN),
    scores.Concat(QUERY, KEY, HIDDEN),
    scores.Location(QUERY, 11),
]
each_score = pytest.mark.parametrize("score", SCORES, ids=repr)


def dims(score: Score) -> tuple[int, int]:
    return (QUERY, QUERY) if isinstance(score, scores.Dot | scores.ScaledDot) else (QUERY, KEY)


@each_score
def test_the_equation(score):
    query_dim, key_dim = dims(score)
    query, key = torch.randn(4, query_dim), torch.randn(6, key_dim)
    values = score.pairs(query, key).scores()
    for i in range(4):
        for j in range(6):
            torch.testing.assert_close(values[i, j], by_hand(score, query[i], key[j], j), atol=1e-6, rtol=1e-5)


@each_score
def test_heads_and_groups(score):
    query_dim, key_dim = dims(score)
    query, key = torch.randn(2, 6, 4, query_dim), torch.randn(2, 3, 5, key_dim)
    values = score.pairs(query, key).scores()
    assert values.shape == (2, 6, 4, 5)
    for head in range(6):
        alone = score.pairs(query[:, head], key[:, head // 2]).scores()
        torch.testing.assert_close(values[:, head], alone, atol=1e-6, rtol=1e-5)


@each_score
def test_a_tile_is_a_part_of_the_whole(score):
    query_dim, key_dim = dims(score)
    pairs = score.pairs(torch.randn(2, 3, 4, query_dim), torch.randn(2, 3, 6, key_dim))
    tile = pairs.tile(slice(1, 3), slice(2, 5)).scores()
    torch.testing.assert_close(tile, pairs.scores()[..., 1:3, 2:5], atol=1e-6, rtol=1e-5)


@each_score
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32(score, dtype):
    query_dim, key_dim = dims(score)
    pairs = score.pairs(torch.randn(4, query_dim), torch.randn(6, key_dim))
    assert replace(pairs, query=pairs.query.to(dtype), key=pairs.key.to(dtype)).scores().dtype == torch.float32


@each_score
def test_over_projected_keys(score):
    query_dim, key_dim = dims(score)
    query, key, value = torch.randn(4, query_dim), torch.randn(6, key_dim), torch.randn(6, 2)
    over = score.over_projected_keys()
    assert torch.equal(over.pairs(query, score.project_key(key)).scores(), score.pairs(query, key).scores())
    projected = regard.attention(query, score.project_key(key), value, score=over)
    assert torch.equal(projected, regard.attention(query, key, value, score=score))
    assert repr(over) == f"{score!r}.over_projected_keys()"


@each_score
def test_every_parameter_gets_a_gradient(score):
    query_dim, key_dim = dims(score)
    query, key, value = torch.randn(4, query_dim), torch.randn(6, key_dim), torch.randn(6, 2)
    parameters = list(score.parameters())
    gradients = torch.autograd.grad(
        regard.attention(query.requires_grad_(), key, value, score=score).square().sum(), [query, *parameters]
    )
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_pair_forms():
    query, key = torch.randn(4, QUERY), torch.randn(6, KEY)
    for score in (scores.General(QUERY, KEY), scores.Location(QUERY, 11)):
        assert isinstance(score.pairs(query, key), DotPairs)
    for score in (scores.Additive(QUERY, KEY, HIDDEN), scores.Concat(QUERY, KEY, HIDDEN)):
        assert isinstance(score.pairs(query, key), AdditivePairs)


def test_shapes_of_the_parameters():
    def shapes(score: Score) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in score.named_parameters()}

    assert shapes(scores.Dot()) == shapes(scores.ScaledDot()) == {}
    assert shapes(scores.General(3, 5)) == {"weight": (3, 5)}
    assert shapes(scores.Additive(3, 5, 7)) == {"query_weight": (7, 3), "key_weight": (7, 5), "weight": (7,)}
    assert shapes(scores.Concat(3, 5, 7)) == {"matrix": (7, 8), "weight": (7,)}
    assert shapes(scores.Location(3, 11)) == {"weight": (11, 3)}


def test_concat_is_additive_with_its_halves():
    concat, additive = scores.Concat(QUERY, KEY, HIDDEN), scores.Additive(QUERY, KEY, HIDDEN)
    with torch.no_grad():
        additive.query_weight.copy_(concat.matrix[:, :QUERY])
        additive.key_weight.copy_(concat.matrix[:, QUERY:])
        additive.weight.copy_(concat.weight)
    query, key = torch.randn(4, QUERY), torch.randn(6, KEY)
    assert torch.equal(concat.pairs(query, key).scores(), additive.pairs(query, key).scores())


def test_the_default_is_scaled_dot():
    query, key, value = torch.randn(4, 3), torch.randn(6, 3), torch.randn(6, 2)
    assert torch.equal(
        regard.attention(query, key, value), regard.attention(query, key, value, score=scores.ScaledDot())
    )
    scaled = regard.attention(query, key, value, score=scores.ScaledDot(0.3))
    assert torch.equal(regard.attention(query, key, value, scale=0.3), scaled)


@pytest.mark.parametrize(
    ("score", "written"),
    [
        (scores.Dot(), "Dot()"),
        (scores.ScaledDot(), "ScaledDot()"),
        (scores.ScaledDot(0.5), "ScaledDot(scale=0.5)"),
        (scores.General(3, 5), "General(query_dim=3, key_dim=5)"),
        (scores.Additive(3, 5, 7), "Additive(query_dim=3, key_dim=5, hidden_dim=7)"),
        (scores.Concat(3, 5, 7), "Concat(query_dim=3, key_dim=5, hidden_dim=7)"),
        (scores.Location(3, 11), "Location(query_dim=3, max_length=11)"),
    ],
)
def test_repr(score, written):
    assert repr(score) == written


@pytest.mark.parametrize("score", SCORES[3:], ids=repr)
def test_a_wrong_query_dim(score):
    with pytest.raises(ShapeError, match=r"query has the dim 4 \(shape \(2, 4\)\), but .* was made for query_dim=3"):
        score.pairs(torch.zeros(2, 4), torch.zeros(6, KEY))


@pytest.mark.parametrize("score", SCORES[3:6], ids=repr)
def test_a_wrong_key_dim(score):
    with pytest.raises(ShapeError, match=r"key has the dim 4 \(shape \(6, 4\)\), but .* was made for key_dim=5"):
        score.pairs(torch.zeros(2, QUERY), torch.zeros(6, 4))


@pytest.mark.parametrize("score", SCORES[:2], ids=repr)
def test_a_dot_product_of_different_dims(score):
    with pytest.raises(
        ShapeError, match=r"query has the dim 3 and key 5: .*Dot needs equal dims; scores.General\(3, 5\)"
    ):
        score.pairs(torch.zeros(2, 3), torch.zeros(6, 5))


def test_more_keys_than_location_knows():
    with pytest.raises(ShapeError, match=r"key has 12 positions, but Location.* at most max_length=11: shorten"):
        scores.Location(QUERY, 11).pairs(torch.zeros(2, QUERY), torch.zeros(12, KEY))
    assert scores.Location(QUERY, 11).pairs(torch.zeros(2, QUERY), torch.zeros(11, 1)).scores().shape == (2, 11)


@pytest.mark.parametrize("score", SCORES[3:], ids=repr)
def test_a_score_of_another_dtype(score):
    query, key = torch.zeros(2, QUERY).double(), torch.zeros(6, KEY).double()
    with pytest.raises(DtypeError, match=r"query is torch.float64, but the parameters of .* are torch.float32"):
        regard.attention(query, key, key, score=score)


@pytest.mark.parametrize("score", SCORES[3:], ids=repr)
def test_a_score_on_another_device(score):
    query, key = torch.zeros(2, QUERY), torch.zeros(6, KEY)
    with pytest.raises(DeviceError, match=r"query is on cpu, but the parameters of .* are on meta"):
        regard.attention(query, key, key, score=copy.deepcopy(score).to("meta"))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_a_score_called_as_a_module_gives_all_scores(leading):
    for score in (scores.Dot(), scores.ScaledDot(0.5), scores.General(4, 4), scores.Additive(4, 4, 5)):
        query, key = torch.randn(*leading, 5, 4), torch.randn(*leading, 7, 4)
        given = score(query, key)
        assert given.shape == (*leading, 5, 7)
        torch.testing.assert_close(given, score.pairs(query, key).scores())
    grouped = scores.Dot()(torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4))
    assert grouped.shape == (2, 6, 5, 7)


class Unknown(scores.Score):
    """A pair form that no kernel computes."""

    def form(self, query, key):
        return torch.cdist(query, key)


class Fails(scores.Score):
    def form(self, query, key):
        return scores.DotPairs(query, key @ torch.zeros(99, 1), 1.0)


@pytest.mark.parametrize("masked", [False, True])
def test_a_pair_form_that_no_kernel_computes(masked):
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    query.data[0, 0, 0, 0] = torch.nan
    mask = masks.causal() if masked else None
    match = r"score Unknown\(\) gives a Tensor, which no kernel computes: .*DotPairs\(query, key, scale\) or .*Additive"
    with pytest.raises(ConfigurationError, match=match):
        regard.attention(query, query, query, score=Unknown(), mask=mask)


def test_a_score_that_fails_names_itself():
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ConfigurationError, match=r"score Fails\(\) fails for query \(1, 2, 5, 4\) and .*Runtime"):
        regard.attention(query, query, query, score=Fails())


@pytest.mark.parametrize("form", ["DotPairs(query, key, scale)", "AdditivePairs(query, key, weight)"])
def test_help_names_the_pair_forms(form):
    assert form in scores.Score.__doc__
