"""`regard.model_approximation`: each layer alone and all of them, on our models and those of transformers."""

from typing import Any, cast

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.approximations import CosineSimilarity, Linformer, Perplexity, SegmentMeans
from regard.errors import ConfigurationError, ShapeError
from regard.linear import Elu, FavorPlus
from regard.models import LanguageModel
from regard.models import language_model as lm


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layer = lm.LayerConfig(rotary=regard.positions.Rotary(8))
    config = lm.LanguageModelConfig(
        vocabulary_size=50,
        dim=32,
        layers=(layer, layer),
        feed_forward=lm.GatedFeedForwardConfig(32),
        attention=lm.AttentionConfig(num_heads=4, num_kv_heads=2),
    )
    return LanguageModel(config).eval()


def number_of(value: float | None) -> float:
    assert value is not None
    return value


def tokens():
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


def test_perplexity_by_hand():
    logits, ids = torch.randn(2, 6, 50), tokens()[:, :6]
    losses = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    measure = Perplexity()
    assert measure.summary(float(measure.values(logits, logits, ids).mean())) == pytest.approx(float(losses.exp()))
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])}
    assert len(measure.values(logits, logits, padded)) == 2 + 5
    assert len(Perplexity(tokens=1, padding=7).values(logits, logits, (None, torch.full((2, 6), 7)))) == 0
    with pytest.raises(
        ConfigurationError, match=r"the batch has no argument 'labels' with tokens; it has \['input_ids'"
    ):
        Perplexity(tokens="labels").values(logits, logits, padded)
    with pytest.raises(ShapeError, match="for an encoder use CosineSimilarity"):
        measure.values(torch.zeros(2, 6), torch.zeros(2, 6), ids)


def test_a_language_model_layer_by_layer(model):
    names = ("layers.0.attention", "layers.1.attention")
    found = regard.model_approximation(model, tokens(), [Elu(), masks.window(2), torch.bfloat16], Perplexity())
    assert all(name.endswith("attention") for name in found.layers)
    assert len(found.layers) == len(names)
    with torch.no_grad():
        logits = model(tokens())
    exact = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).exp()
    assert found.exact == pytest.approx(float(exact), rel=1e-5)
    for number in range(2):
        for layer in found.layers:
            cell = found.cells[layer, number]
            assert cell.heads is not None
            assert cell.heads.shape == (4,)
            assert cell.error is not None
            assert cell.error > 0.01
            assert cell.measure != found.exact
        assert found.everywhere[number] != found.exact
    assert number_of(found.cells[found.layers[0], 2].error) < 0.01
    assert found.cells[found.layers[0], 2].measure == pytest.approx(found.exact, rel=1e-2)
    with torch.no_grad():
        assert torch.equal(model(tokens()), logits), "the model is as it was"


def test_all_layers_by_a_window_are_the_model_with_that_window(model):
    windowed = LanguageModel(
        lm.LanguageModelConfig(
            vocabulary_size=50,
            dim=32,
            layers=(lm.LayerConfig(rotary=regard.positions.Rotary(8), before=2),) * 2,
            feed_forward=lm.GatedFeedForwardConfig(32),
            attention=lm.AttentionConfig(num_heads=4, num_kv_heads=2),
        )
    ).eval()
    windowed.load_state_dict(model.state_dict())
    expected = regard.model_approximation(windowed, tokens(), torch.bfloat16, Perplexity()).exact
    found = regard.model_approximation(model, tokens(), masks.window(before=2), Perplexity())
    assert found.everywhere[0] == pytest.approx(expected, rel=1e-5)


def test_errors_are_those_of_the_layers_own_tensors(model):
    from regard.kernels.hooks import attention_hook

    problems = []
    with torch.no_grad(), attention_hook(lambda problem, _: problems.append(problem)):
        model(tokens())
    found = regard.model_approximation(model, tokens(), FavorPlus(8, 32, seed=0), Perplexity())
    for problem, layer in zip(problems, found.layers, strict=True):
        one = regard.approximation(
            problem.pairs.query,
            problem.pairs.key,
            problem.value,
            FavorPlus(8, 32, seed=0),
            mask=problem.mask,
            lengths=(),
        )
        exact = regard.attention(problem.pairs.query, problem.pairs.key, problem.value, mask=problem.mask)
        size = exact.square().sum((-2, -1))
        expected = ((one.heads**2 * size).sum(0) / size.sum(0)).sqrt()
        torch.testing.assert_close(found.cells[layer, 0].heads, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_a_method_cannot_compute_is_named(model):
    found = regard.model_approximation(model, tokens(), [Linformer(SegmentMeans(4)), FavorPlus(5)], Perplexity())
    for number, reason in enumerate(("Linformer cannot be causal", "the feature map has dim=5")):
        cell = found.cells[found.layers[1], number]
        assert cell.reason.startswith(reason)
        assert cell.heads is cell.measure is cell.error is None
        assert found.everywhere[number] is None
    text = str(found)
    assert text.count("[1] Linformer cannot be causal") == 1
    assert "–" in text


def test_an_encoder_of_transformers_with_padding():
    from transformers import BertConfig, BertModel

    import regard.huggingface

    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = BertModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)  # those of a new model make attention nearly uniform
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    batch = {"input_ids": tokens(), "attention_mask": mask}
    with pytest.raises(ConfigurationError, match=r"call regard.huggingface.swap\(model\) for a model of transformers"):
        regard.model_approximation(model, batch, Elu(), CosineSimilarity())
    regard.huggingface.swap(model)
    found = regard.model_approximation(model, [batch, batch], [Elu(), Linformer(SegmentMeans(12))], CosineSimilarity())
    assert found.layers == ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self")
    assert found.exact == pytest.approx(1.0)
    assert number_of(found.everywhere[0]) < 1 - 1e-4
    assert 0 < number_of(found.cells[found.layers[0], 1].error) < 1  # the mixtures of padding have weight in Linformer


def test_the_translator_with_its_cross_attention():
    from regard.translation.run_folder import ENGLISH_FRENCH
    from regard.translation.translator import Translator

    translator = Translator.load(ENGLISH_FRENCH)
    source = torch.tensor([translator.source_vocabulary.encode("The cat is on the table.")])
    target = torch.tensor([[2, *translator.target_vocabulary.encode("Le chat est sur la table."), 3]])
    batch = source, torch.tensor([source.shape[1]]), target
    found = regard.model_approximation(cast("Any", translator.model), batch, [Elu()], Perplexity(tokens=2, padding=0))
    assert len(found.layers) == 9
    assert sum("cross_attention" in layer for layer in found.layers) == 3
    assert found.exact < 2 < number_of(found.everywhere[0])


class Other(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), torch.zeros(1), Elu(), Perplexity()), "needs a model, a torch.nn.Module; this is a Tensor"),
        ((Other(), torch.zeros(1), [], Perplexity()), "methods is empty"),
        ((Other(), [], Elu(), Perplexity()), "batches is empty"),
        ((Other(), torch.zeros(1), "elu", Perplexity()), "method is 'elu'"),
        ((Other(), torch.zeros(1), Elu(), "perplexity"), "measure is 'perplexity'; it needs a measure such as"),
        ((Other(), torch.zeros(1), Elu(), Perplexity), "it needs a measure such as"),
        ((Other(), torch.zeros(1), Elu(), Perplexity()), "no attention of Other went through regard.attention"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        regard.model_approximation(*arguments)
