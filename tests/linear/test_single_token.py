"""Decoding one token at a time by native code: the whole sequence's results, states that branch, and what it leaves."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import regard
from regard import masks, native
from regard.backends.cpu.token_step import TokenStepInC
from regard.errors import ConfigurationError, ShapeError
from regard.linear import Elu, Identity, LinearState, Relu, UnitNorm, linear_attention_with_state, single_token
from regard.linear.single_token import DeferredState

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")

BATCH, HEADS, KEY_HEADS, LENGTH, PREFILL = 2, 4, 2, 30, 3
UNIT = UnitNorm(Identity())
CASES = {
    "elu": (Elu(), True, None, False),
    "no map named": (None, True, None, False),
    "elu, decay per head": (Elu(), True, "head", False),
    "elu, decay per feature": (Elu(), True, "feature", False),
    "identity": (Identity(), False, None, False),
    "elu, not normalised": (Elu(), False, "head", False),
    "delta rule": (UNIT, False, None, True),
    "gated delta rule": (UNIT, False, "head", True),
    "delta rule, decay per feature": (UNIT, False, "feature", True),
    "removal": (UNIT, False, None, "removal"),
    "removal, decay per head": (Identity(), False, "head", "removal"),
    "removal without beta, decay per feature": (UNIT, False, "feature", "removal alone"),
    "beta per feature": (Identity(), False, "head", "features"),
    "removal, beta per feature": (Identity(), False, "feature", "removal and features"),
}


def problem(case, dim, value_dim):
    """Query, key and value, the options of all calls, and the gates."""
    torch.manual_seed(len(case) + dim)
    feature_map, normalize, decay, delta = CASES[case]
    tensors = {
        "query": torch.randn(BATCH, HEADS, LENGTH, dim),
        "key": torch.randn(BATCH, KEY_HEADS, LENGTH, dim) * 0.3,
        "value": torch.randn(BATCH, KEY_HEADS, LENGTH, value_dim),
    }
    gates = BATCH, KEY_HEADS, LENGTH
    if decay is not None:
        tensors["decay"] = -torch.rand(gates if decay == "head" else (*gates, dim))
        tensors["decay"][:, :, 11] = -torch.inf  # forgets everything
    kind = str(delta)
    if delta and "alone" not in kind:
        tensors["beta"] = 2 * torch.rand((*gates, dim) if "features" in kind else gates)
    if "removal" in kind:
        tensors["removal"] = torch.randn(*gates, dim) * 0.3 / (1 + ("alone" in kind))
    return tensors, {"feature_map": feature_map, "normalize": normalize, "causal": True}


def cut(tensors, part):
    return {name: tensor[:, :, part] for name, tensor in tensors.items()}


def decode(tensors, options, state):
    """The outputs of all tokens after the prefill, and the states after them."""
    outputs, states = [], []
    for position in range(PREFILL, LENGTH):
        output, state = linear_attention_with_state(
            **cut(tensors, slice(position, position + 1)), **options, state=state
        )
        outputs.append(output)
        states.append(state)
    return torch.cat(outputs, 2), states


@pytest.mark.parametrize("dims", [(64, 64), (48, 67), (33, 130), (7, 5)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_whole_sequence(case, dims):
    tensors, options = problem(case, *dims)
    truth, final = linear_attention_with_state(**{name: t.double() for name, t in tensors.items()}, **options)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    found, states = decode(tensors, options, state)
    for ours, exact in ((found, truth[:, :, PREFILL:]), (states[-1].sums, final.sums)):
        scale = exact.abs().max()
        torch.testing.assert_close(ours / scale, exact / scale, atol=2e-6, rtol=0, check_dtype=False)
    counts = [state.count for state in states]
    if min(dims) > 7:
        assert 1 in counts[1:], "a state is written now and then"
    else:
        assert not any(counts), "small ones are written with each token"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if "beta per feature" not in case])
@pytest.mark.parametrize("variant", native.variants())
def test_tokens_of_halves_are_read_as_they_are(monkeypatch, variant, case, dtype):
    tensors, options = problem(case, 48, 67)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    truth, final = linear_attention_with_state(**{name: t.double() for name, t in tensors.items()}, **options)
    with native.using(variant):
        _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
        monkeypatch.setattr(sys.modules["regard.linear.linear_attention"], "make_linear_problem", None)  # one call of C
        found, states = decode(tensors, options, state)
    assert (found.dtype, states[-1].sums.dtype) == (dtype, torch.float32)
    scale = final.sums.abs().max()
    torch.testing.assert_close(states[-1].sums / scale, final.sums / scale, atol=2e-6, rtol=0, check_dtype=False)
    truth, rounding = truth[:, :, PREFILL:], torch.finfo(dtype).eps / 2 * 1.01
    within = 2e-6 * float(truth.abs().max())
    torch.testing.assert_close(found, truth, atol=within, rtol=rounding, check_dtype=False)


@pytest.mark.parametrize("case", ["elu", "gated delta rule"])
def test_every_state_stays_as_it_is(case):
    tensors, options = problem(case, 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    outputs, states = decode(tensors, options, state)
    other = {name: tensor.flip(2) for name, tensor in tensors.items()}
    for position in range(LENGTH - PREFILL - 1):  # each state is continued by another token first
        at = slice(PREFILL + position + 1, PREFILL + position + 2)
        branched, _ = linear_attention_with_state(**cut(other, at), **options, state=states[position])
        again, _ = linear_attention_with_state(**cut(tensors, at), **options, state=states[position])
        torch.testing.assert_close(again, outputs[:, :, position + 1 : position + 2])
        assert not torch.allclose(branched, again)


@pytest.mark.parametrize("case", ["elu, decay per feature", "gated delta rule"])
def test_the_memory_of_states_that_nobody_has_is_written_again(case):
    tensors, options = problem(case, 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    expected, kept = decode(tensors, options, state)
    addresses, outputs = set(), []
    for position in range(PREFILL, LENGTH):
        token = cut(tensors, slice(position, position + 1))
        output, state = linear_attention_with_state(**token, **options, state=state)
        assert isinstance(state, DeferredState)
        addresses.add(state.memory.sums.data_ptr())
        outputs.append(output)
    assert len(addresses) <= 2 < len({each.memory.sums.data_ptr() for each in kept})
    assert torch.equal(torch.cat(outputs, 2), expected)


def test_a_state_is_the_same_before_and_after_its_tokens_are_added_in_place():
    tensors, options = problem("elu, decay per head", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    other = cut(tensors, slice(LENGTH - 1, LENGTH))
    for position in range(PREFILL, LENGTH):
        token = cut(tensors, slice(position, position + 1))
        if isinstance(state, DeferredState) and state.count == state.step.recent_capacity:
            break
        _, state = linear_attention_with_state(**token, **options, state=state)
    assert isinstance(state, DeferredState)
    copied, sums = copy.deepcopy(state), state.sums
    first, after = linear_attention_with_state(**other, **options, state=state)
    assert isinstance(after, DeferredState)
    assert state.count == 0, "they were added in place"
    second, _ = linear_attention_with_state(**other, **options, state=state)
    third, _ = linear_attention_with_state(**other, **options, state=copied)
    assert copied.count > 0, "they were added in new memory, as that of a copy may be shared"
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    torch.testing.assert_close(DeferredState(state.memory, state.count, state.step).sums, sums)
    assert after.memory.sums is state.memory.sums


def test_threads_continue_one_state():
    tensors, options = problem("elu", 64, 64)
    other = cut(tensors, slice(LENGTH - 1, LENGTH))
    _, first = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    outputs = []
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            state = first
            for position in range(PREFILL, PREFILL + 8):  # until its memory is full
                _, state = linear_attention_with_state(
                    **cut(tensors, slice(position, position + 1)), **options, state=state
                )
            assert isinstance(state, DeferredState)
            assert state.count == state.step.recent_capacity
            calls = [threads.submit(linear_attention_with_state, **other, **options, state=state) for _ in range(8)]
            outputs += [call.result()[0] for call in calls]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_states_are_reordered_copied_and_summed_up():
    tensors, options = problem("elu, decay per feature", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    _, states = decode(tensors, options, state)
    state = next(state for state in reversed(states) if state.count)
    assert state.sums.nbytes < state.nbytes <= (1 + single_token.RECENT_SHARE) * state.sums.nbytes
    rows = torch.tensor([1, 1, 0])
    torch.testing.assert_close(state.reorder(rows).sums, state.sums[rows])
    torch.testing.assert_close(state.matrix, state.sums[..., :-1])
    torch.testing.assert_close(state.total, state.sums[..., -1])
    token = cut(tensors, slice(LENGTH - 1, LENGTH))
    expected, _ = linear_attention_with_state(**token, **options, state=state)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        torch.testing.assert_close(copied.sums, state.sums)
        assert torch.equal(linear_attention_with_state(**token, **options, state=copied)[0], expected)


def test_a_state_with_other_rows_refuses_the_tokens_of_before():
    tensors, options = problem("elu", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    _, states = decode(tensors, options, state)
    fewer = states[-2].reorder(torch.tensor([1]))
    with pytest.raises(ShapeError, match=r"it needs the leading axes \(2, 2\)"):
        linear_attention_with_state(**cut(tensors, slice(LENGTH - 1, LENGTH)), **options, state=fewer)


@pytest.mark.parametrize("case", ["elu, decay per feature", "gated delta rule"])
def test_tensors_of_any_strides_follow_each_other(case):
    tensors, options = problem(case, 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    expected, _ = decode(tensors, options, state)
    swapped = {name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in tensors.items()}
    turned = {name: tensor.mT.contiguous().mT for name, tensor in tensors.items()}
    kinds, outputs = (tensors, swapped, turned), []
    for position in range(PREFILL, LENGTH):
        token = cut(kinds[position % 3], slice(position, position + 1))
        output, state = linear_attention_with_state(**token, **options, state=state)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs, 2), expected)


def test_scale_and_feature_map_change_from_token_to_token():
    tensors, options = problem("elu", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    _, (*_, state) = decode(tensors, options, state)
    token = cut(tensors, slice(LENGTH - 1, LENGTH))
    plain = LinearState(state.sums.double(), normalized=True)
    wide = {name: tensor.double() for name, tensor in token.items()}
    for changed in ({"scale": 0.25}, {"feature_map": Identity()}, {"scale": 2.0, "mask": masks.causal()}):
        changed: dict[str, Any] = options | changed
        expected, _ = linear_attention_with_state(**wide, **changed, state=plain)
        found, _ = linear_attention_with_state(**token, **changed, state=state)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_state_changes_the_kind_of_decay_and_the_grad_mode():
    tensors, options = problem("elu, decay per head", 64, 64)
    plain = {name: tensor for name, tensor in tensors.items() if name != "decay"}
    first, second, third = slice(0, 1), slice(1, 2), slice(2, 3)
    _, state = linear_attention_with_state(**cut(tensors, first), **options)
    _, state = linear_attention_with_state(**cut(plain, second), **options, state=state)
    assert isinstance(state, DeferredState)
    found, _ = linear_attention_with_state(**cut(tensors, third), **options, state=state)
    decays = tensors | {"decay": tensors["decay"].clone()}
    decays["decay"][:, :, 1] = 0.0
    expected = regard.linear_attention(**cut(decays, slice(3)), **options)
    torch.testing.assert_close(found, expected[:, :, 2:])
    query, *rest = cut(tensors, third).values()
    query = query.clone().requires_grad_()
    output, _ = linear_attention_with_state(query, *rest[:2], decay=rest[2], **options, state=state)
    torch.testing.assert_close(output, found)
    assert torch.autograd.grad(output.sum(), query)[0].abs().sum() > 0


def test_a_decay_broadcasts_over_the_batch():
    tensors, options = problem("elu, decay per head", 64, 64)
    fixed = -torch.rand(1, KEY_HEADS, 1)
    del tensors["decay"]
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options, decay=fixed)
    found, _ = linear_attention_with_state(
        **cut(tensors, slice(PREFILL, PREFILL + 1)), **options, decay=fixed, state=state
    )
    expected = regard.linear_attention(**cut(tensors, slice(PREFILL + 1)), **options, decay=fixed)
    torch.testing.assert_close(found, expected[:, :, PREFILL:])


def test_the_first_writer_of_a_branch_in_inference_mode():
    tensors, options = problem("elu", 64, 64)
    with torch.inference_mode():
        _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
        _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL, PREFILL + 1)), **options, state=state)
    output, _ = linear_attention_with_state(**cut(tensors, slice(PREFILL + 1, PREFILL + 2)), **options, state=state)
    expected = regard.linear_attention(**cut(tensors, slice(PREFILL + 2)), **options)
    torch.testing.assert_close(output, expected[:, :, -1:])


def test_others_take_the_path_of_sequences(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("native code for one token was called")

    tensors, options = problem("elu", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    token = cut(tensors, slice(PREFILL, PREFILL + 1))
    expected, _ = linear_attention_with_state(**token, **options, state=state)
    with_padding = linear_attention_with_state(**token, **options, state=state, mask=masks.padding([1, 1]))[0]
    torch.testing.assert_close(with_padding, expected)
    monkeypatch.setattr(TokenStepInC, "run", refuse)
    with pytest.raises(AssertionError, match="was called"):
        linear_attention_with_state(**token, **options, state=state, mask=masks.causal())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"decay": torch.full((BATCH, KEY_HEADS, 1), 0.5)}, ConfigurationError, "decay has values up to 0.5"),
        ({"beta": torch.ones(BATCH, KEY_HEADS, 1)}, ConfigurationError, "no sum to divide by"),
        ({"normalize": False}, ConfigurationError, "the state has a total"),
        ({"scale": float("nan")}, ConfigurationError, "scale is nan"),
        ({"key": torch.zeros(BATCH, KEY_HEADS, 2, 64)}, ShapeError, "key has 2 positions and value 1"),
        ({"value": torch.zeros(BATCH, KEY_HEADS, 1, 9)}, ShapeError, "the value dim 64, .* values the dim 9"),
        ({"decay": torch.zeros(BATCH, 3, 1)}, ShapeError, r"decay has the shape \(2, 3, 1\)"),
        ({"causal": False}, ConfigurationError, "state needs an order of the keys"),
    ],
)
def test_errors_are_those_of_sequences(changed, error, message):
    tensors, options = problem("elu", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    token = cut(tensors, slice(PREFILL, PREFILL + 1))
    with pytest.raises(error, match=message):
        linear_attention_with_state(**(token | options | {"state": state} | changed))


def test_beta_out_of_range_is_said():
    tensors, options = problem("delta rule", 64, 64)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    token = cut(tensors, slice(PREFILL, PREFILL + 1)) | {"beta": torch.full((BATCH, KEY_HEADS, 1), 2.5)}
    with pytest.raises(ConfigurationError, match=r"beta has values from 2.5 to 2.5; it needs values in 0..2"):
        linear_attention_with_state(**token, **options, state=state)


@pytest.mark.parametrize("count", range(3))
def test_a_state_goes_on_where_there_is_no_native_code(count, monkeypatch):
    """After one token, two, which fill the memory so that the next adds them to the sums in place, and three."""
    tensors, options = problem("elu", 8, 8)  # 2 tokens of 16 numbers are half of a matrix of 64
    monkeypatch.setattr(single_token, "RECENT_SHARE", 0.5)
    truth = regard.linear_attention(**cut(tensors, slice(PREFILL + count + 2)), **options)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    *tokens, token = [
        {name: tensor.contiguous() for name, tensor in cut(tensors, slice(position, position + 1)).items()}
        for position in range(PREFILL, PREFILL + count + 2)
    ]  # contiguous, so that one step takes all
    for each in tokens:
        _, state = linear_attention_with_state(**each, **options, state=state)
    assert isinstance(state, DeferredState)
    monkeypatch.setattr("regard.backends.cpu.library._found", "it was taken away")
    for _ in range(2):  # the state is as it was
        output, after = linear_attention_with_state(**token, **options, state=state)
        torch.testing.assert_close(output, truth[:, :, -1:], atol=2e-5, rtol=2e-5)
        assert not isinstance(after, DeferredState)


@pytest.mark.parametrize("threads", [1, 2, "of Python's"])
@pytest.mark.parametrize("variant", native.variants())
def test_variants_and_threads(variant, threads, monkeypatch):
    monkeypatch.setattr("regard.backends.cpu.token_step.LEAST_STATE", 1)
    if threads == "of Python's":
        monkeypatch.setattr("regard.backends.cpu.threads._team", lambda: None)
        threads = 2
    tensors, options = problem("gated delta rule", 48, 67)
    truth = regard.linear_attention(**{name: t.double() for name, t in tensors.items()}, **options)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with native.using(variant):
            _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
            found, _ = decode(tensors, options, state)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), truth[:, :, PREFILL:], atol=2e-5, rtol=2e-5)


def test_a_relu_map_is_computed_by_torch():
    tensors, options = problem("elu", 64, 64)
    options["feature_map"] = Relu()
    truth = regard.linear_attention(**tensors, **options)
    _, state = linear_attention_with_state(**cut(tensors, slice(PREFILL)), **options)
    found, states = decode(tensors, options, state)
    torch.testing.assert_close(found, truth[:, :, PREFILL:], atol=2e-5, rtol=2e-5)
    assert not any(isinstance(state, DeferredState) for state in states)
