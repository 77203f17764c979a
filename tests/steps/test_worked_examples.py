import math

import pytest
import torch

import regard
from regard import approximations, linear, masks, scores
from regard.errors import ConfigurationError
from regard.linear import FavorPlus
from regard.steps import EXAMPLES, worked_example
from regard.steps.worked_examples import TITLES

E, T = math.e, math.tanh
CHOICES = E**4 + 6 * E**2 + 1
"""Of all choices of three keys with the scores 1, 0 and 1, and a factor e for equal neighbours."""
CHOSEN = (E**4 + 3 * E**2) / CHOICES


def _covered() -> list[float]:
    """tanh of (2, 0), (1, -1), (3, 2) and the first step's weight of each times (-1, -2), times (1, 2)."""
    sums = (2, 0), (1, -1), (3, 2)
    first = [math.exp(math.tanh(a) + 2 * math.tanh(b)) for a, b in sums]
    shares = [one / sum(first) for one in first]
    return [math.tanh(a - of) + 2 * math.tanh(b - 2 * of) for (a, b), of in zip(sums, shares, strict=True)]


def _first_parents() -> list[float]:
    """What the first word's parent is: itself, as a root, or the second or third word, over all 16 trees."""
    root = E * ((1 + E**2 + E) * (E + 2 * E**2) - E**3)  # the others are not each other's parents
    second = 1 * (E**2 * (E + 2 * E**2) + E * E**2)  # which is a root, or below the third, a root
    third = E * (E**2 * (1 + E**2 + E) + E**2 * E**2)  # likewise
    return [each / (root + second + third) for each in (root, second, third)]


def _first_parents_without_crossings() -> list[float]:
    """Likewise over the 12 trees in which no arc between the first and the third word leads over a root."""
    root = E * ((1 + E**2 + E) * (E + 2 * E**2) - E**3 - E**2 * E)
    second = 1 * E**2 * (E + 2 * E**2)  # the third is below the second or a root
    third = E * E**2 * (1 + E)  # a root, whose child, or the first one's, the second is
    return [each / (root + second + third) for each in (root, second, third)]


