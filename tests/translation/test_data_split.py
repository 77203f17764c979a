import gzip
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import experiment

from regard.errors import ConfigurationError, CorpusError
from regard.translation.corpus import ParallelText
from regard.translation.data_split import evaluation_text, split, training_text, with_casual_copies
from regard.translation.experiment import Experiment
from regard.translation.settings import DataSettings, SplitSettings, TextTable
from regard.translation.training import train

TABLE = TextTable(tsv=Path("pairs.tsv.gz"))


def pairs_of(text: ParallelText) -> list[tuple[str, str]]:
    return list(zip(text.sources, text.targets, strict=True))


def distinct(count: int) -> list[tuple[str, str]]:
    return [(f"sentence {i}", f"phrase {i}") for i in range(count)]


def text_of(pairs: list[tuple[str, str]]) -> ParallelText:
    return ParallelText.pair([source for source, _ in pairs], [target for _, target in pairs])


def write_table(folder: Path, pairs: list[tuple[str, str]]) -> None:
    lines = "".join(f"{source}\t{target}\n" for source, target in pairs)
    (folder / TABLE.tsv).write_bytes(gzip.compress(lines.encode()))


def test_every_pair_is_in_one_part_and_parts_have_the_pairs_asked_for():
    pairs = distinct(50)
    parts = split(text_of(pairs), SplitSettings(validation=7, test=11))
    assert {name: len(part) for name, part in parts.items()} == {"test": 11, "validation": 7, "train": 32}
    assert sorted(pair for part in parts.values() for pair in pairs_of(part)) == sorted(pairs)
    kept = pairs_of(parts["train"])
    assert kept == [pair for pair in pairs if pair in kept]  # in the order of the text


sentences = st.tuples(st.integers(0, 30), st.integers(0, 30))


@settings(max_examples=60)
@given(st.lists(sentences, min_size=12, max_size=60, unique=True), st.integers(0, 5), st.randoms())
def test_no_two_parts_share_a_sentence_and_the_order_of_lines_does_not_matter(
    numbers: list[tuple[int, int]], seed: int, shuffler: random.Random
):
    pairs = [(f"s{source}", f"t{target}") for source, target in numbers]
    told = SplitSettings(validation=1, test=1, seed=seed)
    try:
        parts = split(text_of(pairs), told)
    except CorpusError:
        return  # all of it hangs together
    for side in (0, 1):
        seen = [{pair[side] for pair in pairs_of(part)} for part in parts.values()]
        assert sum(map(len, seen)) == len(set().union(*seen))
    shuffled = list(pairs)
    shuffler.shuffle(shuffled)
    again = split(text_of(shuffled), told)
    assert {name: set(pairs_of(part)) for name, part in again.items()} == {
        name: set(pairs_of(part)) for name, part in parts.items()
    }


def test_what_hangs_together_through_others_stays_together():
    chain = [("a", "1"), ("b", "1"), ("b", "2"), ("c", "2")]  # a and c share nothing themselves
    parts = split(text_of([*chain, *distinct(20)]), SplitSettings(test=5))
    held_out = set(pairs_of(parts["test"]))
    assert len(held_out & set(chain)) in (0, 4)


@pytest.mark.parametrize("seed", range(6))
def test_spellings_of_one_sentence_are_on_one_side(seed: int):
    alike = [("Go on.", "x1"), ("go on!", "x2"), ("Go  on", "x3"), ("GO ON\u202f?", "x4"), ("other", "x4.")]
    parts = split(text_of([*alike, *distinct(5)]), SplitSettings(test=5, seed=seed))
    assert len(set(pairs_of(parts["test"])) & set(alike)) in (0, 5)


def test_accents_and_words_tell_sentences_apart():
    pairs = [("ou", "a"), ("où", "b"), ("on", "c"), ("?", "d"), ("!", "e"), ("하나", "f"), ("둘", "g")]
    for seed in range(3):
        assert len(split(text_of(pairs), SplitSettings(test=3, seed=seed))["test"]) == 3
    together = [("one", "!"), ("two", "!"), ("three", "d")]
    assert len(split(text_of(together), SplitSettings(test=1))["test"]) == 1


def test_groups_of_any_size_are_as_likely_to_be_held_out():
    large = [("many ways", f"façon {i}") for i in range(10)]
    chosen = sum(
        large[0] in pairs_of(split(text_of([*large, *distinct(90)]), SplitSettings(test=20, seed=seed))["test"])
        for seed in range(300)
    )
    # It fits if it comes among the first 11 of 91 groups: 36 times in 300. Were each of its ten pairs a chance of its
    # own, it would be there in most.
    assert 15 < chosen < 75


