"""`regard.approximation`: its figures, its table, its picture, and what it refuses."""

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.approximations import Linformer, RandomProjection
from regard.errors import ConfigurationError, ShapeError
from regard.lenses import Entropy, Pooled
from regard.linear import Elu, FavorPlus


def tensors(*shape) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, *(shape or (2, 3, 64, 8)), generator=torch.Generator().manual_seed(0))
    return query, key, value


@pytest.fixture(scope="module")
def found():
    method = FavorPlus(8, 32, seed=0)
    return regard.approximation(*tensors(), method, causal=True, redraws=4, lengths=[16, 32])


def test_figures(found):
    query, key, value = tensors()
    exact = regard.attention(query, key, value, mask=masks.causal()).double()
    errors = []
    for seed in range(4):
        other = regard.linear_attention(query, key, value, feature_map=FavorPlus(8, 32, seed=seed), causal=True)
        errors.append((other - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1))
    errors = torch.stack(errors)
    torch.testing.assert_close(found.draws, errors, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.heads, errors.square().mean(0).sqrt(), rtol=1e-4, atol=1e-4)
    assert found.error == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-4)
    spread = errors.square().flatten(1).mean(1).sqrt().std()
    assert found.spread == pytest.approx(float(spread), rel=1e-3)
    torch.testing.assert_close(found.rows.square().mean(-1).sqrt(), found.heads)
    assert found.total_variation.shape == (4,)
    assert found.kernel in ("short", "cpu_flash", "sdpa")
    assert found.timings.lengths == (16, 32, 64)
    assert all(count >= 2 * 3 * 64 * 8 * 4 for count in found.memory)


def test_worst_heads_and_rows(found):
    batch, head, error = found.worst_heads(1)[0]
    assert error == float(found.heads.max()) == float(found.heads[batch, head])
    assert [error for *_, error in found.worst_heads(6)] == sorted(found.heads.flatten().tolist(), reverse=True)
    assert len(found.worst_heads(100)) == 6
    for batch, head, row, error in found.worst_rows(4):
        assert error == float(found.rows[batch, head, row])
    assert found.worst_rows(1)[0][-1] == float(found.rows.max())


def test_the_table(found):
    text = str(found)
    assert text.startswith(
        "linear attention by FavorPlus(dim=8, num_features=32, seed=0, kernel='softmax'), against exact"
    )
    for part in ("(4 draws)", "batch 1, head ", "total variation", "Entropy()", "Pooled(cells=(32, 32)", "iB exact"):
        assert part in text
    assert "measured at 16 to 64 keys" in text
    assert max(map(len, text.splitlines())) < 160


def test_the_crossover_is_said():
    from dataclasses import replace

    from regard.approximations import Timings

    query, key, value = tensors(4, 8)
    one = regard.approximation(query, key, value, Elu(), lengths=())
    assert "crossover" not in str(one)
    assert "head 0" in str(one)
    assert one.spread is None
    for times, said in {
        (1.0, 8.0): "faster from about 3 keys on; measured at 2 to 4 keys",
        (4.0, 8.0): "faster at all of them",
        (1.0, 1.0): "not faster at the longest",
    }.items():
        assert said in str(replace(one, timings=Timings((2, 4), times, (2.0, 2.0 if times != (1.0, 8.0) else 4.0))))


def test_a_scale_a_bias_and_a_tensor_mask():
    query, key, value = tensors(5, 8)
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[:, 0] = False
    masked = regard.approximation(query, key, value, masks.window(1), mask=keep, causal=True, scale=0.2, lengths=())
    expected = regard.attention(query, key, value, mask=masks.causal() & masks.where(keep=keep), scale=0.2)
    other = regard.attention(
        query, key, value, mask=masks.causal() & masks.where(keep=keep) & masks.window(1), scale=0.2
    )
    assert masked.error == pytest.approx(float((other - expected).norm() / expected.norm()), rel=1e-5)


