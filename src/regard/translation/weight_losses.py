"""Losses of the attention weights, beside that of the words: coverage, and guided alignment."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.models.decoded_target import SourceHead
from regard.translation.batches import Batch
from regard.translation.settings import TrainingSettings
from regard.translation.vocabulary import PAD


@dataclass(frozen=True)
class WeightLosses:
    """The weights of both losses, and the attention whose weights guided alignment reads."""

    coverage: float = 0.0
    alignment: float = 0.0
    head: SourceHead = field(default_factory=SourceHead)

    @classmethod
    def of_settings(cls, settings: TrainingSettings) -> WeightLosses:
        """The losses that the settings ask for."""
        guide = settings.guided_alignment
        if guide is None:
            return cls(settings.coverage_loss)
        return cls(settings.coverage_loss, guide.weight, SourceHead(guide.layer, guide.head))

    @property
    def observed(self) -> SourceHead | None:
        """The attention whose weights are read; None if no loss reads any."""
        return self.head if self.coverage or self.alignment else None

    def of(self, weights: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of both losses over the target tokens of a batch, for its weights [B, T, S]."""
        loss = weights.new_zeros(())
        if self.coverage:
            loss = loss + self.coverage * coverage_loss(weights, batch.target_output != PAD)
        if self.alignment and batch.links is not None:
            loss = loss + self.alignment * alignment_loss(weights, batch.links)
        return loss


def coverage_loss(weights: Tensor, there: Tensor) -> Tensor:
    """Σ_t Σ_j min(a_tj, c_tj), with c_tj = Σ_{t' < t} a_t'j: attention to what has been attended to before.

    Shapes: weights [B, T, S], of which the steps that `there` [B, T] has are counted, the first ones of each row.

    Source: See et al. 2017 (arXiv 1704.04368), Eq. 12.

    >>> again = torch.tensor([[[1.0, 0.0], [0.75, 0.25]]])
    >>> coverage_loss(again, torch.tensor([[True, True]]))
    tensor(0.7500)
    """
    before = weights.cumsum(1) - weights
    return (torch.minimum(weights, before).sum(-1) * there).sum()


def alignment_loss(weights: Tensor, links: Tensor) -> Tensor:
    """-Σ_t Σ_j G_tj log a_tj: the cross entropy of weights with links, each target token's with equal shares G_tj.

    A target token without a link counts for nothing. A weight below the smallest normal number counts as that, and has
    no gradient: what a window leaves out cannot be learned.

    Shapes: weights [B, T, S]; links [L, 3], row, target token and source token.

    Source: Garg et al. 2019 (arXiv 1909.02074), section 4.2, without their second pass over the whole target; Chen et
    al. 2016 (arXiv 1607.01628), guided alignment by cross entropy. Row t is the step that says token t.

    >>> weights = torch.tensor([[[0.5, 0.25, 0.25]]])
    >>> alignment_loss(weights, torch.tensor([[0, 0, 1], [0, 0, 2]]))  # -log 1/4
    tensor(1.3863)
    """
    rows, steps, tokens = links.unbind(1)
    counts = weights.new_zeros(weights.shape[:2]).index_put_((rows, steps), weights.new_ones(()), accumulate=True)
    chosen = weights[rows, steps, tokens].clamp_min(torch.finfo(weights.dtype).tiny)
    return -(chosen.log() / counts[rows, steps]).sum()
