"""A record of a whole model: what it adds to the forward pass, and how large it is.

Goals for 12 layers of 12 heads at n = 4,096: at most 2.5 times the plain forward pass, the atlas written, and less than
3 times the size of queries and keys as they are kept, in float16.
"""

import tempfile
import time
from pathlib import Path

import _timing
import torch
from _report import milliseconds, table, times

from regard.explorer import record
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, GatedFeedForwardConfig, LanguageModelConfig, LayerConfig
from regard.positions import Rotary

LAYERS, HEADS, HEAD_DIM, LENGTH, ROUNDS = 12, 12, 64, 4096, 2


def main(length: int = LENGTH) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    dim = HEADS * HEAD_DIM
    model = LanguageModel(
        LanguageModelConfig(
            vocabulary_size=1000,
            dim=dim,
            layers=(LayerConfig(rotary=Rotary(HEAD_DIM)),) * LAYERS,
            attention=AttentionConfig(num_heads=HEADS),
            feed_forward=GatedFeedForwardConfig(4 * dim * 2 // 3),
        )
    ).eval()
    tokens = torch.randint(0, 1000, (1, length))
    words = [str(token) for token in tokens[0].tolist()]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.atlas"
        spent: dict[str, list[float]] = {"plain": [], "recorded": []}
        model.features(tokens[:, :64])
        for _ in range(ROUNDS):
            began = time.perf_counter()
            model.features(tokens)
            between = time.perf_counter()
            with record(model) as recording:
                model.features(tokens)
            recording.atlas(tokens=words).save(path)
            spent["plain"].append(between - began)
            spent["recorded"].append(time.perf_counter() - between)
        size, kept = path.stat().st_size, 2 * LAYERS * HEADS * length * HEAD_DIM * 2
    plain, recorded = (min(spent[way]) for way in ("plain", "recorded"))
    more, larger = recorded / plain, size / kept
    rows = [
        [
            "time",
            milliseconds(plain),
            milliseconds(recorded),
            times(more),
            f"≤ 2.5: {'yes' if more <= 2.5 else '**no**'}",
        ],
        [
            "size",
            f"{kept / 2**20:.0f} MiB",
            f"{size / 2**20:.0f} MiB",
            times(larger),
            f"< 3: {'yes' if larger < 3 else '**no**'}",
        ],
    ]
    title = f"Recording: {LAYERS} layers of {HEADS} heads of {HEAD_DIM}, n = {length:,} (`benchmarks/recording.py`)"
    table(title, ["", "plain forward; queries and keys", "recorded and written", "ratio", "goal"], rows)


if __name__ == "__main__":
    main()
