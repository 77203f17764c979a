"""The attention mechanisms that are compared for a workload, each with its price, source and effect on quality."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from .. import native
from ..kernels.base import Cost
from ..kernels.planning.rates import seconds_on
from ..kernels.planning.unit_costs import WIDEN
from ..masks import Mask, causal, prefix, window
from ..scores import Additive
from ..utils.units import format_seconds
from .cards import CardWork
from .prices import DELTA_RULE, LARA, S4D, SOFT, TITANS, TTT_LINEAR, Price, linear_price, ring_price, softmax_price
from .workload import DTYPES, Workload

WINDOW = 4096
"""Positions of the window that is compared, as of Mistral 7B, where the task has no `local`."""
WINDOWED, OF_LAYERS = 5, 6
"""Layers with a window, of as many in turn, where both kinds are mixed: as of Gemma 3."""
BLOCK = 64
"""Keys of a block that is chosen."""
SINKS = 4
"""First positions that all later ones attend to beside the window (Xiao et al. 2024, arXiv 2309.17453)."""
GROUP = 8
"""Query heads that share a key head in the grouped-query mechanism."""
LATENT_DIM, ROTARY_DIM = 512, 64
"""Numbers that latent attention stores for a token, as of DeepSeek-V2."""
FEATURES = 256
"""Random features of the Performer that is compared."""
LANDMARKS = 49
"""Landmarks of LARA and SOFT, as in their papers."""
CHANNEL_STATES = 32
"""Complex numbers of the state of each channel of S4D, as in its paper."""
RING_TOKENS = 10**6
"""Tokens from which a ring is compared though the sequence may fit in the memory of one process."""
MOST_PROCESSES = 1024
BANDWIDTH = 1e10
"""Bytes a second between the processes of a ring: a network of 100 Gbit/s, assumed."""


QUANTISED = (
    (8, "next to none in the published tests", "Sheng et al. 2023 (FlexGen), arXiv 2303.06865"),
    (4, "a small loss, with keys by channel where they have a bias", "Liu et al. 2024 (KIVI), arXiv 2402.02750"),
)
"""Bits of a number in a quantised cache, what they cost in quality, and a source."""
PACKINGS = {
    8: "CacheFormat()",
    4: "CacheFormat(Packing('int4', by_channel=True), Packing('int4'))",
}
"""How such a cache is made."""
READING = {(8, 2): 0.5, (4, 2): 0.4, (8, 4): 0.34, (4, 4): 0.28}
"""Time of a step over such a cache, by its bits and the bytes of a number, over that of a cache of these numbers.

