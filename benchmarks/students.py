"""CPU seconds of greedy translation by students whose decoder has SSRU: by native steps, modules, and self-attention.

Students of random weights, each with a short list, in float32 and with the decoder's weights in int8; translations are
as long as their sources. All alternate in one run, on one thread.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from _report import milliseconds, table, times
from _students import LENGTH, sentences, short_list, student
from _timing import in_turn, machine
from torch import Tensor

from regard.models.transformer import Transformer
from regard.models.transformer.native_decoder import NativeDecoder
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings

COUNTS = 1, 8, 64


def search(model: Transformer, source: Tensor) -> Callable[[], list[tuple[int, ...]]]:
    """What a search says of each sentence; translations are cut at half of its length and 10 more tokens."""
    lengths, settings = torch.full((len(source),), LENGTH), SearchSettings(beam=1, max_length_ratio=0.5)
    return lambda: [best.ids for (best,) in beam_search(model, source, lengths, settings, observe=False)]


def by_modules(work: Callable[[], object]) -> Callable[[], object]:
    """The same without native steps."""

    def run() -> object:
        with patch.object(NativeDecoder, "of", lambda *_, **__: None):
            return work()

    return run


def main() -> None:
    """Measure, and print a row for each kind of weights and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())
    torch.manual_seed(0)
    listed, rows = short_list(), []
    for weights, count in itertools.product(("float32", "int8"), COUNTS):
        source, works = sentences(count), {}
        for kind in ("ssru", "softmax"):
            model = student(kind)
            model.short_list = listed
            if weights == "int8":
                model.quantize_decoder()
            works[kind] = search(model, source)
        works["modules"] = by_modules(works["ssru"])
        if weights == "float32" and works["ssru"]() != works["modules"]():
            raise SystemExit(f"{count} sentences: native steps and modules do not say the same")
        spent = in_turn(works, rounds=rounds, clock=time.thread_time)
        ssru = spent["ssru"]
        others = (one for kind in ("modules", "softmax") for one in (spent[kind], spent[kind] / ssru))
        cells = (form(one) for form, one in zip((milliseconds, times) * 2, others, strict=True))
        rows.append((weights, str(count), milliseconds(ssru), *cells))
    columns = "weights", "sentences", "SSRU, native", "SSRU, modules", "ratio", "self-attention, native", "ratio"
    table("Students (`benchmarks/students.py`)", columns, rows)


if __name__ == "__main__":
    main()
