"""torch's MultiheadAttention and its twin: the same parameters, the same results, and what only the twin gets right."""

import copy
import inspect
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import regard
from regard import masks
from regard.errors import ConfigurationError, DeviceError, DtypeError, MaskError, ShapeError
from regard.nn import MultiheadAttention, multihead, swap

BATCH, QUERIES, KEYS = 2, 5, 7
anything: Any = MultiheadAttention  # which may be given what it does not take

constructions = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([1, 2, 3]),
        "bias": st.booleans(),
        "add_bias_kv": st.booleans(),
        "add_zero_attn": st.booleans(),
        "kdim": st.sampled_from([None, 6, 5]),
        "vdim": st.sampled_from([None, 4]),
        "batch_first": st.booleans(),
    }
)
CONSTRUCTIONS = [
    {},
    {"bias": False},
    {"kdim": 5},
    {"vdim": 7, "bias": False},
    {"kdim": 5, "vdim": 7, "add_bias_kv": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"batch_first": True, "dropout": 0.1},
    {"dtype": torch.bfloat16},
    {"device": "cpu", "dtype": torch.float64},
]
many = settings(max_examples=150, deadline=None, derandomize=True)


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's layer and ours with the same random parameters, biases too, in float64."""
    options = {"dtype": torch.float64, **options}
    dim, heads = options.pop("dim", 6), options.pop("heads", 2)
    theirs, ours = nn.MultiheadAttention(dim, heads, **options), MultiheadAttention(dim, heads, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.7)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(layer: nn.MultiheadAttention, *, batched: bool = True, same: bool = False) -> list[torch.Tensor]:
    """Query, key and value of the layer's layout and dtype."""

    def one(length: int, dim: int) -> torch.Tensor:
        shape = (BATCH, length, dim) if layer.batch_first else (length, BATCH, dim)
        return torch.randn(shape if batched else (length, dim), dtype=layer.out_proj.weight.dtype).requires_grad_()

    if same:
        return [one(QUERIES, layer.embed_dim)] * 3
    return [one(QUERIES, layer.embed_dim), one(KEYS, layer.kdim), one(KEYS, layer.vdim)]


def some(*shape: int, kind: str) -> torch.Tensor:
    """A mask in torch's polarity that leaves the first key in."""
    ignored = torch.rand(shape) < 0.4
    ignored[..., 0] = False
    if kind == "bool":
        return ignored
    added = torch.randn(shape, dtype=torch.float64) if kind == "float" else torch.zeros(shape, dtype=torch.float64)
    return added.masked_fill(ignored, -math.inf) if kind != "float" else added


def results(layer: nn.Module, tensors: list[torch.Tensor], leaves: list[torch.Tensor], **call: Any) -> list[Any]:
    """Output, weights or None, and the gradients of inputs, masks and parameters."""
    output, weights = layer(*tensors, **call)
    total = (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum()
    if weights is not None:
        total = total + (weights * torch.linspace(-1, 1, weights.shape[-1], dtype=weights.dtype)).sum()
    wanted = [*{id(leaf): leaf for leaf in [*tensors, *leaves, *layer.parameters()]}.values()]
    return [output, weights, *torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)]


def agree(ours: list[Any], theirs: list[Any], tolerance: float = 1e-11) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)


