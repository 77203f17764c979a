"""Roles that records find themselves, and that are found in atlases: those of `regard.heads.Roles`."""

from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard import masks, scores
from regard.explorer import Atlas, record, with_detected_roles
from regard.heads import Roles

B, H, N, D = 3, 4, 90, 8
WORDS = [[f"{word}{line}" for word in ("the cat , sat on the mat . " * 12).split()][:N] for line in range(B)]


class Asker(nn.Module):
    def forward(self, *tensors, memory=None, **options):  # without a memory it looks at its own sequence
        return regard.attention(*tensors, **options)


def heads(count, length=N):
    """The first head attends to the token before, the second to the first one, the third to itself."""
    positions = torch.arange(N).repeat(B, count, 1)[..., N - length :]
    positions[:, 0] -= 1
    positions[:, 1:2] = 0
    query = nn.functional.one_hot(positions.clamp(min=0), N).float() * 120
    query[:, 3:] = 0
    return query


def keys():
    return torch.eye(N).repeat(B, H, 1, 1)


LENGTHS = torch.tensor([90, 60, 33])
RULES = {
    "nothing": dict,
    "causal": lambda: {"mask": masks.causal()},
    "padding": lambda: {"mask": masks.padding(lengths=LENGTHS) & masks.causal()},
    "each its own": lambda: {"mask": masks.where(keep=(torch.rand(B, H, N, N) > 0.2) | torch.eye(N).bool())},
    "each head its own": lambda: {"mask": masks.where(keep=(torch.rand(H, N, N) > 0.2) | torch.eye(N).bool())},
    "a bias": lambda: {"bias": regard.biases.tensor(torch.randn(B, 1, N, N)), "softcap": 8.0},
    "sinks": lambda: {"mask": masks.causal(), "sinks": torch.randn(H)},
}


def expected_of(query, key, at, options):
    """Roles of one sequence, by a look at all of them with tokens in that one alone."""
    tokens = [words if line == at else ["[PAD]"] * N for line, words in enumerate(WORDS)]
    lens = Roles(tokens)
    found = regard.observe(query, key, key, lens, **options)[lens].holding()
    return [[(of.name, pytest.approx(of.score, rel=1e-3), of.n, of.rule) for of in head] for head in found]


def roles(shown):
    return [[(of["name"], of["score"], of["n"], of["rule"]) for of in head] for head in shown.roles]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("length", [N, N - 20])
def test_a_record_with_words_finds_the_roles_of_each_sequence(rule, length, tmp_path):
    query, key = heads(H, length), keys()
    options: Any = RULES[rule]()
    if length < N and rule in ("each its own", "each head its own"):
        options = {"mask": masks.where(keep=options["mask"].pairs[..., -length:, :])}
    if length < N and rule == "a bias":
        options["bias"] = regard.biases.tensor(torch.randn(B, 1, length, N))
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, key, key, **options)
    recording.atlas(tokens=WORDS).save(tmp_path / "a.atlas")
    maps = Atlas.open(tmp_path / "a.atlas").maps
    for shown in maps:
        expected = expected_of(query, key, shown.sequence, options)
        assert any(expected)
        assert roles(shown) == expected
    without = recording.atlas()
    assert [shown.roles for shown in without.maps] == [((),) * H] * B
    without._records[0]["tokens"].update(recording.atlas(tokens=WORDS)._records[0]["tokens"])  # words, no roles yet
    arrays = {**without._arrays, **recording.atlas(tokens=WORDS)._arrays}
    for shown, found in zip(maps, with_detected_roles(Atlas(without._records, arrays)).maps, strict=True):
        assert [[role["name"] for role in head] for head in found.roles] == [
            [role["name"] for role in head] for head in shown.roles
        ]
        for head, of_head in zip(shown.roles, found.roles, strict=True):
            for one, other in zip(head, of_head, strict=True):
                assert other["score"] == pytest.approx(one["score"], rel=1e-4)
                assert (one["n"], one["rule"]) == (other["n"], other["rule"])


def test_without_an_axis_for_heads():
    query, key = heads(1)[:, 0], keys()[:, 0]
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, key, key, mask=masks.causal())
    maps = recording.atlas(tokens=WORDS).maps
    assert [[role["name"] for role in shown.roles[0]] for shown in maps] == [["previous token"]] * B


def test_additive_scores():
    query, key = torch.randn(2, 1, H, 20, D).unbind()
    score = scores.Additive(D, D, 5)
    for parameter in score.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad(), record(Asker(), dtype="keep") as recording:
        recording.model(query, key, key, score=score)
    (shown,) = recording.atlas(tokens=WORDS[0][:20]).maps
    assert [[role["name"] for role in head] for head in shown.roles] == [["diffuse"]] * H


def test_cross_attention_and_queries_in_other_places_have_none():
    query, key = heads(H), keys()
    for options in ({"memory": key}, {"query_positions": torch.arange(N) + 3}):
        with record(Asker()) as recording:
            recording.model(query, key, key, **options)
        atlas = recording.atlas(tokens=WORDS)
        assert [shown.roles for shown in [*atlas.maps, *with_detected_roles(atlas).maps]] == [((),) * H] * 2 * B


def test_a_head_that_attends_to_nan_has_none():
    query, key = heads(H), keys()
    query[0, 0, 5] = float("nan")
    with record(Asker()) as recording:
        recording.model(query, key, key, mask=masks.causal())
    names = [[role["name"] for role in head] for head in recording.atlas(tokens=WORDS).maps[0].roles]
    assert names[:3] == [[], ["sink"], ["self"]]


def test_a_long_map_has_roles():
    """What is computed is tiles: the weights of one head would take 1.6 GB."""
    n, dim = 20_000, 16
    angles = torch.arange(n)[:, None] * torch.logspace(0, -3, dim // 2) * 2.0
    key = torch.cat([angles.cos(), angles.sin()], -1)[None, None]
    before = torch.cat([(angles - angles[1]).cos(), (angles - angles[1]).sin()], -1)[None, None]
    with record(Asker()) as recording:
        recording.model(8 * before, 4 * key, 4 * key, mask=masks.causal() & masks.window(before=64))
    atlas = recording.atlas(tokens=[f"w{number}" for number in range(n)])
    assert [role["name"] for role in atlas.maps[0].roles[0]] == ["previous token"]
    found = with_detected_roles(
        Atlas([{name: value for name, value in atlas._records[0].items() if name != "roles"}], atlas._arrays)
    )
    assert [role["name"] for role in found.maps[0].roles[0]] == ["previous token"]


def test_long_weights_that_are_given_have_roles():
    before = torch.eye(1100)[torch.arange(1100).sub(1).clamp(min=0)]
    found = with_detected_roles(Atlas.from_weights({"a": torch.stack([before, torch.full((1100, 1100), 1 / 1100)])}))
    assert [[role["name"] for role in head] for head in found.maps[0].roles] == [["previous token"], ["diffuse"]]
