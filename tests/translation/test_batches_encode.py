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