def test_another_seed_holds_out_other_sentences():
    pairs = distinct(200)
    one, other = (set(split(text_of(pairs), SplitSettings(test=20, seed=seed))["test"].sources) for seed in (1, 2))
    assert 20 <= len(one | other) <= 40
    assert len(one & other) < 15


def test_the_split_is_the_same_for_ever():
    """Whoever trained yesterday is tested on the same sentences tomorrow."""
    parts = split(text_of(distinct(12)), SplitSettings(test=3, validation=2, seed=1))
    assert parts["test"].sources == ["sentence 0", "sentence 5", "sentence 9"]
    assert parts["validation"].sources == ["sentence 4", "sentence 8"]


@pytest.mark.parametrize(
    ("pairs", "told", "message"),
    [
        (distinct(3), {"test": 2, "validation": 1},
         "data.split holds out 3 pairs, and the sources has 3: lower split.validation or split.test, or give more"),
        ([("a", "1"), ("a", "2"), ("b", "2"), ("c", "3"), ("c", "4")], {"test": 1},
         r"split.test asks for 1 pairs, .* no set of groups of the sources .* the nearest has 0: ask for that many"),
        ([("a", "1"), ("a", "2"), ("c", "3"), ("c", "4"), ("c", "5")], {"test": 4},
         r"split.test asks for 4 pairs, .* the nearest has (2|3): ask for that many"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_told(pairs: list[tuple[str, str]], told: dict[str, int], message: str):
    with pytest.raises(CorpusError, match=message):
        split(text_of(pairs), SplitSettings(**told))


def test_a_part_of_no_pairs_is_not_there():
    assert split(text_of(distinct(5)), SplitSettings(test=2)).keys() == {"test", "train"}
    assert split(text_of(distinct(5)), SplitSettings(validation=2)).keys() == {"validation", "train"}


def test_the_parts_of_one_table(tmp_path: Path):
    write_table(tmp_path, [*distinct(30), ("", "left over")])
    data = DataSettings(folder=tmp_path, train=TABLE, split=SplitSettings(validation=4, test=6))
    text, validation = training_text(data)
    test = evaluation_text(data)
    assert validation is not None
    assert test is not None
    assert (len(text), len(validation), len(test)) == (20, 4, 6)
    assert not set(text.sources) & set(test.sources)
    assert text.source_name.endswith("pairs.tsv.gz column 0 (training part)")
    assert test.target_name.endswith("pairs.tsv.gz column 1 (test part)")
    assert (text.dropped_empty, validation.dropped_empty, test.dropped_empty) == (1, 0, 0)


def test_files_of_their_own_stand_beside_a_split(tmp_path: Path):
    write_table(tmp_path, distinct(30))
    (tmp_path / "other.tsv").write_text("hello\tbonjour\n", encoding="utf-8")
    other = TextTable(tsv=Path("other.tsv"))
    data = DataSettings(folder=tmp_path, train=TABLE, validation=other, split=SplitSettings(test=6))
    text, validation = training_text(data)
    assert len(text) == 24
    assert validation is not None
    assert validation.sources == ["hello"]
    plain = DataSettings(folder=tmp_path, train=TABLE, test=other)
    assert training_text(plain)[1] is None
    assert getattr(evaluation_text(plain), "targets", None) == ["bonjour"]
    assert evaluation_text(DataSettings(folder=tmp_path, train=TABLE)) is None
    assert evaluation_text(DataSettings(folder=tmp_path, train=TABLE, split=SplitSettings(validation=1))) is None


def test_casual_copies_are_as_people_type():
    pairs = [(f"I'm in Room {i}, Tom!", f"Je suis dans la salle {i} !") for i in range(2000)]
    text = with_casual_copies(text_of(pairs), 0.3)
    assert pairs_of(text)[:2000] == pairs
    copies = pairs_of(text)[2000:]
    assert 500 < len(copies) < 700
    originals = {target: source for source, target in pairs}
    kinds = {"mark": 0, "case": 0, "both": 0}
    for source, target in copies:
        original = originals[target]
        kind = {original[:-1]: "mark", original.lower(): "case", original[:-1].lower(): "both"}[source]
        kinds[kind] += 1
    assert min(kinds.values()) > 140


def test_a_copy_that_would_be_the_same_or_empty_is_none():
    assert with_casual_copies(text_of([("plain", "simple")] * 50), 0.99).sources == ["plain"] * 50
    assert set(with_casual_copies(text_of([("!", "!")] * 5), 0.99).sources) == {"!"}


def test_the_share_of_copies_is_none_unless_told(tmp_path: Path):
    write_table(tmp_path, [("Hello.", "Bonjour."), ("Good night.", "Bonne nuit.")])
    assert len(training_text(DataSettings(folder=tmp_path, train=TABLE))[0]) == 2
    assert len(training_text(DataSettings(folder=tmp_path, train=TABLE, casual_copies=0.99))[0]) == 4


def test_extra_pairs_are_trained_on_as_often_as_told(tmp_path: Path):
    write_table(tmp_path, distinct(20))
    (tmp_path / "extra.tsv").write_text("Hello!\tBonjour !\nBye.\tAu revoir.\n")
    extra = TextTable(tsv=Path("extra.tsv"))
    text, held_out = training_text(DataSettings(folder=tmp_path, train=TABLE, extra=extra, extra_times=3))
    assert pairs_of(text) == distinct(20) + 3 * [("Hello!", "Bonjour !"), ("Bye.", "Au revoir.")]
    assert held_out is None


@pytest.mark.parametrize(("part", "file"), [("validation", ""), ("test", ""), ("validation", "dev"), ("test", "dev")])
def test_extra_pairs_have_nothing_that_is_held_out(tmp_path: Path, part: str, file: str):
    write_table(tmp_path, distinct(20))
    extra = {"extra": {"tsv": "extra.tsv"}, "train": {"tsv": "pairs.tsv.gz"}, "folder": str(tmp_path)}
    if file:
        (tmp_path / "dev.tsv").write_text("Sentence 40\tphrase 40\n")
        data = DataSettings.model_validate(extra | {part: {"tsv": "dev.tsv"}})
        source, target = "sentence 40", "phrase 40"
    else:
        data = DataSettings.model_validate(extra | {"split": {part: 1}})
        [(source, target)] = pairs_of(split(text_of(distinct(20)), SplitSettings.model_validate({part: 1}))[part])
    rows = [(f"{source.upper()}!", "mot"), ("mot", f"{target}."), ("own", "à soi")]
    (tmp_path / "extra.tsv").write_text("".join(f"{one}\t{other}\n" for one, other in rows))
    assert [pair for pair in pairs_of(training_text(data)[0]) if pair in rows] == [("own", "à soi")]
    (tmp_path / "extra.tsv").write_text(f"{source}?\tmot\n")
    with pytest.raises(CorpusError, match="each of the 1 pairs of .*extra.tsv column 0 shares a sentence with what is"):
        training_text(data)


def test_a_run_trains_on_its_part_and_is_resumed_with_no_other(tmp_path: Path):
    letters = random.Random(1)
    words = ["".join(letters.choices("abcdef", k=letters.randrange(3, 9))) for _ in range(80)]
    write_table(tmp_path, [(f"{word}{i}", f"{word[::-1]}{i}") for i, word in enumerate(words)])
    told = experiment(tmp_path, max_epochs=1).model_dump(mode="json")
    told["data"] |= {"train": {"tsv": "pairs.tsv.gz"}, "validation": None, "split": {"validation": 10, "test": 10}}
    result = train(Experiment.from_mapping(told), tmp_path / "run")
    assert result.best_score is not None
    told["data"]["split"]["seed"] = 2
    with pytest.raises(ConfigurationError, match=r"holds a run with other settings: data.split.seed; give this one"):
        train(Experiment.from_mapping(told), tmp_path / "run")


def test_links_stay_with_their_pairs():
    pairs = distinct(30)
    links = [frozenset({(0, 0), (1, row % 2)}) for row in range(30)]
    text = ParallelText.pair([of for of, _ in pairs], [of for _, of in pairs], links=links)
    for part in split(text, SplitSettings(test=7, validation=3)).values():
        assert part.links == [links[pairs.index(pair)] for pair in pairs_of(part)]


def test_a_careless_copy_has_the_links_of_the_words_that_it_has():
    pairs = [(f"Word {row} !", f"Wort {row} !") for row in range(40)]
    links = [frozenset({(0, 0), (2, 2)})] * 40
    text = ParallelText.pair([of for of, _ in pairs], [of for _, of in pairs], links=links)
    copied = with_casual_copies(text, 0.9)
    assert copied.links is not None
    assert len(copied.links) == len(copied) > 60
    for source, of in zip(copied.sources, copied.links, strict=True):
        assert of == ({(0, 0), (2, 2)} if source.endswith("!") else {(0, 0)})
    assert {len(of) for of in copied.links} == {1, 2}


def test_links_of_the_training_text_are_read_and_extra_pairs_have_none(tmp_path: Path):
    (tmp_path / "a").write_text("one two\nthree\n")
    (tmp_path / "b").write_text("eins zwei\ndrei\n")
    (tmp_path / "c").write_text("four\n")
    (tmp_path / "d").write_text("vier\n")
    (tmp_path / "links").write_text("0-0 1-1\n\n")
    data = DataSettings.model_validate(
        {
            "folder": tmp_path,
            "train": {"source": "a", "target": "b"},
            "alignments": "links",
            "extra": {"source": "c", "target": "d"},
        }
    )
    assert training_text(data)[0].links == [{(0, 0), (1, 1)}, frozenset(), frozenset()]
