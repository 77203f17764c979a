"""The work that `gpu.py` measures, and its peers: a function makes inputs, and gives calls by the name of their side.

A place says where: on a GPU inputs are as long as they are measured, on a CPU short, for a test that all sides compute
the same.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import biases, lenses, masks, normalizers, scores
from regard.nn.caches import LayerHeads, PagedMemory, RaggedStep

Work = Callable[[], Any]
Sides = Mapping[str, Work]
Attend = Callable[..., Tensor]

OURS = "regard"
LONG, MIDDLE, NEW_TOKENS = 16_384, 4096, 32


@dataclass(frozen=True)
class Place:
    """Where rows are computed: the device, what lengths are divided by, and whether torch compiles the peers."""

    device: str = "cuda"
    shrink: int = 1
    compiles: bool = True

    def length(self, n: int) -> int:
        return max(n // self.shrink, min(n, 16))

    def tensors(
        self, batch: int, heads: int, n: int, dim: int, *, key_heads: int = 0, queries: int = 0, gradients: bool = False
    ) -> list[Tensor]:
        """Query, key and value in bfloat16, float32 on a CPU."""
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        rows, keys = queries or self.length(n), self.length(n)
        shapes = (batch, heads, rows, dim), *[(batch, key_heads or heads, keys, dim)] * 2
        return [torch.randn(shape, device=self.device, dtype=dtype, requires_grad=gradients) for shape in shapes]

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, dynamic=False) if self.compiles else function

    @property
    def flex(self) -> Callable:
        return _compiled_flex() if self.compiles else flex_attention

    def blocks(self, mask_mod: Callable, n: int) -> BlockMask:
        return create_block_mask(mask_mod, None, None, n, n, self.device)


@cache
def _compiled_flex() -> Callable:
    return torch.compile(flex_attention, dynamic=False)


def training(attend: Work, inputs: Sequence[Tensor]) -> Work:
    """The output, and the gradients of its sum."""

    def work() -> tuple[Tensor, ...]:
        output = attend()
        return output, *torch.autograd.grad(output, inputs, torch.ones_like(output))

    return work


def either(attends: Mapping[str, Attend], inputs: Sequence[Tensor], more: Mapping[str, Tensor] | None = None) -> Sides:
    """Calls over query, key and value: with gradients where these want them, and that of one more tensor of a side."""
    more = more or {}
    works = {}
    for name, attend in attends.items():
        work = partial(attend, *inputs[:3])
        leaves = [*inputs, *([more[name]] if name in more else [])]
        works[name] = training(work, leaves) if inputs[0].requires_grad else work
    return works


def way(gradients: bool) -> str:
    return "with gradients" if gradients else "forward"


def plain(batch: int, n: int, causal: bool, gradients: bool, place: Place) -> Sides:
    inputs = place.tensors(batch, 16, n, 128, gradients=gradients)
    mask = masks.causal() if causal else None
    return either({OURS: partial(regard.attention, mask=mask), "SDPA": partial(sdpa, is_causal=causal)}, inputs)


def padded(batch: int, n: int, gradients: bool, place: Place) -> Sides:
    inputs = place.tensors(batch, 8, n, 64, gradients=gradients)
    mask = masks.padding(lengths=[inputs[1].shape[2] - row % 7 for row in range(batch)])
    kept = mask.dense(inputs[0].shape[2], inputs[1].shape[2]).to(place.device)
    return either({OURS: partial(regard.attention, mask=mask), "SDPA": partial(sdpa, attn_mask=kept)}, inputs)


def structured(name: str, gradients: bool, place: Place) -> Sides:
    """A mask and the same as FlexAttention's, 16 heads of 128."""
    inputs = place.tensors(1, 16, LONG, 128, gradients=gradients)
    n = inputs[0].shape[2]
    ids = torch.arange(n, device=place.device) // 1024
    mask, mask_mod = {
        "window": (masks.causal() & masks.window(before=511), lambda b, h, q, k: (q >= k) & (q - k <= 511)),
        "documents": (masks.causal() & masks.documents(ids.cpu()), lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])),
        "prefix and window": (
            masks.causal() & (masks.window(before=1023) | masks.prefix(4)),
            lambda b, h, q, k: (q >= k) & ((q - k <= 1023) | (k < 4)),
        ),
    }[name]
    flex = partial(place.flex, block_mask=place.blocks(mask_mod, n))
    return either({OURS: partial(regard.attention, mask=mask), "FlexAttention": flex}, inputs)


