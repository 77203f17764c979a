"""What stands around attention computes the same on a GPU: layers, caches, models, training, lenses, records, rings.

Each work is computed in float32 on a device and in float64 on the CPU; the tests on a GPU are marked `cuda`. The
kernels themselves are held to the oracle there by tests/test_agreement.py.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import biases, lenses, masks
from regard.core.dropout import Dropout
from regard.nn import Attention, MultiheadAttention, Projections, swap
from regard.positions import Rotary
from regard.utils.pytree import tree_tensors

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
)
DEVICES = ["cpu", CUDA]
WITHIN = 2**8 * torch.finfo(torch.float32).eps
"""The norm of a difference over that of the result: some hundred roundings of float32, one after another."""
BATCH, TOKENS, DIM = 2, 37, 24
LENGTHS = [37, 19]


@dataclass(frozen=True)
class Place:
    """A device and a dtype. Numbers are drawn on the CPU in float64, so that all places have the same."""

    device: str
    dtype: torch.dtype

    def numbers(self, *shape: int) -> Tensor:
        return self.put(torch.randn(shape, dtype=torch.float64))

    def put(self, value: Any) -> Any:
        """A tensor or a module, moved here; whole numbers keep their dtype."""
        if isinstance(value, Tensor) and not value.is_floating_point():
            return value.to(self.device)
        return value.to(self.device, self.dtype)


def gradients(loss: Tensor, module: nn.Module) -> Tensor:
    """The gradients of all parameters, as one vector: that of a key's bias is 0 but for rounding."""
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, wanted)])


def trained(module: nn.Module, output: Tensor) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it: a plain sum of normalised numbers has none."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).to(output).view_as(output)
    return [output, gradients((output * weights).sum(), module)]


def attention_layer(place: Place) -> list[Tensor]:
    """Causal with padding, a learned bias, rotary and dropout, training."""
    bias = biases.relative(nn.Parameter(torch.randn(4, 16)))
    layer = Attention(
        Projections(DIM, 4, num_kv_heads=2), mask=masks.causal(), bias=bias, rotary=Rotary(6), dropout=0.2
    )
    layer = place.put(layer).train()
    return trained(layer, layer(place.numbers(BATCH, TOKENS, DIM), mask=masks.padding(lengths=LENGTHS)))


def listed_keys(place: Place) -> list[Tensor]:
    """Keys listed for the queries of a group of heads, and blocks of them; causal, with the gradients."""
    leaves = [place.numbers(BATCH, heads, TOKENS, 16).requires_grad_() for heads in (4, 2, 2)]
    found = []
    for size, count in ((1, 9), (8, 2)):
        listed = torch.rand(BATCH, 2, TOKENS, -(-TOKENS // size)).topk(count, -1).indices
        mask = masks.causal() & masks.blocks(place.put(listed), (1, size))
        output = regard.attention(*leaves, mask=mask, kernel="gathered")
        found += [output, *torch.autograd.grad(output.sin().sum(), leaves)]
    return found


def multihead(place: Place) -> list[Tensor]:
    """torch's interface, with its masks and its dropout; the weights beside the output without."""
    layer = place.put(MultiheadAttention(DIM, 4, dropout=0.2, batch_first=True)).train()
    x = place.numbers(BATCH, TOKENS, DIM)
    padded = torch.arange(TOKENS, device=place.device) >= torch.tensor(LENGTHS, device=place.device)[:, None]
    output = layer(x, x, x, key_padding_mask=padded, need_weights=False)[0]
    return [*trained(layer, output), *layer.eval()(x, x, x, key_padding_mask=padded)]


def steps_of_decoding(place: Place) -> list[Tensor]:
    """One token at a time, with a cache that grows and one that keeps what a window needs."""
    x, found = place.numbers(BATCH, TOKENS, DIM), []
    for mask in (masks.causal(), masks.causal() & masks.window(before=7)):
        layer = place.put(Attention(Projections(DIM, 4, num_kv_heads=2), mask=mask, rotary=Rotary(6)))
        cache, outputs = layer.make_cache(), []
        for token in x.split(1, 1):
            output, cache = layer.step(token, cache)
            outputs.append(output)
        found += [torch.cat(outputs, 1), layer(x)]
    return found


def swapped_encoder(place: Place) -> list[Tensor]:
    """torch's encoder with its attention replaced: training, and evaluated, where torch has a path of its own."""
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
    model = place.put(swap(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).model)
    x = place.numbers(BATCH, TOKENS, DIM)
    padded = torch.arange(TOKENS, device=place.device) >= torch.tensor(LENGTHS, device=place.device)[:, None]
    there = ~padded[..., None]  # what padding gets is not defined
    with torch.no_grad():
        evaluated = model.eval()(x, src_key_padding_mask=padded)
    return [*trained(model, model.train()(x, src_key_padding_mask=padded) * there), evaluated * there]


def static_cache(place: Place) -> list[Tensor]:
    """A model of transformers with our attention, which generates over a cache of a fixed size."""
    transformers = pytest.importorskip("transformers")
    regard.huggingface.register()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=61, num_key_value_heads=2, initializer_range=0.3, **sizes)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="regard")
    model, tokens = place.put(model).eval(), place.put(torch.randint(3, 61, (BATCH, 9)))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    left = place.put(torch.tensor([[1] * 9, [0] * 4 + [1] * 5]))
    with torch.no_grad():
        generated = model.generate(tokens, attention_mask=left, pad_token_id=0, disable_compile=True, **options)
        return [generated, model(tokens, attention_mask=left).logits[left.bool()]]


