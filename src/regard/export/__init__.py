"""Exported programs: `torch.export`, ONNX and AOTInductor.

`torch.export.export` keeps each call of attention as one operator, `regard::attend`, computed by the kernels. In ONNX,
and in programs that are to run without regard, it is the formula in standard operators: `torch.onnx.export(model, ...,
dynamo=True)` finds it by itself once regard is imported, and `ExportedProgram.run_decompositions` in `decompositions`.
"""

from .standard_operators import decompositions as decompositions
from .tensor_cache import TensorCache as TensorCache
from .tensor_step import TensorStep as TensorStep

__all__ = ["TensorCache", "TensorStep", "decompositions"]
