"""One query over many keys, heads in groups: what counts is how fast keys and values are read.

Peers: torch's operator with enable_gqa, and with the keys repeated. The limit is the machine's rate of reading the same
bytes, measured in the same run.
"""

import _timing
import torch
from _report import agree, met, milliseconds, table, times
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard

KEYS, HEADS, KEY_HEADS, DIM, ROUNDS = 16384, 32, 8, 128, 21


def main(keys: int = KEYS) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    query = torch.randn(1, HEADS, 1, DIM)
    both = torch.randn(2, 1, KEY_HEADS, keys, DIM)
    key, value = both
    group = HEADS // KEY_HEADS

    def repeated() -> torch.Tensor:
        return sdpa(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))

    works = {
        "regard": lambda: regard.attention(query, key, value),
        "SDPA, enable_gqa": lambda: sdpa(query, key, value, enable_gqa=True),
        "reading": both.sum,
    }
    agree("decode", [works["regard"]()], [repeated()])
    agree("decode", [works["regard"]()], [works["SDPA, enable_gqa"]()])
    with torch.no_grad():
        spent = _timing.in_turn(works, rounds=ROUNDS)
        slow = _timing.in_turn({"regard": works["regard"], "repeated": repeated}, rounds=ROUNDS // 3)
    grouped, ratio = spent["SDPA, enable_gqa"] / spent["regard"], slow["repeated"] / slow["regard"]
    read, own = (4 * both.numel() / spent[side] for side in ("reading", "regard"))
    rows = [
        ["SDPA, enable_gqa", milliseconds(spent["SDPA, enable_gqa"]), milliseconds(spent["regard"]), times(grouped)],
        ["SDPA, keys repeated", milliseconds(slow["repeated"]), milliseconds(slow["regard"]), times(ratio)],
        ["a sum over the same bytes", f"{read / 1e9:.1f} GB/s", f"{own / 1e9:.1f} GB/s", f"{own / read:.0%}"],
    ]
    for row, value_, goal in zip(rows, (grouped, ratio, own / read), (2, 15, 0.75), strict=True):
        row.append(met(value_, goal))
    title = f"Decode: {HEADS} query and {KEY_HEADS} key heads of {DIM}, {keys:,} keys (`benchmarks/decode.py`)"
    table(title, ["peer", "peer's", "regard's", "ratio", "goal"], rows)
    print("\nThe limit is the sum: keys and values have to be read once.")


if __name__ == "__main__":
    main()
