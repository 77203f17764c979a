"""`regard demo`: translate with the bundled model, then train a translator of dates for each score function.

Nothing is downloaded. The dates take the way of a user's own text: files, an experiment, `train`, a run folder, a
`Translator`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from regard.translation.bleu import exact_match
from regard.translation.corpus import ParallelText
from regard.translation.date_corpus import LOCALES, date_corpus, examples
from regard.translation.experiment import Experiment
from regard.translation.pharaoh import one_map
from regard.translation.run_folder import ENGLISH_FRENCH, LANGUAGES
from regard.translation.settings import SearchSettings
from regard.translation.terminal import alignment_table
from regard.translation.training import train
from regard.translation.translator import Translator
from regard.utils.atomic_files import atomic_write

DECODERS = (
    {"kind": "bahdanau", "score": "additive"},
    {"kind": "luong", "score": "dot"},
    {"kind": "luong", "score": "scaled_dot"},
    {"kind": "luong", "score": "general"},
    {"kind": "luong", "score": "additive"},
    {"kind": "luong", "score": "concat"},
    {"kind": "luong", "score": "location"},
)
SHOWN = "luong-general"
SENTENCES = ("I am very tired.", "Where is the station?", "She doesn't like to cook.", "Can I help you?")
GREEDY = SearchSettings(beam=1)


@dataclass(frozen=True)
class Trained:
    """Quality and speed of one translator of the demo."""

    name: str
    parameters: int
    exact: float
    """Share of the held-out dates translated letter for letter."""
    words_per_second: float
    seconds: float


def run(folder: str | Path, console: Console | None = None) -> None:
    """Run the demo: translate, then train, compare and draw; models that the folder already contains are not retrained.

    The folder gets the corpus as `dates/*.tsv`, and for each translator a run folder with `attention.png`. Models this
    small gain nothing from a second thread, so each is trained by one, as many at once as there are cores.
    """
    folder, console = Path(folder), console or Console()
    show_translations(console)
    corpus = write_corpus(folder / "dates")
    experiments = list(_experiments(folder / "dates"))
    console.print(
        f"{len(corpus['train']):,} dates as {len(LOCALES)} languages write them, to be written as ISO 8601; "
        f"{len(corpus['test']):,} other dates are held out. Training {len(experiments)} translators:\n"
    )
    trained = {}
    for one in _train_all(experiments, folder, corpus):
        trained[one.name] = one
        console.print(f"  {one.name:<18} {one.exact:.1%} of the held-out dates right after {one.seconds:.0f} s")
    console.print()
    console.print(_comparison([trained[experiment.name] for experiment in experiments]))
    _show(experiments, folder, console)


def show_translations(console: Console) -> None:
    """Print translations of everyday sentences by the installed model, and the attention weights of one."""
    translations = Translator.load(ENGLISH_FRENCH).translate(SENTENCES)
    console.print(f"{' to '.join(LANGUAGES)}, by the small Transformer that regard comes with:")
    for translation in translations:
        console.print(f"  {translation.source} → {translation.text}")
    shown = translations[2]
    best = shown.candidates[0]
    console.print("\nand looks, for each piece that it writes (the mean over the heads of its last layer), at:")
    last = best.weights.shape[1] - 1  # [T, layers, heads, S]
    console.print(alignment_table(one_map(best.weights, layer=last), best.tokens, shown.source_tokens))
    console.print('\nYours: regard translate "I am very tired."\n')


def _train_all(experiments: list[Experiment], folder: Path, corpus: dict[str, ParallelText]) -> Iterator[Trained]:
    """Train all translators, and yield each when it is ready."""
    workers = min(len(experiments), os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")  # a fork would copy torch's threads in whatever state they are
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(_train, experiment, folder / experiment.name, corpus) for experiment in experiments]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def write_corpus(folder: Path) -> dict[str, ParallelText]:
    """Generate the dates of the demo, and write them as train.tsv, validation.tsv and test.tsv into a folder.

    Raises:
        CheckpointError: a file cannot be written.
    """
    dates = date_corpus(train=12_000)
    parts = {"train": dates.train, "validation": dates.validation, "test": dates.test}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        with atomic_write(folder / f"{name}.tsv") as partial:
            rows = (f"{source}\t{target}\n" for source, target in zip(part.sources, part.targets, strict=True))
            partial.write_text("".join(rows), encoding="utf-8")
    return parts


def _experiments(data: Path) -> Iterator[Experiment]:
    for decoder in DECODERS:
        mapping = date_experiment(decoder)
        mapping["data"] = {
            "folder": str(data),
            **{part: {"tsv": f"{part}.tsv"} for part in ("train", "validation", "test")},
        }
        yield Experiment.from_mapping(mapping)


def date_experiment(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a translator of dates with a decoder, as the YAML of an experiment has them, without `data`."""
    if decoder["kind"] == "luong":
        decoder = {**decoder, "input_feeding": False}  # all steps of a batch at once
    return {
        "name": f"{decoder['kind']}-{decoder['score']}".replace("_", "-"),
        "vocabulary": {"kind": "characters", "size": 400},
        "model": {
            "embedding_dim": 64,
            "hidden_dim": 96,
            "cell": "lstm",
            "dropout": 0.0,
            "max_source_length": 64,
            "decoder": decoder,
        },
        "training": {
            "batch_tokens": 1500,
            "max_epochs": 4,
            "learning_rate": 1e-2,
            "warmup_steps": 50,
            "decay": "inverse-sqrt",
        },
    }


