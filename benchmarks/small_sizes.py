"""Every mechanism beside its formula in torch, from 16 to 1,024 tokens, forward, and forward and backward; one thread.

Formulas are over all pairs with a softmax written out, or the closed form of a recurrence; what does not depend on the
call, as booleans of a causal mask and tables of distances, is made before. 8 heads of 64, batch 1, float32. Goal: never
slower than the formula.

    python benchmarks/small_sizes.py [--quick] [--only NAME] [--sizes 16,64]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import _naive_formulas as naive
import _timing
import entmax
import torch
from _naive_formulas import softmax
from _report import agree, gradients, table
from torch import Tensor
from torch.nn.functional import elu, normalize, rms_norm

import regard
from regard import biases, linear, masks, nn, normalizers, positions, scores, selection
from regard.approximations import nystrom_attention

HEADS, DIM, WIDTH, BLOCK = 8, 64, 512, 16
SIZES = 16, 64, 256, 1024
LEAST, MOST_ROUNDS = 0.1, 21
"""Seconds that each side of a cell runs for, if that takes no more than so many rounds; never less than five."""
CAUSAL, PLAIN = masks.causal(), {"feature_map": linear.Identity(), "normalize": False, "causal": True}
WINDOWED, STREAMING = CAUSAL & masks.window(before=8), CAUSAL & (masks.window(before=8) | masks.prefix(4))
STRIDED = CAUSAL & (masks.window(before=7) | masks.strided(8))
LONGFORMER = masks.window(before=4, after=4) | masks.global_tokens([0, 11])
DILATED, BY_TILE = masks.dilated(before=4, step=3), masks.from_mod(lambda b, h, i, j: i // 8 >= j // 8)
SANDWICH = biases.from_mod(lambda score, b, h, i, j: score - torch.log1p(abs(i - j) / 2))
DOT = scores.Dot()
ALIBI, GAUSSIAN = biases.alibi(HEADS), biases.gaussian(11.0, 4.0)
SLOPES = (2.0 ** -torch.arange(1.0, HEADS + 1))[:, None, None]
LEARNED = ("q", "k", "v")
RAMP = 32.0


class Case(NamedTuple):
    """A mechanism: its call and its formula over the same tensors, those in `learned` with gradients."""

    name: str
    ours: Callable[[Any], Tensor]
    formula: Callable[[Any], Tensor]
    learned: Sequence[str] = LEARNED
    most: int = 1024
    has_gradient: bool = True


class Inputs:
    """Tensors of n tokens, the same numbers each time; those that are asked for first."""

    def __init__(self, n: int) -> None:
        torch.manual_seed(0)
        self.n = n
        self.block, self.chosen = min(BLOCK, n // 4), max(n // 8, 2)
        place = torch.arange(n)
        self.ids, self.distance, self.tril = place // 11, place[:, None] - place, place[:, None] >= place
        self.q, self.k, self.v = (torch.randn(1, HEADS, n, DIM) for _ in range(3))
        self.unit = normalize(torch.randn(1, HEADS, n, DIM), dim=-1)
        self.k2, self.v2 = (torch.randn(1, 2, n, DIM) for _ in range(2))
        self.sizes = {"length": 8, "stride": 4, "size": 8, "count": 4 if n > 16 else 2, "window": 7}
        if n >= 256:
            self.sizes = {"length": 32, "stride": 16, "size": 64, "count": 4, "window": 64}
        compressed = (n - self.sizes["length"]) // self.sizes["stride"] + 1
        self.small_k, self.small_v = (torch.randn(1, 2, compressed, DIM) for _ in range(2))
        self.three_gates, self.gates = torch.rand(1, HEADS, n, 3), torch.rand(1, n, HEADS)
        self.x, self.memory = torch.randn(1, n, WIDTH), torch.randn(1, n, WIDTH)
        self.decay, self.beta = -torch.rand(1, HEADS, n) / 32, torch.rand(1, HEADS, n)
        self.feature_decay, self.gate = -torch.rand(1, HEADS, n, DIM) / 32, torch.rand(1, HEADS, n, DIM)
        self.sink, self.rates, self.alpha = torch.randn(HEADS), torch.rand(HEADS) + 0.5, torch.tensor(1.3)
        self.buckets, self.near = torch.randn(HEADS, 32), torch.randn(HEADS, 16)
        self.vectors, self.of_keys, self.of_queries = torch.randn(3, HEADS, 16, DIM).unbind()
        self.maps, self.u, self.w = torch.randn(HEADS, DIM, DIM) / 8, torch.randn(HEADS, DIM), torch.randn(HEADS, DIM)
        self.tupe_q, self.tupe_k = torch.randn(HEADS, n, DIM), torch.randn(HEADS, n, DIM)
        self.into, self.offset, self.out, self.shift = (torch.randn(shape) for shape in (32, 32, (HEADS, 32), HEADS))
        self.before, self.after = torch.randn(2, HEADS, HEADS).unbind()
        self.first, self.second = torch.randn(HEADS, 3, 5) / 4, torch.randn(HEADS, 2, 3) / 4
        self.spans, self.transitions = n / 8 * torch.rand(HEADS) + 0.3, torch.tensor([[0.5, 0.0], [-0.3, 1.0]])
        self.sorting = torch.randn(HEADS, n // self.block, n // self.block)
        self.hyperplanes, self.shorter = torch.randn(DIM, 5), torch.randn(max(n // 4, 4), n) / n**0.5
        self.favor = linear.FavorPlus(DIM, 64, seed=0)
        general, location = scores.General(DIM, DIM), scores.Location(DIM, n)
        additive, concat = scores.Additive(DIM, DIM, 32), scores.Concat(DIM, DIM, 32)
        self.general, self.location, self.additive, self.concat = general, location, additive, concat
        self.general_weight, self.location_weight = general.weight, location.weight
        self.query_weight, self.key_weight, self.weight = additive.query_weight, additive.key_weight, additive.weight
        self.concat_matrix, self.concat_weight = concat.matrix, concat.weight
        self.tree = (self.distance == 0) | (torch.rand(n, n) > 0.5)
        lists = torch.rand(1, HEADS, n, n).masked_fill(~self.tril, -1.0).topk(self.chosen, -1)
        self.lists = lists.indices.masked_fill(lists.values < 0, 0)
        self.few = torch.rand(1, HEADS, n // self.block, n // self.block).topk(2, -1).indices
        self.padding = masks.padding([n - n // 4])
        self._tables(place)
        self._layers()

    def _tables(self, place: Tensor) -> None:
        """What the formulas would keep as buffers."""
        distance, n = self.distance, self.n
        self.t5 = naive.t5_bucket(-distance)
        self.clipped = (-distance).clamp(-8, 7) + 8
        self.deberta = naive.deberta_bucket(distance, 8, 20)
        self.waves = naive.waves(torch.arange(n), DIM)
        angles = place[:, None] / 10000 ** (torch.arange(DIM // 2) / (DIM // 2))
        self.cos, self.sin = angles.cos(), angles.sin()
        few = place[:, None] / 10000 ** (torch.arange(16) / 16)
        self.few_cos, self.few_sin = few.cos(), few.sin()
        self.alibi, self.sandwich = -SLOPES * distance.abs(), torch.log1p(distance.abs() / 2)
        self.bell = -(place - 11.0).square() / 32
        self.windowed, self.streaming = self.tril & (distance <= 8), self.tril & ((distance <= 8) | (place < 4))
        self.strided = self.tril & ((distance <= 7) | (distance % 8 == 0))
        marked = (place == 0) | (place == 11)
        self.longformer = (distance.abs() <= 4) | marked[:, None] | marked
        self.dilated = (distance >= 0) & (distance <= 12) & (distance % 3 == 0)
        self.by_tile, self.packed = place[:, None] // 8 >= place // 8, self.ids[:, None] == self.ids
        self.prefixed, self.unpadded = self.tril | (place < 9), place < n - n // 4
        self.where, self.documents = masks.where(keep=self.tree), masks.documents(self.ids)

    def _layers(self) -> None:
        """Attention layers of 8 heads of 64."""
        rotary = positions.Rotary(DIM)
        self.layer = nn.Attention(nn.Projections(WIDTH, HEADS, bias=False), mask=CAUSAL)
        self.all_pairs = nn.Attention(nn.Projections(WIDTH, HEADS, bias=False))
        self.windowed_layer = nn.Attention(nn.Projections(WIDTH, HEADS, bias=False), mask=WINDOWED)
        self.rotated = nn.Attention(nn.Projections(WIDTH, HEADS, bias=False), mask=CAUSAL, rotary=rotary)
        self.normed = nn.Attention(nn.Projections(WIDTH, HEADS, bias=False, norm=nn.RMSNorm))
        latents = nn.LatentProjections(WIDTH, HEADS, latent_dim=128, rotary_dim=32)
        self.latent = nn.LatentAttention(latents, positions.Rotary(32), mask=CAUSAL)

    @property
    def s(self) -> Tensor:
        """The scores q · k / √d."""
        return self.q @ self.k.mT / 8

    def leaves(self, names: Sequence[str]) -> list[Tensor]:
        """The tensors of these names, and parameters of layers, which from now on have gradients."""
        found: list[Tensor] = []
        for name in names:
            own = getattr(self, name)
            found += own.parameters() if isinstance(own, torch.nn.Module) else [own]
        return [leaf.requires_grad_() for leaf in found]


def steps(layer: Any, x: Tensor) -> Tensor:
    """A layer's outputs, a token at a time."""
    cache, outputs = layer.make_cache(), []
    for token in x.split(1, 1):
        output, cache = layer.step(token, cache)
        outputs.append(output)
    return torch.cat(outputs, 1)


