"""A language model beside transformers' own, with the same weights: decoding, prefill with a window, a rolling cache.

Peers: transformers with `sdpa` and with `eager`, as a user gets them. What a layer's matrices take is the same on all
sides, so the layer is shown as a whole and by its parts.
"""

import logging
from collections.abc import Callable
from typing import Any

import _timing
import _without
import torch
from _memory import answer, peak
from _report import agree, mebibytes, met, milliseconds, table, times
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

import regard
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, GatedFeedForwardConfig, LanguageModelConfig, LayerConfig
from regard.models.language_model.huggingface.architectures import configuration
from regard.models.language_model.huggingface.hf_checkpoint import their_name
from regard.nn import BlockCache, KVCache
from regard.positions import Rotary

Work = Callable[[], Any]
KEYS, DIM, HEADS, KEY_HEADS, HEAD_DIM, HIDDEN = 8192, 4096, 32, 8, 128, 14336
WINDOW, LENGTH, CHUNK, LONG = 512, 8192, 1024, 100_000
PEERS = ("sdpa", "eager")
LLAMA: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
}
MISTRAL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SMALL: dict[str, Any] = {"vocab_size": 1000, "max_position_embeddings": 2 * LENGTH}


def twin(model: Any) -> LanguageModel:
    """Ours over the very same parameters."""
    with torch.device("meta"):
        ours = LanguageModel(configuration(model.config.to_diff_dict() | {"model_type": model.config.model_type}))
    state = model.state_dict()
    ours.load_state_dict({name: state[their_name(name)] for name in ours.state_dict()}, assign=True)
    return ours.eval()


class Decoding:
    """One token after another through one layer, or through its attention, beside caches of random keys and values."""

    def __init__(self, keys: int) -> None:
        config = LlamaConfig(num_hidden_layers=1, vocab_size=8, max_position_embeddings=2 * keys, **LLAMA)
        self.model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
        self.theirs = self.model.model.layers[0]
        self.ours: Any = twin(self.model).blocks[0]
        self.held = torch.randn(2, 1, KEY_HEADS, keys, HEAD_DIM).unbind()
        self.token, self.position = torch.randn(1, 1, DIM), torch.tensor([[keys]])
        self.turns = self.model.model.rotary_emb(self.token, self.position)
        self.rotation = self.ours.attention.rotary.rotation(self.position[0])

    def formula(self, peer: str) -> Work:
        """The attention of one query to all keys, no projections, nothing added to the cache."""
        query, (key, value) = torch.randn(1, HEADS, 1, HEAD_DIM), self.held
        if peer == "regard":
            mask = self.ours.attention.mask
            return lambda: regard.attention(query, key, value, mask=mask)
        attend = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}[peer]
        return lambda: attend(self.theirs.self_attn, query, key, value, None, scaling=HEAD_DIM**-0.5)[0]

    def attention(self, peer: str) -> Work:
        """With its projections, rotary and cache."""
        if peer == "regard":
            return self._stepping(lambda cache: self.ours.attention.step(self.token, cache, rotation=self.rotation))
        return self._calling(peer, self.theirs.self_attn)

    def layer(self, peer: str) -> Work:
        """All of it."""
        if peer == "regard":
            return self._stepping(
                lambda cache: self.ours.step(self.token, cache, rotation=self.rotation), lambda cache: BlockCache(cache)
            )
        return self._calling(peer, self.theirs)

    def _stepping(self, step: Callable[[Any], tuple[Tensor, Any]], begun: Callable[[Any], Any] = lambda c: c) -> Work:
        state = [begun(self.ours.attention.make_cache().append(*self.held))]

        def work() -> Tensor:
            output, state[0] = step(state[0])
            return output

        return work

    def _calling(self, peer: str, module: Any) -> Work:
        cache = DynamicCache(config=self.model.config)
        cache.update(*self.held, layer_idx=0)

        def work() -> Tensor:
            self.model.config._attn_implementation = peer
            output = module(self.token, position_embeddings=self.turns, attention_mask=None, past_key_values=cache)
            return output if isinstance(output, Tensor) else output[0]

        return work


def decode() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        decoding, rows = Decoding(KEYS), []
        parts = {
            "attention: softmax(q Kᵀ) V": (decoding.formula, 15),
            "attention with projections and cache": (decoding.attention, 9),
            "the whole layer": (decoding.layer, 5),
        }
        for part, (make, rounds) in parts.items():
            torch.manual_seed(1)
            works = {}
            for peer in ("regard", *PEERS):
                torch.manual_seed(2)
                works[peer] = make(peer)
            first = works["regard"]()
            for peer in PEERS:
                agree(f"{part}, {peer}", [first.flatten()], [works[peer]().flatten()])
            spent = _timing.in_turn(works, rounds=rounds)
            for peer, goal in zip(PEERS, (2, 5), strict=True):
                ratio = spent[peer] / spent["regard"]
                row = [part, peer, milliseconds(spent[peer]), milliseconds(spent["regard"]), times(ratio)]
                rows.append([*row, met(ratio, goal)])
    title = f"Decode: a Llama layer, {DIM} wide, {HEADS}/{KEY_HEADS} heads, {HIDDEN:,} inside, {KEYS:,} keys"
    table(
        f"{title} (`benchmarks/language_model.py decode`)",
        ["part", "peer", "peer's", "regard's", "ratio", "goal"],
        rows,
    )