def generation(place: Place) -> list[Tensor]:
    """A language model with a window in one of its layers; its steps as they come, and captured."""
    from regard.models import language_model as lm

    rotary = Rotary(6)
    config = lm.LanguageModelConfig(
        vocabulary_size=61,
        dim=DIM,
        layers=(lm.LayerConfig(rotary=rotary), lm.LayerConfig(before=7, rotary=rotary)),
        attention=lm.AttentionConfig(num_heads=4, num_kv_heads=2),
        feed_forward=lm.GatedFeedForwardConfig(2 * DIM),
    )
    model, tokens = place.put(lm.LanguageModel(config)).eval(), place.put(torch.randint(0, 61, (BATCH, 11)))
    with torch.no_grad():
        found = [torch.stack(list(model.generate(tokens, 9, captured=captured)), 1) for captured in (False, True)]
        return [*found, torch.stack(list(model.generate(tokens, 9, lengths=[11, 6])), 1), model(tokens)]


def translator(place: Place) -> list[Tensor]:
    """A training step of the Transformer, and its search."""
    pytest.importorskip("pydantic")
    from regard.translation.batches import Batch
    from regard.translation.build_model import build_model
    from regard.translation.search import beam_search
    from regard.translation.settings import SearchSettings, TransformerSettings
    from regard.translation.training_loss import training_loss

    sizes = {
        "dim": DIM,
        "num_heads": 4,
        "hidden_dim": 2 * DIM,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "dropout": 0.0,
    }
    model = place.put(build_model(TransformerSettings.model_validate(sizes), 19, 23)).train()
    source, target = torch.randint(4, 19, (BATCH, 11)), torch.randint(4, 23, (BATCH, 7))
    source[1, 6:] = 0
    lengths = place.put(torch.tensor([11, 6]))
    batch = Batch(
        place.put(source), lengths, place.put(target[:, :-1]), place.put(target[:, 1:]), target[:, 1:].numel()
    )
    loss, _ = training_loss(model, batch, 0.1)
    step = [loss, gradients(loss, model)]
    with torch.no_grad():
        found = beam_search(
            model.eval(), batch.source, batch.source_lengths, SearchSettings(beam=3, max_length_ratio=0.5)
        )
    return [*step, *(torch.tensor(hypotheses[0].ids) for hypotheses in found)]