def attend(t: Inputs, **options: Any) -> Tensor:
    return regard.attention(t.q, t.k, t.v, **options)


def recur(t: Inputs, **options: Any) -> Tensor:
    return regard.linear_attention(t.q, t.unit, t.v, **PLAIN, **options)


def chosen_blocks(t: Inputs) -> Tensor:
    keep = naive.listed(t.few, t.n // t.block)
    return keep.repeat_interleave(t.block, -2).repeat_interleave(t.block, -1)


def removed(t: Inputs, removal: Tensor, value: Tensor, decay: Tensor | None = None) -> Tensor:
    return naive.delta_rule(t.q / 8, t.unit, value, removal, decay)


def spanned(t: Inputs) -> Tensor:
    bias = biases.adaptive_span(t.spans, RAMP)
    return attend(t, mask=CAUSAL & masks.window(before=bias.reach), bias=bias)


def searched(t: Inputs) -> Tensor:
    return selection.hierarchical_blocks(t.q.detach(), t.k.detach(), size=t.block, count=2)


def searched_pairs(t: Inputs) -> Tensor:
    keep = (searched(t).unsqueeze(-1) == torch.arange(t.n // t.block)).any(-2)
    return t.tril & keep.repeat_interleave(t.block, -2).repeat_interleave(t.block, -1)


def two_steps(t: Inputs) -> Tensor:
    """Each token as two, whose first is not read."""
    beta = t.beta[..., None]
    second = normalize(t.k, dim=-1)
    keys = naive.in_turn(t.unit, second)
    values = naive.in_turn(beta * t.v, beta * t.q)
    decay = naive.in_turn(t.decay[..., None], torch.zeros_like(beta))
    query = naive.in_turn(t.q, t.q) / 8
    removal = keys * naive.in_turn(beta, beta)
    # k r^T removes with beta on the written side: the same product.
    return naive.delta_rule(query, keys, values, removal, decay)[:, :, 1::2]


def product(t: Inputs) -> Tensor:
    keys, values = torch.stack([t.unit, normalize(t.k, dim=-1)], -2), torch.stack([t.v, t.q], -2)
    return linear.delta_product(t.q, keys, values, beta=torch.stack([t.beta, t.beta], -1), decay=t.decay)


SCORES = (
    Case("Dot product", lambda t: attend(t, score=DOT), lambda t: softmax(t.q @ t.k.mT) @ t.v),
    Case("Scaled dot product", attend, lambda t: softmax(t.s) @ t.v),
    Case(
        "Grouped-query",
        lambda t: regard.attention(t.q, t.k2, t.v2),
        lambda t: softmax(t.q @ naive.repeated(t.k2, t.q).mT / 8) @ naive.repeated(t.v2, t.q),
        ("q", "k2", "v2"),
    ),
    Case(
        "General",
        lambda t: attend(t, score=t.general),
        lambda t: softmax(t.q @ t.general_weight @ t.k.mT) @ t.v,
        ("q", "k", "v", "general_weight"),
    ),
    Case(
        "Additive",
        lambda t: attend(t, score=t.additive),
        lambda t: (
            softmax(((t.q @ t.query_weight.T).unsqueeze(-2) + (t.k @ t.key_weight.T).unsqueeze(-3)).tanh() @ t.weight)
            @ t.v
        ),
        ("q", "k", "v", "query_weight", "key_weight", "weight"),
        most=256,
    ),
    Case(
        "Concat",
        lambda t: attend(t, score=t.concat),
        lambda t: (
            softmax(
                (
                    (t.q @ t.concat_matrix[:, :DIM].T).unsqueeze(-2) + (t.k @ t.concat_matrix[:, DIM:].T).unsqueeze(-3)
                ).tanh()
                @ t.concat_weight
            )
            @ t.v
        ),
        ("q", "k", "v", "concat_matrix", "concat_weight"),
        most=256,
    ),
    Case(
        "Location",
        lambda t: attend(t, score=t.location),
        lambda t: softmax(t.q @ t.location_weight.T) @ t.v,
        ("q", "v", "location_weight"),
    ),
    Case(
        "Cosine",
        lambda t: regard.attention(9 * normalize(t.q, dim=-1), normalize(t.k, dim=-1), t.v, score=DOT),
        lambda t: softmax(9 * normalize(t.q, dim=-1) @ normalize(t.k, dim=-1).mT) @ t.v,
    ),
    Case("Soft cap", lambda t: attend(t, softcap=2.0), lambda t: softmax(2 * torch.tanh(t.q @ t.k.mT / 16)) @ t.v),
)

WEIGHTS = (
    Case(
        "Learned sinks",
        lambda t: attend(t, mask=CAUSAL, sinks=t.sink),
        lambda t: naive.with_one_more(t.s.masked_fill(~t.tril, -torch.inf), t.sink[:, None, None]) @ t.v,
        (*LEARNED, "sink"),
    ),
    Case(
        "Softmax off by one",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.Softmax1()),
        lambda t: naive.with_one_more(t.s.masked_fill(~t.tril, -torch.inf), torch.zeros(1)) @ t.v,
    ),
    Case(
        "Sigmoid",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.Sigmoid(-3.0)),
        lambda t: (t.s - 3).masked_fill(~t.tril, -torch.inf).sigmoid() @ t.v,
    ),
    Case(
        "Sparsemax",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.Sparsemax()),
        lambda t: entmax.sparsemax(t.s.masked_fill(~t.tril, -1e9)) @ t.v,
    ),
    Case(
        "Entmax-1.5",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.Entmax(1.5)),
        lambda t: entmax.entmax15(t.s.masked_fill(~t.tril, -1e9)) @ t.v,
    ),
    Case(
        "Entmax with a learned α",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.Entmax(t.alpha)),
        lambda t: entmax.entmax_bisect(t.s.masked_fill(~t.tril, -torch.inf), t.alpha) @ t.v,
        (*LEARNED, "alpha"),
    ),
    Case(
        "Softpick",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.Softpick()),
        lambda t: naive.softpick(t.s, t.tril) @ t.v,
    ),
    Case(
        "Normalised ReLU", lambda t: attend(t, normalizer=normalizers.ReLU(2)), lambda t: naive.squared_relu(t.s) @ t.v
    ),
    Case(
        "Stick-breaking",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.StickBreaking()),
        lambda t: naive.stick_breaking(t.s, t.tril) @ t.v,
    ),
    Case(
        "Top-k weights", lambda t: attend(t, normalizer=normalizers.TopScores(8)), lambda t: naive.largest(t.s, 8) @ t.v
    ),
    Case("Hard", lambda t: attend(t, normalizer=normalizers.Hard()), lambda t: naive.hard(t.s) @ t.v),
    Case(
        "Monotonic",
        lambda t: attend(t, normalizer=normalizers.Monotonic(-4.0)),
        lambda t: naive.monotonic((t.s - 4).sigmoid()) @ t.v,
    ),
    Case(
        "MoChA",
        lambda t: attend(t, normalizer=normalizers.MoChA(-4.0, width=4)),
        lambda t: naive.mocha(t.s, 4, -4.0) @ t.v,
    ),
    Case(
        "Structured attention: a linear chain",
        lambda t: attend(t, normalizer=normalizers.LinearChain(t.transitions)),
        lambda t: naive.linear_chain(t.s, t.transitions) @ t.v,
        (*LEARNED, "transitions"),
    ),
)

