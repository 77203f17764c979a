"""What each normalizer gets beside its output: derivatives, transforms, NaN safety, lenses, records, and errors."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import regard
from regard import biases, lenses, masks, nn, normalizers
from regard.core.normalizer import Normalizer
from regard.errors import ConfigurationError, DtypeError, KernelError, ShapeError
from regard.explorer import Atlas, record

HEADS, KEY_HEADS, QUERIES, KEYS = 4, 2, 37, 53
NORMALIZERS: dict[str, Normalizer] = {
    "sigmoid": normalizers.Sigmoid(),
    "softmax1": normalizers.Softmax1(),
    "softpick": normalizers.Softpick(),
    "relu": normalizers.ReLU(),
    "squared relu": normalizers.ReLU(2),
    "sparsemax": normalizers.Sparsemax(),
    "entmax": normalizers.Entmax(1.5),
    "entmax 1.3": normalizers.Entmax(1.3),
    "entmax 2.5": normalizers.Entmax(2.5),
    "stick-breaking": normalizers.StickBreaking(),
    "top scores": normalizers.TopScores(4),
    "hard": normalizers.Hard(),
    "linear chain": normalizers.LinearChain(torch.tensor([[0.5, -0.25], [0.0, 1.5]])),
}
every = pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys large enough that sparse weights are sparse."""

    def drawn(heads: int, length: int, dim: int) -> Tensor:
        return (2.0 * torch.randn(2, heads, length, dim, dtype=dtype)).requires_grad_()

    return drawn(HEADS, QUERIES, 8), drawn(KEY_HEADS, KEYS, 8), drawn(KEY_HEADS, KEYS, 5)


def some_pairs() -> Tensor:
    """A mask with an empty row, and a column that no row attends to."""
    keep = torch.rand(QUERIES, KEYS) > 0.4
    keep[3], keep[:, 7] = False, False
    return keep


def learned() -> list[Normalizer]:
    return [
        normalizers.Sigmoid(torch.tensor([-0.5, 1.25, 0.25, -1.75], dtype=torch.float64, requires_grad=True)),
        normalizers.Sigmoid(torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)),
        normalizers.Entmax(torch.tensor([1.2, 1.5, 1.7, 2.0], dtype=torch.float64, requires_grad=True)),
        normalizers.Entmax(torch.tensor(1.5, dtype=torch.float64, requires_grad=True)),
        normalizers.LinearChain(torch.randn(HEADS, 2, 2, dtype=torch.float64, requires_grad=True)),
        normalizers.LinearChain(torch.randn(2, 2, dtype=torch.float64, requires_grad=True)),
    ]


def both_kernels(leaves: Sequence[Tensor], **options) -> None:
    """The kernel `tiled` has the output and the gradients of the formula in float64."""
    found = []
    for kernel in ("tiled", "reference"):
        torch.manual_seed(5)  # of dropout
        output = regard.attention(leaves[0], leaves[1], leaves[2], **options, kernel=kernel)
        above = torch.randn(output.shape, generator=torch.Generator().manual_seed(6), dtype=output.dtype)
        found.append((output, *torch.autograd.grad(output, leaves, above)))
    for has, needs in zip(*found, strict=True):
        torch.testing.assert_close(has, needs, rtol=1e-8, atol=1e-10)


@every
def test_masks_biases_softcap_and_dropout(normalizer):
    table = torch.randn(HEADS, 8, dtype=torch.float64, requires_grad=True)
    leaves = inputs()
    both_kernels(leaves, mask=some_pairs(), softcap=2.0, normalizer=normalizer)
    if "dropout_p" in normalizer.refuses:
        with pytest.raises(ConfigurationError, match=r"dropout_p has no meaning with normalizer=.*Leave dropout_p out"):
            regard.attention(*leaves, dropout_p=0.3, normalizer=normalizer)
    else:
        both_kernels(leaves, mask=some_pairs(), dropout_p=0.3, normalizer=normalizer)
    both_kernels([*leaves, table], mask=masks.causal(), bias=biases.relative(table), normalizer=normalizer)


