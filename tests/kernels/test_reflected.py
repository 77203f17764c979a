"""The kernel of PaTH that halves blocks: against the formula with one reflection after another, in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import regard
from regard import biases, lenses, masks
from regard.errors import KernelError
from regard.nn import PathAttention, Projections

CAUSAL = masks.causal()
HEADS, KEY_HEADS, DIM, WIDTH = 4, 2, 8, 6
LENGTHS = [65, 100, 128, 129, 191, 193, 331, 449]


def drawn(length: int, dtype=torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(length)
    shapes = {"query": (HEADS, length, DIM), "key": (KEY_HEADS, length, DIM), "value": (KEY_HEADS, length, WIDTH)}
    found = {name: torch.randn(2, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    found["vectors"] = normalize(torch.randn(2, KEY_HEADS, length, DIM, dtype=torch.float64), dim=-1)
    found["beta"] = 2 * torch.rand(1, KEY_HEADS, length, dtype=torch.float64)
    found["gates"] = logsigmoid(torch.randn(2, HEADS, length, dtype=torch.float64) + 2)
    found["sinks"] = torch.randn(HEADS, dtype=torch.float64)
    return {name: each.to(dtype).requires_grad_() for name, each in found.items()}


def formula(own: dict[str, Tensor], gated: bool, sinks: bool, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp row by row: each token turns all keys before it. keep: (batch or 1, 1, length, length)."""
    key, value, vectors = (own[name].repeat_interleave(2, 1) for name in ("key", "value", "vectors"))
    beta = own["beta"].repeat_interleave(2, 1).unsqueeze(-1)
    sums, turned, outputs, lses = own["gates"].cumsum(-1), key[:, :, :0], [], []
    for row in range(key.shape[2]):
        w = vectors[:, :, row, None]
        turned = turned - beta[:, :, row, None] * (turned * w).sum(-1, keepdim=True) * w
        turned = torch.cat([turned, key[:, :, row, None]], 2)
        scores = (turned @ own["query"][:, :, row, :, None]).squeeze(-1) / DIM**0.5
        if gated:
            scores = scores + sums[:, :, row, None] - sums[:, :, : row + 1]
        if keep is not None:
            scores = scores.masked_fill(~keep[:, :, row, : row + 1], -torch.inf)
        if sinks:
            scores = torch.cat([scores, own["sinks"][:, None].expand(2, -1, 1)], -1)
        outputs.append((scores.softmax(-1).nan_to_num(0.0)[..., None, : row + 1] @ value[:, :, : row + 1]).squeeze(-2))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outputs, 2), torch.stack(lses, 2)


def computed(
    own: dict[str, Tensor],
    gated: bool,
    sinks: bool,
    kernel: str | None = "reflected",
    mask: masks.Mask = CAUSAL,
) -> tuple[Tensor, Tensor]:
    bias = biases.path(own["vectors"], own["beta"])
    bias = bias + biases.forget_gates(own["gates"]) if gated else bias
    given = {"mask": mask, "bias": bias, "sinks": own["sinks"] if sinks else None, "kernel": kernel}
    return regard.attention_with_lse(own["query"], own["key"], own["value"], **given)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_the_formula_with_all_gradients(length, sinks, gated):
    results = []
    for compute in (computed, formula):
        own = drawn(length)
        output, lse = compute(own, gated, sinks)
        total = output.square().sum() + (lse * torch.arange(length)).sum() / length
        total.backward()
        wanted = [each.grad for name, each in own.items() if name not in ("gates", "sinks")]
        wanted += [own["gates"].grad] if gated else []
        wanted += [own["sinks"].grad] if sinks else []
        results.append([output, lse, *wanted])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", [65, 193, 331])