MIXED = (
    Case(
        "Multi-head layer", lambda t: t.all_pairs(t.x), lambda t: naive.layer_of(t.all_pairs, t.x), ("x", "all_pairs")
    ),
    Case(
        "Cross-attention",
        lambda t: t.all_pairs(t.x, t.memory),
        lambda t: naive.layer_of(t.all_pairs, t.x, t.memory),
        ("x", "memory", "all_pairs"),
    ),
    Case(
        "Norm of queries and keys",
        lambda t: t.normed(t.x),
        lambda t: naive.layer_of(t.normed, t.x, turn=lambda heads: rms_norm(heads, (DIM,), eps=1e-6)),
        ("x",),
    ),
    Case(
        "Latent keys and values (MLA)",
        lambda t: t.latent(t.x),
        lambda t: naive.latent(t.latent, t.x, t.tril, lambda heads: naive.turned(heads, t.few_cos, t.few_sin)),
        ("x", "latent"),
    ),
    Case(
        "Talking heads",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.TalkingHeads(t.before, t.after)),
        lambda t: naive.mixed(t.after, softmax(naive.mixed(t.before, t.s), t.tril)) @ t.v,
        (*LEARNED, "before", "after"),
    ),
    Case(
        "Differential attention",
        lambda t: regard.differential_attention((t.q, t.v), (t.k, t.q), t.v, 0.8, mask=CAUSAL),
        lambda t: (softmax(t.s, t.tril) - 0.8 * softmax(t.v @ t.q.mT / 8, t.tril)) @ t.v,
    ),
    Case(
        "Multi-token attention",
        lambda t: attend(t, mask=CAUSAL, normalizer=normalizers.MultiToken(t.first, t.second, t.before, t.after)),
        lambda t: naive.multi_token(t.s, t.tril, (t.first, t.second), (t.before, t.after)) @ t.v,
        (*LEARNED, "before", "after", "first", "second"),
    ),
)