@every
def test_sinks_are_one_more_score_or_refused(normalizer):
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    leaves = [*inputs(), sinks]
    if "sinks" in normalizer.refuses:
        with pytest.raises(ConfigurationError, match=r"sinks has no meaning with normalizer=.*Leave sinks out"):
            regard.attention(*inputs(), sinks=sinks, normalizer=normalizer)
        return
    both_kernels(leaves, mask=some_pairs(), sinks=sinks, normalizer=normalizer)
    scores = torch.tensor([[[[1.0, 0.5, -0.5]]]], dtype=torch.float64)  # the last of a key, and of a sink
    weights = normalizer.normalize(scores)[0]
    query, key = torch.ones(1, 1, 1, 1, dtype=torch.float64), scores[..., :2].mT
    found = regard.attention(query, key, key, sinks=scores[0, 0, 0, 2:], normalizer=normalizer)
    torch.testing.assert_close(found, weights[..., :2] @ key)


@pytest.mark.parametrize("normalizer", learned(), ids=repr)
def test_learned_parameters(normalizer):
    leaves = [*inputs(), *normalizer.parameters()]
    both_kernels(leaves, mask=some_pairs(), dropout_p=0.2, normalizer=normalizer)

    def total(parameter: Tensor) -> Tensor:
        with torch.no_grad():
            moved = normalizer.with_parameters([parameter])
            return regard.attention(query, key, value, normalizer=moved, kernel="tiled").sum()

    query, key, value = (leaf.detach() for leaf in leaves[:3])
    (parameter,) = normalizer.parameters()
    output = regard.attention(query, key, value, normalizer=normalizer, kernel="tiled")
    (found,) = torch.autograd.grad(output.sum(), parameter)
    step = 1e-6 * torch.ones_like(parameter)
    torch.testing.assert_close(
        found.sum(), (total(parameter + step) - total(parameter - step)) / 2e-6, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("normalizer", [of for name, of in NORMALIZERS.items() if name != "hard"], ids=repr)
def test_gradients_against_differences(normalizer):
    leaves = [torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    keep = torch.rand(4, 4) > 0.2
    keep[1] = False
    attend = lambda *of: regard.attention(*of, mask=keep, normalizer=normalizer, kernel="tiled")  # noqa: E731
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of forward-mode derivatives
@every
def test_transforms(normalizer):
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    options = {"mask": masks.causal(), "normalizer": normalizer, "kernel": "tiled"}
    expected = regard.attention(query, key, value, **options)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: regard.attention(q, k, v, **options), fullgraph=True, backend="aot_eager")
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    found = compiled(*leaves)
    torch.testing.assert_close(found, expected)
    whole = torch.autograd.grad(regard.attention(*leaves, **options).sum(), leaves)
    for has, needs in zip(torch.autograd.grad(found.sum(), leaves), whole, strict=True):
        torch.testing.assert_close(has, needs)

    def each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q[None], k[None], v[None], mask=masks.causal(), normalizer=normalizer)[0]

    torch.testing.assert_close(torch.func.vmap(each)(query, key, value), expected)
    single = torch.func.grad(lambda q: each(q, key[0], value[0]).sum())(query[0])
    # It may be by another kernel, whose sums are rounded otherwise: by the size of their terms.
    largest = whole[0][0].abs().max().item()
    torch.testing.assert_close(single, whole[0][0], rtol=0, atol=16 * torch.finfo(torch.float32).eps * largest)
    if isinstance(normalizer, normalizers.Hard):
        return  # its derivative is that of softmax, not of what it computes
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query.double(), torch.ones_like(query).double())
        output = regard.attention(dual, key.double(), value.double(), normalizer=normalizer)
        pushed = forward_ad.unpack_dual(output).tangent
    near = [
        regard.attention(query.double() + step, key.double(), value.double(), normalizer=normalizer)
        for step in (-1e-6, 1e-6)
    ]
    torch.testing.assert_close(pushed, (near[1] - near[0]) / 2e-6, rtol=1e-3, atol=1e-4)


