"""A training step with coverage, a pointer, and guided alignment, beside the same model without them.

Peer: the decoder of recipes/multi30k-bahdanau.yaml on random sentences, whose steps are one native call; and the same
by modules of torch and one call of attention for each step, as coverage needs them.
"""

from collections.abc import Callable
from typing import Any

import _timing
import recurrent
import torch
from _report import milliseconds, table, times

from regard.translation.batches import Batch
from regard.translation.build_model import build_model
from regard.translation.experiment import Experiment
from regard.translation.training_loss import training_loss
from regard.translation.vocabulary import BEGIN
from regard.translation.weight_losses import WeightLosses

SENTENCES, ROUNDS = 64, 7
KINDS: dict[str, tuple[dict[str, Any], WeightLosses | None]] = {
    "plain": ({}, None),
    "coverage": ({"decoder": {"kind": "bahdanau", "coverage": "sum"}}, None),
    "coverage and its loss": ({"decoder": {"kind": "bahdanau", "coverage": "sum"}}, WeightLosses(coverage=1.0)),
    "pointer": ({"pointer": True}, None),
    "guided alignment": ({}, WeightLosses(alignment=0.05)),
}


def batch() -> Batch:
    """Sentences with a link from each target token to a source token."""
    source, lengths = recurrent.sentences(SENTENCES)
    target, _ = recurrent.sentences(SENTENCES)
    begins = torch.cat([torch.full((SENTENCES, 1), BEGIN), target], 1)
    ends = torch.cat([target, torch.zeros(SENTENCES, 1, dtype=torch.int64)], 1)
    rows, steps = (ends > 0).nonzero(as_tuple=True)
    links = torch.stack([rows, steps, torch.minimum(steps, lengths[rows] - 1)], 1)
    return Batch(source, lengths, begins, ends, int((ends > 0).sum()), links)


def training_step(kind: str, given: Batch) -> Callable[[], None]:
    """Loss and gradients of a batch."""
    model, losses = KINDS[kind]
    told = Experiment.load(recurrent.RECIPES / "multi30k-bahdanau.yaml").model
    settings = type(told).model_validate({**told.model_dump(mode="json"), **model})
    torch.manual_seed(1)
    built = build_model(settings, recurrent.VOCABULARY, recurrent.VOCABULARY)

    def run() -> None:
        built.zero_grad()
        training_loss(built, given, 0.1, losses)[0].backward()

    return run


def main() -> None:
    """Measure all kinds in turn."""
    print(_timing.machine())
    torch.set_num_threads(1)
    torch.manual_seed(1)
    given = batch()
    works = {kind: training_step(kind, given) for kind in KINDS}

    def modules() -> None:
        with recurrent.before():
            works["plain"]()

    works = {"plain": works["plain"], "plain, by modules": modules, **{k: w for k, w in works.items() if k != "plain"}}
    for work in works.values():
        work()
    spent = _timing.in_turn(works, rounds=ROUNDS)
    rows = [
        [kind, milliseconds(took), times(took / spent["plain"]), times(took / spent["plain, by modules"])]
        for kind, took in spent.items()
    ]
    table(
        f"Training step, {SENTENCES} sentences, one thread (`benchmarks/copying.py`)",
        ["decoder", "time", "of plain", "of modules"],
        rows,
    )


if __name__ == "__main__":
    main()
