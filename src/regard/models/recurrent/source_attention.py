"""Attention of a recurrent decoder to the source: global, local in a window, with or without coverage.

Source: Luong et al. 2015 (arXiv 1508.04025), section 3.2, local attention. Windows are closed intervals
[centre - radius, centre + radius] of source positions, counted from 0. For coverage see `SourceCoverage`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

from ...attention import attention, observe
from ...biases import Bias, gaussian
from ...core.normalizer import Normalizer
from ...errors import ConfigurationError
from ...lenses import Weights
from ...masks import Mask, where
from ...nn.layer_arguments import NormalizerModule
from ...scores import Additive, Concat, Score
from ...utils.numbers import whole_number
from .recurrent_state import Encoded, RecurrentMemory, RecurrentState


class SourceWindow(Protocol):
    """The part of the source that queries [B, T, H] attend to; the first query is at target step `first`."""

    def __call__(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """The mask, padding included, and the bias if there is one."""
        ...


class GlobalWindow(nn.Module):
    """Global attention: every word of the source."""

    def forward(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """The padding mask alone."""
        return memory.mask, None


class MonotonicWindow(nn.Module):
    """local-m: the centre is the target step itself, p_t = t.

    A target that runs past the source by more than the radius has no position in its window: weights and context 0.
    """

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """A band around the diagonal."""
        steps = torch.arange(first, first + query.shape[1], device=query.device)
        return memory.mask & where(keep=_near(steps, memory, self.radius)), None

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


class PredictiveWindow(nn.Module):
    """local-p: the centre is predicted, p_t = S · sigmoid(v_pᵀ tanh(W_p h_t)), with a Gaussian of σ = radius / 2 on it.

    Equations 9 and 10. There the Gaussian multiplies the weights after the softmax, here it is a bias before it, so
    that the weights sum to 1; gradients reach the centre through it.
    """

    def __init__(self, query_dim: int, radius: int) -> None:
        super().__init__()
        self.radius = radius
        self.hidden = nn.Linear(query_dim, query_dim, bias=False)
        self.centre = nn.Linear(query_dim, 1, bias=False)

    def forward(self, query: Tensor, first: int, memory: RecurrentMemory) -> tuple[Mask, Bias | None]:
        """The mask of a window around each predicted centre, and the Gaussian bias."""
        share = torch.sigmoid(self.centre(torch.tanh(self.hidden(query)))).squeeze(-1)  # [B, T]
        centre = share.float() * memory.lengths.unsqueeze(-1)
        keep = _near(centre.detach(), memory, self.radius)
        return memory.mask & where(keep=keep), gaussian(centre, self.radius / 2)

    def extra_repr(self) -> str:
        return f"radius={self.radius}"


def _near(centre: Tensor, memory: RecurrentMemory, radius: int) -> Tensor:
    """Which source positions lie within `radius` of each centre: [..., T, S]."""
    positions = torch.arange(memory.values.shape[1], device=memory.values.device)
    return (positions - centre.unsqueeze(-1)).abs() <= radius


class Fertility(nn.Module):
    """Φ_j = N σ(u · h_j): to how many target words source word j is expected to give weight, at most N.

    Source: Tu et al. 2016 (arXiv 1601.04811), section 3.1.1, which sets N to 2.
    """

    def __init__(self, annotation_dim: int, most: float = 2.0) -> None:
        super().__init__()
        if not most > 0:
            raise ConfigurationError(f"most is {most}; a fertility needs a number above 0, such as 2.0")
        self.most = most
        self.project = nn.Linear(annotation_dim, 1, bias=False)

    def forward(self, annotations: Tensor) -> Tensor:
        """Φ [B, S] of annotations [B, S, A]."""
        return self.most * torch.sigmoid(self.project(annotations)).squeeze(-1)

    def extra_repr(self) -> str:
        return f"most={self.most}"


class SourceCoverage(nn.Module, ABC):
    """What a score reads of the attention of earlier steps: a term u_tj of its tanh for each source position.

    It is computed as what the term adds to the score without it,

        b_tj = vᵀ tanh(W s_t + U h_j + u_tj) - vᵀ tanh(W s_t + U h_j),

    a bias of the attention: so records and lenses have one set of keys for all steps, and show what coverage did.

    Raises:
        ConfigurationError: the score is not additive.
    """

    def __init__(self, score: Score) -> None:
        super().__init__()
        if not isinstance(score, Additive | Concat):
            raise ConfigurationError(
                f"coverage is read by the hidden layer of a score, and {type(score).__name__} has none: take Additive "
                "or Concat"
            )

    @abstractmethod
    def start(self, memory: RecurrentMemory) -> Tensor:
        """The coverage before the first step, [B, S, ...]; its term is 0."""

    @abstractmethod
    def term(self, coverage: Tensor, memory: RecurrentMemory) -> Tensor:
        """The term u_t [B, S, F] of the tanh."""

    @abstractmethod
    def after(self, coverage: Tensor, weights: Tensor, query: Tensor, memory: RecurrentMemory) -> Tensor:
        """The coverage after a step with these weights [B, 1, S] of a query [B, 1, H]."""

    def forward(self, score: Score, query: Tensor, memory: RecurrentMemory, coverage: Tensor) -> Tensor:
        """The bias b [B, 1, S] of one query [B, 1, H] over a source, for a coverage."""
        projected, keys = score.project_query(query), memory.present_keys
        covered = keys + self.term(coverage, memory).to(keys.dtype)
        return score.form(projected, covered).scores() - score.form(projected, keys).scores()


class Covered(SourceCoverage):
    """An additive score that reads how much weight each source position has had: vᵀ tanh(W s_t + U h_j + u c_tj).

    c_tj = Σ_{t' < t} a_t'j is the coverage [B, S], the sum of the attention weights of all steps before t; u has the
    width of the tanh. With a fertility the score reads c_tj / Φ_j.

    Raises:
        ConfigurationError: the score is not additive.

    Source: See et al. 2017 (arXiv 1704.04368), Eq. 10 and 11, without their offset; with a fertility the linguistic
    coverage of Tu et al. 2016 (arXiv 1601.04811), section 3.1.1.
    """

    def __init__(self, score: Score, fertility: Fertility | None = None) -> None:
        super().__init__(score)
        width: int = score.hidden_dim  # type: ignore[attr-defined]  # checked above
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.weight, std=max(width, 1) ** -0.5)
        self.fertility = fertility

    def start(self, memory: RecurrentMemory) -> Tensor:
        return memory.values.new_zeros(memory.values.shape[:2])

    def term(self, coverage: Tensor, memory: RecurrentMemory) -> Tensor:
        if self.fertility is not None:
            coverage = coverage / self.fertility(memory.present_values)
        return coverage.unsqueeze(-1) * self.weight

    def after(self, coverage: Tensor, weights: Tensor, query: Tensor, memory: RecurrentMemory) -> Tensor:
        return coverage + weights.squeeze(1)


class RecurrentCoverage(SourceCoverage):
    """An additive score that reads a vector c_tj of each source position, which a GRU keeps from step to step.

    The score is vᵀ tanh(W s_t + U h_j + V c_tj), and c_t+1,j = GRU([a_tj; h_j; s_t], c_tj) with the weight a_tj, the
    annotation h_j and the query s_t, [B, S, dim], 0 before the first step. All positions share the GRU.

    Args:
        score: the additive score that reads it.
        query_dim: H.
        annotation_dim: A.
        dim: of a vector; 10 in the paper.

    Raises:
        ConfigurationError: the score is not additive; a dim below 1.

    Source: Tu et al. 2016 (arXiv 1601.04811), section 3.1.2, neural network based coverage by a GRU.
    """

    def __init__(self, score: Score, query_dim: int, annotation_dim: int, dim: int = 10) -> None:
        super().__init__(score)
        self.cell = nn.GRUCell(1 + annotation_dim + query_dim, whole_number("dim", dim))
        width: int = score.hidden_dim  # type: ignore[attr-defined]  # checked above
        self.project = nn.Linear(dim, width, bias=False)

    def start(self, memory: RecurrentMemory) -> Tensor:
        return memory.values.new_zeros(*memory.values.shape[:2], self.cell.hidden_size)

    def term(self, coverage: Tensor, memory: RecurrentMemory) -> Tensor:
        return self.project(coverage)

    def after(self, coverage: Tensor, weights: Tensor, query: Tensor, memory: RecurrentMemory) -> Tensor:
        annotations = memory.present_values
        queries = query.expand(-1, annotations.shape[1], -1)
        inputs = torch.cat([weights.mT.to(annotations.dtype), annotations, queries.to(annotations.dtype)], -1)
        return self.cell(inputs.flatten(0, 1), coverage.flatten(0, 1)).view_as(coverage)


class SourceAttention(nn.Module):
    """context_t = attention(query_t, keys, annotations): any score, within a window.

    Args:
        score: of a query and an annotation.
        window: the part of the source that a query attends to; without one, all of it.
        coverage: the term of earlier weights, `Covered(score)` or `RecurrentCoverage(score, ...)`; steps then wait for
            one another.
        normalizer: what takes the place of softmax, from `regard.normalizers`; its `nn.Parameter`s are parameters here.
    """

    def __init__(
        self,
        score: Score,
        window: nn.Module | None = None,
        *,
        coverage: SourceCoverage | None = None,
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.score = score
        self.window = window if window is not None else GlobalWindow()
        self.coverage = coverage
        self.normalizer = None if normalizer is None else NormalizerModule(normalizer)

    def project_memory(self, encoded: Encoded) -> RecurrentMemory:
        """The source with its keys projected for the score, once for all steps."""
        return RecurrentMemory(encoded, self.score.project_key(encoded.annotations))

    def start(self, memory: RecurrentMemory) -> Tensor | None:
        """The coverage before the first step; None where the score does not read it."""
        return None if self.coverage is None else self.coverage.start(memory)

    def covered(
        self, coverage: Tensor | None, weights: Tensor | None, query: Tensor, memory: RecurrentMemory
    ) -> Tensor | None:
        """The coverage after a step with these weights of a query; None where no score reads it."""
        if self.coverage is None or coverage is None or weights is None:
            return None
        return self.coverage.after(coverage, weights, query, memory)

    def look(self, query: Tensor, memory: RecurrentMemory, state: RecurrentState) -> tuple[Tensor, Tensor | None]:
        """The contexts of the next queries after a state, and their weights where the steps after them read these."""
        if self.coverage is None:
            return self(query, memory, first=state.step), None
        return self.with_weights(query, memory, first=state.step, coverage=state.coverage)

    def forward(self, query: Tensor, memory: RecurrentMemory, *, first: int = 0) -> Tensor:
        """The contexts [B, T, A] of queries [B, T, H]; the first query is at target step `first`.

        With coverage nothing is covered before the first query.
        """
        if self.coverage is not None:
            return self.with_weights(query, memory, first=first)[0]
        return attention(query, memory.keys, memory.values, **self._options(query, memory, first))

    def with_weights(
        self, query: Tensor, memory: RecurrentMemory, *, first: int = 0, coverage: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The contexts, and the attention weights [B, T, S]; `coverage` is that before the first query."""
        if self.coverage is None:
            return self._observe(query, memory, self._options(query, memory, first))
        covered = self.coverage.start(memory) if coverage is None else coverage
        contexts, weights = [], []
        for step, one in enumerate(query.split(1, 1), start=first):
            options = self._options(one, memory, step)
            term = self.coverage(self.score, one, memory, covered)
            options["bias"] = term if options["bias"] is None else options["bias"] + term
            context, row = self._observe(one, memory, options)
            covered = self.coverage.after(covered, row, one, memory)
            contexts.append(context)
            weights.append(row)
        return torch.cat(contexts, 1), torch.cat(weights, 1)

    def _observe(self, query: Tensor, memory: RecurrentMemory, options: dict) -> tuple[Tensor, Tensor]:
        lens = Weights()
        seen = observe(query, memory.keys, memory.values, lens, **options)
        return seen.output, seen[lens]

    def _options(self, query: Tensor, memory: RecurrentMemory, first: int) -> dict:
        mask, bias = self.window(query, first, memory)
        return {
            "score": self.score.over_projected_keys(),
            "mask": mask,
            "bias": bias,
            "normalizer": None if self.normalizer is None else self.normalizer(),
        }
