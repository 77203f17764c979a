import re
import time
from collections import defaultdict
from datetime import date, timedelta

import pytest
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font

from regard.errors import ConfigurationError, CorpusError
from regard.plots.labels import packaged_fonts
from regard.translation.date_demo import EXAMPLES, LOCALES, date_corpus, date_formats, examples


@pytest.fixture(scope="module")
def corpus():
    return date_corpus()


def parts(corpus):
    return corpus.train, corpus.validation, corpus.test


def test_the_corpus_has_the_sizes_asked_for():
    corpus = date_corpus(train=7, validation=5, test=3)
    assert [len(part) for part in parts(corpus)] == [7, 5, 3]
    assert all(part.dropped_empty == 0 for part in parts(corpus))


def test_no_date_is_in_two_parts_or_twice_in_one(corpus):
    dates = [day for part in parts(corpus) for day in part.targets]
    assert len(dates) == 22_500
    assert len(set(dates)) == len(dates)


def test_no_date_to_show_is_ever_drawn():
    years = range(2020, 2021)
    corpus = date_corpus(years=years, train=363, validation=1, test=1)  # every day but one
    assert "2020-03-14" not in {day for part in parts(corpus) for day in part.targets}
    assert "2020-03-15" in {day for part in parts(corpus) for day in part.targets}


def test_every_source_is_its_target_as_its_format_writes_it(corpus):
    formats = date_formats()
    for part in parts(corpus):
        for number in range(0, len(part), 17):
            written = formats[number % len(formats)].write(date.fromisoformat(part.targets[number]))
            assert part.sources[number] == written


def test_every_source_has_one_reading():
    # A leap year has every month and day; years cannot be confused, they have four digits.
    readings = defaultdict(set)
    days = [date(2024, 1, 1) + timedelta(number) for number in range(366)]
    for one in date_formats():
        for day in days:
            readings[one.write(day)].add(day)
    assert [text for text, meant in readings.items() if len(meant) > 1] == []


@pytest.mark.parametrize(
    ("locales", "kept"),
    [
        (["en", "de"], {"d.M.y", "dd.MM.y", "M/d/y"}),  # nobody else has slashes
        (["en", "fr"], set()),  # M/d/y against dd/MM/y
        (["fr", "es"], {"dd/MM/y", "d/M/y"}),  # they agree
    ],
)
def test_numbers_alone_stay_only_where_all_locales_read_them_alike(locales, kept):
    numeric = {one.pattern for one in date_formats(locales) if re.fullmatch(r"[dMy./]+", one.pattern)}
    assert numeric == kept


def test_years_of_two_digits_are_not_used():
    for one in date_formats():
        assert "1907" in one.write(date(1907, 5, 3)), one


def test_every_locale_has_several_formats():
    formats = date_formats()
    counts = {locale: sum(one.locale == locale for one in formats) for locale in LOCALES}
    assert len(counts) == 25
    assert min(counts.values()) >= 3


def test_every_format_is_in_every_part(corpus):
    assert all(len(part) >= len(date_formats()) for part in parts(corpus))


def test_white_space_is_plain(corpus):
    for part in (*parts(corpus), examples()):
        text = "".join(part.sources)
        assert {character for character in text if character.isspace()} == {" "}
        assert all(source == source.strip() for source in part.sources)


def test_targets_are_iso_dates_of_the_years(corpus):
    years = {date.fromisoformat(day).year for part in parts(corpus) for day in part.targets}
    assert (min(years), max(years)) == (1900, 2100)


def test_the_corpus_is_a_function_of_the_seed():
    small = {"locales": ["ko", "de"], "train": 20, "validation": 3, "test": 3}
    assert date_corpus(seed=3, **small) == date_corpus(seed=3, **small)
    assert date_corpus(seed=3, **small) != date_corpus(seed=4, **small)


def test_it_is_quick():
    started = time.process_time()
    date_corpus()
    assert time.process_time() - started < 3


def test_matplotlib_and_the_extra_have_fonts_for_every_source(corpus):
    files = [findfont("DejaVu Sans"), *map(str, packaged_fonts())]
    drawn = {chr(code) for file in files for code in FT2Font(file).get_charmap()}
    assert set("".join([*corpus.train.sources, *examples().sources])) <= drawn


def test_the_dates_to_show():
    shown = examples()
    pairs = dict(zip(shown.sources, shown.targets, strict=True))
    assert pairs["2020년 3월 14일 토요일"] == "2020-03-14"
    assert pairs["Donnerstag, 9. November 1989"] == "1989-11-09"
    assert pairs["1964年10月10日土曜日"] == "1964-10-10"
    assert pairs["среда, 12 апреля 1961 г."] == "1961-04-12"
    assert len(pairs) == len(EXAMPLES)


def test_an_unknown_locale():
    with pytest.raises(ConfigurationError, match="Babel knows no locale 'xx'; a locale is a code such as 'ko'"):
        date_corpus(locales=["ko", "xx"])


def test_too_few_days():
    message = r"train=20,000, validation=500 and test=2,000 ask for 22,500 different dates, but range\(2001, 2003\) "
    with pytest.raises(CorpusError, match=message + "leaves 730; ask for fewer, or widen years"):
        date_corpus(years=range(2001, 2003))


@pytest.mark.parametrize("years", [range(900, 2000), range(1900, 10_001), range(0), range(1900, 2000, 2)])
def test_years_that_cannot_be(years):
    with pytest.raises(ConfigurationError, match=r"it has to be a range of years of four digits: range\(1900, 2101\)"):
        date_corpus(years=years)


def test_a_locale_without_a_clear_format(monkeypatch):
    monkeypatch.setattr("regard.translation.date_demo.STYLES", ())
    monkeypatch.setattr("regard.translation.date_demo.SKELETONS", ("yMd",))
    with pytest.raises(ConfigurationError, match="no format of the locale 'en' has only one reading beside those of"):
        date_formats(["en", "fr"])
