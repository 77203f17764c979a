import pytest

from regard.translation.lightning_module import learning_rate
from regard.translation.settings import ConstantDecay, InverseSquareRootDecay, PlateauDecay, TrainingSettings


def rates(settings: TrainingSettings, updates: range) -> list[float]:
    return [learning_rate(settings, update) for update in updates]


def test_without_warm_up_or_decay_the_rate_stays():
    assert rates(TrainingSettings(learning_rate=0.3), range(3)) == [0.3] * 3


def test_warm_up_rises_linearly_to_the_rate_and_never_starts_at_nothing():
    settings = TrainingSettings(learning_rate=0.4, warmup_steps=4, decay=ConstantDecay())
    assert rates(settings, range(6)) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_inverse_square_root_falls_from_the_end_of_the_warm_up():
    settings = TrainingSettings(learning_rate=0.4, warmup_steps=4, decay=InverseSquareRootDecay())
    assert rates(settings, range(3, 16, 12)) == pytest.approx([0.4, 0.2])
    without = TrainingSettings(learning_rate=0.4, decay=InverseSquareRootDecay())
    assert rates(without, range(0, 4, 3)) == pytest.approx([0.4, 0.2])


def test_reductions_multiply_on_a_plateau_only():
    plateau = TrainingSettings(learning_rate=0.4, decay=PlateauDecay(factor=0.5))
    assert learning_rate(plateau, 9, reductions=2) == pytest.approx(0.1)
    assert learning_rate(TrainingSettings(learning_rate=0.4), 9, reductions=2) == pytest.approx(0.4)
