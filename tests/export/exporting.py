"""Run modules in ONNX Runtime: export with sizes that may vary, and the largest difference from torch's results."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

onnxruntime: Any = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 1e-5
"""Of float32, relative to the largest number of a result where that is above 1."""
BATCH, SEQUENCE = {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


class Together(nn.Module):
    """The results of several modules or functions of the same two tensors: one graph, exported once."""

    def __init__(self, parts: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.parts = parts
        self.own = nn.ModuleList(part for part in parts.values() if isinstance(part, nn.Module))

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(first, second) for part in self.parts.values())


class OnnxModel:
    """A module's graph in ONNX Runtime."""

    def __init__(self, module: nn.Module, example: Sequence[Tensor], shapes: Any, *, opset: int = 20) -> None:
        with torch.no_grad():
            program: Any = torch.onnx.export(
                module, tuple(example), dynamo=True, dynamic_shapes=shapes, opset_version=opset, verbose=False
            )
        self.operators = [node.op_type for node in program.model.graph]
        self.session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        names = [each.name for each in self.session.get_inputs()]
        fed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(result) for result in self.session.run(None, fed)]


def assert_same(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Fail where a result of a graph is not that of torch."""
    assert found.shape == expected.shape, name
    assert found.isfinite().all(), name
    worst = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert worst <= TOLERANCE, f"{name}: off by {worst:.1e}"


def assert_agrees_in_onnx(
    module: nn.Module,
    make: Callable[..., tuple[Tensor, ...]],
    shapes: Any,
    sizes: Sequence[tuple[int, ...]],
    *,
    opset: int = 20,
) -> OnnxModel:
    """Export for the first of some sizes, and compare for the others; `make` gives inputs of a size."""
    module = module.eval()
    model = OnnxModel(module, make(*sizes[0]), shapes, opset=opset)
    names = list(module.parts) if isinstance(module, Together) else None
    for size in sizes[1:]:
        inputs = make(*size)
        with torch.no_grad():
            expected = module(*inputs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for number, (found, wanted) in enumerate(zip(model(*inputs), expected, strict=True)):
            assert_same(found, wanted, f"{names[number] if names else number} of {size}")
    return model