POSITIONS = (
    Case(
        "Rotary (RoPE)",
        lambda t: t.rotated(t.x),
        lambda t: naive.layer_of(t.rotated, t.x, keep=t.tril, turn=lambda heads: naive.turned(heads, t.cos, t.sin)),
        ("x", "rotated"),
    ),
    Case("ALiBi", lambda t: attend(t, mask=CAUSAL, bias=ALIBI), lambda t: softmax(t.s + t.alibi, t.tril) @ t.v),
    Case(
        "T5's buckets of distance",
        lambda t: attend(t, bias=biases.relative(t.buckets)),
        lambda t: softmax(t.s + t.buckets[:, t.t5]) @ t.v,
        (*LEARNED, "buckets"),
    ),
    Case(
        "A number for each clipped distance",
        lambda t: attend(t, bias=biases.clipped(t.near, before=8, after=7)),
        lambda t: softmax(t.s + t.near[:, t.clipped]) @ t.v,
        (*LEARNED, "near"),
    ),
    Case(
        "Adaptive span",
        spanned,
        lambda t: naive.within_spans(t.s, t.tril, t.distance.abs(), t.spans, RAMP) @ t.v,
        (*LEARNED, "spans"),
    ),
    Case(
        "Gaussian around a place",
        lambda t: attend(t, bias=GAUSSIAN),
        lambda t: softmax(t.s + t.bell) @ t.v,
    ),
    Case(
        "KERPLE",
        lambda t: attend(t, mask=CAUSAL, bias=biases.kerple_log(t.rates, t.rates)),
        lambda t: (
            softmax(t.s - t.rates[:, None, None] * torch.log1p(t.rates[:, None, None] * t.distance.abs()), t.tril) @ t.v
        ),
        (*LEARNED, "rates"),
    ),
    Case(
        "FIRE",
        lambda t: attend(
            t, mask=CAUSAL, bias=biases.fire(t.into, t.offset, t.out, t.shift, rate=t.alpha, threshold=4 * t.alpha)
        ),
        lambda t: (
            softmax(t.s + naive.fire((t.into, t.offset, t.out, t.shift), t.alpha, 4 * t.alpha, t.distance), t.tril)
            @ t.v
        ),
        (*LEARNED, "into", "offset", "out", "alpha"),
    ),
    Case(
        "Any other function of distance",
        lambda t: attend(t, mask=CAUSAL, bias=SANDWICH),
        lambda t: softmax(t.s - t.sandwich, t.tril) @ t.v,
    ),
    Case(
        "Forget gates (FoX)",
        lambda t: attend(t, mask=CAUSAL, bias=biases.forget_gates(t.decay)),
        lambda t: softmax(t.s + t.decay.cumsum(-1)[..., :, None] - t.decay.cumsum(-1)[..., None, :], t.tril) @ t.v,
        (*LEARNED, "decay"),
    ),
    Case(
        "A vector for each clipped distance",
        lambda t: attend(t, bias=biases.shaw(t.vectors, before=8, after=7)),
        lambda t: softmax(t.s + naive.looked_up(t.q @ t.vectors.mT, t.clipped) / 8) @ t.v,
        (*LEARNED, "vectors"),
    ),
    Case(
        "A vector for each distance, added to the values",
        lambda t: regard.relative_value_attention(t.q, t.k, t.v, t.vectors, before=8, after=7, mask=CAUSAL),
        lambda t: naive.added_to_values(softmax(t.s, t.tril), t.v, t.vectors, t.clipped),
        (*LEARNED, "vectors"),
    ),
    Case(
        "Transformer-XL",
        lambda t: attend(t, mask=CAUSAL, bias=biases.transformer_xl(t.maps, t.u, t.w)),
        lambda t: softmax(t.s + naive.transformer_xl(t), t.tril) @ t.v,
        (*LEARNED, "maps", "u", "w"),
    ),
    Case(
        "DeBERTa",
        lambda t: attend(
            t, bias=biases.deberta(t.of_keys, t.of_queries, buckets=8, max_distance=20), scale=(3 * DIM) ** -0.5
        ),
        lambda t: softmax((t.q @ t.k.mT + naive.disentangled(t)) / (3 * DIM) ** 0.5) @ t.v,
        (*LEARNED, "of_keys", "of_queries"),
    ),
    Case(
        "TUPE",
        lambda t: attend(
            t, bias=biases.tupe(t.tupe_q, t.tupe_k, from_first=t.sink, to_first=-t.sink), scale=(2 * DIM) ** -0.5
        ),
        lambda t: (
            softmax(
                t.q @ t.k.mT / (2 * DIM) ** 0.5
                + naive.at_first(t.tupe_q @ t.tupe_k.mT / (2 * DIM) ** 0.5, t.sink, -t.sink)
            )
            @ t.v
        ),
        (*LEARNED, "tupe_q", "tupe_k", "sink"),
    ),
    Case(
        "CoPE",
        lambda t: attend(t, mask=CAUSAL, bias=biases.cope(t.vectors)),
        lambda t: softmax(t.s + naive.counted(t.q, t.s, t.vectors, t.tril), t.tril) @ t.v,
        (*LEARNED, "vectors"),
    ),
    Case(
        "PaTH",
        lambda t: attend(t, mask=CAUSAL, bias=biases.path(t.unit, t.beta)),
        lambda t: softmax(naive.reflected(t.q, t.k, t.unit, t.beta) / 8, t.tril) @ t.v,
        (*LEARNED, "unit", "beta"),
    ),
    Case(
        "PaTH with forget gates",
        lambda t: attend(t, mask=CAUSAL, bias=biases.path(t.unit, t.beta) + biases.forget_gates(t.decay)),
        lambda t: (
            softmax(
                naive.reflected(t.q, t.k, t.unit, t.beta) / 8
                + t.decay.cumsum(-1)[..., :, None]
                - t.decay.cumsum(-1)[..., None, :],
                t.tril,
            )
            @ t.v
        ),
        (*LEARNED, "unit", "beta", "decay"),
    ),
)

