"""What a trained Transformer relies on: BLEU with one part switched off.

    python recipes/parts_of_a_transformer.py --data DIR   # a table of docs/transformer.md

DIR has eng-fra.tsv.gz, the pairs of recipes/tatoeba-english-french.yaml. Every fifth of the 1,500 that it holds out is
translated by the model that was trained with it and comes with regard. Nothing is trained again: a part that is off is
missed by a model that learned with it. It takes half a minute of one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn import PostNorm, TransformerBlock
from regard.nn.transformer_block import Residual
from regard.translation.bleu import score
from regard.translation.data_split import evaluation_text
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

RECIPE = Path(__file__).parent / "tatoeba-english-french.yaml"
EVERY = 5
Change = Callable[[Any], object]


class Without(Residual):
    """A residual connection without its path, norm(f(x)), or without its norm, x + f(x)."""

    def __init__(self, norm: nn.Module, *, path: bool) -> None:
        super().__init__()
        self.norm, self.path = norm, path

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch if self.path else self.norm(branch)


def blocks(model: Any) -> Iterator[TransformerBlock]:
    """All blocks of encoder and decoder."""
    yield from (*model.encoder.blocks, *model.decoder.blocks)


def silence(*layers: Any) -> None:
    """Set the last layer of a sublayer to 0: its residual path passes what went in."""
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


def without_positions(model: Any) -> None:
    """Add nothing to the embeddings."""
    for embedding in {model.source_embedding, model.target_embedding}:
        embedding.positions = None


def change_residuals(model: Any, *, path: bool) -> None:
    """Take the path, or the norm, out of all residual connections."""
    for block in blocks(model):
        for name in ("attention_residual", "cross_residual", "feed_forward_residual"):
            if isinstance(residual := getattr(block, name), PostNorm):
                setattr(block, name, Without(residual.norm, path=path))


PARTS: dict[str, Change] = {
    "the whole model": lambda model: None,
    "no positions": without_positions,
    "no self-attention in the encoder": lambda model: silence(
        *(block.attention.projections.output for block in model.encoder.blocks)
    ),
    "no self-attention in the decoder": lambda model: silence(
        *(block.attention.projections.output for block in model.decoder.blocks)
    ),
    "no cross-attention": lambda model: silence(
        *(block.cross_attention.projections.output for block in model.decoder.blocks)
    ),
    "no feed-forward networks": lambda model: silence(*(block.feed_forward.down for block in blocks(model))),
    "no residual paths, norm(f(x))": lambda model: change_residuals(model, path=False),
    "no norms, x + f(x)": lambda model: change_residuals(model, path=True),
}


def relied_on(translator: Translator, sources: list[str], targets: list[str]) -> None:
    """A table of BLEU with each part switched off, and of what then becomes of one sentence."""
    model: Any = translator.model
    rows, signature = [], ""
    for name, change in PARTS.items():
        translator.model = deepcopy(model)
        change(translator.model)
        hypotheses = [one.text for one in translator.translate(sources, observe=False)]
        found = score(hypotheses, targets)
        signature = found.bleu_signature
        [example] = translator.translate(["I am very tired."], observe=False)
        rows.append((name, f"{found.bleu:.1f}", example.text))
    translator.model = model
    lines = ["| part | BLEU | I am very tired. |", "| --- | ---: | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
    sys.stdout.write("\n".join([*lines, "", f"{len(sources)} sentences; {signature}", ""]))


def main() -> None:
    """Switch parts off, and print."""
    parser = argparse.ArgumentParser(description="What a trained Transformer relies on.")
    parser.add_argument("--data", type=Path, required=True, help="the folder of eng-fra.tsv.gz")
    folder = parser.parse_args().data
    experiment = Experiment.load(RECIPE, [f"data.folder={folder}"])
    text = evaluation_text(experiment.data)
    assert text is not None
    torch.set_num_threads(1)
    translator = Translator.load(ENGLISH_FRENCH)
    relied_on(translator, text.sources[::EVERY], text.targets[::EVERY])


if __name__ == "__main__":
    main()
