"""Placeholders: what of a line is copied, how it comes back, and what a translator does with it."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from test_translator import Reverser, Rows, Step, reverser

from regard.errors import CheckpointError, CorpusError
from regard.translation.placeholders import SIGNS, PlacedLine, Placeholders
from regard.translation.terminology import Terminology
from regard.translation.translator import Translator
from regard.translation.vocabulary import END, Vocabulary, VocabularySettings

WORDS = (
    "I a am an and at baker cost costs dog has he hello in is it lives met my of on paper said see she the this to was "
    "word London Monday we write"
)
KNOWN = Placeholders(frozenset(WORDS.split()))


@pytest.mark.parametrize(
    ("line", "text", "parts"),
    [
        ("He has 17 cats", "He has ① cats", ["17"]),
        ("It costs $1,299.99, or 5%.", "It costs $①, or ②%.", ["1,299.99", "5"]),
        ("On 2024-05-06 at 3:45 pm", "On ① at ② pm", ["2024-05-06", "3:45"]),
        ("the 17th, in the 1990s, at 7pm", "the ①th, in the ②s, at ③pm", ["17", "1990", "7"]),
        ("A4 paper, COVID-19 and 4K", "① paper, ② and ③", ["A4", "COVID-19", "4K"]),
        ("17 and 17 and 18", "① and ① and ②", ["17", "18"]),
        ("See https://x.org/a?b=1&c=2.", "See ①.", ["https://x.org/a?b=1&c=2"]),
        ("(www.x.org/a), or x.org!", "(①), or ②!", ["www.x.org/a", "x.org"]),
        ("write to a.b+c@mail.x.org, @me #now", "write to ①, ② ③", ["a.b+c@mail.x.org", "@me", "#now"]),
        ("see notes.txt and e.g. this", "see ① and e.g. this", ["notes.txt"]),
        ("Ngozi Okafor-Ude lives in Lagos", "① ② lives in ③", ["Ngozi", "Okafor-Ude", "Lagos"]),
        ("O'Connell's dog", "①'s dog", ["O'Connell"]),
        ("London on Monday", "London on Monday", []),
        ("I met Baker", "I met ①", ["Baker"]),  # the word is known, but not as a name
        ("Baker is a baker", "Baker is a baker", []),  # where a sentence begins every word is capitalised
        ("HELLO, I SAID", "HELLO, I SAID", []),
        ("The Paper Of The Dog", "The Paper Of The Dog", []),  # a title
        ('the word "serendipity"', 'the word "①"', ["serendipity"]),
        ("the word “open sesame” is", "the word “① ②” is", ["open", "sesame"]),
        ("'quark' is a word", "'①' is a word", ["quark"]),
        ('he said "I am tired."', 'he said "I am tired."', []),
        ("I'm at the dog's", "I'm at the dog's", []),
        ("① is a word", "① is a word", ["①"]),  # the sign itself is text
        ("", "", []),
        ("猫 has 3", "猫 has ①", ["3"]),
    ],
)
def test_what_is_copied(line, text, parts):
    placed = KNOWN.take_out(line)
    assert (placed.text, list(placed.parts)) == (text, parts)
    assert placed.put_back(placed.text) == line
    assert len(placed.text.split()) == len(line.split())


@pytest.mark.parametrize("unit", ["a", "A", "1", "1a", "a.", '"', "Aa-", "-", "x@", "1,", "#", "www.", "a1-", "'a "])
def test_a_line_of_20_000_characters_takes_no_time(unit):
    line = unit * (20_000 // len(unit))
    start = time.perf_counter()
    placed = KNOWN.take_out(line)
    assert time.perf_counter() - start < 1
    assert placed.put_back(placed.text) == line


def test_no_more_signs_than_there_are():
    line = " ".join(map(str, range(100, 130)))
    placed = KNOWN.take_out(line)
    assert placed.parts == tuple(map(str, range(100, 120)))
    assert placed.text.endswith("⑳ 120 121 122 123 124 125 126 127 128 129")
    assert placed.put_back(placed.text) == line
    assert replace(KNOWN, most=2).take_out("1 2 3 2").text == "① ② 3 ②"
    assert KNOWN.take_out("Ngozi, 17", first=3) == PlacedLine("④, ⑤", ("", "", "", "Ngozi", "17"))


def test_what_comes_back():
    placed = KNOWN.take_out("Ngozi has 17 cats")
    assert placed.put_back("② chats à ①, ② !") == "17 chats à Ngozi, 17 !"
    assert placed.put_back("③ ① a ② ④ chats ⑤.") == "Ngozi a 17 chats ."  # signs of nothing are left out
    assert placed.missing("① a des chats") == ["17"]
    assert placed.missing("① ②") == []
    assert placed.named(["▁①", "▁a", "▁②"]) == ("▁Ngozi", "▁a", "▁17")


@pytest.mark.parametrize(
    ("source", "target", "pair"),
    [
        ("It costs 1,299.50", "Ça coûte 1 299,50", ("It costs ①", "Ça coûte ①")),
        ("It costs 1,299.50", "Ça coûte 1\u202f299,50", ("It costs ①", "Ça coûte ①")),
        ("I was 3 at 3:30", "J'avais 3 à 3:30", ("I was ① at ②", "J'avais ① à ②")),
        ("3:30, 3", "3, à 3:30", ("①, ②", "②, à ①")),
        ("the 5th", "le 5e", ("the ①th", "le ①e")),
        ("the 5th", "le cinquième", ("the 5th", "le cinquième")),  # not copied
        ("Ngozi has 17", "Ngozi en a dix-sept", ("① has 17", "① en a dix-sept")),
        ("Ngozi has 17", "Ils en ont 17", ("Ngozi has ②", "Ils en ont ②")),
        ("Ann", "Annie", ("Ann", "Annie")),
    ],
)
def test_pairs_have_signs_for_what_both_sides_have(source, target, pair):
    assert KNOWN.pair(source, target) == pair


def test_names_are_capitalised_words_that_are_copied():
    pairs = [("I saw Ngozi in London.", "J'ai vu Ngozi à Londres."), ("Cats sleep. Dogs too.", "Ils dorment.")]
    pairs += [(f"Hello, Tom, {number}.", f"Bonjour, Tom, {number}.") for number in range(20)]
    learned = Placeholders.learn(*zip(*pairs, strict=True))
    assert {"Ngozi", "Cats", "Dogs", "hello"}.isdisjoint(learned.words - {"hello"})
    assert {"saw", "London", "cats", "dogs", "Tom", "I"} <= learned.words
    assert "Tom" not in Placeholders.learn(*zip(*pairs, strict=True), frequent=None).words
    with pytest.raises(CorpusError, match="there are 1 source lines and 0 target lines; placeholders are learned from"):
        Placeholders.learn(["a"], [])


def test_they_are_kept_with_the_model(tmp_path):
    assert Placeholders.load(tmp_path) is None
    KNOWN.save(tmp_path)
    assert Placeholders.load(tmp_path) == KNOWN
    (tmp_path / "placeholders.json").write_text(json.dumps({"words": ["a"]}))
    with pytest.raises(CheckpointError, match="its words are list, and need to be one text; it needs to be what"):
        Placeholders.load(tmp_path)
    with pytest.raises(CorpusError, match=r"there is no file .*none.json; it needs to be the placeholders.json that"):
        Placeholders.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("line", "text", "parts"),
    [
        ("he said the quark lives", "he said the ① lives", ["quark"]),
        ("the quark, the “boson” and the quark's dog.", "the ①, the “②” and the ①'s dog.", ["quark", "boson"]),
        ("Quark is a dog-lover, said the baker-dog", "① is a ②, said the baker-dog", ["Quark", "dog-lover"]),
        ("<b>quark</b> <i x=y> {quark} %s $quark is", "<b>quark</b> <i x=y> {quark} %s $quark is", []),
        ("I'm at the dog's, isn't he", "I'm at the dog's, isn't he", []),
        ("QUARK AND DOG", "① AND DOG", ["QUARK"]),
    ],
)
def test_unknown_words_are_copied_where_a_model_has_learned_it(line, text, parts):
    every = replace(KNOWN, unknown_words=True)
    placed = every.take_out(line)
    assert (placed.text, list(placed.parts)) == (text, parts)
    assert placed.put_back(placed.text) == line
    assert not any(part[0].islower() for part in KNOWN.take_out(line.replace("“boson”", "")).parts)
    names = KNOWN.take_out(line)
    assert placed.unknown == tuple(part for part in parts if part not in names.parts)
    assert names.unknown == ()
    assert names.put_back(placed.spelled if len(names.parts) == len(parts) else names.text) == line


def test_what_is_copied_is_kept_with_a_model(tmp_path):
    for kept in (KNOWN, replace(KNOWN, unknown_words=True)):
        kept.save(tmp_path)
        assert Placeholders.load(tmp_path) == kept
    (tmp_path / "placeholders.json").write_text('{"words": "a b"}')  # as it was before there was a choice
    assert Placeholders.load(tmp_path) == Placeholders(frozenset("ab"))
    (tmp_path / "placeholders.json").write_text('{"words": "a b", "unknown_words": "yes"}')
    with pytest.raises(CheckpointError, match=r"unknown_words is 'yes', and needs to be true or false.*regard prepare"):
        Placeholders.load(tmp_path)


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        ("HELLO! IT IS THE DOG.", "Hello! It is the dog.", "① BONJOUR !"),
        ("HELLO, NGOZI, 17", "Hello, ①, ②", "NGOZI BONJOUR !"),
        ("OK!", "OK!", "① bonjour !"),
        ("HELLO, dog", "HELLO, dog", "① bonjour !"),
        ("NASA", "①", "NASA bonjour !"),
    ],
)
def test_a_line_in_capitals_is_read_without_them(line, text, said):
    known = Placeholders(frozenset([*WORDS.split(), "OK"]))
    placed = known.as_read(line)
    assert placed.text == text
    assert placed.put_back("① bonjour !") == (said if placed.parts else said.replace("① ", ""))
    assert known.pair(line, line)[0] == known.take_out(line).text  # what is trained on keeps its capitals


def placing(lines: list[str], kind: str = "bpe") -> Translator:
    """A translator that says sources backwards, and knows the signs ① to ④."""
    made = reverser([*lines, "① ② ③ ④"], kind)
    return Translator(made.model, made.source_vocabulary, made.target_vocabulary, made.search, placeholders=KNOWN)


def test_a_translator_copies_what_it_does_not_know():
    translator = placing(["cats has he see a dog Dog"], "words")
    assert translator.placeholders is not None
    assert translator.placeholders.most == 4
    found = translator.translate(
        ["he has 17 cats", "see https://x.org/❤ Ngozi <a href='http://y.org'>dog</a>", "", "12"]
    )
    assert [one.text for one in found][::3] == ["cats 17 has he", "12"]
    assert found[0].source_tokens == ("he", "has", "17", "cats")
    assert found[0].candidates[0].tokens == ("cats", "17", "has", "he", "</s>")
    assert found[1].text == "<a href='http://y.org'>dog</a> Ngozi https://x.org/❤ see"
    assert not any(one.warnings for one in found)
    assert [one.text for one in translator.translate(["DOG HAS 17", "he has 17"])] == ["17 HAS DOG", "17 has he"]


def test_a_translator_names_the_words_that_it_does_not_know():
    translator = placing(["he has a dog cats see the"], "words")
    assert translator.placeholders is not None
    translator.placeholders = replace(translator.placeholders, unknown_words=True)
    translator.source_language = "en"
    found = translator.translate(["he has quarks", "the dog has 17", "he has quarks Ngozi bosons", "Où est la gare ?"])
    assert [one.text for one in found[:3]] == ["quarks has he", "17 has dog the", "bosons Ngozi quarks has he"]
    assert [list(one.warnings) for one in found[:3]] == [
        ["line 1: words that the model does not know stay as they are: 'quarks'"],
        [],
        ["line 3: words that the model does not know stay as they are: 'quarks', 'bosons'"],
    ]
    assert any("it seems to be French" in warning for warning in found[3].warnings)
    assert [one.unknown_words for one in found[:3]] == [("quarks",), (), ("quarks", "bosons")]


def test_the_trust_of_a_translation_knows_of_unknown_words(monkeypatch):
    translator = placing(["he has a dog cats see the"], "words")
    assert translator.placeholders is not None
    translator.placeholders = replace(translator.placeholders, unknown_words=True)
    read = []
    monkeypatch.setattr(
        Placeholders, "take_out", lambda self, line, of=Placeholders.take_out: read.append(line) or of(self, line)
    )
    lines, doubtful = ["he has a dog", "he has cats", "he has Ngozi"], ["he has a quark", "he has quarks"]
    text = [*lines, *doubtful] * 20
    translations = translator.translate(text, observe=False)
    assert read == text  # each line once
    trust = translator.calibrate(translations, [one.text if one.source in lines else "x" for one in translations])
    assert trust.weights[-1] < -0.3
    known, unknown = translator.translate(["he has a dog", "he has a boson"], observe=False)
    assert known.trust is not None
    assert unknown.trust is not None
    assert known.trust > 0.8 > 0.2 > unknown.trust


def test_a_name_with_a_term_is_no_part():
    assert KNOWN.but_for(["A4", "ngozi"]).take_out("Ngozi has A4, A3").text == "Ngozi has A4, ①"
    translator = placing(["he has a dog Ngozi lui"], "words")
    [plain] = translator.translate(["Ngozi has 17"])
    [said] = translator.translate(["Ngozi has 17"], terms=Terminology({"Ngozi": "lui"}))
    assert plain.text == "17 has Ngozi"
    assert said.source_tokens == ("Ngozi", "has", "17")
    assert "lui" in said.text.split()
    assert "17" in said.text.split()


def test_lines_without_parts_are_translated_as_before():
    lines = ["he has a dog", "a dog has cats"]
    translator = placing(lines, "words")
    with_placeholders = translator.translate(lines)
    translator.placeholders = None
    for one, other in zip(translator.translate(lines), with_placeholders, strict=True):
        assert (one.text, one.source_tokens) == (other.text, other.source_tokens)
        assert torch.equal(one.candidates[0].weights, other.candidates[0].weights)


def test_parts_of_a_split_line_keep_their_signs():
    translator = placing(["he has a dog ."], "words")
    [found] = translator.translate(["he has 17 . he has Ngozi ."], split_above=3)
    assert "17" in found.text
    assert "Ngozi" in found.text


class Forgetter(Reverser):
    """Says the word `wrong` instead of the last of the source, a little rather than that."""

    wrong = 4

    def step(self, tokens, state: Rows, memory: Rows) -> Step:
        step = super().step(tokens, state, memory)
        first = (state.values == 0) & (memory.values[:, 0] > 1)
        step.logits[first] = 0.99 * step.logits[first]
        step.logits[first, self.wrong] = 20.0
        return step

    observe_step = step


def test_of_the_beam_a_translation_with_all_parts_is_best():
    translator = placing(["he has a dog"], "words")
    translator.model = Forgetter(len(translator.source_vocabulary))
    [found] = translator.translate(["he has 17"])
    assert found.text == "17 has he"
    greedy = translator.search.model_copy(update={"beam": 1})
    [found] = translator.translate(["he has 17"], search=greedy)
    assert found.text == f"{translator.target_vocabulary.decode([4])} has he"
    assert found.warnings == ("line 1: the translation leaves out '17'",)
    two = translator.search.model_copy(update={"n_best": 2})
    [found] = translator.translate(["he has 17"], search=two)
    assert len(found.candidates) == 2


def test_known_translations_are_aligned_by_signs():
    translator = placing(["he has a dog"], "words")
    aligned = translator.align(["he has 17", ""], ["17 has he", "x"])[0]
    assert aligned.source_tokens == ("he", "has", "17")
    assert aligned.target_tokens == ("17", "has", "he")
    assert set(aligned.links) == {(2, 0), (1, 1), (0, 2)}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters", "words"])
def test_a_vocabulary_grows_by_characters(kind, tmp_path):
    lines = ["a dog and a cat", "the cat sees the dog"]
    small = Vocabulary.train(lines, VocabularySettings(kind=kind, size=40))
    grown = small.with_characters(SIGNS[:2] + "a")
    for line in lines:
        assert grown.encode(line) == small.encode(line)
    ids = grown.encode("a ② dog ①")
    assert grown.decode(ids) == "a ② dog ①"
    assert grown.words(ids)[-1] == 3
    assert max(ids) == len(grown) - 1 or max(ids) >= len(small)
    grown.save(tmp_path / "grown.json")
    assert Vocabulary.load(tmp_path / "grown.json").encode("a ② dog ①") == ids
    assert END not in ids
