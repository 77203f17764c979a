"""The tensors and modules that the rows of recipes/every_mechanism.toml are written with."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import regard
from regard import biases, lenses, linear, masks, nn, normalizers, positions, scores, selection

BATCH, HEADS, KEY_HEADS, LENGTH, DIM, WIDTH = 2, 4, 2, 37, 16, 64
MODULES = (biases, lenses, linear, masks, nn, normalizers, positions, scores, selection)


def namespace(dtype: torch.dtype) -> dict[str, Any]:
    """Names of a row, the same numbers in any dtype.

    q, k, v: (2, 4, 37, 16), k2 and v2 of 2 key heads; x: (2, 37, 64), the input of a layer.
    """
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(torch.float32).to(dtype)

    names: dict[str, Any] = {module.__name__.rpartition(".")[-1]: module for module in MODULES}
    names |= {"regard": regard, "torch": torch, "normalize": normalize}
    names |= {name: drawn(BATCH, HEADS, LENGTH, DIM) for name in ("q", "k", "v")}
    names |= {name: drawn(BATCH, KEY_HEADS, LENGTH, DIM) for name in ("k2", "v2")}
    names |= {"x": drawn(BATCH, LENGTH, WIDTH), "memory": drawn(BATCH, 23, WIDTH)}
    names |= {"ones": torch.ones(BATCH, HEADS, LENGTH, 1, dtype=dtype), "sink": drawn(HEADS)}
    names |= {"alpha": torch.tensor(1.3, dtype=dtype), "causal": masks.causal()}
    names |= {"general": scores.General(DIM, DIM), "additive": scores.Additive(DIM, DIM, 8)}
    names |= {"concat": scores.Concat(DIM, DIM, 8), "location": scores.Location(DIM, 64)}
    names |= {"buckets": drawn(HEADS, 32), "near": drawn(HEADS, 6), "distance": distance()}
    names |= {"ids": torch.arange(LENGTH) // 11, "tree": distance().eq(0) | (drawn(LENGTH, LENGTH) > 0.5)}
    names |= {"listed": listed(LENGTH, 6, LENGTH), "listed_blocks": listed(5, 2, 5)}
    names |= {"gates": drawn(BATCH, LENGTH, HEADS).sigmoid(), "three_gates": drawn(BATCH, HEADS, LENGTH, 3).sigmoid()}
    names |= {"compressed": (drawn(BATCH, KEY_HEADS, 8, DIM), drawn(BATCH, KEY_HEADS, 8, DIM))}
    names |= {"transitions": torch.tensor([[0.5, -0.25], [0.0, 1.5]], dtype=dtype)}
    names |= {"fading": (1 - 2.0 ** (-5 - torch.arange(4.0, dtype=dtype))).log()[:, None]}
    names |= {"decay": -drawn(BATCH, HEADS, LENGTH).exp() / 4, "beta": drawn(BATCH, HEADS, LENGTH).sigmoid()}
    names |= {"feature_decay": -drawn(BATCH, HEADS, LENGTH, DIM).exp() / 4, "shorter": drawn(9, LENGTH) / 6}
    names |= {"gate": drawn(BATCH, HEADS, LENGTH, DIM).sigmoid()}
    names |= {"attending": nn.Attention(nn.Projections(WIDTH, HEADS), mask=masks.causal())}
    names |= {"reading": nn.Attention(nn.QueryProjections(WIDTH, HEADS), mask=masks.causal())}
    names |= {"hyperplanes": drawn(DIM, 5)}
    names |= {"favor": linear.FavorPlus(DIM, 32, seed=0), "taylor": taylor, "in_steps": in_steps}
    names |= {"mixing": (drawn(HEADS, HEADS), drawn(HEADS, HEADS))}
    names |= {"convolving": (drawn(HEADS, 3, 5) / 4, drawn(HEADS, 2, 3) / 4)}
    names |= {"vectors": drawn(HEADS, 6, DIM), "of_buckets": (drawn(HEADS, 16, DIM), drawn(HEADS, 16, DIM))}
    names |= {"maps": drawn(HEADS, DIM, 8), "both_sides": (drawn(HEADS, DIM), drawn(HEADS, DIM))}
    names |= {"hidden": (drawn(8), drawn(8), drawn(HEADS, 8), drawn(HEADS))}
    names |= {"slot_logits": drawn(BATCH, HEADS, LENGTH, 5), "slot_gates": drawn(BATCH, HEADS, LENGTH, 5).sigmoid()}
    names |= {"levels": drawn(BATCH, HEADS, LENGTH, 7), "turning": drawn(BATCH, HEADS, LENGTH, 5)}
    names |= {"step": drawn(BATCH, HEADS, LENGTH).exp(), "channel_steps": drawn(BATCH, LENGTH, WIDTH).exp() / 4}
    names |= {"rates": -drawn(WIDTH, DIM).exp(), "skips": drawn(WIDTH)}
    names |= {"ridge": drawn(HEADS, DIM).sigmoid() + 0.25}
    names |= {"weights_before": drawn(HEADS, DIM, DIM) / 4, "norm": (drawn(HEADS, DIM), drawn(HEADS, DIM))}
    names |= {"turning_rates": torch.complex(names["rates"], 3 * drawn(WIDTH, DIM))}
    names |= {"complex_weights": torch.complex(drawn(WIDTH, DIM), drawn(WIDTH, DIM))}
    for module in names.values():
        if isinstance(module, torch.nn.Module):
            module.to(dtype)
    return names


def distance() -> Tensor:
    """i - j, (37, 37)."""
    return torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)


def listed(rows: int, count: int, columns: int) -> Tensor:
    """Different numbers for each row of each head, (2, 4, rows, count)."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(BATCH, HEADS, rows, columns, generator=generator).topk(count, -1).indices


def taylor(rows: Tensor) -> Tensor:
    """[1, x, x ⊗ x / √2] of x / √2: products are the Taylor series of e^(x · y / 2) to the second order."""
    rows = rows / 2
    pairs = (rows.unsqueeze(-1) * rows.unsqueeze(-2)).flatten(-2) / 2**0.5
    return torch.cat([torch.ones_like(rows[..., :1]), rows, pairs], -1)


def in_steps(layer: Any, x: Tensor, cache: Any = None) -> Tensor:
    """The outputs of a layer, a token at a time with its cache."""
    cache, outputs = layer.make_cache() if cache is None else cache, []
    for token in x.split(1, 1):
        output, cache = layer.step(token, cache)
        outputs.append(output)
    return torch.cat(outputs, 1)