def test_each_title_of_the_file_is_of_an_example_and_in_its_place():
    assert list(TITLES) == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_inputs_are_small_whole_numbers_and_texts_are_in_both_languages(name):
    steps = worked_example(name)
    for table in steps.tables:
        if table.key.split(".")[-1] in ("query", "key", "value", "input", "memory") or "projection" in table.key:
            assert table.numbers.abs().max() <= 4, table.key
            assert torch.equal(table.numbers, table.numbers.round()), table.key
    assert steps.title.ko
    assert steps.title.en in steps.text("en")
    assert all(table.title.ko for table in steps.tables)


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        ("bahdanau", "scores", [[T(2), T(1) - 2 * T(1), T(3) + 2 * T(2)]]),  # of (2, 0), (1, -1), (3, 2)
        ("coverage", "masked_scores", [_covered()]),
        ("luong-dot", "weights", [[E / (E + 1 + E**2), 1 / (E + 1 + E**2), E**2 / (E + 1 + E**2)]]),
        ("luong-general", "scores", [[2, 1, 2]]),
        (
            "luong-concat",
            "scores",
            [[2 * T(2) - T(1), 2 * T(1) - T(1), 2 * T(3)]],
        ),
        ("luong-location", "scores", [[2, 1, 0]]),
        ("local-m", "masked_scores", [[-math.inf, 3, 2, 1]]),
        ("local-p", "centre", [[2]]),
        ("local-p", "masked_scores", [[-math.inf, 3 - 2, 2, 1 - 2]]),
        ("projections", "scaled_scores", [[0, 2, 0], [2, 0, 1], [1, 2, 0]]),
        ("cross-attention", "scaled_scores", [[2, 1, 0], [0, 3, 0]]),
        ("multi-head", "head1.scores", [[0, 4, 0], [2, 0, 0], [0, 4, 0]]),
        ("multi-head", "head2.scores", [[1, 0, 0], [0, 0, 4], [0, 0, 4]]),
        ("scaled-dot-product", "scaled_scores", [[1, 0, 1], [1, 1, 2], [1, 2, 1]]),
        ("saturation", "scores", [[8, 6, 4]]),
        ("causal-mask", "mask", [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        ("prefix-mask", "mask", [[1, 1, 0], [1, 1, 0], [1, 1, 1]]),
        ("document-mask", "mask", [[1, 0, 0], [1, 1, 0], [0, 0, 1]]),
        ("window-mask", "mask", [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        ("strided-mask", "weights", [[1, 0, 0, 0, 0, 0], [1 / (1 + E**2), 1 / (1 + E**-2), 0, 0, 0, 0]]),
        ("fixed-mask", "mask", [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]]),
        ("dilated-mask", "mask", [[1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0]]),
        ("global-tokens", "mask", [[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0]]),
        ("absolute-positions", "scores", [[5, 4, 3], [4, 5, 0], [3, 0, 5]]),
        ("absolute-positions", "plain_weights", [[E**4 / (2 * E**4 + 1), 1 / (2 * E**4 + 1), E**4 / (2 * E**4 + 1)]]),
        ("padding-mask", "mask", [[1, 1, 0]] * 3),
        ("sparsemax", "weights", [[1 / 2, 0, 1 / 2], [0, 1, 0], [0, 1 / 2, 1 / 2]]),
        ("top-scores", "weights", [[1 / 2, 0, 1 / 2], [0, E / (E + 1), 1 / (E + 1)], [0, 1 / 2, 1 / 2]]),
        ("softmax1", "weights", [[E / (2 + 2 * E), 1 / (2 + 2 * E), E / (2 + 2 * E)]]),
        ("sigmoid", "weights", [[1 / 2, 1 / (1 + E), 1 / 2]]),
        ("stick-breaking", "weights", [[E / (1 + E), 0, 0], [1 / (2 + 2 * E**2), E**2 / (1 + E**2), 0]]),
        ("chosen-keys", "mask", [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0]]),
        ("linear-chain", "weights", [[CHOSEN, 1 - 4 * E**2 / CHOICES, CHOSEN]]),
        ("dependency-trees", "weights", [_first_parents()]),
        ("projective-trees", "weights", [_first_parents_without_crossings()]),
        ("hash-collisions", "weights", [[1, 1 / 4, 0], [1 / 4, 1, 1 / 4]]),
        (
            "landmarks",
            "weights",
            [
                [1, 0, 0, 0, 0, 0],
                [1 / (1 + E**2), 1 / (1 + E**-2), 0, 0, 0, 0],
                [1 / (1 + E), 1 / (1 + 1 / E), 0, 0, 0, 0],
                [1 / (2 + 2 / E), 1 / (2 + 2 * E), 0, 1 / 2, 0, 0],  # the landmark and its own key have one score
            ],
        ),
        ("adaptive-span", "bias", [[0, math.log(2 / 3), math.log(1 / 3)], [math.log(2 / 3), 0, math.log(2 / 3)]]),
        ("alibi", "bias", [[0, -1, -2], [-1, 0, -1], [-2, -1, 0]]),
        ("relative-bias", "bias", [[0, 2, 2], [-1, 0, 2], [-1, -1, 0]]),
        ("rotary", "query", [[1, 0], [0, 1], [-1, 0]]),
        ("attention-sink", "exponentials", [[E, 1, E, E], [1, E**2, E, E], [E, E**2, E**2, E]]),
        ("flash", "running.1", [[1, 1 + 1 / E, 1, 2 / E], [2, 1 + E**-2, 1, 2 * E**-2]]),
        ("flash", "shrink.2", [[1 / E], [1]]),
        ("flash", "running.2", [[2, 1 + 2 / E + E**-2, 3 + 3 / E, 1 + 2 / E + 2 * E**-2]]),  # of the first query
        ("linear", "weights", [[1, 0, 0], [0, 1, 0], [1 / 5, 2 / 5, 2 / 5]]),
        ("linear", "state.3", [[4, 1, 2], [3, 5, 3]]),
        ("linear", "readings", [[1, 0], [0, 2], [7 / 5, 6 / 5]]),
        ("linear-decay", "state.3", [[3, 4], [0, 0]]),
        ("delta-rule", "state.2", [[1, 0], [0, 2]]),
        ("delta-rule", "state.3", [[3, 1], [0, 2]]),
        ("titans", "error.3", [[4 - 2, 0 - 2]]),
        ("titans", "step.3", [[2 / 2 - 2, 0 / 2 + 2], [0, 4 / 2]]),
        ("titans", "state.3", [[4 / 2 - 1, 2], [0, 4 / 2 + 2]]),
        ("titans", "readings", [[4, 0], [0, 4], [1 + 0, 2 + 4]]),
        ("ttt-linear", "error.1", [[1 + 1 - 2, 0 + 1 - 1, 0 - 1 + 1, 0 - 1 - 1]]),
        # less the mean -1/2 of the error, and what lies along (1, 1, -1, -1), the half of it
        ("ttt-linear", "gradient.1", [[1 / 2 - 1 / 2, 1 / 2 - 1 / 2, 1 / 2 + 1 / 2, -2 + 1 / 2 + 1 / 2]]),
        ("ttt-linear", "model.1", [[1, 1, -2, 0], [1, -1, 1, -1]]),
        ("ttt-linear", "readings", [[1 + 1.5**-0.5, 1.5**-0.5, -2 * 1.5**-0.5, 0]]),
        ("s4d", "state_factor", [[0, 1 / 2]]),
        ("s4d", "input_factor", [[1, 1 / 2]]),
        ("s4d", "state.2", [[-1, 2]]),
        ("s4d", "state.4", [[1 / 4 + 1, -1 / 2 + 1 / 2]]),
        ("s4d", "outputs", [[8 + 4], [-2], [-2], [5 / 2 + 1]]),
        ("s4d", "kernel", [[2], [-1 / 2], [-1 / 2], [1 / 8]]),
        ("s4d", "convolution", [[8 + 4], [-2], [-2], [4 / 8 + 2 + 1]]),
        ("performer", "key_features", [[0.5**0.5] * 2, [0.5**0.5 * E**0.5, 0.5**0.5 * E**-1.5]]),  # of the first two
        ("performer", "scores", [[1, (E**0.5 + E**-1.5) / 2, (E**0.5 + E**-1.5) / 2]]),
        ("linformer", "mixed_key", [[1, 0, 0, 1], [0, 1, 1, 1]]),
        ("linformer", "shares", [[E / (E + 1), 1 / (E + 1)], [1 / (E + 1), E / (E + 1)]]),
        ("soft", "landmarks", [[1 / 2], [2]]),
        ("soft", "landmark_kernel", [[E ** (-1 / 8), E**-2], [E ** (-1 / 8), E ** (-1 / 2)], [E ** (-9 / 8), 1]]),
        ("soft", "inverse_kernel", [[1 / (1 - E ** (-9 / 4)), -(E ** (-9 / 8)) / (1 - E ** (-9 / 4))]]),
        ("soft", "gaussian_weights", [[1, E ** (-1 / 2), E**-2, E**-2]]),
        ("lara", "samples", [[0], [2]]),
        (
            "lara",
            "sample_exponentials",
            [[E ** (-1 / 2), E ** (-1 / 2), 1, E**-2], [E ** (3 / 2), E ** (-5 / 2), 1, E**2]],
        ),
        ("lara", "nearness", [[1 / 2, 1 / 2], [1 / (1 + E), E / (1 + E)]]),
        ("lara", "sample_densities", [[1 / (1 + E**-2), 1 / (1 + E**-2)]]),
        ("ring", "hop0.masked_scores", [[2, -math.inf], [2, 1]]),
        ("ring", "hop1.log_sum_exp", [[math.log(E**3 + 1)], [math.log(E + 1)]]),
    ],
)
def test_numbers_worked_out_by_hand(name, key, expected):
    numbers = worked_example(name)[key].numbers[: len(expected)]
    torch.testing.assert_close(numbers, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_the_six_steps_of_luong_follow_from_one_another():
    steps = worked_example("luong-dot")
    first, second = steps["context"].numbers[0].tolist()
    torch.testing.assert_close(steps["concatenated"].numbers[0].tolist(), [first, second, 1.0, 0.0])
    left, right = T(first), T(second + 1)  # W_c [c; s] = (c_1 + s_2, c_2 + s_1 - s_2)
    torch.testing.assert_close(steps["attentional"].numbers[0].tolist(), [left, right], rtol=1e-5, atol=1e-6)
    words = [math.exp(left - right), math.exp(left + right), math.exp(right - left)]
    shares = [word / sum(words) for word in words]
    torch.testing.assert_close(steps["prediction"].numbers[0].tolist(), shares, rtol=1e-5, atol=1e-6)
    assert [table.title.en[0] for table in steps.tables if table.title.en[1] == "."] == list("123456")


def test_the_next_state_of_bahdanau_is_halfway_between_candidate_and_state():
    steps = worked_example("bahdanau")
    first, second = steps["context"].numbers[0].tolist()
    torch.testing.assert_close(steps["cell_input"].numbers[0].tolist(), [0.0, 1.0, first, second])
    after = [0.5 * T(first) + 0.5, 0.5 * T(1 - second)]
    torch.testing.assert_close(steps["next_state"].numbers[0].tolist(), after, rtol=1e-5, atol=1e-6)


def test_local_attention_has_the_weights_of_its_window_alone():
    share = E**1 + E**2 + E**-1
    torch.testing.assert_close(
        worked_example("local-p")["weights"].numbers[0].tolist(),
        [0.0, E / share, E**2 / share, E**-1 / share],
        rtol=1e-5,
        atol=1e-6,
    )
    assert worked_example("local-m")["weights"].numbers[0, 0] == 0


def test_heads_read_different_words():
    steps = worked_example("multi-head")
    most = [steps[f"head{head}.weights"].numbers.argmax(-1).tolist() for head in (1, 2)]
    assert most == [[1, 0, 1], [0, 2, 2]]


def test_heads_of_grouped_queries_share_keys():
    steps = worked_example("grouped-query")
    for kind in ("key", "value"):
        first, second, third, fourth = (steps[f"head{head}.{kind}"].numbers for head in (1, 2, 3, 4))
        assert torch.equal(first, second)
        assert torch.equal(third, fourth)
        assert not torch.equal(first, third)
    assert not torch.equal(steps["head1.query"].numbers, steps["head2.query"].numbers)


def test_heads_of_multi_query_attention_have_one_key_head_and_different_weights():
    steps = worked_example("multi-query")
    for kind in ("key", "value"):
        assert torch.equal(steps[f"head1.{kind}"].numbers, steps[f"head2.{kind}"].numbers)
    assert not torch.equal(steps["head1.weights"].numbers, steps["head2.weights"].numbers)


def test_a_step_with_a_cache_is_the_last_row_of_causal_attention():
    step, whole = worked_example("cache"), worked_example("causal-mask")
    for key in ("scores", "weights", "context"):
        torch.testing.assert_close(step[key].numbers, whole[key].numbers[2:], rtol=1e-6, atol=1e-6)
    assert torch.equal(step["cached_key"].numbers, whole["key"].numbers[:2])
    assert torch.equal(step["cached_value"].numbers, whole["value"].numbers[:2])


def dot_product_attention(query, key, value):
    return regard.attention(query, key, value, score=scores.Dot())


def causal_attention(query, key, value):
    return regard.attention(query, key, value, score=scores.Dot(), mask=masks.causal())[2:]


def attention_by_two_features(query, key, value):
    features = FavorPlus(1, 2, matrix=torch.tensor([[1.0], [-1.0]]))
    return regard.linear_attention(query, key, value, feature_map=features)


def attention_to_two_mixtures(query, key, value):
    matrix = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]])
    return regard.attention(query, matrix @ key, matrix @ value)