class TestAgainstTorch:
    @many
    @given(
        options=constructions,
        kind=st.sampled_from(["bool", "float", "-inf"]),
        pairs=st.sampled_from(["none", "2-D", "3-D"]),
        padded=st.booleans(),
        batched=st.booleans(),
        same=st.booleans(),
        need_weights=st.booleans(),
        average=st.booleans(),
    )
    def test_results_and_gradients(self, options, kind, pairs, padded, batched, same, need_weights, average):
        theirs, ours = pair(**options)
        same = same and theirs._qkv_same_embed_dim
        tensors = inputs(theirs, batched=batched, same=same)
        keys = QUERIES if same else KEYS
        heads = options["heads"] * (BATCH if batched else 1)
        call: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average}
        if pairs != "none":
            call["attn_mask"] = some(*([heads] if pairs == "3-D" else []), QUERIES, keys, kind=kind)
        if padded:
            call["key_padding_mask"] = some(*([BATCH] if batched else []), keys, kind=kind)
        learned = [mask.requires_grad_() for mask in call.values() if torch.is_tensor(mask) and kind == "float"]
        agree(results(ours, tensors, learned, **call), results(theirs, tensors, learned, **call))

    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("kind", ["bool", "float"])
    @pytest.mark.parametrize("same", [False, True])
    def test_in_float32(self, kind, need_weights, same):
        theirs, ours = pair(dtype=torch.float32, batch_first=True)
        tensors = inputs(theirs, same=same)
        mask = some(QUERIES, QUERIES if same else KEYS, kind=kind)
        call = {"attn_mask": mask if kind == "bool" else mask.float(), "need_weights": need_weights}
        mine, other = results(ours, tensors, [], **call), results(theirs, tensors, [], **call)
        agree(mine[:2], other[:2], 1e-6)
        agree(mine[2:], other[2:], 1e-5)

    @pytest.mark.parametrize("batch_first", [False, True])
    @pytest.mark.parametrize("hint", [False, True])
    @pytest.mark.parametrize("kind", ["bool", "float"])
    @pytest.mark.parametrize("need_weights", [False, True])
    def test_causal(self, batch_first, hint, kind, need_weights):
        theirs, ours = pair(dim=8, batch_first=batch_first)
        x = torch.randn((2, 131, 8) if batch_first else (131, 2, 8), dtype=torch.float64).requires_grad_()
        mask = nn.Transformer.generate_square_subsequent_mask(131, dtype=torch.float64)
        mask = mask.isinf() if kind == "bool" else mask
        call = {"attn_mask": mask, "is_causal": hint, "need_weights": need_weights}
        agree(results(ours, [x, x, x], [], **call), results(theirs, [x, x, x], [], **call))

    @pytest.mark.parametrize("length", [130, 257])
    def test_longer_sequences_with_padding_at_the_end(self, length):
        theirs, ours = pair(dim=16, heads=4, batch_first=True)
        x = torch.randn(3, length, 16, dtype=torch.float64).requires_grad_()
        padded = torch.arange(length) >= torch.tensor([length, 70, 1])[:, None]
        call = {"key_padding_mask": padded, "need_weights": False}
        agree(results(ours, [x, x, x], [], **call), results(theirs, [x, x, x], [], **call), 1e-10)

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_in_evaluation_without_gradients(self, need_weights):
        theirs, ours = (layer.eval() for layer in pair(batch_first=True))
        x = torch.randn(BATCH, KEYS, 6, dtype=torch.float64)
        padded = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
        with torch.no_grad():
            mine, other = (layer(x, x, x, padded, need_weights) for layer in (ours, theirs))
        agree(list(mine), list(other))

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_autocast(self, need_weights):
        theirs, ours = pair(dtype=torch.float32)
        tensors = inputs(theirs)
        mask = some(QUERIES, KEYS, kind="bool")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mine, other = (layer(*tensors, attn_mask=mask, need_weights=need_weights) for layer in (ours, theirs))
        assert mine[0].dtype == other[0].dtype == torch.bfloat16
        agree(list(mine), list(other), 3e-2)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_weights_have_the_layers_dtype(self, dtype):
        theirs, ours = pair(dtype=dtype)
        mine, other = (layer(*inputs(theirs)) for layer in (ours, theirs))
        assert [tensor.dtype for tensor in mine] == [tensor.dtype for tensor in other] == [dtype, dtype]

    def test_memory_of_the_output_is_as_torch_lays_it_out(self):
        for options in ({"batch_first": True}, {}):
            ours = MultiheadAttention(6, 2, **options)
            assert ours(*inputs(ours), need_weights=False)[0].is_contiguous()


