"""Oracles of the normalizers: weights as in the papers, by loops, bisection and closed forms."""

import torch
from torch import Tensor

from regard import normalizers
from regard.core.normalizer import Normalizer
from regard.testing import Oracle

INFINITY = float("inf")
LOW, TINY = -6e4, 1e-7
"""Numbers that half precision has."""


class NormalizerOracle(Oracle):
    """The weights of a normalizer without log-sum-exp; its row numbers are not compared."""

    def __init__(self, normalizer: Normalizer) -> None:
        self.normalizer = normalizer

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        if not scores.shape[-1]:
            return scores, scores.sum(-1)
        exists = scores > -INFINITY
        finite = torch.where(exists, scores, 0.0)
        weights = torch.where(exists, self.of_row(finite, exists), 0.0)
        return weights, weights.sum(-1) * 0.0

    def of_row(self, scores: Tensor, exists: Tensor) -> Tensor:
        """The weights, anything where `exists` is False; the scores are 0 there."""
        raise NotImplementedError


class SigmoidOracle(NormalizerOracle):
    """1 / (1 + e^-(s + b)) = (1 + tanh((s + b) / 2)) / 2, with a number b."""

    def __init__(self, bias: float) -> None:
        super().__init__(normalizers.Sigmoid(bias))
        self.bias = bias

    def of_row(self, scores: Tensor, exists: Tensor) -> Tensor:
        return (1.0 + ((scores + self.bias) / 2.0).tanh()) / 2.0


class StickBreakingOracle(NormalizerOracle):
    """One key after another, from the last."""

    def of_row(self, scores: Tensor, exists: Tensor) -> Tensor:
        left = torch.ones_like(scores[..., 0])
        taken = []
        for at in reversed(range(scores.shape[-1])):
            share = torch.where(exists[..., at], torch.sigmoid(scores[..., at]), 0.0)
            taken.append(left * share)
            left = left * (1.0 - share)
        return torch.stack(taken[::-1], -1)


class LinearChainOracle(NormalizerOracle):
    """Probabilities of both states by messages from both ends, over the keys that exist."""

    def __init__(self, transitions: list[list[float]]) -> None:
        super().__init__(normalizers.LinearChain(torch.tensor(transitions)))
        self.transitions = transitions

    def of_row(self, scores: Tensor, exists: Tensor) -> Tensor:
        across = torch.tensor(self.transitions, dtype=scores.dtype, device=scores.device)
        states = torch.stack([torch.zeros_like(scores), scores], -1)  # [..., n, 2]
        before = self._passed(states, exists, across)
        after = self._passed(states.flip(-2), exists.flip(-1), across.T).flip(-2)
        return (states + before + after).softmax(-1)[..., 1]

    def _passed(self, states: Tensor, exists: Tensor, across: Tensor) -> Tensor:
        message, found = torch.zeros_like(states[..., 0, :]), []
        for at in range(states.shape[-2]):
            found.append(message)
            passed = torch.logsumexp((states[..., at, :] + message).unsqueeze(-1) + across, -2)
            message = torch.where(exists[..., at, None], passed, message)
        return torch.stack(found, -2)


class TopOracle(NormalizerOracle):
    """Softmax over what no k other scores are larger than."""

    def __init__(self, k: int) -> None:
        super().__init__(normalizers.TopScores(k))
        self.k = k

    def of_row(self, scores: Tensor, exists: Tensor) -> Tensor:
        hidden = scores.masked_fill(~exists, -INFINITY)
        larger = (hidden.unsqueeze(-2) > hidden.unsqueeze(-1)).sum(-1)
        chosen = exists & (larger < self.k)
        peak = hidden.detach().amax(-1, keepdim=True).clamp(min=LOW)
        exponentials = torch.where(chosen, (scores - peak).exp(), 0.0)
        total = exponentials.sum(-1, keepdim=True)
        return exponentials / torch.where(total > 0, total, 1.0)


