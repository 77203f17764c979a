"""Time of exported models in ONNX Runtime beside regard's own, alternating, and the sizes of the files.

    python benchmarks/export.py

Three models with random weights: a decoder of Llama's kind over a text, the same for one token after a text, and an
encoder over padded texts. float32, as many threads as torch has.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn
from torch.export import Dim

from regard import masks
from regard.export import TensorStep
from regard.models import LanguageModel
from regard.models import language_model as lm
from regard.nn import Attention, FeedForward, PreNorm, Projections, TransformerBlock
from regard.positions import Rotary

REPEATS = 9
DIM, HEADS, LAYERS, VOCABULARY = 512, 8, 4, 8000
VARY = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


class PaddedEncoder(nn.Module):
    """Blocks over the tokens of padded texts."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> TransformerBlock:
            return TransformerBlock(
                Attention(Projections(DIM, HEADS)), FeedForward(DIM, 4 * DIM), lambda: PreNorm(nn.LayerNorm(DIM))
            )

        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask=masks.padding(lengths=lengths))
        return x


def decoder(window: int | None) -> LanguageModel:
    """A language model with random weights, whose odd layers have a window."""
    kinds = lm.LayerConfig(rotary=Rotary(DIM // HEADS)), lm.LayerConfig(before=window, rotary=Rotary(DIM // HEADS))
    return LanguageModel(
        lm.LanguageModelConfig(
            vocabulary_size=VOCABULARY,
            dim=DIM,
            layers=kinds * (LAYERS // 2),
            attention=lm.AttentionConfig(num_heads=HEADS, num_kv_heads=HEADS // 2),
            feed_forward=lm.GatedFeedForwardConfig(1376),
        )
    ).eval()


def session(module: nn.Module, inputs: tuple, shapes: tuple, opset: int) -> tuple[Any, float, float]:
    """ONNX Runtime's session of a module, the seconds that its export took, and the MB of the file."""
    started = time.perf_counter()
    program = torch.onnx.export(module, inputs, dynamo=True, dynamic_shapes=shapes, opset_version=opset, verbose=False)
    seconds = time.perf_counter() - started
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program.save(path, external_data=False)  # type: ignore[union-attr]
        return onnxruntime.InferenceSession(str(path), options), seconds, path.stat().st_size / 1e6


def alternating(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median milliseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(REPEATS):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each) for name, each in times.items()}


def compare(name: str, module: nn.Module, example: tuple, shapes: tuple, sizes: dict[str, tuple]) -> None:
    """Print times, the largest difference, and the size of the file."""
    sessions = {opset: session(module, example, shapes, opset) for opset in (20, 23)}
    for label, inputs in sizes.items():

        def run(opset: int, inputs: tuple = inputs) -> Any:
            names = [each.name for each in sessions[opset][0].get_inputs()]
            return sessions[opset][0].run(None, dict(zip(names, (each.numpy() for each in inputs), strict=True)))

        found = alternating(
            {
                "regard": lambda inputs=inputs: module(*inputs),
                "opset 20": lambda run=run: run(20),
                "opset 23": lambda run=run: run(23),
            }
        )
        own = module(*inputs)
        own = own[0] if isinstance(own, tuple) else own
        off = max(float((torch.from_numpy(run(opset)[0]) - own).abs().max()) for opset in sessions)
        shown = ", ".join(f"{kind} {each:.2f} ms ({each / found['regard']:.2f})" for kind, each in found.items())
        print(f"{name}, {label}: {shown}; largest difference {off:.1e}", flush=True)
    for opset, (_, seconds, megabytes) in sessions.items():
        print(f"{name}, opset {opset}: exported in {seconds:.1f} s, {megabytes:.1f} MB", flush=True)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def main() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = decoder(window=127)
        compare(
            "decoder over a text",
            model,
            (tokens(2, 16),),
            (VARY,),
            {f"{n} tokens": (tokens(1, n),) for n in (64, 512, 2048)},
        )
        step = TensorStep(model).eval()
        past = step(tokens(2, 16), *step.no_past(2))[1:]
        compare(
            "decoder, one token",
            step,
            (tokens(2, 4), *past),
            (VARY, tuple({0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in past)),
            {f"after {n}": (tokens(1, 1), *step(tokens(1, n), *step.no_past(1))[1:]) for n in (64, 2048)},
        )
        compare(
            "padded encoder",
            PaddedEncoder().eval(),
            (torch.randn(2, 16, DIM), torch.tensor([16, 9])),
            (VARY, {0: Dim.DYNAMIC}),
            {"8 texts of 40 to 128 tokens": (torch.randn(8, 128, DIM), torch.arange(40, 136, 12).clamp(max=128))},
        )


if __name__ == "__main__":
    main()