class TestParameters:
    @pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
    def test_first_values_are_torchs(self, options):
        made = []
        for kind in (nn.MultiheadAttention, MultiheadAttention):
            torch.manual_seed(3)
            layer = kind(6, 2, **options)
            made.append((layer.state_dict(), torch.rand(3)))
        (theirs, after), (ours, after_ours) = made
        assert list(ours) == list(theirs)
        assert all(ours[name].equal(theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
        assert after.equal(after_ours)

    @pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
    def test_state_goes_both_ways(self, options):
        theirs, ours, third = (
            kind(6, 2, **options) for kind in (nn.MultiheadAttention, MultiheadAttention, nn.MultiheadAttention)
        )
        given_state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        ours.load_state_dict(theirs.state_dict(), strict=True)
        third.load_state_dict(ours.state_dict(), strict=True)
        assert all(third.state_dict()[name].equal(tensor) for name, tensor in given_state.items())

    @pytest.mark.parametrize("options", CONSTRUCTIONS, ids=str)
    def test_attributes_are_torchs(self, options):
        theirs, ours = nn.MultiheadAttention(6, 2, **options), MultiheadAttention(6, 2, **options)
        names = [name for name in vars(theirs) if not name.startswith("_") or name == "_qkv_same_embed_dim"]
        assert len(names) > 8
        assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
        assert repr(ours) == repr(theirs)
        assert isinstance(ours, nn.MultiheadAttention)
        on_meta = MultiheadAttention(6, 2, device="meta")
        assert on_meta.in_proj_weight.is_meta

    @pytest.mark.parametrize("method", ["__init__", "forward"])
    def test_arguments_are_torchs(self, method):
        theirs, ours = (
            inspect.signature(getattr(kind, method)) for kind in (nn.MultiheadAttention, MultiheadAttention)
        )
        assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
            (p.name, p.default, p.kind) for p in theirs.parameters.values()
        ]

    def test_copies(self):
        ours = MultiheadAttention(6, 2)
        tensors = inputs(ours)
        kept = io.BytesIO()
        torch.save(ours, kept)
        kept.seek(0)
        for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(kept, weights_only=False)):
            assert type(again) is MultiheadAttention
            assert len(again._forward_pre_hooks) == 1
            agree(list(again(*tensors)), list(ours(*tensors)), 0)


