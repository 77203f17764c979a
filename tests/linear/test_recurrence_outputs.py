"""Outputs of causal linear attention in one pass, against the recurrence token by token in float64."""

import pytest
import torch
from torch.nn.functional import elu, normalize

import regard
from regard import linear, native
from regard.backends.cpu import recurrence_struct
from regard.errors import ConfigurationError
from regard.linear import recurrence_outputs
from regard.linear.recurrence_outputs import RecurrenceKind

PRIMES = 1, 4, 2, 67, 13, 11
"""Batch, query heads, key heads, tokens, features and value columns: a chunk, and a part of one."""
SEGMENTED = 1, 1, 1, 4229, 5, 3
"""More than one segment, whose states the forward pass stores."""
KINDS = {
    "sums": {},
    "decay per head": {"decay": 3},
    "decay per feature": {"decay": 4},
    "delta": {"beta": 3},
    "delta, decay per head": {"beta": 3, "decay": 3},
    "delta, decay per feature": {"beta": 3, "decay": 4},
    "removal": {"removal": 4},
    "removal, beta and decay": {"removal": 4, "beta": 3, "decay": 3},
}


@pytest.fixture(autouse=True)
def in_native_code():
    if native.why_not() is not None:
        pytest.skip("native code is off")
    recurrence_outputs._passes.clear()


def inputs_of(sizes, kind):
    batch, heads, key_heads, tokens, dim, value_dim = sizes
    torch.manual_seed(tokens)
    key_rows = batch, key_heads, tokens
    named = {
        "query": torch.randn(batch, heads, tokens, dim),
        "key": normalize(torch.randn(*key_rows, dim), dim=-1),
        "value": torch.randn(*key_rows, value_dim),
    }
    for name, axes in KINDS[kind].items():
        numbers = torch.rand(*key_rows, *([dim] if axes == 4 else []))
        named[name] = -numbers / 8 if name == "decay" else normalize(numbers, dim=-1) if name == "removal" else numbers
    return named


def by_token(named, *, features, total, scale):
    """The formula of `linear_attention`, token by token."""
    query, key = named["query"] * scale, named["key"]
    if features == "elu":
        query, key = elu(query) + 1, elu(key) + 1
    value, decay, beta, removal = (named.get(name) for name in ("value", "decay", "beta", "removal"))
    group = query.shape[1] // key.shape[1]
    state, sums, rows = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]), torch.zeros_like(key[:, :, 0]), []
    for t in range(key.shape[2]):
        if decay is not None:
            factor = decay[:, :, t].exp() if decay.ndim == 4 else decay[:, :, t, None].exp()
            state, sums = factor[..., None] * state, factor * sums
        written = value[:, :, t]
        if beta is not None or removal is not None:
            read = (key if removal is None else removal)[:, :, t, :, None]
            written = written - (read * state).sum(-2)
            written = written if beta is None else beta[:, :, t, None] * written
        state, sums = state + key[:, :, t, :, None] * written[..., None, :], sums + key[:, :, t]
        row = query[:, :, t]
        output = (row[..., None] * state.repeat_interleave(group, 1)).sum(-2)
        rows.append(output / (row * sums.repeat_interleave(group, 1)).sum(-1, keepdim=True) if total else output)
    return torch.stack(rows, 2)


def assert_within(found, truth, single):
    """An error of four times what the formula loses in float32, or of four roundings of the largest number."""
    lost = (single.double() - truth).abs().amax().item()
    allowed = 4 * lost + 4 * truth.abs().amax().item() * torch.finfo(torch.float32).eps
    assert (found.double() - truth).abs().amax().item() <= allowed


