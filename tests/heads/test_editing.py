"""Edited terms of attention, against the sums written out in float64, in whole sequences and step by step."""

import math

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.errors import ConfigurationError, CorpusError, ShapeError
from regard.explorer import record
from regard.heads import HeadTerms, align_tokens, capture_patch, editing, mean_outputs, mean_values
from regard.nn import Attention, Projections

HEADS, SHARED, QUERIES, KEYS, DIM = 6, 2, 37, 53, 5


class Plain(nn.Module):
    """A module that attends, with as many options as `regard.attention`."""

    def __init__(self, **options):
        super().__init__()
        self.inner = Called(options)

    def forward(self, *tensors):
        return self.inner(*tensors)


class Called(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, *tensors):
        return regard.attention(*tensors, **self.options)


def tensors(batch=2, dtype=torch.float32):
    draw = torch.Generator().manual_seed(3)
    sizes = (batch, HEADS, QUERIES, DIM), (batch, SHARED, KEYS, DIM), (batch, SHARED, KEYS, 3)
    return [torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]


def weights_and_values(given, keep, dropped=None):
    """Weights (B, H, M, N) and values for each query head, in float64; dropped: pairs that are masked too."""
    query, key, value = given
    query, key, value = query.double(), *(of.double().repeat_interleave(HEADS // SHARED, 1) for of in (key, value))
    scores = (query @ key.mT / math.sqrt(DIM)).masked_fill(~keep, -math.inf)
    if dropped is not None:
        scores = scores.masked_fill(dropped, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0), value


def chosen_pairs(terms):
    """Which terms are meant, (H, M, N); queries are the last of the positions of the keys."""
    found = torch.zeros(HEADS, QUERIES, KEYS, dtype=torch.bool)
    for each in [terms] if isinstance(terms, HeadTerms) else terms:
        own = torch.ones_like(found)
        for axis, wanted, first in ((0, each.heads, 0), (1, each.queries, KEYS - QUERIES), (2, each.keys, 0)):
            if wanted is not None:
                inside = torch.zeros(own.shape[axis], dtype=torch.bool)
                inside[[at - first for at in wanted if 0 <= at - first < len(inside)]] = True
                own &= inside.view([-1 if axis == at else 1 for at in range(3)])
        found |= own
    return found


CASES = {
    "a head": HeadTerms("inner", heads=[4]),
    "a layer": HeadTerms("inner"),
    "a token": HeadTerms(keys=[17]),
    "what a token reads": HeadTerms(queries=[29]),
    "a link": HeadTerms("inner", heads=[1, 2], queries=[40], keys=[27]),
    "several keys, also one that is masked": HeadTerms(heads=[0, 5], queries=[20, 21], keys=[3, 19, 50]),
    "what overlaps": [
        HeadTerms(keys=[5, 6]),
        HeadTerms(heads=[2], queries=[45, 46], keys=[6, 30]),
        HeadTerms(heads=[3]),
    ],
}


@pytest.mark.parametrize("terms", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("masked", [False, True])
def test_terms_of_zero_are_left_out_of_the_sum(terms, masked):
    mask = masks.causal() & masks.window(before=23) if masked else ~(masks.causal() & ~masks.causal())
    model, given = Plain(mask=mask), tensors()
    keep = mask.dense(QUERIES, KEYS)
    weights, value = weights_and_values(given, keep)
    pairs = chosen_pairs(terms)
    with editing(model, terms):
        edited = model(*given)
    expected = weights.masked_fill(pairs, 0.0) @ value
    torch.testing.assert_close(edited.double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(*given).double(), expected, atol=1e-3)


@pytest.mark.parametrize("terms", CASES.values(), ids=CASES.keys())
def test_masked_terms_leave_their_weight_to_the_others(terms):
    mask, given = masks.causal(), tensors()
    model, pairs = Plain(mask=mask), chosen_pairs(terms)
    weights, value = weights_and_values(given, mask.dense(QUERIES, KEYS), pairs)
    with editing(model, terms, replace="mask"):
        torch.testing.assert_close(model(*given).double(), weights @ value, rtol=1e-5, atol=1e-6)


def test_means_take_the_place_of_values_and_of_outputs():
    model, given = Plain(), tensors()
    weights, value = weights_and_values(given, torch.ones(QUERIES, KEYS, dtype=torch.bool))
    means = mean_values(model, lambda: [model(*given), model(*given)])
    mean = given[2].double().mean((0, 2))
    torch.testing.assert_close(means["inner"].double(), mean, rtol=1e-5, atol=1e-6)
    link = HeadTerms(heads=[1, 5], queries=[20, 50], keys=[3, 19])
    changed = weights * chosen_pairs(link)
    expected = weights @ value - changed @ value + changed.sum(-1, keepdim=True) * mean.repeat_interleave(3, 0)[:, None]
    with editing(model, link, replace=means):
        torch.testing.assert_close(model(*given).double(), expected, rtol=1e-5, atol=1e-6)
    outputs = {"inner": torch.arange(18.0).view(6, 3)}
    with editing(model, HeadTerms(heads=[2], queries=[33]), replace=outputs):
        edited = model(*given)
    row = 33 - (KEYS - QUERIES)
    assert edited[:, 2, row].equal(outputs["inner"][2].expand(2, 3))
    torch.testing.assert_close(edited[:, 3:].double(), (weights @ value)[:, 3:], rtol=1e-5, atol=1e-6)


def test_a_row_with_infinity_behind_the_mask_has_no_nan():
    model, given = Plain(mask=masks.causal()), tensors()
    given[1][:, :, -1] = math.inf
    given[2][:, :, -1] = math.nan
    for replace in ("zero", "mask"):
        with editing(model, HeadTerms(keys=[2]), replace=replace):
            assert model(*given)[:, :, :-1].isfinite().all()


def test_edits_have_gradients():
    model, link = Plain(mask=masks.causal()), HeadTerms(heads=[1], queries=[40], keys=[7])
    given = [of.requires_grad_() for of in tensors(dtype=torch.float64)]
    with editing(model, link):
        found = torch.autograd.grad(model(*given).square().sum(), given)
    weights, value = weights_and_values(given, masks.causal().dense(QUERIES, KEYS))
    expected = torch.autograd.grad((weights.masked_fill(chosen_pairs(link), 0.0) @ value).square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def layer_and_text(batch=2, length=11):
    torch.manual_seed(5)
    layer = Attention(Projections(12, num_heads=4, num_kv_heads=2), mask=masks.causal())
    return nn.Sequential(layer).eval(), torch.randn(batch, length, 12)


def stepwise(model, text):
    layer, steps = model[0], []
    cache = layer.make_cache()
    for token in text.split(1, dim=1):
        output, cache = layer.step(token, cache)
        steps.append(output)
    return torch.cat(steps, 1)


STEPPED = {
    "a head": HeadTerms("0", heads=[3]),
    "a token": HeadTerms(keys=[2]),
    "a link": HeadTerms(heads=[0, 1], queries=[7], keys=[2, 7]),
}


@pytest.mark.parametrize("terms", STEPPED.values(), ids=STEPPED.keys())
@pytest.mark.parametrize("by", ["zero", "mask", "means", "patch"])
def test_decoding_step_by_step_is_edited_as_the_whole(terms, by):
    model, text = layer_and_text()
    replace = by
    with torch.no_grad():
        if by == "means":
            means = mean_outputs if terms.keys is None else mean_values
            replace = means(model, lambda: model(torch.randn(3, 5, 12)))
        if by == "patch":
            replace = capture_patch(model, lambda: model(text.roll(1, 1)), terms)
        with editing(model, terms, replace=replace):
            whole, steps = model(text), stepwise(model, text)
        torch.testing.assert_close(steps, whole, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(stepwise(model, text), whole, atol=1e-4)


def test_a_run_in_steps_gives_the_patch_of_a_whole_run():
    model, text = layer_and_text()
    terms = HeadTerms(queries=range(3, 9), keys=[1, 2])
    with torch.no_grad():
        patches = [
            capture_patch(model, lambda run=run: run(text.roll(1, 1)), terms)
            for run in (model, lambda x: stepwise(model, x))
        ]
        results = []
        for patch in patches:
            with editing(model, terms, replace=patch):
                results.append(model(text))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_patched_link_is_that_of_the_other_run():
    model, given = Plain(mask=masks.causal()), tensors()
    other = [of.roll(1, -1) for of in given]
    link = HeadTerms(heads=[1, 4], queries=[40, 41], keys=[7, 9])
    patch = capture_patch(model, lambda: model(*other), link)
    keep, pairs = masks.causal().dense(QUERIES, KEYS), chosen_pairs(link)
    weights, value = weights_and_values(given, keep)
    earlier, values = weights_and_values(other, keep)
    expected = weights.masked_fill(pairs, 0.0) @ value + (earlier * pairs) @ values
    with editing(model, link, replace=patch):
        torch.testing.assert_close(model(*given).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_patch_between_texts_of_different_lengths_says_what_is_aligned():
    model, _ = layer_and_text()
    table = torch.randn(20, 12)
    before, now = ["the", "cat", "sat", "down"], ["the", "old", "cat", "lay", "down"]
    words = {word: number for number, word in enumerate(sorted({*before, *now}))}
    texts = [table[[words[word] for word in text]][None] for text in (before, now)]
    alignment = align_tokens(before, now)
    assert alignment.pairs == ((0, 0), (1, 2), (2, 3), (3, 4))
    assert str(alignment) == "4 tokens are aligned; now alone: 1 'old'"
    assert (alignment.unaligned_before, alignment.unaligned_now) == ((), (1,))
    assert "before alone: 1 'old'" in str(align_tokens(now, before))
    seen = []
    with torch.no_grad():
        patch = capture_patch(model, lambda: model(texts[0]), alignment=alignment)
        with model.get_submodule("0.projections.output").register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        ):
            for text in texts:
                model(text)
            with editing(model, HeadTerms("0", heads=[2]), replace=patch):
                model(texts[1])
    of_before, plain, patched = (of.unflatten(-1, (4, 3)) for of in seen)
    assert patched[:, [0, 2, 3, 4], 2].equal(of_before[:, :, 2])
    assert patched[:, 1].equal(plain[:, 1])
    assert patched[:, :, [0, 1, 3]].equal(plain[:, :, [0, 1, 3]])
    unaligned = capture_patch(model, lambda: model(texts[0]))
    message = r"has 4 rows, and the call 5: between texts whose tokens differ in number"
    with pytest.raises(ShapeError, match=message), editing(model, HeadTerms("0", heads=[2]), replace=unaligned):
        model(texts[1])
    with pytest.raises(
        ConfigurationError, match=r"none of the keys \[1\] has a partner: 4 tokens are aligned; now alon"
    ):
        capture_patch(model, lambda: model(texts[0]), HeadTerms(keys=[1]), alignment=alignment)


def test_blocks_stand_in_one_another():
    model, given = Plain(), tensors()
    with editing(model, HeadTerms(heads=[1])), editing(model, HeadTerms(heads=[2])):
        both = model(*given)
    with editing(model, HeadTerms(heads=[1, 2])):
        assert model(*given).equal(both)


def test_a_record_sees_the_edited_model():
    layers = nn.Sequential(*(Attention(Projections(12, num_heads=4), mask=masks.causal()) for _ in range(2))).eval()
    text = torch.randn(1, 7, 12)
    whole = slice(0, 7)

    def weights(recording):
        return [torch.from_numpy(of.weights(0, whole, whole)) for of in recording.atlas().maps]

    with torch.no_grad():
        with record(layers) as plain:
            expected = layers(text)
        with record(layers) as around, editing(layers, HeadTerms("0")):
            first = layers(text)
        with editing(layers, HeadTerms("0")), record(layers) as inside:
            second = layers(text)
    assert first.equal(second)
    assert not first.equal(expected)
    for edited in (weights(around), weights(inside)):
        torch.testing.assert_close(edited[0], weights(plain)[0])
        assert not torch.allclose(edited[1], weights(plain)[1], atol=1e-3)
    with torch.no_grad(), editing(layers, HeadTerms("0", keys=[3]), replace="mask"), record(layers) as masked:
        layers(text)
    assert weights(masked)[0][:, 3].eq(0).all()


def test_lenses_see_masked_pairs():
    layer, text = Attention(Projections(12, num_heads=4)).eval(), torch.randn(1, 7, 12)
    whole = regard.lenses.Weights()
    with torch.no_grad(), editing(layer, HeadTerms(queries=[4], keys=[3]), replace="mask"):
        seen = layer.observe(text, whole)
        assert seen[whole][0, :, 4, 3].eq(0).all()
        assert seen[whole][0, :, 5, 3].gt(0).all()
        torch.testing.assert_close(seen.output, layer(text))


def test_memory_is_linear():
    model = Plain(mask=masks.causal())
    query, key, value = (torch.randn(1, 1, 30_000, 4) for _ in range(3))
    key[:, :, 5] = 60 * query[:, :, 29_000] / query[:, :, 29_000].square().sum()  # nearly all weight of that row
    link = HeadTerms(queries=[29_000], keys=[5])
    for replace in ("zero", "mask"):  # all weights would take 3.6 GB, and a bool for each pair 900 MB
        with editing(model, link, replace=replace):
            edited = model(query, key, value)
        changed = (edited - model(query, key, value)).abs().amax(-1)
        assert changed.argmax() == 29_000
        assert changed[0, 0, 29_000] > 0.1
        changed[0, 0, 29_000] = 0.0
        assert changed.max() < 1e-4


@pytest.mark.parametrize(
    ("terms", "options", "message"),
    [
        (HeadTerms("innner"), {}, "there is no module 'innner'; did you mean 'inner'"),
        (HeadTerms("inner", heads=[6]), {}, "'inner' has the heads 0 to 5; it was asked for 6"),
        (HeadTerms(keys=[53]), {}, "editing changed nothing: no call in the block had a term of "),
        ([], {}, "editing needs regard.heads.HeadTerms, one or several; it was given"),
        (HeadTerms(), {"replace": "noise"}, "replace needs 'zero', 'mask', means by module, or what capture_patch .*"),
        (HeadTerms(), {"replace": "mean"}, r"it is 'mean': the mean over a text comes from mean_outputs"),
        (HeadTerms(), {"replace": {"Inner": torch.ones(6, 3)}}, "replace has no means of .inner.; did you mean"),
        (HeadTerms(), {"replace": {"inner": torch.ones(2, 3)}}, r"means of 'inner' have the shape \(2, 3\); they need "
         r"\(6, 3\), as regard.heads.mean_outputs"),
        (HeadTerms(keys=[1]), {"replace": {"inner": torch.ones(6, 3)}}, r"need \(2, 3\), as regard.heads.mean_val"),
    ],
)  # fmt: skip
def test_what_cannot_be_edited(terms, options, message):
    model, given = Plain(), tensors()
    with pytest.raises((ConfigurationError, ShapeError), match=message), editing(model, terms, **options):
        model(*given)
    assert model(*given).isfinite().all()


@pytest.mark.parametrize("wrong", [[], [-1], [True], "12", 3, [1.0]])
def test_terms_are_whole_numbers(wrong):
    with pytest.raises(ConfigurationError, match="HeadTerms needs keys as a list of whole numbers of at least 0"):
        HeadTerms(keys=wrong)


def test_what_cannot_be_patched():
    model, given = Plain(), tensors()
    patch = capture_patch(model, lambda: model(*given), HeadTerms(keys=[3]))
    with pytest.raises(
        ConfigurationError, match=r"the patch has the sums over the keys \[3\], and the terms are of all"
    ):
        editing(model, HeadTerms(), replace=patch).__enter__()
    with pytest.raises(ConfigurationError, match="the run called 'inner' twice for the same position"):
        capture_patch(model, lambda: [model(*given), model(*given)])
    with pytest.raises(ConfigurationError, match="no attention of this Linear was called: it needs to compute its"):
        capture_patch(nn.Linear(2, 2), lambda: None)
    with pytest.raises(CorpusError, match="align_tokens needs two lists of tokens"):
        align_tokens("the cat", ["the"])
    other = [of[:, :, ::2] if of.shape[2] == KEYS else of for of in tensors(batch=3)]
    shaped = capture_patch(model, lambda: model(*other))
    with (
        pytest.raises(
            ShapeError, match=r"the patch of 'inner' has 37 rows, and the call 37|of the shape \(3, 6, 37, 3\)"
        ),
        editing(model, HeadTerms(), replace=shaped),
    ):
        model(*given)


def test_dropout_is_refused_where_single_terms_are_replaced():
    layer = Attention(Projections(12, num_heads=4), dropout=0.5).train()
    message = "'Attention' drops weights.*call model.eval"
    with pytest.raises(ConfigurationError, match=message), editing(layer, HeadTerms(keys=[1])):
        layer(torch.randn(1, 3, 12))