class EntmaxOracle(NormalizerOracle):
    """The threshold by closed forms on sorted scores (α = 2, 1.5), or by bisection in float64 (other α)."""

    def __init__(self, normalizer: Normalizer, alpha: float) -> None:
        super().__init__(normalizer)
        self.alpha = alpha

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([scores, sinks.expand(scores.shape[:-1]).unsqueeze(-1)], -1)
        weights, numbers = super().weights(whole, sinks)
        return weights[..., :-1], numbers

    def of_row(self, scores: Tensor, exists: Tensor) -> Tensor:
        scaled = ((self.alpha - 1.0) * scores).masked_fill(~exists, -INFINITY)
        peak = scaled.detach().amax(-1, keepdim=True).clamp(min=LOW)
        scaled = scaled - peak
        bisected = self._bisected(scaled.detach().double())
        support = scaled.detach().double() > bisected
        kept = torch.where(support, scaled, 0.0)
        count = support.sum(-1, keepdim=True).clamp(min=1).to(scaled.dtype)
        power = 1.0 / (self.alpha - 1.0)
        if self.alpha == 2.0:
            threshold = (kept.sum(-1, keepdim=True) - 1.0) / count
        elif self.alpha == 1.5:
            mean = kept.sum(-1, keepdim=True) / count
            spread = torch.where(support, (kept - mean).square(), 0.0).sum(-1, keepdim=True)
            threshold = mean - ((1.0 - spread).clamp(min=TINY) / count).sqrt()
        else:
            threshold = bisected.to(scaled.dtype)
            for _ in range(2):
                above = torch.where(support, kept - threshold, 1.0).clamp(min=TINY)
                value = torch.where(support, above**power, 0.0).sum(-1, keepdim=True) - 1.0
                slope = torch.where(support, power * above ** (power - 1.0), 0.0).sum(-1, keepdim=True)
                threshold = threshold + value / slope.clamp(min=TINY)
        above = torch.where(support, kept - threshold, 1.0).clamp(min=TINY)
        return torch.where(support, above**power, 0.0)

    def _bisected(self, scaled: Tensor) -> Tensor:
        low, high = torch.full_like(scaled[..., :1], -1.0), torch.zeros_like(scaled[..., :1])
        for _ in range(200):
            before, middle = (low, high), (low + high) / 2
            total = (scaled - middle).clamp(min=0.0).pow(1.0 / (self.alpha - 1.0)).sum(-1, keepdim=True)
            low, high = torch.where(total >= 1.0, middle, low), torch.where(total < 1.0, middle, high)
            if low.equal(before[0]) and high.equal(before[1]):  # and so after any further step
                break
        return low


class RatioOracle(NormalizerOracle):
    """n(s) / Σ d(s), with the log of the sum."""

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([scores, sinks.expand(scores.shape[:-1]).unsqueeze(-1)], -1)
        exists = whole > -INFINITY
        finite = torch.where(exists, whole, 0.0)
        above, below = (torch.where(exists, of(finite), 0.0) for of in (self.above, self.below))
        total = below.sum(-1, keepdim=True)
        positive = total > 0
        lse = torch.where(positive, torch.where(positive, total, 1.0).log(), -INFINITY).squeeze(-1)
        return (above / torch.where(positive, total, 1.0))[..., :-1], lse

    def above(self, scores: Tensor) -> Tensor:
        """n."""
        raise NotImplementedError

    def below(self, scores: Tensor) -> Tensor:
        """d."""
        return self.above(scores)


class SoftpickOracle(RatioOracle):
    def above(self, scores: Tensor) -> Tensor:
        return torch.expm1(scores).relu()

    def below(self, scores: Tensor) -> Tensor:
        return torch.expm1(scores).abs()


class ReluOracle(RatioOracle):
    def __init__(self, power: int) -> None:
        super().__init__(normalizers.ReLU(power))
        self.power = power

    def above(self, scores: Tensor) -> Tensor:
        return scores.relu() ** self.power


class Softmax1Oracle(Oracle):
    """e^s / (1 + Σ e^s)."""

    normalizer = normalizers.Softmax1()

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        peak = (
            scores.detach().amax(-1, keepdim=True).clamp(min=0.0) if scores.shape[-1] else scores.sum(-1, keepdim=True)
        )
        exponentials = (scores - peak).exp()
        total = exponentials.sum(-1, keepdim=True) + (-peak).exp()
        return exponentials / total, (total.log() + peak).squeeze(-1)


ORACLES: dict[str, Oracle] = {
    "sigmoid": SigmoidOracle(-1.0),
    "softmax1": Softmax1Oracle(),
    "softpick": SoftpickOracle(normalizers.Softpick()),
    "relu": ReluOracle(1),
    "squared relu": ReluOracle(2),
    "sparsemax": EntmaxOracle(normalizers.Sparsemax(), 2.0),
    "entmax 1.5": EntmaxOracle(normalizers.Entmax(1.5), 1.5),
    "entmax 1.3": EntmaxOracle(normalizers.Entmax(1.3), 1.3),
    "stick-breaking": StickBreakingOracle(normalizers.StickBreaking()),
    "top scores": TopOracle(3),
    "linear chain": LinearChainOracle([[0.5, -0.25], [0.0, 1.5]]),
}
