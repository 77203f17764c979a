"""The loss of training: label-smoothed cross entropy, in few passes over the logits, or a few logits at a time."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from regard.core.onednn import batched_linear
from regard.models.decoded_target import DecodedTarget, SourceHead
from regard.translation.batches import Batch
from regard.translation.vocabulary import PAD
from regard.translation.weight_losses import WeightLosses

LOGITS_AT_ONCE = 2**21
"""The most logits in memory at a time: a processor's caches hold as many, and matrix products gain by no more."""


class Output(Protocol):
    """An output layer: logits = features [..., F] · weight [V, F]ᵀ + bias [V], the bias optional."""

    @property
    def weight(self) -> Tensor:
        """The weight, [V, F]."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """The bias, [V]."""
        ...


@runtime_checkable
class Projecting(Protocol):
    """A model whose logits are `output(features)` of the target that it decodes, or a mixture with copied tokens."""

    @property
    def output(self) -> Output:
        """The output layer."""
        ...

    def decode_target(
        self, source: Tensor, source_lengths: Tensor, target: Tensor, *, observe: SourceHead | None = None
    ) -> DecodedTarget:
        """Input of the output layer, [B, T, F], and the weights of an attention that is observed."""
        ...


class CopyingModel(Protocol):
    """A `Projecting` model that copies: its logits come of all that it decoded, and of the source."""

    def logits(self, decoded: DecodedTarget, source: Tensor | None) -> Tensor:
        """Log-probabilities of the mixture, [B, T, V]."""
        ...


def training_loss(
    model: nn.Module, batch: Batch, smoothing: float, weight_losses: WeightLosses | None = None
) -> tuple[Tensor, Tensor]:
    """The two sums of `smoothed_cross_entropy` for a model and a batch; the first with the losses of weights added.

    Of a model that has `decode_target` and `output` the logits are never all in memory, and those of padding are not
    made.
    """
    if not isinstance(model, Projecting):
        logits = model(batch.source, batch.source_lengths, batch.target_input)  # [B, T, V]
        return smoothed_cross_entropy(logits, batch.target_output, smoothing)
    observed = None if weight_losses is None else weight_losses.observed
    decoded = model.decode_target(batch.source, batch.source_lengths, batch.target_input, observe=observed)
    if decoded.gate is not None:
        loss, entropy = copying_cross_entropy(cast("CopyingModel", model), decoded, batch, smoothing)
    else:
        there, output = batch.target_output != PAD, model.output
        features, target = decoded.features[there], batch.target_output[there]
        loss, entropy = projected_cross_entropy(features, output.weight, output.bias, target, smoothing)
    if weight_losses is not None and observed is not None and decoded.weights is not None:
        loss = loss + weight_losses.of(decoded.weights, batch)
    return loss, entropy


def copying_cross_entropy(
    model: CopyingModel, decoded: DecodedTarget, batch: Batch, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The two sums of `smoothed_cross_entropy` for a translator that copies, a few target tokens at a time.

    Those of padding are left out. For the gradient the log-probabilities are computed again. Smoothing is over the
    words of the vocabulary, and not over those of a source that it lacks.
    """

    def part(source: Tensor, target: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return smoothed_cross_entropy(model.logits(DecodedTarget(*parts), source), target, smoothing, words)

    words = cast("Projecting", model).output.weight.shape[0]
    there = batch.target_output != PAD
    rows, _ = there.nonzero(as_tuple=True)
    # Each target token is a sentence of one, with a source of its own.
    of_tokens = (
        tensor[there].unsqueeze(1) for tensor in (decoded.features, decoded.weights, decoded.gate) if tensor is not None
    )
    tensors = batch.source[rows], batch.target_output[there].unsqueeze(1), *of_tokens
    tokens = max(1, LOGITS_AT_ONCE // words)
    sums = [
        checkpoint(part, *parts, use_reentrant=False, preserve_rng_state=False)
        for parts in zip(*(tensor.split(tokens) for tensor in tensors), strict=True)
    ]
    losses, entropies = zip(*sums, strict=True)
    return torch.stack(losses).sum(), torch.stack(entropies).sum()


def projected_cross_entropy(
    features: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The two sums of `smoothed_cross_entropy` for logits x Wᵀ + b, computed for a few rows at a time.

    Shapes: features x [N, F], weight W [V, F], bias b [V], target [N] without PAD. What the gradient needs is made of
    each part of the logits while it is there; so the loss has a first derivative and no second. Under autocast the
    products are in the narrow dtype, the sums in float32.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.eye(2)
    >>> loss, _ = projected_cross_entropy(x, weight, None, torch.tensor([1]), smoothing=0.0)
    >>> loss  # -log softmax(1, 2)[1]
    tensor(0.3133)
    """
    narrow = torch.is_autocast_enabled(features.device.type) and features.dtype != torch.float64
    dtype = torch.get_autocast_dtype(features.device.type) if narrow else weight.dtype
    with torch.autocast(features.device.type, enabled=False):
        return _ProjectedCrossEntropy.apply(  # type: ignore[return-value]
            features, weight, bias, target, smoothing, dtype, torch.is_grad_enabled()
        )


def smoothed_cross_entropy(
    logits: Tensor, target: Tensor, smoothing: float, words: int | None = None
) -> tuple[Tensor, Tensor]:
    """Σ (1-ε)·(-log p[target]) + ε·mean(-log p), and Σ -log p[target], over all targets that are not PAD.

    `logits` [..., V], `target` [...] int64. Both sums are in float32 at least; the second one, from which perplexity
    is taken, has no gradient. The mean is over the first `words` entries, None: all. Equal to torch's cross_entropy
    with label_smoothing, which needs two calls to give both and more passes over memory: on a CPU the logits of a large
    vocabulary are what a training step waits for.

    Source: Szegedy et al. (2016), "Rethinking the Inception Architecture", section 7, with the uniform prior.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0]])
    >>> loss, entropy = smoothed_cross_entropy(logits, torch.tensor([3, PAD]), smoothing=0.1)
    >>> loss.item() == entropy.item() == torch.tensor(4.0).log().item()
    True
    """
    words = logits.shape[-1] if words is None else words
    return _SmoothedCrossEntropy.apply(logits, target, smoothing, words)  # type: ignore[return-value]


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float, words: int) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # [..., V]
        counts = target != PAD  # [...]
        entropy = -(log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1) * counts).sum()
        loss = entropy * (1 - smoothing)
        if smoothing:
            loss = loss - (log_p[..., :words].mean(-1) * counts).sum() * smoothing
        ctx.save_for_backward(log_p, target, counts)
        ctx.smoothing, ctx.words, ctx.dtype = smoothing, words, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return loss, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        log_p, target, counts = ctx.saved_tensors
        # In place: the gradient takes the memory of log_p. Torch refuses a second backward through it.
        gradient = log_p.exp_()
        if ctx.smoothing:
            gradient[..., : ctx.words] -= ctx.smoothing / ctx.words
        picked = target.unsqueeze(-1)
        gradient.scatter_add_(-1, picked, torch.full_like(picked, ctx.smoothing - 1, dtype=gradient.dtype))
        gradient *= (counts * grad).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: float,
        dtype: torch.dtype,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = _Parts(features.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), smoothing)
        wide = torch.promote_types(dtype, torch.float32)
        loss, entropy = features.new_zeros((), dtype=wide), features.new_zeros((), dtype=wide)
        rows = max(1, LOGITS_AT_ONCE // weight.shape[0])
        gradients = parts.no_gradients(wide) if wants_gradient else None
        for start in range(0, len(target), rows):
            part = slice(start, start + rows)
            more_loss, more_entropy = parts.add(part, target[part], gradients)
            loss += more_loss
            entropy += more_entropy
        if gradients is not None:
            parts.add_smoothing(gradients)
            ctx.save_for_backward(*gradients)
            ctx.dtypes = features.dtype, weight.dtype, bias is not None
        ctx.mark_non_differentiable(entropy)
        return loss, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias = ctx.saved_tensors
        of_features, of_weight, biased = ctx.dtypes
        return (
            (features * grad).to(of_features),
            (weight * grad).to(of_weight),
            (bias * grad).to(of_weight) if biased else None,
            None,
            None,
            None,
            None,
        )


class _Parts:
    """Loss and gradients of a slice of rows at a time.

    The gradient of a row's logits is p - (1-ε)·[target] - ε/V. Its last term is the same for all, and what the logits
    sum to is known from the sum of the weights; so smoothing takes no pass over the logits.
    """

    def __init__(self, features: Tensor, weight: Tensor, bias: Tensor | None, smoothing: float) -> None:
        self.features, self.weight, self.bias = features, weight, bias
        self.smoothing, self.words = smoothing, weight.shape[0]
        wide = torch.promote_types(features.dtype, torch.float32)
        self.weight_sum = weight.sum(0, dtype=wide)  # [F]
        self.bias_sum = 0.0 if bias is None else bias.sum(dtype=wide)

    def no_gradients(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate the gradients of features, weight and bias."""
        return (
            torch.empty_like(self.features, dtype=wide),
            torch.zeros_like(self.weight, dtype=wide),
            self.weight.new_zeros(self.words, dtype=wide),
        )

    def add(
        self, part: slice, target: Tensor, gradients: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Loss and cross entropy of some rows; adds their gradients, without the smoothing term, to `gradients`."""
        x, picked = self.features[part], target.unsqueeze(-1)
        logits = batched_linear(x, self.weight, self.bias)  # [n, V]
        log_p = logits.log_softmax(-1, dtype=self.weight_sum.dtype)
        said = log_p.gather(-1, picked)
        entropy = -said.sum()
        loss = entropy
        if self.smoothing:
            log_z = logits.gather(-1, picked).to(said.dtype) - said  # [n, 1]
            mean = (x.to(said.dtype) @ self.weight_sum + self.bias_sum) / self.words - log_z.squeeze(-1)
            loss = (1 - self.smoothing) * entropy - self.smoothing * mean.sum()
        if gradients is not None:
            of_features, of_weight, of_bias = gradients
            p = log_p.exp_()
            p.scatter_add_(-1, picked, torch.full_like(picked, self.smoothing - 1, dtype=p.dtype))
            if self.bias is not None:
                of_bias += p.sum(0)
            p = p.to(x.dtype)
            of_features[part] = batched_linear(p, self.weight.T)
            if p.dtype == of_weight.dtype:
                of_weight.addmm_(p.T, x)
            else:
                of_weight += p.T @ x
        return loss, entropy

    def add_smoothing(self, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the smoothing term -ε/V to the gradients of all rows."""
        if not self.smoothing:
            return
        of_features, of_weight, of_bias = gradients
        share = self.smoothing / self.words
        of_features -= share * self.weight_sum
        of_weight -= share * self.features.sum(0, dtype=of_weight.dtype)
        of_bias -= share * len(self.features)