Measured in native code, with 32 query and 8 key heads of 128 (Zen 5, AVX-512): the bytes, or the products.
"""


class Change(IntEnum):
    """What a mechanism changes of the model, from least to most."""

    NOTHING = 0
    FEWER_BITS = 1
    FEWER_KEY_HEADS = 2
    ONE_KEY_HEAD = 3
    ANOTHER_SCORE = 4
    FEWER_PAIRS = 5
    APPROXIMATION = 6


@dataclass(frozen=True)
class Mechanism:
    """A mechanism for a workload.

    change: of the model. reason: why one would take it. quality: its effect on results. source: a paper. code: how it
    is written with regard. fits: whether its memory is within the workload's.
    """

    name: str
    change: Change
    price: Price
    reason: str
    quality: str
    source: str
    code: str
    fits: bool = True


def mechanisms(workload: Workload) -> list[Mechanism]:
    """All mechanisms that can compute the workload; those that need another training of a fixed model are left out."""
    found = [
        replace(each, fits=workload.memory is None or each.price.memory <= int(workload.memory))
        for each in _all(workload)
    ]
    return [each for each in found if not workload.fixed or each.change <= Change.FEWER_BITS]


def _all(workload: Workload) -> Iterator[Mechanism]:
    key_heads = workload.key_heads or workload.heads
    own = _softmax(workload, key_heads)
    yield own
    if (processes := _processes(workload, own.price)) > 1:
        yield Mechanism(
            "ring of processes",
            Change.NOTHING,
            ring_price(workload, own.price, processes, BANDWIDTH),
            f"the sequence is cut over {processes} processes, each with memory of its own for 1/{processes} of it",
            "exact: the same result as in one process",
            "Liu et al. 2023, arXiv 2310.01889",
            f"with regard.ring.sharded(regard.ring.Zigzag()): ...   # torchrun --nproc-per-node {processes}",
        )
    if workload.task == "decode":
        for bits, quality, source in QUANTISED:
            if bits < 8 * workload.element_size and workload.head_dim % (32 // bits) == 0:
                yield _quantised(workload, own, bits, quality, source)
    for shared in sorted({math.gcd(GROUP, workload.heads), workload.heads}):
        if shared > 1 and workload.heads // shared < key_heads:
            yield _shared_keys(workload, workload.heads // shared)
    if workload.architecture == "decoder" and workload.head_dim * 2 * key_heads > LATENT_DIM + ROTARY_DIM:
        yield _latent(workload)
    if workload.architecture == "translation":
        yield _additive(workload, key_heads)
    else:
        if workload.window is None and workload.keys > (workload.local or WINDOW):
            yield (near := _windowed(workload, key_heads))
            if workload.layers > 1:
                yield _mixed_layers(workload, own, near)
            if workload.architecture == "decoder":
                yield _chosen_blocks(workload, key_heads)
        yield _linear(workload, key_heads)
        if workload.architecture == "decoder":
            yield _gated_delta(workload, key_heads)
        yield _performer(workload, key_heads)
        if workload.device_type == "cpu" and workload.card is None and workload.task != "decode":
            yield from _of_whole_sequences(workload)


def attended_keys(workload: Workload, positions: int | None) -> tuple[Mask | None, int]:
    """The mask of a workload, with a window if there is one, and the keys that are in memory."""
    mask = causal() if workload.causal else None
    if positions is None or positions >= workload.keys:
        return mask, workload.keys
    if workload.task == "decode":
        return None, positions
    near = window(before=positions - 1, after=0 if workload.architecture == "decoder" else positions - 1)
    return (near if mask is None else mask & near), workload.keys


def _softmax(workload: Workload, key_heads: int) -> Mechanism:
    mask, keys = attended_keys(workload, workload.window)
    kind = "multi-head" if key_heads == workload.heads else "multi-query" if key_heads == 1 else "grouped-query"
    name = f"{kind}, window of {workload.window:,}" if workload.window else kind
    return Mechanism(
        name,
        Change.NOTHING,
        softmax_price(workload, key_heads, keys, mask=mask),
        "scaled dot products over every pair that the task allows",
        "exact",
        "Vaswani et al. 2017, arXiv 1706.03762",
        f"regard.attention(q, k, v{'' if mask is None else f', mask={mask!r}'})",
    )


def _quantised(workload: Workload, own: Mechanism, bits: int, quality: str, source: str) -> Mechanism:
    """The workload's own mechanism with a cache of fewer bits: with a scale and an offset of 16 bits for each head.

    Native code reads it as it is. Elsewhere a layer at a time is converted back at each step; of a named card the time
    is that of reading the codes, and the reason has what converting them takes.
    """
    whole = own.price.cache
    cache = whole * (bits + 32 / workload.head_dim) / (8 * workload.element_size)
    of_layer = whole / workload.layers
    price = replace(own.price, cache=cache, memory=own.price.memory - whole + cache)
    how = "native code reads as it is"
    if workload.card is not None:
        read = replace(price, bytes=own.price.bytes - whole + cache)
        dtype = DTYPES[workload.dtype]
        per_layer = [CardWork(0.0, moved / workload.layers) for moved in (read.bytes, read.bytes + 2 * whole)]
        seconds, converted = (work.seconds(workload.card, dtype) * workload.layers for work in per_layer)
        price = replace(read, kernel="packed keys", seconds=seconds)
        how = (
            "a kernel that reads its codes takes this time for; those of regard convert a layer at a time back on a "
            f"GPU, {format_seconds(converted)}"
        )
    elif workload.device_type == "cpu" and native.available() and workload.element_size < 8:
        seconds = own.price.seconds * READING[bits, workload.element_size]
        price = replace(price, bytes=own.price.bytes - whole + cache, seconds=seconds)
    else:
        passes = WIDEN * of_layer / workload.element_size
        converting = seconds_on(
            workload.device_type, Cost(0.0, of_layer, passes=passes, calls=4.0), DTYPES[workload.dtype]
        )
        seconds = own.price.seconds + workload.layers * converting
        price = replace(price, bytes=own.price.bytes + cache + whole, memory=price.memory + of_layer, seconds=seconds)
        how = "each step has to convert back"
    return Mechanism(
        f"{own.name}, cache in {bits} bits",
        Change.FEWER_BITS,
        price,
        f"a cache {whole / cache:.1f} times smaller without another training, which {how}",
        quality,
        source,
        f"model.make_cache().packed({PACKINGS[bits]})",
    )


def _shared_keys(workload: Workload, key_heads: int) -> Mechanism:
    mask, keys = attended_keys(workload, workload.window)
    many = key_heads > 1
    return Mechanism(
        f"grouped-query, {key_heads} key heads" if many else "multi-query",
        Change.FEWER_KEY_HEADS if many else Change.ONE_KEY_HEAD,
        softmax_price(workload, key_heads, keys, mask=mask),
        f"{workload.heads // key_heads} query heads share a key head, so that the cache is as many times smaller",
        "close to multi-head if trained so" if many else "somewhat below multi-head, and less stable to train",
        "Ainslie et al. 2023, arXiv 2305.13245" if many else "Shazeer 2019, arXiv 1911.02150",
        f"regard.nn.Projections(dim, {workload.heads}, num_kv_heads={key_heads})",
    )


def _additive(workload: Workload, key_heads: int) -> Mechanism:
    score = Additive(workload.head_dim, workload.head_dim, workload.head_dim).to(DTYPES[workload.dtype])
    return Mechanism(
        "additive",
        Change.ANOTHER_SCORE,
        softmax_price(workload, key_heads, workload.keys, score=score.requires_grad_(False)),
        "queries and keys need not have the same dim, and the score is bounded",
        "exact; as good as dot products for small dims, in Vaswani et al. 2017, section 3.2.1",
        "Bahdanau et al. 2015, arXiv 1409.0473, appendix A.1.2",
        f"regard.attention(q, k, v, score=regard.scores.Additive({workload.head_dim}, {workload.head_dim}, dim))",
    )


def _latent(workload: Workload) -> Mechanism:
    """While decoding, all heads attend to one latent of each token, key and value at once: the absorbed form."""
    width = LATENT_DIM + ROTARY_DIM
    stored = workload.layers * workload.batch * workload.keys * width * workload.element_size
    if workload.task == "decode":
        price = softmax_price(replace(workload, head_dim=width), 1, workload.keys)
        price = replace(price, cache=stored, memory=price.memory - stored, bytes=price.bytes - stored)
    else:
        mask, keys = attended_keys(workload, None)
        price = softmax_price(workload, workload.heads, keys, mask=mask)
        price = replace(price, cache=0.0 if workload.task == "train" else stored)
    return Mechanism(
        "latent attention",
        Change.FEWER_KEY_HEADS,
        price,
        f"a cache of {width} numbers a token, from which the keys and values of all heads are projected",
        "that of multi-head in its paper, if trained so",
        "DeepSeek-V2, arXiv 2405.04434, section 2.1",
        f"LatentProjections(dim, {workload.heads}, latent_dim={LATENT_DIM}, rotary_dim={ROTARY_DIM})",
    )


def _windowed(workload: Workload, key_heads: int) -> Mechanism:
    """A window over the positions that the task needs, or of the usual width with the first positions beside it."""
    width, whole = workload.local or WINDOW, workload.local is not None
    mask, keys = attended_keys(workload, width)
    code = f"window(before={width - 1})" if whole else f"(window(before={width - 1}) | prefix({SINKS}))"
    if workload.architecture == "decoder" and mask is not None and not whole:
        mask = causal() & (window(before=width - 1) | prefix(SINKS))
    return Mechanism(
        f"window of {width:,}" if whole else f"window of {width:,}, {SINKS} sinks",
        Change.NOTHING if whole else Change.FEWER_PAIRS,
        softmax_price(workload, key_heads, keys, mask=mask),
        "time linear in the length, and a cache of the window alone",
        f"as good as all pairs for a task that needs {width:,} positions, which you say that it does"
        if whole
        else f"no layer reads further back than the window; {workload.layers} layers together "
        f"{workload.layers * width:,} tokens",
        "Beltagy et al. 2020, arXiv 2004.05150; sinks: Xiao et al. 2024, arXiv 2309.17453",
        f"mask=causal() & {code}" if workload.architecture == "decoder" else f"mask=window({width - 1}, {width - 1})",
    )


def _mixed_layers(workload: Workload, own: Mechanism, near: Mechanism) -> Mechanism:
    """A window in most layers and all pairs in the others, whose price is the mean of both."""
    share = WINDOWED / OF_LAYERS
    numbers = {
        name: share * getattr(near.price, name) + (1 - share) * getattr(own.price, name)
        for name in ("flops", "bytes", "cache", "memory", "seconds")
    }
    kernels = dict.fromkeys((near.price.kernel, own.price.kernel))
    return Mechanism(
        f"window of {workload.local or WINDOW:,} in {WINDOWED} of {OF_LAYERS} layers",
        Change.FEWER_PAIRS,
        Price(" and ".join(kernels), **numbers),
        f"one layer of {OF_LAYERS} reads all of the sequence, the others what is near",
        "close to all pairs in its paper, if trained so",
        "Gemma 3, arXiv 2503.19786, section 2",
        f"{near.code}   # of layer i, unless i % {OF_LAYERS} == {WINDOWED}",
    )


def _chosen_blocks(workload: Workload, key_heads: int) -> Mechanism:
    """The pairs of a window, wherever they are, so that all keys stay in the cache."""
    mask, keys = attended_keys(workload, WINDOW)
    price = softmax_price(workload, key_heads, keys, mask=mask)
    if workload.task == "decode":
        stored = workload.bytes_of_keys(key_heads, workload.keys)
        price = replace(price, cache=stored, memory=price.memory - price.cache + stored)
    return Mechanism(
        f"blocks of {BLOCK} chosen by content, {WINDOW:,} keys",
        Change.FEWER_PAIRS,
        price,
        "each query attends to the blocks whose mean key it likes best, however far: a window's time, all keys kept",
        "close to full attention in its papers, if trained so",
        "Lu et al. 2025 (MoBA), arXiv 2502.13189; Yuan et al. 2025 (NSA), arXiv 2502.11089",
        f"causal() & blocks(selection.gated_blocks(q, k, size={BLOCK}, count={WINDOW // BLOCK}), (1, {BLOCK}))",
    )


def _gated_delta(workload: Workload, key_heads: int) -> Mechanism:
    price = linear_price(workload, workload.head_dim, key_heads)
    factor = 1.0 if workload.task == "decode" else DELTA_RULE
    return Mechanism(
        "Gated DeltaNet",
        Change.APPROXIMATION,
        replace(price, seconds=factor * price.seconds),
        "a state of constant size whose values are replaced and fade, instead of a cache",
        "another function, trained as such; released models mix three such layers with one of softmax attention",
        "Yang et al. 2025, arXiv 2412.06464; Qwen3-Next",
        "nn.LinearAttention(Projections(dim, heads), causal=True, rule=DeltaRule(), decay=HeadDecay())",
    )


def _linear(workload: Workload, key_heads: int) -> Mechanism:
    return Mechanism(
        "linear attention",
        Change.APPROXIMATION,
        linear_price(workload, workload.head_dim, key_heads),
        "a state of constant size instead of a cache, and time linear in the length",
        "another function, trained as such: recalls less of the far past; mix it with layers of softmax attention",
        "Katharopoulos et al. 2020, arXiv 2006.16236",
        f"regard.nn.LinearAttention(Projections(dim, {workload.heads}), causal={workload.architecture == 'decoder'})",
    )


def _performer(workload: Workload, key_heads: int) -> Mechanism:
    return Mechanism(
        f"Performer, {FEATURES} features",
        Change.APPROXIMATION,
        linear_price(workload, FEATURES, key_heads),
        "estimates the weights of softmax attention without bias, in time linear in the length",
        "an error that falls as 1/√features: measure it on your own tensors by regard.approximation",
        "Choromanski et al. 2021, arXiv 2009.14794",
        f"regard.nn.PerformerAttention(Projections(dim, {workload.heads}), num_features={FEATURES})",
    )


def _of_whole_sequences(workload: Workload) -> Iterator[Mechanism]:
    """Those whose time was measured on a CPU, over whole sequences, as factors of that of linear attention."""
    widths = workload.head_dim, 2 * CHANNEL_STATES, LANDMARKS
    state, channels, landmarks = (linear_price(workload, width, workload.heads) for width in widths)
    other = "another function, trained as such"
    if workload.architecture == "decoder":
        yield Mechanism(
            "TTT-Linear",
            Change.APPROXIMATION,
            replace(state, kernel="ttt_attention", seconds=TTT_LINEAR * state.seconds),
            "a state that is a linear model, trained by gradient steps while it reads",
            other,
            "Sun et al. 2024, arXiv 2407.04620",
            "linear.ttt_attention(q, k, v, rate=..., initial=..., norm_weight=..., norm_bias=...)",
        )
        yield Mechanism(
            "Titans",
            Change.APPROXIMATION,
            replace(
                state,
                kernel="titans_attention",
                cache=2 * state.cache,  # the memory and its momentum
                memory=state.memory + state.cache,
                seconds=TITANS * state.seconds,
            ),
            "as the delta rule, with momentum: what surprised a while ago is still written",
            other,
            "Behrouz et al. 2024, arXiv 2501.00663",
            "linear.titans_attention(q, k, v, rate=..., momentum=..., decay=...)",
        )
        yield Mechanism(
            "S4D",
            Change.APPROXIMATION,
            replace(channels, kernel="diagonal_state_space", seconds=S4D * channels.seconds),
            f"a state of {CHANNEL_STATES} complex numbers a channel, whose decay does not depend on the token",
            f"{other}: it cannot choose what it remembers",
            "Gu et al. 2022, arXiv 2206.11893",
            "linear.diagonal_state_space(x, step=..., rates=..., weights=...)",
        )
        return
    for name, factor, source, code in (
        ("LARA", LARA, "Zheng et al. 2022, arXiv 2204.04667", "lara_attention(q, k, v"),
        ("SOFT", SOFT, "Lu et al. 2021, arXiv 2110.11945", "soft_attention(q, v"),
    ):
        yield Mechanism(
            f"{name}, {LANDMARKS} landmarks",
            Change.APPROXIMATION,
            replace(landmarks, kernel=f"{name.lower()}_attention", seconds=factor * landmarks.seconds),
            "reads the sequence through means of its segments, in time linear in the length",
            "an error that depends on the text: measure it on your own tensors" if name == "LARA" else other,
            source,
            f"regard.approximations.{code}, landmarks={LANDMARKS})",
        )


def _processes(workload: Workload, price: Price) -> int:
    """Processes of a ring: the smallest power of two whose share fits in memory; 1 where one is enough, or none are."""
    if workload.task == "decode" and workload.memory is None:
        return 1
    limit = workload.memory if workload.memory is not None else math.inf
    least = processes = 8 if workload.keys >= RING_TOKENS else 1
    while price.memory / processes > float(limit) and processes < min(MOST_PROCESSES, workload.keys):
        processes *= 2
    return processes if price.memory / processes <= float(limit) else least
