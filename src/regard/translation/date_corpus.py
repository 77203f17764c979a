"""A small translation task without data or network: dates in the formats of 25 locales, into ISO 8601.

    "2020년 3월 14일 토요일", "Samstag, 14. März 2020", "14 mar. 2020", ... -> "2020-03-14"

The patterns, month names and weekday names are those of the Unicode CLDR (https://cldr.unicode.org), which the package
Babel carries. Every source has one reading: a format that another locale reads as another date is left out.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property

from babel import Locale, UnknownLocaleError
from babel.dates import DateTimePattern, parse_pattern

from regard.errors import ConfigurationError, CorpusError
from regard.translation.corpus import ParallelText

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
