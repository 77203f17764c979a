"""regard.linear_attention against the two definitions in float64: options, masks, shapes, dtypes, states and memory."""

import itertools
from typing import Any

import pytest
import torch

import regard
from regard import masks, native
from regard.errors import ConfigurationError, DeviceError, DtypeError, MaskError, ShapeError
from regard.linear import Elu, FavorPlus, Identity, LinearState, Relu, Softmax, naive
from regard.testing.tolerance import Expected, assert_close

MAPS = [Elu(), Relu(), Identity(), Softmax(), FavorPlus(5, 11, seed=1), FavorPlus(5, 11, seed=1, kernel="relu")]


def inputs(length=7, heads=4, key_heads=2, dims=(5, 3), batch=2, keys=None, dtype=torch.float64):
    keys = length if keys is None else keys
    shapes = (heads, length, dims[0]), (key_heads, keys, dims[0]), (key_heads, keys, dims[1])
    return tuple(torch.randn(batch, *shape, dtype=dtype) for shape in shapes)


def expected(query, key, value, *, feature_map, keep=None, decay=None, normalize=True, scale=1.0):
    features = feature_map(query * scale), feature_map(key)
    return naive.quadratic(*features, value, keep=keep, decay=decay, normalize=normalize)


def lower(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("length", [0, 1, 7, 67])
def test_all_keys(feature_map, normalize, length):
    for queries in (length, 5):
        q, k, v = inputs(queries, keys=length)
        given = {"feature_map": feature_map, "normalize": normalize, "scale": 0.7}
        torch.testing.assert_close(regard.linear_attention(q, k, v, **given), expected(q, k, v, **given))


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("axes", [0, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 7, 67])
def test_causal(feature_map, normalize, axes, length):
    q, k, v = inputs(length)
    features = feature_map(k).shape[-1]
    decay = -torch.rand((2, 2, length, features)[:axes], dtype=torch.float64) if axes else None
    given = {"feature_map": feature_map, "normalize": normalize, "scale": 0.7, "decay": decay}
    ours = regard.linear_attention(q, k, v, causal=True, **given)
    # Weights of either sign may add up to almost 0, and are then as inaccurate as the sum.
    close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6} if normalize and feature_map == Identity() else {}
    torch.testing.assert_close(ours, expected(q, k, v, keep=lower(length), **given), **close)


@pytest.mark.parametrize("axes", [0, 3, 4])
def test_delta_rule(axes):
    q, k, v = inputs(67)
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand((2, 2, 67, 5)[:axes], dtype=torch.float64) if axes else None
    beta = 2 * torch.rand(2, 2, 67, dtype=torch.float64)
    given = {"normalize": False, "feature_map": Identity(), "decay": decay, "beta": beta}
    ours, state = regard.linear_attention_with_state(q, k, v, causal=True, **given)
    theirs, final = naive.step_recurrence(q * 5**-0.5, k, v, decay=decay, beta=beta)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(state.matrix, final)
    assert state.total is None