PAIRS = (
    Case("Causal", lambda t: attend(t, mask=CAUSAL), lambda t: softmax(t.s, t.tril) @ t.v),
    Case("Padding", lambda t: attend(t, mask=t.padding), lambda t: softmax(t.s, t.unpadded) @ t.v),
    Case("Documents", lambda t: attend(t, mask=t.documents), lambda t: softmax(t.s, t.packed) @ t.v),
    Case("Prefix", lambda t: attend(t, mask=CAUSAL | masks.prefix(9)), lambda t: softmax(t.s, t.prefixed) @ t.v),
    Case("Window", lambda t: attend(t, mask=WINDOWED), lambda t: softmax(t.s, t.windowed) @ t.v),
    Case("Window and first tokens", lambda t: attend(t, mask=STREAMING), lambda t: softmax(t.s, t.streaming) @ t.v),
    Case("Strided", lambda t: attend(t, mask=STRIDED), lambda t: softmax(t.s, t.strided) @ t.v),
    Case("Dilated windows", lambda t: attend(t, mask=DILATED), lambda t: softmax(t.s, t.dilated) @ t.v),
    Case("Global tokens", lambda t: attend(t, mask=LONGFORMER), lambda t: softmax(t.s, t.longformer) @ t.v),
    Case("Any function of two positions", lambda t: attend(t, mask=BY_TILE), lambda t: softmax(t.s, t.by_tile) @ t.v),
    Case("Any booleans", lambda t: attend(t, mask=t.where), lambda t: softmax(t.s, t.tree) @ t.v),
)

