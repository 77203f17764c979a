"""Worked examples with a change: their numbers are those of the formula with it, in float64."""

import math

import pytest
import torch

from regard.errors import ConfigurationError
from regard.steps import EXAMPLES, WhatIf, worked_example
from regard.steps.live_steps import LiveSteps, StepRequest, pair_names

WEIGHT = 16 * 2**-24
"""Rounding of a weight in float32: half an ulp of a score below 16, of its row's log-sum-exp, and of a quotient."""
CONTEXT = 16 * WEIGHT
"""Of a sum of at most four values below 4 with such weights."""
CHANGED = [name for name, example in EXAMPLES.items() if example.changes]


@pytest.fixture(scope="module")
def live():
    return LiveSteps()


def softmax(scores):
    """The weights of a row; 0 where no key is left."""
    largest = max(scores)
    parts = [0.0 if one == -math.inf else math.exp(one - largest) for one in scores]
    return [part / sum(parts) if sum(parts) else 0.0 for part in parts]


def scores_of(shown, row):
    keys = shown.keys
    table = next(key for key in ("masked_scores", "scaled_scores", "scores") if key in keys)
    return shown[table].numbers[row].tolist()


@pytest.mark.parametrize(
    "name",
    [
        *("bahdanau", "luong-dot", "luong-general", "luong-concat", "luong-location", "coverage", "local-m", "local-p"),
        *("scaled-dot-product", "self-attention", "causal-mask", "strided-mask", "alibi", "rotary", "cache", "flash"),
    ],
)
def test_weights_and_context_are_those_of_the_changed_scores(name):
    """A key is masked, or let in, another gets 2 more: the row is the softmax of what that makes of its scores."""
    before = worked_example(name)
    queries, keys = pair_names(before)
    for row in range(len(queries)):
        scores, plain = scores_of(before, row), before["scores"].numbers[row].tolist()
        bias = before["bias"].numbers[row].tolist() if "bias" in before.keys else [0.0] * len(keys)
        after = worked_example(name, WhatIf(flip=[(row, 0)], add={(row, 1): 2.0}))
        expected = list(scores)
        expected[0] = plain[0] + bias[0] if scores[0] == -math.inf else -math.inf
        expected[1] += 2.0
        weights = torch.tensor(softmax(expected), dtype=torch.float64)
        context = weights @ before["value"].numbers
        torch.testing.assert_close(after["weights"].numbers[row], weights, rtol=0, atol=WEIGHT)
        torch.testing.assert_close(after["context"].numbers[row], context, rtol=0, atol=CONTEXT)
        others = [other for other in range(len(queries)) if other != row]
        torch.testing.assert_close(
            after["weights"].numbers[others], before["weights"].numbers[others], rtol=0, atol=WEIGHT
        )


def test_the_scale_is_taken_out_of_all_rows_and_heads():
    for name, prefix in (("scaled-dot-product", ""), ("multi-head", "head2.")):
        after = worked_example(name, WhatIf(scale=1.0))
        assert f"{prefix}scaled_scores" not in after.keys
        for row, scores in enumerate(after[f"{prefix}scores"].numbers.tolist()):
            found = after[f"{prefix}weights"].numbers[row].tolist()
            assert found == pytest.approx(softmax(scores), abs=WEIGHT)


def test_heads_of_a_layer_are_joined_with_the_change():
    after = worked_example("multi-head", WhatIf(flip=[(2, 1)]))
    joined = torch.cat([after[f"head{head}.context"].numbers for head in (1, 2)], -1)
    torch.testing.assert_close(after["concatenation"].numbers, joined, rtol=2**-23, atol=0)  # one product in float32
    torch.testing.assert_close(after["output"].numbers, joined @ after["output_projection"].numbers)
    assert after["head1.weights"].numbers[2, 1] == after["head2.weights"].numbers[2, 1] == 0


def test_a_ring_merges_what_a_change_leaves_in_each_hop():
    before = worked_example("ring")
    query, key, value = (before[name].numbers for name in ("query", "key", "value"))
    after = worked_example("ring", WhatIf(flip=[(1, 0), (1, 3)], add={(1, 2): 1.0}))
    scores = query[3] @ key.T + torch.tensor([-math.inf, 0.0, 1.0, -math.inf], dtype=torch.float64)
    expected = scores.softmax(-1) @ value
    torch.testing.assert_close(after["context"].numbers[1], expected, rtol=0, atol=CONTEXT)
    assert torch.equal(after["context"].numbers[0], before["context"].numbers[0])


def test_a_key_of_linear_attention_is_masked_for_all_queries_and_never_enters_the_state():
    after = worked_example("linear", WhatIf(drop=[1]))
    query, key = (after[name].numbers.clamp(min=0) for name in ("query", "key"))
    products = (query @ key.T).tril()
    products[:, 1] = 0.0
    expected = products @ after["value"].numbers / products.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(after["context"].numbers, expected, rtol=0, atol=CONTEXT)
    torch.testing.assert_close(after["readings"].numbers, expected, rtol=0, atol=CONTEXT)


@pytest.mark.parametrize("name", CHANGED)
def test_every_key_of_every_query_can_be_masked_and_let_in(live, name):
    mechanism = f"example:{name}"
    plain = live.answer(StepRequest(mechanism))
    kind = "drop" if plain["drops"] else "flip"
    for row in range(1, max(1, len(plain["queries"])) + 1):
        attended = live.answer(StepRequest(mechanism, word=row))["attended"]
        all_masked = tuple(f"{kind}={key}" for key, sees in enumerate(attended, start=1) if sees)
        for changes in ((f"{kind}=1",), (f"{kind}={len(attended)}",), all_masked):
            answer = live.answer(StepRequest(mechanism, word=row, changes=changes))
            changed = {int(change.split("=")[1]) for change in changes}
            expected = [sees != (key in changed) for key, sees in enumerate(attended, start=1)]
            assert answer["attends"] == expected
            assert answer["attended"] == attended
            assert "NaN" not in str(answer["tables"])
            rows = [one["cells"] for table in answer["tables"] for one in table["rows"]]
            assert any(isinstance(cell, list) for cells in rows for cell in cells)


@pytest.mark.parametrize(
    ("name", "what_if", "message"),
    [
        ("linear", WhatIf(flip=[(0, 0)]), "'linear' has no flip to change; it takes drop"),
        ("delta-rule", WhatIf(flip=[(0, 0)]), "'delta-rule' has no flip to change; it takes no change"),
        ("luong-location", WhatIf(score="dot"), "'luong-location' has no score to change; it takes flip, add"),
        ("scaled-dot-product", WhatIf(flip=[(0, 3)]), "names a query or key that is not there: there are 3"),
    ],
)
def test_a_change_that_an_example_does_not_take_says_so(name, what_if, message):
    with pytest.raises(ConfigurationError, match=message):
        worked_example(name, what_if)


def test_a_query_that_is_not_there_says_so(live):
    with pytest.raises(ConfigurationError, match="query 4 is not there: the worked example has 3, counted from 1"):
        live.answer(StepRequest("example:scaled-dot-product", word=4, changes=("flip=1",)))
