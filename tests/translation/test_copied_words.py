"""A translator with a pointer says words that its vocabulary lacks: in searches, alignments, records and steps."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import experiment

from regard.explorer.record_translation import atlas_of_pair, atlas_of_translation
from regard.steps import translation_steps
from regard.translation.batches import encode
from regard.translation.corpus import ParallelText
from regard.translation.experiment import Experiment
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings
from regard.translation.terminology import Terminology
from regard.translation.training import train
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN, END, UNKNOWN, Vocabulary, VocabularySettings

KNOWN = "abcdef"


def write_words(folder: Path) -> None:
    """Lines are said again; each has a word of its own, which is no word of the vocabulary."""
    draw = random.Random(1)
    for name, count in (("train", 200), ("dev", 20)):
        lines = []
        for _ in range(count):
            line = draw.choices(KNOWN, k=draw.randrange(1, 5))
            line.insert(draw.randrange(len(line) + 1), "".join(draw.choices("xyz", k=9)))
            lines.append(" ".join(line) + "\n")
        for side in ("src", "trg"):
            (folder / f"{name}.{side}").write_text("".join(lines))


def settings(folder: Path) -> Experiment:
    told = experiment(folder, max_epochs=25).model_dump(mode="json")
    model = {"embedding_dim": 8, "hidden_dim": 16, "dropout": 0.0, "pointer": True}
    vocabulary = {"kind": "words", "shared": True, "minimum_count": 5}
    training = {**told["training"], "learning_rate": 0.03, "batch_tokens": 240}
    return Experiment.from_mapping({**told, "vocabulary": vocabulary, "model": model, "training": training})


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = tmp_path_factory.mktemp("copied")
    write_words(folder)
    train(settings(folder), folder / "run")
    return Translator.load(folder / "run", "last")


def test_words_of_a_source_have_ids_of_their_own_in_both_sides_of_its_pair():
    vocabulary = Vocabulary.train(["a b a b"], VocabularySettings(kind="words"))
    text = ParallelText.pair(["a lynx b owl lynx", "b emu"], ["owl a crow", "emu lynx"])
    size = len(vocabulary)
    a, b = vocabulary.encode("a b")
    encoded = encode(text, vocabulary, vocabulary, copies=True)
    assert encoded.sources[0].tolist() == [a, size, b, size + 1, size]
    assert encoded.targets[0].tolist() == [size + 1, a, UNKNOWN]
    assert [*encoded.sources[1]] == [b, size]
    assert [*encoded.targets[1]] == [size, UNKNOWN]
    plain = encode(text, vocabulary, vocabulary)
    assert plain.sources[0].tolist() == [a, UNKNOWN, b, UNKNOWN, UNKNOWN]


def test_an_extended_vocabulary_is_one_and_leaves_the_first_as_it_is():
    vocabulary = Vocabulary.train(["the cat sat."], VocabularySettings(kind="words", lowercase=True))
    before = len(vocabulary)
    assert vocabulary.unknown_characters("x")  # which is remembered
    extended = vocabulary.extended("The Lynx-cat, sat")
    assert (len(vocabulary), len(extended)) == (before, before + 3)  # lynx, the hyphen, and the comma
    assert extended.decode(extended.encode("The Lynx-cat, sat.")) == "the lynx-cat, sat."
    assert extended.words(extended.encode("the lynx-cat, sat")) == [0, 1, 1, 1, 1, 2]
    assert not extended.unknown_characters("x")
    assert vocabulary.unknown_characters("x")
    assert extended.extended("the lynx").tokens(range(before, before + 1)) == extended.tokens([before])
    assert vocabulary.extended("the cat") is vocabulary
    for kind in ("characters", "bpe"):
        other = Vocabulary.train(["the cat"], VocabularySettings.model_validate({"kind": kind, "size": 20}))
        assert other.extended("lynx") is other


def test_it_says_words_that_it_has_never_seen(translator: Translator):
    lines = ["a quokka b", "wombat c", "d e numbat"]
    found = translator.translate(lines)
    assert [one.text for one in found] == lines
    assert [one.source_tokens for one in found] == [tuple(line.split()) for line in lines]
    assert [one.candidates[0].tokens for one in found] == [(*line.split(), "</s>") for line in lines]
    assert not any(one.warnings for one in found)
    assert [one.text for one in translator.translate(lines, observe=False)] == lines


def test_terms_and_tags_are_put_among_copied_words(translator: Translator):
    [found] = translator.translate(["a quokka b"], terms=Terminology({"b": "c d"}))
    assert found.text.split().count("quokka") == 1
    assert "c d" in found.text
    [tagged] = translator.translate(["a <b>quokka</b> b"])
    assert tagged.text == "a <b>quokka</b> b"


def test_beams_have_the_probabilities_of_the_whole_target(translator: Translator):
    vocabulary, _ = translator.vocabularies("a quokka b c")
    source, lengths = torch.tensor([vocabulary.encode("a quokka b c")]), torch.tensor([4])
    [found] = beam_search(translator.model, source, lengths, SearchSettings(beam=5, n_best=5))
    model: Any = translator.model
    for one in found:
        target = torch.tensor([[BEGIN, *one.ids]])
        said = torch.tensor([*one.ids, END][: target.shape[1] if one.finished else target.shape[1] - 1])
        with torch.no_grad():
            log_p = model(source, lengths, target)[0, : len(said)].log_softmax(-1)
        assert one.log_probability == pytest.approx(float(log_p.gather(1, said[:, None]).sum()), abs=1e-4)
    assert found[0].ids == tuple(source[0].tolist())


def test_alignment_records_and_steps_name_them(translator: Translator):
    [pair] = translator.align(["a quokka b"], ["a quokka b"])
    assert pair.target_tokens == pair.source_tokens == ("a", "quokka", "b")
    assert (1, 1) in pair.links
    for atlas in (
        atlas_of_translation(translator, "a quokka b", n_best=1),
        atlas_of_pair(translator, "a quokka b", "a quokka b"),
    ):
        shown = atlas.maps[0]
        assert shown.query_tokens[1] == "quokka"
        assert shown.key_tokens[1] == "quokka"
    steps = translation_steps(translator, "a quokka b", word=1)
    assert steps["prediction"].columns[0] == "quokka"