def test_the_compiled_gradient_of_a_parameter():
    normalizer = learned()[0]
    (bias,) = normalizer.parameters()
    query, key, value = (tensor.detach() for tensor in inputs())

    def total(bias: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=masks.causal(), normalizer=normalizers.Sigmoid(bias)).sum()

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    (found,), (expected,) = (torch.autograd.grad(of(bias), bias) for of in (compiled, total))
    torch.testing.assert_close(found, expected)


@every
@pytest.mark.parametrize("kernel", ["tiled", "reference"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_reaches_the_rows_that_attend_to_it_and_no_others(normalizer, kernel, which):
    tensors, mask = inputs(), masks.causal()
    expected = regard.attention(*tensors, mask=mask, query_positions=range(QUERIES), normalizer=normalizer)
    with torch.no_grad():
        tensors[which][0, 0, 30] = math.nan
    options = {"mask": mask, "query_positions": range(QUERIES), "normalizer": normalizer, "kernel": kernel}
    found = regard.attention(*tensors, **options)
    broken = torch.zeros(2, HEADS, QUERIES, dtype=torch.bool)
    if which == 0:
        broken[0, 0, 30] = True
    else:
        broken[0, :2, 30:] = True
    assert found[broken].isnan().all()
    torch.testing.assert_close(found[~broken], expected[~broken])
    gradients = torch.autograd.grad(found[~broken].sum(), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)


@every
def test_lenses_see_the_weights(normalizer):
    tensors, keep = inputs(), some_pairs()
    query, key, value = (tensor.detach() for tensor in tensors)
    looks = (
        lenses.Weights(),
        lenses.Entropy(),
        lenses.Received(),
        lenses.TopK(3),
        lenses.Weights(slice(5, 9), slice(2, 30)),
    )
    seen = regard.observe(query, key, value, *looks, mask=keep, normalizer=normalizer)
    identity = torch.eye(KEYS, dtype=torch.float64).expand(2, KEY_HEADS, KEYS, KEYS)
    true = regard.attention(
        tensors[0], tensors[1], identity, mask=keep, normalizer=normalizer, kernel="reference"
    ).detach()
    torch.testing.assert_close(seen[looks[0]], true)
    torch.testing.assert_close(seen[looks[4]], true[..., 5:9, 2:30])
    mass = true.sum(-1, keepdim=True)
    if isinstance(normalizer, normalizers.Softmax1):  # a sink is no term of the sum
        mass = torch.ones_like(mass)
    shares = true / torch.where(mass > 0, mass, 1.0)
    torch.testing.assert_close(seen[looks[1]], -torch.special.xlogy(shares, shares).sum(-1))
    torch.testing.assert_close(seen[looks[2]], true.sum(-2))
    torch.testing.assert_close(seen[looks[3]].weights, true.topk(3).values)
    query, key, value = tensors
    learned_weights = regard.observe(query, key, value, looks[0], mask=keep, normalizer=normalizer)[looks[0]]
    above = torch.randn_like(true)
    whole = regard.attention(tensors[0], tensors[1], identity, mask=keep, normalizer=normalizer, kernel="reference")
    found, expected = (torch.autograd.grad(of, tensors[:2], above) for of in (learned_weights, whole))
    for has, needs in zip(found, expected, strict=True):
        torch.testing.assert_close(has, needs)


class Layer(torch.nn.Module):
    def __init__(self, normalizer: Normalizer) -> None:
        super().__init__()
        self.normalizer = normalizer

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=masks.causal(), normalizer=self.normalizer)


@pytest.mark.parametrize("normalizer", [*NORMALIZERS.values(), *learned()], ids=repr)
def test_records(normalizer, tmp_path):
    query, key, value = (tensor.detach() for tensor in inputs())
    model = Layer(normalizer)
    with record(model, dtype="keep") as recording, torch.no_grad():
        model(query, key, value)
    recording.atlas().save(tmp_path / "a.atlas")
    recorded = Atlas.open(tmp_path / "a.atlas").maps[0]
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, mask=masks.causal(), normalizer=normalizer)
    true = seen[weights].detach()
    found = torch.from_numpy(recorded.weights(2, slice(0, QUERIES), slice(0, KEYS)))
    torch.testing.assert_close(found, true[0, 2].to(found.dtype), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["softpick", "relu", "squared relu"])
