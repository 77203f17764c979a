"""Word times of a model of the size of Whisper tiny, beside transformers' own code on eager weights.

Goal: no slower, in less memory than the weights of all heads take.
"""

import argparse
from typing import Any

import _memory
import _timing
import torch
from _report import mebibytes, milliseconds, table, times
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.utils.generic import ModelOutput

import regard.huggingface

END, PROMPT, TOKENS = 50_257, [50_258, 50_259, 50_359, 50_363], 199
HEADS = [[2, 2], [3, 0], [3, 2], [3, 3], [3, 4], [3, 5]]
TINY: dict[str, Any] = {
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "eos_token_id": END,
    "pad_token_id": END,
    "bos_token_id": END,
    "decoder_start_token_id": PROMPT[0],
}


class _Words:
    """Each token is a word."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(f" {token}" for token in tokens)


def model(attention: str) -> WhisperForConditionalGeneration:
    """A model with random weights."""
    regard.huggingface.register()
    torch.manual_seed(0)
    made: Any = WhisperForConditionalGeneration._from_config(
        WhisperConfig(**TINY), attn_implementation=attention
    ).eval()
    made.generation_config.alignment_heads = HEADS
    return made


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of 30 s, and a sequence."""
    torch.manual_seed(1)
    text = torch.randint(0, 50_000, (tokens - len(PROMPT) - 1,)).tolist()
    return torch.randn(1, 80, 3000), torch.tensor([[*PROMPT, *text, END]])


def ours(tokens: int) -> _timing.Work:
    """The work of `word_times`."""
    made, (features, sequence) = model("regard"), inputs(tokens)
    return lambda: regard.huggingface.word_times(made, _Words(), features, sequence)


def theirs(tokens: int) -> _timing.Work:
    """The work of transformers: one pass that returns its weights, then its own code."""
    made, (features, sequence) = model("eager"), inputs(tokens)

    def work() -> None:
        with torch.no_grad():
            seen = made(input_features=features, decoder_input_ids=sequence[:, :-1], output_attentions=True)
        outputs = ModelOutput(cross_attentions=(seen.cross_attentions,), sequences=sequence)
        made._extract_token_timestamps(outputs, HEADS, num_input_ids=len(PROMPT) - 1)

    return work


WORKS = {"eager": theirs, "word_times": ours}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 3 if parser.parse_args().quick else 9
    found = _timing.in_turn({name: make(TOKENS) for name, make in WORKS.items()}, rounds=rounds)
    memory = {name: _memory.peak(name, TOKENS) for name in WORKS}
    rows = [
        ["time", *(milliseconds(found[name]) for name in WORKS), times(found["word_times"] / found["eager"])],
        ["memory", *(mebibytes(memory[name]) for name in WORKS), times(memory["word_times"] / memory["eager"])],
    ]
    table("Word times of Whisper tiny's size, 199 tokens", ["", *WORKS, "ratio"], rows)


if __name__ == "__main__" and not _memory.answer(WORKS):
    main()
