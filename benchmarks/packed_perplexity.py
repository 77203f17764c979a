"""What caches in 8 and 4 bits cost the translator that regard brings: perplexity of French text, beside float32.

    python benchmarks/packed_perplexity.py eng-fra.tsv.gz [PAIRS]

The file has an English sentence and its French translation in a line, with a tab between. The decoder's self-attention
and its attention to the source read keys and values as a cache of each format gives them back: of sentences, of pairs
joined to 150 tokens and more, and of these with a bias in a few dims of all keys, which changes no weight.
"""

import gzip
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from _report import table

from regard.approximations import Stored
from regard.core.problem import Problem
from regard.kernels.hooks import substitute_attention
from regard.nn import CacheFormat, Packing
from regard.translation.batches import Batch, EncodedText, IdSequences, collate
from regard.translation.translator import Translator
from regard.utils.call_site import find_call_site

MODEL = Path(__file__).parent.parent / "src/regard_models/english_french"
PAIRS, JOINED, SEED = 256, 150, 5
INT4, ROTATED = Packing("int4"), Packing("int4", rotated=True)
E4M3, E5M2 = Packing("float8_e4m3fn"), Packing("float8_e5m2")
FORMATS = {
    "int8": CacheFormat(),
    "float8, e4m3": CacheFormat(E4M3, E4M3),
    "float8, e5m2": CacheFormat(E5M2, E5M2),
    "int4": CacheFormat(INT4, INT4),
    "int4, keys and values rotated": CacheFormat(ROTATED, ROTATED),
    "int4, keys by channel": CacheFormat(Packing("int4", by_channel=True), INT4),
}


def main(file: str, count: int = PAIRS) -> None:
    translator = Translator.load(MODEL)
    model, pairs = cast(torch.nn.Module, translator.model), read(file)
    names = {module: name for name, module in model.named_modules()}

    def loss(batches: list[Batch], format_: CacheFormat | None) -> float:
        """The mean of -ln P of all target tokens."""

        def stored(problem: Problem) -> torch.Tensor | None:
            if format_ is None or not find_call_site(names).name.startswith("decoder"):
                return None
            return Stored((format_,)).run(problem)

        total = 0.0
        with torch.no_grad(), substitute_attention(stored):
            for batch in batches:
                logits = model(batch.source, batch.source_lengths, batch.target_input).double()
                padding = translator.target_vocabulary.special.pad
                total += float(
                    torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch.target_output.flatten(), ignore_index=padding, reduction="sum"
                    )
                )
        return total / sum(batch.target_tokens for batch in batches)

    sentences, joined = (list(encoded(translator, pairs, *each)) for each in ((1, count), (JOINED, count // 8)))
    losses = [
        {name: loss(batches, each) for name, each in (("", None), *FORMATS.items())} for batches in (sentences, joined)
    ]
    bias_keys(model)
    losses.append({name: loss(joined, each) for name, each in (("", None), *FORMATS.items())})
    rows = [[name, *(f"{100 * math.expm1(column[name] - column['']):+.2f} %" for column in losses)] for name in FORMATS]
    rows.insert(0, ["float32: perplexity", *(f"{math.exp(column['']):.4g}" for column in losses)])
    table("Perplexity with caches of fewer bits", ["stored as", "sentences", "joined", "biased"], rows)


def read(file: str) -> list[list[str]]:
    """Pairs of a file, in an order drawn by a seed."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        pairs = [line.rstrip("\n").split("\t")[:2] for line in lines]
    return [pairs[row] for row in np.random.default_rng(SEED).permutation(len(pairs))]


def encoded(translator: Translator, pairs: list[list[str]], least: int, count: int) -> Iterator[Batch]:
    """Batches of `count` texts, each of pairs joined until the target has `least` tokens."""
    vocabularies, left = (translator.source_vocabulary, translator.target_vocabulary), iter(pairs)
    texts: list[tuple[list[int], list[int]]] = []
    while len(texts) < count:
        joined: tuple[list[int], list[int]] = [], []
        while len(joined[1]) < least:
            for side, text, vocabulary in zip(joined, next(left), vocabularies, strict=True):
                side.extend(vocabulary.encode_batch([text])[0])
        texts.append(joined)
    text = EncodedText(
        IdSequences.pack([source for source, _ in texts]), IdSequences.pack([target for _, target in texts])
    )
    for first in range(0, count, 32):
        rows = np.arange(first, min(first + 32, count))
        yield collate(text, rows, translator.target_vocabulary.special)


def bias_keys(model: torch.nn.Module) -> None:
    """A bias of standard deviation 40 in 4 dims of each key head of the decoder, as some trained models have it."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("decoder") and name.endswith("key.bias"):
                for head in parameter.view(6, -1):
                    chosen = torch.randperm(len(head), generator=generator)[:4]
                    head[chosen] += 40 * torch.randn(4, generator=generator)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name a file of English sentences and their French translations, such as eng-fra.tsv.gz")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else PAIRS)
