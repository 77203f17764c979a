"""Interventions and what is asked beside them: one head switched off, contributions, the top keys of a row.

Goals: one intervention on a model of 6 layers and 50 tokens in at most 0.5 s; the top keys of a row of 100,000 in
10 ms; contributions in at most 1.5 times the time of the same lens on weights.
"""

import _timing
import torch
from _report import milliseconds, table, times
from torch import nn

import regard
from regard.explorer import Atlas, record
from regard.explorer.kept_weights import top_values
from regard.heads import HeadTerms, editing
from regard.lenses import Contribution, TopK
from regard.masks import causal
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, GatedFeedForwardConfig, LanguageModelConfig, LayerConfig
from regard.positions import Rotary

LAYERS, TOKENS, KEYS, LENGTH, ROUNDS = 6, 50, 100_000, 4096, 15


class _Called(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return regard.attention(*tensors)


def intervention(rounds: int) -> list[str]:
    """A row for one head of a language model that is switched off."""
    model = LanguageModel(
        LanguageModelConfig(
            vocabulary_size=1000,
            dim=384,
            layers=(LayerConfig(rotary=Rotary(32)),) * LAYERS,
            attention=AttentionConfig(num_heads=12),
            feed_forward=GatedFeedForwardConfig(1024),
        )
    ).eval()
    tokens = torch.randint(0, 1000, (1, TOKENS))
    name = next(name for name, module in model.named_modules() if isinstance(module, regard.nn.Attention))

    def edited() -> None:
        with editing(model, HeadTerms(name, heads=[3])):
            model(tokens)

    with torch.no_grad():
        found = _timing.in_turn({"plain": lambda: model(tokens), "edited": edited}, rounds=rounds)
    plain, ours = found["plain"], found["edited"]
    goal = f"≤ 500 ms: {'yes' if ours <= 0.5 else '**no**'}"
    what = f"one head off, {LAYERS} layers, {TOKENS} tokens; forward pass"
    return [what, milliseconds(plain), milliseconds(ours), times(ours / plain), goal]


def contributions(length: int, rounds: int) -> list[str]:
    """A row for the largest contributions of each row of a text."""
    query, key, value = (torch.randn(1, 8, length, 64) for _ in range(3))
    plain, lens = TopK(8), Contribution(TopK(8), torch.randn(512, 512))
    works = {
        "plain": lambda: regard.observe(query, key, value, plain, mask=causal()),
        "lens": lambda: regard.observe(query, key, value, lens, mask=causal()),
    }
    with torch.no_grad():
        found = _timing.in_turn(works, rounds=rounds)
    ratio = found["lens"] / found["plain"]
    goal = f"≤ 1.5: {'yes' if ratio <= 1.5 else '**no**'}"
    what = f"Contribution(TopK(8)), n = {length:,}; TopK(8)"
    return [what, milliseconds(found["plain"]), milliseconds(found["lens"]), times(ratio), goal]


def top_keys(keys: int, rounds: int) -> list[str]:
    """A row for the top keys of one row of a record."""
    query, key = torch.randn(1, 1, 8, 64), torch.randn(1, 1, keys, 64)
    with torch.no_grad(), record(_Called()) as recording:
        recording.model(query, key, key)
    atlas: Atlas = recording.atlas()
    of = atlas.maps[0]
    top, row = _timing.least(
        lambda: top_values(of, 0, "query", 3, 8, "weight"),
        lambda: of.weights(0, slice(3, 4), slice(0, keys)),
        calls=1,
        batches=4 * rounds,
    )
    goal = f"≤ 10 ms: {'yes' if top <= 0.01 else '**no**'}"
    what = f"top 8 of a row of {keys:,}; its weights"
    return [what, milliseconds(row), milliseconds(top), times(top / row), goal]


def main(*, keys: int = KEYS, length: int = LENGTH, rounds: int = ROUNDS) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    rows = [intervention(rounds), contributions(length, rounds), top_keys(keys, rounds)]
    table("Interventions (`benchmarks/interventions.py`)", ["what; against", "that", "ours", "ratio", "goal"], rows)


if __name__ == "__main__":
    main()
