"""`regard.observe` and the `Weights` lens."""

import gc
import math
import subprocess
import weakref

import numpy as np
import pytest
import torch

import regard
from regard import biases, lenses, masks, scores
from regard.errors import ConfigurationError
from regard.lenses import weights as weights_module
from regard.lenses.weights import lazy_zeros


def tensors(m: int = 4, n: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 6, m, 5), torch.randn(2, 3, n, 5), torch.randn(2, 3, n, 7)


def naive(query: torch.Tensor, key: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    logits = query @ key.repeat_interleave(2, -3).mT / math.sqrt(5)
    return logits.softmax(-1) if keep is None else logits.masked_fill(~keep, -math.inf).softmax(-1).nan_to_num()


def test_the_weights_are_the_softmax():
    query, key, value = tensors()
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights)
    torch.testing.assert_close(seen[weights], naive(query, key))
    torch.testing.assert_close(seen[weights] @ value.repeat_interleave(2, -3), seen.output)
    output, lse = regard.attention_with_lse(query, key, value)
    assert seen.output.equal(output)
    assert seen.lse.equal(lse)


def test_masked_weights_are_zero():
    query, key, value = tensors(5, 3)
    keep = masks.causal().dense(5, 3)
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, mask=masks.causal())
    torch.testing.assert_close(seen[weights], naive(query, key, keep))
    assert seen[weights][..., :2, :].eq(0).all()
    assert seen[weights].masked_select(~keep).eq(0).all()


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(1, 3), slice(None)),
        (slice(None), slice(2, 5)),
        (slice(0, 1), slice(5, 6)),
        (slice(-2, None), slice(None, -3)),
        (slice(None, None, 2), slice(1, None, 2)),
        (slice(2, 2), slice(None)),
    ],
)
def test_a_rectangle_is_a_part_of_the_whole(rows, columns):
    query, key, value = tensors()
    whole, part = lenses.Weights(), lenses.Weights(rows, columns)
    seen = regard.observe(
        query, key, value, whole, part, mask=masks.causal() & masks.padding(lengths=[6, 3]), bias=torch.randn(6, 1, 6)
    )
    torch.testing.assert_close(seen[part], seen[whole][..., rows, columns])


def test_every_score_can_be_observed():
    query, key, value = tensors()
    for score in (scores.General(5, 5), scores.Additive(5, 5, 3), scores.Location(5, 6)):
        weights = lenses.Weights()
        seen = regard.observe(query, key, value, weights, score=score)
        torch.testing.assert_close(seen[weights].sum(-1), torch.ones(2, 6, 4))
        torch.testing.assert_close(seen[weights] @ value.repeat_interleave(2, -3), seen.output)


def test_a_sink_takes_its_share():
    query, key, value = tensors()
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, sinks=torch.zeros(6))
    torch.testing.assert_close(1 - seen[weights].sum(-1), (-seen.lse).exp())


def test_weights_are_those_before_dropout():
    query, key, value = tensors()
    weights = lenses.Weights()
    torch.testing.assert_close(regard.observe(query, key, value, weights, dropout_p=0.5)[weights], naive(query, key))


def test_gradients_flow_through_the_weights_and_not_from_masked_nan():
    query, key, value = (tensor.double().requires_grad_() for tensor in tensors())
    weights, mask = lenses.Weights(), masks.padding(lengths=[4, 5])

    def gradient(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shown = regard.observe(query, key, value, weights, mask=mask)[weights]
        return torch.autograd.grad(shown.square().sum(), (query, key))

    bad = key.detach().clone()
    bad[..., 5:, :] = math.nan
    for poisoned, clean in zip(gradient(bad.requires_grad_()), gradient(key), strict=True):
        assert poisoned.equal(clean)


def test_rows_that_see_nan_show_it():
    query, key, value = tensors(6, 6)
    key[:, :, 3] = math.nan
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, mask=masks.causal())
    assert seen[weights][..., 3:, :].isnan().all()
    torch.testing.assert_close(seen[weights][..., :3, :].sum(-1), torch.ones(2, 6, 3))


def test_without_lenses():
    assert regard.observe(*tensors()).results == {}


def test_equal_lenses_are_one():
    assert lenses.Weights(slice(1, 2)) == lenses.Weights(slice(1, 2))
    assert len({lenses.Weights(slice(1, 2)), lenses.Weights(slice(1, 2)), lenses.Weights()}) == 2
    seen = regard.observe(*tensors(), lenses.Weights(slice(1, 2)))
    assert seen[lenses.Weights(slice(1, 2))].shape == (2, 6, 1, 6)


