"""Evidence of heads for relations between words: who is right, against which rule, and in which interval."""

import math
from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.heads import RelationCase, RelationEvidence

CASES = [RelationCase.of_word(0, [1]), RelationCase.of_word(1, [3]), RelationCase.of_word(2, [0, 3])]


def attending(*targets):
    """Weights of one head in which word i attends to word targets[i], and a little to itself."""
    return 0.6 * torch.nn.functional.one_hot(torch.tensor(targets), 4) + 0.4 * torch.eye(4)


def test_which_heads_are_right():
    between = torch.stack([attending(1, 3, 3, 0), attending(1, 2, 0, 0), torch.eye(4)])[None]
    evidence = RelationEvidence.from_weights(between, CASES)
    assert evidence.shape == (1, 3)
    assert evidence.right.int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]  # without weight on others: wrong
    assert [sorted(rules) for rules in evidence.rules] == [["+1"], ["+2"], ["+1", "-2"]]
    torch.testing.assert_close(evidence.chances, torch.tensor([1 / 3, 1 / 3, 2 / 3]))


def test_weights_of_spans_are_summed_over_keys_and_averaged_over_queries():
    between = torch.zeros(1, 5, 5)
    between[0, 3, :3] = torch.tensor([0.3, 0.3, 0.5])  # 0.6 on the first candidate, 0.5 on the second
    between[0, 4, :3] = torch.tensor([0.0, 0.0, 0.4])
    first, both = (RelationCase.of_choice(query, [(0, 1), (2, 2)], [0]) for query in ((3, 3), (3, 4)))
    assert RelationEvidence.from_weights(between, [first, both]).right.tolist() == [[True], [False]]


def test_head_and_rule_are_chosen_on_other_texts():
    """Head 0 is right in all texts to choose on and in one of four to score on, as the rule +1 is."""
    right = torch.stack([attending(1, 0, 0, 0), attending(2, 0, 0, 0)])
    wrong = right.flip(0)
    chosen = RelationEvidence.from_weights(right, CASES[:1])
    parts = [RelationEvidence.from_weights(weights, CASES[:1]) for weights in (right, wrong, wrong)]
    other = RelationEvidence.from_weights(wrong, [RelationCase.of_word(0, [3])])
    score = RelationEvidence.total([*parts, other]).score(chosen_on=chosen)
    assert (score.head, score.rule) == ((0,), "+1")
    assert (score.accuracy, score.baseline, score.n, score.texts) == (0.25, 0.75, 4, 4)
    assert score.gain == -0.5
    assert not score.holds
    assert (score.elsewhere, score.n_elsewhere) == (0.0, 1)
    assert str(score).startswith("head 0 25.0% [0.0, 75.0], +1 75.0%, gain -50.0 [")


def test_an_interval_is_over_texts_and_not_over_cases():
    """Ten texts of equal cases have the interval of ten texts of one: 95 % of binomial(10, 1/2)."""
    good, bad = (attending(at, 0, 0, 0)[None] for at in (1, 2))
    scores = []
    for times in (1, 30):
        parts = [
            RelationEvidence.from_weights(good if number % 2 else bad, [RelationCase.of_word(0, [1])] * times)
            for number in range(10)
        ]
        whole = RelationEvidence.total(parts)
        scores.append(whole.score(chosen_on=whole))
    assert scores[0].interval == scores[1].interval == (0.2, 0.8)
    assert (scores[0].n, scores[1].n, scores[1].texts) == (10, 300, 10)


def test_a_head_that_is_better_than_every_offset_holds():
    cases = [RelationCase.of_word(0, [1 + number % 3]) for number in range(30)]
    parts = [
        RelationEvidence.from_weights(attending(1 + number % 3, 0, 0, 0)[None], [case])
        for number, case in enumerate(cases)
    ]
    first, second = RelationEvidence.total(parts).halves()
    score = second.score(chosen_on=first)
    assert (first.n_texts, second.n_texts) == (15, 15)
    assert (score.accuracy, round(score.baseline, 3), score.holds) == (1.0, 0.333, True)
    assert (score.elsewhere, score.n_elsewhere) == (1.0, 10)


def test_a_relation_that_is_an_offset_is_compared_with_chance():
    cases = [RelationCase.of_word(at, [at + 1], offsets=False) for at in range(3)]
    evidence = RelationEvidence.from_weights(attending(1, 2, 3, 0)[None], cases)
    score = evidence.score(chosen_on=evidence)
    assert (score.rule, round(score.baseline, 3), score.accuracy) == ("chance", 0.333, 1.0)
    assert score.interval is None  # one text says nothing of others
    assert score.gain_interval is None
    assert not score.holds
    assert math.isnan(score.elsewhere)


def test_texts_of_a_group_are_one():
    parts = [RelationEvidence.from_weights(attending(1, 0, 0, 0)[None], CASES[:1]) for _ in range(3)]
    group = RelationEvidence.total(parts[:2]).as_one_text()
    both = RelationEvidence.total([group, parts[2]])
    assert both.texts.tolist() == [0, 0, 1]
    assert [half.texts.tolist() for half in both.halves()] == [[0, 0], [0]]


def test_evidence_that_does_not_fit():
    evidence = RelationEvidence.from_weights(torch.ones(2, 4, 4), CASES)
    for weights in (torch.ones(2, 3, 3), torch.ones(2, 4, 5)):
        with pytest.raises(ShapeError, match="need a square of words, and each span its first and last word in 0 to"):
            RelationEvidence.from_weights(weights, CASES)
    with pytest.raises(ShapeError, match="does not add up"):
        RelationEvidence.total([evidence, RelationEvidence.from_weights(torch.ones(3, 4, 4), CASES)])
    with pytest.raises(ShapeError, match="both need the same heads"):
        evidence.score(chosen_on=RelationEvidence.from_weights(torch.ones(3, 4, 4), CASES))
    with pytest.raises(ConfigurationError, match="there is no evidence to add up"):
        RelationEvidence.total([])
    nothing: Any = RelationEvidence.from_weights(torch.ones(2, 4, 4), [])
    with pytest.raises(ConfigurationError, match="there are 3 cases to choose a head on and 0 to score it on"):
        nothing.score(chosen_on=evidence)