def test_default_scale():
    q, k, v = inputs()
    for feature_map, normalize, scale in ((Identity(), False, 5**-0.5), (Identity(), True, 1.0), (Elu(), False, 1.0)):
        options = {"feature_map": feature_map, "normalize": normalize}
        ours = regard.linear_attention(q, k, v, **options)
        torch.testing.assert_close(ours, expected(q, k, v, scale=scale, **options))
    torch.testing.assert_close(regard.linear_attention(q, k, v), expected(q, k, v, feature_map=Elu()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", [Elu(), FavorPlus(5, 11, seed=1)], ids=repr)
def test_padding(causal, feature_map):
    q, k, v = inputs()
    lengths = torch.tensor([3, 0])
    symbol = masks.causal() & masks.padding(lengths) if causal else masks.padding(lengths)
    keep = symbol.dense(7, 7)
    ours = regard.linear_attention(q, k, v, feature_map=feature_map, mask=symbol)
    torch.testing.assert_close(ours, expected(q, k, v, feature_map=feature_map, keep=keep))
    assert not ours[1].any()
    as_tensor = (torch.arange(7) < lengths[:, None])[:, None, None]
    for mask in (as_tensor, masks.where(keep=as_tensor), masks.where(ignore=~as_tensor)):
        again = regard.linear_attention(q, k, v, feature_map=feature_map, mask=mask, causal=causal)
        torch.testing.assert_close(again, ours)


def test_padding_on_the_left_with_decay_is_the_text_alone():
    q, k, v = inputs()
    decay = -torch.rand(2, 2, 7, dtype=torch.float64)
    keep = torch.arange(7) >= torch.tensor([0, 3])[:, None]
    ours, state = regard.linear_attention_with_state(q, k, v, causal=True, mask=keep[:, None, None], decay=decay)
    alone, final = regard.linear_attention_with_state(
        q[1:, :, 3:], k[1:, :, 3:], v[1:, :, 3:], causal=True, decay=decay[1:, :, 3:]
    )
    torch.testing.assert_close(ours[1:, :, 3:], alone)
    torch.testing.assert_close(state.matrix[1:], final.matrix)
    assert state.total is not None
    torch.testing.assert_close(state.total[1:], final.total)


IDS = [[0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5], [0, 1, 0, 1, 2, 0, 0, 1, 2, 2, 0]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "ids", [IDS[0], IDS, torch.tensor(IDS)[:, None]], ids=["shared", "batch", "batch and one for all heads"]
)
def test_documents(causal, ids):
    q, k, v = inputs(11, batch=3)
    symbol = masks.documents(ids) & masks.causal() if causal else masks.documents(ids)
    ours = regard.linear_attention(q, k, v, mask=symbol)
    torch.testing.assert_close(ours, expected(q, k, v, feature_map=Elu(), keep=symbol.dense(11, 11)))
    symbol = symbol & masks.padding([11, 7, 4])
    ours = regard.linear_attention(q, k, v, mask=symbol)
    torch.testing.assert_close(ours, expected(q, k, v, feature_map=Elu(), keep=symbol.dense(11, 11)))


@pytest.mark.parametrize("delta", [False, True])
def test_each_document_is_computed_as_if_it_were_alone(delta):
    q, k, v = inputs(11, batch=3)
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(3, 2, 11, 5, dtype=torch.float64)
    beta = torch.rand(3, 2, 11, dtype=torch.float64) if delta else None
    options = {"feature_map": Identity(), "normalize": False, "causal": True}
    ours = regard.linear_attention(q, k, v, mask=masks.documents(IDS), decay=decay, beta=beta, **options)
    for row, ids in enumerate(torch.tensor(IDS)):
        for document in ids.unique():
            tensors = [t[row : row + 1, :, ids == document] for t in (q, k, v, decay)]
            gate = None if beta is None else beta[row : row + 1, :, ids == document]
            alone = regard.linear_attention(*tensors[:3], decay=tensors[3], beta=gate, **options)
            torch.testing.assert_close(ours[row : row + 1, :, ids == document], alone)


@pytest.mark.parametrize("leading", [(), (2,), (2, 4), (2, 1, 4)])
def test_leading_axes(leading):
    q, k, v = (torch.randn(*leading, 7, dim, dtype=torch.float64) for dim in (5, 5, 3))
    decay = -torch.rand(*leading, 7, dtype=torch.float64)
    ours, state = regard.linear_attention_with_state(q, k, v, causal=True, decay=decay)
    as_4d = [t.reshape(-1, 4 if len(leading) > 1 else 1, *t.shape[len(leading) :]) for t in (q, k, v, decay)]
    theirs, other = regard.linear_attention_with_state(*as_4d[:3], causal=True, decay=as_4d[3])
    torch.testing.assert_close(ours, theirs.reshape(ours.shape))
    assert state.matrix.shape == (*leading, 5, 3)
    assert state.total is not None
    assert state.total.shape == (*leading, 5)
    torch.testing.assert_close(state.matrix, other.matrix.reshape(state.matrix.shape))
    again, _ = regard.linear_attention_with_state(q, k, v, causal=True, decay=decay, state=state)
    assert again.shape == ours.shape


def test_batches_and_gates_broadcast():
    q, k, v = inputs(batch=3)
    decay = -torch.rand(1, 2, 1, dtype=torch.float64)  # RetNet: a number for each head
    ours = regard.linear_attention(q, k[:1], v[:1], causal=True, decay=decay)
    whole = decay.expand(3, 2, 7)
    theirs = regard.linear_attention(q, k[:1].expand_as(k), v[:1].expand_as(v), causal=True, decay=whole)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("sizes", [[7], [3, 4], [1] * 7, [0, 5, 0, 2]], ids=str)
def test_a_sequence_in_parts_is_the_whole(feature_map, normalize, sizes):
    q, k, v = inputs()
    k[:, :, 4] *= 5  # FAVOR+ has to rescale its state
    decay = -torch.rand(2, 2, 7, dtype=torch.float64)
    options = {"feature_map": feature_map, "normalize": normalize, "causal": True}
    whole, final = regard.linear_attention_with_state(q, k, v, decay=decay, **options)
    state, outputs = None, []
    for part in torch.arange(7).split(sizes):
        tensors = [tensor[:, :, part] for tensor in (q, k, v, decay)]
        output, state = regard.linear_attention_with_state(*tensors[:3], decay=tensors[3], state=state, **options)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-6, atol=1e-7)
    assert state is not None
    scale: torch.Tensor | float = 1.0
    if state.log_scale is not None:
        assert final.log_scale is not None
        scale = (state.log_scale - final.log_scale).exp()
    torch.testing.assert_close(state.sums * scale, final.sums)


def test_a_state_of_ones_own_and_its_gradient():
    q, k, v = inputs()
    matrix = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    total = torch.rand(2, 2, 5, dtype=torch.float64, requires_grad=True)

    def output(matrix, total):
        return regard.linear_attention(q, k, v, causal=True, state=LinearState.from_parts(matrix, total))

    features = Elu()(q), Elu()(k)
    above, _ = naive.step_recurrence(*features, v, state=matrix)
    below, _ = naive.step_recurrence(*features, torch.ones_like(v[..., :1]), state=total.unsqueeze(-1))
    torch.testing.assert_close(output(matrix, total), above / below)
    assert torch.autograd.gradcheck(output, (matrix, total))


def test_states_are_reordered():
    q, k, v = inputs(batch=3)
    rows = torch.tensor([2, 0, 0])
    for feature_map in (Elu(), FavorPlus(5, 11, seed=1)):
        options = {"feature_map": feature_map, "causal": True}
        _, state = regard.linear_attention_with_state(q, k, v, **options)
        ours = regard.linear_attention(q[rows], k[rows], v[rows], state=state.reorder(rows), **options)
        torch.testing.assert_close(ours, regard.linear_attention(q, k, v, state=state, **options)[rows])


@pytest.mark.parametrize("feature_map", MAPS, ids=repr)
@pytest.mark.parametrize(("causal", "normalize"), [*itertools.product((False, True), (False, True))])
def test_gradients(feature_map, causal, normalize):
    q, k, v = (tensor.requires_grad_() for tensor in inputs(3, 2, 1, batch=1))
    if feature_map == Identity() and normalize:
        q, k = (tensor.detach().abs().requires_grad_() for tensor in (q, k))

    def output(q, k, v):
        return regard.linear_attention(q, k, v, feature_map=feature_map, causal=causal, normalize=normalize)

    assert torch.autograd.gradcheck(output, (q, k, v))


def test_gradients_of_documents_and_padding():
    q, k, v = (tensor.requires_grad_() for tensor in inputs(5, 2, 1, batch=2))
    mask = masks.documents([[0, 0, 1, 1, 1], [3, 4, 3, 4, 3]]) & masks.causal() & masks.padding([5, 3])
    assert torch.autograd.gradcheck(lambda q, k, v: regard.linear_attention(q, k, v, mask=mask), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", [Elu(), Softmax(), FavorPlus(5, 11, seed=1)], ids=repr)
def test_errors_stay_within_a_budget_from_float64(dtype, causal, feature_map):
    q, k, v = inputs(131, dtype=dtype)
    keep = lower(131) if causal else None
    truth = expected(q.double(), k.double(), v.double(), feature_map=feature_map, keep=keep)
    plain = expected(q.float(), k.float(), v.float(), feature_map=feature_map, keep=keep)
    ours = regard.linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    assert_close(ours, Expected(truth, dtype, [plain.to(dtype)]))


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("delta", [False, True])
def test_decays_in_float32_stay_within_a_budget_from_float64(axes, strength, delta):
    q, k, v = inputs(131, dtype=torch.float32)
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -strength * torch.rand((2, 2, 131, 5)[:axes])
    decay[:, :, 3] = -300.0  # a large sum before small differences
    beta = torch.rand(2, 2, 131) if delta else None

    def by_steps(dtype, rounding=0.0):
        gates = [None if gate is None else gate.to(dtype) for gate in (decay, beta)]
        # Inputs off by less than a rounding: their results are as good, and show what error is usual.
        rounded = (
            tensor.double() * (1 + rounding * (torch.rand(tensor.shape) - 0.5)) for tensor in (q * 5**-0.5, k, v)
        )
        return naive.step_recurrence(*(tensor.to(dtype) for tensor in rounded), decay=gates[0], beta=gates[1])

    ours, state = regard.linear_attention_with_state(
        q, k, v, feature_map=Identity(), normalize=False, causal=True, decay=decay, beta=beta
    )
    truth, final = by_steps(torch.float64)
    plain = [by_steps(torch.float32, torch.finfo(torch.float32).eps) for _ in range(8)]
    assert_close(ours, Expected(truth, torch.float32, [outputs for outputs, _ in plain]))
    terms = float(v.abs().max())  # the matrix is a sum of k_i ⊗ v_i, which cancel, and |k_i| = 1
    assert_close(state.matrix, Expected(final, torch.float32, [states for _, states in plain], magnitude=terms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", native.variants())
@pytest.mark.parametrize("kind", ["plain", "decay per head", "decay per feature", "padding", "documents", "NaN"])
def test_gradients_of_halves_stay_within_a_budget_from_float64(monkeypatch, kind, variant, dtype):
    tensors = inputs(131, dtype=dtype, batch=2)
    options: dict[str, Any] = {"causal": True}
    if "decay" in kind:
        options["decay"] = -torch.rand((2, 2, 131, 5)[: 3 + ("feature" in kind)])
    if kind == "padding":
        options["mask"] = masks.padding([131, 97])
    if kind == "documents":
        options["mask"] = masks.documents(torch.arange(131).div(37, rounding_mode="floor"))
    if kind == "NaN":
        tensors[1][1, 1, 100] = torch.nan
    upstream = torch.randn(2, 4, 131, 3).to(dtype)

    def run(wide, **kwargs):
        leaves = [tensor.to(wide).requires_grad_() for tensor in tensors]
        output = regard.linear_attention(*leaves, **options, **kwargs)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(wide))]

    def from_rounded_output():
        """The gradients in float32 from the output that the forward pass leaves, rounded."""
        q, k, v = leaves = [tensor.float().requires_grad_() for tensor in tensors]
        sums = regard.linear_attention(q, k, torch.cat([v, v.new_ones(2, 2, 131, 1)], -1), normalize=False, **options)
        sums, total = sums[..., :-1], sums[..., -1:]
        output, above = (sums / total).detach().to(dtype).float(), upstream.float()
        seeds = above / total.detach(), -(above * output).sum(-1, keepdim=True) / total.detach()
        return [output, *torch.autograd.grad([sums, total], leaves, seeds)]

    truth, singles = run(torch.float64), [run(torch.float32)]
    if kind != "NaN":
        singles.append(from_rounded_output())

    def refuse(tensor):
        raise AssertionError(f"a tensor of {tensor.dtype} was widened in memory")

    monkeypatch.setattr("regard.linear.linear_problem.at_least_float32", refuse)
    with native.using(variant):
        found = run(dtype)
    for ours, exact, *plain in zip(found, truth, *singles, strict=True):
        assert_close(ours, Expected(exact, dtype, [each.to(dtype) for each in plain]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_half_precision_are_in_float32(dtype):
    q, k, v = inputs(dtype=dtype)
    whole = regard.linear_attention(q, k, v, causal=True)
    state, outputs = None, []
    for token in range(7):
        part = [tensor[:, :, token : token + 1] for tensor in (q, k, v)]
        output, state = regard.linear_attention_with_state(*part, causal=True, state=state)
        outputs.append(output)
    assert state is not None
    assert state.matrix.dtype == torch.float32
    assert whole.dtype == output.dtype == dtype
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_autocast_casts_as_attention_does():
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = regard.linear_attention(q, k, v)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, regard.linear_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_rows_that_attend_to_it(bad):
    q, k, v = inputs(11)
    clean = regard.linear_attention(q, k, v, causal=True)
    for index, tensor in enumerate((k, v)):
        spoilt = [q, k, v]
        spoilt[1 + index] = tensor.clone()
        spoilt[1 + index][0, 1, 4, 0] = bad
        ours, state = regard.linear_attention_with_state(*spoilt, causal=True)
        rows = torch.zeros(2, 4, 11, dtype=torch.bool)
        rows[0, 2:, 4:] = True
        assert ours[rows].isnan().all()
        torch.testing.assert_close(ours[~rows], clean[~rows])
        assert state.matrix.isnan().any((-2, -1)).tolist() == [[False, True], [False, False]]
        masked = regard.linear_attention(*spoilt, causal=True, mask=masks.padding([4, 11]))
        assert masked.isfinite().all()
        torch.testing.assert_close(masked[0, :, :4], clean[0, :, :4])
        documents = regard.linear_attention(*spoilt, mask=masks.causal() & masks.documents([0] * 6 + [1] * 5))
        assert documents[:, :, 6:].isfinite().all()
        assert documents[0, 2:, 4:6].isnan().all()
    q = q.clone()
    q[0, 0, 4] = bad
    ours = regard.linear_attention(q, k, v)
    assert ours[0, 0, 4].isnan().all()
    ours[0, 0, 4] = 0
    assert ours.isfinite().all()


def test_padding_that_is_nan_reaches_no_gradient():
    q, k, v = (tensor.float() for tensor in inputs(11))
    for tensor in (q, k, v):
        tensor[0, :, 6:] = torch.nan
        tensor.requires_grad_()
    output = regard.linear_attention(q, k, v, causal=True, mask=masks.padding([6, 11]))
    output[0, :, :6].sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))
    assert q.grad is not None
    assert q.grad[0].any()


def test_rows_whose_weights_add_up_to_0_are_0():
    q, k, v = inputs()
    assert not regard.linear_attention(-q.abs(), k, v, feature_map=Relu()).any()
    empty = regard.linear_attention(q, k[:, :, :0], v[:, :, :0])
    assert empty.shape == (2, 4, 7, 3)
    assert not empty.any()


def test_a_function_of_ones_own_is_a_feature_map():
    q, k, v = inputs()

    def squares(x):
        return torch.cat([x.square(), torch.ones_like(x[..., :1])], -1)

    ours = regard.linear_attention(q, k, v, feature_map=squares, causal=True)
    torch.testing.assert_close(ours, expected(q, k, v, feature_map=squares, keep=lower(7)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": masks.window(before=3)}, MaskError, r"window\(before=3\) is no mask for linear attention.*documents"),
        ({"mask": masks.causal() & masks.strided(4)}, MaskError, r"strided\(4\) is no mask for linear attention"),
        ({"mask": masks.causal() | masks.prefix(2)}, MaskError, "is no mask for linear attention"),
        ({"mask": torch.ones(7, 7).tril().bool()}, MaskError, r"<bool \(7, 7\)>\) is no mask.*\(batch, 1, 1, N\)"),
        ({"mask": torch.ones(7)}, MaskError, "a mask is needed here"),
        (
            {"mask": torch.ones(2, 4, 1, 7).bool()},
            MaskError,
            r"\(2, 4, 7\).*broadcasts to \(2, 2, 7\), \(batch, key heads",
        ),
        (
            {"mask": masks.documents(torch.zeros(1, 2, 7).long())},
            MaskError,
            r"documents\(<int64 \(1, 2, 7\)>\) is no mask for linear.*one id for each position, whatever the head",
        ),
        (
            {"mask": masks.documents([0] * 7, [0] * 7)},
            MaskError,
            r"documents\(<int64 \(7,\)>, .* is no mask for linear",
        ),
        ({"mask": masks.documents([0, 1])}, ShapeError, "is for 2 positions.*there are 7 keys"),
        ({"decay": torch.zeros(2, 2, 7)}, ConfigurationError, "decay needs an order of the keys: pass causal=True"),
        ({"beta": torch.zeros(2, 2, 7), "normalize": False}, ConfigurationError, "beta needs an order"),
        ({"state": LinearState(torch.zeros(2, 2, 5, 3))}, ConfigurationError, "state needs an order"),
        ({"beta": torch.zeros(2, 2, 7), "causal": True}, ConfigurationError, "pass normalize=False with it"),
        ({"decay": torch.full((2, 2, 7), 0.25), "causal": True}, ConfigurationError, "values up to 0.25.*at most 0"),
        ({"decay": torch.zeros(2, 4, 7), "causal": True}, ShapeError, r"decay has the shape \(2, 4, 7\).*\(2, 2, 7\)"),
        (
            {"decay": torch.zeros(2, 2, 7, 4), "causal": True},
            ShapeError,
            r"\(2, 2, 7, 4\).*\(2, 2, 7, 5\) with one for",
        ),
        (
            {"decay": torch.zeros(7, dtype=torch.long), "causal": True},
            DtypeError,
            "decay needs a floating-point tensor",
        ),
        (
            {"decay": -1.0, "causal": True},
            DtypeError,
            "decay needs a torch.Tensor; it is a float: pass torch.as_tensor",
        ),
        (
            {"beta": torch.full((2, 2, 7), 2.5), "causal": True, "normalize": False},
            ConfigurationError,
            r"beta has values from 2.5 to 2.5; it needs values in 0\.\.2",
        ),
        (
            {"beta": torch.zeros(2, 2, 6), "causal": True, "normalize": False},
            ShapeError,
            r"beta has the shape \(2, 2, 6\); it needs \(2, 2, 7\), \(\*batch, key heads, keys\), or \(2, 2, 7, 5\)",
        ),
        (
            {"beta": torch.zeros(2, 2, 7, 4), "causal": True, "normalize": False},
            ShapeError,
            "beta is for 4 features, but keys have 5 after the feature map: it needs 5 numbers for each key",
        ),
        (
            {"removal": torch.zeros(2, 2, 7), "causal": True, "normalize": False},
            ShapeError,
            r"removal has the shape \(2, 2, 7\); it needs \(2, 2, 7, 5\), \(\*batch, key heads, keys, features\)$",
        ),
        (
            {"removal": torch.zeros(2, 2, 7, 3), "causal": True, "normalize": False},
            ShapeError,
            "removal is for 3 features, but keys have 5",
        ),
        ({"removal": torch.zeros(2, 2, 7, 5), "normalize": False}, ConfigurationError, "removal needs an order"),
        (
            {"removal": torch.zeros(2, 2, 7, 5), "causal": True},
            ConfigurationError,
            "removal is the delta rule, whose weights have no sum to divide by: pass normalize=False",
        ),
        (
            {"removal": torch.zeros(2, 2, 7, 5).long(), "causal": True, "normalize": False},
            DtypeError,
            "removal needs a floating-point tensor; it is torch.int64",
        ),
        (
            {"feature_map": "elu"},
            ConfigurationError,
            r"feature_map is 'elu'; it needs a map such as regard.linear.Elu\(\)",
        ),
        ({"feature_map": Elu}, ConfigurationError, "feature_map is <class"),
        ({"scale": float("nan")}, ConfigurationError, "scale is nan; it needs a finite number"),
        ({"feature_map": FavorPlus(4)}, ShapeError, r"has dim=4, but queries and keys have the dim 5.*FavorPlus\(5\)"),
        ({"feature_map": lambda x: x.mean(-2)}, ShapeError, "has to treat each row by itself"),
        ({"state": torch.zeros(2, 2, 5, 3), "causal": True}, ConfigurationError, "needs a LinearState.*is a Tensor"),
        ({"state": LinearState(torch.zeros(2, 2, 5, 3)), "causal": True}, ConfigurationError, "the state has no total"),
        (
            {"state": LinearState(torch.zeros(2, 2, 5, 4), True), "causal": True, "normalize": False},
            ConfigurationError,
            "has a total, of normalised attention, and normalize is False",
        ),
        ({"state": LinearState(torch.zeros(2, 4, 5, 4), True), "causal": True}, ShapeError, r"leading axes \(2, 2\)"),
        ({"state": LinearState(torch.zeros(2, 2, 6, 4), True), "causal": True}, ShapeError, "has 6 features.*have 5"),
        (
            {"state": LinearState(torch.zeros(2, 2, 5, 4), True), "causal": True, "mask": masks.documents([0] * 7)},
            ConfigurationError,
            "a state and masks.documents do not go together",
        ),
        (
            {"state": LinearState(torch.zeros(2, 2, 9, 4), True), "causal": True, "feature_map": FavorPlus(5, 9)},
            ConfigurationError,
            "computed with another feature map",
        ),
        ({"decay": torch.zeros(2, 2, 7, device="meta"), "causal": True}, DeviceError, "decay is on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(options, error, message):
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(error, match=message):
        regard.linear_attention(q, k, v, **options)


def test_bad_tensors():
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(ShapeError, match="need as many queries as keys.*pass their state="):
        regard.linear_attention(q[:, :, :3], k, v, causal=True)
    with pytest.raises(ShapeError, match="query has 4 heads, key 3"):
        regard.linear_attention(q, torch.randn(2, 3, 7, 5), torch.randn(2, 3, 7, 3))
    with pytest.raises(ShapeError, match="as many features of queries as of keys"):
        regard.linear_attention(q[..., :4], k, v)
    with pytest.raises(DtypeError, match="query is torch.float64"):
        regard.linear_attention(q.double(), k, v)


def test_a_state_needs_causal_attention_of_one_document():
    q, k, v = inputs()
    with pytest.raises(ConfigurationError, match="needs causal=True"):
        regard.linear_attention_with_state(q, k, v)
    with pytest.raises(MaskError, match="several documents in one sequence"):
        regard.linear_attention_with_state(q, k, v, mask=masks.causal() & masks.documents([0] * 7))
    with pytest.raises(ShapeError, match="a state needs a matrix"):
        LinearState.from_parts(torch.zeros(2, 3, 4), torch.zeros(2, 4))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": masks.padding([5, 3])}], ids=str)
def test_vmap_and_functional_derivatives(options):
    q, k, v = (tensor.unflatten(0, (2, 2)) for tensor in inputs(batch=4))

    def output(q, k, v):
        return regard.linear_attention(q, k, v, **options)

    torch.testing.assert_close(torch.func.vmap(output)(q, k, v)[1], output(q[1], k[1], v[1]))
    pull = torch.func.vjp(output, q[1], k[1], v[1])[1]
    leaves = [tensor[1].clone().requires_grad_() for tensor in (q, k, v)]
    output(*leaves).sum().backward()
    for ours, leaf in zip(pull(torch.ones(2, 4, 7, 3, dtype=torch.float64)), leaves, strict=True):
        torch.testing.assert_close(ours, leaf.grad)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "feature_map": FavorPlus(5, 11, seed=1)}, {"mask": masks.padding([5, 3])}],
    ids=str,
)
def test_compiled_in_one_graph(options):
    q, k, v = inputs()
    compiled = torch.compile(regard.linear_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, **options), regard.linear_attention(q, k, v, **options))


def test_documents_are_compiled_around():
    q, k, v = inputs(11, batch=3)
    mask = masks.causal() & masks.documents(IDS)
    compiled = torch.compile(regard.linear_attention, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, mask=mask), regard.linear_attention(q, k, v, mask=mask))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_jit_trace_is_refused():
    q, k, v = inputs()
    with pytest.raises(ConfigurationError, match=r"torch\.jit\.trace, which would keep the chunks.*torch\.export"):
        torch.jit.trace(lambda q, k, v: regard.linear_attention(q, k, v, causal=True), (q, k, v))


def test_fake_tensors_give_shapes():
    with torch._subclasses.FakeTensorMode():
        q, k, v = inputs()
        output, state = regard.linear_attention_with_state(q, k, v, causal=True)
    assert output.shape == (2, 4, 7, 3)
    assert state.matrix.shape == (2, 2, 5, 3)
