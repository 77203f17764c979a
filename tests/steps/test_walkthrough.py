import math

import pytest
import torch

import regard
from regard import biases, masks, scores
from regard.errors import ConfigurationError, ShapeError
from regard.steps import StepTable, WhatIf, layer_walkthrough, linear_walkthrough, walkthrough, worked_example
from regard.steps.walkthrough import named_cell, telling_cell

SCORES = {
    "dot": scores.Dot,
    "scaled": scores.ScaledDot,
    "general": lambda: scores.General(3, 3),
    "additive": lambda: scores.Additive(3, 3, 7),
    "concat": lambda: scores.Concat(3, 3, 7),
    "location": lambda: scores.Location(3, 11),
}
MASKS = {"none": None, "causal": masks.causal(), "window": masks.causal() & masks.window(before=1)}


def marks(table: StepTable) -> torch.Tensor:
    """Which numbers of a compared table differ."""
    assert table.marked is not None
    return table.marked


def tensors(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [False, True])
def test_context_is_that_of_attention_and_each_table_follows_from_the_one_before(score, mask, bias):
    query, key, value = tensors((5, 3), (5, 3), (5, 2))
    torch.manual_seed(1)
    options = {
        "score": SCORES[score](),
        "mask": MASKS[mask],
        "bias": biases.tensor(tensors((5, 5))[0]) if bias else None,
    }
    steps = walkthrough(query, key, value, **options)
    with torch.no_grad():
        assert torch.equal(steps["context"].numbers, regard.attention(query, key, value, **options).double())
    last = [key for key in ("scores", "scaled_scores", "masked_scores") if key in steps.keys][-1]
    exponentials = steps[last].numbers.exp()
    torch.testing.assert_close(steps["exponentials"].numbers, exponentials, rtol=1e-6, atol=1e-6)
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    torch.testing.assert_close(steps["weights"].numbers, weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steps["weights"].totals, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-6)
    for row in range(5):
        table = steps[f"weighted_values.{row + 1}"]
        by_hand = steps["weights"].numbers[row, :, None] * steps["value"].numbers
        torch.testing.assert_close(table.numbers, by_hand, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(table.totals, steps["context"].numbers[row], rtol=1e-5, atol=1e-6)


def test_scores_of_dot_products_follow_from_query_and_key():
    steps = walkthrough(*tensors((2, 3), (4, 3), (4, 2)))
    by_hand = steps["query"].numbers @ steps["key"].numbers.T
    torch.testing.assert_close(steps["scores"].numbers, by_hand, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steps["scaled_scores"].numbers, by_hand / math.sqrt(3), rtol=1e-5, atol=1e-6)


def test_scores_of_the_general_score_follow_from_its_matrix():
    torch.manual_seed(1)
    steps = walkthrough(*tensors((2, 3), (4, 5), (4, 2)), score=scores.General(3, 5))
    projected = steps["query"].numbers @ steps["score.weight"].numbers
    torch.testing.assert_close(steps["projected_query"].numbers, projected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steps["scores"].numbers, projected @ steps["key"].numbers.T, rtol=1e-5, atol=1e-6)


def test_scores_of_the_additive_score_follow_from_sums_and_tanh():
    torch.manual_seed(1)
    steps = walkthrough(*tensors((2, 3), (4, 5), (4, 2)), score=scores.Additive(3, 5, 7))
    queries = steps["query"].numbers @ steps["score.query_weight"].numbers.T
    keys = steps["key"].numbers @ steps["score.key_weight"].numbers.T
    for row in range(2):
        sums = queries[row] + keys
        torch.testing.assert_close(steps[f"sum.{row + 1}"].numbers, sums, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(steps[f"tanh.{row + 1}"].numbers, sums.tanh(), rtol=1e-5, atol=1e-6)
        by_hand = steps[f"tanh.{row + 1}"].numbers @ steps["score_vector"].numbers[0]
        torch.testing.assert_close(steps["scores"].numbers[row], by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", range(2))
@pytest.mark.parametrize("head", range(4))
def test_one_head_of_one_element_of_grouped_queries(batch, head):
    query, key, value = tensors((2, 4, 3, 5), (2, 2, 3, 5), (2, 2, 3, 2))
    steps = walkthrough(query, key, value, head=head, batch=batch, mask=masks.causal(), bias=biases.alibi(4))
    output = regard.attention(query, key, value, mask=masks.causal(), bias=biases.alibi(4))
    assert torch.equal(steps["context"].numbers, output[batch, head].double())
    assert torch.equal(steps["key"].numbers, key[batch, head // 2].double())
    assert torch.equal(
        steps["bias"].numbers, biases.alibi(4).values(regard.core.grid.Grid.from_lengths(3, 3))[head].double()
    )


def test_sinks_and_softcap():
    query, key, value = tensors((1, 1, 2, 3), (1, 1, 4, 3), (1, 1, 4, 2))
    options = {"sinks": torch.tensor([1.0]), "softcap": 2.0}
    steps = walkthrough(query, key, value, **options)
    assert torch.equal(steps["context"].numbers, regard.attention(query, key, value, **options)[0, 0].double())
    capped = 2 * (steps["scaled_scores"].numbers / 2).tanh()
    torch.testing.assert_close(steps["capped_scores"].numbers, capped, rtol=1e-5, atol=1e-6)
    exponentials = steps["exponentials"]
    assert exponentials.columns[-1] == "sink"
    assert exponentials.totals is not None
    by_hand = exponentials.numbers / exponentials.totals[:, None]
    torch.testing.assert_close(steps["weights"].numbers, by_hand[:, :-1], rtol=1e-5, atol=1e-6)


def test_large_scores_are_shifted_and_a_row_without_keys_is_0():
    query, key, value = torch.full((2, 1), 100.0), torch.tensor([[1.0], [2.0]]), torch.ones(2, 1)
    mask = torch.tensor([[True, True], [False, False]])
    steps = walkthrough(query, key, value, score=scores.Dot(), mask=mask)
    assert steps["exponentials"].title.en == "Exponentials, less the largest score of the row"
    assert steps["exponentials"].numbers.tolist() == [[pytest.approx(math.exp(-100), abs=1e-40), 1], [0, 0]]
    assert steps["weights"].numbers[1].tolist() == [0, 0]
    assert steps["context"].numbers[1].tolist() == [0]


def test_chosen_rows_and_names():
    query, key, value = tensors((5, 3), (4, 3), (4, 2))
    steps = walkthrough(query, key, value, rows=[3], queries=["a", "b", "c", "d", "e"], keys=["w", "x", "y", "z"])
    assert steps["weights"].rows == ("d",)
    assert steps["weights"].columns == ("w", "x", "y", "z")
    assert torch.equal(steps["context"].numbers[0], regard.attention(query, key, value)[3].double())


def test_float64_stays_exact():
    query, key, value = tensors((5, 3), (4, 3), (4, 2), dtype=torch.float64)
    assert torch.equal(walkthrough(query, key, value)["context"].numbers, regard.attention(query, key, value))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("cross", [False, True])
def test_layer_outputs_what_the_layer_does(heads, cross):
    torch.manual_seed(1)
    layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=heads[0], num_kv_heads=heads[1], bias=False)).eval()
    x, memory = tensors((1, 3, 8), (1, 5, 8))
    steps = layer_walkthrough(layer, x, memory if cross else None)
    with torch.no_grad():
        output = layer(x, memory) if cross else layer(x)
    assert torch.equal(steps["output"].numbers, output[0].double())
    prefix = "" if heads[0] == 1 else "head1."
    queries = x[0].double() @ steps["query_projection"].numbers
    dim = 8 // heads[0]
    torch.testing.assert_close(steps[f"{prefix}query"].numbers, queries[:, :dim], rtol=1e-5, atol=1e-6)
    contexts = [steps[f"head{head + 1}.context" if prefix else "context"].numbers for head in range(heads[0])]
    assert torch.equal(steps["concatenation"].numbers, torch.cat(contexts, -1))
    by_hand = steps["concatenation"].numbers @ steps["output_projection"].numbers
    torch.testing.assert_close(steps["output"].numbers, by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention(causal):
    query, key, value = tensors((5, 3), (5, 3), (5, 2))
    steps = linear_walkthrough(query, key, value, causal=causal)
    output = regard.linear_attention(query, key, value, causal=causal)
    torch.testing.assert_close(steps["context"].numbers, output.double(), rtol=1e-5, atol=1e-6)
    products = steps["query_features"].numbers @ steps["key_features"].numbers.T
    products = products.tril() if causal else products
    by_hand = products / products.sum(-1, keepdim=True)
    torch.testing.assert_close(steps["weights"].numbers, by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("what_if", "options"),
    [
        (WhatIf(scale=1.0), {"scale": 1.0}),
        (WhatIf(score="dot"), {"score": scores.Dot()}),
        (WhatIf(score=scores.ScaledDot(3.0)), {"scale": 3.0}),
        (
            WhatIf(flip=[(1, 2)]),
            {"mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]]) > 0},
        ),
        (WhatIf(add={(0, 3): 2.5}), {"bias": 2.5 * torch.eye(3)[:, :1] * torch.eye(4)[3]}),
    ],
    ids=["scale", "name", "module", "flip", "add"],
)
def test_a_what_if_is_attention_with_that_option(what_if, options):
    tensor = tensors((3, 3), (4, 3), (4, 2))
    after = walkthrough(*tensor, what_if=what_if)
    torch.testing.assert_close(
        after["context"].numbers, regard.attention(*tensor, **options).double(), rtol=1e-6, atol=1e-7
    )


def test_marks_are_the_numbers_that_differ():
    tensor = tensors((3, 3), (4, 3), (4, 2))
    before = walkthrough(*tensor)
    after = walkthrough(*tensor, what_if=WhatIf(add={(1, 2): 1.0})).compared(before)
    changed = {table.key: marks(table).any(-1).tolist() for table in after.tables}
    assert changed["query"] == changed["scores"] == [False] * 3
    assert changed["weights"] == changed["context"] == [False, True, False]
    # There were no such tables before: 0 was added to the scores, and they stayed.
    assert marks(after["bias"]).nonzero().tolist() == marks(after["masked_scores"]).nonzero().tolist() == [[1, 2]]
    assert "*" in after.text()
    assert "*" not in before.text()


def test_bad_input_says_what_there_is():
    query, key, value = tensors((2, 3, 4), (2, 3, 4), (2, 3, 4))
    with pytest.raises(ConfigurationError, match="head is 1; there is one, 0"):
        walkthrough(query, key, value, head=1)
    with pytest.raises(ConfigurationError, match="batch is 2; there are 2, 0 to 1"):
        walkthrough(query, key, value, batch=2)
    with pytest.raises(ConfigurationError, match="row is 7; there are 3, 0 to 2"):
        walkthrough(query, key, value, rows=[7])
    with pytest.raises(ShapeError, match="there are 25 keys; the steps are printed for 1 to 24: take a shorter"):
        walkthrough(*tensors((2, 4), (25, 4), (25, 4)))
    with pytest.raises(ShapeError, match="queries has 2 names; it needs a list of 3, one for each of the queries"):
        walkthrough(query, key, value, queries=["a", "b"])
    with pytest.raises(ConfigurationError, match="leave it out"):
        walkthrough(query, key, value, dropout_p=0.1)
    with pytest.raises(ConfigurationError, match="no step 'weight'; did you mean 'weights'"):
        walkthrough(query, key, value)["weight"]
    with pytest.raises(ConfigurationError, match="no step 0; Known: 'context'"):
        walkthrough(query, key, value)[0]  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'additive' has weights, and this attention was not trained with"):
        walkthrough(query, key, value, what_if=WhatIf(score="additive"))
    with pytest.raises(ConfigurationError, match="did you mean 'dot'"):
        walkthrough(query, key, value, what_if=WhatIf(score="dott"))
    with pytest.raises(ConfigurationError, match="there are 3 queries and 3 keys"):
        walkthrough(query, key, value, what_if=WhatIf(flip=[(0, 3)]))
    with pytest.raises(ConfigurationError, match="this score is additive, without a scale"):
        walkthrough(query, key, value, score=scores.Additive(4, 4, 4), what_if=WhatIf(scale=1.0))
    with pytest.raises(ConfigurationError, match="layer is a Linear"):
        layer_walkthrough(torch.nn.Linear(4, 4), query)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="steps are those of one sequence"):
        layer_walkthrough(regard.nn.Attention(regard.nn.Projections(4, num_heads=1)), query)
    projections = regard.nn.Projections(4, num_heads=1)
    gated = regard.nn.Attention(projections, gate=regard.nn.OutputGate(projections))
    with pytest.raises(ConfigurationError, match="layer has an output gate, which the tables of its heads do not show"):
        layer_walkthrough(gated, torch.zeros(1, 2, 4))


def test_the_number_written_out_is_the_first_of_those_with_the_most_terms():
    terms = torch.tensor([[[0.0, 0.0], [0.0, 3.0]], [[1.0, -1.0], [2.0, 2.0]]])
    assert telling_cell(terms) == (1, 0)
    assert telling_cell(torch.zeros(2, 3, 4)) == (0, 0)
    assert named_cell("1 · 1 = 1", (0, 0), ["a"], ["b"]) == "1 · 1 = 1"
    assert named_cell("1 · 1 = 1", (1, 0), ["a", "c"], ["b"]) == "c, b: 1 · 1 = 1"
    assert named_cell("", (1, 0), ["a", "c"], ["b"]) == ""


def test_a_sum_of_weights_is_written_out_for_the_query_that_sees_the_most_keys():
    query, key = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    steps = walkthrough(query, key, torch.tensor([[0.0, 2.0], [0.0, 4.0]]), score=scores.Dot(), mask=masks.causal())
    assert steps["scores"].example == "q1, k2: 1 · 1 + 0 · 0 = 1"
    assert steps["weights"].example == "q2, k1: 2.718 / (2.718 + 1) = 0.731"
    assert steps["context"].example == "q2, 2: 0.731 · 2 + 0.269 · 4 = 2.538"


def test_the_tables_of_a_walkthrough_come_in_the_order_of_its_steps():
    steps = worked_example("luong-dot")
    assert [table.key for table in steps] == list(steps.keys)
