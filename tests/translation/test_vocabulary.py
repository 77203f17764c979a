import itertools
import os
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from regard.errors import VocabularyError
from regard.translation.vocabulary import BEGIN, END, PAD, SPECIAL, UNKNOWN, Vocabulary, VocabularySettings

KINDS = ["characters", "words", "bpe", "unigram"]
LINES = [
    "Hello, world!",
    'Ein Mädchen (im „roten" Kleid) läuft über 3,5 km.',
    "L’été dernier\u202f: «\u00a0où vas-tu\u00a0»\u202f?",
    "나는 학교에 갔다. 안녕하세요!",
    "私は学校に行きました。\u3000そうです、ね？",
    "the low lower lowest, newer and wider rows of the old world",
    "▁ and ￭ are marks, <unk> & </s> are not: ｎｏ",
]


def train(kind: str, lines: list[str] = LINES, **options) -> Vocabulary:
    return Vocabulary.train(lines, VocabularySettings(kind=kind, **options))  # pyright: ignore[reportArgumentType]


VOCABULARIES = {kind: train(kind, size=400) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", LINES)
def test_known_text_comes_back_letter_for_letter(kind, line):
    vocabulary = VOCABULARIES[kind]
    ids = vocabulary.encode(line)
    assert UNKNOWN not in ids
    assert vocabulary.decode(ids) == line


@pytest.mark.parametrize("kind", ["characters", "bpe", "unigram"])
@given(words=st.lists(st.text(sorted({*"".join(LINES)} - {" "}), min_size=1), min_size=1))
def test_any_text_of_known_characters_comes_back(kind, words):
    line = " ".join(words)
    assert VOCABULARIES[kind].decode(VOCABULARIES[kind].encode(line)) == line


words_of_text = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"], exclude_characters=" "), min_size=1)


@settings(deadline=None)
@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(words_of_text, min_size=1, max_size=7))
def test_any_text_comes_back_from_its_own_vocabulary(kind, words):
    line = unicodedata.normalize("NFC", " ".join(words))
    vocabulary = train(kind, [line], size=5000)
    assert vocabulary.decode(vocabulary.encode(line)) == line


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_can_be_shown(kind, data):
    vocabulary = VOCABULARIES[kind]
    ids = data.draw(st.lists(st.integers(0, len(vocabulary) - 1)))
    is_text = [i not in (PAD, BEGIN, END) for i in ids]
    words = vocabulary.words(ids)
    text_words = [word for word, text in zip(words, is_text, strict=True) if text]
    assert isinstance(vocabulary.decode(ids), str)
    assert len(vocabulary.tokens(ids)) == len(words) == len(ids)
    assert [word >= 0 for word in words] == is_text
    assert text_words[:1] in ([], [0])
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(text_words))


