"""The learning rate as a function of how many updates were made: nothing to save, nothing to restore."""

from __future__ import annotations

from regard.translation.settings import InverseSquareRoot, Plateau, TrainingSettings


def learning_rate(settings: TrainingSettings, update: int, reductions: int = 0) -> float:
    """The rate of the next update, after `update` updates and `reductions` reductions on a plateau.

    With warm-up over W updates, update n = 1, 2, ... has lr · min(1, n/W), times √(W/n) behind the warm-up for
    `inverse-sqrt` (W = 1 without one), or times factor^reductions for `plateau`.

    Source: Vaswani et al. (2017), section 5.3, equation 3, with its peak given instead of d_model.

    >>> settings = TrainingSettings(learning_rate=0.1, warmup_steps=4, decay=InverseSquareRoot())
    >>> [round(learning_rate(settings, update), 3) for update in (0, 1, 3, 15)]
    [0.025, 0.05, 0.1, 0.05]
    """
    number, warmup = update + 1, max(1, settings.warmup_steps)
    rate = settings.learning_rate * min(1.0, number / warmup)
    if isinstance(settings.decay, InverseSquareRoot):
        return rate * (warmup / max(number, warmup)) ** 0.5
    if isinstance(settings.decay, Plateau):
        return rate * settings.decay.factor**reductions
    return rate
