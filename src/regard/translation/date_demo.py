"""`regard demo`: translate with the bundled model, then train a translator of dates for each score function.

Nothing is downloaded. The dates, in the formats of 25 locales, are translated into ISO 8601:

    "2020년 3월 14일 토요일", "Samstag, 14. März 2020", "14 mar. 2020", ... -> "2020-03-14"

The patterns, month names and weekday names are those of the Unicode CLDR (https://cldr.unicode.org), which the package
Babel carries. Every source has one reading: a format that another locale reads as another date is left out. The dates
take the way of a user's own text: files, an experiment, `train`, a run folder, a `Translator`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from babel import Locale, UnknownLocaleError
from babel.dates import DateTimePattern, parse_pattern
from rich.console import Console
from rich.table import Table

from regard.errors import ConfigurationError, CorpusError
from regard.translation.alignment_choice import one_map
from regard.translation.bleu import exact_match
from regard.translation.corpus import ParallelText
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH, LANGUAGES
from regard.translation.settings import SearchSettings
from regard.translation.terminal import alignment_table
from regard.translation.training import train
from regard.translation.translator import Translator
from regard.utils.atomic_files import atomic_write

LOCALES = (
    *("ko", "ja", "zh", "zh_Hant", "vi", "id", "tr"),
    *("de", "nl", "en", "sv", "da", "nb", "fi", "hu"),
    *("fr", "es", "it", "pt", "ro", "el"),
    *("pl", "cs", "ru", "uk"),
)
"""Scripts that DejaVu Sans and NanumGothic draw: Latin, Greek, Cyrillic, Hangul, and the characters of dates."""

STYLES = ("full", "long", "medium")
SKELETONS = ("yMMMEd", "yMMMd", "yMd")

EXAMPLES = (
    ("ko", date(2020, 3, 14)),
    ("de", date(1989, 11, 9)),
    ("ja", date(1964, 10, 10)),
    ("fr", date(1998, 7, 12)),
    ("ru", date(1961, 4, 12)),
    ("vi", date(2031, 12, 25)),
    ("en", date(1969, 7, 20)),
)
"""Dates to show, each in the full format of a locale; `date_corpus` never draws them."""


@dataclass(frozen=True)
class DateCorpus:
    """Parallel text of dates; no date is in more than one part, in whatever locale or format."""

    train: ParallelText
    validation: ParallelText
    test: ParallelText


@dataclass(frozen=True)
class DateFormat:
    """One way to write a date: a CLDR pattern such as `EEEE, d. MMMM y`, with the names of one locale.

    >>> DateFormat("de", "EEEE, d. MMMM y").write(date(2020, 3, 14))
    'Samstag, 14. März 2020'
    """

    locale: str
    pattern: str

    def write(self, day: date) -> str:
        """The date as text with plain spaces: CLDR has narrow no-break spaces in some locales."""
        names, pattern = self._compiled
        return " ".join(pattern.apply(day, names).split())

    @cached_property
    def _compiled(self) -> tuple[Locale, DateTimePattern]:
        # Babel would look up both anew for every date.
        return Locale.parse(self.locale), parse_pattern(self.pattern)


def date_corpus(
    *,
    seed: int = 1,
    locales: Sequence[str] = LOCALES,
    years: range = range(1900, 2101),
    train: int = 20_000,
    validation: int = 500,
    test: int = 2_000,
) -> DateCorpus:
    """Pairs of a date in the format of a locale and in ISO 8601: a pure function of the arguments.

    Each part has the asked number of different dates, and goes through all the formats of all the locales in turn.

    Raises:
        ConfigurationError: a locale is unknown, none of its formats is unambiguous, a year has not four digits.
        CorpusError: the years have fewer days than the three parts ask for.

    >>> corpus = date_corpus(locales=["ko", "en"], train=4, validation=1, test=1)
    >>> len(corpus.train.sources)
    4
    """
    formats = date_formats(locales)
    days = _days(years)
    asked = train + validation + test
    if asked > len(days):
        raise CorpusError(
            f"train={train:,}, validation={validation:,} and test={test:,} ask for {asked:,} different dates, "
            f"but {years} leaves {len(days):,}; ask for fewer, or widen years"
        )
    chosen = random.Random(seed).sample(days, asked)
    return DateCorpus(
        train=_dates_as_text(chosen[:train], formats),
        validation=_dates_as_text(chosen[train : train + validation], formats),
        test=_dates_as_text(chosen[train + validation :], formats),
    )


def examples() -> ParallelText:
    """Example dates, which are in no `date_corpus`: Korean, German, Japanese and so on, each in full.

    >>> examples().sources[0], examples().targets[0]
    ('2020년 3월 14일 토요일', '2020-03-14')
    """
    sources = [DateFormat(code, _locale(code).date_formats["full"].pattern).write(day) for code, day in EXAMPLES]
    return ParallelText.pair(sources, [day.isoformat() for _, day in EXAMPLES])


def date_formats(locales: Sequence[str] = LOCALES) -> list[DateFormat]:
    """Unambiguous formats of the locales with a four-digit year, each once.

    `d/M/y` and `M/d/y` both go where one locale has the first and another the second; `d.M.y` stays as long as no
    locale writes `M.d.y`. Month names that mean one month here and another there rule a format out in the same way.
    """
    formats = [
        DateFormat(locale, pattern)
        for locale in dict.fromkeys(locales)
        for pattern in dict.fromkeys(_patterns(_locale(locale)))
    ]
    # Of a day after the twelfth there is no doubt which number is the month, so these see every doubt. The year has
    # four digits everywhere: texts of different years differ.
    days = [date(2020, month, day) for month in range(1, 13) for day in range(1, 13)]
    texts = [[one.write(day) for day in days] for one in formats]
    readings = defaultdict(set)
    for written in texts:
        for text, day in zip(written, days, strict=True):
            readings[text].add(day)
    unambiguous = [
        one for one, written in zip(formats, texts, strict=True) if all(len(readings[text]) == 1 for text in written)
    ]
    for locale in locales:
        if not any(one.locale == locale for one in unambiguous):
            raise ConfigurationError(
                f"no format of the locale {locale!r} has only one reading beside those of the others; leave it out"
            )
    return unambiguous


def _patterns(locale: Locale) -> Iterable[str]:
    skeletons = locale.datetime_skeletons
    patterns = [locale.date_formats[style].pattern for style in STYLES]
    patterns += [skeletons[name].pattern for name in SKELETONS if name in skeletons]
    return [pattern for pattern in patterns if "yy" not in pattern]


def _locale(code: str) -> Locale:
    try:
        return Locale.parse(code)
    except (UnknownLocaleError, ValueError):
        raise ConfigurationError(
            f"locales: Babel knows no locale {code!r}; a locale is a code such as 'ko', 'de' or 'zh_Hant'"
        ) from None


def _days(years: range) -> list[date]:
    """All days of the years but those of the examples."""
    if not years or years[0] < 1000 or years[-1] > 9999 or years.step != 1:
        raise ConfigurationError(f"years is {years}; it has to be a range of years of four digits: range(1900, 2101)")
    shown = {day for _, day in EXAMPLES}
    first = date(years[0], 1, 1)
    count = (date(years[-1], 12, 31) - first).days + 1
    return [day for day in (first + timedelta(number) for number in range(count)) if day not in shown]


def _dates_as_text(days: Sequence[date], formats: Sequence[DateFormat]) -> ParallelText:
    sources = [formats[number % len(formats)].write(day) for number, day in enumerate(days)]
    return ParallelText.pair(sources, [day.isoformat() for day in days])


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
