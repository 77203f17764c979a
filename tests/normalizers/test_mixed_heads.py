"""Talking heads and multi-token attention against their formulas in float64, and what each gets beside its output."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks, normalizers
from regard.backends.torch import row_loop
from regard.core.normalizer import Normalizer
from regard.errors import AtlasError, ConfigurationError, DtypeError, ShapeError
from regard.explorer import Atlas, record

from .mixed_formulas import multi_token_weights, output_of, talking_weights

HEADS, KEY_HEADS, QUERIES, KEYS = 4, 2, 67, 131
KERNELS = ("tiled", "reference")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return drawn(2, HEADS, QUERIES, 8), drawn(2, KEY_HEADS, KEYS, 8), drawn(2, KEY_HEADS, KEYS, 5)


def talking() -> tuple[normalizers.TalkingHeads, list[Tensor]]:
    matrices = [drawn(HEADS, HEADS) for _ in range(2)]
    return normalizers.TalkingHeads(*matrices), matrices


def multi_token() -> tuple[normalizers.MultiToken, list[Tensor]]:
    parts = [drawn(HEADS, 4, 5), drawn(HEADS, 3, 3), drawn(HEADS, HEADS), drawn(HEADS, HEADS)]
    return normalizers.MultiToken(*parts), parts


MECHANISMS = {"talking": (talking, talking_weights), "multi-token": (multi_token, multi_token_weights)}
every = pytest.mark.parametrize("kind", MECHANISMS)


@pytest.fixture
def few_rows_at_once(monkeypatch):
    """So many rows at once that there are several parts, the rows before which are needed too."""
    monkeypatch.setattr(row_loop, "SCORES_AT_ONCE", 2 * HEADS * KEYS * 11)


def kept(name: str) -> Tensor:
    if name == "drawn":  # with an empty row, and a column that no row attends to
        keep = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.4
        keep[3], keep[:, 7] = False, False
        return keep
    mask = {"all": None, "causal": masks.causal(), "window": masks.window(before=9, after=4)}[name]
    return torch.ones(QUERIES, KEYS, dtype=torch.bool) if mask is None else mask.dense(QUERIES, KEYS)


def mask_of(name: str):
    if name == "drawn":
        return kept(name)
    return {"all": None, "causal": masks.causal(), "window": masks.window(before=9, after=4)}[name]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to within some roundings of float64 of numbers up to some hundreds."""
    for has, needs in zip(found, expected, strict=True):
        torch.testing.assert_close(has, needs, rtol=1e-10, atol=1e-10)


@every
@pytest.mark.parametrize("name", ["all", "causal", "window", "drawn"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_the_formula_with_all_gradients(kind, name, kernel, few_rows_at_once):
    make, formula = MECHANISMS[kind]
    normalizer, parts = make()
    query, key, value = leaves = inputs()
    found = regard.attention(*leaves, mask=mask_of(name), normalizer=normalizer, kernel=kernel)
    expected = output_of(formula(query, key, kept(name), *parts), value)
    above = torch.randn(expected.shape, dtype=torch.float64)
    every_leaf = [*leaves, *parts]
    same(
        (found, *torch.autograd.grad(found, every_leaf, above)),
        (expected, *torch.autograd.grad(expected, every_leaf, above)),
    )


def test_a_bias_is_part_of_the_scores(few_rows_at_once):
    normalizer, parts = talking()
    query, key, value = leaves = inputs()
    added = drawn(HEADS, QUERIES, KEYS)
    found = regard.attention(*leaves, mask=masks.causal(), bias=added, normalizer=normalizer)
    expected = output_of(talking_weights(query, key, kept("causal"), *parts, added=added), value)
    above = torch.randn(expected.shape, dtype=torch.float64)
    every_leaf = [*leaves, *parts, added]
    same(torch.autograd.grad(found, every_leaf, above), torch.autograd.grad(expected, every_leaf, above))


@every
def test_the_weights_are_the_mixed_ones(kind, few_rows_at_once):
    make, formula = MECHANISMS[kind]
    normalizer, parts = make()
    query, key, value = inputs()
    whole, corner = lenses.Weights(), lenses.Weights(slice(11, 40, 3), slice(5, 90))
    with torch.no_grad():
        seen = regard.observe(query, key, value, whole, corner, mask=masks.causal(), normalizer=normalizer)
        expected = formula(query, key, kept("causal"), *parts)
    same((seen[whole], seen[corner]), (expected, expected[..., 11:40:3, 5:90]))
    assert expected.min() < -0.1
    assert torch.equal(torch.isinf(seen.lse), torch.zeros_like(seen.lse, dtype=torch.bool))


@every
def test_what_takes_logarithms_of_weights_is_refused(kind):
    normalizer = MECHANISMS[kind][0]()[0]
    with pytest.raises(ConfigurationError, match=r"Entropy\(.*takes logarithms of weights, and weights of .* below 0"):
        regard.observe(*inputs(), lenses.Entropy(), normalizer=normalizer)
    layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=HEADS), normalizer=normalizer).double()
    with pytest.raises(AtlasError, match=r"may be below 0, and an atlas shows weights from 0 on"):
        recorded(layer)


