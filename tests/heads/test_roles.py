"""Roles of constructed heads, with scores and row counts computed by hand."""

import math

import pytest
import torch

import regard
from regard import heads, lenses, masks
from regard.heads import dense_weights

SHARP = 40.0
WORDS = ["the", "cat", ",", "that", "the", "dog", "saw", ",", "sat", "on", "the", "mat", ".", "and", "slept"]


def one_hot(numbers, size):
    return torch.nn.functional.one_hot(torch.as_tensor(numbers), size).float()


def at_offset(length, offset):
    """Queries and keys of a head that attends to the token at an offset."""
    positions = torch.arange(length)
    return SHARP * one_hot((positions + offset).clamp(0, length - 1), length), one_hot(positions, length)


def shown(query, key, tokens, roles=None, mask=None, **options):
    lens = heads.Roles(tokens) if roles is None else heads.Roles(tokens, roles)
    query, key = (x[None, None] if x.ndim == 2 else x for x in (query, key))
    return regard.observe(query, key, key, lens, mask=mask, scale=1.0, **options)[lens]


def best(evidence, head=0):
    return evidence.holding()[head][0]


@pytest.mark.parametrize(
    ("offset", "name", "n"),
    [
        (-1, "previous token", 511),
        (1, "next token", 511),
        (0, "self", 512),
        (-3, "offset -3", 509),
        (5, "offset +5", 507),
    ],
)
def test_a_fixed_offset(offset, name, n):
    query, key = at_offset(512, offset)
    found = best(shown(query, key, range(512)))
    assert (found.name, found.n) == (name, n)
    assert found.score == pytest.approx(1.0, abs=1e-4)
    assert found.chance == pytest.approx(1 / 512)
    assert found.holds


def test_it_says_what_it_counted():
    query, key = at_offset(512, -1)
    line = "previous token 1.00 (n = 511): mean weight on the token before, at least 0.5"
    assert str(best(shown(query, key, range(512), mask=masks.causal()))) == line
    assert best(shown(query, key, range(512))).to_dict() == {
        "name": "previous token",
        "score": pytest.approx(1.0, abs=1e-4),
        "n": 511,
        "rule": "mean weight on the token before, at least 0.5",
    }


def test_a_uniform_causal_head_is_diffuse_and_nothing_else():
    query = torch.zeros(400, 4)
    evidence = shown(query, query, range(400), mask=masks.causal())
    (found,) = evidence.holding()[0]
    assert (found.name, found.n) == ("diffuse", 399)
    assert found.score == pytest.approx(1.0, abs=1e-5)
    scores = {finding.name: finding for finding in evidence.findings()[0]}
    assert scores["previous token"].score == pytest.approx(scores["previous token"].chance, rel=1e-4)
    assert scores["sink"].score == pytest.approx(sum(1 / n for n in range(2, 401)) / 399, rel=1e-4)


def test_a_sink():
    key = one_hot([0] + [1] * 19, 2)
    found = best(shown(SHARP * key[:1].expand(20, 2), key, range(20), mask=masks.causal()))
    assert (found.name, found.n, round(found.score, 3)) == ("sink", 19, 1.0)


def test_a_sink_is_the_first_token_that_is_one():
    tokens = [-1, -1, 7, 8, 9, 10]
    key = one_hot([1, 1, 0, 1, 1, 1], 2)
    found = best(shown(SHARP * one_hot([0] * 6, 2), key, tokens, mask=~masks.prefix(2)))
    assert (found.name, found.n) == ("sink", 3)


def test_delimiters():
    ids = [int(heads.is_delimiter(word)) for word in WORDS]
    found = best(shown(SHARP * one_hot([1] * len(WORDS), 2), one_hot(ids, 2), WORDS))
    assert (found.name, found.n) == ("delimiter", len(WORDS))
    assert found.chance == pytest.approx(3 / len(WORDS))


def test_a_row_that_sees_no_delimiter_is_not_counted():
    ids = [int(heads.is_delimiter(word)) for word in WORDS]
    evidence = shown(SHARP * one_hot([1] * len(WORDS), 2), one_hot(ids, 2), WORDS, mask=masks.causal())
    found = {finding.name: finding for finding in evidence.findings()[0]}["delimiter"]
    assert found.n == len(WORDS) - WORDS.index(",")
    assert found.score == pytest.approx(1.0, abs=1e-4)


