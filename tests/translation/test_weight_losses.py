"""Losses of attention weights: their formulas in float64, and what training makes of them."""

from typing import Any

import numpy as np
import pytest
import torch
from small_runs import copier, text
from torch import nn

from regard.errors import ConfigurationError
from regard.models.decoded_target import SourceHead
from regard.translation import training_loss as loss_module
from regard.translation.batches import Batch, EncodedText, IdSequences, collate
from regard.translation.build_model import build_model
from regard.translation.lightning_module import Training
from regard.translation.settings import RecurrentSettings, TrainingSettings, TransformerSettings
from regard.translation.training import fit
from regard.translation.training_loss import smoothed_cross_entropy, training_loss
from regard.translation.vocabulary import PAD
from regard.translation.weight_losses import WeightLosses, alignment_loss, coverage_loss

SIZE = 11
SMALL: dict[str, Any] = {"embedding_dim": 4, "hidden_dim": 6, "dropout": 0.0}
RECURRENT = {
    "bahdanau": {},
    "covered": {"decoder": {"kind": "bahdanau", "coverage": "sum"}},
    "gru": {"decoder": {"kind": "bahdanau", "coverage": {"kind": "gru", "dim": 3}}},
    "fertility": {"decoder": {"kind": "bahdanau", "coverage": {"kind": "fertility", "most": 3.0}}},
    "pointer": {"pointer": True},
    "luong, all": {"pointer": True, "decoder": {"kind": "luong", "score": "concat", "coverage": "sum"}},
}
TRANSFORMER = TransformerSettings(
    dim=8, num_heads=2, hidden_dim=8, encoder_layers=1, decoder_layers=3, dropout=0.0
)  # fmt: skip


def recurrent(name: str) -> Any:
    torch.manual_seed(1)
    return build_model(RecurrentSettings.model_validate({**SMALL, **RECURRENT[name]}), SIZE, SIZE).double().eval()


def linked() -> EncodedText:
    """Three pairs; of the first, target token 1 has two links, and token 2 none."""
    sources, targets = [[4, 5, 6], [7], [5, 5, 10, 8]], [[9, 8, 7], [7], [5, 6]]
    links = IdSequences.pack([[0, 2, 1, 0, 1, 1], [0, 0], [1, 3]])
    return EncodedText(IdSequences.pack(sources), IdSequences.pack(targets), links=links)


def batch() -> Batch:
    return collate(linked(), np.array([2, 0, 1]))