def recorded(layer: torch.nn.Module) -> Atlas:
    with record(layer) as recording, torch.no_grad():
        layer(torch.randn(1, 5, 8, dtype=torch.float64))
    return recording.atlas()


@every
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_masked_reaches_nothing(kind, poison, few_rows_at_once):
    normalizer, parts = MECHANISMS[kind][0]()
    found = []
    for bad in (0.0, poison):
        leaves = [tensor.detach().clone() for tensor in inputs_of_seed()]
        for tensor in leaves[1:]:
            tensor[:, 0, 7] = bad
        leaves = [tensor.requires_grad_() for tensor in leaves]
        output = regard.attention(*leaves, mask=kept("drawn"), normalizer=normalizer)
        found.append((output, *torch.autograd.grad(output.sum(), [*leaves, *parts])))
    assert all(each.isfinite().all() for each in found[1])
    same(found[1], found[0])


def inputs_of_seed() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    return inputs()


def test_a_row_that_attends_to_nan_is_nan_in_all_heads():
    query, key, value = (tensor.detach().clone() for tensor in inputs())
    query[0, 1, 20] = float("nan")
    whole = regard.attention(query, key, value, mask=masks.causal(), normalizer=talking()[0]).isnan().all(-1)
    assert whole[0, :, 20].all()
    assert whole.sum() == HEADS
    whole = regard.attention(query, key, value, mask=masks.causal(), normalizer=multi_token()[0]).isnan().all(-1)
    assert whole[0, :, 20:26].all()  # the kernels of 4 and 3 queries look back 5 rows
    assert whole.sum() == 6 * HEADS


@every
def test_a_value_of_nan_is_that_of_its_own_heads(kind):
    query, key, value = (tensor.detach().clone() for tensor in inputs())
    value[1, 0, KEYS - 1, 2] = float("nan")
    whole = regard.attention(query, key, value, mask=masks.causal(), normalizer=MECHANISMS[kind][0]()[0]).isnan()
    assert whole[1, :2, -1, 2].all()
    assert whole.sum() == 2


def test_a_pair_exists_where_all_heads_may_attend_to_it():
    normalizer, parts = talking()
    query, key, value = inputs()
    keep = torch.rand(HEADS, QUERIES, KEYS) > 0.3
    found = regard.attention(query, key, value, mask=keep, normalizer=normalizer)
    same([found], [output_of(talking_weights(query, key, keep, *parts), value)])


def test_the_last_queries_are_those_of_the_whole():
    normalizer, _ = talking()
    query, key, value = inputs()
    whole = regard.attention(query, key, value, mask=masks.causal(), normalizer=normalizer)
    last = regard.attention(query[:, :, -2:], key, value, mask=masks.causal(), normalizer=normalizer)
    same([last], [whole[:, :, -2:]])


def test_a_sink_is_one_more_score_of_each_head():
    normalizer, parts = talking()
    query, key, value = inputs()
    sinks = drawn(HEADS)
    found = regard.attention(query, key, value, sinks=sinks, normalizer=normalizer, kernel="tiled")
    at_end = torch.cat([key, torch.zeros(2, KEY_HEADS, 1, 8, dtype=torch.float64)], -2)
    added = torch.cat([torch.zeros(HEADS, QUERIES, KEYS), sinks[:, None, None].expand(HEADS, QUERIES, 1)], -1)
    keep = torch.ones(QUERIES, KEYS + 1, dtype=torch.bool)
    weights = talking_weights(query, at_end, keep, *parts, added=added)
    expected = output_of(weights[..., :-1], value)
    above, leaves = torch.randn(expected.shape, dtype=torch.float64), (query, key, value, sinks, *parts)
    same(torch.autograd.grad(found, leaves, above), torch.autograd.grad(expected, leaves, above))


def test_a_layer_learns_the_matrices_and_decodes():
    layer = regard.nn.Attention(
        regard.nn.Projections(12, num_heads=HEADS),
        mask=masks.causal(),
        normalizer=normalizers.TalkingHeads.learned(HEADS),
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        cache, outputs = layer.make_cache(), []
        for part in x.split([4, 1, 1, 3], dim=1):
            output, cache = layer.step(part, cache)
            outputs.append(output)
    same([torch.cat(outputs, 1)], [layer(x).detach()])
    layer(x).sum().backward()
    mixing = [parameter for name, parameter in layer.named_parameters() if "normalizer" in name]
    assert [tuple(parameter.shape) for parameter in mixing] == [(HEADS, HEADS)] * 2
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in mixing)