class TestBetterThanTorch:
    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("average", [False, True])
    @pytest.mark.parametrize("said", ["padding", "pairs", "-inf", "-inf and numbers"])
    @pytest.mark.parametrize("training", [False, True])
    def test_rows_with_nothing_to_attend_to(self, need_weights, average, said, training):
        theirs, ours = (layer.train(training) for layer in pair(batch_first=True))
        x = torch.randn(BATCH, KEYS, 6, dtype=torch.float64).requires_grad_()
        call: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average}
        nothing = torch.zeros(BATCH, KEYS, dtype=torch.bool)
        nothing[1] = True
        if said == "padding":
            call["key_padding_mask"] = nothing
            rows = nothing
        else:
            ignored = torch.zeros(KEYS, KEYS, dtype=torch.bool)
            ignored[2] = True
            numbers = torch.zeros(KEYS, KEYS, dtype=torch.float64)
            if said == "-inf and numbers":
                numbers = torch.randn(KEYS, KEYS, dtype=torch.float64)
            call["attn_mask"] = ignored if said == "pairs" else numbers.masked_fill(ignored, -math.inf)
            rows = torch.zeros(BATCH, KEYS, dtype=torch.bool)
            rows[:, 2] = True
        output, weights, *gradients = results(ours, [x, x, x], [], **call)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert output[rows].eq(ours.out_proj.bias).all()
        other, other_weights = theirs(x, x, x, **call)
        torch.testing.assert_close(output[~rows], other[~rows])
        if need_weights:
            over_heads = weights if average else weights.movedim(1, 3)
            assert over_heads[rows].eq(0).all()
            assert other_weights.isnan().any()
            other_weights = other_weights if average else other_weights.movedim(1, 3)
            torch.testing.assert_close(over_heads[~rows], other_weights[~rows])

    def test_the_hint_loses_no_mask(self):
        theirs, ours = pair(batch_first=True)
        x = torch.randn(BATCH, KEYS, 6, dtype=torch.float64)
        later = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
        narrow = later | torch.ones(KEYS, KEYS, dtype=torch.bool).tril(-3)
        for mask in (
            narrow,
            torch.zeros(KEYS, KEYS).masked_fill(narrow, -math.inf).double(),
            later | (torch.eye(7) > 0),
        ):
            hinted = ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
            agree([hinted], [ours(x, x, x, attn_mask=mask, need_weights=False)[0]], 0)
        lost = theirs(x, x, x, attn_mask=narrow, is_causal=True, need_weights=False)[0]
        kept = theirs(x, x, x, attn_mask=narrow, need_weights=False)[0]
        assert not torch.allclose(lost, kept)  # what torch makes of the same call
        agree([ours(x, x, x, attn_mask=narrow, is_causal=True, need_weights=False)[0]], [kept])

    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("added", [False, True])
    def test_nan_in_padded_keys_reaches_nothing(self, need_weights, added):
        _, ours = pair(batch_first=True)
        query, key, value = (tensor.detach() for tensor in inputs(ours))
        padded = torch.zeros(BATCH, KEYS, dtype=torch.bool)
        padded[0, 5:] = padded[1, 2] = True
        call = {
            "key_padding_mask": torch.zeros(BATCH, KEYS).double().masked_fill(padded, -math.inf) if added else padded,
            "need_weights": need_weights,
        }
        clean = results(ours, [x.requires_grad_() for x in (query, key, value)], [], **call)
        key, value = (x.detach().masked_fill(padded[..., None], math.nan).requires_grad_() for x in (key, value))
        value.data[0, 6, 0] = math.inf
        agree(results(ours, [query, key, value], [], **call), clean)

    def test_nan_in_padding_of_self_attention_stays_in_its_rows(self):
        _, ours = pair(batch_first=True)
        padded = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
        x = torch.randn(BATCH, KEYS, 6, dtype=torch.float64)
        bad = x.masked_fill(padded[..., None], math.nan).requires_grad_()
        output, _ = ours(bad, bad, bad, key_padding_mask=padded, need_weights=False)
        assert output[padded].isnan().all()
        agree([output[~padded]], [ours(x, x, x, key_padding_mask=padded, need_weights=False)[0][~padded]])
        gradients = torch.autograd.grad(output[~padded].sum(), [bad, *ours.parameters()])
        assert all(gradient.isfinite().all() for gradient in gradients)

    def test_nan_that_is_attended_to_shows(self):
        _, ours = pair(batch_first=True)
        query, key, value = (tensor.detach() for tensor in inputs(ours))
        key[0, 3] = math.nan
        for ignored in (None, torch.zeros(BATCH, KEYS, dtype=torch.bool), torch.arange(7).ge(5).expand(BATCH, 7)):
            output, _ = ours(query, key, value, key_padding_mask=ignored, need_weights=False)
            assert output[0].isnan().all()
            assert output[1].isfinite().all()


