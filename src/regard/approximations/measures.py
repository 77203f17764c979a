"""Measures of a model's output: perplexity and divergence of next tokens, and cosine similarity of embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigurationError, ShapeError

Batch: TypeAlias = Any
"""The arguments of one call of a model: a tensor, a tuple of positional ones, or a mapping of keywords."""


@runtime_checkable
class Measure(Protocol):
    """A number for the outputs of a model: a function of the mean of some values, of tokens or of sequences."""

    @property
    def name(self) -> str:
        """The name of the number, for tables."""
        ...

    def values(self, output: Any, exact: Any, batch: Batch) -> Tensor:
        """The values of one batch, (n,), for the model's output and for that with exact attention."""
        ...

    def summary(self, mean: float) -> float:
        """The number for the mean over all values."""
        ...


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean of -ln P(token t+1 | tokens 0..t), over the next tokens of each sequence.

    The output is logits (batch, length, vocabulary), or has them as `logits`.

    Args:
        tokens: which argument of the model has the tokens (batch, length) that the logits follow: its name where the
            batch is a mapping, its place where it is a tuple.
        padding: the token that fills up shorter sequences, which is not counted; with an "attention_mask" in the batch
            tokens where it is 0 are not counted either.

    Source: Jelinek et al. 1977, Perplexity, a measure of the difficulty of speech recognition tasks.

    >>> measure, tokens = Perplexity(), torch.tensor([[1, 2, 3]])
    >>> logits = torch.zeros(1, 3, 8)
    >>> round(measure.summary(float(measure.values(logits, logits, tokens).mean())), 4)
    8.0
    """

    tokens: str | int | None = None
    padding: int | None = None

    @property
    def name(self) -> str:
        return "perplexity"

    def values(self, output: Any, exact: Any, batch: Batch) -> Tensor:
        logits, tokens = getattr(output, "logits", output), self._tokens(batch)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
            has = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ShapeError(
                f"the model's output is {has}, and the tokens are {tuple(tokens.shape)}; perplexity needs logits "
                "(batch, length, vocabulary) for each token: for an encoder use CosineSimilarity()"
            )
        counted = torch.ones_like(tokens, dtype=torch.bool) if self.padding is None else tokens != self.padding
        if isinstance(batch, Mapping) and "attention_mask" in batch:
            counted = counted & batch["attention_mask"].bool()
        losses = functional.cross_entropy(logits[:, :-1].float().mT, tokens[:, 1:], reduction="none")
        return losses[counted[:, 1:] & counted[:, :-1]]

    def summary(self, mean: float) -> float:
        return math.exp(mean) if mean < 700 else math.inf

    def _tokens(self, batch: Batch) -> Tensor:
        """The tokens of a batch."""
        where = self.tokens
        if where is None:
            where = "input_ids" if isinstance(batch, Mapping) else 0
        parts = batch if isinstance(batch, Mapping | tuple) else (batch,)
        try:
            return parts[where]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            has = list(parts) if isinstance(parts, Mapping) else f"{len(parts)} positional arguments"
            raise ConfigurationError(
                f"the batch has no argument {where!r} with tokens; it has {has}: pass Perplexity(tokens=...)"
            ) from None


@dataclass(frozen=True)
class Divergence:
    """The mean of Σ_w P(w) ln(P(w) / Q(w)) over the next tokens: P with exact attention, Q with that measured; in nats.

    The output is logits (batch, length, vocabulary), or has them as `logits`. With an "attention_mask" in the batch,
    tokens where it is 0 are not counted.

    Source: Kullback and Leibler 1951, On information and sufficiency.

    >>> exact, measured = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]]).log_softmax(-1)
    >>> Divergence().values(measured, exact, exact).round(decimals=4)
    tensor([0.8554])
    """

    @property
    def name(self) -> str:
        return "divergence"

    def values(self, output: Any, exact: Any, batch: Batch) -> Tensor:
        logits, wanted = getattr(output, "logits", output), getattr(exact, "logits", exact)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            has = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ShapeError(
                f"the model's output is {has}; the divergence of next tokens needs logits (batch, length, vocabulary): "
                "for an encoder use CosineSimilarity()"
            )
        logs, exact_logs = (each.double().log_softmax(-1) for each in (logits, wanted))
        values = functional.kl_div(logs, exact_logs, reduction="none", log_target=True).sum(-1)
        if isinstance(batch, Mapping) and "attention_mask" in batch:
            return values[batch["attention_mask"].bool()].float()
        return values.flatten().float()

    def summary(self, mean: float) -> float:
        return mean


@dataclass(frozen=True)
class CosineSimilarity:
    """The mean cosine of each sequence's embedding and that with exact attention: 1 where nothing changes.

    Args:
        embed: function of output and batch that returns the embeddings (batch, dim). By default the mean over the
            tokens that the batch's "attention_mask" has, of `last_hidden_state` or of the output itself, as
            Sentence-BERT has it (Reimers and Gurevych 2019, arXiv 1908.10084, section 3).

    >>> states = torch.randn(2, 5, 8)
    >>> torch.allclose(CosineSimilarity().values(2 * states, states, states), torch.ones(2))
    True
    """

    embed: Callable[[Any, Batch], Tensor] | None = None

    @property
    def name(self) -> str:
        return "cosine"

    def values(self, output: Any, exact: Any, batch: Batch) -> Tensor:
        embed = _mean_state if self.embed is None else self.embed
        return functional.cosine_similarity(embed(output, batch).double(), embed(exact, batch).double(), dim=-1).float()

    def summary(self, mean: float) -> float:
        return mean


def _mean_state(output: Any, batch: Batch) -> Tensor:
    """The mean over the tokens of each sequence, (batch, dim)."""
    states = getattr(output, "last_hidden_state", output)
    if not isinstance(states, Tensor) or states.ndim != 3:
        has = tuple(states.shape) if isinstance(states, Tensor) else f"a {type(states).__name__}"
        raise ShapeError(
            f"the model's output is {has}; CosineSimilarity() needs states (batch, length, dim): pass embed=, a "
            "function of output and batch that returns (batch, dim)"
        )
    if not isinstance(batch, Mapping) or "attention_mask" not in batch:
        return states.mean(1)
    exists = batch["attention_mask"].to(states.dtype).unsqueeze(-1)
    return (states * exists).sum(1) / exists.sum(1)
