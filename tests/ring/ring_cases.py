"""Problems for the tests of the ring: tensors of a whole sequence, and the options of a call, from a few numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard
import regard.ring as ring
from regard import biases, masks, scores

MASKS = (
    *("none", "causal", "window", "causal window", "sinks and window", "documents", "padding", "strided", "global"),
    *("prefix", "blocks", "mod", "heads", "documents of heads", "other documents of keys", "nothing"),
)
BIASES = ("none", "none", "alibi", "relative", "clipped", "mod", "sum")
DIM, VALUE_DIM, TABLE = 8, 6, 16


def window(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((query - key) % 5 < 2)


@dataclass(frozen=True)
class RingCase:
    """A problem of one length for all; `layout` says which process has what, numbers are those of `precision`."""

    seed: int
    length: int
    layout: Any = field(default_factory=ring.Contiguous)
    mask: str = "causal"
    bias: str = "none"
    score: str = "dot"
    heads: int = 2
    key_heads: int = 2
    batch: tuple[int, ...] = (1,)
    dropout: float = 0.0
    softcap: float | None = None
    sinks: bool = False
    reach: int = 7
    kernel: str | None = None
    head_parallel: int = 1
    factor: float = 1.0
    precision: torch.dtype = torch.float32
    in_parts: bool = False
    """Whether hops are cut into parts, as those of large shards are."""
    memory: str = "contiguous"
    """Of query, key and value: "windows" has rows that begin one number apart, "transposed" its axes the other way."""

    def tensors(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """query, key, value and the upstream gradient; the options of a call; the parameters among them."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.precision).to(dtype)

        heads, key_heads = ((*self.batch, n) if n else self.batch for n in (self.heads, self.key_heads))

        def sequence(*shape: int, factor: float = 1.0) -> Tensor:
            *leading, length, dim = shape
            if self.memory == "windows":
                return (factor * normal(*leading, length + dim - 1)).unfold(-1, dim, 1)
            if self.memory == "transposed":
                return (factor * normal(*reversed(shape))).permute(*reversed(range(len(shape))))
            return factor * normal(*shape)

        whole = {
            "query": sequence(*heads, self.length, DIM, factor=self.factor),
            "key": sequence(*key_heads, self.length, DIM),
            "value": sequence(*key_heads, self.length, VALUE_DIM),
            "above": normal(*heads, self.length, VALUE_DIM),
        }
        parameters = {"sinks": normal(max(self.heads, 1)), "table": normal(max(self.heads, 1), TABLE)}
        parameters = {name: tensor.requires_grad_() for name, tensor in parameters.items()}
        used = {"sinks": self.sinks, "table": self.bias in ("relative", "clipped", "mod", "sum")}
        options = {
            "mask": self.make_mask(generator),
            "bias": self.make_bias(parameters["table"]),
            "dropout_p": self.dropout,
            "softcap": self.softcap,
            "sinks": parameters["sinks"] if self.sinks else None,
        }
        if self.score == "additive":
            torch.manual_seed(self.seed)
            made = scores.Additive(DIM, DIM, 5)
            options["score"] = made.to(dtype)
            weights = {f"score.{name}": weight for name, weight in made.named_parameters()}
            used |= dict.fromkeys(weights, True)
            parameters |= weights
        return whole, options, {name: tensor for name, tensor in parameters.items() if used[name]}

    def make_mask(self, generator: torch.Generator) -> masks.Mask | None:
        reach, length = self.reach, self.length
        drawn = torch.rand(*self.batch, length, generator=generator)
        new = (drawn < 0.1).unsqueeze(-2) if len(self.batch) > 1 else drawn < 0.1
        made = {
            "none": lambda: None,
            "causal": masks.causal,
            "window": lambda: masks.window(before=reach, after=reach // 2),
            "causal window": lambda: masks.causal() & masks.window(before=reach),
            "sinks and window": lambda: masks.causal() & (masks.window(before=reach) | masks.prefix(2)),
            "documents": lambda: masks.causal() & masks.documents(new.cumsum(-1)),
            "documents of heads": lambda: masks.documents(
                torch.randint(3, (*self.batch, self.heads, length), generator=generator)
            ),
            "other documents of keys": lambda: masks.documents(new.cumsum(-1), 2 * new.flip(-1).cumsum(-1)),
            "padding": lambda: masks.padding((drawn[..., 0] * length).long()),
            "strided": lambda: masks.causal() & masks.strided(reach),
            "global": lambda: masks.window(before=reach) | masks.global_tokens([0, length // 2]),
            "near and first": lambda: masks.window(before=reach, after=reach) | masks.global_tokens([0]),
            "prefix": lambda: masks.causal() | masks.prefix(reach),
            "blocks": lambda: masks.random_blocks(length, reach, 1, seed=self.seed),
            "mod": lambda: masks.from_mod(lambda b, h, q, k: window(q, k)),
            "heads": lambda: masks.from_mod(lambda b, h, q, k: (q - k).abs() <= h * reach, heads=self.heads),
            "nothing": lambda: masks.causal() & ~masks.causal(),
        }
        return made[self.mask]()

    def make_bias(self, table: Tensor) -> biases.Bias | None:
        if self.bias == "none":
            return None
        if self.bias == "alibi":
            return biases.alibi(max(self.heads, 1))
        if self.bias == "relative":
            return biases.relative(table, max_distance=32)
        if self.bias == "clipped":
            return biases.clipped(table, before=TABLE - 4, after=3)
        by_key = biases.from_mod(lambda score, b, h, q, k: score + table[h, k % TABLE], heads=len(table))
        return by_key if self.bias == "mod" else biases.relative(table, max_distance=32) + biases.alibi(len(table))

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Output, log-sum-exp and gradients in one process: of the formula in float64, or of a kernel in float32."""
        whole, options, parameters = self.tensors(dtype)
        above = whole.pop("above")
        inputs = {name: tensor.requires_grad_() for name, tensor in whole.items()} | parameters
        torch.manual_seed(self.seed)
        kernel = "reference" if dtype == torch.float64 else None
        output, lse = regard.attention_with_lse(*whole.values(), kernel=kernel, **options)
        loss = (output * above).sum() + 0.1 * lse.masked_fill(lse == float("-inf"), 0.0).sum()
        gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        found = {"output": output.detach(), "lse": lse.detach()}
        for (name, tensor), gradient in zip(inputs.items(), gradients, strict=True):
            found[name] = torch.zeros_like(tensor) if gradient is None else gradient
        return found


def random_case(number: int, processes: int) -> RingCase:
    """A case with everything drawn."""
    draw = random.Random(number)
    length = processes + draw.choice((0, 1, 5, 29, 70, 131, 200))
    cuts = sorted(draw.sample(range(1, length), processes - 1)) if length > processes else list(range(1, processes))
    uneven = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    layout = draw.choice((ring.Contiguous(), ring.Contiguous(uneven), ring.Zigzag(), ring.Zigzag(), ring.Striped()))
    heads, key_heads = draw.choice(((1, 1), (2, 2), (4, 2), (3, 1)))
    score = draw.choice(("dot", "dot", "dot", "additive"))
    return RingCase(
        seed=number,
        length=length,
        layout=layout,
        mask=draw.choice(MASKS),
        bias=draw.choice(BIASES),
        score=score,
        heads=heads,
        key_heads=key_heads,
        batch=draw.choice(((1,), (2,), (2, 1))),
        dropout=draw.choice((0.0, 0.0, 0.3)),
        softcap=draw.choice((None, None, 2.0)),
        sinks=draw.choice((False, False, True)),
        reach=draw.choice((1, 3, 17, 64)),
        in_parts=draw.choice((False, True)),
    )
