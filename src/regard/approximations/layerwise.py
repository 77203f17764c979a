"""What approximations would cost in each layer of a model: errors of its attention, and a measure of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import run_problem
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels.hooks import substitute_attention
from ..utils.call_site import find_call_site
from .measures import Batch, Measure
from .methods import Method, MethodLike, as_method


@dataclass(frozen=True, eq=False)
class LayerApproximation:
    """A method in one layer: its errors on the layer's own queries, keys and values, and the model's measure with it.

    heads: the relative error of the output of each head, (H,), over all calls. measure: with this layer alone
    approximated. reason: why the method cannot compute the layer; heads and measure are then None.
    """

    heads: Tensor | None
    measure: float | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """The relative error of all heads together; None where the method cannot compute the layer."""
        return None if self.heads is None else float(self.heads.square().mean().sqrt())


@dataclass(frozen=True, eq=False)
class ModelApproximation:
    """The result of `model_approximation`; print it for a table.

    methods: what was measured. layers: names of the attention modules, in the order of their calls. measure: the name
    of the measure. exact: its value with exact attention. cells: by (layer, number of the method). everywhere: for each
    method the measure with all layers approximated that it can compute; None where there is none.
    """

    methods: tuple[Method, ...]
    layers: tuple[str, ...]
    measure: str
    exact: float
    cells: Mapping[tuple[str, int], LayerApproximation]
    everywhere: tuple[float | None, ...]

    def __str__(self) -> str:
        width = max(map(len, ("all of these", *self.layers)))
        lines = [f"{self.measure} with exact attention: {_number(self.exact)}"]
        for number, method in enumerate(self.methods):
            cells = [self.cells[layer, number] for layer in self.layers]
            lines += ["", str(method), f"  {'layer':<{width}}  {'output error':>12}  {self.measure:>12}"]
            reasons: dict[str, int] = {}
            for layer, cell in zip(self.layers, cells, strict=True):
                note = ""
                if cell.reason:
                    note = f"  [{reasons.setdefault(cell.reason, len(reasons) + 1)}]"
                lines.append(f"  {layer:<{width}}  {_number(cell.error):>12}  {_number(cell.measure):>12}{note}")
            lines.append(f"  {'all of these':<{width}}  {'':>12}  {_number(self.everywhere[number]):>12}")
            lines += [f"  [{place}] {reason}" for reason, place in reasons.items()]
        return "\n".join(lines)


def model_approximation(
    model: nn.Module,
    batches: Batch | list[Batch],
    methods: MethodLike | Sequence[MethodLike],
    measure: Measure,
) -> ModelApproximation:
    """Measure what each method would cost in each layer of a model: output errors, and a measure of the whole model.

    The model runs once with exact attention, where each method's output is compared with the exact one on the queries,
    keys and values of each layer. Then it runs for each method with one layer after another approximated, and with all
    of them. The model itself does not change; it is called in the mode in which it is, so call `model.eval()` before.

    All attention that goes through `regard.attention` is replaced: models of `regard.models` and `regard.nn`, models of
    transformers after `regard.huggingface.swap(model)`, models of torch's layers after `regard.nn.swap(model)`. A layer
    is a module that computes attention, by its name in `model.named_modules()`. Rows of padded queries count in the
    output errors, so batches without padding say more.

    Args:
        model: a module.
        batches: the arguments of one call, or a list of these: a tensor, a tuple of positional arguments, or a mapping
            of keywords, as a tokenizer of transformers returns it.
        methods: one or more, as `regard.approximation` takes them.
        measure: `regard.approximations.Perplexity()` for a language model, `CosineSimilarity()` for an encoder, or one
            of your own.

    Raises:
        ConfigurationError: no module, no method, an unknown method, no measure, or no attention in the model that could
            be replaced.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2))
    >>> model, cosine = torch.nn.Sequential(layer), regard.approximations.CosineSimilarity()
    >>> found = regard.model_approximation(model, torch.zeros(1, 5, 8), regard.linear.Elu(), cosine)
    >>> found.layers, round(found.cells["0", 0].error, 3)
    (('0',), 0.0)
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model_approximation needs a model, a torch.nn.Module; this is a {type(model).__name__}"
        )
    if not isinstance(measure, Measure) or isinstance(measure, type):
        raise ConfigurationError(
            f"measure is {measure!r}; it needs a measure such as regard.approximations.Perplexity() for a language "
            "model, or CosineSimilarity() for an encoder"
        )
    chosen = tuple(map(as_method, methods if isinstance(methods, list | tuple) else (methods,)))
    if not chosen:
        raise ConfigurationError("methods is empty; it needs at least one, such as regard.linear.Elu()")
    runs = batches if isinstance(batches, list) else [batches]
    if not runs:
        raise ConfigurationError("batches is empty; it needs the arguments of at least one call of the model")
    with torch.no_grad():
        return _ModelComparison(model, runs, chosen, measure).result()


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The output of a model for a batch: its arguments by name, by place, or one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


