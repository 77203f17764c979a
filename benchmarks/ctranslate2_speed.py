"""Words of a CPU second beside CTranslate2, which computes in C++, with the same weights and the same translations.

The translator that comes with regard, English to French, on 500 made sentences of words that it knows, a beam of five,
one and two threads, float32 and int8. CTranslate2 is given pieces and gives pieces; regard reads and writes text. It
needs ctranslate2 (`pip install 'regard[ctranslate2]'`), and says so. Where other work is done beside it, set
OMP_WAIT_POLICY=PASSIVE: else threads that wait take the processor.
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

COUNT, BEAM, ROUNDS = 500, 5, 5
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
        said["ctranslate2"] = theirs.translate_batch(pieces, beam_size=BEAM, max_batch_size=64)

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
        f"regard {words / mine:,.0f} words a CPU second, ctranslate2 {words / its:,.0f}, ratio {ratio:.2f}; "
        f"{equal} of {COUNT} translations equal"
    )


if __name__ == "__main__":
    main()
