"""Norms of values after the output projection of their module, kept with a recorded call: one number a key and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from ..errors import ConfigurationError
from ..heads.output_projection import head_projection
from ..lenses.value_norms import transformed_norms


class ValueNorms:
    """The norms ‖v_j W_h‖ of the calls of a model, whose output projections are looked up once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights: dict[str, Tensor | None] = {}

    def of_call(self, problem: Problem, module: str) -> Tensor | None:
        """‖v_j W_h‖, (B, H, N) in float32 on the CPU, 0 of values that are not finite.

        None where what follows the heads of the module is no projection alone, or not known.
        """
        if module not in self._weights:
            self._weights[module] = _output_weight(self._model, module)
        weight = self._weights[module]
        value = problem.value.detach() if problem.heads else problem.value.detach().unsqueeze(-3)
        heads = problem.weights_shape[-3] if problem.heads else 1
        if weight is None or not value.shape[-1] or weight.shape[1] != heads * value.shape[-1]:
            return None
        value = value.float()
        norms = transformed_norms(torch.where(value.isfinite(), value, 0.0), weight.detach().to(value))
        norms = norms.expand(*problem.batch, heads, problem.keys)
        return norms.reshape(problem.batch.numel(), heads, problem.keys).to("cpu", copy=True)


def _output_weight(model: nn.Module, name: str) -> Tensor | None:
    """The weight (dim, heads · Dv) of the output projection of a module, if that is all that follows its heads."""
    modules = dict(model.named_modules())
    module = modules.get(name, model if name == type(model).__name__ else None)
    if module is None or getattr(module, "gate", None) is not None:  # a gate is another factor for each row
        return None
    if isinstance(module, nn.MultiheadAttention):
        return module.out_proj.weight
    try:
        projection = head_projection(model, name if name in modules else "")
    except ConfigurationError:
        return None
    queries = getattr(getattr(module, "q_proj", None), "out_features", None)
    if queries not in (None, projection.heads * projection.width):  # queries and a gate are projected together
        return None
    weight = getattr(projection.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    return weight if hasattr(projection.module, "in_features") else weight.T  # a Conv1D stores the transpose
