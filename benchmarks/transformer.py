"""Training words per second of the tiny Transformer of recipes/multi30k-transformer.yaml, against others of its shape.

The others are the same model built from `torch.nn.Transformer`, and a Marian-shaped model of transformers with `sdpa`
where transformers is installed. All see the same batches of made text: lengths as in Multi30k, 10,000 words by Zipf's
law, sorted by length, 4,096 tokens at most. An update is forward, label-smoothed loss, backward, clipping and Adam.
Words are target tokens, END counted and padding not. One round is one batch for each model in turn.

`torch.nn.Transformer` drops weights of attention and hidden features too, by the one probability that it has; the paper
and the recipe do not. It is measured as it comes, and with those two switched off, which then is the same computation.

    python benchmarks/transformer.py [--rounds 8] [--precision bf16-mixed]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import _report
import _timing
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.positions import Sinusoidal
from regard.translation.batches import Batch, EncodedText, IdSequences, TokenBatches, collate
from regard.translation.build_model import build_model
from regard.translation.experiment import Experiment
from regard.translation.training_loss import training_loss

RECIPE = Path(__file__).parent.parent / "recipes" / "multi30k-transformer.yaml"
WORDS, PAIRS, SMOOTHING = 10_000, 8_000, 0.1


def made_text() -> EncodedText:
    draw = np.random.default_rng(1)
    chances = 1 / np.arange(1, WORDS - 3)
    lengths = np.clip(draw.normal(14, 4.5, size=PAIRS).round(), 4, 40).astype(int)
    sides = [
        [
            draw.choice(WORDS - 4, size=length, p=chances / chances.sum()) + 4
            for length in np.maximum(lengths + shift, 3)
        ]
        for shift in (0, 1)
    ]
    return EncodedText(IdSequences.pack(sides[0]), IdSequences.pack(sides[1]))


class Torch(nn.Module):
    """The same model from torch's own parts."""

    def __init__(self, model, *, everywhere: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, model.dim, padding_idx=0)
        nn.init.normal_(self.tokens.weight, std=model.dim**-0.5)
        self.positions, self.dropout = Sinusoidal(model.dim), nn.Dropout(model.dropout)
        self.transformer = nn.Transformer(
            model.dim,
            model.num_heads,
            model.encoder_layers,
            model.decoder_layers,
            model.hidden_dim,
            model.dropout,
            batch_first=True,
        )
        if not everywhere:
            for module in self.transformer.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
                elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                    module.dropout.p = 0.0

    def embed(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1]))
        return self.dropout(self.tokens(tokens) * math.sqrt(self.tokens.embedding_dim) + positions)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padded = source == 0
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        features = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return functional.linear(features, self.tokens.weight)


def marian(model) -> nn.Module | None:
    """A Marian-shaped model of transformers, or None where that is not installed."""
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError:
        return None
    config = MarianConfig(
        vocab_size=WORDS, d_model=model.dim, encoder_layers=model.encoder_layers, decoder_layers=model.decoder_layers,
        encoder_attention_heads=model.num_heads, decoder_attention_heads=model.num_heads,
        encoder_ffn_dim=model.hidden_dim, decoder_ffn_dim=model.hidden_dim, dropout=model.dropout,
        attention_dropout=0.0, activation_dropout=0.0, activation_function="relu", scale_embedding=True,
        pad_token_id=0, decoder_start_token_id=2, eos_token_id=3, forced_eos_token_id=3, use_cache=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return MarianMTModel(config)


def torch_loss(logits: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1), batch.target_output.flatten(), ignore_index=0, label_smoothing=SMOOTHING, reduction="sum"
    )


def losses(settings) -> dict[str, tuple[nn.Module, Callable[[Batch], Tensor]]]:
    """Each model, and its loss of a batch, summed over tokens."""
    ours = build_model(settings, WORDS, WORDS)
    sides: dict[str, tuple[nn.Module, Callable[[Batch], Tensor]]] = {
        "regard": (ours, lambda batch: training_loss(ours, batch, SMOOTHING)[0])
    }
    for name, everywhere in (("torch.nn.Transformer", True), ("the same, dropout as in the paper", False)):
        model = Torch(settings, everywhere=everywhere)
        sides[name] = (
            model, lambda batch, model=model: torch_loss(model(batch.source, batch.target_input), batch)
        )  # fmt: skip
    if (theirs := marian(settings)) is not None:

        def loss(batch: Batch) -> Tensor:
            logits = theirs(
                input_ids=batch.source, attention_mask=(batch.source != 0).long(), decoder_input_ids=batch.target_input
            ).logits
            return torch_loss(logits, batch)

        sides["transformers, Marian's shape, sdpa"] = (theirs, loss)
    return sides


class Update:
    """One update after another, over the batches in turn."""

    def __init__(
        self, model: nn.Module, loss: Callable, batches: list[Batch], within: Callable, *, fused: bool
    ) -> None:
        self.model, self.loss, self.batches, self.within = model.train(), loss, batches, within
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=fused)
        self.at = 0

    def __call__(self) -> None:
        batch = self.batches[self.at % len(self.batches)]
        self.at += 1
        with self.within():
            loss = self.loss(batch) / batch.target_tokens
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    asked = parser.parse_args()
    print(_timing.machine())
    torch.manual_seed(1)
    settings = Experiment.load(RECIPE).model
    text = made_text()
    batches = [collate(text, rows) for rows in TokenBatches(text, 4096, seed=1).epoch(0)[: asked.rounds + 1]]
    words = sum(batch.target_tokens for batch in batches[1:]) / asked.rounds

    def within() -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if asked.precision == "bf16-mixed" else nullcontext()

    works = {
        name: Update(*side, batches, within, fused=asked.precision == "32-true")
        for name, side in losses(settings).items()
    }
    spent = _timing.in_turn(works, rounds=asked.rounds)
    ours = spent["regard"]
    _report.table(
        f"Training the tiny Transformer, {asked.precision}, {words:,.0f} words an update",
        ["model", "parameters", "update", "words/s", "regard is times faster"],
        [
            [
                name,
                f"{sum(parameter.numel() for parameter in works[name].model.parameters()):,}",
                _report.milliseconds(seconds),
                f"{words / seconds:,.0f}",
                _report.times(seconds / ours),
            ]
            for name, seconds in spent.items()
        ],
    )


if __name__ == "__main__":
    main()