def test_duplicate_tokens():
    numbers = heads.Tokens.from_lists(WORDS).ids[0]
    code = one_hot(numbers, int(numbers.max()) + 1)
    # Its own occurrence scores a little less than an earlier one.
    place = -0.5 * SHARP * torch.eye(len(WORDS))
    evidence = shown(torch.cat([SHARP * code, place], -1), torch.cat([code, torch.eye(len(WORDS))], -1), WORDS,
                     mask=masks.causal())  # fmt: skip
    found = {finding.name: finding for finding in evidence.holding()[0]}["duplicate token"]
    assert found.n == 3  # the, the, and a comma
    assert found.score == pytest.approx(1.0, abs=1e-4)


def test_an_induction_head_on_the_repeat_probe():
    """Queries encode their own token and keys the token before them: the definition of an induction head."""
    probe = heads.repeat_probe(1000, 60, sequences=3)
    codes = torch.randn(1000, 64).sign() / 8
    before = probe.roll(1, -1)
    before[:, 0] = 999
    query, key = SHARP * codes[probe][:, None], codes[before][:, None]
    evidence = shown(query, key, probe, heads.probe_roles(), mask=masks.causal())
    found = best(evidence)
    assert (found.name, found.n) == ("induction", 180)
    assert found.score > 0.95
    assert found.chance < 0.02
    same = shown(SHARP * codes[probe][:, None], codes[probe][:, None], probe, heads.probe_roles(),
                 mask=masks.causal() & ~masks.window(0, 0))  # fmt: skip
    assert best(same).name == "duplicate token"
    assert best(same).n == 180


def test_what_follows_a_token_may_be_the_query_itself():
    found = {
        finding.name: finding
        for finding in heads.gather_role_evidence(torch.eye(3), [7, 7, 8], roles=heads.probe_roles()).findings()[0]
    }
    assert (found["induction"].n, found["induction"].score) == (1, 1.0)
    assert (found["duplicate token"].n, found["duplicate token"].score) == (1, 0.0)


def test_rare_words():
    counts = dict.fromkeys(WORDS, 50) | {"the": 900, ",": 1, "slept": 3}
    tokens = heads.Tokens.from_lists(WORDS, counts=counts)
    ids = [int(word == "slept") for word in WORDS]
    evidence = shown(SHARP * one_hot([1] * len(WORDS), 2), one_hot(ids, 2), tokens)
    found = best(evidence)
    assert (found.name, found.n) == ("rare word", len(WORDS))
    assert "by chance 0.07" in str(found)
    without = shown(SHARP * one_hot([1] * len(WORDS), 2), one_hot(ids, 2), WORDS)
    assert "rare word" not in {finding.name for finding in without.findings()[0]}


def test_a_word_that_is_rare_in_a_short_text_is_no_role():
    tokens = heads.Tokens.from_lists(["a", "b"], counts={"a": 9})
    uniform = torch.zeros(2, 4)
    found = {finding.name: finding for finding in shown(uniform, uniform, tokens).findings()[0]}["rare word"]
    assert (found.score, found.chance, found.holds) == (pytest.approx(0.5), pytest.approx(0.5), False)


def test_heads_that_do_nothing_of_the_kind_have_no_role():
    query, key = 3 * torch.randn(1, 6, 200, 8), torch.randn(1, 6, 200, 8)
    tokens = torch.randint(0, 50, (200,))
    assert shown(query, key, tokens, mask=masks.causal()).holding() == [[]] * 6


def test_each_head_has_its_own():
    length = 64
    pairs = [at_offset(length, offset) for offset in (-1, 2, 0)]
    query, key = (torch.stack(side)[None] for side in zip(*pairs, strict=True))
    names = [found[0].name for found in shown(query, key, range(length)).holding()]
    assert names == ["previous token", "offset +2", "self"]


def test_an_offset_that_few_rows_have_is_not_the_best():
    """In a text of 10, offset 8 has two rows, both of which attend there; offset -2 has more."""
    weights = torch.full((1, 10, 10), 0.1)
    weights[0, 0], weights[0, 1] = one_hot(8, 10), one_hot(9, 10)
    for row in range(2, 10):
        weights[0, row] = 0.6 * one_hot(row - 2, 10) + 0.04
    named = {finding.name: finding for finding in heads.gather_role_evidence(weights, range(10)).findings()[0]}
    assert named["offset -2"].n == 8
    assert "offset +8" not in named


