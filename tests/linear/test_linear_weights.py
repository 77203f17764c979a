"""The weights of linear attention: lenses, records and rows of signed weights against the quadratic form."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks
from regard.attention import observe_problem, run_problem
from regard.backends.torch.tile_scores import make_tile_scores
from regard.core.score_forms import DecayedDotPairs
from regard.errors import ConfigurationError, KernelError, MaskError
from regard.explorer import Atlas, record
from regard.kernels.formula import formula
from regard.kernels.hooks import attention_hook
from regard.linear import (
    DeltaRule,
    Elu,
    FavorPlus,
    FeatureDecay,
    HeadDecay,
    Identity,
    Relu,
    Softmax,
    linear_attention_weights,
)
from regard.linear.linear_weights import make_weights_problem
from regard.linear.naive import quadratic_weights, step_recurrence

HEADS, KEY_HEADS, LENGTH = 4, 2, 67
MAPS = [Elu(), Relu(), Softmax(), FavorPlus(8, 24, seed=1)]


def inputs(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (2, HEADS, length, 8), (2, KEY_HEADS, length, 8), (2, KEY_HEADS, length, 5)
    query, key, value = (torch.randn(size, dtype=dtype) for size in sizes)
    return query, key, value


def decays(per: str | None, features: int = 8) -> Tensor | None:
    """Logarithms of decays, among them one that forgets all and long runs that forget nothing."""
    if per is None:
        return None
    shape = (2, KEY_HEADS, LENGTH) if per == "head" else (2, KEY_HEADS, LENGTH, features)
    decay = -torch.rand(shape) * 2
    decay[:, :, 20:40] = 0.0
    decay[:, :, 50] = -60.0
    return decay


def expected(query: Tensor, key: Tensor, feature_map, *, keep: Tensor, decay: Tensor | None = None) -> Tensor:
    """The weights in float64, with all of them in memory."""
    wide = [feature_map(tensor.double()) for tensor in (query, key)]
    return quadratic_weights(*wide, keep=keep, decay=None if decay is None else decay.double(), normalize=True)


def causal_pairs(length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("per", [None, "head", "feature"])
@pytest.mark.parametrize("feature_map", MAPS, ids=lambda feature_map: type(feature_map).__name__)
def test_lenses_show_the_weights_of_the_quadratic_form(feature_map, per):
    query, key, value = inputs()
    decay = decays(per, feature_map(key).shape[-1])
    true = expected(query, key, feature_map, keep=causal_pairs(), decay=decay)
    chosen = (
        lenses.Weights(),
        lenses.Weights(slice(3, 60, 4), slice(5, 50)),
        lenses.Entropy(),
        lenses.Received(),
        lenses.TopK(3),
        lenses.Pooled((8, 8)),
    )
    options = {"feature_map": feature_map, "causal": True, "decay": decay}
    seen = regard.observe_linear_attention(query, key, value, *chosen, **options)
    weights, corner, entropy, received, top, pooled = chosen
    close = {"atol": 3e-6, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(seen[weights], true, **close)
    torch.testing.assert_close(seen[corner], true[..., 3:60:4, 5:50], **close)
    torch.testing.assert_close(seen[entropy], -torch.special.xlogy(true, true).sum(-1), **close)
    torch.testing.assert_close(seen[received], true.sum(-2), **close)
    torch.testing.assert_close(seen[top].weights, true.topk(3).values, **close)
    exact = regard.observe(query, key, value, pooled, mask=masks.causal())
    assert seen[pooled].shape == exact[pooled].shape
    output = regard.linear_attention(query, key, value, **options)
    torch.testing.assert_close(seen.output, output, atol=1e-5, rtol=1e-5)


KEYS = torch.rand(2, 1, 1, LENGTH) < 0.7
MASKS = {
    "none": (None, torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)),
    "padding": (masks.padding([LENGTH, 30]), None),
    "keys": (masks.where(keep=KEYS), None),
    "documents": (masks.documents(torch.arange(LENGTH) // 20), None),
    "causal documents": (masks.causal() & masks.documents(torch.arange(LENGTH) // 20), None),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("feature_map", [Elu(), FavorPlus(8, 24, seed=1)], ids=["Elu", "FavorPlus"])
def test_masks(name, feature_map):
    query, key, value = inputs()
    mask, keep = MASKS[name]
    if mask is not None:
        keep = mask.dense(LENGTH, LENGTH)
        keep = keep if keep.ndim != 3 else keep[:, None]
    weights = lenses.Weights()
    seen = regard.observe_linear_attention(query, key, value, weights, feature_map=feature_map, mask=mask)
    true = expected(query, key, feature_map, keep=keep)
    torch.testing.assert_close(seen[weights], true, atol=3e-6, rtol=1e-5, check_dtype=False)
    torch.testing.assert_close(
        seen.output,
        regard.linear_attention(query, key, value, feature_map=feature_map, mask=mask),
        atol=1e-5,
        rtol=1e-5,
    )


def test_a_tensor_of_keys_and_inputs_without_heads():
    query, key, value = (torch.randn(9, 4) for _ in range(3))
    keep, weights = torch.arange(9) != 2, lenses.Weights()
    seen = regard.observe_linear_attention(query, key, value, weights, mask=keep)
    true = expected(query[None, None], key[None, None], Elu(), keep=keep)[0, 0]
    torch.testing.assert_close(seen[weights], true, atol=3e-6, rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    query, key, value = inputs(dtype)
    weights = lenses.Weights()
    seen = regard.observe_linear_attention(query, key, value, weights, causal=True)
    true = expected(query, key, Elu(), keep=causal_pairs())
    torch.testing.assert_close(seen[weights], true, atol=3e-6, rtol=1e-5, check_dtype=False)
    assert seen.output.dtype == dtype


def test_nan_reaches_the_rows_that_attend_to_it_and_no_others():
    query, key, value = inputs()
    key[0, 0, 30] = math.nan
    query[1, 3, 5] = math.inf
    received, entropy = lenses.Received(), lenses.Entropy()
    keep = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    seen = regard.observe_linear_attention(query, key, value, entropy, received, causal=True)
    bad = seen[entropy].isnan()
    assert bad[0, :2, 30:].all()
    assert bad[1, 3, 5]
    assert bad.sum() == 2 * (LENGTH - 30) + 1
    keep[0, :, :, 30] = False
    seen = regard.observe_linear_attention(query, key, value, entropy, causal=True, mask=masks.where(keep=keep))
    assert seen[entropy].isnan().sum() == 1


def test_a_row_without_weights_shows_none():
    query, key, value = (torch.full((1, 1, 6, 4), -1.0) for _ in range(3))
    key[..., 3:, :] = 1.0
    query[..., 4:, :] = 1.0
    weights = lenses.Weights()
    seen = regard.observe_linear_attention(query, key, value, weights, feature_map=Relu(), causal=True)
    assert (seen[weights][..., :4, :] == 0).all()
    assert (seen.lse[..., :4] == -math.inf).all()
    torch.testing.assert_close(seen[weights][0, 0, 5], torch.tensor([0, 0, 0, 1, 1, 1]) / 3)


@pytest.mark.parametrize("per", [None, "head", "feature"])
def test_decay_over_a_long_sequence(per):
    """Sums of decays have 24 bits each: near pairs after 200,000 positions have the decay between them."""
    length, tail = 200_000, 64
    query, key = torch.rand(1, 1, length, 4) + 0.1, torch.rand(1, 1, length, 4) + 0.1
    decay = None if per is None else -torch.rand((1, 1, length) if per == "head" else (1, 1, length, 4)) * 0.3
    lens = lenses.Weights(slice(length - tail, None), slice(length - tail, None))
    seen = regard.observe_linear_attention(query, key, key, lens, causal=True, decay=decay)
    # Weights relative to that of the diagonal, which needs no row sum.
    own = seen[lens][0, 0] / seen[lens][0, 0].diagonal()[:, None]
    part = (slice(None), slice(None), slice(length - tail, None))
    true = quadratic_weights(
        Elu()(query[part].double()),
        Elu()(key[part].double()),
        keep=causal_pairs(tail),
        decay=None if decay is None else decay[part].double(),
    )[0, 0]
    torch.testing.assert_close(own, true / true.diagonal()[:, None], atol=0, rtol=3e-5, check_dtype=False)


@pytest.mark.parametrize("per", ["head", "feature"])
def test_tiles_of_decayed_scores(per):
    query, key, _ = (tensor.double() for tensor in inputs())
    decay = decays(per)
    assert decay is not None
    decay = decay.double()
    pairs = DecayedDotPairs.from_decay(query, key, decay.unsqueeze(-1) if decay.ndim == 3 else decay)
    whole, tiles = pairs.scores().tril(), make_tile_scores(pairs)
    rows, columns = slice(33, 66), slice(10, 34)  # all of j <= i
    torch.testing.assert_close(tiles.scores(rows, columns), whole[..., rows, columns])
    torch.testing.assert_close(pairs.uniform().scores().tril(), causal_pairs().double().expand_as(whole))
    torch.testing.assert_close(pairs.decay()[:, :, 1:], decay[:, :, 1:])


@pytest.mark.parametrize("per", [None, "head", "feature"])
def test_the_operator_runs_by_itself(per):
    query, key, value = inputs()
    problem = make_weights_problem(query, key, value, causal=True, decay=decays(per))
    found, true = run_problem(problem), formula(replace(problem, wants_lse=True))
    torch.testing.assert_close(found.output, true.output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse, true.lse, atol=1e-5, rtol=1e-5)
    seen = observe_problem(problem, ())
    torch.testing.assert_close(seen.output, found.output)


def test_weights_have_gradients():
    query, key, value = (tensor.double() for tensor in inputs(length=11))
    leaves = [query.requires_grad_(), key.requires_grad_()]
    lens = lenses.Weights(slice(2, 9), slice(0, 9))
    seen = regard.observe_linear_attention(query, key, value, lens, causal=True)
    true = quadratic_weights(Elu()(query), Elu()(key), keep=causal_pairs(11), normalize=True)[..., 2:9, :9]
    upstream = torch.randn_like(true)
    for found, needs in zip(
        torch.autograd.grad(seen[lens], leaves, upstream), torch.autograd.grad(true, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(found, needs)


# Signed weights of chosen rows.


@pytest.mark.parametrize("rows", [slice(None), slice(3, 60, 7)], ids=["all", "some"])
@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("per", [None, "head", "feature"])
def test_signed_weights_are_those_of_the_recurrence(rows, delta, per):
    query, key, _ = (tensor.double() for tensor in inputs())
    key = torch.nn.functional.normalize(key, dim=-1)
    decay = decays(per)
    decay = None if decay is None else decay.double()
    beta = torch.rand(2, KEY_HEADS, LENGTH, dtype=torch.float64) * 2 if delta else None
    value = torch.eye(LENGTH, dtype=torch.float64).expand(2, KEY_HEADS, -1, -1)
    true = step_recurrence(query, key, value, decay=decay, beta=beta)[0]
    options = {"feature_map": Identity(), "normalize": False, "causal": True, "scale": 1.0}
    found = linear_attention_weights(query, key, rows, decay=decay, beta=beta, **options)
    torch.testing.assert_close(found, true[..., rows, :])


def test_weights_of_rows_are_normalized_where_attention_is():
    query, key, _ = inputs(torch.float64)
    found = linear_attention_weights(query[0, 0], key[0, 0], slice(-5, None), causal=True)
    true = expected(query[:1, :1], key[:1, :1], Elu(), keep=causal_pairs())[0, 0, -5:]
    torch.testing.assert_close(found, true)


# Records.


def layers() -> dict[str, regard.nn.LinearAttention]:
    def projections() -> regard.nn.Projections:
        return regard.nn.Projections(32, num_heads=4, num_kv_heads=2)

    return {
        "plain": regard.nn.LinearAttention(projections(), causal=True),
        "head": regard.nn.LinearAttention(projections(), causal=True, decay=HeadDecay()),
        "feature": regard.nn.LinearAttention(projections(), causal=True, decay=FeatureDecay()),
        "performer": regard.nn.PerformerAttention(projections(), num_features=40),
    }


@pytest.mark.parametrize("name", layers())
def test_a_record_has_the_weights_beside_those_of_exact_attention(name, tmp_path):
    layer, x = layers()[name], torch.randn(2, 23, 32)
    model = torch.nn.Sequential(layer)
    with torch.no_grad():
        before = model(x)
        with record(model, exact=True) as recording:
            assert torch.equal(model(x), before)
    recording.atlas(tokens=[f"token {at}" for at in range(23)]).save(tmp_path / "linear.atlas")
    maps = Atlas.open(tmp_path / "linear.atlas").maps
    assert [(of.name, of.operator, of.sequence) for of in maps] == [
        ("0", "linear", 0),
        ("0", "linear", 1),
        ("0 (exact)", "softmax", 0),
        ("0 (exact)", "softmax", 1),
    ]
    weights = lenses.Weights()
    with torch.no_grad():
        seen = layer.observe(x, weights)
        heads = layer._sequence_inputs(x, None).heads
        mask = masks.causal() if layer.causal else None
        exact = regard.observe(*heads, weights, mask=mask)
    torch.testing.assert_close(seen.output, before, atol=1e-5, rtol=1e-5)
    for at, (of, true) in enumerate(zip(maps, [*seen[weights], *exact[weights]], strict=True)):
        tolerance = 1e-5 if at < 2 else of.rounding
        for head in range(4):
            found = torch.from_numpy(of.weights(head, slice(0, 23), slice(0, 23)))
            torch.testing.assert_close(found, true[head], atol=1e-6, rtol=tolerance)


def test_hooks_get_the_problem_once_and_results_stay():
    query, key, value = inputs()
    heard = []
    with attention_hook(lambda problem, lse: heard.append((problem.normalizer_name, lse.shape))):
        output, _ = regard.linear_attention_with_state(query, key, value, causal=True)
    assert heard == [("linear", (2, HEADS, LENGTH))]
    assert torch.equal(output, regard.linear_attention(query, key, value, causal=True))


def test_what_cannot_be_recorded_is_said_once():
    layer = regard.nn.LinearAttention(regard.nn.Projections(32, num_heads=4), causal=True, rule=DeltaRule())
    model, x = torch.nn.Sequential(layer, layers()["plain"]), torch.randn(1, 9, 32)
    words = "weights of linear attention are not recorded: .*normalize=False"
    with pytest.warns(UserWarning, match=words), record(model) as recording:
        model(x)
    assert [of.name for of in recording.atlas().maps] == ["1"]
    with warnings.catch_warnings(), record(model):
        warnings.simplefilter("error")
        layers()["plain"](x)


# Errors.


def test_weights_that_are_no_shares_are_refused():
    query, key, value = inputs()
    entropy = lenses.Entropy()
    with pytest.raises(ConfigurationError, match="normalize=False has others: .*linear_attention_weights"):
        regard.observe_linear_attention(query, key, value, entropy, normalize=False)
    with pytest.raises(ConfigurationError, match=r"Identity\(\) has features down to -\d.*weights may be negative"):
        regard.observe_linear_attention(query, key, value, entropy, feature_map=Identity())
    _, state = regard.linear_attention_with_state(query, key, value, causal=True)
    with pytest.raises(ConfigurationError, match="no longer the weight of each: observe the whole sequence"):
        regard.observe_linear_attention(query, key, value, entropy, causal=True, state=state)
    with pytest.raises(MaskError, match="no mask for linear attention"):
        regard.observe_linear_attention(query, key, value, entropy, mask=masks.window(3))
    with pytest.raises(ConfigurationError, match="needs lenses from regard.lenses"):
        regard.observe_linear_attention(query, key, value, lenses.Entropy)  # type: ignore[arg-type]


def test_what_sums_over_keys_cannot_have_is_refused_by_name():
    query, key, value = inputs()
    problem = make_weights_problem(query, key, value, causal=True)
    problem.softcap, problem.mask = 3.0, masks.window(3)
    with pytest.raises(KernelError, match=r"sums over keys have no softcap, window\(before=3\) is no mask"):
        run_problem(problem)