def test_parts_of_quotients_are_merged(name):
    query, key, value = inputs()
    options = {"normalizer": NORMALIZERS[name], "mask": None}
    parts = [
        regard.attention_with_lse(query, key[:, :, some], value[:, :, some], **options)
        for some in (slice(0, 20), slice(20, KEYS))
    ]
    output, lse = regard.merge(parts)
    whole = regard.attention_with_lse(query, key, value, **options)
    torch.testing.assert_close(output, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_parts_of_sigmoid_attention_are_added():
    query, key, value = inputs()
    normalizer = normalizers.Sigmoid(-2.0)
    parts = [
        regard.attention(query, key[:, :, some], value[:, :, some], normalizer=normalizer)
        for some in (slice(0, 20), slice(20, KEYS))
    ]
    torch.testing.assert_close(
        normalizer.merge(torch.stack(parts)), regard.attention(query, key, value, normalizer=normalizer)
    )
    with pytest.raises(ConfigurationError, match=r"part 0 has no log-sum-exp.*Sigmoid are added"):
        regard.merge([(part, None) for part in parts])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["sigmoid", "sparsemax", "entmax", "stick-breaking", "top scores"])
def test_what_has_no_log_sum_exp_says_so(name):
    with pytest.raises(ConfigurationError, match=r"has no log-sum-exp: .*regard\.attention for the output alone"):
        regard.attention_with_lse(*inputs(), normalizer=NORMALIZERS[name])
    if name != "sigmoid":
        with pytest.raises(ConfigurationError, match="has no merge"):
            NORMALIZERS[name].merge(torch.zeros(2, 1))


def test_errors():
    tensors = inputs()
    cases: list[tuple[type[Exception], str, object]] = [
        (ConfigurationError, "normalizer needs one from regard.normalizers", "sigmoid"),
        (ConfigurationError, "normalizer needs one from regard.normalizers", normalizers.Sparsemax),
        (
            ShapeError,
            r"bias is \(3,\); it needs one number, \(\), or one for each head, \(4,\)",
            normalizers.Sigmoid(torch.ones(3)),
        ),
        (DtypeError, "bias needs floating-point numbers; it is torch.int64", normalizers.Sigmoid(torch.tensor(1))),
        (ConfigurationError, "alpha is .*; it needs a number of at least 1.05", normalizers.Entmax(torch.tensor(1.0))),
    ]
    for kind, message, normalizer in cases:
        with pytest.raises(kind, match=message):
            regard.attention(*tensors, normalizer=normalizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="bias is nan; it needs a finite number"):
        normalizers.Sigmoid(math.nan)
    with pytest.raises(ConfigurationError, match="alpha is 1.0; it needs a number of at least 1.05"):
        normalizers.Entmax(1.0)
    with pytest.raises(ConfigurationError, match="ReLU has power=3; it needs 1, or 2"):
        normalizers.ReLU(3)
    with pytest.raises(ConfigurationError, match="TopScores needs k as a whole number of at least 1"):
        normalizers.TopScores(0)
    with pytest.raises(KernelError, match="there is no kernel 'sdpa'"):
        regard.attention(*tensors, normalizer=normalizers.Sparsemax(), kernel="sdpa")
    with pytest.raises(KernelError, match="kernel 'cpu_flash' cannot compute this"):
        regard.attention(*tensors, normalizer=normalizers.Sparsemax(), kernel="cpu_flash")
    with pytest.raises(KernelError, match="kernel 'threshold' cannot compute this"):
        regard.attention(*tensors, normalizer=normalizers.Entmax(1.3), kernel="threshold")