def mistral(way: str = "sdpa") -> MistralForCausalLM:
    _without.register()
    torch.manual_seed(0)
    config = MistralConfig(num_hidden_layers=2, sliding_window=WINDOW, **MISTRAL, **SMALL)
    return MistralForCausalLM._from_config(config, attn_implementation=way).eval()


def prompt(length: int) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))


def their_prefill(length: int, way: str = "sdpa") -> Work:
    model, tokens = mistral(way), prompt(length)
    return lambda: model(tokens, use_cache=True, logits_to_keep=1).logits[:, -1]


def our_prefill(length: int, chunk: int | None = None) -> Work:
    model, tokens = twin(mistral()), prompt(length)

    def work() -> Tensor:
        features, cache = tokens, model.make_cache()
        for part in tokens.split(chunk or length, dim=1):
            features, cache = model.next_features(part, cache)
        return model.logits(features[:, -1])

    return work


def quiet(make: Callable[[int], Work]) -> Callable[[int], Work]:
    """Without gradients, as a user generates."""

    def made(length: int) -> Work:
        work = make(length)
        return torch.no_grad()(work)

    return made


NOTHING = "the limit: transformers without attention"
PREFILLS = {
    "transformers, sdpa": quiet(their_prefill),
    "regard": quiet(our_prefill),
    f"regard, {CHUNK:,} at a time": quiet(lambda length: our_prefill(length, CHUNK)),
    NOTHING: quiet(lambda length: their_prefill(length, _without.NOTHING)),
}


def prefill() -> None:
    theirs, *ours, _ = PREFILLS
    expected = PREFILLS[theirs](3 * CHUNK)()
    for name in ours:
        agree(name, [PREFILLS[name](3 * CHUNK)()], [expected])
    works = {name: make(LENGTH) for name, make in PREFILLS.items()}
    spent = _timing.in_turn(works, rounds=5)
    taken = {name: peak(name, LENGTH) for name in works}
    rows = []
    for name in works:
        faster, smaller = spent[theirs] / spent[name], taken[theirs] / taken[name]
        row = [name, milliseconds(spent[name]), mebibytes(taken[name])]
        if name == theirs:
            rows.append([*row, "", "", "", ""])
        elif name == NOTHING:
            rows.append([*row, times(faster), "", times(smaller), ""])
        else:
            rows.append([*row, times(faster), met(faster, 5), times(smaller), met(smaller, 4)])
    columns = ["", "time", "peak memory", "times faster", "goal", "times less memory", "goal"]
    shape = "2 layers, 512 wide, 8/2 heads, 1,792 inside"
    table(
        f"Prefill: a Mistral-shaped model, {shape}, window {WINDOW}, {LENGTH:,} tokens "
        "(`benchmarks/language_model.py prefill`)",
        columns,
        rows,
    )


def rolling(length: int = LONG) -> None:
    rotary = Rotary(8)
    model = LanguageModel(
        LanguageModelConfig(
            vocabulary_size=64,
            dim=16,
            layers=(LayerConfig(before=127, rotary=rotary), LayerConfig(before=63, prefix=4, rotary=rotary)),
            attention=AttentionConfig(num_heads=2),
            feed_forward=GatedFeedForwardConfig(32),
        )
    ).eval()
    tokens = torch.randint(0, 64, (1, length))
    rows, most, at = [], 0, 0
    with torch.inference_mode():
        cache = model.make_cache()
        for end in (1000, 10_000, length):
            while at < end:
                step = 1 if end - at <= 300 else 100  # most of it in parts, and 300 single tokens before each mark
                _, cache = model.next_features(tokens[:, at : at + step], cache)
                at, most = at + step, max(most, cache.nbytes)
            held = ", ".join(
                str(len(layer.attention)) for layer in cache.layers if isinstance(layer.attention, KVCache)
            )
            rows.append([f"{at:,}", held, f"{cache.nbytes / 1024:,.0f} KiB", f"{most / 1024:,.0f} KiB"])
    columns = ["tokens so far", "keys held by the two layers", "cache", "the most so far"]
    table(
        "Rolling cache: windows of 128, and of 64 beside the first 4 (`benchmarks/language_model.py rolling`)",
        columns,
        rows,
    )


PARTS = {"decode": decode, "prefill": prefill, "rolling": rolling}

if __name__ == "__main__":
    import sys

    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not answer(PREFILLS):
        print(_timing.machine())
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
