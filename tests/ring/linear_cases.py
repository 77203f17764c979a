"""Problems for the tests of linear attention in a ring: tensors of a whole sequence and the options of a call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import regard
import regard.ring as ring
from regard import masks
from regard.linear import Elu, FavorPlus, Identity, LinearState, Relu, Softmax, UnitNorm

MAPS = {
    "elu": Elu(),
    "relu": Relu(),
    "identity": Identity(),
    "softmax": Softmax(),
    "unit": UnitNorm(Identity()),
    "favor": FavorPlus(6, 12, seed=1),
    "favor relu": FavorPlus(6, 12, seed=1, kernel="relu"),
}
DIM, VALUE_DIM = 6, 5
SEQUENCES = {"query": -2, "key": -2, "value": -2, "above": -2, "decay": -1, "beta": -1, "removal": -2}
"""The axis of positions of what is cut."""


def cut_axis(name: str, tensor: Tensor, key: Tensor) -> int:
    return -2 if name == "decay" and tensor.ndim == key.ndim else SEQUENCES[name]


@dataclass(frozen=True)
class LinearCase:
    """A problem of linear attention; `poison`: masked keys and values are NaN; `bad`: keys that are."""

    seed: int
    length: int
    layout: Any = field(default_factory=ring.Contiguous)
    feature_map: str = "elu"
    causal: bool = True
    normalize: bool = True
    mask: str = "none"
    decay: str = "none"
    strength: float = 1.0
    delta: bool = False
    removal: bool = False
    heads: int = 2
    key_heads: int = 2
    batch: tuple[int, ...] = (1,)
    state: bool = False
    wants_state: bool = False
    poison: bool = False
    bad: tuple[int, ...] = ()
    bad_queries: tuple[int, ...] = ()
    dim: int = DIM

    def tensors(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
        """What is cut, with the upstream gradient; the options of a call; the sums of the state before."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator).to(dtype)

        heads, key_heads = ((*self.batch, n) if n else self.batch for n in (self.heads, self.key_heads))
        whole = {
            "query": normal(*heads, self.length, self.dim),
            "key": normal(*key_heads, self.length, self.dim),
            "value": normal(*key_heads, self.length, VALUE_DIM),
            "above": normal(*heads, self.length, VALUE_DIM),
        }
        feature_map = MAPS[self.feature_map]
        features = feature_map(torch.zeros(1, self.dim)).shape[-1]
        if self.decay != "none":
            shape = (*key_heads, self.length) if self.decay == "head" else (*key_heads, self.length, features)
            whole["decay"] = -self.strength * uniform(*shape)
        if self.delta:
            whole["beta"] = 2 * uniform(*key_heads, self.length)
        if self.removal:
            whole["removal"] = normal(*key_heads, self.length, features) / features**0.5
        options = {
            "feature_map": feature_map,
            "causal": self.causal,
            "normalize": self.normalize,
            "mask": self.make_mask(generator),
        }
        sums = {}
        if self.state:
            wide = VALUE_DIM + self.normalize
            matrix = normal(*key_heads, features, wide)
            if self.normalize:
                matrix[..., -1] = matrix[..., -1].abs() + 1
            sums["state"] = matrix
        if self.poison:
            keep = self.kept(options["mask"])
            for name in ("key", "value"):
                whole[name] = whole[name].masked_fill(~keep.unsqueeze(-1), torch.nan)
        for position in self.bad:
            whole["key"][..., position, 0] = torch.nan
        for position in self.bad_queries:
            whole["query"][..., position, 0] = torch.inf
        return whole, options, sums

    def kept(self, mask: masks.Mask) -> Tensor:
        """Which keys the last query attends to: (..., 1 or key heads, N)."""
        keep = mask.dense(self.length, self.length)[..., -1, :]
        return keep if self.key_heads else keep.reshape(-1, self.length)

    def make_mask(self, generator: torch.Generator) -> masks.Mask | None:
        drawn = torch.rand(*self.batch, self.length, generator=generator)
        lengths = (torch.rand(*self.batch, generator=generator) * (self.length + 1)).long()
        keep = (drawn < 0.7).unsqueeze(-2)
        numbers = drawn.unsqueeze(-2) if len(self.batch) > 1 else drawn
        made = {
            "none": lambda: None,
            "padding": lambda: masks.padding(lengths),
            "keys": lambda: masks.where(keep=keep.unsqueeze(-3) if self.key_heads else keep),
            "documents": lambda: masks.documents((numbers < 0.1).cumsum(-1)),
            "long documents": lambda: masks.documents(torch.arange(self.length) * 3 // self.length),
            "scattered documents": lambda: masks.documents((numbers * 4).long()),
            "padded documents": lambda: masks.padding(lengths) & masks.documents((numbers < 0.05).cumsum(-1)),
        }
        return made[self.mask]()

    def expected(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Output, final state and gradients in one process."""
        whole, options, sums = self.tensors(dtype)
        above = whole.pop("above")
        inputs = {name: tensor.requires_grad_() for name, tensor in (whole | sums).items()}
        output, state = self.call(regard, inputs, options)
        return results(self, inputs, output, state, above)

    def call(self, module: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Output and final sums by the functions of a module."""
        arguments = {**options, **{name: tensor for name, tensor in inputs.items() if name != "state"}}
        if "state" in inputs:
            scale = None
            if self.feature_map == "favor":
                scale = torch.full((*inputs["state"].shape[:-2], 1, 1), 0.3, dtype=inputs["state"].dtype)
            arguments["state"] = LinearState(inputs["state"], self.normalize, scale)
        if not self.wants_state:
            return module.linear_attention(**arguments), None
        output, state = module.linear_attention_with_state(**arguments)
        scale = 1.0 if state.log_scale is None else state.log_scale.exp()
        return output, state.sums * scale


def results(
    case: LinearCase, inputs: dict[str, Tensor], output: Tensor, state: Tensor | None, above: Tensor, share: float = 1.0
) -> dict[str, Tensor]:
    """Output, final sums and gradients of a loss in which the state counts by `share`."""
    loss = (output * above).nan_to_num().sum()
    found = {"output": output.detach()}
    if state is not None:
        found["final"] = state.detach()
        loss = loss + share * (state * torch.linspace(-1, 1, state.shape[-1], dtype=state.dtype)).nan_to_num().sum()
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
    return found | dict(zip(inputs, gradients, strict=True))


def random_linear_case(number: int, processes: int) -> LinearCase:
    """A case with everything drawn."""
    draw = random.Random(number)
    length = processes + draw.choice((0, 1, 5, 29, 70, 131, 200))
    cuts = sorted(draw.sample(range(1, length), processes - 1)) if length > processes else list(range(1, processes))
    uneven = tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
    causal = draw.random() < 0.75
    layouts = [ring.Contiguous(), ring.Contiguous(uneven), ring.Zigzag(), ring.Zigzag()]
    layout = draw.choice(layouts if causal else [*layouts, ring.Striped()])
    heads, key_heads = draw.choice(((1, 1), (2, 2), (4, 2), (3, 1), (0, 0)))
    normalize = draw.random() < 0.6
    delta = causal and not normalize and draw.random() < 0.7
    maps = (
        ["unit"] if delta else ["elu", "elu", "relu", "softmax", "favor", "favor relu"] + ["identity"] * (not normalize)
    )
    mask = draw.choice(
        ("none", "none", "padding", "keys", "documents", "long documents", "scattered documents", "padded documents")
    )
    documents = "documents" in mask
    return LinearCase(
        seed=number,
        length=length,
        layout=layout,
        feature_map=draw.choice(maps),
        causal=causal,
        normalize=normalize,
        mask=mask,
        decay=draw.choice(("none", "head", "feature")) if causal else "none",
        strength=draw.choice((0.01, 1.0, 100.0)),
        delta=delta,
        heads=heads,
        key_heads=key_heads,
        batch=draw.choice(((1,), (2,), (2, 1) if heads else (3,))),
        state=causal and not documents and draw.random() < 0.4,
        wants_state=causal and not documents and draw.random() < 0.4,
        poison=mask in ("padding", "keys") and draw.random() < 0.5,
        removal=delta and draw.random() < 0.4,
    )
