"""Words per second of both recurrent translators, training and translating.

Made text: sentences of 5 to 20 words out of 3,000 with Zipf's frequencies, so that a word is a token and no download is
needed. Words are source words; padding is not counted. The models are those of recipes/multi30k-*.yaml.
"""

import random
import time
from pathlib import Path

import _timing
import torch

from regard.translation.batches import encode
from regard.translation.build_model import build_model
from regard.translation.corpus import ParallelText
from regard.translation.experiment import Experiment
from regard.translation.training import fit
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings

RECIPES = Path(__file__).parent.parent / "recipes"
SENTENCES, TRANSLATED = 4000, 256


def sentences(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    words = [f"w{rank}" for rank in range(3000)]
    weights = [1 / (rank + 1) for rank in range(3000)]
    return [" ".join(draw.choices(words, weights, k=draw.randint(5, 20))) for _ in range(count)]


def main() -> None:
    print(_timing.machine())
    sources, targets = sentences(SENTENCES, 1), sentences(SENTENCES, 2)
    targets = [(target + " " + target)[: len(source)].strip() for source, target in zip(sources, targets, strict=True)]
    vocabulary = Vocabulary.train(sources + targets, VocabularySettings(kind="words", size=3004))
    text = encode(ParallelText.pair(sources, targets), vocabulary, vocabulary)
    words = sum(len(source.split()) for source in sources)
    for name in ("bahdanau", "luong"):
        experiment = Experiment.load(
            RECIPES / f"multi30k-{name}.yaml", ["training.max_epochs=1", "training.patience=null"]
        )
        torch.manual_seed(1)
        model = build_model(experiment.model, len(vocabulary), len(vocabulary))
        result = fit(model, text, experiment.training)
        translator = Translator(model, vocabulary, vocabulary, experiment.search)
        speeds = {"training": words / result.seconds}
        for beam in (1, 5):
            settings = experiment.search.model_copy(update={"beam": beam})
            began = time.perf_counter()
            translator.translate(sources[:TRANSLATED], search=settings)
            spent = time.perf_counter() - began
            speeds[f"translating, beam {beam}"] = sum(len(source.split()) for source in sources[:TRANSLATED]) / spent
        print(f"{name:<9}" + "".join(f"   {what}: {speed:,.0f} words/s" for what, speed in speeds.items()))


if __name__ == "__main__":
    main()
