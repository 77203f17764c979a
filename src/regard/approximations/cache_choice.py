"""The fewest bits that each head of a model needs in a cache, by errors on its own queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.cache_format import CacheFormat
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels.hooks import substitute_attention
from ..utils.call_site import find_call_site
from ..utils.numbers import lies_between
from .layerwise import ModelApproximation, call_model, model_approximation
from .measures import Batch, Measure
from .stored import Stored, describe


@dataclass(frozen=True, eq=False)
class CacheChoice:
    """The result of `choose_cache`: for each layer the format of each key head, and what they cost together.

    formats: by the name of the layer; `KVCache.packed(*formats[layer])` stores so. found: the table of errors that they
    were chosen by. together: the measure of the model with all of them.
    """

    formats: dict[str, tuple[CacheFormat, ...]]
    found: ModelApproximation
    together: float

    @property
    def bits(self) -> float:
        """Bits of an entry, on average over all heads."""
        of_heads = [format_.bits for formats in self.formats.values() for format_ in formats]
        return sum(of_heads) / len(of_heads)

    def __str__(self) -> str:
        lines = [f"{self.bits:.3g} bits on average; {self.found.measure} {self.together:.5g}"]
        width = max(map(len, self.formats))
        for layer, formats in self.formats.items():
            lines.append(f"  {layer:<{width}}  " + "; ".join(f"head {h}: {describe(f)}" for h, f in enumerate(formats)))
        return "\n".join(lines)


def choose_cache(
    model: nn.Module,
    batches: Batch | list[Batch],
    candidates: Sequence[CacheFormat],
    measure: Measure,
    *,
    error: float = 0.05,
) -> CacheChoice:
    """For each key head of a model the candidate of the fewest bits whose output error is at most `error`.

    The error is that of the output of the head's queries, relative to the output itself, on the model's own queries,
    keys and values (`model_approximation`); of a group of query heads the largest counts. Of candidates of as many bits
    the one with the least error is taken; a head that none is good enough for is stored as it is. What all of them cost
    together is measured at the end.

    Args:
        model: a module whose attention goes through `regard.attention`.
        batches: as of `model_approximation`: text like that which the model will read.
        candidates: formats, such as CacheFormat() and CacheFormat(Packing("int4"), Packing("int4", rotated=True)).
        measure: `Divergence()`, `Perplexity()` or another of `regard.approximations`.
        error: the most that the output of a head may change, relative to it.

    Raises:
        ConfigurationError: no candidates; an error that is no number above 0; as `model_approximation`.

    >>> import torch, regard
    >>> layer = regard.nn.Attention(regard.nn.Projections(16, num_heads=2), mask=regard.masks.causal())
    >>> x, cosine = torch.randn(1, 70, 16), regard.approximations.CosineSimilarity()
    >>> chosen = regard.approximations.choose_cache(torch.nn.Sequential(layer), x, [regard.nn.CacheFormat()], cosine)
    >>> chosen.bits, len(chosen.formats["0"])
    (8.0, 2)
    """
    candidates = list(candidates)
    if not candidates or not all(isinstance(each, CacheFormat) for each in candidates):
        raise ConfigurationError(f"candidates are {candidates!r}; they need formats such as regard.nn.CacheFormat()")
    if not lies_between(0, error, float("inf")) or not error > 0:
        raise ConfigurationError(f"error is {error!r}; it needs a number above 0, such as 0.05")
    ordered = sorted(candidates, key=lambda each: each.bits)
    found = model_approximation(model, batches, [Stored((each,)) for each in ordered], measure)
    with torch.no_grad():
        together = _Together(model, batches if isinstance(batches, list) else [batches], measure)
        formats = {
            layer: _formats_of(found, ordered, layer, together.key_heads[layer], error) for layer in found.layers
        }
        return CacheChoice(formats, found, together.measured(formats))


def _formats_of(
    found: ModelApproximation, candidates: Sequence[CacheFormat], layer: str, key_heads: int, error: float
) -> tuple[CacheFormat, ...]:
    """The format of each key head of a layer, from the errors of its query heads."""
    best: list[tuple[float, float, CacheFormat]] = [(16.0, 0.0, CacheFormat(None, None))] * key_heads
    for number, format_ in enumerate(candidates):
        errors = found.cells[layer, number].heads
        if errors is None:
            continue
        for head, own in enumerate(errors.unflatten(0, (key_heads, -1)).amax(1).tolist()):
            if own <= error:
                best[head] = min(best[head], (format_.bits, own, format_), key=lambda each: each[:2])
    return tuple(format_ for _, _, format_ in best)


class _Together:
    """A model whose layers store keys and values each in formats of their own.

    key_heads: of each layer, by its name.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], measure: Measure) -> None:
        self.model, self.batches, self.measure = model, batches, measure
        self.names = {module: name for name, module in model.named_modules()}
        self.key_heads: dict[str, int] = {}
        self.exact = [self._output(batch, self._count) for batch in batches]

    def measured(self, formats: Mapping[str, tuple[CacheFormat, ...]]) -> float:
        """The measure of the model with these formats."""

        def compute(problem: Problem) -> Tensor | None:
            layer = find_call_site(self.names).name
            method = Stored(formats[layer]) if layer in formats else None
            return None if method is None or method.why_not(problem) else method.run(problem)

        values = [
            self.measure.values(self._output(batch, compute), exact, batch).double()
            for batch, exact in zip(self.batches, self.exact, strict=True)
        ]
        return self.measure.summary(float(torch.cat(values).mean()))

    def _output(self, batch: Batch, compute: Callable[[Problem], Tensor | None]) -> Any:
        with substitute_attention(compute):
            return call_model(self.model, batch)

    def _count(self, problem: Problem) -> None:
        """Remember the key heads of the layer that calls."""
        if name := find_call_site(self.names).name:
            self.key_heads[name] = problem.value.shape[-3] if problem.heads else 1
