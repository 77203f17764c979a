"""A prepared text: what is held out, cleaned, varied, joined and mixed, and a run that learns from it."""

from __future__ import annotations

import gzip
import itertools
import json
import random

import pytest
import torch

from regard.errors import CheckpointError, ConfigurationError, CorpusError
from regard.explorer.record_translation import atlas_of_pair, atlas_of_translation
from regard.steps.translation_steps import TranslatedSentence
from regard.translation.checkpoint import load_weights
from regard.translation.experiment import Experiment
from regard.translation.pair_variations import PairVariations, clean, joined
from regard.translation.placeholders import Placeholders
from regard.translation.preparation import Preparation, PreparedText
from regard.translation.run_folder import export
from regard.translation.training import train
from regard.translation.translator import Translator

ANIMALS = ["dog", "cat", "cow", "pig", "hen", "fox", "owl", "bee"]
FRENCH = ["chien", "chat", "vache", "cochon", "poule", "renard", "chouette", "abeille"]


@pytest.fixture
def folder(tmp_path):
    """64 pairs with names and numbers, and a text of which nothing may be trained on."""
    pairs = [
        (f"{name} sees {count} of the {one}{end}", f"{name} voit {number} du {autre} {end}")
        for one, autre in zip(ANIMALS, FRENCH, strict=True)
        for name in ("Tom", "Ngozi" if one < "d" else "Amara")
        for (count, number), end in (((("two", "deux"), "."), (("17", "17"), "!")) * 2)
    ]
    pairs = [(f"{source} {row}", f"{target} {row}") for row, (source, target) in enumerate(pairs)]
    pairs += [
        ("too " * 30, "trop " * 30),
        ("spaces   here", "des   espaces"),
        ("no", "une phrase beaucoup trop longue"),
    ]
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    (tmp_path / "test.src").write_text("Tom sees TWO of the dog 0\n")
    (tmp_path / "test.trg").write_text("rien\n")
    return tmp_path


def preparation(folder, **keys) -> Preparation:
    text = {"text": "pairs.tsv", "split": {"validation": 4, "test": 5}} | keys.pop("text", {})
    plain = {"name": "toy", "task": "preparation", "folder": str(folder), "texts": [text], "longest": 20}
    return Preparation.from_mapping(plain | keys)


def test_what_is_held_out_or_unclean_is_not_trained_on(folder):
    prepared = PreparedText.of(
        preparation(folder, placeholders=False, held_out=[{"source": "test.src", "target": "test.trg"}])
    )
    assert (len(prepared.validation), len(prepared.test)) == (4, 5)
    held_out = {*prepared.validation, *prepared.test}
    assert held_out.isdisjoint(prepared.train)
    assert "Tom sees two of the dog. 0" not in dict(prepared.train)
    assert not any("too" in source or source == "no" for source, _ in prepared.train)
    assert ("spaces here", "des espaces") in prepared.train or ("spaces   here", "des   espaces") in held_out
    assert prepared.placeholders is None
    assert prepared.counts["read"] == 67 - 9
    assert prepared.counts["mixed"] == len(prepared.train)


def test_signs_are_in_what_is_trained_and_validated_on_and_not_in_the_test(folder):
    prepared = PreparedText.of(preparation(folder))
    assert prepared.placeholders is not None
    assert "Ngozi" not in prepared.placeholders.words
    assert all("Ngozi" not in source + target for source, target in [*prepared.train, *prepared.validation])
    assert any("①" in source for source, _ in prepared.validation)
    assert any("④" in source or "⑦" in source for source, _ in prepared.train)  # not all begin with ①
    for source, target in prepared.train:
        assert sorted(set(source) & set("①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰")) == sorted(set(target) & set("①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭⑮⑯⑰"))
    assert not any("①" in source for source, _ in prepared.test)


