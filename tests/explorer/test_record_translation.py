"""Atlases of translations: n best hypotheses, given translations, gold links, and which tokens make which word."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import AtlasError, ConfigurationError, CorpusError
from regard.explorer import Atlas, RankedTranslation, TokenizedText
from regard.explorer.api import AtlasAPI
from regard.explorer.record_translation import atlas_of_pair, atlas_of_translation
from regard.explorer.static_page import static_page
from regard.heads.word_alignment import SentenceLinks, word_links
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

SENTENCE = "The black cat sleeps on the old chair."


@pytest.fixture(scope="module")
def translator():
    return Translator.load(ENGLISH_FRENCH)


def told(value):
    """What an atlas tells of a map, which has to be there."""
    assert value is not None
    return value


def small(queries=2, keys=3, tokens=None):
    sides = [f"t{i}" for i in range(queries)], [f"s{i}" for i in range(keys)]
    return Atlas.from_weights({"cross": torch.full((1, queries, keys), 1 / keys)}, tokens=tokens or sides)


def test_the_n_best_of_a_translation_each_have_their_maps(translator):
    atlas = atlas_of_translation(translator, SENTENCE, n_best=3)
    search = translator.search.model_copy(update={"n_best": 3})
    expected = translator.translate([SENTENCE], search=search)[0].candidates
    exact = Translator.load(ENGLISH_FRENCH)
    model: Any = exact.model
    model.double()
    true = exact.translate([SENTENCE], search=search)[0].candidates
    found = {of.hypothesis.rank: of.hypothesis for of in atlas.maps if of.hypothesis is not None}
    # Recorded or not, a score in float32 is up to 3.2e-6 off, over variants of the native code and numbers of threads.
    scores = [(of.text, pytest.approx(of.score, abs=5e-6, rel=0)) for of in true]
    assert [(of.text, of.score) for of in found.values()] == scores
    assert [(of.text, of.score) for of in expected] == scores
    cross = [of for of in atlas.maps if of.kind == "cross"]
    assert len(cross) == 3 * expected[0].weights.shape[1]
    for number, of in enumerate(cross):
        layer, candidate = number // 3, expected[number % 3]
        assert (told(of.hypothesis).rank, of.call, of.query_tokens) == (number % 3, number % 3, candidate.tokens)
        shown = of.weights(2, slice(None), slice(None))
        np.testing.assert_allclose(shown, candidate.weights[:, layer, 2].numpy(), atol=5e-3)
    encoder = [of for of in atlas.maps if of.name.startswith("encoder")]
    assert len({of.name for of in encoder}) == len(encoder)
    assert all(of.hypothesis is None for of in encoder)


def test_signs_that_the_translator_does_not_know_are_left_out(translator):
    plain, signs = (atlas_of_translation(translator, text, n_best=1) for text in ("I am happy.", "I am happy 😊."))
    assert signs.title.startswith("I am happy 😊. → ")
    assert [of.key_tokens for of in signs.maps] == [of.key_tokens for of in plain.maps]


def test_without_a_number_there_are_as_many_as_the_beam_is_wide(translator):
    atlas = atlas_of_translation(translator, "I am very tired.")
    assert {of.hypothesis.rank for of in atlas.maps if of.hypothesis} == set(range(translator.search.beam))


def test_more_than_the_beam_make_it_wider(translator):
    atlas = atlas_of_translation(translator, "I am very tired.", n_best=translator.search.beam + 2)
    assert len({of.hypothesis.rank for of in atlas.maps if of.hypothesis}) == translator.search.beam + 2


def test_words_are_what_white_space_separates(translator):
    atlas = atlas_of_translation(translator, SENTENCE, n_best=1)
    cross = next(of for of in atlas.maps if of.kind == "cross")
    assert cross.key_words == tuple(translator.source_vocabulary.words(translator.source_vocabulary.encode(SENTENCE)))
    assert told(cross.query_words)[-1] == -1  # END
    own = next(of for of in atlas.maps if of.name.startswith("decoder") and of.kind == "self")
    assert own.query_words == own.key_words == (-1, *told(cross.query_words)[:-1])


def test_a_given_translation_with_gold_links_after_a_file(translator, tmp_path):
    said, gold = "Le chat noir dort .", "0-0 1-2 2-1 3-3 4?4"
    atlas = atlas_of_pair(translator, "The black cat sleeps .", said, gold=gold)
    atlas.save(tmp_path / "a.atlas")
    for of in Atlas.open(tmp_path / "a.atlas").maps:
        assert of.hypothesis is None
        if of.kind == "self":
            assert of.gold is None
            continue
        assert sorted(told(of.gold).sure) == [(0, 0), (1, 2), (2, 1), (3, 3)]
        assert told(of.gold).possible == told(of.gold).sure | {(4, 4)}
        pair = translator.align(["The black cat sleeps ."], [said], layer=int(of.name.split(".")[2]), head=1)[0]
        shown = torch.from_numpy(of.weights(1, slice(None), slice(None)))
        assert tuple(word_links(shown, told(of.key_words), told(of.query_words))) == pair.links


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SENTENCE, ""), CorpusError, "the translation is empty; it needs at least one word"),
        (("", "Le chat"), CorpusError, "the sentence is empty; it needs at least one word to translate"),
    ],
)
def test_an_empty_side_is_refused(translator, arguments, error, message):
    with pytest.raises(error, match=message):
        atlas_of_pair(translator, *arguments)


def test_a_sentence_longer_than_the_model_takes_is_refused(translator, monkeypatch):
    monkeypatch.setattr(translator.model, "max_source_length", 4)
    with pytest.raises(CorpusError, match="the sentence has 10 tokens, and the model takes 4; give it a shorter one"):
        atlas_of_translation(translator, SENTENCE)


def test_no_hypothesis_at_all_is_refused(translator):
    with pytest.raises(ConfigurationError, match="n_best is 0; it needs to be at least 1"):
        atlas_of_translation(translator, SENTENCE, n_best=0)


@pytest.mark.parametrize(
    "gold", ["0-0 2?1", "0-0 2p1", SentenceLinks(frozenset({(0, 0)}), frozenset({(2, 1)})), [(0, 0)], ((0, 0),)]
)
def test_gold_links_as_they_may_be_given(gold):
    atlas = small()
    links = told(atlas.with_gold(gold).maps[0].gold)
    assert atlas.maps[0].gold is None  # the one before is as it was
    assert links.sure == {(0, 0)}
    assert links.possible == ({(0, 0)} if isinstance(gold, list | tuple) else {(0, 0), (2, 1)})


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("0-0 x", "the gold links cannot be read: 'x' is no link; it needs to be two word numbers as in 0-1"),
        ("3-0", r"the gold links have \(3, 0\), but there are 3 source words and 2 target words, counted from 0$"),
        ("0-2", r"the gold links have \(0, 2\), .* counted from 0: a link has its source word first"),
        ([(0, 0, 0)], "they need to be as '0-0 1-2 2.3', pairs .source word, target word., or an object with sure"),
        ([("0", "0")], "gold links are .*; they need to be as"),
        ([(0, True)], "gold links are .*; they need to be as"),
        (7, "gold links are '7'; they need to be as"),
    ],
)
def test_what_is_no_gold(gold, message):
    with pytest.raises(AtlasError, match=message):
        small().with_gold(gold)


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ([{"sure": [[3, 0]], "possible": []}], r"the gold links have \(3, 0\), but there are 3 source words"),
        ([{"sure": [[0, 0]]}], "its gold links are .*; they need {'sure': "),
        ([{"sure": [[0]], "possible": []}], "its gold links are .*; they need {'sure': "),
        ([{"sure": [[0, True]], "possible": []}], "its gold links are .*; they need {'sure': "),
        ([], "its gold links need to be those of cross-attention, one entry for each of 1"),
        ({}, "its gold links need to be those of cross-attention"),
    ],
)
def test_gold_in_a_file_from_a_stranger(gold, message, tmp_path):
    atlas = small()
    Atlas([{**atlas.maps[0].record, "gold": gold}], atlas.maps[0].arrays).save(tmp_path / "a.atlas")
    with pytest.raises(AtlasError, match=message):
        Atlas.open(tmp_path / "a.atlas")


def test_gold_is_of_one_sequence_and_of_one_hypothesis():
    batch = Atlas.from_weights({"cross": torch.full((2, 1, 2, 3), 1 / 3), "own": torch.full((2, 1, 3, 3), 1 / 3)})
    assert [of.gold is not None for of in batch.with_gold("0-0", sequence=1).maps] == [False, True, False, False]
    with pytest.raises(AtlasError, match="there is no map of cross-attention of sequence 2 to have gold links"):
        batch.with_gold("0-0", sequence=2)
    beam = batch.with_hypotheses([RankedTranslation(0, "a", -1.0), RankedTranslation(1, "b", -2.0), None, None])
    assert beam.with_gold("0-0", hypothesis=0).maps[0].gold is not None
    with pytest.raises(AtlasError, match="of cross-attention of sequence 0 and hypothesis 1 to have gold links"):
        beam.with_gold("0-0", hypothesis=1)


def test_gold_counts_words_and_not_tokens():
    tokens = TokenizedText(["un", "seen", "</s>"], [0, 0, None]), TokenizedText(list("abcd"))
    atlas = Atlas.from_weights({"cross": torch.full((1, 3, 4), 0.25)}, tokens=tokens)
    assert told(atlas.with_gold("3-0").maps[0].gold).sure == {(3, 0)}
    with pytest.raises(AtlasError, match="there are 4 source words and 1 target words"):
        atlas.with_gold("0-1")


def test_hypotheses_that_are_none():
    with pytest.raises(AtlasError, match="hypotheses need one entry for each of the 1 maps; they are 2"):
        small().with_hypotheses([None, None])
    with pytest.raises(AtlasError, match="a hypothesis needs to be {'rank': whole number, .*; one is {'rank': -1"):
        small().with_hypotheses([RankedTranslation(-1, "a", 0.0)])
    with pytest.raises(AtlasError, match="a hypothesis needs to be"):
        small().with_hypotheses([RankedTranslation(0, "a", float("nan"))])
    assert small().with_hypotheses([None]).maps[0].hypothesis is None


def test_pieces_tell_which_tokens_make_which_word(tmp_path):
    weights = torch.rand(1, 4, 4).softmax(-1)
    words = [None, 0, 0, 1]
    atlas = Atlas.from_weights({"a": weights}, tokens=TokenizedText(["[CLS]", "un", "##seen", "cat"], words))
    atlas.save(tmp_path / "a.atlas")
    of = Atlas.open(tmp_path / "a.atlas").maps[0]
    assert of.query_tokens == ("[CLS]", "un", "##seen", "cat")
    assert of.query_words == of.key_words == (-1, 0, 0, 1)
    assert small().maps[0].query_words is None


@pytest.mark.parametrize(
    ("tokens", "words", "message"),
    [
        ("ab", None, "the tokens of TokenizedText need to be a list of str; they are 'ab'"),
        ([1, 2], None, "the tokens of TokenizedText need to be a list of str"),
        (
            ["a", "b"],
            [0],
            r"TokenizedText has 2 tokens, and the words \[0\]; it needs the number of a word for each token",
        ),
        (["a"], ["0"], "it needs the number of a word for each token, or None"),
        (["a"], [2**40], "it needs the number of a word for each token"),
    ],
)
def test_pieces_that_are_none(tokens, words, message):
    with pytest.raises(AtlasError, match=message):
        TokenizedText(tokens, words)


def test_a_page_is_told_of_words_gold_and_hypotheses():
    tokens = TokenizedText(["x", "y"], [0, 0]), TokenizedText(["a", "b", "c"], [0, 1, 1])
    atlas = small(tokens=tokens).with_hypotheses([RankedTranslation(0, "h" * 2000, -1.5)]).with_gold("0-0 1?0")
    meta = json.loads(json.dumps(AtlasAPI(atlas).meta(), allow_nan=False))
    [of] = meta["maps"]
    assert meta["words"] == [[0, 0], [0, 1, 1]]
    assert (of["words"], of["gold"]) == ([0, 1], {"sure": [[0, 0]], "possible": [[1, 0]]})
    assert (of["hypothesis"]["rank"], len(of["hypothesis"]["text"])) == (0, 1000)
    [plain] = AtlasAPI(small()).meta()["maps"]
    assert not {"words", "gold", "hypothesis"} & set(plain)
    assert '"possible"' in static_page(atlas).text


def test_a_page_is_told_which_heads_align_best(monkeypatch):
    weights = torch.stack([torch.eye(3), torch.eye(3).flip(0)])[:, :2]
    atlas = Atlas.from_weights({"cross": weights}, tokens=(["t0", "t1"], ["s0", "s1", "s2"]))
    rates = AtlasAPI(atlas.with_gold("0-0 1-1")).meta()["maps"][0]["metrics"]["AER_argmax"]
    assert rates == [0.0, pytest.approx(0.5)]  # of (0, 0) and (1, 1); of (2, 0) and (1, 1)
    assert "AER_argmax" not in AtlasAPI(atlas).meta()["maps"][0]["metrics"]
    nothing = Atlas.from_weights({"cross": torch.zeros(1, 2, 3)}).with_gold("0?0")
    assert AtlasAPI(nothing).meta()["maps"][0]["metrics"]["AER_argmax"] == [None]
    monkeypatch.setattr("regard.explorer.api.MOST_HEADS", 1)
    assert "AER_argmax" not in AtlasAPI(atlas.with_gold("0-0")).meta()["maps"][0]["metrics"]


def test_of_long_maps_a_page_is_told_nothing():
    tokens = TokenizedText([str(i) for i in range(513)], range(513))
    meta = AtlasAPI(Atlas.from_weights([torch.full((1, 513, 513), 1 / 513)], tokens=tokens)).meta()
    assert meta["words"] == []
    assert "words" not in meta["maps"][0]