CASES = {
    **{f"identity, {kind}": (PRIMES, "identity", kind) for kind in KINDS},
    **{
        f"{features}, {kind}": (PRIMES, features, kind)
        for features in ("elu", "normalised elu")
        for kind in ("sums", "decay per head", "decay per feature")
    },
    "segments of the delta rule": (SEGMENTED, "identity", "delta, decay per head"),
    "segments with totals": (SEGMENTED, "normalised elu", "decay per feature"),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_recurrence(case):
    sizes, features, kind = CASES[case]
    total = features == "normalised elu"
    named, found = inputs_of(sizes, kind), []
    options = {"causal": True, "normalize": total, "scale": 0.5}
    options["feature_map"] = linear.Identity() if features == "identity" else linear.Elu()
    for dtype in (None, torch.float64, torch.float32):
        leaves = {name: each.to(dtype).requires_grad_() for name, each in named.items()}
        if dtype is None:
            gates = {name: each for name, each in leaves.items() if name not in ("query", "key", "value")}
            output = recurrence_outputs.recurrence_outputs(
                leaves["query"],
                leaves["key"],
                leaves["value"],
                {**options, **gates},  # pyright: ignore
            )
            assert output is not None
            assert "_RecurrenceOutputs" in str(output.grad_fn)
        else:
            output = by_token(leaves, features=features.split()[-1], total=total, scale=0.5)
        torch.manual_seed(1)
        seed = torch.randn(output.shape).to(output.dtype)
        found.append([output.detach(), *torch.autograd.grad(output, list(leaves.values()), seed)])
    for own, truth, single in zip(*found, strict=True):
        assert_within(own, truth, single)


@pytest.mark.usefixtures("two_threads")
def test_parts_of_values_are_summed(monkeypatch):
    monkeypatch.setattr(recurrence_struct, "LEAST_WORK", 1)
    torch.manual_seed(0)
    leaves = [torch.randn(1, 1, 67, dim, requires_grad=True) for dim in (13, 13, 70)]
    output = regard.linear_attention(*leaves, causal=True)
    seed = torch.randn_like(output)
    whole = RecurrenceKind("elu", True, 1.0).in_full((*leaves, None, None, None))  # pyright: ignore
    pairs = zip(torch.autograd.grad(output, leaves, seed), torch.autograd.grad(whole, leaves, seed), strict=True)
    torch.testing.assert_close(output, whole)
    for own, other in pairs:
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


def test_numbers_are_checked_in_each_call():
    named = inputs_of(PRIMES, "delta, decay per head")
    options = {"causal": True, "normalize": False, "feature_map": linear.Identity()}

    def run(**changed):
        return regard.linear_attention(**{**named, **changed}, **options)

    run()
    for name, wrong in (("decay", 0.5), ("beta", -0.1), ("beta", 2.5)):
        changed = named[name].clone()
        changed[0, 1, 66] = wrong
        with pytest.raises(ConfigurationError, match=f"^{name} has values"):
            run(**{name: changed})
    for name in ("query", "key", "value"):
        changed = named[name].clone()
        changed[0, 0, 40] = -torch.inf
        found = run(**{name: changed}).isnan().any(-1)
        assert found[0, 0, 40]
        assert not found[:, :, :40].any()
        assert not found[:, 2:].any()
        assert found[0, 0, 41].item() == (name != "query")


def test_a_feature_map_hides_no_infinity():
    query, key, value = (torch.randn(1, 1, 7, 5) for _ in range(3))
    key[0, 0, 3] = -torch.inf  # relu of it is 0
    found = regard.linear_attention(query, key, value, feature_map=linear.Relu(), causal=True).isnan().any(-1)
    assert found[0, 0].tolist() == [False] * 3 + [True] * 4


@pytest.mark.parametrize("kind", ["sums", "delta, decay per feature"])
def test_differentiated_twice(kind):
    named = {name: each[:, :, :5].double().float().requires_grad_() for name, each in inputs_of(PRIMES, kind).items()}
    options = {"causal": True, "normalize": False, "feature_map": linear.Identity()}
    leaves = list(named.values())
    output = regard.linear_attention(**named, **options)
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    found = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)  # pyright: ignore
    exact = {name: each.detach().double().requires_grad_() for name, each in named.items()}
    output = by_token(exact, features="identity", total=False, scale=13**-0.5)
    first = torch.autograd.grad(output.square().sum(), list(exact.values()), create_graph=True)
    truth = torch.autograd.grad(sum(each.square().sum() for each in first), list(exact.values()))  # pyright: ignore
    for own, other in zip(found, truth, strict=True):
        torch.testing.assert_close(own.double(), other, atol=1e-4, rtol=1e-4)


def test_no_state_is_made_that_nobody_asks_for(monkeypatch):
    """Neither a final state nor states between segments: of one segment, nothing but the output."""
    made = []
    empty, empty_like = torch.empty, torch.empty_like

    def noted(make):
        def run(*arguments, **options):
            made.append(make(*arguments, **options))
            return made[-1]

        return run

    named = inputs_of(PRIMES, "decay per head")
    regard.linear_attention(**named, causal=True)  # pyright: ignore
    monkeypatch.setattr(torch, "empty", noted(empty))
    monkeypatch.setattr(torch, "empty_like", noted(empty_like))
    output = regard.linear_attention(**named, causal=True)  # pyright: ignore
    monkeypatch.undo()
    assert sum(each.numel() for each in made if each is not output) == 0