class TestHowItIsComputed:
    @pytest.fixture
    def asked(self, monkeypatch) -> list[dict[str, Any]]:
        """What `regard.attention` is asked, call by call."""
        calls: list[dict[str, Any]] = []

        def noted(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
            calls.append(options)
            return regard.attention(*tensors, **options)

        monkeypatch.setattr(multihead, "attention", noted)
        return calls

    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_a_causal_tensor_becomes_the_symbol(self, asked, kind):
        ours = MultiheadAttention(6, 2)
        x = torch.randn(KEYS, BATCH, 6)
        mask = nn.Transformer.generate_square_subsequent_mask(KEYS)
        ours(x, x, x, attn_mask=mask.isinf() if kind == "bool" else mask, need_weights=False)
        assert asked[0]["mask"] == masks.causal()
        assert asked[0]["bias"] is None

    @pytest.mark.parametrize("change", [(3, 1, True), (2, 4, False), (6, 0, True), (0, 6, False)])
    def test_nearly_causal_is_not(self, asked, change):
        ours = MultiheadAttention(6, 2)
        x = torch.randn(KEYS, BATCH, 6)
        mask = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
        row, column, ignored = change
        mask[row, column] = ignored
        ours(x, x, x, attn_mask=mask, need_weights=False)
        assert asked[0]["mask"].dense(KEYS, KEYS).equal(~mask)

    def test_padding_at_the_end_becomes_lengths(self, asked):
        ours = MultiheadAttention(6, 2)
        x = torch.randn(KEYS, BATCH, 6)
        padded = torch.arange(KEYS) >= torch.tensor([[4], [7]])
        for said in (padded, torch.zeros(BATCH, KEYS).masked_fill(padded, -math.inf)):
            ours(x, x, x, key_padding_mask=said, need_weights=False)
        assert [repr(call["mask"]) for call in asked] == ["padding(lengths=[4, 7])"] * 2
        assert asked[1]["bias"] is None

    def test_a_mask_that_leaves_out_nothing_is_none(self, asked):
        ours = MultiheadAttention(6, 2)
        x = torch.randn(KEYS, BATCH, 6)
        ours(x, x, x, torch.zeros(BATCH, KEYS), False, torch.zeros(KEYS, KEYS))
        ours(x, x, x, torch.zeros(BATCH, KEYS) > 0, False, torch.zeros(KEYS, KEYS) > 0)
        assert [(call["mask"], call["bias"]) for call in asked] == [(None, None)] * 2

    def test_dropout_in_training_only(self, asked):
        ours = MultiheadAttention(6, 2, dropout=0.4)
        x = torch.randn(KEYS, BATCH, 6)
        ours(x, x, x, need_weights=False)
        ours.eval()(x, x, x, need_weights=False)
        assert [call["dropout_p"] for call in asked] == [0.4, 0.0]

    @pytest.mark.parametrize("need_weights", [False, True])
    def test_all_dropped(self, need_weights):
        theirs, ours = pair(dropout=1.0)
        tensors = inputs(theirs)
        output, weights, *gradients = results(ours, tensors, [], need_weights=need_weights)
        expected = results(theirs, tensors, [], need_weights=need_weights)
        agree([output], [expected[0]], 0)
        assert output.eq(ours.out_proj.bias).all()
        if need_weights:
            agree([weights], [theirs.eval()(*tensors)[1]])  # before dropout, as ever
        else:
            agree(gradients, expected[2:], 0)
        theirs.eval()
        agree([ours.eval()(*tensors)[0]], [theirs(*tensors)[0]])

    def test_weights_are_those_before_dropout(self):
        theirs, ours = pair(dropout=0.5)
        tensors = inputs(theirs)
        output, weights = ours(*tensors)
        agree([weights], [theirs.eval()(*tensors)[1]])
        assert not torch.allclose(output, theirs(*tensors)[0])
        torch.manual_seed(0)
        first = ours(*tensors)[0]
        torch.manual_seed(0)
        agree([ours(*tensors, need_weights=False)[0]], [first])

    @pytest.mark.covering(strength=1)
    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("padded", [False, True])
    def test_compiled(self, need_weights, padded):
        torch.compiler.reset()
        theirs, ours = pair(batch_first=True)
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        tensors = inputs(theirs)
        call: dict[str, Any] = {"need_weights": need_weights, "attn_mask": some(QUERIES, KEYS, kind="bool")}
        if padded:
            call["key_padding_mask"] = some(BATCH, KEYS, kind="bool")
        output, weights = compiled(*tensors, **call)
        wanted = [*tensors, *ours.parameters()]
        other, other_weights = theirs(*tensors, **call)
        agree([output, weights], [other, other_weights])
        agree(
            list(torch.autograd.grad(output.square().sum(), wanted)),
            list(torch.autograd.grad(other.square().sum(), [*tensors, *theirs.parameters()])),
        )

    def test_second_derivatives(self):
        theirs, ours = pair(dim=4, batch_first=True)
        mask = some(QUERIES, KEYS, kind="bool")
        tensors = inputs(ours)
        seconds = []
        for layer in (ours, theirs):
            output, _ = layer(*tensors, attn_mask=mask)
            first = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
            total = torch.cat([gradient.flatten() for gradient in first]).square().sum()
            seconds.append(list(torch.autograd.grad(total, [*tensors, *layer.parameters()])))
        agree(seconds[0], seconds[1])

    def test_gradients_for_each_of_a_batch(self):
        layers = pair(dim=4, batch_first=True)
        tokens = torch.randn(BATCH, KEYS, 4, dtype=torch.float64)
        mask = some(KEYS, KEYS, kind="bool")

        def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            output, weights = torch.func.functional_call(layer, parameters, (one, one, one), {"attn_mask": mask})
            return output.square().sum() + weights.square().sum()

        ours, theirs = (
            torch.func.vmap(lambda one, layer=layer: torch.func.grad(loss)(dict(layer.named_parameters()), one, layer))(
                tokens
            )
            for layer in layers
        )
        agree(list(ours.values()), list(theirs.values()))

    @pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6)])
    def test_nothing_given(self, shape):
        ours, x = MultiheadAttention(6, 2, batch_first=True), torch.zeros(shape)
        output, weights = ours(x, x, x)
        assert output.shape == shape
        assert weights.shape == (shape[0], shape[1], shape[1])

    def test_inside_torchs_layers(self):
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0)
        x = torch.randn(BATCH, KEYS, 6)
        expected = layer(x)
        ours = MultiheadAttention(6, 2, batch_first=True)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
        torch.testing.assert_close(layer(x), expected)


