"""SentencePiece models: pieces and rules are those of the sentencepiece package, and what is not read is named."""

from __future__ import annotations

import random
import struct

import pytest
from marian_folders import SENTENCES, field, spm, trained_pieces

from regard.errors import VocabularyError
from regard.translation.sentencepiece_file import CharacterMap, SentencePieceModel

RULES = {"ﬁ": "fi", "Ａ": "A", "é": "é", "e": "e", "é̂": "X", "\t": " ", "½": "1⁄2", "\u200b": "", "👍🏽": "thumb"}
ODD = [
    "Ａ① ﬁne…  x\tb 　 c",
    "¨ hi ´",
    "你好 世界 hello",
    "é e\u0301 ½ ﷺ",
    "👍🏽 ok ❤️",
    "a\u200bb \u00ad x",
    "</s> <unk> ▁ ▁▁x",
    "\0 a",
    "한국어 각 텍스트 \u1100\u1161\u11a8 \u0e33",
    "a\u0301\u0302\u0303b x̧̄ 𝐀𝑩 ℌ ǅ Ĳ 1\u20dd 🇫🇷 👨‍👩‍👧",
]


def charsmap(rules: dict[str, str]) -> bytes:
    """Rules as a double array, laid out by trying one place after another."""
    children: dict[bytes, set[int]] = {}
    keys = {key.encode(): value.encode() for key, value in rules.items()}
    for key in keys:
        for end in range(len(key)):
            children.setdefault(key[:end], set()).add(key[end] + 1)
    for key in keys:
        children.setdefault(key, set()).add(0)  # the value, which is the child for no byte
    replacements = b""
    units = {0: 0}
    offsets: dict[bytes, int] = {}

    def place(prefix: bytes, node: int) -> None:
        nonlocal replacements
        labels = children[prefix]
        offset = next(
            offset
            for offset in range(1, 1 << 20)
            if all((node ^ offset ^ max(label - 1, 0)) not in units for label in labels if label != 1)
            and (offset < 1 << 21)
        )
        base = node ^ offset
        offsets[prefix] = base
        has_value = 0 in labels
        units[node] |= (offset << 10) | (has_value << 8)
        if has_value:
            units[base] = 0x80000000 | len(replacements)
            replacements += keys[prefix] + b"\0"
        for label in sorted(labels - {0}):
            units[base ^ (label - 1)] = label - 1
        for label in sorted(labels - {0}):
            place(prefix + bytes([label - 1]), base ^ (label - 1))

    place(b"", 0)
    trie = struct.pack(f"<{max(units) + 1}I", *(units.get(at, 0x80000000) for at in range(max(units) + 1)))
    return struct.pack("<I", len(trie)) + trie + replacements


def replaced(text: str) -> str:
    """The rule of `CharacterMap`, over a plain dictionary."""
    said, at = "", 0
    while at < len(text):
        keys = [key for key in RULES if text.startswith(key, at)]
        longest = max(keys, key=len, default=None)
        said += text[at] if longest is None else RULES[longest]
        at += 1 if longest is None else len(longest)
    return said


def test_the_longest_rule_is_applied():
    rules = CharacterMap(charsmap(RULES))
    generator = random.Random(3)
    letters = [*RULES, "a", "́", "̂", "👍", "ß", "漢"]
    for _ in range(500):
        text = "".join(generator.choices(letters, k=9))
        assert rules.normalised(text) == replaced(text)


def test_a_long_word_takes_time_in_proportion(tmp_path):
    word = "éßf" * 200_000  # each place copied to the end would be 4·10¹¹ bytes
    assert CharacterMap(charsmap(RULES)).normalised(word) == word


def test_text_is_cut_by_rules_and_pieces(tmp_path):
    path = tmp_path / "one.spm"
    path.write_bytes(spm([("▁", -9.0), ("▁fin", -2.0), ("f", -5.0), ("e", -5.0)], normalizer=field(2, charsmap(RULES))))
    model = SentencePieceModel.read(path)
    assert model.pieces(" ﬁne\tzzf  ") == ["▁fin", "e", "▁", "zz", "f"]
    assert model.normalised(" ﬁne\tzzf  ") == "fine zzf"
    assert model.pieces("  ") == []


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_are_those_of_sentencepiece(tmp_path, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(SENTENCES + ["Où est l’été ? C’est ici…"] * 5), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=80,
        model_type=kind,
        hard_vocab_limit=False,
        eos_id=0,
        unk_id=1,
        bos_id=-1,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ours = SentencePieceModel.read(tmp_path / "m.model")
    generator = random.Random(5)
    ranges = (32, 127), (160, 879), (0x2000, 0x2100), (0x3000, 0x3100), (0xFF00, 0xFFEF), (0xFB00, 0xFDFF)
    signs = [chr(code) for start, end in ranges for code in range(start, end)]
    lines = ["".join(generator.choices(signs, k=11)) for _ in range(500)]
    for line in [*SENTENCES, *ODD, *lines]:
        assert ours.pieces(line) == theirs.encode(line, out_type=str)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (spm(trained_pieces(), trainer=field(3, 4)), "pieces of the kind 'char' where unigram and bpe are read"),
        (spm(trained_pieces(), trainer=field(35, 1)), "pieces for the bytes of unknown characters"),
        (spm([("a", 0.0)], kinds={"a": 4}), "symbols that its user defined"),
        (spm([("▁a▁b", 0.0)]), "pieces of several words"),
        (spm([("a", 0.0)], normalizer=field(3, 0)), "no prefix"),
        (spm([("a", 0.0)], normalizer=field(2, charsmap(RULES)[:-40])), "is truncated or not a SentencePiece model"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "is truncated or not a SentencePiece model"),
        (b'{"pieces": []}', "not a SentencePiece model"),
        (b"", "it has no pieces"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, contents, message):
    path = tmp_path / "odd.spm"
    path.write_bytes(contents)
    with pytest.raises(VocabularyError, match=message):
        SentencePieceModel.read(path)