def test_the_same_settings_give_the_same_files(folder):
    settings = preparation(folder, text={"joined": 0.5, "varied_copies": 0.5, "casual_copies": 0.5, "times": 2})
    for name in ("one", "two"):
        PreparedText.of(settings).write(folder / name)
    for file in ("train.tsv.gz", "validation.tsv.gz", "test.tsv.gz", "placeholders.json"):
        assert (folder / "one" / file).read_bytes() == (folder / "two" / file).read_bytes()
    other = PreparedText.of(settings.model_copy(update={"seed": 2}))
    table = gzip.decompress((folder / "one" / "train.tsv.gz").read_bytes()).decode()
    assert "".join(f"{source}\t{target}\n" for source, target in other.train) != table
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        other.write(folder / "pairs.tsv" / "x")


def test_copies_are_added_and_counted(folder):
    plain = PreparedText.of(preparation(folder, placeholders=False)).train
    more = PreparedText.of(
        preparation(
            folder,
            placeholders=False,
            numbers={"two": "deux"},
            text={"joined": 0.5, "varied_copies": 0.9, "casual_copies": 0.5, "times": 3},
        )
    ).train
    assert all(more.count(pair) >= 3 for pair in plain)
    sources = [source for source, _ in more]
    assert any("sees 2" in source or "sees 9" in source or "sees 5" in source for source in sources)
    assert any(source == source.lower() for source in sources)
    assert max(source.count("of the") for source in sources) == 2  # of three it would have more than 20 words


def test_some_pairs_are_left_out_and_their_words_are_known(folder):
    whole = PreparedText.of(preparation(folder, unknown_words=True))
    some = PreparedText.of(preparation(folder, unknown_words=True, text={"left_out": 0.75}))
    assert 4 <= len(some.train) <= len(whole.train) / 2
    assert some.placeholders == whole.placeholders
    assert (some.validation, some.test) == (whole.validation, whole.test)
    plain, fewer = (PreparedText.of(preparation(folder, placeholders=False, text={"left_out": p})) for p in (0, 0.75))
    assert set(fewer.train) < set(plain.train)
    with pytest.raises(ConfigurationError, match=r"texts.0.left_out"):
        preparation(folder, text={"left_out": 1.0})


def test_joined_pairs_are_those_of_the_text():
    pairs = [(f"s{row}", f"t{row}") for row in range(50)]
    longer = joined(pairs, 0.4, random.Random(1))
    assert 10 < len(longer) < 30
    neighbours = 0
    for source, target in longer:
        rows = [int(word[1:]) for word in source.split()]
        assert target.split() == [f"t{row}" for row in rows]
        assert len(rows) in (2, 3)
        neighbours += all((after - before) % 50 == 1 for before, after in itertools.pairwise(rows))
    assert 0 < neighbours < len(longer)
    assert joined(pairs, 0.0, random.Random(1)) == []


@pytest.mark.parametrize(
    ("pair", "kept"),
    [
        (("a b c", "d e f"), True),
        (("a b c d", "e"), False),  # longer than three words
        (("x" * 10, "y" * 50), True),
        (("x" * 10, "y" * 51), False),
        (("  ", "y"), False),
    ],
)
def test_clean_pairs(pair, kept):
    assert bool(clean([pair, pair], longest=3, ratio=3.0)) is kept
    assert len(clean([pair, pair], longest=3, ratio=3.0)) <= 1


def test_variations_change_both_sides_or_none():
    variations = PairVariations(Placeholders(frozenset()), frozenset(["Tom"]), ("Ngozi",), {"two": "deux"})
    draw = random.Random(1)
    for source, target in [("Two men", "Deux hommes"), ("Tom sees", "Tom voit")]:
        varied = variations.varied((source, target), draw)
        assert varied is not None
        assert set(varied[0].split()) & set(varied[1].split())  # the same digits, or the same name
    for pair in [("two men", "les hommes"), ("two and two", "deux et deux"), ("twofold", "deux fois"), ("Toms", "Tom")]:
        assert variations.varied(pair, draw) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"texts": []}, "texts: .*at least 1"),
        ({"text": {"text": "none.tsv"}}, "there is no file .*none.tsv"),
        ({"longest": 1}, "no pair of .* is left: raise longest or length_ratio"),
        ({"text": {"split": {"test": 500}}}, "holds out 500 pairs"),
        ({"tims": 3}, "tims: unknown key"),
    ],
)
def test_bad_settings_are_named(folder, keys, message):
    with pytest.raises((ConfigurationError, CorpusError), match=message):
        PreparedText.of(preparation(folder, **keys))


