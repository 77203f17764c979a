import json
import pickle

import pytest

from regard.errors import CheckpointError, VocabularyError
from regard.translation.vocabulary import Vocabulary, VocabularySettings

KINDS = ["characters", "words", "bpe", "unigram"]
LINES = ["Hello, world!", "나는 학교에 갔다.", "L’été dernier\u202f?", "the low lower lowest ▁"]


def make(kind: str) -> Vocabulary:
    return Vocabulary.train(LINES, VocabularySettings(kind=kind, size=200))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_survives_saving_and_pickling(kind, tmp_path):
    vocabulary = make(kind)
    vocabulary.save(tmp_path / "vocabulary.json")
    for same in (Vocabulary.load(tmp_path / "vocabulary.json"), pickle.loads(pickle.dumps(vocabulary))):
        assert same.settings == vocabulary.settings
        assert len(same) == len(vocabulary)
        assert same.encode_batch(LINES) == vocabulary.encode_batch(LINES)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_truncated_file(tmp_path, share):
    path = tmp_path / "vocabulary.json"
    make("bpe").save(path)
    content = path.read_bytes().rstrip()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(
        VocabularyError, match=r"vocabulary\.json is truncated or not a vocabulary of regard: it is not"
    ):
        Vocabulary.load(path)


def test_bytes_that_are_not_text(tmp_path):
    (tmp_path / "best.safetensors").write_bytes(bytes(range(256)))
    with pytest.raises(VocabularyError, match=r"best\.safetensors is truncated or not a vocabulary"):
        Vocabulary.load(tmp_path / "best.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "another"}, "format: Input should be 'regard vocabulary'"),
        ({"version": 2}, "version: Input should be 1"),
        ({"model": {}}, "model: Extra inputs are not permitted"),
        ({"pieces": ["a", "a"]}, "a piece occurs twice"),
        ({"merges": [["▁", "zzz"]]}, "its merges are missing or name pieces that it does not have"),
        ({"merges": None}, "its merges are missing"),
        ({"settings": {"kind": "unigram"}}, "it needs one score for each piece"),
    ],
)
def test_a_foreign_or_damaged_file(tmp_path, changes, message):
    path = tmp_path / "vocabulary.json"
    make("bpe").save(path)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    with pytest.raises(VocabularyError, match=rf"vocabulary\.json is not a vocabulary of regard: {message}"):
        Vocabulary.load(path)


def test_json_of_another_kind(tmp_path):
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(VocabularyError, match=r"list\.json is not a vocabulary of regard: the file: Input should be"):
        Vocabulary.load(tmp_path / "list.json")


def test_a_missing_file(tmp_path):
    with pytest.raises(VocabularyError, match=r"cannot read the vocabulary .*none\.json: No such file"):
        Vocabulary.load(tmp_path / "none.json")


def test_saving_where_there_is_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"the folder .*absent does not exist"):
        make("words").save(tmp_path / "absent" / "vocabulary.json")