def titans(query, key, value):
    half = torch.full((3,), 0.5)
    return linear.titans_attention(query, key, value, rate=torch.ones(3), momentum=half, decay=half.log())


def model_trained_on_two_tokens(query, key, value):
    initial = worked_example("ttt-linear")["initial_model"].numbers.float()
    weight, bias, rate = torch.ones(4), torch.zeros(4), torch.ones(2)
    return linear.ttt_attention(
        query, key, value, rate=rate, initial=initial, norm_weight=weight, norm_bias=bias, mini_batch=1
    )


def state_that_turns(value):
    half = torch.tensor(1j) / 2  # which is its factor by the bilinear rule: Δ A / 2 = (Ā - 1) / (Ā + 1)
    told = {"step": torch.tensor([2.0]), "rates": ((half - 1) / (half + 1))[None, None]}
    one = torch.ones(1)
    return linear.diagonal_state_space(value, **told, weights=one[None] + 0j, skip=one, discretization="bilinear")


def soft_attention(query, value):
    return approximations.soft_attention(query, value, landmarks=2)


def lara_attention(query, key, value):
    return approximations.lara_attention(query, key, value, landmarks=2)


@pytest.mark.parametrize(
    ("name", "table", "function"),
    [
        ("titans", "readings", titans),
        ("ttt-linear", "readings", model_trained_on_two_tokens),
        ("s4d", "outputs", state_that_turns),
        ("soft", "context", soft_attention),
        ("lara", "context", lara_attention),
    ],
)
def test_what_recurrences_and_means_make_is_what_the_package_computes(name, table, function):
    steps = worked_example(name)
    tensors = (steps[kind].numbers.float() for kind in ("query", "key", "value", "input") if kind in steps.keys)
    torch.testing.assert_close(steps[table].numbers.float(), function(*tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "keys"), [("soft", "query"), ("lara", "key")])