@pytest.mark.parametrize("kind", KINDS)
def test_white_space_and_unicode_form_are_brought_to_one(kind):
    vocabulary = VOCABULARIES[kind]
    assert vocabulary.encode("  Hello,\t  world! \r\n") == vocabulary.encode("Hello, world!")
    assert vocabulary.encode("Ma\u0308dchen") == vocabulary.encode("Mädchen")
    assert vocabulary.encode(" ") == []
    assert vocabulary.decode([]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_lowercase(kind):
    vocabulary = train(kind, lowercase=True)
    assert vocabulary.decode(vocabulary.encode("HELLO, World!")) == "hello, world!"


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_cannot_spell_a_special_id(kind):
    text = "<pad> <unk> <s> </s> a</s>b"
    vocabulary = train(kind, [text] * 50, size=100)
    ids = vocabulary.encode(text)
    assert min(ids) > END
    assert vocabulary.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_in_what_is_decoded(kind):
    vocabulary = VOCABULARIES[kind]
    ids = vocabulary.encode("Hello, world!")
    assert vocabulary.decode([BEGIN, *ids, END, PAD, PAD]) == "Hello, world!"
    assert vocabulary.tokens([BEGIN, END, PAD, UNKNOWN]) == ["<s>", "</s>", "<pad>", "<unk>"]
    assert [SPECIAL[i] for i in (PAD, UNKNOWN, BEGIN, END)] == ["<pad>", "<unk>", "<s>", "</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_text_is_shown_as_unknown(kind):
    vocabulary = VOCABULARIES[kind]
    ids = vocabulary.encode("Hello, Ж!")
    assert UNKNOWN in ids
    assert vocabulary.decode(ids) == "Hello, <unk>!"
    assert set(vocabulary.encode("ЖЖ")) - {UNKNOWN} <= set(vocabulary.encode("a b"))


def test_tokens_and_the_words_they_belong_to():
    def look(kind: str) -> list[tuple[str, int]]:
        vocabulary = train(kind, ["ab, c!"], size=20)
        ids = [BEGIN, *vocabulary.encode("ab, c!"), END]
        return list(zip(vocabulary.tokens(ids), vocabulary.words(ids), strict=True))[1:-1]

    assert look("characters") == [("a", 0), ("b", 0), (",", 0), ("▁", 1), ("c", 1), ("!", 1)]
    assert look("words") == [("ab", 0), (",", 0), ("c", 1), ("!", 1)]
    assert look("bpe") == [("▁ab", 0), (",", 0), ("▁c", 1), ("!", 1)]


@pytest.mark.parametrize("i", [-1, 10_000])
def test_an_id_that_is_not_there(i):
    with pytest.raises(VocabularyError, match=rf"{i} is not an id of this vocabulary; its ids are 0 to \d+"):
        VOCABULARIES["words"].decode([i])


@pytest.mark.parametrize("kind", KINDS)
def test_size_is_a_maximum(kind):
    assert len(train(kind, ["the same line, lower and lowest"] * 9, size=30)) <= 30
    assert len(train(kind, ["ab"], size=30)) < 30


def test_the_most_frequent_pieces_are_kept_and_ties_are_settled():
    vocabulary = train("words", ["b a c c"], size=6)
    assert vocabulary.tokens([4, 5]) == ["c", "a"]


def test_minimum_count():
    lines = ["aa aa bb"]
    assert len(train("words", lines, minimum_count=2)) == 5
    assert train("characters", lines, minimum_count=3).encode("b") == [UNKNOWN]
    for kind in ("bpe", "unigram"):
        assert UNKNOWN in train(kind, lines, minimum_count=3).encode("bb")
        assert UNKNOWN not in train(kind, lines, minimum_count=3).encode("aa")
    with pytest.raises(VocabularyError, match="no piece of the text is seen 9 times: lower minimum_count"):
        train("words", lines, minimum_count=9)
    with pytest.raises(VocabularyError, match="no character of the text is seen often enough: lower minimum_count"):
        train("bpe", lines, minimum_count=9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [[], ["", " \t"]])
def test_no_text(kind, lines):
    with pytest.raises(VocabularyError, match="there is no text to learn a vocabulary from: no lines, or only empty"):
        train(kind, lines)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_size_without_room_for_the_characters(kind):
    with pytest.raises(VocabularyError, match=r"has 8 different characters.* leaves room for 6: raise the size by 2"):
        train(kind, ["abcdefg"], size=10)
    assert len(train(kind, ["abcdefg"], size=12)) == 12


def test_size_without_room_for_any_text():
    with pytest.raises(ValidationError, match="4 leaves no room for text: <pad>, <unk>, <s>, </s> take 4 ids"):
        VocabularySettings(size=4)


def test_one_string_in_place_of_lines():
    with pytest.raises(VocabularyError, match=r"lines is one str; it needs to be several: \[line\]"):
        Vocabulary.train("a line", VocabularySettings())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [["a"], ["aaaa aaaa"], ["x" * 5000], ["日本" * 3000]])
def test_peculiar_text(kind, lines):
    vocabulary = train(kind, lines)
    assert vocabulary.decode(vocabulary.encode(lines[0])) == lines[0]


TRAIN_AND_FORK = """
import hashlib, os, pathlib, random
from regard.translation.vocabulary import Vocabulary, VocabularySettings
draw = random.Random(5)
words = ["".join(draw.choices("abcdefghé가", k=draw.randint(1, 6))) for _ in range(300)]
lines = [" ".join(draw.choices(words, k=9)) + "." for _ in range(500)]
for kind in ("characters", "words", "bpe", "unigram"):
    vocabulary = Vocabulary.train(lines, VocabularySettings(kind=kind, size=150))
    vocabulary.save("vocabulary.json")
    print(kind, hashlib.sha256(pathlib.Path("vocabulary.json").read_bytes()).hexdigest())
if os.fork() == 0:
    vocabulary.encode_batch(lines)
    os._exit(0)
assert os.wait()[1] == 0
"""


def test_training_gives_the_same_in_every_process_and_may_be_followed_by_a_fork(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    outputs = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", TRAIN_AND_FORK],
            env=environment | {"PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        assert "TOKENIZERS_PARALLELISM" not in run.stderr
        outputs.add(run.stdout)
    assert len(outputs) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_lines_does_not_matter(kind, tmp_path):
    train(kind, LINES, size=300).save(tmp_path / "one")
    train(kind, LINES[::-1], size=300).save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("value", [None, "true"])
def test_training_leaves_the_environment_as_it_was(monkeypatch, value):
    name = "TOKENIZERS_PARALLELISM"
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    train("bpe")
    assert os.environ.get(name) == value
