"""CPU seconds of greedy translation with a short list, by models as large as Bergamot's students, of random weights.

Translations are as long as their sources. Both searches alternate in one run, on one thread.
"""

import argparse
import time
from collections.abc import Callable

import torch
from _report import milliseconds, table, times
from _students import LENGTH, sentences, short_list, student
from _timing import in_turn

from regard.models.transformer import Transformer
from regard.models.transformer.short_list import ShortList
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings


def _search(model: Transformer, source: torch.Tensor, listed: ShortList | None) -> Callable[[], object]:
    lengths, settings = torch.full((len(source),), LENGTH), SearchSettings(beam=1, max_length_ratio=0.5)

    def run() -> object:
        model.short_list = listed
        return beam_search(model, source, lengths, settings, observe=False)

    return run


def main() -> None:
    """Measure, and print a row for each decoder and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    listed, rows = short_list(), []
    for kind in ("ssru", "softmax"):
        model = student(kind)
        for count in (1, 8, 64):
            source = sentences(count)
            works = {"all": _search(model, source, None), "listed": _search(model, source, listed)}
            spent = in_turn(works, rounds=rounds, clock=time.thread_time)
            words = len(listed.of(source, torch.full((count,), LENGTH), model.output).words)
            every, some = spent["all"], spent["listed"]
            row = kind, str(count), f"{words:,}", milliseconds(every), milliseconds(some), times(every / some)
            rows.append(row)
    table("Short lists", ("decoder", "sentences", "listed words", "all words", "short list", "ratio"), rows)


if __name__ == "__main__":
    main()