CHOSEN = (
    Case(
        "Keys listed for each query",
        lambda t: attend(t, mask=masks.chosen(t.lists)),
        lambda t: softmax(t.s, naive.listed(t.lists, t.n)) @ t.v,
    ),
    Case(
        "Blocks for each block of queries",
        lambda t: attend(t, mask=masks.blocks(t.few, t.block)),
        lambda t: softmax(t.s, chosen_blocks(t)) @ t.v,
    ),
    Case(
        "MoBA",
        lambda t: attend(
            t, mask=CAUSAL & masks.blocks(selection.gated_blocks(t.q, t.k, size=t.block, count=2), (1, t.block))
        ),
        lambda t: softmax(t.s, t.tril & naive.moba(t.q, t.k, t.block, 2)) @ t.v,
    ),
    Case(
        "HiP",
        lambda t: attend(t, mask=CAUSAL & masks.blocks(searched(t), t.block)),
        lambda t: softmax(t.s, searched_pairs(t)) @ t.v,
    ),
    Case(
        "Sinkhorn blocks",
        lambda t: selection.sinkhorn_attention(t.q, t.k, t.v, selection.sinkhorn(t.sorting), size=t.block),
        lambda t: naive.sorted_blocks(t.q, t.k, t.v, t.sorting, t.block),
        (*LEARNED, "sorting"),
    ),
    Case(
        "DSA with its indexer",
        lambda t: attend(
            t,
            mask=masks.chosen(
                selection.lightning_indices(t.q.detach(), t.k[:, 0].detach(), t.gates, count=t.chosen).unsqueeze(1)
            ),
        ),
        lambda t: (
            softmax(t.s, naive.lightning(t.q.detach(), t.k[:, 0].detach(), t.gates, t.chosen, t.tril).unsqueeze(1))
            @ t.v
        ),
    ),
    Case(
        "NSA",
        lambda t: selection.native_sparse_attention(t.q, t.k2, t.v2, (t.small_k, t.small_v), t.three_gates, **t.sizes),
        lambda t: naive.native_sparse(t, t.sizes),
        ("q", "k2", "v2", "small_k", "small_v", "three_gates"),
    ),
    Case(
        "Clusters of each head",
        lambda t: attend(
            t,
            mask=CAUSAL & masks.documents((t.q @ t.hyperplanes).argmax(-1), (t.k @ t.hyperplanes).argmax(-1)),
            query_positions=range(t.n),
        ),
        lambda t: (
            naive.softmax_or_nothing(
                t.s,
                t.tril
                & ((t.q @ t.hyperplanes).argmax(-1)[..., None] == (t.k @ t.hyperplanes).argmax(-1)[..., None, :]),
            )
            @ t.v
        ),
    ),
    Case(
        "Landmark attention",
        lambda t: attend(t, mask=CAUSAL, bias=biases.landmarks(8)),
        lambda t: naive.landmarks(t.s, t.tril, 8) @ t.v,
    ),
)

