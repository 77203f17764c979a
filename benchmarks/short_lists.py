"""CPU seconds of greedy translation with a short list, by models as large as Bergamot's students, of random weights.

Words are as frequent as in a text, 1 / rank, and so are the 50 words that each source word may become; translations are
as long as their sources. Both searches alternate in one run, on one thread.
"""

import argparse
import time
from collections.abc import Callable

import torch
from _report import milliseconds, table, times
from _timing import in_turn

from regard.models.transformer import Transformer
from regard.models.transformer.short_list import ShortList
from regard.translation.build_model import build_model
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings, TransformerSettings

WORDS, FIRST, BEST, LENGTH = 32_000, 100, 50, 20


def _student(decoder_attention: str) -> Transformer:
    """A student: 6 layers of the encoder and 2 of the decoder, one table of embeddings."""
    told = {"dim": 256, "hidden_dim": 1536, "num_heads": 8, "encoder_layers": 6, "decoder_layers": 2}
    more = {"shared_embeddings": "all", "decoder_attention": decoder_attention}
    model = build_model(TransformerSettings.model_validate({**told, **more}), WORDS, WORDS).eval()
    assert isinstance(model, Transformer)
    return model


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
    frequencies = 1 / (torch.arange(WORDS) + 20.0)
    words = torch.multinomial(frequencies, WORDS * BEST, replacement=True)
    listed = ShortList(torch.arange(FIRST), torch.arange(0, WORDS * BEST + 1, BEST), words, WORDS)
    rows = []
    for kind in ("ssru", "softmax"):
        model = _student(kind)
        for sentences in (1, 8, 64):
            source = (torch.multinomial(frequencies[4:], sentences * LENGTH, replacement=True) + 4).view(
                sentences, LENGTH
            )
            works = {"all": _search(model, source, None), "listed": _search(model, source, listed)}
            spent = in_turn(works, rounds=rounds, clock=time.thread_time)
            count = len(listed.of(source, torch.full((sentences,), LENGTH), model.output).words)
            every, some = spent["all"], spent["listed"]
            row = kind, str(sentences), f"{count:,}", milliseconds(every), milliseconds(some), times(every / some)
            rows.append(row)
    table("Short lists", ("decoder", "sentences", "listed words", "all words", "short list", "ratio"), rows)


if __name__ == "__main__":
    main()
