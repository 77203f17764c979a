r"""A million tokens on one machine: a language model of bytes, trained at 131,072 tokens and evaluated at 1,048,576.

    python recipes/million_tokens.py text runs/million-tokens-text/text.txt TEXT_FILE ...
    torchrun --nproc-per-node 2 --no-python regard train recipes/million-tokens.yaml --folder runs/million-short \
        --set data.length=2048 --set training.ring=null --set training.max_updates=1000 --set training.decay=constant
    torchrun --nproc-per-node 2 --no-python regard train recipes/million-tokens.yaml --folder runs/million \
        --set training.start_from=runs/million-short
    torchrun --nproc-per-node 2 recipes/million_tokens.py evaluate runs/million
    torchrun --nproc-per-node 2 recipes/million_tokens.py record runs/million runs/million.atlas --tokens 16384
    torchrun --nproc-per-node 2 recipes/million_tokens.py record runs/million runs/windows.atlas --windows
    regard explore runs/million.atlas

Text files are plain or gzip; their lines are kept together in blocks, which are put in a random order, so that the last
million bytes, which are held out, are of all files. The first training reads short sequences, of which more fit into a
minute, one in each process; the second continues in a ring of two processes, each of which has half of every sequence.
An atlas has all layers, the linear one too, whose maps read the weight of every pair: of a million tokens 5 · 10¹¹ in
each head. With --windows it has the layers with windows alone, in a few minutes.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import random
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import regard.explorer
from regard import ring
from regard.language.language_experiment import LanguageExperiment
from regard.language.long_text import LongText
from regard.language.train_language_model import MODEL
from regard.models import LanguageModel

TOKENS = 2**20
BLOCK = 2**16
BUCKETS = 8
LAYOUT = ring.Contiguous()
ROWS = 2**14
"""Rows whose logits are in memory at a time."""


def write_text(out: Path, files: list[Path]) -> None:
    """Write the lines of files in blocks of some BLOCK bytes, in a random order that is always the same."""
    blocks = []
    for path in files:
        data = path.read_bytes()
        block, size = [], 0
        for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines(keepends=True):
            block.append(line)
            size += len(line)
            if size >= BLOCK:
                blocks.append(b"".join(block))
                block, size = [], 0
        blocks.append(b"".join(block))
    random.Random(1).shuffle(blocks)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"".join(blocks))
    sys.stdout.write(f"{out}: {out.stat().st_size:,} bytes of {len(files)} files\n")


def held_out(run: Path) -> tuple[LanguageModel, LongText]:
    """The model of a run, and its text."""
    experiment = LanguageExperiment.load(run / "experiment.yaml")
    return LanguageModel.load(run / MODEL), LongText.read(experiment.data)


def bits_of_tokens(model: LanguageModel, features: Tensor, following: Tensor) -> Tensor:
    """-log2 p of each token (n,) that follows, from the features (n, dim) of those before."""
    parts = zip(features.split(ROWS), following.split(ROWS), strict=True)
    nats = [torch.nn.functional.cross_entropy(model.logits(x), y, reduction="none") for x, y in parts]
    return torch.cat(nats) / math.log(2)


def peak() -> float:
    """The most memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def evaluate(run: Path, tokens: int) -> None:
    """Read the held-out text as one sequence in the ring that torchrun started; rank 0 prints."""
    model, text = held_out(run)
    sequence = text.held_out[: tokens + 1].long()
    following = ring.shard(sequence[1:], 0, LAYOUT)
    before, began = peak(), time.perf_counter()
    with torch.no_grad():
        bits = bits_of_tokens(model, read(model, sequence[:-1]), following)
    spent, memory = time.perf_counter() - began, [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(memory, (before, peak()))
    bits = ring.unshard(bits, 0, LAYOUT)
    if dist.get_rank() == 0:
        report(bits, text, spent, memory)


def read(model: LanguageModel, sequence: Tensor) -> Tensor:
    """Features (n, dim) of this process's shard of a sequence (N,)."""
    tokens, positions = (ring.shard(tensor, 0, LAYOUT) for tensor in (sequence, torch.arange(len(sequence))))
    with ring.sharded(LAYOUT):
        return model.features(tokens[None], positions=positions)[0]


def report(bits: Tensor, text: LongText, spent: float, memory: list[tuple[float, float]]) -> None:
    """Print time, memory, bits per byte by position, and those of compressors on the same bytes."""
    write = sys.stdout.write
    write(f"{len(bits):,} tokens in one sequence, {len(memory)} processes: {spent:.1f} s\n")
    for process, (before, most) in enumerate(memory):
        write(f"process {process}: at most {most:.2f} GiB, {before:.2f} before reading\n")
    write(f"bits per byte: {float(bits.double().mean()):.4f}\n\n| positions | bits per byte |\n| --- | --- |\n")
    for part in torch.arange(len(bits)).chunk(BUCKETS):
        write(f"| {int(part[0]):,} to {int(part[-1]):,} | {float(bits[part].double().mean()):.4f} |\n")
    data = bytes(text.held_out[1 : len(bits) + 1].tolist())
    write("\n| compressor | bits per byte |\n| --- | --- |\n")
    write(f"| gzip -9 | {8 * len(gzip.compress(data, 9)) / len(data):.4f} |\n")
    write(f"| xz -9 | {8 * len(lzma.compress(data, preset=9)) / len(data):.4f} |\n")
    for order in (2, 3, 4):
        write(f"| counts of order {order}, from the training text | {order_bits(text, len(bits), order):.4f} |\n")


def order_bits(text: LongText, tokens: int, order: int) -> float:
    """Bits per byte of p(byte | the `order` bytes before): counts of the training text, with those of order - 1 as a
    prior of weight 1, down to the uniform distribution (Witten-Bell's idea with one constant).
    """
    train, test = text.train.long(), text.held_out[: tokens + 1].long()
    p = torch.full((tokens - order + 1,), 1 / 256, dtype=torch.float64)
    for k in range(order + 1):
        contexts, queries = (_contexts(each, k) for each in (train, test[order - k :]))
        pairs, asked = contexts * 256 + train[k:], queries * 256 + test[order:]
        of_pairs, of_contexts = _counts(pairs, asked), _counts(contexts, queries)
        p = (of_pairs + PRIOR * p) / (of_contexts + PRIOR)
    return float(-p.log2().mean())


PRIOR = 4.0
"""How many observations the shorter context counts for."""


def _contexts(text: Tensor, order: int) -> Tensor:
    """The `order` bytes before each byte but the first, as one number."""
    number = torch.zeros(len(text) - order, dtype=torch.int64)
    for back in range(order):
        number = number * 256 + text[back : len(text) - order + back]
    return number


def _counts(seen: Tensor, asked: Tensor) -> Tensor:
    """How often each number asked for was seen."""
    values, counts = seen.unique(return_counts=True)
    at = torch.searchsorted(values, asked).clamp(max=len(values) - 1)
    return torch.where(values[at] == asked, counts[at], 0).double()


def record(run: Path, out: Path, tokens: int, *, only_windows: bool) -> None:
    """Read the held-out text as one sequence in the ring that torchrun started; rank 0 saves its atlas."""
    model, text = held_out(run)
    sequence = text.held_out[:tokens].long()
    layers = {
        f"layer {n}": block
        for n, block in enumerate(model.blocks)
        if not only_windows or model.config.layers[n].linear is None
    }
    began = time.perf_counter()
    with torch.no_grad(), regard.explorer.record(torch.nn.ModuleDict(layers)) as recording:
        read(model, sequence)
    if dist.get_rank():
        return
    sys.stdout.write(f"{tokens:,} tokens read and recorded in {time.perf_counter() - began:.1f} s\n")
    letters = [chr(byte) if 32 <= byte < 127 else "↵" if byte == 10 else f"<{byte:02x}>" for byte in range(256)]
    atlas = recording.atlas(tokens=[letters[byte] for byte in sequence.tolist()], title=f"{tokens:,} tokens")
    atlas.save(out)
    sys.stdout.write(
        f"{out}: {out.stat().st_size / 2**30:.2f} GiB, {time.perf_counter() - began:.1f} s after reading began; at "
        f"most {peak():.2f} GiB of memory\n"
    )


def main() -> None:
    """Prepare the text, evaluate, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="write one text from several files")
    text.add_argument("out", type=Path)
    text.add_argument("files", type=Path, nargs="+")
    for name, help_text in (("evaluate", "bits per byte, time and memory"), ("record", "save an atlas")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("run", type=Path, help="the folder of the run")
        command.add_argument("--tokens", type=int, default=TOKENS)
        if name == "record":
            command.add_argument("out", type=Path, help="where the atlas is written")
            command.add_argument("--windows", action="store_true", help="leave out layers of linear attention")
    options = parser.parse_args()
    if options.command == "text":
        write_text(options.out, options.files)
        return
    dist.init_process_group("gloo")
    if options.command == "evaluate":
        evaluate(options.run, options.tokens)
    else:
        record(options.run, options.out, options.tokens, only_windows=options.windows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