@pytest.mark.parametrize("others", ["window", "narrow window", "padding", "keys", "all"])
def test_windows_and_masks_of_keys(others, length, gated):
    i, j = torch.arange(length)[:, None], torch.arange(length)
    exist = (j >= torch.tensor([[3], [length // 2]])) & (j % 7 != 5)
    lengths = torch.tensor([length - 20, 41])
    windows = {"window": 100, "narrow window": 5, "all": 90}
    mask, keep = CAUSAL, torch.ones(2, 1, length, length, dtype=torch.bool)
    if others in windows:
        mask, keep = mask & masks.window(before=windows[others], after=3), keep & (i - j <= windows[others])
    if others in ("padding", "all"):
        mask, keep = masks.padding(lengths) & mask, keep & (j < lengths[:, None])[:, None, None]
    if others in ("keys", "all"):
        mask, keep = mask & masks.where(keep=exist[:, None, None]), keep & exist[:, None, None]
    results = []
    for compute in (partial(computed, mask=mask), partial(formula, keep=keep)):
        own = drawn(length)
        output, lse = compute(own, gated, sinks=False)
        lse = lse.masked_fill(lse.isinf(), 0.0)
        names = [name for name in own if name not in ("gates", "sinks")] + (["gates"] if gated else [])
        total = output.square().sum() + (lse * torch.arange(length)).sum() / length
        found = torch.autograd.grad(total, [own[name] for name in names])
        results.append([output, lse, *found])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 4e-6), (torch.bfloat16, 4e-2)])
def test_other_dtypes_are_near_float64_of_the_same_numbers(dtype, allowed, gated):
    own = drawn(331, dtype)
    exact = {name: each.detach().double() for name, each in own.items()}
    output, lse = computed(own, gated, sinks=False)
    expected, expected_lse = formula(exact, gated, sinks=False)
    assert output.dtype == dtype
    assert (output.double() - expected).abs().max() <= allowed
    assert (lse.double() - expected_lse).abs().max() <= 1e-5 * (1 if dtype == torch.float32 else 1e3)


def test_nan_and_infinity_reach_the_rows_that_attend_to_them_alone():
    own = {name: each.detach().clone() for name, each in drawn(200, torch.float32).items()}
    clean, _ = computed(own, gated=True, sinks=False)
    own["value"][0, 0, 150] = torch.nan
    own["key"][1, 1, 70] = torch.inf
    own["query"][0, 3, 20] = torch.nan
    found, _ = computed(own, gated=True, sinks=False)
    bad = torch.zeros(2, HEADS, 200, dtype=torch.bool)
    bad[0, :2, 150:], bad[1, 2:, 70:], bad[0, 3, 20] = True, True, True
    torch.testing.assert_close(found[~bad], clean[~bad])
    assert bool(found[bad].isnan().all())


def test_nan_of_keys_that_do_not_exist_reaches_nothing():
    own = {name: each.detach().clone() for name, each in drawn(200, torch.float32).items()}
    mask = CAUSAL & masks.padding(torch.tensor([150, 200])) & masks.window(before=90)
    clean, clean_lse = computed(own, gated=True, sinks=False, mask=mask)
    own["key"][0, :, 150:], own["value"][0, :, 150:] = torch.nan, torch.inf
    found, lse = computed(own, gated=True, sinks=False, mask=mask)
    torch.testing.assert_close(found, clean)
    torch.testing.assert_close(lse, clean_lse)


def test_it_is_chosen_for_long_texts_and_lenses_read_its_weights():
    own = {name: each.detach() for name, each in drawn(1031, torch.float32).items()}
    options = {"mask": masks.causal(), "bias": biases.path(own["vectors"], own["beta"])}
    heads = own["query"], own["key"], own["value"]
    for mask in (CAUSAL, CAUSAL & masks.padding(torch.tensor([1031, 800])), CAUSAL & masks.window(before=300)):
        assert regard.explain(*heads, mask=mask, bias=options["bias"]).kernel.name == "reflected"
    rows = lenses.Weights(rows=slice(1000, 1003))
    seen = regard.observe(*heads, rows, **options)
    values = own["value"].repeat_interleave(2, 1)
    torch.testing.assert_close(seen[rows] @ values, seen.output[:, :, 1000:1003], atol=1e-5, rtol=1e-4)


def test_a_layer_of_a_long_text_is_that_of_its_steps():
    torch.manual_seed(0)
    layer = PathAttention(Projections(16, num_heads=4, num_kv_heads=2), forget_gate=True)
    x, cache, outputs = torch.randn(1, 777, 16), layer.make_cache(), []
    with torch.no_grad():
        for part in x.split([640, *[1] * 137], 1):
            output, cache = layer.step(part, cache)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"mask": CAUSAL & masks.documents(torch.zeros(100).long())},
            "its mask is causal, alone or joined by & to windows",
        ),
        ({"mask": masks.window(before=9)}, "its mask is causal, alone or joined"),
        ({"mask": None}, "its mask is causal, alone or joined"),
        ({"softcap": 5.0}, "it has no softcap"),
        ({"dropout_p": 0.5}, "it has no dropout"),
        ({"bias": biases.alibi(HEADS)}, "its biases are path, once, and forget_gates"),
    ],
)
def test_what_it_does_not_compute_is_named(change, reason):
    own = drawn(100)
    bias = biases.path(own["vectors"], own["beta"])
    options = {"mask": masks.causal(), **change, "bias": bias + change["bias"] if "bias" in change else bias}
    with pytest.raises(KernelError, match=reason):
        regard.attention(own["query"], own["key"], own["value"], kernel="reflected", **options)
