"""Recurrent translators before and after native steps: a training step, a step of decoding, and a whole search.

Peer: the same model by modules of torch and calls of `regard.attention`, whose decoding steps compute the attention
weights in a second pass. Models of recipes/multi30k-*.yaml with random weights, sentences of random tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import _timing
import torch
from _report import agree, met, milliseconds, table, times
from torch import Tensor

from regard.models import RecurrentTranslator
from regard.models.recurrent import decoders
from regard.translation import search as search_module
from regard.translation.batches import Batch
from regard.translation.build_model import build_model
from regard.translation.experiment import Experiment
from regard.translation.search import beam_search
from regard.translation.training_loss import training_loss
from regard.translation.vocabulary import BEGIN, END

RECIPES = Path(__file__).parent.parent / "recipes"
VOCABULARY, LONGEST, ROUNDS = 5000, 15, 7
BATCH = 2000 // (LONGEST + 1)
"""Sentences of a training batch: 2,000 tokens of the recipe, padding included."""
SENTENCES = 64
"""Sentences that are translated together, as `regard translate` does."""
GOALS = {("bahdanau", "training step"): 1.5, ("bahdanau", "translating"): 2.0}


@contextmanager
def before() -> Iterator[None]:
    """Steps without native code, each with its weights, and the best words of each row by torch."""
    with (
        patch.object(decoders, "native_decoder", lambda *_, **__: None),
        patch.object(decoders, "packed_weights", lambda *_: None),
        patch.object(RecurrentTranslator, "step", RecurrentTranslator.observe_step),
        patch.object(search_module, "top_entries", top_entries_of_torch),
    ):
        yield


def top_entries_of_torch(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    best = logits.topk(count)
    return best.values, best.indices, logits.logsumexp(-1, keepdim=True)


def sentences(count: int) -> tuple[Tensor, Tensor]:
    """Tokens and lengths, from half the longest on."""
    lengths = torch.randint(LONGEST // 2, LONGEST + 1, (count,))
    tokens = torch.randint(END + 1, VOCABULARY, (count, LONGEST))
    lengths[0] = LONGEST
    return tokens.masked_fill(torch.arange(LONGEST) >= lengths[:, None], 0), lengths


def training_step(model: RecurrentTranslator) -> Callable[[], list[Tensor]]:
    """Loss, gradients and update of a batch; it returns the loss and the decoder's gradients."""
    source, lengths = sentences(BATCH)
    target, _ = sentences(BATCH)
    begin, end = torch.full((BATCH, 1), BEGIN), torch.full((BATCH, 1), END)
    ends, begins = torch.cat([target, end], 1), torch.cat([begin, target], 1)
    batch = Batch(source, lengths, begins, ends, int((ends > 0).sum()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)

    def run() -> list[Tensor]:
        torch.manual_seed(1)  # of the dropout
        optimizer.zero_grad()
        loss, _ = training_loss(model, batch, 0.1)
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(each.grad.clone() for each in model.decoder.parameters() if each.grad is not None)]

    return run


@torch.no_grad()
def decoding_step(model: RecurrentTranslator, rows: int) -> Callable[[], list[Tensor]]:
    """One step of so many rows: the logits."""
    source, lengths = sentences(rows)
    memory = model.encode(source, lengths)
    state, tokens = model.start(memory), source[:, 0]

    @torch.no_grad()
    def run() -> list[Tensor]:
        return [model.step(tokens, state, memory).logits]

    return run


def search(model: RecurrentTranslator, experiment: Experiment, count: int, beam: int) -> Callable[[], list[Tensor]]:
    """A whole search; it returns the scores."""
    source, lengths = sentences(count)
    # Random weights end no sentence: translations are cut at 6 / 15 of the source's length and 10 more tokens.
    settings = experiment.search.model_copy(update={"beam": beam, "max_length_ratio": 0.4})

    def run() -> list[Tensor]:
        found = beam_search(model, source, lengths, settings, observe=False)
        return [torch.tensor([best[0].score for best in found])]

    return run


def recurrent_model(experiment: Experiment) -> RecurrentTranslator:
    model = build_model(experiment.model, VOCABULARY, VOCABULARY)
    assert isinstance(model, RecurrentTranslator)
    return model


def works(name: str) -> dict[str, tuple[str, Callable[[], list[Tensor]], int]]:
    """What is measured of a model: its goal's name, the work and its calls a round."""
    experiment = Experiment.load(RECIPES / f"multi30k-{name}.yaml", [])
    torch.manual_seed(1)
    training, model = (recurrent_model(experiment) for _ in range(2))
    model.eval()
    found = {f"training step, {BATCH} sentences": ("training step", training_step(training), 1)}
    for rows in (1, 5, SENTENCES, 5 * SENTENCES):
        found[f"decoding step, {rows} rows"] = ("", decoding_step(model, rows), 10)
    for count, beam in ((1, 1), (1, 5), (SENTENCES, 1), (SENTENCES, 5)):
        work = search(model, experiment, count, beam)
        goal = "translating" if (count, beam) == (SENTENCES, 5) else ""
        found[f"translating {count}, beam {beam}"] = (goal, work, 1)
    return found


def main() -> None:
    print(_timing.machine())
    rows = []
    for name in ("bahdanau", "luong"):
        for what, (goal, work, calls) in works(name).items():

            def old(work: Callable = work) -> list[Tensor]:
                with before():
                    return work()

            agree(f"{name}, {what}", work(), old(), within=1e-3)
            spent = _timing.in_turn({"before": old, "after": work}, rounds=ROUNDS, calls=calls)
            ratio, least = spent["before"] / spent["after"], GOALS.get((name, goal))
            row = [name, what, milliseconds(spent["before"]), milliseconds(spent["after"]), times(ratio)]
            rows.append([*row, met(ratio, least) if least else ""])
    columns = ["decoder", "work", "before", "after", "ratio", "goal"]
    table("Recurrent translators, float32 (`benchmarks/recurrent.py`)", columns, rows)


if __name__ == "__main__":
    main()