@pytest.mark.parametrize("tile", [dense_weights.MAX_TILE_WEIGHTS, 30])
def test_numbers_are_as_good_as_queries_and_keys(monkeypatch, tile):
    monkeypatch.setattr(dense_weights, "MAX_TILE_WEIGHTS", tile)
    query, key = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 30, 8)
    tokens = torch.randint(0, 9, (2, 30))
    tokens[0, 25:] = -1
    whole, lens = lenses.Weights(), heads.Roles(tokens)
    seen = regard.observe(query, key, key, whole, lens, mask=masks.causal())
    numbers = heads.gather_role_evidence(seen[whole], tokens, mask=masks.causal())
    torch.testing.assert_close(numbers.scores, seen[lens].scores, rtol=1e-5, atol=1e-5)
    assert numbers.rows.equal(seen[lens].rows)
    torch.testing.assert_close(numbers.chances, seen[lens].chances)
    assert numbers.queries == seen[lens].queries == 55


def test_many_tiles_are_as_good_as_one():
    query, key, tokens = torch.randn(1, 2, 1500, 8), torch.randn(1, 2, 1500, 8), torch.randint(0, 300, (1500,))
    keep = torch.rand(2, 1500, 1500) < 0.5
    keep[:, :, 0] = True
    for mask in (masks.causal() & masks.window(before=200), keep):
        whole, lens = lenses.Weights(), heads.Roles(tokens)
        seen = regard.observe(query, key, key, whole, lens, mask=mask)
        numbers = heads.gather_role_evidence(seen[whole], tokens, mask=mask)
        torch.testing.assert_close(numbers.scores, seen[lens].scores, rtol=1e-4, atol=1e-4)
        assert numbers.rows.equal(seen[lens].rows)
        torch.testing.assert_close(numbers.chances, seen[lens].chances)


def test_positions_that_leave_gaps():
    """Keys at even positions only: offset -1 has no key, offset -2 has."""
    query, key = torch.randn(2, 3, 12, 8), torch.randn(2, 3, 12, 8)
    places = torch.stack([torch.arange(12) * 2, torch.arange(12) * 3])
    lens, whole = heads.Roles(range(12)), lenses.Weights()
    seen = regard.observe(query, key, key, lens, whole, query_positions=places, key_positions=places)
    named = {finding.name: finding for finding in seen[lens].findings()[0]}
    assert "previous token" not in named
    numbers = dict(zip([role.name for role in seen[lens].roles], range(99), strict=False))
    for offset, sequence, step in (("offset -2", 0, 1), ("offset +3", 1, -1), ("offset -6", slice(None), None)):
        at = numbers[offset]
        if step is None:
            expected = seen[whole][0].diagonal(-3, -2, -1).sum(-1) + seen[whole][1].diagonal(-2, -2, -1).sum(-1)
            assert seen[lens].rows[at].tolist() == [19] * 3
        else:
            expected = seen[whole][sequence].diagonal(-step, -2, -1).sum(-1)
            assert seen[lens].rows[at].tolist() == [11] * 3
        torch.testing.assert_close(seen[lens].scores[at], expected.double(), rtol=1e-5, atol=1e-5)


def test_positions_far_from_0():
    query, key = at_offset(50, -1)
    places = torch.arange(1000, 1050)
    found = best(shown(query[10:], key, range(50), query_positions=places[10:], key_positions=places))
    assert (found.name, found.n, round(found.score, 3)) == ("previous token", 40, 1.0)


def test_masks_of_heads_count_each_heads_rows():
    keep = torch.ones(2, 6, 6, dtype=torch.bool)
    keep[1, :, 0] = False
    query = torch.zeros(1, 2, 6, 4)
    evidence = shown(query, query, range(6), mask=keep)
    names = [{finding.name: finding for finding in found} for found in evidence.findings()]
    assert [named["previous token"].n for named in names] == [5, 4]
    assert "sink" in names[0]
    assert "sink" not in names[1]


def test_decoding_looks_at_the_last_rows():
    query, key = at_offset(40, -1)
    evidence = shown(query[30:], key, range(40), mask=masks.causal())
    assert (best(evidence).name, best(evidence).n) == ("previous token", 10)
    uniform = torch.zeros(12, 4)
    last = shown(uniform[10:], uniform, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 11], mask=masks.causal())
    found = {finding.name: finding for finding in last.findings()[0]}["duplicate token"]
    assert (found.n, found.score) == (1, pytest.approx(1 / 11))


def test_a_row_with_nan_spoils_its_head_alone():
    query, key = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)
    query[0, 1, 3] = math.nan
    sound, spoilt = shown(query, key, range(5)).findings()
    assert all(math.isfinite(finding.score) for finding in sound)
    assert any(math.isnan(finding.score) for finding in spoilt)
    assert not any(finding.holds for finding in spoilt)
