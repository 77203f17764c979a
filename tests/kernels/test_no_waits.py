"""No public call waits for a device whose mask is already there: one that there is not (device_tensors.py), and CUDA.

The second of two calls reads nothing back and brings nothing over; where the mask is a formula, neither does the first.
Results and gradients are those of the CPU.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_tensors import DEVICE, DeviceTensor, backward, device, on_device, on_host, recorded_waits, to_device
from torch import Tensor, nn

import regard
from regard import biases, lenses, masks
from regard.backends.registry import some_nan_safe
from regard.backends.triton import jit_runtime
from regard.kernels import KERNELS, Kernel, flex
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.decode import DecodeKernel
from regard.kernels.tiled import TiledKernel
from regard.kernels.validation import make_problem
from regard.lenses import base as lens_memory
from regard.models.language_model import LanguageModel
from regard.models.language_model.config import (
    AttentionConfig,
    GatedFeedForwardConfig,
    LanguageModelConfig,
    LayerConfig,
)
from regard.testing import assert_agrees, suite

LENGTH, HEADS, KEY_HEADS, DIM = 67, 4, 2, 16
LENGTHS = torch.tensor([67, 31])
DOCUMENTS = torch.arange(LENGTH) // 20
KEEP = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.5
TABLE = torch.randn(HEADS, 17, generator=torch.Generator().manual_seed(2))
DECAY = torch.full((2, KEY_HEADS, LENGTH), -0.1)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

Place = Callable[[Tensor], Tensor]
"""Where a mask's or a bias's tensor is: itself, or a copy on the device."""

FORMULAS: dict[str, Callable[[Place], masks.Mask | None]] = {
    "none": lambda place: None,
    "causal": lambda place: masks.causal(),
    "window": lambda place: masks.causal() & masks.window(before=20),
    "prefix": lambda place: masks.causal() | masks.prefix(9),
    "strided": lambda place: masks.strided(8),
    "fixed": lambda place: masks.fixed(8, 2),
    "function": lambda place: masks.from_mod(lambda b, h, q, k: q >= k + 3),
}
"""Masks that have no tensor."""
TENSORS: dict[str, Callable[[Place], masks.Mask | None]] = {
    "padding": lambda place: masks.padding(place(LENGTHS)),
    "causal padding": lambda place: masks.causal() & masks.padding(place(LENGTHS)),
    "documents": lambda place: masks.causal() & masks.documents(place(DOCUMENTS)),
    "where": lambda place: masks.where(keep=place(KEEP)),
    "random blocks": lambda place: masks.random_blocks(LENGTH, 8, 2),
    "padding of the host": lambda place: masks.padding(LENGTHS),
}
OPTIONS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "alibi": lambda place: {"bias": biases.alibi(HEADS), "mask": masks.causal()},
    "slopes": lambda place: {"bias": biases.alibi(place(SLOPES))},
    "clipped": lambda place: {"bias": biases.clipped(place(TABLE), before=8, after=8), "mask": masks.causal()},
    "tensor bias": lambda place: {"bias": place(TABLE[:, :1].expand(HEADS, LENGTH)[:, None])},
    "function bias": lambda place: {"bias": biases.from_mod(lambda s, b, h, q, k: s - 0.1 * (q - k).abs())},
    "softcap": lambda place: {"softcap": 5.0},
    "softcap causal": lambda place: {"softcap": 5.0, "mask": masks.causal()},
    "sinks": lambda place: {"sinks": place(SLOPES), "mask": masks.causal()},
    "dropout": lambda place: {"dropout_p": 0.2, "mask": masks.causal()},
    "positions": lambda place: {
        "query_positions": range(100, 167),
        "key_positions": range(90, 157),
        "mask": masks.causal(),
    },
}


@pytest.fixture(autouse=True)
def a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device without Triton, whose memory is not known; none for the tests on CUDA."""
    if request.node.get_closest_marker("cuda"):
        yield
        return
    monkeypatch.setattr(flex, "has_triton", lambda: False)
    monkeypatch.setattr(jit_runtime, "DEVICE", "no device")
    some_nan_safe.cache_clear()
    monkeypatch.setattr(lens_memory, "device_memory", lambda device: None)
    with device():
        yield
    some_nan_safe.cache_clear()


