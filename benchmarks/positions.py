"""Rotary positions at n = 4,096: what turning queries and keys takes beside causal attention."""

import _timing
import torch
from _report import milliseconds, table

import regard
from regard.masks import causal
from regard.positions import Rotary

N, HEADS, DIM, ROUNDS = 4096, 8, 64, 15


def main(n: int = N) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    query, key, value = torch.randn(3, 1, HEADS, n, DIM)
    rotary, positions = Rotary(DIM), torch.arange(n)
    rotation = rotary.rotation(positions)
    works = {
        "causal attention": lambda: regard.attention(query, key, value, mask=causal()),
        "queries and keys turned": lambda: (rotation.rotate(query), rotation.rotate(key)),
        "cosines and sines": lambda: rotary.rotation(positions),
    }
    with torch.no_grad():
        spent = _timing.in_turn(works, rounds=ROUNDS)
    rows = [[name, milliseconds(each), f"{each / spent['causal attention']:.1%}"] for name, each in spent.items()]
    title = f"Rotary positions, n = {n:,}, {HEADS} heads of {DIM}, forward (`benchmarks/positions.py`)"
    table(title, ["work", "time", "of causal attention"], rows)


if __name__ == "__main__":
    main()
