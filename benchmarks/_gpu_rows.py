"""The rows that `gpu.py` measures: what is computed, beside which peer, and the ratio that is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import _gpu_work as work
from _gpu_work import LONG, MIDDLE, NEW_TOKENS, Place, Sides

from regard import lenses, normalizers

BOTH = False, True
SDPA, GROUPED, FLEX, FLA = "SDPA", "SDPA, enable_gqa", "FlexAttention", "flash-linear-attention"


@dataclass(frozen=True)
class Row:
    """Work, whose `sides` makes the calls by name; ours is compared with that of `peer`.

    floor: the least ratio of the peer's time to ours that is wanted; None without one. share: our work as a share of
    the peer's, where they differ. megabytes: the most memory above the inputs that is wanted. compared: whether both
    compute the same numbers.
    """

    work: str
    sides: Callable[[Place], Sides]
    peer: str
    floor: float | None = None
    share: Callable[[], float] | None = None
    megabytes: float | None = None
    compared: bool = True


def way(gradients: bool) -> str:
    return "with gradients" if gradients else "forward"


def small() -> Iterator[Row]:
    for (batch, n), grad in itertools.product(((1, 16), (32, 25), (64, 256)), BOTH):
        name = f"padding, ({batch}, 8, {n}, 64), {way(grad)}"
        yield Row(name, partial(work.padded, batch, n, grad), SDPA, 1.0)


def decode() -> Iterator[Row]:
    name = f"32 / 8 heads of 128, {LONG:,} keys"
    for batch in (1, 16):
        yield Row(f"one query, {name}, batch {batch}", partial(work.decoding, batch, 1, GROUPED), GROUPED, 1.0)
        yield Row(f"8 queries, {name}, batch {batch}", partial(work.decoding, batch, 8, GROUPED), GROUPED, 4.0)
    yield Row(f"one query, {name}, batch 16", partial(work.decoding, 16, 1, "copy"), "copy", 0.85, compared=False)
    name = f"128 heads and one key head of 576, values of 512 in them, {LONG:,} keys, batch 4"
    yield Row(f"one query, {name}", partial(work.latent_decoding, 4), GROUPED, 1.0)
    name = f"32 / 8 heads of 128, {MIDDLE:,} keys each in pages of 64 that lie apart"
    yield Row(f"a token of each of 64 sequences, {name}", partial(work.paged, 64), GROUPED, 0.8)


def dense() -> Iterator[Row]:
    shapes = ("causal", 64, 512), ("causal", 8, MIDDLE), ("all pairs", 8, MIDDLE), ("causal", 2, LONG)
    for (pairs, batch, n), grad in itertools.product(shapes, BOTH):
        name = f"{pairs}, ({batch}, 16, {n:,}, 128), {way(grad)}"
        yield Row(name, partial(work.plain, batch, n, pairs == "causal", grad), SDPA, 0.98)


def structured() -> Iterator[Row]:
    for mask, grad in itertools.product(("window", "documents", "prefix and window"), BOTH):
        name = f"{mask}, 16 heads of 128, n = {LONG:,}, {way(grad)}"
        yield Row(name, partial(work.structured, mask, grad), FLEX, 1.3)
    for name, group in (
        ("2,048 keys of each query, 64 heads of 128 and one key head", 64),
        ("16 blocks of 64 keys of each query, 16 heads", 16),
    ):
        what = f"{name}, causal, n = {LONG:,}, with gradients"
        yield Row(what, partial(work.listed, group), "all keys, ours", 1.0, compared=False)
    for mask in work.SPARSE:
        name, share = (
            f"{mask}, 16 heads of 128, n = {LONG:,}, with gradients, a pair",
            partial(work.share_of_causal, mask),
        )
        yield Row(name, partial(work.sparse, mask), "causal", 1 / 2.5, share=share, compared=False)


def bias() -> Iterator[Row]:
    name = f"(4, 16, {MIDDLE:,}, 64), with gradients"
    for what in ("ALiBi", "softcap", "sinks"):
        yield Row(f"{what}, causal, {name}", partial(work.distance_bias, what), FLEX, 1.2)
    yield Row(f"T5's learned bias, {name}", work.learned_bias, SDPA, 4.0)
    normalized = {"sigmoid": (normalizers.Sigmoid(), 1 / 1.1)}
    normalized |= {"sparsemax": (normalizers.Sparsemax(), 1 / 2), "entmax-1.5": (normalizers.Entmax(1.5), 1 / 2)}
    normalized |= {"entmax-1.3": (normalizers.Entmax(1.3), 1 / 3)}
    for what, (normalizer, floor) in normalized.items():
        sides = partial(work.normalized, normalizer)
        yield Row(f"{what}, causal, {name}", sides, "softmax, ours", floor, compared=False)


def dropout() -> Iterator[Row]:
    name = f"dropout 0.1, causal, (4, 16, {MIDDLE:,}, 64), with gradients"
    yield Row(name, work.dropout, SDPA, 0.85, compared=False)


def additive() -> Iterator[Row]:
    name = "8 × 1,024, dim 128, float32"
    yield Row(f"additive scores, {name}, forward", partial(work.additive, False), "compiled formula", 1.5)
    yield Row(f"additive scores, {name}, with gradients", partial(work.additive, True), "eager formula", 3.0)


def seen() -> Iterator[Row]:
    name, alone = f"causal, 16 heads of 64, n = {LONG:,}", "attention alone"
    more = lenses.TopK(8), lenses.Received()
    yield Row(f"Pooled and Entropy, {name}", partial(work.observing, ()), alone, 1 / 1.6, megabytes=300)
    yield Row(f"and TopK(8), Received, {name}", partial(work.observing, more), alone, 1 / 2.2, megabytes=300)
    yield Row("all weights, causal, 16 heads of 64, n = 2,048", work.all_weights, "eager formula")


def linear() -> Iterator[Row]:
    name = f"causal, 16 heads of 64, n = {LONG:,}, with gradients"
    yield Row(f"linear attention, elu + 1, {name}", work.linear, FLA, 0.9)
    yield Row(f"gated delta rule, {name}", work.delta_rule, FLA, 0.9)


def model() -> Iterator[Row]:
    name = "encoder of 6 layers of 512, 32 × 256, dropout, autocast, training"
    yield Row(name, work.encoder, "torch.nn.TransformerEncoder", 1.0, compared=False)
    name = f"{NEW_TOKENS} tokens of 8 layers of 1,024, batch 4, prompt 1,024"
    yield Row(name, partial(work.generation, False), "transformers", 1.0, compared=False)
    yield Row(f"{name}, captured steps", partial(work.generation, True), "transformers", 2.0, compared=False)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "small": small,
    "decode": decode,
    "dense": dense,
    "lenses": seen,
    "additive": additive,
    "dropout": dropout,
    "bias": bias,
    "masks": structured,
    "model": model,
    "linear": linear,
}
"""The parts of the table: those that compile nothing first."""