def _train(experiment: Experiment, folder: Path, corpus: dict[str, ParallelText]) -> Trained:
    began = time.perf_counter()
    result = train(experiment, folder, verbose=False)
    translator = Translator.load(folder, which="last")
    test = corpus["test"]
    translations = translator.translate(test.sources, search=GREEDY, batch_size=250)
    words = sum(len(source.split()) for source in corpus["train"].sources) * result.epochs
    return Trained(
        experiment.name,
        parameters=sum(parameter.numel() for parameter in translator.model.parameters()),
        exact=exact_match([translation.text for translation in translations], test.targets),
        words_per_second=words / result.seconds if result.seconds else 0.0,
        seconds=time.perf_counter() - began,
    )


def _comparison(trained: list[Trained]) -> Table:
    table = Table(
        caption="words/s: source words trained per second; seconds: training, and translating the held-out dates"
    )
    table.add_column("translator")
    for heading in ("parameters", "held-out dates right", "words/s", "seconds"):
        table.add_column(heading, justify="right")
    for one in trained:
        table.add_row(
            one.name,
            f"{one.parameters:,}",
            f"{one.exact:.1%}",
            f"{one.words_per_second:,.0f}",
            f"{one.seconds:.1f}",
        )
    return table


def _show(experiments: list[Experiment], folder: Path, console: Console) -> None:
    shown = examples()
    for experiment in experiments:
        translator = Translator.load(folder / experiment.name, which="last")
        translations = translator.translate(shown.sources, search=GREEDY)
        with atomic_write(folder / experiment.name / "attention.png") as partial:
            translations[0].heatmap().savefig(partial, format="png", dpi=150)
        if experiment.name == SHOWN:
            console.print(f"\n{SHOWN} translates dates that no training text holds:")
            for translation, target in zip(translations, shown.targets, strict=True):
                mark = "" if translation.text == target else f"   (should be {target})"
                console.print(f"  {translation.source} → {translation.text}{mark}")
            best = translations[0].candidates[0]
            console.print("\nand looks, for each character that it writes, at:")
            console.print(alignment_table(best.weights, best.tokens, translations[0].source_tokens))
    console.print(f"\nPictures of where each looks: {folder}/*/attention.png", soft_wrap=True)
    console.print(f'Yours: echo "3 mai 1968" | regard translate --checkpoint {folder}/{SHOWN}', soft_wrap=True)
