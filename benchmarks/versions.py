"""The same calls by this checkout and by another one, in two processes that take turns: what a change makes slower.

    git worktree add ../before <commit> && (cd ../before && python src/regard/backends/cpu/build.py)
    python benchmarks/versions.py ../before [words of the cases to run]

A case is slower if the median over rounds of the ratio within a round is above 1.03, twice in a row: a case above it is
measured a second time, with three times the rounds. The cases call public names only, those that both checkouts have.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SLOWER = 1.03
ROUND_SECONDS = 0.08
"""How long one side of one round takes at least, in seconds: fast calls are repeated until then."""

Work = Callable[[], Any]


def cases() -> dict[str, Callable[[], Work]]:
    """Each case makes its inputs when it is asked for, and returns the call that is measured."""
    import torch

    import regard
    from regard import biases, lenses, masks, nn, scores

    def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return list(torch.randn(3, *shape).to(dtype).unbind())

    def forward(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[], Work]:
        def make() -> Work:
            inputs = tensors(*shape, dtype=dtype)
            return torch.no_grad()(lambda: regard.attention(*inputs, **options))

        return make

    def training(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[], Work]:
        def make() -> Work:
            inputs = [tensor.requires_grad_() for tensor in tensors(*shape, dtype=dtype)]

            def work() -> Any:
                output = regard.attention(*inputs, **options)
                return torch.autograd.grad(output.sum(), inputs)

            return work

        return make

    def decoding(
        heads: int, key_heads: int, keys: int, dim: int, queries: int = 1, **options: Any
    ) -> Callable[[], Work]:
        def make() -> Work:
            torch.manual_seed(0)
            query, both = torch.randn(1, heads, queries, dim), torch.randn(2, 1, key_heads, keys, dim)
            return torch.no_grad()(lambda: regard.attention(query, *both, **options))

        return make

    def observing(*wanted: Any, n: int = 4096, **options: Any) -> Callable[[], Work]:
        def make() -> Work:
            query, key, value = tensors(1, 8, n, 64)
            return torch.no_grad()(lambda: regard.observe(query, key, value, *wanted, **options))

        return make

    def layer(make_layer: Callable[[], Any], batch: int, n: int, dim: int) -> Callable[[], Work]:
        def make() -> Work:
            torch.manual_seed(0)
            module, x = make_layer(), torch.randn(batch, n, dim)
            return torch.no_grad()(lambda: module(x, x, x))

        return make

    def explaining() -> Work:
        inputs = tensors(1, 8, 16384, 64)
        return lambda: regard.explain(*inputs, mask=window)

    causal, window = masks.causal(), masks.causal() & masks.window(before=511)
    documents = causal & masks.documents(torch.arange(4096) // 300)
    strided = causal & (masks.window(before=127) | masks.strided(128))
    padding = masks.padding(lengths=torch.tensor([16, 9, 12, 5]))
    additive = scores.Additive(128, 128, 128).requires_grad_(False)
    found: dict[str, Callable[[], Work]] = {}
    for n, batch in ((1, 1), (16, 1), (64, 1), (128, 4), (256, 1), (1024, 1), (4096, 1)):
        for name, options in {"all pairs": {}, "causal": {"mask": causal}}.items():
            found[f"forward ({batch}, 8, {n}, 64) {name}"] = forward(batch, 8, n, 64, **options)
            found[f"training ({batch}, 8, {n}, 64) {name}"] = training(batch, 8, n, 64, **options)
    for n in (16, 128, 1024, 4096):
        small = {"window": {"mask": window}, "softcap": {"softcap": 30.0}, "ALiBi": {"bias": biases.alibi(8)}}
        small |= {"causal and ALiBi": {"mask": causal, "bias": biases.alibi(8)}}
        small |= {"dropout": {"mask": causal, "dropout_p": 0.1}, "sinks": {"sinks": torch.zeros(8)}}
        for name, options in small.items():
            found[f"forward n = {n:,} {name}"] = forward(1, 8, n, 64, **options)
            found[f"training n = {n:,} {name}"] = training(1, 8, n, 64, **options)
    found |= {
        "forward (4, 8, 16, 64) padding": forward(4, 8, 16, 64, mask=padding),
        "training (4, 8, 16, 64) padding": training(4, 8, 16, 64, mask=padding),
        "forward n = 4,096 documents": forward(1, 8, 4096, 64, mask=documents),
        "training n = 4,096 documents": training(1, 8, 4096, 64, mask=documents),
        "forward n = 4,096 strided": forward(1, 2, 4096, 64, mask=strided),
        "training n = 4,096 strided": training(1, 2, 4096, 64, mask=strided),
        "forward n = 16,384 window": forward(1, 8, 16384, 64, mask=window),
        "training n = 16,384 window": training(1, 8, 16384, 64, mask=window),
        "forward n = 4,096 window bfloat16": forward(1, 8, 4096, 64, dtype=torch.bfloat16, mask=window),
        "training n = 4,096 window bfloat16": training(1, 8, 4096, 64, dtype=torch.bfloat16, mask=window),
        "forward n = 1,024 window float64": forward(1, 8, 1024, 64, dtype=torch.float64, mask=window),
        "forward n = 1,009 dim 40 causal softcap": forward(1, 8, 1009, 40, mask=causal, softcap=20.0),
        "decode 32/8 heads, 16,384 keys": decoding(32, 8, 16384, 128),
        "decode 32/8 heads, 1,024 keys": decoding(32, 8, 1024, 128),
        "decode 8/8 heads, 64 keys": decoding(8, 8, 64, 64),
        "decode 8/2 heads, 300 keys, causal": decoding(8, 2, 300, 64, mask=causal),
        "decode 8 queries, 4,096 keys, causal": decoding(32, 8, 4096, 128, 8, mask=causal),
        "forward additive n = 512": forward(1, 512, 128, score=additive),
        "training additive n = 512": training(1, 512, 128, score=additive),
        "forward additive n = 24": forward(1, 24, 128, score=additive),
        "forward general n = 256": forward(1, 256, 64, score=scores.General(64, 64).requires_grad_(False)),
        "observe n = 64 weights": observing(lenses.Weights(), n=64, mask=causal),
        "observe n = 2,048 weights": observing(lenses.Weights(), n=2048),
        "observe n = 4,096 map and entropy": observing(lenses.Pooled((256, 256)), lenses.Entropy(), mask=causal),
        "observe n = 4,096 received": observing(lenses.Received(), mask=causal),
        "observe n = 4,096 top 8": observing(lenses.TopK(8), mask=causal),
        "observe n = 4,096 distance": observing(lenses.Distance(), mask=window),
        "layer MultiheadAttention (1, 16, 64)": layer(
            lambda: nn.MultiheadAttention(64, 4, batch_first=True), 1, 16, 64
        ),
        "layer MultiheadAttention (4, 256, 512)": layer(
            lambda: nn.MultiheadAttention(512, 8, batch_first=True), 4, 256, 512
        ),
        "mask dense 2,048": lambda: lambda: window.dense(2048, 2048),
        "explain n = 16,384 window": explaining,
    }
    return found


def serve() -> None:
    """One side: reads (case, least seconds) as JSON lines, and answers the seconds of one call."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not disturb the answers
    known, ready = cases(), {}
    print(json.dumps(list(known)), file=answers, flush=True)
    for line in sys.stdin:
        name, calls = json.loads(line)
        try:
            if name not in ready:
                ready.clear()
                ready[name] = known[name]()
                ready[name]()
            began = time.perf_counter()
            for _ in range(calls):
                ready[name]()
            answer = (time.perf_counter() - began) / calls
        except Exception as error:  # a case that one side lacks is told, and the others are measured
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


