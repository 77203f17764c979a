"""Runs in this process: what is measured of a language model, and the gradients of a Transformer."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from regard.comparison import load_recipe, make_variants
from regard.comparison.gradient_norms import projection_gradients
from regard.comparison.single_run import run_job
from regard.comparison.variant_runs import make_jobs
from regard.errors import ConfigurationError
from regard.models import LanguageModel
from regard.translation.batches import EncodedText, IdSequences, collate
from regard.translation.build_model import build_model
from regard.translation.settings import RecurrentSettings, TransformerSettings
from regard.translation.vocabulary import PAD

BOOK = """\
name: book
task: language-model
data: {{folder: {folder}, files: [book.txt], length: 16, held_out: 65}}
model: {{dim: 16, num_heads: 4, hidden_dim: 16, layers: [causal]}}
training: {{max_updates: 2, accelerator: cpu}}
compare: {{vary: {{kv_heads: [4, 1]}}, seeds: [1], decode: 3}}
"""


def jobs_of(recipe, folder):
    return list(make_jobs(recipe, make_variants(recipe), recipe.compare.seeds[0], folder))


def test_bits_per_byte_speed_and_cache_of_a_language_model(tmp_path):
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog " * 9)
    (tmp_path / "book.yaml").write_text(BOOK.format(folder=tmp_path))
    jobs = jobs_of(load_recipe(tmp_path / "book.yaml"), tmp_path)
    many, one = (cast(Any, run_job(job)) for job in jobs)
    assert many.cache_bytes > 2 * one.cache_bytes > 0  # keys and values of four heads, or of one
    assert many.parameters - one.parameters == 2 * 16 * 12
    assert min(many.speed, one.speed) > 0
    model = LanguageModel.load(jobs[0].folder / "model").eval()
    held_out = torch.tensor(list((tmp_path / "book.txt").read_bytes()[-65:]))
    with torch.no_grad():
        for number, (bits, count) in enumerate(many.statistics):
            sequence = held_out[16 * number :][:17]
            logits = model(sequence[None, :-1])[0]
            assert bits == pytest.approx(
                float(functional.cross_entropy(logits, sequence[1:], reduction="sum")) / math.log(2)
            )
            assert count == 16
    assert len(many.statistics) == 4


def test_a_language_model_needs_held_out_text(tmp_path):
    (tmp_path / "book.txt").write_text("abc " * 50)
    (tmp_path / "book.yaml").write_text(BOOK.format(folder=tmp_path))
    recipe = load_recipe(tmp_path / "book.yaml", ["data.held_out=0"])
    with pytest.raises(ConfigurationError, match="there is no text to measure on: write data.held_out"):
        run_job(jobs_of(recipe, tmp_path)[0])


def test_a_translator_needs_a_test_text(recipe, tmp_path):
    chosen = recipe("data.test=null", vary={"score": ["dot", "general"]})
    with pytest.raises(ConfigurationError, match="there is no text to measure on: write data.test, or data.split.test"):
        run_job(jobs_of(chosen, tmp_path)[0])


def transformer(**settings):
    torch.manual_seed(1)
    small = {"dim": 16, "hidden_dim": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.2}
    return build_model(TransformerSettings.model_validate({"kind": "transformer", **small, **settings}), 12, 12)


def text() -> EncodedText:
    generator = np.random.default_rng(1)
    lines = [generator.integers(4, 12, size=generator.integers(1, 9)).tolist() for _ in range(20)]
    return EncodedText(IdSequences.pack(lines), IdSequences.pack(lines))


def test_gradients_are_those_of_autograd():
    model = transformer()
    found = projection_gradients(model, text())
    batch = collate(text(), np.arange(20))
    logits = model.eval()(batch.source, batch.source_lengths, batch.target_input)
    functional.cross_entropy(logits.transpose(1, 2), batch.target_output, ignore_index=PAD).backward()
    chosen = [
        one.grad.flatten()
        for name, one in model.named_parameters()
        if one.grad is not None and name.endswith(("projections.query.weight", "projections.key.weight"))
    ]
    assert len(chosen) == 6  # of three attentions
    assert found["query_key"] == pytest.approx(float(torch.cat(chosen).square().mean().sqrt()), rel=1e-4)
    assert 0 < found["entropy"] < 1


def test_the_softmax_saturates_where_heads_are_large_and_scores_not_scaled():
    # Xavier's projections of 256 features: q·k has the deviation √d / 2, 8 for one head and 1 for 64.
    one_head = {"dim": 256, "num_heads": 1}
    scaled, dot, small = (
        projection_gradients(transformer(**settings), text())["entropy"]
        for settings in (one_head, {**one_head, "score": "dot"}, {"dim": 256, "num_heads": 64, "score": "dot"})
    )
    assert dot < 0.6 * min(scaled, small)


def test_uniform_weights_have_the_largest_entropy():
    model: Any = transformer()
    for block in model.encoder.blocks:
        torch.nn.init.zeros_(block.attention.projections.query.weight)
        torch.nn.init.zeros_(block.attention.projections.query.bias)
    assert projection_gradients(model, text())["entropy"] == pytest.approx(1.0, abs=1e-6)


def test_recurrent_models_have_no_projections():
    model = build_model(RecurrentSettings(embedding_dim=4, hidden_dim=4), 12, 12)
    with pytest.raises(
        ConfigurationError, match="measures query and key projections, and a RecurrentTranslator has none"
    ):
        projection_gradients(model, text())