def drawn(queries: int = LENGTH, keys: int = LENGTH, seed: int = 0) -> list[Tensor]:
    """Query, key and value on the host."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys)
    return [torch.randn(2, *size, DIM, generator=generator) for size in sizes]


def host(tensor: Tensor) -> Tensor:
    return tensor


def results(call: Callable[..., Tensor], inputs: list[Tensor], place: Place, gradient: bool) -> list[Tensor]:
    """The output of a call, and the gradients of its inputs, on the host."""
    if place is host:
        leaves = [tensor.clone().requires_grad_(gradient) for tensor in inputs]
    else:
        leaves = [on_device(tensor, requires_grad=gradient) for tensor in inputs]
    torch.manual_seed(3)
    output = call(*leaves)
    if not gradient:
        return [on_host(output.detach())]
    backward(output)
    return [on_host(each) for each in (output.detach(), *(leaf.grad for leaf in leaves)) if each is not None]


def assert_no_waits(call: Callable[..., Tensor], inputs: list[Tensor], gradient: bool, *, first: bool = False) -> None:
    """The second call waits for nothing, or, if `first`, the first; and it gives what the same gives on the CPU."""
    if not first:
        results(call, inputs, on_device, gradient)
    with recorded_waits() as waits:
        found = results(call, inputs, on_device, gradient)
        assert waits == []
    assert all(not isinstance(each, DeviceTensor) for each in found)


def assert_equal_to_the_cpu(found: list[Tensor], expected: list[Tensor]) -> None:
    for has, truth in zip(found, expected, strict=True):
        assert torch.equal(has.isnan(), truth.isnan())
        torch.testing.assert_close(
            has, truth, rtol=2e-5, atol=2e-6 * max(float(truth.nan_to_num().abs().max()), 1.0), equal_nan=True
        )


@pytest.mark.parametrize("gradient", [False, True], ids=["output", "gradient"])
class TestAttention:
    @pytest.mark.parametrize("mask", [*FORMULAS, *TENSORS])
    def test_masks(self, mask, gradient):
        make = {**FORMULAS, **TENSORS}[mask]
        own, inputs = make(on_device), drawn()

        def call(*tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, mask=own)

        assert_no_waits(call, inputs, gradient, first=mask in FORMULAS)
        expected = results(lambda *tensors: regard.attention(*tensors, mask=make(host)), inputs, host, gradient)
        assert_equal_to_the_cpu(results(call, inputs, on_device, gradient), expected)

    @pytest.mark.parametrize("options", OPTIONS)
    def test_options(self, options, gradient):
        own, others, inputs = OPTIONS[options](on_device), OPTIONS[options](host), drawn()

        def call(*tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, **own)

        assert_no_waits(call, inputs, gradient)
        expected = results(lambda *tensors: regard.attention(*tensors, **others), inputs, host, gradient)
        assert_equal_to_the_cpu(results(call, inputs, on_device, gradient), expected)

    @pytest.mark.parametrize("kernel", ["sdpa", "decode", "block_sparse", "decomposed", "tiled", "reference"])
    def test_kernels(self, kernel, gradient):
        queries = 4 if kernel == "decode" else LENGTH
        mask, inputs = masks.strided(8), drawn(queries)
        assert_no_waits(lambda *tensors: regard.attention(*tensors, mask=mask, kernel=kernel), inputs, gradient)

    @pytest.mark.parametrize("shape", ["(M,)", "(batch, M)"])
    @pytest.mark.parametrize("kernel", [None, "decode", "block_sparse", "tiled"])
    def test_tensors_of_positions(self, kernel, shape, gradient):
        queries = 4 if kernel == "decode" else LENGTH
        of_keys = torch.arange(LENGTH) if shape == "(M,)" else torch.arange(LENGTH) - torch.tensor([[0], [9]])
        keys, own = on_device(of_keys), on_device(of_keys[..., -queries:])
        options: dict[str, Any] = {"mask": masks.causal(), "kernel": kernel}

        def call(*tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, query_positions=own, key_positions=keys, **options)

        inputs = drawn(queries)
        assert_no_waits(call, inputs, gradient)
        expected = results(lambda *each: regard.attention(*each, **options), inputs, host, gradient)
        assert_equal_to_the_cpu(results(call, inputs, on_device, gradient), expected)

    def test_few_keys(self, gradient):
        assert_no_waits(regard.attention, drawn(5, 7), gradient, first=True)

    @pytest.mark.parametrize("mask", ["none", "causal", "causal padding"])
    def test_decoding(self, mask, gradient):
        own = {**FORMULAS, **TENSORS}[mask](on_device)
        assert_no_waits(lambda *tensors: regard.attention(*tensors, mask=own), drawn(1), gradient)

    def test_log_sum_exp(self, gradient):
        def call(*tensors: Tensor) -> Tensor:
            output, lse = regard.attention_with_lse(*tensors, mask=masks.causal())
            assert lse.dtype == torch.float32
            return output.sum(-1) + lse

        assert_no_waits(call, drawn(), gradient, first=True)

    def test_scaled_dot_product_attention(self, gradient):
        keep = on_device(KEEP)
        assert_no_waits(
            lambda q, k, v: regard.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True), drawn(), gradient
        )

    @pytest.mark.parametrize("kernel", [None, "tiled"])
    @pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
    def test_additive_scores(self, kernel, size, gradient):
        torch.manual_seed(0)
        score = regard.scores.Additive(DIM, DIM, 8)
        own, (query, key, value) = to_device(copy.deepcopy(score)), (tensor[:, :2] for tensor in drawn())
        inputs = [size * query, size * key, value]
        options: dict[str, Any] = {"mask": masks.causal(), "kernel": kernel}

        def call(*tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, score=own, **options)

        assert_no_waits(call, inputs, gradient)
        expected = results(lambda *each: regard.attention(*each, score=score, **options), inputs, host, gradient)
        assert_equal_to_the_cpu(results(call, inputs, on_device, gradient), expected)

    @pytest.mark.parametrize(
        ("mask", "decay"),
        [("none", None), ("causal", None), ("causal padding", None), ("documents", None), ("causal", DECAY)],
    )
    def test_linear_attention(self, mask, decay, gradient):
        own, inputs = {**FORMULAS, **TENSORS}[mask](on_device), drawn()
        gate = None if decay is None else on_device(decay)
        assert_no_waits(lambda *each: regard.linear_attention(*each, mask=own, decay=gate), inputs, gradient)


OBSERVED: dict[str, Any] = {
    "entropy": lenses.Entropy(),
    "weights": lenses.Weights(),
    "received": lenses.Received(),
    "pooled": lenses.Pooled(16),
    "distance": lenses.Distance(),
    "mass": lenses.Mass(DOCUMENTS),
    "top": lenses.TopK(3),
    "alignment": lenses.Alignment(),
}


def of_lenses(waits: list[str]) -> bool:
    """Whether all that is waited for is whether some log-sum-exp is too large for float32, once."""
    return len(waits) == 1 and "core/log_sum_exp.py" in waits[0]


@pytest.mark.parametrize("lens", OBSERVED)
def test_observe_waits_once(lens):
    if lens == "top":
        pytest.skip("a device that there is not cannot be written to by `out=`")

    def call(*tensors: Tensor) -> Tensor:
        query, key, value = tensors
        return regard.observe(query, key, value, OBSERVED[lens], mask=masks.causal()).output

    inputs = drawn()
    results(call, inputs, on_device, False)
    with recorded_waits() as waits:
        results(call, inputs, on_device, False)
        assert of_lenses(waits), waits


def poisoned(places: str) -> list[Tensor]:
    """Query, key and value with NaN and infinity: in a key that some rows attend to, and in one that none does.

    No score is -infinity: such pairs count as masked where numbers are read, and only there.
    """
    query, key, value = drawn()
    query[0, :2, :, 3] = query[0, :2, :, 3].abs()  # where key 40 has infinity
    key[0, 0, 40, 3], key[1, 1, 60, 2] = math.inf, math.nan
    value[0, 1, 50, 5], value[1, 0, 45, 7], value[1, 1, 62] = math.nan, -math.inf, math.nan
    if places == "queries too":
        query[0, 2, 30, 1], query[1, 3, 20, 4] = math.nan, math.inf
    return [query, key, value]


NAN_CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(before=9)},
    "strided": {"mask": masks.strided(8)},
    "padding": {"mask": masks.padding([45, 33])},
    "where": {"mask": masks.where(keep=KEEP)},
    "softcap": {"softcap": 4.0},
    "softcap causal": {"softcap": 4.0, "mask": masks.causal()},
    "sinks": {"sinks": SLOPES, "mask": masks.causal()},
}


def returns_lse(kernel: Kernel, options: dict[str, Any]) -> bool:
    return not kernel.why_not(make_problem(*drawn(), wants_lse=True, **options))


def able_pairs() -> list[Any]:
    """The kernels, and the calls that they can compute."""
    kernels = [each for each in KERNELS if each.name in ("sdpa", "block_sparse", "tiled", "decomposed", "reference")]
    return [
        pytest.param(kernel, options, id=f"{kernel.name}-{options}")
        for kernel in kernels
        for options in NAN_CALLS
        if not kernel.why_not(make_problem(*drawn(), **NAN_CALLS[options]))
    ]


@pytest.mark.parametrize("places", ["keys and values", "queries too"])
@pytest.mark.parametrize(("kernel", "options"), able_pairs())
def test_nan_reaches_the_rows_that_it_reaches_on_the_cpu(kernel, options, places):
    """In output, log-sum-exp and gradients, though nothing is read to find it."""
    options = NAN_CALLS[options]
    with_lse = returns_lse(kernel, options)

    def call(*tensors: Tensor, name: str = kernel.name) -> Tensor:
        own = {**options, "sinks": on_device(SLOPES)} if "sinks" in options and tensors[0].is_cuda else options
        if not with_lse:
            return regard.attention(*tensors, kernel=name, **own)
        output, lse = regard.attention_with_lse(*tensors, kernel=name, **own)
        return torch.cat([output, lse.unsqueeze(-1)], -1)

    inputs = poisoned(places)
    found = results(call, inputs, on_device, gradient=True)
    expected = results(lambda *tensors: call(*tensors, name="reference"), inputs, host, gradient=True)
    assert 0 < int(expected[0].isnan().sum()) < expected[0].numel()
    assert_equal_to_the_cpu(found, expected)


@pytest.mark.parametrize("kernel", ["block_sparse", "tiled", "decomposed", "decode"])
@pytest.mark.parametrize("size", [1e3, 3e4, 1e6])
def test_gradients_next_to_large_scores(kernel, size):
    """Log-sum-exps that float32 rounds by more than log 2: weights that followed from them would be off by as much."""
    generator = torch.Generator().manual_seed(0)
    queries = 8 if kernel == "decode" else LENGTH
    query, key, value = (torch.randn(1, 2, length, DIM, generator=generator) for length in (queries, LENGTH, LENGTH))
    query, key = torch.zeros_like(query), torch.zeros_like(key)
    query[..., 0], key[..., 0] = size, 1.0  # all scores alike, and so are the weights
    key[..., 1] = torch.randn(key.shape[:-1], generator=generator)

    def call(*tensors: Tensor) -> Tensor:
        return regard.attention(*tensors, mask=masks.strided(8), scale=1.0, kernel=kernel)

    found = results(call, [query, key, value], on_device, gradient=True)
    double = results(call, [tensor.double() for tensor in (query, key, value)], host, gradient=True)
    for has, truth in zip(found, double, strict=True):
        bound = 1e-4 * float(truth.abs().max()) + 1e-6
        assert (has.double() - truth).abs().max() < bound


class TestModules:
    @staticmethod
    def assert_no_waits(call: Callable[[], Any], *, weights: bool = False) -> None:
        def differentiated() -> None:
            found = call()
            output = found[0] if isinstance(found, tuple) else found
            if output.requires_grad:
                backward(output)

        differentiated()
        with recorded_waits() as waits:
            differentiated()
            assert of_lenses(waits) if weights else waits == [], waits

    @pytest.mark.parametrize("training", [False, True], ids=["evaluated", "trained"])
    @pytest.mark.parametrize("need_weights", [False, True])
    @pytest.mark.parametrize("masked", ["padding", "padding to add", "causal", "both"])
    def test_multihead_attention(self, masked, need_weights, training):
        layer = to_device(regard.nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)).train(training)
        x, padded = on_device(torch.randn(2, 37, 32)), torch.arange(37) >= torch.tensor([37, 20])[:, None]
        causal = on_device(torch.ones(37, 37, dtype=torch.bool).triu(1))
        if masked == "padding to add":
            padded = torch.zeros(2, 37).masked_fill(padded, -math.inf)
        options = {
            "key_padding_mask": on_device(padded) if masked != "causal" else None,
            "attn_mask": causal if masked in ("causal", "both") else None,
        }
        with torch.set_grad_enabled(training):
            self.assert_no_waits(lambda: layer(x, x, x, need_weights=need_weights, **options), weights=need_weights)

    @pytest.mark.parametrize("options", ["plain", "alibi", "dropout", "rotary", "padding"])
    def test_attention_layer(self, options):
        own: dict[str, dict[str, Any]] = {
            "alibi": {"bias": biases.alibi(4)},
            "dropout": {"dropout": 0.2},
            "rotary": {"rotary": regard.positions.Rotary(8)},
        }
        mask = masks.padding(on_device(torch.tensor([37, 20]))) if options == "padding" else None
        projections = regard.nn.Projections(32, 4)
        layer = to_device(regard.nn.Attention(projections, mask=masks.causal(), **own.get(options, {})))
        x = on_device(torch.randn(2, 37, 32))
        self.assert_no_waits(lambda: layer(x, mask=mask))

    @pytest.mark.parametrize("kind", ["growing", "static", "rolling"])
    def test_caches(self, kind):
        mask = masks.causal() & masks.window(before=5) if kind == "rolling" else masks.causal()
        layer = to_device(regard.nn.Attention(regard.nn.Projections(32, 4), mask=mask))
        makers: dict[str, Callable[[], regard.nn.KVCache]] = {
            "growing": regard.nn.KVCache,
            "static": lambda: regard.nn.KVCache.static(50),
            "rolling": layer.make_cache,
        }
        seen = []

        def steps() -> Tensor:
            cache, output = makers[kind](), torch.zeros(())
            for length in (31, *[1] * 15):
                output, cache = layer.step(on_device(torch.ones(2, length, 32)), cache)
            seen.append(cache)
            return output

        with torch.no_grad():
            self.assert_no_waits(steps)
        positions = on_host(seen[-1].positions).tolist()
        assert positions[-6:] == list(range(40, 46))
        assert (len(positions) < 46) == (kind == "rolling")

    @staticmethod
    def language_model() -> LanguageModel:
        rotary = regard.positions.Rotary(8)
        config = LanguageModelConfig(
            vocabulary_size=50,
            dim=32,
            layers=(LayerConfig(before=8, rotary=rotary), LayerConfig(rotary=rotary)),
            attention=AttentionConfig(num_heads=4, num_kv_heads=2),
            feed_forward=GatedFeedForwardConfig(48),
        )
        return to_device(LanguageModel(config))

    def test_language_model(self):
        model, tokens = self.language_model(), on_device(torch.arange(74).view(2, 37) % 50)
        self.assert_no_waits(lambda: model(tokens))

    @pytest.mark.parametrize("length", [5, 40])
    def test_generation(self, length):
        model, tokens = self.language_model(), on_device(torch.arange(2 * length).view(2, length) % 50)
        self.assert_no_waits(lambda: list(model.generate(tokens, 4))[-1])

    def test_linear_attention_layer(self):
        layer = to_device(regard.nn.LinearAttention(regard.nn.Projections(32, 4), causal=True))
        x = on_device(torch.randn(2, 37, 32))
        self.assert_no_waits(lambda: layer(x))

    def test_encoder(self):
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        regard.nn.swap(encoder)
        # torch makes a new one of a bool mask in each call.
        padded = torch.zeros(2, 37).masked_fill(torch.arange(37) >= torch.tensor([37, 20])[:, None], -math.inf)
        x, padded = on_device(torch.randn(2, 37, 32)), on_device(padded)
        to_device(encoder)
        self.assert_no_waits(lambda: encoder(x, src_key_padding_mask=padded))


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "condition": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked write": lambda x: x.__setitem__(x > 0, torch.ones_like(x[:1].expand(int((on_host(x) > 0).sum())))),
    "equal": lambda x: x.equal(x),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.int64)),
    "from the host": lambda x: torch.ones(3).to(x.device),
    "numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "index of the host": lambda x: x[torch.tensor([0, 2])],
}


@pytest.mark.parametrize("read", READS)
def test_the_device_records_what_waits(read):
    x = on_device(torch.tensor([1.0, -1.0, 2.0]))
    with recorded_waits() as waits:
        (x * 2 + torch.arange(3, device=DEVICE)).softmax(-1).clamp(min=0).sum().exp()
        assert waits == []
        READS[read](x)
        assert len(waits) >= 1


ON_DEVICE = [
    DecodeKernel(2),
    TiledKernel(16),
    BlockSparseKernel((3, 2), 3),
    *(each for each in KERNELS if each.name != "flex"),
]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ON_DEVICE, ids=lambda kernel: kernel.name)
def test_kernels_agree_with_the_oracle_there(kernel):
    """NaN behind masks, rows without keys, biases, dropout and sinks, in each case that a kernel of torch's admits."""
    for own, case in suite([kernel], strength=1, device=DEVICE):
        assert_agrees(own, case, DEVICE)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestCuda:
    """torch raises where it waits, by its own account; the kernels are those that are chosen there."""

    @staticmethod
    def assert_no_waits(call: Callable[..., Tensor], inputs: list[Tensor], gradient: bool) -> None:
        def run(mode: str) -> None:
            leaves = [tensor.cuda().requires_grad_(gradient) for tensor in inputs]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                output = call(*leaves)
                if gradient:
                    output.backward(torch.ones_like(output))
            finally:
                torch.cuda.set_sync_debug_mode("default")

        for mode in ("default", "default", "error"):  # in the first calls code is compiled, too
            run(mode)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("gradient", [False, True], ids=["output", "gradient"])
    @pytest.mark.parametrize("mask", [*FORMULAS, *TENSORS])
    def test_masks(self, mask, gradient, dtype):
        own, inputs = {**FORMULAS, **TENSORS}[mask](Tensor.cuda), [tensor.to(dtype) for tensor in drawn()]
        self.assert_no_waits(lambda *tensors: regard.attention(*tensors, mask=own), inputs, gradient)

    @pytest.mark.parametrize("gradient", [False, True], ids=["output", "gradient"])
    @pytest.mark.parametrize("options", OPTIONS)
    def test_options(self, options, gradient):
        own = OPTIONS[options](Tensor.cuda)
        self.assert_no_waits(lambda *tensors: regard.attention(*tensors, **own), drawn(), gradient)

    @pytest.mark.parametrize("queries", [1, 4])
    @pytest.mark.parametrize("mask", ["none", "causal", "causal padding"])
    def test_decoding(self, mask, queries):
        own = {**FORMULAS, **TENSORS}[mask](Tensor.cuda)
        self.assert_no_waits(lambda *tensors: regard.attention(*tensors, mask=own), drawn(queries), gradient=False)

    @pytest.mark.parametrize("gradient", [False, True], ids=["output", "gradient"])
    @pytest.mark.parametrize("mask", ["none", "causal", "causal padding", "documents"])
    def test_linear_attention(self, mask, gradient):
        own = {**FORMULAS, **TENSORS}[mask](Tensor.cuda)
        self.assert_no_waits(lambda *tensors: regard.linear_attention(*tensors, mask=own), drawn(), gradient)

    @pytest.mark.parametrize("lens", OBSERVED)
    def test_observe(self, lens):
        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return regard.observe(query, key, value, OBSERVED[lens], mask=masks.causal()).output

        self.assert_no_waits(call, drawn(), gradient=False)

    @pytest.mark.parametrize("options", NAN_CALLS)
    def test_nan_reaches_the_rows_that_it_reaches_on_the_cpu(self, options):
        own = {name: of.cuda() if isinstance(of, Tensor) else of for name, of in NAN_CALLS[options].items()}
        found = regard.attention(*(tensor.cuda() for tensor in poisoned("queries too")), **own)
        expected = regard.attention(*poisoned("queries too"), kernel="reference", **NAN_CALLS[options])
        assert torch.equal(found.cpu().isnan(), expected.isnan())

    def test_nan_of_few_keys_is_not_lost(self):
        query, key, value = (tensor.cuda() for tensor in drawn(5, 7))
        key[0, 0, 3, 2] = math.nan
        found = regard.attention(query, key, value)
        assert found[0, :2].isnan().all()
        assert not found[0, 2:].isnan().any()