def test_the_weights_of_landmarks_and_samples_make_the_context(name, keys):
    steps = worked_example(name)
    torch.testing.assert_close(steps["weights"].numbers @ steps["value"].numbers, steps["context"].numbers)
    assert steps["weights"].columns == steps[keys].rows


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("flash", dot_product_attention),
        ("ring", causal_attention),
        ("performer", attention_by_two_features),
        ("linformer", attention_to_two_mixtures),
    ],
)
def test_the_context_of_parts_and_features_is_that_of_one_call(name, function):
    steps = worked_example(name)
    tensors = (steps[kind].numbers.float() for kind in ("query", "key", "value"))
    torch.testing.assert_close(steps["context"].numbers.float(), function(*tensors), rtol=1e-5, atol=1e-6)


def test_weights_from_a_log_sum_exp_are_those_of_the_softmax():
    steps = worked_example("flash")
    expected = steps["scores"].numbers.softmax(-1)
    torch.testing.assert_close(steps["weights"].numbers, expected, rtol=1e-5, atol=1e-6)


def test_an_unknown_example_lists_those_that_there_are():
    with pytest.raises(ConfigurationError, match="no worked example 'luong'; did you mean 'luong-dot'.*'rotary'"):
        worked_example("luong")


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_line_by_hand_is_about_nothing(name):
    """A product has a term whose factors are not 0, and a quotient is of a number that is not 0."""
    for table in worked_example(name).tables:
        sum_of_terms = table.example.split(": ")[-1].split(" = ")[0]
        terms = [term.split(" · ") for term in sum_of_terms.split(" + ")]
        assert " · " not in sum_of_terms or any("0" not in factors for factors in terms), table.example
        assert not sum_of_terms.startswith("0 / "), table.example


@pytest.mark.parametrize("name", ["scaled-dot-product", "projections", "self-attention", "causal-mask", "linformer"])
def test_no_score_has_more_terms_than_the_one_that_is_written_out(name):
    steps = worked_example(name)
    query, key = (steps[kind].numbers for kind in ("query", "mixed_key" if "mixed_key" in steps.keys else "key"))
    most = int(((query != 0).double() @ (key != 0).double().T).max())
    terms = [term.split(" · ") for term in steps["scores"].example.split(": ")[-1].split(" = ")[0].split(" + ")]
    assert sum("0" not in factors for factors in terms) == most