def test_a_step_without_the_queries_before_is_refused():
    normalizer = normalizers.MultiToken.learned(HEADS, queries=3, keys=5)
    layer = regard.nn.Attention(regard.nn.Projections(12, num_heads=HEADS), normalizer=normalizer)
    with pytest.raises(
        ConfigurationError, match=r"a step has none of the queries before its own, and weights of MultiT"
    ):
        layer.step(torch.zeros(1, 1, 12), layer.make_cache())


PEAK = """
import resource, sys, torch, regard
from regard import masks, normalizers
normalizer = eval(sys.argv[1])
q, k, v = (torch.randn(1, 2, 8192, 8, requires_grad=True) for _ in range(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
mask = masks.causal() & masks.window(before=300)
regard.attention(q, k, v, mask=mask, normalizer=normalizer).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
@pytest.mark.parametrize("made", ["TalkingHeads.learned(2)", "MultiToken.learned(2, 3, 5)"])
def test_no_weights_of_all_pairs_are_in_memory(made):
    """They would take 512 MiB."""
    command = [sys.executable, "-c", PEAK, f"normalizers.{made}"]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < 128


@every
def test_identities_are_softmax_attention(kind):
    normalizer = (
        normalizers.TalkingHeads.learned(HEADS)
        if kind == "talking"
        else normalizers.MultiToken.learned(HEADS, queries=3, keys=5)
    )
    query, key, value = (tensor.detach().float() for tensor in inputs())
    found = regard.attention(query, key, value, mask=masks.causal(), normalizer=normalizer)
    torch.testing.assert_close(found, regard.attention(query, key, value, mask=masks.causal()))


@every
def test_second_derivatives(kind):
    normalizer, parts = MECHANISMS[kind][0]()
    leaves = drawn(HEADS, 3, 1), drawn(HEADS, 4, 1), drawn(HEADS, 4, 1)
    rest = [part.detach() for part in parts]

    def computed(*tensors: Tensor) -> Tensor:
        query, key, value, first = (tensor.unsqueeze(0) for tensor in tensors)
        own = normalizer.with_parameters([first[0], *rest[1:]])
        return regard.attention(query, key, value, mask=masks.causal(), normalizer=own, kernel="tiled")

    assert torch.autograd.gradgradcheck(computed, (*leaves, parts[0]), fast_mode=True)


@every
def test_it_is_mapped_over_a_batch(kind):
    normalizer, _ = MECHANISMS[kind][0]()
    query, key, value = (tensor.detach() for tensor in inputs())
    expected = regard.attention(query, key, value, normalizer=normalizer)

    def of_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query[None], key[None], value[None], normalizer=normalizer)[0]

    same([torch.vmap(of_one)(query, key, value)], [expected])


WRONG: list[tuple[Normalizer, type[Exception], str]] = [
    (
        normalizers.TalkingHeads(torch.eye(3)),
        ShapeError,
        r"before is \(3, 3\); of 4 heads of queries it needs \(4, 4\)",
    ),
    (normalizers.TalkingHeads(after=torch.eye(4).int()), DtypeError, r"after needs floating-point .* call \.float\(\)"),
    (normalizers.MultiToken(before=torch.ones(3, 2, 3)), ShapeError, r"before is \(3, 2, 3\); it needs .* \(4, ·, ·\)"),
    (normalizers.MultiToken(heads_after=torch.eye(2)), ShapeError, r"heads_after is \(2, 2\); of 4 heads"),
]


@pytest.mark.parametrize(("normalizer", "error", "says"), WRONG)
def test_what_does_not_fit_is_named(normalizer, error, says):
    with pytest.raises(error, match=says):
        regard.attention(*inputs(), normalizer=normalizer)


def test_what_has_no_meaning_is_named():
    with pytest.raises(ConfigurationError, match=r"before is \(4, 2, 4\), over 4 keys; it needs an odd number"):
        normalizers.MultiToken(before=torch.ones(4, 2, 4))
    with pytest.raises(
        ConfigurationError,
        match=r"sinks has no meaning with normalizer=MultiToken\(before=<float64 \(4, 4, 5\)>.*no place among",
    ):
        regard.attention(*inputs(), sinks=torch.zeros(HEADS), normalizer=multi_token()[0])
    jagged = torch.nested.nested_tensor(
        [torch.randn(HEADS, length, 8).transpose(0, 1) for length in (3, 5)], layout=torch.jagged
    ).transpose(1, 2)
    with pytest.raises(ConfigurationError, match=r"weights of multi-token follow from neighbouring queries"):
        regard.attention(jagged, jagged, jagged, normalizer=normalizers.MultiToken.learned(HEADS, 2, 3))