def observed(place: Place) -> list[Tensor]:
    query, key, value = (place.numbers(BATCH, 4, TOKENS, 16) for _ in range(3))
    wanted = (
        *(lenses.Weights(rows=slice(3, 9)), lenses.Pooled((5, 7)), lenses.Entropy(), lenses.Received()),
        *(lenses.Distance(), lenses.TopK(3)),
    )
    seen = regard.observe(query, key, value, *wanted, mask=masks.causal() & masks.padding(lengths=LENGTHS))
    return [seen.output, *tree_tensors(tuple(seen[lens] for lens in wanted))]


def recorded(place: Place) -> list[Tensor]:
    """The weights of a recorded encoder of torch and of a layer of ours."""
    from regard.explorer import record

    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), Attention(Projections(DIM, 4), mask=masks.causal()))
    model = place.put(model).eval()
    with torch.no_grad(), record(model, dtype="keep") as recording:
        output = model(place.numbers(1, TOKENS, DIM))
    atlas = recording.atlas(tokens=[str(number) for number in range(TOKENS)])
    assert len(atlas.maps) == 2
    return [output, *(torch.as_tensor(each.weights(1, slice(0, TOKENS), slice(0, TOKENS))) for each in atlas.maps)]


def linear(place: Place) -> list[Tensor]:
    query, key, value = (place.numbers(BATCH, 4, TOKENS, 16).requires_grad_() for _ in range(3))
    output = regard.linear_attention(query, key, value, causal=True)
    return [output, *torch.autograd.grad(output.square().sum(), (query, key, value))]


def ring_of_one(place: Place) -> list[Tensor]:
    """A ring of this process alone, over NCCL on a GPU: more processes need more of these."""
    import torch.distributed as dist

    backend = "gloo" if place.device == "cpu" else "nccl"
    if not getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"this build of torch has no {backend}")
    query, key, value = (place.numbers(BATCH, 4, TOKENS, 16).requires_grad_() for _ in range(3))
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        output = regard.ring.attention(query, key, value, mask=masks.causal())
        return [output, *torch.autograd.grad(output.square().sum(), (query, key, value))]
    finally:
        dist.destroy_process_group()


WORK: dict[str, Callable[[Place], list[Tensor]]] = {
    each.__name__: each
    for each in (
        *(
            attention_layer,
            listed_keys,
            multihead,
            steps_of_decoding,
            swapped_encoder,
            static_cache,
            generation,
            translator,
        ),
        *(observed, recorded, linear, ring_of_one),
    )
}


@pytest.fixture
def same_dropout(monkeypatch) -> None:
    """The seed of dropout, else drawn by each device's own generator: what it drops is a hash of it, anywhere."""

    def draw(probability: float, device: torch.device) -> Dropout:
        return Dropout(probability, torch.tensor(7, device=device))

    for module in ("regard.kernels.validation", "regard.attention"):
        monkeypatch.setattr(sys.modules[module], "draw_dropout", draw)


@pytest.mark.usefixtures("same_dropout")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WORK)
def test_it_is_the_same_as_in_float64_on_the_cpu(name: str, device: str):
    results = []
    for place in (Place(device, torch.float32), Place("cpu", torch.float64)):
        torch.manual_seed(0)
        results.append(WORK[name](place))
    found, expected = results
    assert len(found) == len(expected) > 0
    for number, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        assert ours.shape == truth.shape
        apart = (ours.detach().cpu().double() - truth.detach().double()).norm()
        assert apart <= WITHIN * truth.detach().double().norm(), f"result {number} of {name}"


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_and_its_cache_move_together(device: str):
    """A cache that stays on the CPU is refused by name."""
    layer = Attention(Projections(DIM, 4), mask=masks.causal())
    _, cache = layer.step(torch.randn(1, 3, DIM), layer.make_cache())
    moved = copy.deepcopy(layer).to(device)
    if device == "cpu":
        assert moved.step(torch.randn(1, 1, DIM), cache)[0].shape == (1, 1, DIM)
    else:
        with pytest.raises(regard.errors.DeviceError, match="cuda"):
            moved.step(torch.randn(1, 1, DIM, device=device), cache)