RECURRENCES = (
    Case(
        "Linear attention",
        lambda t: regard.linear_attention(t.q, t.k, t.v, causal=True),
        lambda t: naive.linear(1 + elu(t.q), 1 + elu(t.k), t.v),
    ),
    Case(
        "Performer (FAVOR+)",
        lambda t: regard.linear_attention(t.q, t.k, t.v, feature_map=t.favor, causal=True),
        lambda t: naive.linear(naive.favor(t.favor, t.q), naive.favor(t.favor, t.k), t.v),
    ),
    Case(
        "Linformer",
        lambda t: regard.attention(t.q, t.shorter @ t.k, t.shorter @ t.v),
        lambda t: softmax(t.q @ (t.shorter @ t.k).mT / 8) @ (t.shorter @ t.v),
        (*LEARNED, "shorter"),
    ),
    Case(
        "Nyström",
        lambda t: nystrom_attention(t.q, t.k, t.v, landmarks=t.chosen),
        lambda t: naive.nystrom(t.q, t.k, t.v, t.chosen),
    ),
    Case(
        "A decay for each token (Mamba-2)",
        lambda t: recur(t, decay=t.decay),
        lambda t: naive.decayed(t.q / 8, t.unit, t.v, t.decay),
        ("q", "unit", "v", "decay"),
    ),
    Case(
        "A decay for each feature (GLA)",
        lambda t: recur(t, decay=t.feature_decay),
        lambda t: naive.decayed_features(t.q / 8, t.unit, t.v, t.feature_decay),
        ("q", "unit", "v", "feature_decay"),
    ),
    Case(
        "DeltaNet",
        lambda t: recur(t, beta=t.beta),
        lambda t: removed(t, t.beta[..., None] * t.unit, t.beta[..., None] * t.v),
        ("q", "unit", "v", "beta"),
    ),
    Case(
        "Gated DeltaNet",
        lambda t: recur(t, beta=t.beta, decay=t.decay),
        lambda t: removed(t, t.beta[..., None] * t.unit, t.beta[..., None] * t.v, t.decay[..., None]),
        ("q", "unit", "v", "beta", "decay"),
    ),
    Case(
        "KDA (Kimi Linear)",
        lambda t: recur(t, beta=t.beta, decay=t.feature_decay),
        lambda t: removed(t, t.beta[..., None] * t.unit, t.beta[..., None] * t.v, t.feature_decay),
        ("q", "unit", "v", "beta", "feature_decay"),
    ),
    Case(
        "Gated DeltaNet-2",
        lambda t: recur(t, removal=t.gate * t.unit, decay=t.decay),
        lambda t: removed(t, t.gate * t.unit, t.v, t.decay[..., None]),
        ("q", "unit", "v", "gate", "decay"),
    ),
    Case("DeltaProduct", product, two_steps, ("q", "unit", "v", "k", "beta", "decay")),
    Case(
        "RWKV-6",
        lambda t: recur(t, decay=t.feature_decay, bonus=t.sink[None, :, None, None]),
        lambda t: naive.decayed_features(t.q / 8, t.unit, t.v, t.feature_decay, t.sink),
        ("q", "unit", "v", "feature_decay", "sink"),
    ),
)

