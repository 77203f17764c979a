"""Evidence that adds up over a corpus, classes of tokens, and their errors."""

import operator
from typing import Any

import pytest
import torch

from regard import heads
from regard.errors import ConfigurationError, ShapeError

WORDS = ["the", "cat", ",", "that", "the", "dog", "saw", ",", "sat", "on", "the", "mat", ".", "and", "slept"]


def test_evidence_adds_up():
    parts = [(torch.randn(3, n, n).softmax(-1), torch.randint(0, 4, (n,))) for n in (5, 9, 12)]
    evidence = [heads.gather_role_evidence(weights, tokens) for weights, tokens in parts]
    total = heads.RoleEvidence.total(evidence)
    torch.testing.assert_close(total.scores, torch.stack([part.scores for part in evidence]).sum(0))
    assert total.rows.equal(torch.stack([part.rows for part in evidence]).sum(0))
    assert total.queries == 26
    assert (evidence[0] + evidence[1] + evidence[2]).findings() == total.findings()
    with pytest.raises(ConfigurationError, match="there is no evidence to add up"):
        heads.RoleEvidence.total([])
    with pytest.raises(ShapeError, match="only evidence of the same roles and heads adds up"):
        heads.RoleEvidence.total([evidence[0], heads.gather_role_evidence(torch.ones(2, 1, 1), [1])])
    other: Any = 1
    with pytest.raises(TypeError):
        operator.add(evidence[0], other)


def test_a_probe_goes_beside_a_text():
    probe = heads.repeat_probe(50, 10)[0]
    text = heads.gather_role_evidence(torch.eye(15), WORDS)
    both = text.with_roles(heads.gather_role_evidence(torch.eye(20).roll(-9, 0), probe, roles=heads.probe_roles()))
    named = {finding.name: finding for finding in both.findings()[0]}
    assert named["duplicate token"].n == named["induction"].n == 10
    assert named["self"].n == 15
    with pytest.raises(ShapeError, match="both need the same heads"):
        text.with_roles(heads.gather_role_evidence(torch.ones(2, 1, 1), [1]))


def test_a_report_has_a_line_for_each_finding():
    found = heads.find_roles(torch.stack([torch.eye(9), torch.full((9, 9), 1 / 9)]), range(9))
    lines = heads.report({"layer.0": found}).split("\n")
    assert [line.split(":")[0] for line in lines] == [
        "layer.0 head 0",
        "layer.0 head 1",
    ]


@pytest.mark.parametrize("tokens", [["a"] * 4, [["a"] * 5] * 3])
def test_tokens_fit_the_keys(tokens):
    with pytest.raises(ShapeError, match="self-attention needs one token for each key, of one sequence or of each"):
        heads.gather_role_evidence(torch.ones(2, 1, 5, 5), tokens)


def test_roles_are_of_self_attention():
    with pytest.raises(ShapeError, match="for 6 queries, 5 keys"):
        heads.gather_role_evidence(torch.ones(1, 6, 5), ["a"] * 5)


@pytest.mark.parametrize("roles", [(), (heads.Sink,), ("sink",)])
def test_roles_are_given_as_roles(roles):
    with pytest.raises(ConfigurationError, match="Roles needs roles such as text_roles"):
        heads.Roles(["a"], roles)


@pytest.mark.parametrize("tokens", [[], [[]], [1.5], [True], [["a"], [None]]])
def test_tokens_are_strings_or_numbers(tokens):
    with pytest.raises(ConfigurationError, match="tokens need to be strings or whole numbers"):
        heads.Tokens.from_lists(tokens)


def test_padding_and_marks_of_tokenizers():
    tokens = heads.Tokens.from_lists([["[CLS]", "##,", "cat", "[PAD]"], ["▁.", "Ġcat"]], counts={"Ġcat": 4})
    assert tokens.ids.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1]]
    assert tokens.delimiters.int().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert tokens.rarest.int().tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


def test_a_probe_needs_enough_tokens():
    with pytest.raises(ConfigurationError, match="length is 9 and there are 8 tokens to draw from"):
        heads.repeat_probe(8, 9)
    with pytest.raises(ConfigurationError, match="length"):
        heads.repeat_probe(8, 0)
    probe = heads.repeat_probe([5, 6, 7], 3, sequences=2)
    assert probe.sort(-1).values.tolist() == [[5, 5, 6, 6, 7, 7]] * 2


@pytest.mark.parametrize("farthest", [0, 1.5])
def test_offsets_reach_somewhere(farthest):
    with pytest.raises(ConfigurationError, match="farthest"):
        heads.text_roles(farthest)