def listed(group: int, place: Place) -> Sides:
    """Keys that 64 heads share, or blocks of 64 keys that 16 do, listed for each query; beside our causal attention."""
    inputs = place.tensors(1, group, LONG, 128, key_heads=1, gradients=True)
    n, size = inputs[0].shape[2], 1 if group == 64 else 64
    count = max(min(2048 if size == 1 else 16, n // size), 1)
    ranks = torch.rand(1, 1, n, max(n // size, 1), device=place.device)
    mask = masks.causal() & masks.blocks(ranks.topk(count, -1).indices, (1, size))
    sides = {
        OURS: partial(regard.attention, mask=mask, kernel="gathered"),
        "all keys, ours": partial(regard.attention, mask=masks.causal()),
    }
    return either(sides, inputs)


SPARSE = {
    "strided": masks.window(before=128) | masks.strided(128),
    "fixed": masks.fixed(128, 8),
    "dilated": masks.dilated(before=64, step=8),
}


def sparse(name: str, place: Place) -> Sides:
    """A sparse pattern beside our own causal attention: their pairs differ."""
    inputs = place.tensors(1, 16, LONG, 128, gradients=True)
    causal = masks.causal()
    sides = {
        OURS: partial(regard.attention, mask=causal & SPARSE[name]),
        "causal": partial(regard.attention, mask=causal),
    }
    return either(sides, inputs)


def share_of_causal(name: str) -> float:
    """The pairs of a sparse pattern, as a share of those of causal attention: what turns time into time a pair."""
    causal = masks.causal()
    return (causal & SPARSE[name]).density(LONG, LONG) / causal.density(LONG, LONG)


def distance_bias(name: str, place: Place) -> Sides:
    """ALiBi, softcap and sinks, causal, beside FlexAttention with the same score_mod."""
    inputs = place.tensors(4, 16, MIDDLE, 64, gradients=True)
    slopes = biases.alibi_slopes(16).to(place.device)
    blocks = place.blocks(lambda b, h, q, k: q >= k, inputs[0].shape[2])
    flex, causal = partial(place.flex, block_mask=blocks), masks.causal()
    sinks = torch.zeros(16, device=place.device)

    def with_sinks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, more = flex(query, key, value, return_aux=AuxRequest(lse=True))
        return output * torch.sigmoid(more.lse - sinks[:, None])[..., None].to(output.dtype)

    ours, theirs = {
        "ALiBi": ({"bias": biases.alibi(16)}, partial(flex, score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k))),
        "softcap": ({"softcap": 30.0}, partial(flex, score_mod=lambda s, b, h, q, k: 30 * torch.tanh(s / 30))),
        "sinks": ({"sinks": sinks}, with_sinks),
    }[name]
    return either({OURS: partial(regard.attention, mask=causal, **ours), "FlexAttention": theirs}, inputs)


def normalized(normalizer: normalizers.Normalizer, place: Place) -> Sides:
    """Another normalizer beside our own softmax."""
    inputs = place.tensors(4, 16, MIDDLE, 64, gradients=True)
    causal = partial(regard.attention, mask=masks.causal())
    return either({OURS: partial(causal, normalizer=normalizer), "softmax, ours": causal}, inputs)


def learned_bias(place: Place) -> Sides:
    """T5's bias: the peer is given all numbers, with a gradient for each, and its table is not looked at."""
    inputs = place.tensors(4, 16, MIDDLE, 64, gradients=True)
    n, dtype = inputs[0].shape[2], inputs[0].dtype
    table = torch.randn(16, 32, device=place.device, requires_grad=True)
    bias = biases.relative(table)
    numbers = bias.values_at(torch.arange(1 - n, n, device=place.device)).unfold(-1, n, 1).flip(-2)
    dense = numbers.detach().to(dtype).contiguous().requires_grad_()
    sides = {OURS: partial(regard.attention, bias=bias), "SDPA": partial(sdpa, attn_mask=dense)}
    return either(sides, inputs, {OURS: table, "SDPA": dense})


def dropout(place: Place) -> Sides:
    inputs = place.tensors(4, 16, MIDDLE, 64, gradients=True)
    ours = partial(regard.attention, mask=masks.causal(), dropout_p=0.1)
    return either({OURS: ours, "SDPA": partial(sdpa, is_causal=True, dropout_p=0.1)}, inputs)


def decoding(batch: int, queries: int, peer: str, place: Place) -> Sides:
    """One query, or a few, over long caches; "copy" moves as many bytes as the cache has, read and written."""
    query, key, value = place.tensors(batch, 32, LONG, 128, key_heads=8, queries=queries)
    mask = masks.causal() if queries > 1 else None
    target = torch.empty_like(key)
    # torch's causal mask would begin at the first key: ours is at the last ones.
    kept = masks.causal().dense(queries, key.shape[2]).to(place.device) if queries > 1 else None
    works = {
        OURS: partial(regard.attention, query, key, value, mask=mask),
        "SDPA, enable_gqa": partial(sdpa, query, key, value, attn_mask=kept, enable_gqa=True),
        "copy": partial(target.copy_, key),
    }
    return {name: works[name] for name in (OURS, peer)}


def latent_decoding(batch: int, place: Place) -> Sides:
    """One query of latent attention over the latents themselves: values are the first numbers of keys."""
    query, key, _ = place.tensors(batch, 128, LONG, 576, key_heads=1, queries=1)
    inputs, scale = (query, key, key[..., :512]), 192**-0.5
    peer = partial(sdpa, *inputs, scale=scale, enable_gqa=True)
    return {OURS: partial(regard.attention, *inputs, scale=scale), "SDPA, enable_gqa": peer}


def paged(batch: int, place: Place) -> Sides:
    """A token of each of many sequences whose pages lie anywhere in one memory, beside the keys in one tensor."""
    length, size, heads = place.length(MIDDLE), 64, 8
    query, key, value = place.tensors(batch, 32, MIDDLE, 128, key_heads=heads, queries=1)
    pages = -(-length // size)
    memory = PagedMemory(
        [LayerHeads(heads, 128, 128)], pages * batch, size, dtype=key.dtype, device=torch.device(place.device)
    )
    texts = [memory.sequence(number) for number in range(batch)]
    for _ in range(pages):  # in turn: no two pages of a sequence are neighbours
        for text in texts:
            text.extend(range(min(size, length - len(text))))
    slots = torch.tensor([slot for text in texts for slot in text.slots(range(length))], device=place.device)
    keys, values = (each.transpose(0, 1).flatten(1, 2).unsqueeze(0) for each in (key, value))
    memory.layers[0].write(slots, keys, values, {})
    step = RaggedStep.of(memory, [(text, 1) for text in texts]).layer(0)
    heads_of_tokens = query.squeeze(2).transpose(0, 1).unsqueeze(0).contiguous(), key, value

    def ours() -> Tensor:
        output, _ = step.attend(heads_of_tokens, {"mask": masks.causal()})
        return output[0].transpose(0, 1).unsqueeze(2)

    return {OURS: ours, "SDPA, enable_gqa": partial(sdpa, query, key, value, enable_gqa=True)}


def additive(gradients: bool, place: Place) -> Sides:
    score = scores.Additive(128, 128, 128).to(place.device).requires_grad_(gradients)
    n = place.length(1024)
    inputs = [torch.randn(8, 1, n, 128, device=place.device, requires_grad=gradients) for _ in range(3)]

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pairs: Any = score.pairs(query, key)
        hidden = torch.tanh(pairs.query[..., :, None, :] + pairs.key[..., None, :, :])
        return torch.softmax(hidden @ pairs.weight.reshape(-1), -1) @ value

    peers = {"eager formula": formula} if gradients else {"compiled formula": place.compiled(formula)}
    return either({OURS: partial(regard.attention, score=score), **peers}, inputs)


def observing(more: Sequence[lenses.Lens], place: Place) -> Sides:
    """A pooled map, the entropy of each row, and more lenses, beside the output."""
    query, key, value = place.tensors(1, 16, LONG, 64)
    causal, cells = masks.causal(), min(query.shape[2], 256)
    wanted = lenses.Pooled((cells, cells)), lenses.Entropy(), *more

    def ours() -> Tensor:
        return regard.observe(query, key, value, *wanted, mask=causal).output

    return {OURS: ours, "attention alone": partial(regard.attention, query, key, value, mask=causal)}


def all_weights(place: Place) -> Sides:
    query, key, value = place.tensors(1, 16, 2048, 64)
    whole = lenses.Weights()
    causal = masks.causal().dense(query.shape[2], query.shape[2]).to(place.device)

    def eager() -> Tensor:
        weights = (query @ key.mT / math.sqrt(64)).float().masked_fill(~causal, -math.inf).softmax(-1)
        return weights.to(value.dtype) @ value

    return {OURS: lambda: regard.observe(query, key, value, whole, mask=masks.causal()).output, "eager formula": eager}


def linear(place: Place) -> Sides:
    """Normalised, elu + 1; flash-linear-attention's tensors have the tokens before the heads."""
    inputs = place.tensors(1, 16, LONG, 64, gradients=True)
    works = {OURS: training(partial(regard.linear_attention, *inputs, causal=True), inputs)}
    if (theirs := installed("fla.ops.linear_attn")) is not None:
        turned = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in inputs]

        def attend() -> Tensor:
            query, key = (functional.elu(tensor) + 1 for tensor in turned[:2])
            return theirs.chunk_linear_attn(query, key, turned[2], normalize=True)[0]

        works["flash-linear-attention"] = training(attend, turned)
    return works


def delta_rule(place: Place) -> Sides:
    from regard.linear import Identity

    query, key, value = place.tensors(1, 16, LONG, 64, gradients=True)
    n = query.shape[2]
    key = functional.normalize(key.detach().float(), dim=-1).to(key.dtype).requires_grad_()
    decay = -0.1 * torch.rand(1, 16, n, device=place.device)
    beta = torch.rand(1, 16, n, device=place.device, dtype=query.dtype)
    options: dict[str, Any] = {"feature_map": Identity(), "normalize": False, "decay": decay, "beta": beta}
    inputs = [query, key, value]
    works = {OURS: training(partial(regard.linear_attention, *inputs, causal=True, **options), inputs)}
    if (theirs := installed("fla.ops.gated_delta_rule")) is not None:
        turned = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in inputs]
        gates = [tensor.transpose(1, 2).contiguous() for tensor in (decay, beta)]
        works["flash-linear-attention"] = training(
            lambda: theirs.chunk_gated_delta_rule(*turned, *gates, scale=1.0)[0], turned
        )
    return works


def installed(name: str) -> Any:
    """A module that a bare machine may lack; None there, or where it cannot be imported with this torch."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def encoder(place: Place) -> Sides:
    """Six layers of torch's encoder, training with dropout under autocast, as they are and after `swap`."""
    from regard.nn import swap

    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, 0.1, batch_first=True, device=place.device)
    theirs = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    ours = copy.deepcopy(theirs)
    swap(ours)
    n = place.length(256)
    x = torch.randn(32 if place.shrink == 1 else 2, n, 512, device=place.device)
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(n, device=x.device)

    def step(model: torch.nn.Module) -> None:
        with torch.autocast(place.device, torch.bfloat16):
            output = model(x, mask=hidden, is_causal=True)
        output.float().sum().backward()
        model.zero_grad(set_to_none=True)

    return {OURS: partial(step, ours), "torch.nn.TransformerEncoder": partial(step, theirs)}


def generation(captured: bool, place: Place) -> Sides:
    """32 tokens of a model of Llama's shape, 8 layers of 1,024; transformers' own, where it is installed."""
    from regard.models import LanguageModel
    from regard.models.language_model import AttentionConfig, GatedFeedForwardConfig, LanguageModelConfig, LayerConfig
    from regard.positions import Rotary

    size, layers, prompt = (1024, 8, 1024) if place.shrink == 1 else (64, 2, 16)
    dtype = torch.bfloat16 if place.device == "cuda" else torch.float32
    config = LanguageModelConfig(
        vocabulary_size=32_000,
        dim=size,
        layers=(LayerConfig(rotary=Rotary(64)),) * layers,
        attention=AttentionConfig(num_heads=size // 64, num_kv_heads=max(size // 256, 1)),
        feed_forward=GatedFeedForwardConfig(size * 7 // 2),
    )
    tokens = torch.randint(0, 32_000, (4, prompt), device=place.device)
    ours = LanguageModel(config).to(place.device, dtype).eval()
    works: dict[str, Work] = {OURS: lambda: list(ours.generate(tokens, NEW_TOKENS, captured=captured))}
    if (transformers := installed("transformers")) is not None:
        like = transformers.LlamaConfig(
            vocab_size=32_000,
            hidden_size=size,
            intermediate_size=size * 7 // 2,
            num_hidden_layers=layers,
            num_attention_heads=size // 64,
            num_key_value_heads=max(size // 256, 1),
        )
        theirs = transformers.LlamaForCausalLM(like).to(place.device, dtype).eval()
        ids = torch.ones_like(tokens)
        works["transformers"] = lambda: theirs.generate(
            tokens, attention_mask=ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return works
