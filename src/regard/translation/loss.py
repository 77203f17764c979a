"""The loss of training: label-smoothed cross entropy, in few passes over the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.translation.vocabulary import PAD


def smoothed_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Σ (1-ε)·(-log p[target]) + ε·mean(-log p), and Σ -log p[target], over all targets that are not PAD.

    `logits` [..., V], `target` [...] int64. Both sums are in float32 at least; the second one, from which perplexity
    is taken, has no gradient. Equal to torch's cross_entropy with label_smoothing, which needs two calls to give both
    and more passes over memory: on a CPU the logits of a large vocabulary are what a training step waits for.

    Source: Szegedy et al. (2016), "Rethinking the Inception Architecture", section 7, with the uniform prior.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    >>> loss, entropy = smoothed_cross_entropy(logits, torch.tensor([3, PAD]), smoothing=0.1)
    >>> loss.item() == entropy.item() == torch.tensor(4.0).log().item()
    True
    """
    return _SmoothedCrossEntropy.apply(logits, target, smoothing)  # type: ignore[return-value]


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # [..., V]
        counts = target != PAD  # [...]
        entropy = -(log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1) * counts).sum()
        loss = entropy * (1 - smoothing)
        if smoothing:
            loss = loss - (log_p.mean(-1) * counts).sum() * smoothing
        ctx.save_for_backward(log_p, target, counts)
        ctx.smoothing, ctx.dtype = smoothing, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return loss, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        log_p, target, counts = ctx.saved_tensors
        # In place: the gradient takes the memory of log_p. Torch refuses a second backward through it.
        gradient = log_p.exp_()
        if ctx.smoothing:
            gradient -= ctx.smoothing / gradient.shape[-1]
        picked = target.unsqueeze(-1)
        gradient.scatter_add_(-1, picked, torch.full_like(picked, ctx.smoothing - 1, dtype=gradient.dtype))
        gradient *= (counts * grad).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None