def test_a_call_says_which_normalizer_it_has():
    text = str(regard.explain(*inputs(), normalizer=normalizers.Entmax(1.5)))
    assert "entmax attention of 37 queries over 53 keys" in text


@pytest.mark.parametrize("name", ["sparsemax", "entmax", "entmax 1.3", "entmax 2.5"])
def test_thresholds_of_long_and_of_equal_rows(name):
    normalizer = NORMALIZERS[name]
    for scores in (
        torch.zeros(1, 1, 4096),
        torch.randn(1, 8, 4096) * 0.02,
        torch.randn(1, 8, 4096),
        torch.randn(1, 8, 3) * 90,
    ):
        exact = normalizer.normalize(scores.double())[0]
        torch.testing.assert_close(exact.sum(-1), torch.ones_like(exact[..., 0]), rtol=1e-12, atol=0)
        found = normalizer.normalize(scores)[0]
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]), rtol=1e-5, atol=0)
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-5)


def test_whole_rows_take_memory_linear_in_the_length():
    """A few rows at a time: 1,021 rows of 4,099 keys by pieces, as by the formula."""
    query, key, value = torch.randn(1, 2, 1021, 8), torch.randn(1, 2, 4099, 8), torch.randn(1, 2, 4099, 5)
    for normalizer in (normalizers.Sparsemax(), normalizers.Sigmoid(), normalizers.StickBreaking()):
        found, expected = (
            regard.attention(query, key, value, mask=masks.causal(), normalizer=normalizer, kernel=kernel)
            for kernel in ("tiled", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_hard_attention_is_that_of_softmax():
    query, key, value = inputs()
    above = torch.randn(2, HEADS, QUERIES, 5, dtype=torch.float64)
    found, soft = (
        torch.autograd.grad(regard.attention(query, key, value, normalizer=of), (query, key), above)
        for of in (normalizers.Hard(), None)
    )
    for has, needs in zip(found, soft, strict=True):
        torch.testing.assert_close(has, needs)


def test_noise_draws_keys_by_the_softmax_and_is_the_same_in_any_tile():
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0])
    query, key = torch.ones(1, 1, 20_000, 1), scores.view(1, 1, 4, 1)
    normalizer, value = normalizers.Hard(noise=True), torch.eye(4).view(1, 1, 4, 4)
    drawn = regard.attention(
        query, key, value, query_positions=torch.arange(20_000) % 19_997 + 4, scale=1.0, normalizer=normalizer
    )
    expected = 20_000 * scores.softmax(0)
    statistic = ((drawn.sum((0, 1, 2)) - expected).square() / expected).sum()
    assert statistic < 16.3  # 0.1 % of chi-square with three degrees of freedom
    query, key, value = inputs(torch.float32)
    found = []
    for kernel in ("tiled", "reference"):
        torch.manual_seed(3)
        found.append(regard.attention(query, key, value, mask=masks.causal(), normalizer=normalizer, kernel=kernel))
    torch.testing.assert_close(found[0], found[1])
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, normalizer=normalizer)
    assert (seen[weights].sum(-1) == 1).all()
    torch.testing.assert_close(seen.output, seen[weights] @ value.repeat_interleave(2, 1))


def test_layers_have_normalizers():
    projections = regard.nn.Projections(16, num_heads=4, num_kv_heads=2)
    bias = torch.nn.Parameter(torch.tensor([-1.0, -2.0, 0.0, 1.0]))
    layer = regard.nn.Attention(projections, mask=masks.causal(), normalizer=normalizers.Sigmoid(bias))
    assert "normalizer.tensor_0" in layer.state_dict()
    x, cache, outputs = torch.randn(2, 7, 16), layer.make_cache(), []
    for token in x.split(1, dim=1):
        output, cache = layer.step(token, cache)
        outputs.append(output)
    whole = layer(x)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    whole.sum().backward()
    assert bias.grad is not None
    assert (bias.grad != 0).all()
    with pytest.raises(ConfigurationError, match="normalizer needs one from regard.normalizers"):
        regard.nn.Attention(projections, normalizer="sigmoid")  # type: ignore[arg-type]


