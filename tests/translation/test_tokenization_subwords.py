from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import VocabularyError
from regard.translation.tokenization import bpe_segmenter, learn_bpe, learn_unigram, unigram_segmenter

SPECIAL = ("<pad>", "<unk>")
LEARNERS = [learn_bpe, learn_unigram]

counted_words = st.dictionaries(
    st.text("abcdefg가", min_size=1, max_size=9), st.integers(1, 5), min_size=1, max_size=40
)


@settings(deadline=None)
@pytest.mark.parametrize("learn", LEARNERS)
@given(words=counted_words, spare=st.integers(0, 12))
def test_every_character_is_kept_whatever_the_size_and_learning_again_gives_the_same(learn, words, spare):
    # with no room to spare the trainer of the library may not end when asked carelessly
    alphabet = set("".join(words))
    size = len(alphabet) + spare
    subwords = learn(Counter(words), size=size, minimum_count=1)
    assert alphabet <= set(subwords.pieces)
    assert len(set(subwords.pieces)) == len(subwords.pieces) <= size
    assert learn(Counter(dict(reversed(words.items()))), size=size, minimum_count=1) == subwords


def test_segmenters_count_ids_from_the_special_ones():
    counts = Counter({"low": 9, "lower": 3})
    bpe = learn_bpe(counts, size=7, minimum_count=1)
    unigram = learn_unigram(counts, size=7, minimum_count=1)
    for subwords, segmenter in ((bpe, bpe_segmenter), (unigram, unigram_segmenter)):
        ids = segmenter(subwords, special=SPECIAL, unknown=1)(["low", "wol", "x"])
        assert "".join(subwords.pieces[i - 2] for i in ids[:-1]) == "lowwol"
        assert ids[-1] == 1


def test_the_most_frequent_pair_is_merged_first():
    assert learn_bpe(Counter({"ab": 3, "bc": 2}), size=5, minimum_count=1).merges == [("a", "b"), ("b", "c")]
    assert learn_bpe(Counter({"ab": 3, "bc": 2}), size=5, minimum_count=3).merges == [("a", "b")]


def test_scores_are_settled():
    scores = learn_unigram(Counter({"ab": 30, "abc": 3, "d": 1}), size=9, minimum_count=1).scores or []
    assert scores
    assert scores == sorted(scores, reverse=True)
    assert all(score == round(score, 6) for score in scores)


@pytest.mark.parametrize("learn", LEARNERS)
def test_size_without_room_for_the_characters(learn):
    with pytest.raises(VocabularyError, match=r"3 different characters.* leaves room for 2: raise the size by 1"):
        learn(Counter({"abc": 1}), size=2, minimum_count=1)
