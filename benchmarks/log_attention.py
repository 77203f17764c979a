"""What a callback that logs attention takes of a training: a language model of 6 layers of 8 heads, on one CPU.

Goal: at most 1 % of the time.
"""

import argparse
import logging
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as lightning
import torch
from _report import milliseconds, table
from torch.utils.data import DataLoader, TensorDataset

from regard.explorer.log_attention import LogAttention
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, GatedFeedForwardConfig, LanguageModelConfig, LayerConfig
from regard.positions import Rotary

VOCABULARY, DIM, LAYERS, HEADS, LENGTH, BATCH = 1000, 128, 6, 8, 128, 4


class _Training(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(
            LanguageModelConfig(
                vocabulary_size=VOCABULARY,
                dim=DIM,
                layers=(LayerConfig(rotary=Rotary(DIM // HEADS)),) * LAYERS,
                attention=AttentionConfig(num_heads=HEADS),
                feed_forward=GatedFeedForwardConfig(3 * DIM),
            )
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-4)


def main() -> None:
    """Train for some seconds, and print the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    text = torch.randint(0, VOCABULARY, (1, LENGTH))
    log = LogAttention(lambda module: module.model(text), tokens=[str(token) for token in text[0].tolist()], every=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=-1,
            max_time={"seconds": seconds},
            callbacks=[log],
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        began = time.perf_counter()
        trainer.fit(_Training(), DataLoader(TensorDataset(torch.randint(0, VOCABULARY, (4096, LENGTH + 1))), BATCH))
        spent = time.perf_counter() - began
        looks = len(list(Path(folder).rglob("*.atlas")))
    row = [f"{spent:.0f} s, {trainer.global_step} updates", str(looks), milliseconds(log.seconds / looks)]
    share = log.seconds / spent
    table(
        f"LogAttention, {LAYERS} × {HEADS} heads, {LENGTH} tokens",
        ["training", "looks", "each", "share", "goal"],
        [[*row, f"{share:.2%}", f"≤ 1 %: {'yes' if share <= 0.01 else '**no**'}"]],
    )


if __name__ == "__main__":
    main()