def test_redraws_of_a_random_projection():
    found = regard.approximation(*tensors(), Linformer(RandomProjection(4, seed=2)), redraws=3, lengths=())
    seeds = [
        regard.approximation(*tensors(), Linformer(RandomProjection(4, seed=seed)), lengths=()).error
        for seed in (2, 3, 4)
    ]
    torch.testing.assert_close(found.draws.square().mean((1, 2)).sqrt(), torch.tensor(seeds, dtype=torch.float64))


def test_nan_behind_the_mask_changes_nothing_and_before_it_is_shown():
    query, key, value = tensors(6, 8)
    key[5], value[5] = float("nan"), float("nan")
    clean = regard.approximation(query, key, value, Elu(), mask=masks.padding(lengths=torch.tensor(5)), lengths=())
    assert clean.rows.isfinite().all()
    assert clean.weights is not None
    assert clean.weights.total_variation.isfinite().all()
    broken = regard.approximation(query, key, value, Elu(), causal=True, lengths=())
    assert broken.rows[0, 0].isnan().any()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (Elu(), {"redraws": 2}, r"redraws is 2, but linear attention by Elu\(\) is not random: leave redraws out"),
        (masks.window(2), {"redraws": 3}, "is not random"),
        (Elu(), {"redraws": 0}, "redraws"),
        (Elu(), {"dropout_p": 0.1}, "dropout_p drops other weights in each run"),
        ("elu", {}, "method is 'elu': it needs a feature map"),
    ],
)
def test_arguments_that_do_not_fit(method, options, message):
    with pytest.raises(ConfigurationError, match=message):
        regard.approximation(*tensors(), method, lengths=(), **options)


def test_nothing_to_measure():
    empty = torch.zeros(0, 4)
    with pytest.raises(ShapeError, match=r"the weights have the shape \(0, 0\): there is nothing to measure"):
        regard.approximation(empty, empty, empty, Elu(), lengths=())
    with pytest.raises(ShapeError, match="equal dims"):
        regard.approximation(torch.zeros(3, 4), torch.zeros(3, 5), torch.zeros(3, 5), Elu(), lengths=())


def test_the_picture(found, tmp_path):
    figure = found.plot()
    panels = figure.axes[:6]
    assert [axes.get_xlabel() for axes in panels] == ["head, from batch 0, head 0 on", "query", "keys", *["keys"] * 3]
    exact, other, difference = (axes.images[0].get_array() for axes in panels[3:])
    batch, head, _ = found.worst_heads(1)[0]
    pooled = found[Pooled((32, 32))]
    torch.testing.assert_close(torch.as_tensor(exact), pooled.exact[batch, head])
    torch.testing.assert_close(torch.as_tensor(other), pooled.approximate[batch, head])
    torch.testing.assert_close(torch.as_tensor(difference), (pooled.approximate - pooled.exact)[batch, head])
    found.save(tmp_path / "errors.png", dpi=50)
    assert (tmp_path / "errors.png").stat().st_size > 10_000
    with pytest.raises(ConfigurationError, match="ends in '.gif'"):
        found.save(tmp_path / "errors.gif")


def test_a_picture_without_maps():
    found = regard.approximation(*tensors(6, 8), masks.window(1), lenses=[Entropy()], lengths=())
    assert len(found.plot().axes) == 3


@pytest.mark.parametrize("method", [masks.window(before=63), FavorPlus(8, 64, seed=0)], ids=["all pairs", "features"])
def test_pairs_whose_score_infinity_makes_minus_infinity_have_no_exact_weight(method):
    """A mask that leaves all pairs is the exact attention, of which no row differs."""
    query, key, value = (tensor.clone() for tensor in tensors())
    query[..., 0], key[:, :, 41, 0] = -query[..., 0].abs() - 0.1, torch.inf
    found = regard.approximation(query, key, value, method, causal=True, lengths=(), lenses=[Entropy()])
    assert found.weights is not None
    exact = regard.observe(query, key, value, Entropy(), mask=masks.causal())[Entropy()]
    torch.testing.assert_close(found[Entropy()].exact, exact)
    if not isinstance(method, FavorPlus):
        torch.testing.assert_close(found[Entropy()].approximate, exact, rtol=1e-5, atol=1e-5)
        assert found.weights.total_variation.max() < 1e-5
