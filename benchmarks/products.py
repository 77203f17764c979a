"""`regard.nn.Linear` beside `torch.nn.Linear`, in float32: for few positions, where memory is the limit, and for many.

The limit is what this processor can do: a sum over the weights for few positions, products in registers for many (both
in docs/benchmarks.md).

    python benchmarks/products.py [--rounds 9]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import _timing
import torch
from _report import agree, milliseconds, table, times
from torch import Tensor, nn

from regard.nn import Linear

FEW = ((1, 4096, 14336), (4, 4096, 14336), (8, 4096, 14336), (16, 4096, 14336), (48, 4096, 14336))
MANY = ((1024, 128, 512), (4096, 128, 256), (4096, 512, 512), (8192, 512, 1792), (1024, 2048, 2048), (512, 4096, 14336))

Work = Callable[[], Any]


def forward(layer: nn.Linear, positions: int) -> Work:
    x = torch.randn(positions, layer.in_features, generator=torch.Generator().manual_seed(positions))
    return torch.no_grad()(lambda: [layer(x)])


def update(layer: nn.Linear, positions: int) -> Work:
    x = torch.randn(positions, layer.in_features, generator=torch.Generator().manual_seed(positions))
    x.requires_grad_()
    upstream = torch.ones(positions, layer.out_features)

    def work() -> list[Tensor | None]:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(upstream)
        return [x.grad, *(weight.grad for weight in layer.parameters())]

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(_timing.machine())
    for name, make, shapes in (("forward", forward, FEW + MANY), ("forward and backward", update, MANY)):
        rows = []
        for positions, dim, width in shapes:
            ours, theirs = Linear(dim, width), nn.Linear(dim, width)
            theirs.load_state_dict(ours.state_dict())
            works = {"torch": make(theirs, positions), "regard": make(ours, positions)}
            agree(f"{positions} positions", works["regard"](), works["torch"]())
            spent = _timing.in_turn(works, rounds=rounds)
            rate = (2 if make is forward else 6) * positions * dim * width / spent["regard"] / 1e9
            ratio = times(spent["torch"] / spent["regard"])
            size = f"{dim:,} × {width:,}"
            rows.append([size, f"{positions:,}", *map(milliseconds, spent.values()), ratio, f"{rate:,.0f} GFLOP/s"])
        columns = ["matrix", "positions", "torch", "regard", "ratio", "regard's rate"]
        table(f"Linear layers, float32, {name} (`benchmarks/products.py`)", columns, rows)


if __name__ == "__main__":
    main()
