"""Runs a small training again and again, each time killed at another moment, and resumes it: for test_resume.py.

    python kill_and_resume.py FOLDER EVENT...

An event is a number: the process kills itself when that many things have happened in it (updates begun, validation
batches begun, files about to be renamed to their place, files just renamed); 0 is the last of all. How many there are
depends on the processor, by whose roundings a validation is better than another or not. Prints, for each event, what
was different from the unbroken run. Torch and Lightning are loaded once; each run is a fork of this process, which
itself never computes.
"""

import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

warnings.simplefilter("error")

import safetensors.torch  # noqa: E402, F401 (each fork would load it, as the two that follow)
import torch  # noqa: E402 (a warning at import is an error, too)
import torch._dynamo  # noqa: E402 (by the first optimiser, for seconds)
import torch.utils.tensorboard  # noqa: E402 (by the first log, for half of the time of a run)
from small_runs import experiment, write_text  # noqa: E402 (beside this script)

from regard.translation.checkpoint import load_state, load_weights  # noqa: E402
from regard.translation.lightning_module import Training  # noqa: E402
from regard.translation.training import train  # noqa: E402
from regard.utils import atomic_files  # noqa: E402

TRAINING = {
    "warmup_steps": 3,
    "learning_rate": 0.5,  # too high: validations get worse, so that best, patience and the plateau have work
    "decay": {"kind": "plateau", "patience": 0},
    "patience": 9,
    "label_smoothing": 0.1,
    "validate_every": 4,
    "save_every": 3,
}


def in_a_process(work: Callable[[], None]) -> int:
    """How a fork that does the work ended: its exit status, or minus the number of the signal that killed it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        torch.set_num_threads(1)
        work()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def count_events(happen: Callable[[str], None]) -> None:
    """Call `happen` at each event of this process."""
    step, validate, replace = Training.training_step, Training.validation_step, os.replace

    def counted_step(self, batch, batch_idx):
        happen("update")
        return step(self, batch, batch_idx)

    def counted_validate(self, batch, batch_idx):
        happen("validation")
        return validate(self, batch, batch_idx)

    def counted_replace(partial, path):
        happen(f"before {Path(path).name}")
        replace(partial, path)
        happen(f"after {Path(path).name}")

    Training.training_step, Training.validation_step = counted_step, counted_validate
    atomic_files.os.replace = counted_replace


def killed_at(event: int, number: int) -> Callable[[str], None]:
    numbers = itertools.count(1)

    def happen(what: str) -> None:
        if next(numbers) == number:
            say(f"{event}: killed at {what}")
            os.kill(os.getpid(), signal.SIGKILL)

    return happen


def run(home: Path, folder: Path, happen: Callable[[str], None]) -> None:
    count_events(happen)
    result = train(experiment(home, **TRAINING), folder)
    (folder / "result").write_text(repr((result.best_score, result.epochs, result.updates)))


def compare(event: int, unbroken: Path, resumed: Path) -> None:
    found = differences(outcome(unbroken), outcome(resumed))
    say(f"{event}: different: {found[:5]}" if found else f"{event}: the same")


def outcome(folder: Path) -> dict[str, object]:
    """All that has to be the same: weights and headers, optimiser, progress, result; not the seconds."""
    state = load_state(folder / "state" / "training.safetensors")
    state["state_dict"]["_extra_state"]["progress"].pop("seconds")
    kept = {key: state[key] for key in ("state_dict", "optimizer_states")}
    weights = {name: load_weights(folder / f"{name}.safetensors") for name in ("best", "last")}
    return {"state": kept, **weights, "result": (folder / "result").read_text()}


def differences(one: object, other: object, place: str = "") -> list[str]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one, other) else [place]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{place}/{index}")]
    return [] if one == other else [f"{place}: {one!r} and {other!r}"]


def unbroken(home: Path) -> None:
    """A run to its end, which prints its events and leaves their number in a file."""
    events: list[str] = []

    def happen(what: str) -> None:
        events.append(what)
        say(what)

    run(home, home / "unbroken", happen)
    (home / "events").write_text(str(len(events)))


def kill_and_resume(home: Path, event: int) -> None:
    folder = home / f"killed-{event}"
    killed = in_a_process(partial(run, home, folder, killed_at(event, event or int((home / "events").read_text()))))
    resumed = in_a_process(partial(run, home, folder, lambda what: say(f"{event}: resumed with {what}")))
    say(f"{event}: ended with {killed}, then {resumed}")
    in_a_process(partial(compare, event, home / "unbroken", folder))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    home = Path(sys.argv[1])
    write_text(home)
    ended = in_a_process(partial(unbroken, home))
    say(f"unbroken: ended with {ended}")
    for event in sys.argv[2:]:
        kill_and_resume(home, int(event))


if __name__ == "__main__":
    main()