MEMORIES = (
    Case(
        "Cache, step by step",
        lambda t: steps(t.layer, t.x),
        lambda t: naive.layer_in_steps(t.layer, t.x, 1024),
        ("x",),
        most=256,
        has_gradient=False,
    ),
    Case(
        "Rolling cache of a window",
        lambda t: steps(t.windowed_layer, t.x),
        lambda t: naive.layer_in_steps(t.windowed_layer, t.x, 9),
        ("x",),
        most=256,
        has_gradient=False,
    ),
    Case(
        "Merged parts",
        lambda t: regard.merge(
            [regard.attention_with_lse(t.q, *part) for part in zip(t.k.chunk(2, 2), t.v.chunk(2, 2), strict=True)]
        )[0],
        lambda t: naive.merged(t.q, t.k.chunk(2, 2), t.v.chunk(2, 2)),
    ),
)
SECTIONS = {
    "Scores": SCORES,
    "Weights": WEIGHTS,
    "Heads": MIXED,
    "Positions": POSITIONS,
    "Pairs": PAIRS,
    "Chosen keys": CHOSEN,
    "Recurrences and approximations": RECURRENCES,
    "Memories": MEMORIES,
}


def compared(ours: Callable[[], Any], formula: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds per call of each, in turn."""
    first = max(_timing.seconds(formula, 1), 1e-6)
    calls = max(1, min(64, int(2e-3 / first)))
    rounds = int(min(max(LEAST / (first * calls), 5), MOST_ROUNDS))
    spent = _timing.in_turn({"ours": ours, "formula": formula}, rounds=rounds, calls=calls, clock=time.thread_time)
    return spent["ours"], spent["formula"]


def cells(case: Case, n: int) -> list[str]:
    """Times and ratio forward, then forward and backward."""
    if n > case.most:
        return ["–"] * 2
    plain = Inputs(n)
    with torch.no_grad():
        agree(f"{case.name}, {n}", [case.ours(plain)], [case.formula(plain)], within=1e-3)
        of_calls = [compared(lambda: case.ours(plain), lambda: case.formula(plain))]
    if case.has_gradient:
        learned = Inputs(n)
        leaves = learned.leaves(case.learned)
        ours, formula = (lambda call=call: gradients(call(learned), leaves) for call in (case.ours, case.formula))
        agree(f"{case.name}, {n}, gradients", ours(), formula(), within=1e-2)
        of_calls.append(compared(ours, formula))
    found = [f"{mine / other:.2f} ({1e6 * mine:,.0f} µs)" for mine, other in of_calls]
    return found + ["–"] * (2 - len(found))


def main(sizes: Sequence[int], only: str = "") -> None:
    torch.set_num_threads(1)
    columns = ["mechanism", *(f"{n:,}{way}" for n in sizes for way in ("", ", and backward"))]
    for section, cases in SECTIONS.items():
        rows = [[case.name, *(cell for n in sizes for cell in cells(case, n))] for case in cases if only in case.name]
        if rows:
            table(f"{section}: time of the formula's (`benchmarks/small_sizes.py`)", columns, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    arguments = parser.parse_args()
    main(SIZES[:2] if arguments.quick else [int(size) for size in arguments.sizes.split(",")], arguments.only)
