"""A record of 100,000 tokens: a small language model of letters with a long window, trained for some minutes on a text.

    python recipes/long_window_record.py TEXT --out runs/long-window.atlas
    regard explore runs/long-window.atlas

Two layers of four heads: the first sees the 256 bytes before each, the second 4,096 and the first four of all. What is
recorded is the last part of TEXT, which the model has not been trained on.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import regard.explorer
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, GatedFeedForwardConfig, LanguageModelConfig, LayerConfig
from regard.positions import Rotary

DIM, HEADS, LENGTH, BATCH, CHUNK = 128, 4, 1024, 4, 8192


def made() -> LanguageModel:
    """The model, of random weights."""
    rotary = Rotary(DIM // HEADS)
    return LanguageModel(
        LanguageModelConfig(
            vocabulary_size=256,
            dim=DIM,
            layers=(LayerConfig(before=255, rotary=rotary), LayerConfig(before=4095, prefix=4, rotary=rotary)),
            attention=AttentionConfig(num_heads=HEADS),
            feed_forward=GatedFeedForwardConfig(256),
            tied=True,
        )
    )


def train(model: LanguageModel, text: Tensor, minutes: float) -> float:
    """Train next-byte prediction for some minutes; return the loss of the last updates in bits per byte."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    began, updates, loss_so_far = time.monotonic(), 0, 8.0
    while (spent := (time.monotonic() - began) / (60 * minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min((updates + 1) / 50, 1 - 0.95 * spent)
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        updates, loss_so_far = updates + 1, 0.98 * loss_so_far + 0.02 * loss.item() / 0.6931
    sys.stdout.write(f"{updates} updates; {loss_so_far:.2f} bits a byte")
    return loss_so_far


def shown(text: Tensor) -> list[str]:
    """A token for each byte: its letter, where it is one."""
    return [chr(byte) if 32 <= byte < 127 else "↵" if byte == 10 else f"<{byte:02x}>" for byte in text.tolist()]


def main() -> None:
    """Train, record, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, or one packed by gzip")
    parser.add_argument("--out", type=Path, required=True, help="where the atlas is written")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training")
    parser.add_argument("--tokens", type=int, default=100_000, help="recorded")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    data = arguments.text.read_bytes()
    data = gzip.decompress(data) if arguments.text.suffix == ".gz" else data
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    if len(text) < 2 * arguments.tokens:
        parser.error(
            f"{arguments.text} has {len(text):,} bytes; twice the {arguments.tokens:,} that are recorded are needed"
        )
    model = made()
    train(model, text[: -arguments.tokens], arguments.minutes)
    read = text[-arguments.tokens :]
    with torch.no_grad(), regard.explorer.record(model.eval()) as recording:
        began = time.monotonic()
        model.features(read[None])
    sys.stdout.write(f"{arguments.tokens:,} tokens read in {time.monotonic() - began:.1f} s")
    atlas = recording.atlas(tokens=shown(read), title=f"{arguments.tokens:,} bytes of {arguments.text.name}")
    atlas.save(arguments.out)
    size, spent = arguments.out.stat().st_size, time.monotonic() - began
    sys.stdout.write(f"{arguments.out}: {size / 2**20:.0f} MiB, written {spent:.1f} s after reading began\n")


if __name__ == "__main__":
    main()
