"""Words of a CPU second beside CTranslate2, which computes in C++, with the same weights and the same translations.

The translator that comes with regard, English to French, on 500 made sentences of words that it knows, a beam of five,
one and two threads, float32 and int8. CTranslate2 is given pieces and gives pieces; regard reads and writes text. Each
has the batches that suit it: regard those that it makes where no size is named, CTranslate2 the fastest of several, by
sentences and by tokens. It needs ctranslate2 (`pip install 'regard[ctranslate2]'`), and says so. Where other work is
done beside it, set OMP_WAIT_POLICY=PASSIVE: else threads that wait take the processor.
"""

import importlib.util
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _timing
import torch

from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

COUNT, BEAM, TRIALS, ROUNDS = 500, 5, 2, 5
BATCHES = (64, "examples"), (128, "examples"), (1024, "tokens"), (2048, "tokens"), (4096, "tokens")
"""`max_batch_size` and `batch_type` of CTranslate2, which are tried."""
SUBJECTS = ["I", "you", "we", "they", "my father", "the old man", "Tom", "Mary", "her sister", "nobody"]
VERBS = ["know", "want", "like", "see", "forgot", "bought", "need", "found", "will help", "can understand"]
OBJECTS = ["the house", "a dog", "it", "this book", "my friends", "the truth", "a new car", "you", "nothing", "my hat"]
ENDS = ["", "today", "very well", "with my brother", "in the morning", "when I was young", "but it is late"]


def sentences(count: int) -> list[str]:
    draw = random.Random(3)
    parts = SUBJECTS, VERBS, OBJECTS, ENDS
    made = (" ".join(filter(None, (draw.choice(part) for part in parts))) for _ in range(count))
    return [sentence[0].upper() + sentence[1:] + "." for sentence in made]


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    print(_timing.machine())
    if importlib.util.find_spec("ctranslate2") is None:
        print("skipped: ctranslate2 is not installed")
        return
    import ctranslate2  # type: ignore[import-not-found]

    lines, translators = sentences(COUNT), {name: Translator.load(ENGLISH_FRENCH) for name in ("float32", "int8")}
    translators["int8"].quantize()
    with tempfile.TemporaryDirectory() as folder:
        Translator.load(ENGLISH_FRENCH).to_ctranslate2(Path(folder) / "model")
        for threads, (name, ours) in itertools.product((1, 2), translators.items()):
            torch.set_num_threads(threads)
            theirs = ctranslate2.Translator(f"{folder}/model", compute_type=name, intra_threads=threads)
            print(f"{threads} threads, {name}: {compare(ours, theirs, lines)}")


def fastest_batches(theirs: Any, pieces: list[list[str]]) -> tuple[int, str]:
    """Those of `BATCHES` in which CTranslate2 takes the least CPU time."""

    def once(size: int, kind: str) -> float:
        told = {"beam_size": BEAM, "max_batch_size": size, "batch_type": kind}
        return cpu_seconds(lambda: theirs.translate_batch(pieces, **told))

    once(*BATCHES[0])  # the first call of all
    spent = [[once(*batches) for batches in BATCHES] for _ in range(TRIALS)]
    least = {batches: min(column) for batches, column in zip(BATCHES, zip(*spent, strict=True), strict=True)}
    return min(least, key=least.__getitem__)


def compare(ours: Translator, theirs: Any, lines: list[str]) -> str:
    """Words of a CPU second of both, in turn, and how many translations are equal."""
    told = {"beam": BEAM, "method": "refilled", "stop_early": True, "penalty_form": "length", "max_length_ratio": 20.0}
    search = ours.search.model_copy(update=told)
    words = sum(len(line.split()) for line in lines)
    pieces = [ours.source_vocabulary.tokens(ours.source_vocabulary.encode(line)) for line in lines]
    said: dict[str, list] = {}

    def regard() -> None:
        said["regard"] = ours.translate(lines, search=search, observe=False)

    def other() -> None:
        said["ctranslate2"] = theirs.translate_batch(pieces, beam_size=BEAM, max_batch_size=size, batch_type=kind)

    size, kind = fastest_batches(theirs, pieces)
    regard()
    other()
    equal = sum(
        [token for token in mine.candidates[0].tokens if token != "</s>"] == its.hypotheses[0]
        for mine, its in zip(said["regard"], said["ctranslate2"], strict=True)
    )
    spent = [(cpu_seconds(regard), cpu_seconds(other)) for _ in range(ROUNDS)]
    mine, its = (statistics.median(column) for column in zip(*spent, strict=True))
    ratio = statistics.median(b / a for a, b in spent)
    return (
        f"regard {words / mine:,.0f} words a CPU second, ctranslate2 {words / its:,.0f} in batches of "
        f"{size:,} {kind}, ratio {ratio:.2f}; {equal} of {COUNT} translations equal"
    )


if __name__ == "__main__":
    main()
