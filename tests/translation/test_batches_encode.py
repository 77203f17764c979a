from dataclasses import replace

import numpy as np
import pytest
import torch

from regard.errors import CorpusError
from regard.translation.batches import EncodedText, IdSequences, collate, encode
from regard.translation.corpus import ParallelText
from regard.translation.vocabulary import BEGIN, END, PAD, Vocabulary, VocabularySettings


def test_encode_drops_and_counts_long_pairs():
    text = ParallelText.pair(["ab", "abc", "a", "b"], ["x", "x", "xyz", "yz"])
    source = Vocabulary.train(["abc"], VocabularySettings(kind="characters"))
    target = Vocabulary.train(["xyz"], VocabularySettings(kind="characters"))
    encoded = encode(text, source, target, max_length=2)
    assert len(encoded) == 2
    assert encoded.dropped_long == 2
    assert [source.decode(encoded.sources[i].tolist()) for i in range(2)] == ["ab", "b"]
    assert [target.decode(encoded.targets[i].tolist()) for i in range(2)] == ["x", "yz"]
    assert encoded.sources.ids.dtype == np.int32
    assert len(encode(text, source, target)) == 4


def test_encode_needs_a_pair_that_is_short_enough():
    text = ParallelText.pair(["abc", "abcde"], ["xyz", "x"], source_name="a.de", target_name="a.en")
    vocabulary = Vocabulary.train(["abcdexyz"], VocabularySettings(kind="characters"))
    pattern = r"all 2 pairs of a\.de with a\.en have a side of more than 2 tokens; .* needs a max_length of 3"
    with pytest.raises(CorpusError, match=pattern):
        encode(text, vocabulary, vocabulary, max_length=2)


def test_collate():
    text = EncodedText(IdSequences.pack([[5], [6, 7, 8], [9, 9]]), IdSequences.pack([[11, 12], [13], []]))
    batch = collate(text, np.array([1, 0, 2]))
    assert batch.source.tolist() == [[6, 7, 8], [5, PAD, PAD], [9, 9, PAD]]
    assert batch.source_lengths.tolist() == [3, 1, 2]
    assert batch.target_input.tolist() == [[BEGIN, 13, PAD], [BEGIN, 11, 12], [BEGIN, PAD, PAD]]
    assert batch.target_output.tolist() == [[13, END, PAD], [11, 12, END], [END, PAD, PAD]]
    assert batch.target_tokens == int((batch.target_output != PAD).sum()) == 6
    assert len(batch) == 3
    assert {tensor.dtype for tensor in (batch.source, batch.source_lengths, batch.target_input)} == {torch.int64}


def test_a_batch_moves_to_a_device():
    text = EncodedText(IdSequences.pack([[5], [6, 7]]), IdSequences.pack([[8], [9]]))
    batch = collate(text, np.arange(2))
    moved = batch.to("meta", non_blocking=True)
    assert (moved.source.device.type, moved.target_output.device.type) == ("meta", "meta")
    assert moved.target_tokens == batch.target_tokens
    assert batch.source.device.type == "cpu"


@pytest.mark.parametrize("kind", ["characters", "words", "bpe", "unigram"])
def test_links_of_words_are_those_of_all_their_tokens(kind):
    """Whatever a vocabulary makes of a word, of unknown letters too: the words of a line are what spaces separate."""
    lines = ["the cat sat there", "a red hat", "漢 sat 漢字"]
    settings = VocabularySettings(kind=kind, size=40 if kind in ("bpe", "unigram") else 8000)
    vocabulary = Vocabulary.train(lines[:2] * 3, settings)
    links = [frozenset({(1, 2), (3, 0)}), frozenset(), frozenset({(0, 2), (1, 1)})]
    text = ParallelText.pair(lines, list(reversed(lines)), links=links)
    encoded = encode(text, vocabulary, vocabulary)
    assert encoded.links is not None
    for row in range(3):
        source, target = [
            [number for number, ids in enumerate(vocabulary.encode_words(line)) for _ in ids]
            for line in (text.sources[row], text.targets[row])
        ]
        assert len(source) == len(encoded.sources[row])
        expected = [(t, s) for t, of in enumerate(target) for s, word in enumerate(source) if (word, of) in links[row]]
        assert encoded.links[row].reshape(-1, 2).tolist() == [list(pair) for pair in expected]


def test_links_follow_pairs_that_are_short_enough_and_are_part_of_the_text():
    vocabulary = Vocabulary.train(["ab"], VocabularySettings(kind="characters"))
    text = ParallelText.pair(["abab", "a b"], ["a", "b"], links=[frozenset({(0, 0)}), frozenset({(1, 0)})])
    encoded = encode(text, vocabulary, vocabulary, max_length=3)
    assert encoded.links is not None
    assert encoded.links[0].tolist() == [0, 1, 0, 2]  # the space before "b" is of its word
    assert collate(encoded, np.array([0])).links.tolist() == [[0, 0, 1], [0, 0, 2]]  # type: ignore[union-attr]
    without = encode(replace(text, links=None), vocabulary, vocabulary, max_length=3)
    assert collate(without, np.array([0])).links is None
    assert without.checksum() != encoded.checksum()