def test_steps_by_hand_show_the_weights():
    from regard.steps import walkthrough

    steps = walkthrough(torch.eye(2), torch.eye(2), torch.eye(2), normalizer=normalizers.Sparsemax())
    assert "exponentials" not in steps.keys
    torch.testing.assert_close(steps["weights"].numbers, steps["context"].numbers)


def monotonic_by_hand(stop: Tensor) -> Tensor:
    """Raffel et al. 2017, Eq. 9 to 14, one pair after another, from the probabilities of stopping (M, N)."""
    rows, keys = stop.shape
    before, found = [1.0] + [0.0] * (keys - 1), []
    for row in range(rows):
        reached, own = 0.0, []
        for key in range(keys):
            reached = before[key] + (reached * (1.0 - float(stop[row, key - 1])) if key else 0.0)
            own.append(float(stop[row, key]) * reached)
        before = own
        found.append(own)
    return torch.tensor(found, dtype=stop.dtype)


def test_monotonic_attention_is_the_recurrence():
    query, key, value = inputs()
    normalizer = normalizers.Monotonic(-0.5)
    weights = lenses.Weights()
    keep = some_pairs()
    seen = regard.observe(query, key, value, weights, lenses.Received(), mask=keep, normalizer=normalizer)
    scores = query[1, 3] @ key[1, 1].mT / 8**0.5
    expected = monotonic_by_hand(torch.sigmoid(scores.detach() - 0.5) * keep)
    torch.testing.assert_close(seen[weights][1, 3], expected)
    torch.testing.assert_close(seen[lenses.Received()][1, 3], expected.sum(-2))
    part = lenses.Weights(slice(5, 9), slice(2, 30))
    some = regard.observe(query, key, value, part, mask=keep, normalizer=normalizer)
    torch.testing.assert_close(some[part], seen[weights][..., 5:9, 2:30])
    long = torch.randn(1, 3, 400)
    found, exact = (normalizer.normalize(of)[0].double() for of in (long, long.double()))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-7)


def test_chunks_of_monotonic_attention():
    scores = 3.0 * torch.randn(1, 7, 11, dtype=torch.float64)
    scores[..., 4] -= 500.0  # a chunk far below the others
    alignments = normalizers.Monotonic().normalize(scores)[0]
    expected = torch.zeros_like(scores)
    for end in range(11):
        chunk = slice(max(end - 2, 0), end + 1)
        expected[..., chunk] += alignments[..., end : end + 1] * scores[..., chunk].softmax(-1)
    torch.testing.assert_close(normalizers.MoChA(width=3).normalize(scores)[0], expected)


@pytest.mark.parametrize("normalizer", [normalizers.Monotonic(), normalizers.MoChA(width=2)], ids=repr)
def test_derivatives_of_rows_in_order(normalizer):
    leaves = [torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    keep = torch.rand(4, 4) > 0.2
    keep[1] = False
    attend = lambda *of: regard.attention(*of, mask=keep, normalizer=normalizer)  # noqa: E731
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)
    with pytest.raises(ConfigurationError, match="dropout_p has no meaning"):
        regard.attention(*inputs(), normalizer=normalizer, dropout_p=0.1)


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sparsemax(),
        normalizers.Sigmoid(torch.nn.Parameter(torch.full((4,), -2.0))),
        normalizers.Entmax(torch.nn.Parameter(torch.tensor(1.3))),
        normalizers.TalkingHeads(torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.ones(4, 4) / 4)),
    ],
    ids=lambda normalizer: normalizer.name,
)
def test_a_layer_with_learned_numbers_is_compiled_as_a_whole(normalizer):
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = nn.Attention(nn.Projections(16, num_heads=4), mask=masks.causal(), normalizer=normalizer)
    x = torch.randn(2, 11, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outputs = [each(x) for each in (layer, compiled)]
    gradients = [torch.autograd.grad(output.square().sum(), [*layer.parameters()]) for output in outputs]
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[1], gradients[0])