def test_slices_only():
    with pytest.raises(ConfigurationError, match=r"Weights needs rows as a slice, such as slice\(0, 5\); it is 3"):
        lenses.Weights(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Weights needs columns as a slice"):
        lenses.Weights(columns=[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (
            slice(None, None, -1),
            r"with a step of at least 1, such as slice\(0, 5\); .* flip the result instead, as with",
        ),
        (slice(None, None, 0), r"with a step of at least 1, .*it is slice\(None, None, 0\)"),
        (slice(0.0, 3), r"of whole numbers, such as slice\(0, 5\); it is slice\(0\.0, 3, None\)"),
        (slice("a"), "of whole numbers"),
    ],
)
@pytest.mark.parametrize("name", ["rows", "columns"])
def test_slices_of_whole_numbers_forwards(name, choice, said):
    with pytest.raises(ConfigurationError, match=f"Weights needs {name} as a slice {said}"):
        lenses.Weights(**{name: choice})


def test_other_whole_numbers_are_equal_lenses():
    others = lenses.Weights(slice(np.int64(1), torch.tensor(3)), slice(True, 3))
    assert others == lenses.Weights(slice(1, 3), slice(1, 3))
    assert len({others, lenses.Weights(slice(1, 3), slice(1, 3))}) == 1


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (0, 3, 4), (2, 0, 2, 3, 4)])
@pytest.mark.parametrize(
    "lens", [lenses.Weights(), lenses.Weights(slice(0, 2)), lenses.Weights(columns=slice(0, 0)), lenses.Alignment()]
)
def test_an_empty_batch(shape, lens):
    empty = torch.zeros(shape)
    shown = regard.observe(empty, empty, empty, lens, mask=masks.causal())[lens]
    if isinstance(shown, torch.Tensor):
        assert shown.shape == torch.randn(*shape[:-2], 3, 3)[..., lens.rows, lens.columns].shape
    else:
        assert [part.shape for part in shown] == [(*shape[:-2], 3), (*shape[:-2], 5, 2)]


class Own(biases.Bias):
    """A bias that is no dataclass, and lists its parameters itself."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def values(self, grid):
        return grid.cut(self.table)

    def parameters(self):
        return (self.table,)

    def with_parameters(self, tensors):
        return Own(*tensors)


@pytest.mark.parametrize("lens", [lenses.Weights(), lenses.Weights(slice(0, 3))])
def test_gradients_flow_to_a_bias_of_the_callers_own(lens):
    query, key, value = (tensor.double() for tensor in tensors())
    table = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    seen = regard.observe(query, key, value, lens, bias=Own(table))
    (got,) = torch.autograd.grad(seen[lens].square().sum(), table)
    logits = query @ key.repeat_interleave(2, -3).mT / math.sqrt(5) + table
    (expected,) = torch.autograd.grad(logits.softmax(-1)[..., lens.rows, :].square().sum(), table)
    torch.testing.assert_close(got, expected)


def test_the_default_device_is_not_asked(warm_python):
    """In a process of its own: the allocations that tests poison do not follow the default device."""
    script = (
        "import torch, regard; q, whole = torch.zeros(2, 4), regard.lenses.Weights(); torch.set_default_device('meta');"
        "seen = regard.observe(q, q, q, whole); assert seen[whole].tolist() == [[0.5, 0.5]] * 2"
    )
    done = subprocess.run([*warm_python, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("differentiable", [False, True])
def test_a_row_whose_only_score_is_minus_infinity_has_no_weight(dtype, differentiable):
    """In a rectangle and in the whole matrix: the infinite key was replaced by 0, so that its score is finite."""
    query = torch.tensor([[-1.0], [1.0]], dtype=dtype, requires_grad=differentiable)
    key, value = torch.tensor([[math.inf]], dtype=dtype), torch.ones(1, 1, dtype=dtype)
    whole, part = lenses.Weights(), lenses.Weights(slice(0, 1))
    seen = regard.observe(query, key, value, whole, part)
    assert seen.lse[0].item() == -math.inf
    assert seen[whole][0].tolist() == seen[part][0].tolist() == [0.0]


def test_what_is_shown_lives_no_longer_than_it_is_held(monkeypatch):
    """Freed by reference counting, before the next garbage collection."""
    made = []

    def kept(*sizes, **options):
        zeros = lazy_zeros(*sizes, **options)
        made.append(weakref.ref(zeros.untyped_storage()))
        return zeros

    monkeypatch.setattr(weights_module, "lazy_zeros", kept)
    gc.disable()
    try:
        seen = regard.observe(*tensors(), lenses.Weights())
        assert made[0]() is not None
        del seen
        assert made[0]() is None
    finally:
        gc.enable()