def run_of(folder, name, **training) -> Experiment:
    return Experiment.from_mapping(
        {
            "name": name,
            "data": {"folder": str(folder), "train": "pairs.tsv"},
            "vocabulary": {"kind": "bpe", "size": 80, "shared": True},
            "model": {
                "kind": "transformer",
                "dim": 8,
                "hidden_dim": 8,
                "num_heads": 2,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "shared_embeddings": "all",
            },
            "training": {"max_updates": 2, "batch_tokens": 200, "accelerator": "cpu"} | training,
        }
    )


def test_a_run_learns_signs_on_top_of_another_and_keeps_them(folder):
    first = run_of(folder, "first")
    train(first, folder / "first", verbose=False)
    PreparedText.of(preparation(folder)).write(folder / "text")
    weights = folder / "first" / "last.safetensors"
    second = run_of(folder, "second", start_from=str(weights), new_characters=1, learning_rate=1e-12)
    data = second.data.model_copy(
        update={
            "folder": folder / "text",
            "placeholders": "placeholders.json",
            "train": first.data.train.model_copy(update={"tsv": "train.tsv.gz"}),
        }
    )
    train(second.model_copy(update={"data": data}), folder / "second", verbose=False)
    exported = export(folder / "second", folder / "exported", which="last", dtype="float32")
    translator = Translator.load(exported)
    assert translator.placeholders is not None
    assert translator.placeholders.most >= 3
    assert translator.placed("Ngozi sees 17").text == "① sees ②"
    old, new = (
        load_weights(path)[0]["source_embedding.tokens.weight"] for path in (weights, exported / "best.safetensors")
    )
    assert len(new) == len(translator.source_vocabulary) > len(old)
    torch.testing.assert_close(new[: len(old)], old, atol=1e-6, rtol=0)
    assert json.loads((exported / "placeholders.json").read_text())["words"].split()
    assert translator.translate(["Ngozi sees 17"])[0].candidates
    # What looks into a translator reads the signs, and shows what they stand for.
    pair = atlas_of_pair(translator, "Ngozi sees 17", "17 Ngozi")
    cross = next(one for one in pair.maps if one.kind == "cross")
    assert (cross.key_tokens[0], cross.key_tokens[-1]) == ("▁Ngozi", "▁17")
    assert [token for token in cross.query_tokens if token != "</s>"] == ["▁17", "▁Ngozi"]
    atlas = atlas_of_translation(translator, "Ngozi sees 17")
    assert {one.key_tokens for one in atlas.maps if one.kind == "cross"} == {cross.key_tokens}
    steps = TranslatedSentence.of(translator, "Ngozi sees 17")
    assert steps.sentence == "Ngozi sees 17"
    assert steps.warnings[-2:] == ("① stands for 'Ngozi'", "② stands for '17'")


def test_new_characters_need_another_run(folder):
    with pytest.raises(
        ConfigurationError, match="new_characters adds to the vocabulary of training.start_from, and there"
    ):
        run_of(folder, "toy", new_characters=1)
    missing = run_of(folder, "toy")
    data = missing.data.model_copy(update={"placeholders": "placeholders.json"})
    with pytest.raises(CorpusError, match=r"there is no file .*placeholders.json; it needs to be"):
        train(missing.model_copy(update={"data": data}), folder / "toy", verbose=False)