def coverage_formula(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total = weights.new_zeros(())
    for row in range(len(weights)):
        covered = torch.zeros_like(weights[row, 0])
        for step in range(weights.shape[1]):
            if target[row, step] != PAD:
                total = total + torch.minimum(weights[row, step], covered).sum()
                covered = covered + weights[row, step]
    return total


def alignment_formula(weights: torch.Tensor, rows: list[dict[int, list[int]]]) -> torch.Tensor:
    total = weights.new_zeros(())
    for row, steps in enumerate(rows):
        for step, tokens in steps.items():
            total = total - sum(weights[row, step, token].log() for token in tokens) / len(tokens)
    return total


# Of the batch, whose rows are pairs 2, 0 and 1.
LINKS = [{1: [3]}, {0: [2], 1: [0, 1]}, {0: [0]}]


def test_links_of_a_batch_have_their_row_target_and_source():
    links = batch().links
    assert links is not None
    assert links.tolist() == [[0, 1, 3], [1, 0, 2], [1, 1, 0], [1, 1, 1], [2, 0, 0]]
    moved = batch().to("meta").links
    assert moved is not None
    assert moved.device.type == "meta"


def test_the_losses_are_their_formulas_in_float64():
    weights = torch.randn(3, 4, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    target, links = batch().target_output, batch().links
    assert links is not None
    for found, expected in (
        (coverage_loss(weights, target != PAD), coverage_formula(weights, target)),
        (alignment_loss(weights, links), alignment_formula(weights, LINKS)),
    ):
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(loss, weights, retain_graph=True)[0] for loss in (found, expected))
        torch.testing.assert_close(ours, theirs)


def test_a_link_to_a_weight_of_0_has_a_finite_loss_and_no_gradient():
    weights = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    loss = alignment_loss(weights, torch.tensor([[0, 0, 1]]))
    loss.backward()
    assert loss.item() == pytest.approx(-np.log(np.finfo(np.float32).tiny))
    assert weights.grad is not None
    assert not weights.grad.any()


def test_no_links_cost_nothing():
    assert alignment_loss(torch.rand(2, 3, 5), torch.empty(0, 3, dtype=torch.int64)).item() == 0.0


@pytest.mark.parametrize("tokens", [1, 4, 99])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_recurrent_translator_is_the_sum_of_all(
    name: str, smoothing: float, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", tokens * SIZE)
    model, given = recurrent(name), batch()
    losses = WeightLosses(0.7, 0.3)
    weights = model.attention_weights(given.source, given.source_lengths, given.target_input)
    logits = model(given.source, given.source_lengths, given.target_input)
    expected, entropy = smoothed_cross_entropy(logits, given.target_output, smoothing)
    expected = expected + 0.7 * coverage_formula(weights, given.target_output) + 0.3 * alignment_formula(weights, LINKS)
    found = training_loss(model, given, smoothing, losses)
    torch.testing.assert_close(found, (expected, entropy), rtol=1e-6, atol=1e-6)  # the weights of a lens are rounded
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (found[0], expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("layer", "head", "place"), [(None, 0, 1), (None, 1, 1), (0, 1, 0), (2, 0, 2)])
def test_guided_alignment_of_a_transformer_reads_one_head(layer: int | None, head: int, place: int):
    torch.manual_seed(1)
    model, given = build_model(TRANSFORMER, SIZE, SIZE).double().eval(), batch()
    inputs = given.source, given.source_lengths, given.target_input
    weights = model.attention_weights(*inputs)[:, :, place, head]
    expected, entropy = smoothed_cross_entropy(model(*inputs), given.target_output, 0.1)
    expected = expected + 0.3 * alignment_formula(weights, LINKS)
    found = training_loss(model, given, 0.1, WeightLosses(0.0, 0.3, SourceHead(layer, head)))
    torch.testing.assert_close(found, (expected, entropy))
    decoded = model.decode_target(*inputs, observe=SourceHead(layer, head))
    torch.testing.assert_close(decoded.weights, weights)
    # The gradient of the query and key projections of that head, against that of the formula in float64.
    blocks: Any = model.decoder.blocks
    parameters = [blocks[place].cross_attention.projections.query.weight, model.output.weight]
    ours = torch.autograd.grad(found[0], parameters)
    reference = training_loss(model, given, 0.1)[0] + 0.3 * alignment_formula(
        _weights_by_hand(model, inputs, place, head), LINKS
    )
    torch.testing.assert_close(ours, torch.autograd.grad(reference, parameters))


def _weights_by_hand(model: Any, inputs: Any, place: int, head: int) -> torch.Tensor:
    """softmax(q·k/√d) of one head, from the inputs of its projections."""
    source, lengths, _ = inputs
    caught: list[torch.Tensor] = []
    projections = model.decoder.blocks[place].cross_attention.projections
    handle = projections.query.register_forward_hook(lambda *call: caught.append(call[2]))
    memory = model.encode(source, lengths)
    model.decoder(model.target_embedding(inputs[2]), memory.layers, memory.mask)
    handle.remove()
    dim = caught[0].shape[-1] // 2
    query = caught[0].unflatten(-1, (2, dim))[:, :, head]
    key = memory.layers[place].keys[:, head]
    absent = torch.arange(source.shape[1]) >= lengths[:, None, None]
    return (query @ key.mT / dim**0.5).masked_fill(absent, -torch.inf).softmax(-1)


@pytest.mark.parametrize("normalizer", ["softmax1", "softpick", "stick_breaking", "entmax", "sparsemax"])
def test_weights_of_other_normalizers_have_gradients(normalizer: str):
    """The gradient of guided alignment is the numerical one, where a weight is above 0."""
    torch.manual_seed(1)
    told = TransformerSettings.model_validate({**TRANSFORMER.model_dump(), "normalizer": normalizer})
    model, given = build_model(told, SIZE, SIZE).double().eval(), batch()
    blocks: Any = model.decoder.blocks
    weight = blocks[1].cross_attention.projections.query.weight
    losses = WeightLosses(0.0, 0.3)

    def loss() -> torch.Tensor:
        decoded = model.decode_target(given.source, given.source_lengths, given.target_input, observe=SourceHead())
        assert decoded.weights is not None
        return losses.of(decoded.weights, given)

    (found,) = torch.autograd.grad(loss(), weight)
    assert found.any()
    place = divmod(int(found.abs().argmax()), weight.shape[1])
    with torch.no_grad():
        weight[place] += 1e-6
        above = loss()
        weight[place] -= 2e-6
        below = loss()
    assert float(found[place]) == pytest.approx(float(above - below) / 2e-6, rel=1e-4, abs=1e-9)


def test_a_layer_or_head_that_is_not_there_is_refused():
    inputs = batch().source, batch().source_lengths, batch().target_input
    model = build_model(TRANSFORMER, SIZE, SIZE)
    with pytest.raises(ConfigurationError, match="there is no layer 3: the decoder has 3, 0 to 2"):
        model.decode_target(*inputs, observe=SourceHead(layer=3))
    with pytest.raises(ConfigurationError, match="there is no head 2: the decoder has 2, 0 to 1"):
        model.decode_target(*inputs, observe=SourceHead(head=2))
    with pytest.raises(ConfigurationError, match="no layer 0 or head 0: a recurrent translator has one attention"):
        recurrent("bahdanau").double().decode_target(*inputs, observe=SourceHead(layer=0))


@pytest.mark.parametrize("kind", ["recurrent", "transformer"])
def test_training_learns_the_links(kind: str):
    """Of words that say nothing, each target word is linked to the source word at the other end."""
    lines = [[4 + (seed * 7 + place * 3) % 7 for place in range(4)] for seed in range(24)]
    links = [[number for place in range(4) for number in (place, 3 - place)] for _ in lines]
    told = EncodedText(IdSequences.pack(lines), IdSequences.pack(lines), links=IdSequences.pack(links))
    model: Any = (
        build_model(RecurrentSettings(embedding_dim=8, hidden_dim=16, dropout=0.0), SIZE, SIZE)
        if kind == "recurrent"
        else build_model(TRANSFORMER, SIZE, SIZE)
    )
    guide = {"weight": 1.0, **({} if kind == "recurrent" else {"layer": 1, "head": 1})}
    settings = TrainingSettings.model_validate(
        {"max_epochs": 60, "batch_tokens": 200, "learning_rate": 0.01, "accelerator": "cpu", "guided_alignment": guide}
    )
    fit(model, told, settings)
    example = collate(told, np.arange(3))
    with torch.no_grad():
        weights = model.eval().attention_weights(example.source, example.source_lengths, example.target_input)
    weights = weights if kind == "recurrent" else weights[:, :, 1, 1]
    assert weights[:, :4].argmax(-1).tolist() == [[3, 2, 1, 0]] * 3
    assert weights[:, :4].amax(-1).mean() > 0.8


def test_coverage_loss_makes_weights_that_overlap_less():
    told, overlap = text(40), {}
    settings = TrainingSettings(max_epochs=20, batch_tokens=100, learning_rate=0.03, accelerator="cpu")
    for weight in (0.0, 2.0):
        model: Any = build_model(RecurrentSettings.model_validate({**SMALL, **RECURRENT["covered"]}), SIZE, SIZE)
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        fit(model, told, settings.model_copy(update={"coverage_loss": weight}))
        example = collate(told, np.arange(40))
        with torch.no_grad():
            weights = model.eval().attention_weights(example.source, example.source_lengths, example.target_input)
        overlap[weight] = float(coverage_loss(weights, example.target_output != PAD))
    assert overlap[2.0] < 0.9 * overlap[0.0]


def test_what_has_no_weights_or_no_links_is_refused():
    settings = TrainingSettings.model_validate({"guided_alignment": {}})
    model = build_model(RecurrentSettings(embedding_dim=4, hidden_dim=6), SIZE, SIZE)
    with pytest.raises(ConfigurationError, match="learns links of words, and the text has none: data.alignments"):
        Training(model, text(3), None, settings, seed=1)
    with pytest.raises(
        ConfigurationError, match="read attention weights, and a Copier has no decode_target that shows"
    ):
        Training(copier(), linked(), None, settings, seed=1)
    with pytest.raises(ConfigurationError, match="read attention weights, and a Copier"):
        Training(copier(), text(3), None, TrainingSettings(coverage_loss=1.0), seed=1)


def test_smoothing_is_over_the_vocabulary_and_not_over_copied_words():
    """Of a source with two words that the vocabulary lacks, in float64 and a word at a time."""
    model = recurrent("pointer")
    text = EncodedText(IdSequences.pack([[4, SIZE, SIZE + 1], [7, SIZE]]), IdSequences.pack([[SIZE + 1, 8], [SIZE, 5]]))
    pairs = collate(text, np.array([0, 1]))
    log_p = model(pairs.source, pairs.source_lengths, pairs.target_input)
    target = pairs.target_output.unsqueeze(-1)
    expected = -0.9 * log_p.gather(-1, target).sum() - 0.1 * log_p[..., :SIZE].mean(-1).sum()
    loss, entropy = training_loss(model, pairs, 0.1)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(entropy, -log_p.gather(-1, target).sum(), rtol=1e-12, atol=0.0)
    parameters = [one for name, one in model.named_parameters() if "attend" not in name or "weight" in name]
    ours, theirs = (torch.autograd.grad(of, parameters, allow_unused=True) for of in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
