"""Many sequences in one batch: how fast their keys are read in pages, and how fast texts are continued.

The peer of the first table is each sequence alone, its keys in one piece; that of the second `generate` for each text.
"""

from functools import partial

import _timing
import torch
from _report import agree, mebibytes, met, milliseconds, table, times

import regard
from regard.masks import causal
from regard.models import language_model as lm
from regard.nn import CacheFormat, Packing
from regard.nn.caches import LayerHeads, PagedMemory, RaggedStep
from regard.nn.caches.paged_memory import PAGE
from regard.positions import Rotary

SEQUENCES, SHORTEST, LONGEST, HEADS, KEY_HEADS, DIM, ROUNDS = 16, 200, 16_000, 32, 8, 128, 15
GENERATED = 150
FORMATS = {
    "bfloat16": None,
    "int8": CacheFormat(),
    "float8, e4m3": CacheFormat(Packing("float8_e4m3fn"), Packing("float8_e4m3fn")),
    "int4": CacheFormat(Packing("int4"), Packing("int4")),
}


def main(longest: int = LONGEST) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    lengths = [int(SHORTEST * (longest / SHORTEST) ** (n / (SEQUENCES - 1))) for n in range(SEQUENCES)]
    rows = [decoded(lengths, dtype) for dtype in (torch.float32, torch.bfloat16)]
    title = (
        f"A step of {SEQUENCES} sequences of {lengths[0]:,} to {lengths[-1]:,} tokens (`benchmarks/many_sequences.py`)"
    )
    table(title, ["keys", "each alone, sum", "one batch", "ratio", "goal", "memory", "goal"], rows)
    stored(lengths)
    continued()


def grown(memory: PagedMemory, lengths: list[int]) -> list:
    """Sequences whose last tokens came one at a time, in turn, as in a batch that runs."""
    sequences = [memory.sequence(number) for number in range(len(lengths))]
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.extend([0] * max(length - GENERATED, 1))
    for _ in range(GENERATED):
        for sequence, length in zip(sequences, lengths, strict=True):
            if len(sequence) < length:
                sequence.extend([0])
    return sequences


@torch.no_grad()
def decoded(lengths: list[int], dtype: torch.dtype) -> list[str]:
    """One layer's attention of a step: the batch beside the sum of all sequences alone."""
    pages = sum(-(-length // PAGE) for length in lengths)
    memory = PagedMemory([LayerHeads(KEY_HEADS, DIM, DIM)], pages, dtype=dtype)
    stored = memory.layers[0]
    stored.keys.normal_()
    stored.values.normal_()
    sequences = grown(memory, lengths)
    query = torch.randn(1, HEADS, len(lengths), DIM, dtype=dtype)
    layer = RaggedStep.of(memory, [(sequence, 1) for sequence in sequences]).layer(0)
    alone = []
    for number, sequence in enumerate(sequences):
        columns = torch.tensor(sequence.slots(range(len(sequence))))
        own = (tensor[:, :, columns] for tensor in (stored.keys, stored.values))
        alone.append((query[:, :, number : number + 1].clone(), *own))

    def each() -> torch.Tensor:
        return torch.cat([regard.attention(*one, mask=causal()) for one in alone], 2)

    def batch() -> torch.Tensor:
        return layer.attend((query, query, query), {"mask": causal()})[0]

    agree("many sequences", [batch()], [each()], within=2e-4 if dtype == torch.float32 else 2e-2)
    spent = _timing.in_turn({"each": each, "batch": batch}, rounds=ROUNDS)
    ratio, size = spent["each"] / spent["batch"], 2 * KEY_HEADS * DIM * dtype.itemsize
    most = memory.nbytes / (size * sum(lengths))
    name = str(dtype).removeprefix("torch.")
    return [
        *(name, milliseconds(spent["each"]), milliseconds(spent["batch"]), times(ratio), met(ratio, 0.9)),
        *(f"{most:.3f} of the keys' bytes", "met" if most <= 1.05 else "missed"),
    ]


@torch.no_grad()
def stored(lengths: list[int]) -> None:
    """The same step over pages of bfloat16 and of codes, whose sequences stand alike in memory."""
    count, heads = sum(-(-length // PAGE) for length in lengths), LayerHeads(KEY_HEADS, DIM, DIM)
    numbers = torch.randn(2, 1, KEY_HEADS, max(lengths), DIM).bfloat16()
    query = torch.randn(1, HEADS, len(lengths), DIM).bfloat16()
    works, sizes = {}, {}
    for name, cache_format in FORMATS.items():
        memory = PagedMemory([heads], count, dtype=torch.bfloat16, cache_format=cache_format)
        sequences = grown(memory, lengths)
        for sequence in sequences:
            RaggedStep.of(memory, [(sequence, len(sequence))]).layer(0).append(*numbers[..., : len(sequence), :])
        layer = RaggedStep.of(memory, [(sequence, 1) for sequence in sequences]).layer(0)
        works[name] = partial(layer.attend, (query, query, query), {"mask": causal()})
        sizes[name] = memory.nbytes
    spent = _timing.in_turn(works, rounds=ROUNDS)
    rows = [
        [name, mebibytes(sizes[name]), milliseconds(spent[name]), times(spent["bfloat16"] / spent[name])]
        for name in works
    ]
    table("The same step over pages of codes", ["pages of", "memory", "a step", "against bfloat16"], rows)


def continued(texts: int = 8, count: int = 12) -> None:
    """A small model: texts one after another beside all at once."""
    attention, rotary = lm.AttentionConfig(num_heads=8, num_kv_heads=4), Rotary(32)
    config = lm.LanguageModelConfig(
        4096, 256, (lm.LayerConfig(rotary=rotary),) * 2, attention, lm.GatedFeedForwardConfig(704)
    )
    model = lm.LanguageModel(config).eval()
    prompts = [torch.randint(0, 4096, (50 + 20 * number,)).tolist() for number in range(texts)]

    def each() -> list[list[int]]:
        return [[int(token) for token in model.generate(torch.tensor([prompt]), count)] for prompt in prompts]

    def batch() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for number, token in model.generate_many(prompts, count):
            found[number].append(token)
        return found

    if each() != batch():
        raise SystemExit("many sequences: a text is continued otherwise than alone")
    spent = _timing.in_turn({"each": each, "batch": batch}, rounds=3)
    tokens = texts * count
    rows = [[name, f"{spent[name]:.2f} s", f"{tokens / spent[name]:.0f}"] for name in ("each", "batch")]
    table(f"{texts} texts, {count} new tokens each: 2 layers of 256", ["", "time", "tokens a second"], rows)


if __name__ == "__main__":
    main()