class Side:
    """A process that runs the cases with the package of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        )
        self.names: list[str] = self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a side has ended: its message stands above")
        return json.loads(line)

    def seconds(self, name: str, calls: int = 1) -> float:
        assert self.process.stdin is not None
        print(json.dumps([name, calls]), file=self.process.stdin, flush=True)
        answer = self._read()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def ratio(name: str, before: Side, after: Side, rounds: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of after/before within a round."""
    once = max(before.seconds(name, 3), after.seconds(name, 3))
    calls = max(1, int(ROUND_SECONDS / once))
    pairs = []
    for round_ in range(rounds):
        if round_ % 2:
            old, new = before.seconds(name, calls), after.seconds(name, calls)
        else:
            new, old = after.seconds(name, calls), before.seconds(name, calls)
        pairs.append((old, new))
    old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
    return old, new, statistics.median(new / old for old, new in pairs)


def main(other: str, *words: str) -> None:
    import _timing

    print(_timing.machine())
    print("\n| case | before, ms | after, ms | ratio | |\n| --- | ---: | ---: | ---: | --- |")
    before, after = Side(Path(other).resolve()), Side(ROOT)
    for name in after.names:
        if words and not any(word in name for word in words):
            continue
        try:
            old, new, more = ratio(name, before, after, 9)
            if more > SLOWER:
                old, new, more = ratio(name, before, after, 27)
        except RuntimeError as error:
            print(f"| {name} | | | | {error} |", flush=True)
            continue
        mark = "**slower**" if more > SLOWER else ""
        print(f"| {name} | {old * 1e3:,.3f} | {new * 1e3:,.3f} | {more:.2f} | {mark} |", flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main(*sys.argv[1:])
