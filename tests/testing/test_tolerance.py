import pytest
import torch

from regard.testing import Expected, assert_close, fault


@pytest.fixture
def truth() -> torch.Tensor:
    return torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def expected(truth) -> Expected:
    return Expected(truth, torch.float32, [truth.float()])


def test_a_right_answer_passes(truth, expected):
    assert fault(truth.float(), expected) is None
    assert_close(truth.float() * (1 + 1e-7), expected)


def test_another_summation_order_passes():
    generator = torch.Generator().manual_seed(2)
    left, right = torch.randn(2, 31, 101, generator=generator, dtype=torch.float64)
    forward = (left.float() * right.float()).cumsum(-1)[:, -1]
    backward = (left.float() * right.float()).flip(-1).cumsum(-1)[:, -1]
    truth = (left.float().double() * right.float().double()).sum(-1)
    assert fault(backward, Expected(truth, torch.float32, [forward])) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda truth: truth.mT.contiguous(),
        lambda truth: truth * (1 + 1e-3),
        lambda truth: truth * (1 + 1e-5),
        lambda truth: truth + 1e-5,
        lambda truth: -truth,
        lambda truth: torch.zeros_like(truth),
        lambda truth: truth.roll(1, 0),
        lambda truth: truth.index_put((torch.tensor(1), torch.tensor(2), torch.tensor(3)), torch.tensor(9.0).double()),
        lambda truth: truth.index_put((torch.tensor(1),), torch.tensor(float("nan")).double()),
        lambda truth: truth.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("inf")).double()),
    ],
    ids=["transposed", "1e-3 off", "1e-5 off", "shifted", "sign", "zeros", "rolled", "one element", "nan", "inf"],
)
def test_a_wrong_answer_fails(truth, expected, wrong):
    with pytest.raises(AssertionError, match=r"output: .* over (its|their) budget"):
        assert_close(wrong(truth).float(), expected, "output")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_have_to_be_where_they_are_in_the_truth(truth, value):
    bad = truth.clone()
    bad[1, 2, 3] = value
    expected = Expected(bad, torch.float32, [bad.float()])
    assert fault(bad.float(), expected) is None
    assert "1 of 75 elements (1.33 %) is over its budget; the worst at [1, 2, 3]" in str(fault(truth.float(), expected))
    moved = bad.clone()
    moved[1, 2, 3], moved[1, 2, 4] = bad[1, 2, 4], bad[1, 2, 3]
    assert "2 of 75 elements" in str(fault(moved.float(), expected))
    assert fault((-bad).float(), expected) is not None


def test_the_message_names_the_worst_element(truth, expected):
    wrong = truth.clone()
    wrong[2, 0, 4] += 0.5
    wrong[0, 3, 1] += 0.25
    text = str(fault(wrong.float(), expected))
    assert text.startswith("2 of 75 elements (2.67 %) are over their budget; the worst at [2, 0, 4]: ")
    assert f"{wrong[2, 0, 4].float().item():.9g}, but the truth is {truth[2, 0, 4].item():.9g}; error 0.5" in text
    assert f"budget {expected.budget():.2g}" in text


def test_shape_and_dtype_count(truth, expected):
    assert fault(truth.float()[:2], expected) == "the shape is (2, 5, 5), but it has to be (3, 5, 5)"
    assert fault(truth, expected) == "the dtype is torch.float64, but it has to be torch.float32"
    assert fault(truth[..., None].float(), expected) is not None


def test_the_budget_is_twice_the_plain_error_and_one_rounding():
    truth = torch.tensor([1.0, -4.0], dtype=torch.float64)
    near = torch.tensor([1.0, -4.125])
    assert Expected(truth, torch.float32, [near]).budget() == 0.25 + 4 * torch.finfo(torch.float32).eps
    assert Expected(truth, torch.float32, [truth.float(), near]).budget() > 0.25
    assert Expected(truth, torch.float32).budget() == 4 * torch.finfo(torch.float32).eps
    assert Expected(truth, torch.bfloat16, magnitude=8.0).budget() == 8 * torch.finfo(torch.bfloat16).eps


def test_for_float64_the_error_in_float32_is_scaled():
    truth = torch.tensor([1.0], dtype=torch.float64)
    expected = Expected(truth, torch.float64, [torch.tensor([1.5])])
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert expected.budget() == pytest.approx(2 * 2 * 0.5 * ratio + torch.finfo(torch.float64).eps)
    assert fault(truth + 1e-7, expected) is not None


def test_a_plain_formula_that_overflows_sets_no_budget(truth):
    with pytest.raises(ValueError, match="sets no budget"):
        Expected(truth, torch.float32, [truth.float().fill_(float("nan"))]).budget()


def test_empty_tensors_are_equal():
    assert fault(torch.zeros(0, 3), Expected(torch.zeros(0, 3, dtype=torch.float64), torch.float32)) is None
