"""Every mask, bias, score and variant: what an atlas shows after a round trip is what `observe` shows."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard import biases, masks, scores
from regard.errors import AtlasError
from regard.explorer import Atlas, record
from regard.explorer.api import AtlasAPI
from regard.lenses import Weights

B, H, M, N, D = 2, 4, 150, 170, 8


class Asker(nn.Module):
    """A model that is one call of attention."""

    def forward(self, *tensors, **options):
        return regard.attention(*tensors, **options)


def heads(count, length, dim=D):
    # Small enough that float32 rounds the scores to within 1e-6, in whatever order their products are summed.
    return 0.6 * torch.randn(B, count, length, dim)


def lengths():
    return torch.tensor([N - 3, 61])


def keys():
    return (torch.rand(B, 1, 1, N) > 0.3).index_fill(-1, torch.tensor([0]), True)


def pairs():
    return torch.rand(M, N) > 0.4


RULES = {
    "nothing": dict,
    "causal": lambda: {"mask": masks.causal()},
    "window": lambda: {"mask": masks.causal() & masks.window(before=9)},
    "both sides": lambda: {"mask": masks.window(before=9, after=2)},
    "dilated": lambda: {"mask": masks.dilated(4, 3)},
    "strided": lambda: {"mask": masks.causal() & masks.strided(7)},
    "fixed": lambda: {"mask": masks.fixed(16, 2)},
    "prefix": lambda: {"mask": masks.causal() | masks.prefix(5)},
    "prefix per batch": lambda: {"mask": masks.causal() | masks.prefix(lengths() // 4)},
    "padding": lambda: {"mask": masks.padding(lengths=lengths())},
    "documents": lambda: {"mask": masks.causal() & masks.documents(torch.arange(N).expand(B, N) // 31)},
    "documents of heads": lambda: {"mask": masks.documents(torch.arange(B * H * N).view(B, H, N) // 31 % 7)},
    "documents of keys": lambda: {"mask": masks.documents(torch.arange(N) // 31, torch.arange(N) // 37)},
    "global tokens": lambda: {"mask": masks.window(before=3) | masks.global_tokens([0, 40])},
    "random blocks": lambda: {"mask": masks.random_blocks(N, 16, 3, seed=5, heads=H)},
    "not": lambda: {"mask": ~masks.prefix(7)},
    "keys": lambda: {"mask": masks.where(keep=keys())},
    "pairs": lambda: {"mask": masks.where(keep=pairs())},
    "pairs per head": lambda: {"mask": masks.where(keep=torch.rand(B, H, M, N) > 0.4)},
    "function": lambda: {"mask": masks.from_mod(lambda b, h, q, k: (q + k + h) % 3 > 0, heads=H)},
    "function per batch": lambda: {"mask": masks.from_mod(lambda b, h, q, k: (q + k + b) % 3 > 0, batch=B)},
    "empty rows": lambda: {"mask": masks.causal() & ~masks.prefix(60)},
    "alibi": lambda: {"bias": biases.alibi(H), "mask": masks.causal()},
    "relative": lambda: {"bias": biases.relative(torch.randn(H, 8), max_distance=20)},
    "clipped": lambda: {"bias": biases.clipped(torch.randn(H, 9), before=5, after=3)},
    "gaussian": lambda: {"bias": biases.gaussian(50 * torch.rand(B, H, M), 3.0)},
    "tensor": lambda: {"bias": torch.randn(B, 1, 1, N)},
    "all pairs": lambda: {"bias": torch.randn(H, M, N)},
    "diagonals": lambda: {"bias": torch.randn(H, M + N).unfold(-1, N, 1)[:, :M].flip(-2)},
    "sum": lambda: {"bias": biases.alibi(H) + torch.randn(N)},
    "softcap": lambda: {"softcap": 1.5, "bias": biases.alibi(H)},
    "sinks": lambda: {"sinks": torch.randn(H), "mask": masks.causal()},
    "scale": lambda: {"scale": 0.7},
    "additive": lambda: {"score": scores.Additive(D, D, 5), "mask": masks.causal()},
    "general": lambda: {"score": scores.General(D, D)},
    "positions": lambda: {
        "mask": masks.causal() & masks.window(before=30),
        "bias": biases.alibi(H),
        "query_positions": torch.arange(0, 2 * M, 2),
        "key_positions": torch.arange(N) + 7,
    },
    "positions per batch": lambda: {
        "mask": masks.causal(),
        "bias": biases.alibi(H),
        "query_positions": torch.stack([torch.arange(M), torch.arange(M) + 20]),
        "key_positions": torch.stack([torch.arange(N), torch.arange(N) + 5]),
    },
}
TILES = [
    (slice(0, M), slice(0, N)),
    (slice(3, 140), slice(127, 129)),
    (slice(149, 150), slice(0, 1)),
    (slice(4, 4), slice(2, 9)),
]


def recorded(tmp_path, query, key, options, dtype: Any = "keep"):
    with torch.no_grad(), record(Asker(), dtype=dtype) as recording:
        recording.model(query, key, key, **options)
    recording.atlas().save(tmp_path / "a.atlas")
    return Atlas.open(tmp_path / "a.atlas").maps


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_exact_tiles(rule, key_heads, tmp_path):
    query, key, options = heads(H, M), heads(key_heads, N), RULES[rule]()
    lens = Weights()
    with torch.no_grad():
        seen = regard.observe(query, key, key, lens, **options)
    maps = recorded(tmp_path, query, key, options)
    assert len(maps) == B
    for shown in maps:
        for head in range(H):
            expected = seen[lens][shown.sequence, head].numpy()
            for rows, columns in TILES:
                tile = shown.weights(head, rows, columns)
                assert tile.dtype == np.float32
                np.testing.assert_allclose(tile, expected[rows, columns], atol=1e-6)
                exists = shown.exists(head, rows, columns)
                assert exists.shape == tile.shape
                assert (tile[~exists] == 0).all()
                if "bias" not in options:
                    assert (tile[exists] > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_stays_within_what_it_says(rule, tmp_path):
    query, key, options = heads(H, M), heads(2, N), RULES[rule]()
    lens = Weights()
    with torch.no_grad():
        seen = regard.observe(query, key, key, lens, **options)
    for shown in recorded(tmp_path, query, key, options, "float16"):
        expected = seen[lens][shown.sequence].numpy()
        for head in range(H):
            tile = shown.weights(head, slice(0, M), slice(0, N))
            assert 0 < shown.rounding < 0.1
            np.testing.assert_allclose(tile, expected[head], rtol=shown.rounding, atol=1e-7)
            if "sinks" not in options:
                sums = tile.sum(-1)
                assert np.abs(sums[sums > 0] - 1).max() < 1e-5


@pytest.mark.parametrize("rule", ["causal", "documents", "positions", "additive", "pairs"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_no_head_axis(rule, batch, tmp_path):
    query, key, options = torch.randn(*batch, M, D), torch.randn(*batch, N, D), RULES[rule]()
    if rule == "positions":
        options.pop("bias")
    if rule == "documents":
        options["mask"] = masks.documents(torch.arange(N) // 31)
    lens = Weights()
    with torch.no_grad():
        seen = regard.observe(query, key, key, lens, **options)[lens].reshape(-1, M, N).numpy()
    maps = recorded(tmp_path, query, key, options)
    assert [shown.heads for shown in maps] == [1] * len(seen)
    for shown in maps:
        tile = shown.weights(0, slice(2, M), slice(5, N))
        np.testing.assert_allclose(tile, seen[shown.sequence, 2:, 5:], atol=1e-6)


def test_several_axes_of_batches(tmp_path):
    query, key = torch.randn(2, 3, H, 20, D), torch.randn(1, 3, H, 20, D)
    mask = masks.padding(lengths=torch.arange(6).view(2, 3) + 10)
    lens = Weights()
    seen = regard.observe(query, key, key, lens, mask=mask)[lens].flatten(0, 1).numpy()
    maps = recorded(tmp_path, query, key, {"mask": mask})
    assert [shown.sequence for shown in maps] == list(range(6))
    for shown in maps:
        tile = shown.weights(3, slice(0, 20), slice(0, 20))
        np.testing.assert_allclose(tile, seen[shown.sequence, 3], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_what_is_kept_as_it_is(dtype, tmp_path):
    query, key = heads(H, 30).to(dtype), heads(H, 30).to(dtype)
    lens = Weights()
    seen = regard.observe(query, key, key, lens, mask=masks.causal())[lens].float().numpy()
    (shown, _) = recorded(tmp_path, query, key, {"mask": masks.causal()})
    np.testing.assert_allclose(shown.weights(1, slice(0, 30), slice(0, 30)), seen[0, 1], atol=1e-6)
    assert shown.rounding == 0.0


def test_numbers_beyond_half_precision_are_kept_as_they_are(tmp_path):
    query, key = heads(H, 30) * 1e6, heads(H, 30) * 1e-6
    (shown, _) = recorded(tmp_path, query, key, {}, "float16")
    assert shown.rounding == 0.0
    seen = regard.observe(query, key, key, Weights())[Weights()]
    np.testing.assert_allclose(shown.weights(1, slice(0, 30), slice(0, 30)), seen[0, 1], atol=1e-6)


def test_rows_that_attend_to_nan_are_nan(tmp_path):
    query, key = heads(H, 30), heads(H, 30)
    query[0, 1, 20] = float("nan")
    shown = recorded(tmp_path, query, key, {"mask": masks.causal()})[0]
    tile = shown.weights(1, slice(0, 30), slice(0, 30))
    assert np.isnan(tile[20, :21]).all()
    assert np.isfinite(np.delete(tile, 20, 0)).all()
    broken = np.arange(H) == 1
    for name, values in shown.metrics.items():
        np.testing.assert_array_equal(np.isnan(values), broken, err_msg=name)
    of_row = np.arange(30) == 20
    for rows in (shown.entropy(1), shown.largest(1)):
        np.testing.assert_array_equal(np.isnan(rows), of_row)
    assert np.isnan(shown.received(1)).all()
    for reduce in ("max", "mean"):
        known = np.isfinite(shown.pooled(1, 0, reduce))
        np.testing.assert_array_equal(known, np.tri(30) * ~of_row[:, None])  # elsewhere NaN says that no pair exists
    for rows in (shown.entropy(0), shown.largest(0), shown.received(0)):
        assert np.isfinite(rows).all()
    np.testing.assert_array_equal(np.isfinite(shown.pooled(0, 0, "max")), np.tri(30))


def test_metrics_are_nan_where_those_of_heads_are(tmp_path):
    query, key = heads(H, 30), heads(H, 30)
    key[0, 0, 7] = float("nan")
    query[0, 2, 29] = float("nan")
    shown = recorded(tmp_path, query, key, {"mask": masks.window(before=4, after=0)}, "keep")[0]
    lens = regard.heads.Metrics()
    expected = regard.observe(query, key, key, lens, mask=masks.window(before=4, after=0))[lens]
    for name in ("entropy", "effective_keys", "distance", "top1", "local"):
        np.testing.assert_allclose(shown.metrics[name], getattr(expected, name)[0], rtol=1e-4, err_msg=name)
    assert np.isnan(shown.metrics["entropy"]).tolist() == [True, False, True, False]
    metrics = AtlasAPI(Atlas.open(tmp_path / "a.atlas")).meta()["maps"][0]["metrics"]
    assert [value is None for value in metrics["entropy"]] == [True, False, True, False]


def test_a_bias_of_a_function_has_no_place(tmp_path):
    options = {"bias": biases.from_mod(lambda score, b, h, q, k: score + (q - k) * 0.1)}
    with pytest.raises(AtlasError, match="the bias .* is a function, which an atlas cannot hold: give the attention"):
        recorded(tmp_path, heads(H, 9), heads(H, 9), options)


def test_a_large_bias_has_no_place(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.explorer.atlas.mask_json.MOST_NUMBERS", 1000)
    with pytest.raises(AtlasError, match=r"the bias tensor\(.*takes .* MB, more than .*by distances"):
        recorded(tmp_path, heads(H, 40), heads(H, 40), {"bias": torch.randn(40, 40)})


def test_a_large_mask_has_no_place(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.explorer.atlas.mask_json.MOST_BITS", 1000)
    options = {"mask": masks.where(keep=torch.rand(M, N) > 0.4)}
    with pytest.raises(
        AtlasError, match=r"the mask where\(.*is none that an atlas stores as a formula, and has 4 mixed tiles"
    ):
        recorded(tmp_path, heads(H, M), heads(H, N), options)


def test_what_changes_later_is_kept_as_it_was(tmp_path):
    query, key, slopes = heads(H, 30), heads(H, 30), torch.rand(H)
    lens = Weights()
    seen = regard.observe(query, key, key, lens, bias=biases.alibi(slopes))[lens].numpy()
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, key, key, bias=biases.alibi(slopes))
    for tensor in (query, key, slopes):
        tensor.zero_()
    tile = recording.atlas().maps[1].weights(2, slice(0, 30), slice(0, 30))
    np.testing.assert_allclose(tile, seen[1, 2], atol=1e-6)