class _ModelComparison:
    """The runs of a model with exact and with approximate attention."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], methods: tuple[Method, ...], measure: Measure
    ) -> None:
        self.model, self.batches, self.methods, self.measure = model, batches, methods, measure
        self.names = {module: name for name, module in model.named_modules()}
        self.errors = [_LayerErrors(method) for method in methods]
        self.layers: dict[str, None] = {}  # an ordered set

    def result(self) -> ModelApproximation:
        """All runs."""
        self.exact = [self._output(batch, self._compare) for batch in self.batches]
        if not self.layers:
            raise ConfigurationError(
                f"no attention of {type(self.model).__name__} went through regard.attention, so none can be replaced: "
                "call regard.huggingface.swap(model) for a model of transformers before, regard.nn.swap(model) for "
                "torch's nn.MultiheadAttention"
            )
        cells, everywhere = {}, []
        for number, errors in enumerate(self.errors):
            for layer in self.layers:
                reason = errors.reasons.get(layer, "")
                heads = None if reason else errors.heads(layer)
                cells[layer, number] = LayerApproximation(
                    heads, None if reason else self._measured(self._substitute(errors.method, {layer})), reason
                )
            able = {layer for layer in self.layers if layer not in errors.reasons}
            everywhere.append(self._measured(self._substitute(errors.method, able)) if able else None)
        return ModelApproximation(
            self.methods, tuple(self.layers), self.measure.name, self._measured(None), cells, tuple(everywhere)
        )

    def _output(self, batch: Batch, compute: Callable[[Problem], Tensor | None] | None) -> Any:
        """The model's output for a batch, with the attention substituted."""
        with nullcontext() if compute is None else substitute_attention(compute):
            return call_model(self.model, batch)

    def _measured(self, compute: Callable[[Problem], Tensor | None] | None) -> float:
        """The measure over all batches, with the attention substituted; None for exact attention."""
        values = []
        for batch, exact in zip(self.batches, self.exact, strict=True):
            output = exact if compute is None else self._output(batch, compute)
            values.append(self.measure.values(output, exact, batch).double())
        return self.measure.summary(float(torch.cat(values).mean()))

    def _compare(self, problem: Problem) -> Tensor | None:
        """Measure every method on one call of attention, and return its exact output."""
        layer = self._layer()
        if layer is None or not problem.weights_shape.numel():
            return None
        self.layers[layer] = None
        exact = run_problem(problem).output
        for errors in self.errors:
            errors.add(layer, problem, exact)
        return exact

    def _substitute(self, method: Method, layers: set[str]) -> Callable[[Problem], Tensor | None]:
        """A substitute for the attention of some layers."""

        def compute(problem: Problem) -> Tensor | None:
            return method.run(problem) if problem.weights_shape.numel() and self._layer() in layers else None

        return compute

    def _layer(self) -> str | None:
        """The name of the module that computes attention now; None for one outside of the model."""
        return find_call_site(self.names).name or None


class _LayerErrors:
    """Sums of squares of a method's errors and of the exact outputs, for each layer and head."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.reasons: dict[str, str] = {}
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, layer: str, problem: Problem, exact: Tensor) -> None:
        """Add one call, or the reason why the method cannot compute it."""
        reason = self.method.why_not(problem)
        if reason:
            self.reasons.setdefault(layer, reason)
        if layer in self.reasons:
            return
        error = self._squares(self.method.run(problem).double() - exact.double(), problem)
        size = self._squares(exact.double(), problem)
        before = self.sums.get(layer)
        self.sums[layer] = (error, size) if before is None else (before[0] + error, before[1] + size)

    def heads(self, layer: str) -> Tensor:
        """The relative error of each head, (H,)."""
        error, size = self.sums[layer]
        return (error / size).sqrt().masked_fill(error == 0, 0.0)

    @staticmethod
    def _squares(rows: Tensor, problem: Problem) -> Tensor:
        """Σ x² of each head: (..., heads, M, Dv) to (H,)."""
        heads = rows.shape[-3] if problem.heads else 1
        return rows.square().sum((-2, -1)).reshape(-1, heads).sum(0)


def _number(value: float | None) -> str:
    """A number of a table."""
    return "–" if value is None else f"{value:.5g}"