class TestErrors:
    @pytest.mark.parametrize(
        ("numbers", "match"),
        [
            ((6, 4), "embed_dim is 6 and num_heads 4; heads share the dim evenly"),
            ((0, 1), "embed_dim is 0; it needs at least 1"),
            ((6, 0), "num_heads is 0; it needs at least 1"),
            ((-6, 2), "embed_dim is -6; it needs at least 1"),
        ],
    )
    def test_numbers(self, numbers, match):
        with pytest.raises(ConfigurationError, match=match):
            MultiheadAttention(*numbers)

    @pytest.mark.parametrize("dropout", [1.5, -0.1, math.nan, "a", None])
    def test_dropout(self, dropout):
        with pytest.raises(ConfigurationError, match=rf"dropout is {dropout!r}; it needs a probability in \[0, 1\]"):
            anything(6, 2, dropout=dropout)

    @pytest.mark.parametrize(
        ("name", "wrong", "error", "match"),
        [
            ("query", "a", DtypeError, "query needs a torch.Tensor; it is a str"),
            ("value", None, DtypeError, "value needs a torch.Tensor; it is None"),
            (
                "key",
                torch.int64,
                DtypeError,
                r"key needs floating-point numbers; it is torch.int64: call key.float\(\)",
            ),
            ("query", torch.float64, DtypeError, r"query is torch.float64, but the layer's .* are torch.float32: conv"),
            ("value", torch.bfloat16, DtypeError, r"value is torch.bfloat16, but .* with \.to\(dtype\)"),
            ("key", "meta", DeviceError, r"key is on meta, but the layer's parameters are on cpu: move one of them"),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"kdim": 5}])
    def test_tensors(self, name, wrong, error, match, options):
        ours = MultiheadAttention(6, 2, **options)
        given = dict(zip(("query", "key", "value"), inputs(ours), strict=True))
        given[name] = given[name].to(wrong) if wrong == "meta" or isinstance(wrong, torch.dtype) else wrong
        with pytest.raises(error, match=match):
            ours(**given)

    def test_other_dtypes_under_autocast(self):
        ours = MultiheadAttention(6, 2)
        query, key, value = inputs(ours)
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(query, key.bfloat16(), value.half())[0].dtype == torch.bfloat16
            with pytest.raises(DtypeError, match="key needs floating-point numbers"):
                ours(query, key.long(), value)

    @pytest.mark.parametrize(
        ("shapes", "match"),
        [
            ([(5, 2, 6), (7, 6), (7, 6)], r"query \(5, 2, 6\), key \(7, 6\), .* or all three \(length, dim\)"),
            ([(1, 5, 2, 6)] * 3, r"query \(1, 5, 2, 6\), .* all three need to be \(length, batch, dim\)"),
            (
                [(5, 2, 6), (7, 2, 5), (7, 2, 6)],
                r"key \(7, 2, 5\), .* need to be embed_dim, kdim and vdim .*\(6, 6, 6\)",
            ),
            ([(5, 2, 6), (7, 2, 6), (8, 2, 6)], r"key \(7, 2, 6\), value \(8, 2, 6\): each key needs one value"),
            ([(5, 2, 6), (5, 3, 6), (5, 3, 6)], r"batch_first=False these are \(length, batch, dim\), .* 2 and 3"),
        ],
    )
    def test_shapes(self, shapes, match):
        with pytest.raises(ShapeError, match=match):
            MultiheadAttention(6, 2)(*(torch.zeros(shape) for shape in shapes))

    def test_batches_in_front(self):
        with pytest.raises(ShapeError, match=r"batch_first=True these are \(batch, length, dim\), .* 5 and 7"):
            MultiheadAttention(6, 2, batch_first=True)(*(torch.zeros(m, 2, 6) for m in (5, 7, 7)))

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (
                {"attn_mask": torch.zeros(5, 6)},
                r"attn_mask has the shape \(5, 6\); it needs \(queries, keys\) \(5, 7\)",
            ),
            ({"attn_mask": torch.zeros(2, 5, 7)}, r"\(2, 5, 7\); it needs .* or \(batch · heads, .*\) \(4, 5, 7\)"),
            (
                {"attn_mask": torch.zeros(5, 7, dtype=torch.int64)},
                r"attn_mask is torch.int64, whose polarity is not cl",
            ),
            ({"key_padding_mask": torch.zeros(2, 5)}, r"key_padding_mask has the shape \(2, 5\); .*keys\) \(2, 7\)"),
            ({"key_padding_mask": torch.zeros(7)}, r"key_padding_mask has the shape \(7,\); .*keys\) \(2, 7\)"),
            ({"key_padding_mask": torch.zeros(2, 7, dtype=torch.uint8)}, r"key_padding_mask is torch.uint8"),
            ({"attn_mask": [[1]]}, r"attn_mask is a list; it needs a tensor: bool, where True = leave out, or floats"),
            ({"key_padding_mask": "a"}, r"key_padding_mask is a str; it needs a tensor"),
            ({"is_causal": True}, r"is_causal is a hint that attn_mask is causal, and needs attn_mask"),
        ],
    )
    def test_masks(self, call, match):
        ours = MultiheadAttention(6, 2)
        with pytest.raises(MaskError, match=match):
            ours(*inputs(ours), **call)

    @pytest.mark.parametrize("call", [{"attn_mask": torch.zeros(5, 7)}, {"key_padding_mask": torch.zeros(2, 7)}])
    def test_masks_on_another_device(self, call):
        ours = MultiheadAttention(6, 2)
        (name, mask), *_ = call.items()
        with pytest.raises(DeviceError, match=rf"{name} is on meta, but query, key and value are on cpu: move it with"):
            ours(*inputs(ours), **{name: mask.to("meta")})

    def test_a_batch_of_padding_for_one_sequence(self):
        ours = MultiheadAttention(6, 2)
        with pytest.raises(MaskError, match=r"key_padding_mask has the shape \(2, 7\); it needs \(keys,\) \(7,\)"):
            ours(*inputs(ours, batched=False), key_padding_mask=torch.zeros(2, 7))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_nested_tensors(self):
        nested = torch.nested.nested_tensor([torch.zeros(3, 6), torch.zeros(2, 6)])
        with pytest.raises(ShapeError, match="nested tensor; .* encoder.use_nested_tensor = False, as regard.nn.swap"):
            MultiheadAttention(6, 2, batch_first=True)(nested, nested, nested)


class TestScripting:
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script")
    def test_a_clear_error_alone_and_inside_a_model(self):
        encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        layers = (
            MultiheadAttention(8, 2),
            swap(encoder).model,
            regard.nn.Attention(regard.nn.Projections(8, 2)),
        )
        for layer in layers:
            with pytest.raises(ConfigurationError, match=r"torch\.jit\.script cannot compile regard\.nn\."):
                torch.jit.script(layer)


class TestBiasDtype:
    def test_a_bias_of_another_dtype(self):
        layer, x = MultiheadAttention(8, 2).half(), torch.zeros(3, 1, 8, dtype=torch.half)
        layer.in_proj_bias = nn.Parameter(layer.in_proj_bias.double())
        with pytest.raises(
            DtypeError, match=r"in_proj_bias is torch\.float64, but the weights of the projections are torch\.float16"
        ):
            layer(x, x, x)

    def test_autocast_casts_it(self):
        layer, x = MultiheadAttention(8, 2), torch.zeros(3, 1, 8)
        layer.in_proj_bias = nn.Parameter(layer.in_proj_bias.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x, x, x)[0].shape == (3, 1, 8)
