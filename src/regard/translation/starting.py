"""Training that starts from the weights of another run, to teach a model what it has not seen: fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.checkpoint import restore
from regard.translation.experiment import Experiment
from regard.translation.runs import RunFolder


@dataclass(frozen=True)
class Start:
    """The weights of a run, `weights`, that another run starts from, and its vocabularies, which lie beside them."""

    weights: Path

    @classmethod
    def of(cls, experiment: Experiment) -> Start | None:
        """What an experiment starts from; None where it starts afresh.

        Raises:
            CheckpointError: there are no such weights, or what belongs to them is not beside them.
            ConfigurationError: they are of another model, or their run had another vocabulary (the keys are named), or
                what stands beside them as experiment.yaml is not one.
        """
        if experiment.training.start_from is None:
            return None
        start = cls(experiment.training.start_from)
        if not start.weights.is_file():
            state = "is a folder" if start.weights.is_dir() else "is not there"
            raise CheckpointError(
                f"training.start_from: {start.weights} {state}; it needs to be a file of weights in the folder of a "
                "run, such as runs/NAME/best.safetensors"
            )
        if missing := start.run.missing_for(start.weights):
            raise CheckpointError(
                f"training.start_from: the folder {start.run.path} has no {', '.join(missing)}; weights need to lie "
                "beside what `regard train` or `regard export` wrote with them"
            )
        before = Experiment.load(start.run.experiment)
        changed = [
            key
            for key in before.differences(experiment)
            if key.startswith(("model", "vocabulary")) and not key.endswith("dropout")
        ]
        if changed:
            raise ConfigurationError(
                f"training.start_from: {start.weights} is of a run with other settings: {', '.join(changed)}; write "
                f"these as they are in {start.run.experiment}"
            )
        return start

    @property
    def run(self) -> RunFolder:
        """The folder that the weights are in."""
        return RunFolder(self.weights.parent)

    def put_into(self, model: nn.Module) -> None:
        """Give a model these weights, in its own precision.

        Raises:
            CheckpointError: they are damaged, or of another model.
        """
        restore(model, self.weights)
