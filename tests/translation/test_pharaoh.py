import gzip
import re

import pytest
import torch

from regard.errors import ConfigurationError, CorpusError, ShapeError
from regard.heads import SentenceLinks, alignment_error_rate, diagonal_links, format_pharaoh, word_links, word_weights
from regard.translation.corpus import read_pharaoh


def test_word_weights_sum_over_the_source_and_average_over_the_target():
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.0, 0.5], [0.0, 0.7, 0.1, 0.2]])
    expected = torch.tensor([[(0.3 + 0.5) / 2, (0.7 + 0.5) / 2], [0.7, 0.3]])
    torch.testing.assert_close(word_weights(weights, [0, 0, 1], [0, 0, 1, 1]), expected)


def test_special_tokens_belong_to_no_word():
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    torch.testing.assert_close(word_weights(weights, [0, -1], [0, 1, -1]), torch.tensor([[0.1, 0.2]]))
    assert word_links(weights, [0, 1, -1], [0, -1]) == [(1, 0)]  # END has most, and takes no part
    assert word_links(weights, [-1, -1, -1], [0, -1]) == []
    assert word_links(weights, [0, 1, 2], [-1, -1]) == []


def test_a_word_in_pieces_wins_by_its_sum():
    weights = torch.tensor([[0.4, 0.3, 0.3]])
    assert word_links(weights, [0, 1, 2], [0]) == [(0, 0)]
    assert word_links(weights, [0, 1, 1], [0]) == [(1, 0)]


def test_every_target_word_has_one_link():
    weights = torch.rand(13, 17).softmax(-1)
    links = word_links(weights, list(range(17)), list(range(13)))
    assert sorted(target for _, target in links) == list(range(13))
    assert all(source == weights[target].argmax() for source, target in links)
    assert links == sorted(links)


def test_the_diagonal_links_every_target_word_and_ends_meet():
    for source, target in ((1, 7), (7, 1), (5, 11), (11, 5), (13, 13)):
        links = diagonal_links(source, target)
        exact = [j * (source - 1) / max(target - 1, 1) for j in range(target)]
        assert [j for _, j in links] == list(range(target))
        assert all(abs(i - share) <= 0.5 for (i, _), share in zip(links, exact, strict=True))
        assert links[-1] == (source - 1 if target > 1 else 0, target - 1)
    assert diagonal_links(13, 13) == [(i, i) for i in range(13)]
    assert diagonal_links(0, 3) == diagonal_links(3, 0) == []


def test_of_equals_the_first():
    assert word_links(torch.tensor([[0.0, 0.5, 0.5]]), [0, 1, 2], [0]) == [(1, 0)]


def test_a_word_that_looks_nowhere_has_no_link():
    assert word_links(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), [0, 1], [0, 1]) == [(1, 1)]
    assert word_links(torch.full((1, 2), torch.nan), [0, 1], [0]) == []


def test_a_word_without_pieces_has_no_link():
    assert word_links(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), [0, 2], [0, 2]) == [(0, 0), (0, 2)]


def test_a_threshold_gives_several_links_or_none():
    weights = torch.tensor([[0.45, 0.45, 0.1], [0.3, 0.3, 0.4]])
    assert word_links(weights, [0, 1, 2], [0, 1], threshold=0.45) == [(0, 0), (1, 0)]
    assert word_links(weights, [0, 1, 2], [0, 1], threshold=0.4) == [(0, 0), (1, 0), (2, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype(dtype):
    assert word_links(torch.eye(2, dtype=dtype), [0, 1], [0, 1]) == [(0, 0), (1, 1)]


def test_pharaoh_there_and_back(tmp_path):
    sentences = [[(0, 0), (1, 2)], [], [(10, 3)]]
    path = tmp_path / "links"
    path.write_text("".join(format_pharaoh(links) + "\n" for links in sentences))
    assert path.read_text() == "0-0 1-2\n\n10-3\n"
    assert [sorted(one.sure) for one in read_pharaoh(path)] == sentences


def test_gold_links_are_sure_or_possible_and_may_count_from_one(tmp_path):
    path = tmp_path / "gold.gz"
    path.write_bytes(gzip.compress(b"1-1 2p3 1?1\n3-1\n"))
    assert read_pharaoh(path, first=1) == [
        SentenceLinks(sure=frozenset({(0, 0)}), possible=frozenset({(0, 0), (1, 2)})),
        SentenceLinks(sure=frozenset({(2, 0)}), possible=frozenset({(2, 0)})),
    ]


def test_the_error_rate_by_hand():
    # A = 3 links, S = 2, A ∩ S = 1, A ∩ P = 2: 1 - (1 + 2) / (3 + 2).
    links, sure = [{(0, 0), (1, 1), (2, 2)}], [{(0, 0), (3, 3)}]
    assert alignment_error_rate(links, sure, [{(0, 0), (3, 3), (1, 1)}]) == pytest.approx(0.4)
    assert alignment_error_rate(links, sure, [{(1, 1)}]) == pytest.approx(0.4)  # sure is possible


def test_the_error_rate_counts_over_all_pairs_together():
    links, gold = [[(0, 0)], [(0, 0), (1, 1), (2, 2)]], [[(0, 0)], []]
    assert alignment_error_rate(links, gold, gold) == pytest.approx(1 - 2 / 5)


def test_perfect_and_worst():
    gold = [[(0, 0), (1, 1)]]
    assert alignment_error_rate(gold, gold, gold) == 0
    assert alignment_error_rate([[(0, 1)]], gold, gold) == 1
    assert alignment_error_rate([[]], gold, gold) == 1


def test_weights_that_do_not_fit():
    message = r"weights have the shape \(2, 3\) for 3 tokens of queries and 2 of keys: each row and column"
    with pytest.raises(ShapeError, match=message):
        word_links(torch.rand(2, 3), [0, 1], [0, 1, 2])


@pytest.mark.parametrize("threshold", [0, -0.5, 1.5, float("nan")])
def test_a_threshold_out_of_range(threshold):
    with pytest.raises(ConfigurationError, match=r"threshold is .*; it needs to be above 0 and at most 1, as weights"):
        word_links(torch.rand(1, 1), [0], [0], threshold=threshold)


@pytest.mark.parametrize("item", ["1", "1-", "a-b", "1-2-3", "-1-2", "1:2", "1.0-2", "1-２", "1?"])
def test_what_is_no_link(tmp_path, item):
    path = tmp_path / "links"
    path.write_text(f"0-0\n0-0 {item}\n", encoding="utf-8")
    with pytest.raises(
        CorpusError, match=f"links, line 2: '{re.escape(item)}' is no link; it needs to be two word numbers as in 0-1"
    ):
        read_pharaoh(path)


def test_a_file_that_counts_from_zero_after_all(tmp_path):
    path = tmp_path / "links"
    path.write_text("0-1\n")
    with pytest.raises(CorpusError, match="line 1: '0-1' has a word number below 1, the first one; give first=0"):
        read_pharaoh(path, first=1)


def test_different_numbers_of_sentences():
    message = "links has 1 sentence pairs, sure has 2 and possible has 1; they need to be of the same sentence pairs"
    with pytest.raises(CorpusError, match=message):
        alignment_error_rate([[]], [[], []], [[]])


def test_no_links_at_all():
    with pytest.raises(CorpusError, match="there is no alignment error rate: neither links nor sure has any link"):
        alignment_error_rate([[]], [[]], [[(0, 0)]])
