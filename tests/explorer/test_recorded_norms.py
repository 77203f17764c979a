"""Norms of values in an atlas: weights times them are contributions, of each model whose projection is known."""

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.errors import AtlasError
from regard.explorer import Atlas, record
from regard.lenses import Contribution, Weights
from regard.nn import Attention, OutputGate, Projections


def recorded(model, *given, **options):
    with torch.no_grad(), record(model, dtype="keep") as recording:
        model(*given, **options)
    return recording.atlas()


def whole(of):
    everything = slice(0, of.queries), slice(0, of.keys)
    return np.stack([of.contributions(head, *everything) for head in range(of.heads)])


@pytest.mark.parametrize("shared", [6, 3])
def test_they_make_the_contributions_of_the_lens(shared, tmp_path):
    layer = Attention(Projections(24, num_heads=6, num_kv_heads=shared), mask=regard.masks.causal()).eval()
    text = torch.randn(2, 37, 24)
    atlas = recorded(nn.Sequential(layer), text)
    lens = Contribution(Weights(), layer.projections.output.weight)
    expected = layer.observe(text, lens)[lens].detach()
    atlas.save(tmp_path / "a.atlas")
    for one in (atlas, Atlas.open(tmp_path / "a.atlas")):
        found = np.stack([whole(of) for of in one.maps])
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_the_norms_are_of_what_a_key_adds_to_the_output():
    layer, text = Attention(Projections(24, num_heads=6)).eval(), torch.randn(1, 5, 24)
    of = recorded(nn.Sequential(layer), text).maps[0]
    with torch.no_grad():
        value = layer.projections.keys_and_values(text)[1].double()
    for head in range(6):
        own = layer.projections.output.weight[:, 4 * head : 4 * head + 4].double()
        expected = (value[0, head] @ own.T).norm(dim=-1)
        np.testing.assert_allclose(of.value_norms(head), expected.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_pooled_contributions_are_those_of_all_pairs(reduce):
    layer = Attention(Projections(24, num_heads=6, num_kv_heads=2), mask=regard.masks.causal()).eval()
    of = recorded(nn.Sequential(layer), torch.randn(1, 197, 24)).maps[0]
    contributions, gather = whole(of).astype(np.float64), np.add if reduce == "mean" else np.maximum
    for level in range(len(of.levels)):
        rows, columns = (range(0, 197, size) for size in of.cell(level))
        areas = np.outer(*(np.diff([*edges, 197]) for edges in (rows, columns))) if reduce == "mean" else 1
        for head in (0, 5):
            found = of.pooled_contributions(head, level, reduce)
            no_pair = np.isnan(of.pooled(head, level, reduce))
            expected = gather.reduceat(gather.reduceat(contributions[head], rows, 0), columns, 1) / areas
            np.testing.assert_allclose(found, np.where(no_pair, np.nan, expected), rtol=1e-4, atol=1e-6)


def test_a_cache_that_grows_has_those_of_all_its_keys():
    layer, text = Attention(Projections(24, num_heads=6), mask=regard.masks.causal()).eval(), torch.randn(1, 7, 24)
    model = nn.Sequential(layer)
    plain = recorded(model, text).maps[0]
    with torch.no_grad(), record(model, dtype="keep") as recording:
        cache = layer.make_cache()
        for token in text.split(1, 1):
            _, cache = layer.step(token, cache)
    (stepped,) = recording.atlas().maps
    np.testing.assert_allclose(whole(stepped), whole(plain), rtol=1e-5, atol=1e-6)


def test_torchs_layers_and_those_of_regard():
    torch.manual_seed(0)
    layer, text = nn.MultiheadAttention(24, 4, batch_first=True).eval(), torch.randn(1, 9, 24)
    ours = regard.nn.MultiheadAttention(24, 4, batch_first=True).eval()
    ours.load_state_dict(layer.state_dict())

    class Model(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x)[0]

    one, other = (recorded(Model(each), text).maps[0] for each in (layer, ours))
    np.testing.assert_allclose(whole(one), whole(other), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "config", "sizes"),
    [
        ("BertModel", "BertConfig", {"hidden_size": 24, "intermediate_size": 8, "num_attention_heads": 4}),
        ("GPT2Model", "GPT2Config", {"n_embd": 24, "n_head": 4}),
        ("LlamaModel", "LlamaConfig", {"hidden_size": 24, "intermediate_size": 8, "num_attention_heads": 4}),
    ],
)
def test_models_of_transformers(model, config, sizes):
    transformers = pytest.importorskip("transformers")
    import regard.huggingface

    layers = "n_layer" if model == "GPT2Model" else "num_hidden_layers"
    made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=31, **{layers: 2}, **sizes)).eval()
    regard.huggingface.swap(made)
    atlas = recorded(made, torch.arange(11)[None])
    projections = regard.heads.head_projections(made)
    for of, (name, projection) in zip(atlas.maps, projections.items(), strict=True):
        assert of.name == name
        values = regard.heads.Values()
        with torch.no_grad(), regard.huggingface.observing(made, values) as views:
            made(torch.arange(11)[None])
        weight = projection.module.get_parameter("weight")
        weight = weight if isinstance(projection.module, nn.Linear) else weight.T
        expected = regard.heads.transformed_norms(views[name][0][values][0], weight).detach()
        np.testing.assert_allclose([of.value_norms(head) for head in range(4)], expected, rtol=1e-4, atol=1e-6)


def test_what_follows_the_heads_of_some_modules_is_no_projection_alone():
    projections = Projections(24, num_heads=6)
    gated = Attention(projections, gate=OutputGate(projections))
    of = recorded(nn.Sequential(gated.eval()), torch.randn(1, 5, 24)).maps[0]
    assert not of.has_value_norms
    with pytest.raises(AtlasError, match="the map '0' has no norms of values"):
        of.value_norms(0)


def test_values_that_are_not_finite_have_the_norm_0():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = PlainAttention()

        def forward(self, *given):
            return self.attention(*given)

    class PlainAttention(nn.Module):
        num_heads = 2

        def __init__(self):
            super().__init__()
            self.out_proj = nn.Linear(6, 5)

        def forward(self, query, key, value):
            return regard.attention(query, key, value, mask=regard.masks.causal())

    query, key, value = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 3)
    value[:, :, 3] = torch.nan
    of = recorded(Model(), query, key, value).maps[0]
    assert of.value_norms(1)[3] == 0
    assert (of.value_norms(1)[:3] > 0).all()


def test_a_damaged_atlas_with_norms_of_another_size_is_refused(tmp_path):
    layer, text = Attention(Projections(24, num_heads=6)).eval(), torch.randn(1, 5, 24)
    atlas = recorded(nn.Sequential(layer), text)
    dict.__setitem__(atlas._arrays, "0.norms", torch.zeros(1, 6, 4))  # type: ignore[arg-type]
    atlas.save(tmp_path / "a.atlas")
    with pytest.raises(AtlasError, match=r"the array '0.norms' is F32 \(1, 6, 4\); it needs to be F32 \(1, 6, 5\)"):
        Atlas.open(tmp_path / "a.atlas")
