"""The word aligner: its hidden Markov model against all alignments written out, and links of a language made here."""

import itertools
import random

import pytest
import torch

from regard.errors import ConfigurationError, CorpusError
from regard.heads import alignment_error_rate
from regard.translation import word_aligner
from regard.translation.word_aligner import FARTHEST, Direction, KindPairs, align_words


def written_out(said, empty, jumps, starts):
    """Posteriors, jumps and starts of one pair of S and T words by a sum over all (2 S)^T paths."""
    length, width = said.shape
    words, silent = torch.zeros(length, width).double(), torch.zeros(length).double()
    counted, begun, total = torch.zeros(2 * FARTHEST + 1).double(), torch.zeros(FARTHEST + 1).double(), 0.0
    leaving = [sum(jumps[FARTHEST + j - i] for j in range(width)) for i in range(width)]
    for path in itertools.product(range(width), repeat=length):
        for speaks in itertools.product((True, False), repeat=length):
            if any(not speaks[t] and t and path[t] != path[t - 1] for t in range(length)):
                continue  # where no word speaks, the one that did last stays
            p = float(starts[path[0]] / starts[:width].sum())
            for t in range(length):
                p *= float(said[t, path[t]] if speaks[t] else empty[t])
                if t and speaks[t]:
                    p *= float(jumps[FARTHEST + path[t] - path[t - 1]] / leaving[path[t - 1]])
            total += p
            for t in range(length):
                (words[t] if speaks[t] else silent[t : t + 1])[path[t] if speaks[t] else 0] += p
                if t and speaks[t]:
                    counted[FARTHEST + path[t] - path[t - 1]] += p
            begun[path[0]] += p * speaks[0]
    return words / total, silent / total, counted / total, begun / total


@pytest.fixture
def trained():
    """Both directions of some pairs of several lengths after a round of each model, and the pairs."""
    sources = ["a b c", "b a", "c", "a a b", "d c b a"]
    targets = ["B A", "A B C", "C D", "B", "A B C D"]
    text = KindPairs.of([line.split() for line in sources], [line.lower().split() for line in targets], None)
    return text, word_aligner._trained(text, together=False)


def test_posteriors_and_counts_are_those_of_all_paths(trained):
    text, models = trained
    for side, model in enumerate(models):
        assert model.jumps is not None
        jumps, starts = torch.zeros(2 * FARTHEST + 1).double(), torch.zeros(FARTHEST + 1).double()
        every = [model.posteriors(batch.seen_from(side)) for batch in text.batches]
        for batch, found in zip(text.batches, every, strict=True):
            view = batch.seen_from(side)
            for row in range(len(batch.rows)):
                t, s = int(view.there[row].sum()), int(view.sayers_there[row].sum())
                said = model.table[view.cells[row, :t, :s]].double() * (1 - model.empty_share)
                empty = model.empty[view.said[row, :t]].double() * model.empty_share
                words, silent, counted, begun = written_out(said, empty, model.jumps.double(), model.starts.double())
                torch.testing.assert_close(found.words[row, :t, :s].double(), words, rtol=0, atol=1e-5)
                torch.testing.assert_close(found.empty[row, :t].double(), silent, rtol=0, atol=1e-5)
                jumps, starts = jumps + counted, starts + begun
        torch.testing.assert_close(sum(one.jumps for one in every), jumps, rtol=0, atol=1e-4)
        torch.testing.assert_close(sum(one.starts for one in every), starts, rtol=0, atol=1e-4)


def test_model_1_shares_a_word_by_what_each_says():
    text = KindPairs.of([["a", "b"]], [["x"]], None)
    model = Direction(text.sides[0])
    (batch,) = text.batches
    model.table = torch.tensor([0.6, 0.2, 0.0])
    model.empty[:] = 0.5
    found = model.posteriors(batch.seen_from(0))
    total = 0.9 * 0.6 / 2 + 0.9 * 0.2 / 2 + 0.1 * 0.5
    torch.testing.assert_close(found.words[0, 0], torch.tensor([0.27, 0.09]) / total)
    torch.testing.assert_close(found.empty[0, 0], torch.tensor(0.05 / total))


def made_language(pairs, seed):
    """Sentences, their translations by a dictionary with adjectives after nouns and particles added, and the links."""
    random.seed(seed)
    sources, targets, links = [], [], []
    for _ in range(pairs):
        source, target, found = [], [], []
        for _ in range(random.randint(1, 5)):
            noun, adjective = f"noun{random.randint(0, 60)}", f"good{random.randint(0, 40)}"
            start, said = len(source), len(target)
            if random.random() < 0.5:
                source += [adjective, noun]
                target += [f"n{noun[4:]}", f"g{adjective[4:]}"]
                found += [(start, said + 1), (start + 1, said)]
            else:
                source.append(noun)
                target.append(f"n{noun[4:]}")
                found.append((start, said))
            if random.random() < 0.2:
                target.append("ga")
        sources.append(source)
        targets.append(target)
        links.append(found)
    return sources, targets, links


@pytest.mark.parametrize(("pairs", "together", "most"), [(600, None, 0.08), (600, True, 0.03), (5000, None, 0.02)])
def test_a_dictionary_is_found(pairs, together, most):
    sources, targets, links = made_language(pairs, seed=1)
    found = align_words(sources, targets, stem=None, together=together)
    assert alignment_error_rate(found, links, links) < most
    if together is None:
        assert align_words(sources, targets, stem=None) == found


def test_words_that_are_kept_are_linked_at_once():
    sources = [f"one{i} Anna{i} two{i}".split() for i in range(30)]
    targets = [f"eins{i} zwei{i} Anna{i}".split() for i in range(30)]
    assert all((1, 2) in links for links in align_words(sources, targets, stem=None, together=True))


def test_a_pair_with_an_empty_side_has_no_links():
    assert align_words([["a"], [], ["b"]], [["x"], ["y"], []]) == [[(0, 0)], [], []]
    assert align_words([], []) == []


def test_padding_counts_for_nothing():
    sources, targets, _ = made_language(200, seed=2)
    text = KindPairs.of(sources, targets, None)
    assert any((batch.sources < 0).any() for batch in text.batches)
    models = word_aligner._trained(text, together=True)
    for batch in text.batches:
        for side, model in enumerate(models):
            view = batch.seen_from(side)
            found = model.posteriors(view)
            assert not found.words.isnan().any()
            assert not (found.words * ~view.sayers_there[:, None]).any()
            sums = found.words.sum(-1) + found.empty
            torch.testing.assert_close(sums[view.there], torch.ones(int(view.there.sum())), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([["a"]], []), CorpusError, "there are 1 sources and 0 targets"),
        (([["a"]], [["x"]], {"stem": 0}), ConfigurationError, "stem is 0; it needs to be 1 or more letters"),
        (([["a"]], [["x"]], {"threshold": 2.0}), ConfigurationError, "threshold is 2.0; it needs to be in 0..1"),
    ],
)
def test_what_cannot_be_aligned_is_told(arguments, error, message):
    with pytest.raises(error, match=message):
        align_words(*arguments[:2], **(arguments[2] if len(arguments) > 2 else {}))
