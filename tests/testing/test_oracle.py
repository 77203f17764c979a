"""The oracle and the inputs of the cases agree with the library's own masks and biases, and with themselves."""

import torch

from regard.testing import SOFTMAX, Case, agreement, cases, make_inputs, random_cases
from regard.testing.cases import AXES
from regard.testing.oracle import bias_values


def test_keep_of_the_inputs_is_what_the_library_masks_say():
    for case in cases(2):
        inputs = make_inputs(case)
        problem = inputs.problem()
        keep = problem.keep(problem.grid())
        if keep is not None:
            assert keep.expand(problem.weights_shape).equal(inputs.keep.reshape(problem.weights_shape)), case.id


def test_biases_of_the_inputs_are_what_the_library_biases_say():
    seen = set()
    for case in [*cases(2), *random_cases(200)]:
        if case.bias == "unbiased" or case.dtype not in ("float32", "float64"):
            continue
        inputs = make_inputs(case)
        problem = inputs.problem()
        values = problem.bias_values(problem.grid())
        assert values is not None
        leaves = {name: leaf.detach() for name, leaf in inputs.leaves.items()}
        meant = bias_values(inputs, leaves).expand(inputs.keep.shape).reshape(problem.weights_shape)
        torch.testing.assert_close(values.detach().expand(problem.weights_shape), meant, check_dtype=False)
        seen.add(case.bias)
    assert seen == {"unbiased", *AXES["bias"]} - {"unbiased"}


def test_the_truth_has_finite_gradients_and_approximations_are_near_it():
    """Each way to compute is the formula: not further off than rounding takes it."""
    for case in cases(2):
        if case.dtype != "float32" or case.poison not in ("clean", "masked"):
            assert_finite(case, SOFTMAX.truth(make_inputs(case), with_lse=True).gradients)
            continue
        expected = agreement._expected_results(case, True, SOFTMAX)  # cached: test_agreement.py has asked for it
        truth = expected.truth
        assert_finite(case, truth.gradients)
        for one in expected.approximations:
            torch.testing.assert_close(one.output.double(), truth.output, atol=2e-5, rtol=1e-4)
            for name, gradient in one.gradients.items():
                size = max(truth.gradients[name].abs().max().item() if gradient.numel() else 0.0, 1.0)
                torch.testing.assert_close(gradient.double(), truth.gradients[name], atol=1e-3 * size, rtol=0.0)


def assert_finite(case: Case, gradients: dict[str, torch.Tensor]) -> None:
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    assert not bad or case.poison in ("query", "key", "value"), (case.id, bad)


def test_the_truth_of_many_pairs_is_that_of_its_rows(monkeypatch):
    for case in list(random_cases(60)):
        if case.poison in ("clean", "masked"):
            by_rows = SOFTMAX.truth(make_inputs(case), with_lse=True)
            with monkeypatch.context() as patch:
                patch.setattr("regard.testing.oracle.MAX_ROWWISE_PAIRS", 0)
                at_once = SOFTMAX.truth(make_inputs(case), with_lse=True)
            torch.testing.assert_close(at_once.output, by_rows.output)
            torch.testing.assert_close(at_once.gradients, by_rows.gradients)
