"""Export a run for translating alone, its weights in half precision."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from regard.errors import CheckpointError, ConfigurationError, nearest
from regard.translation.checkpoint import load_weights, save_tensors
from regard.translation.experiment import Experiment
from regard.translation.run_folder import RunFolder, Which
from regard.utils.atomic_files import atomic_write

Precision = Literal["bfloat16", "float16", "float32"]
"""Of the weights in the file; whoever loads them computes in single precision."""


def export(folder: str | Path, to: str | Path, *, which: Which = "best", dtype: Precision = "bfloat16") -> Path:
    """Write the files that translating needs into another folder, and return its path.

    The folder gets experiment.yaml, both vocabularies and the chosen weights, as best.safetensors; it is made if it is
    not there, and what else it holds stays. All that takes the folder of a run takes it, but that no training goes on
    from it. The experiment's `data.folder` is left out: it says where the text was on this machine.

    Raises:
        CheckpointError: the run lacks a file; a weight is too large for `dtype`; the folder holds a run of its own, or
            cannot be written.
        ConfigurationError: there is no such `which` or `dtype`.
    """
    run, exported = RunFolder(Path(folder)), RunFolder(Path(to))
    if dtype not in get_args(Precision):
        raise ConfigurationError(f"dtype is {dtype!r}; {nearest(dtype, get_args(Precision))}")
    weights = run.weights(which)
    if exported.last.exists() or exported.state.exists():
        raise CheckpointError(
            f"{exported.path} holds a training run, which an export would damage; name another folder"
        )
    tensors, header = load_weights(weights)
    rounded = _rounded(tensors, getattr(torch, dtype), weights)
    experiment = Experiment.load(run.experiment)
    data = experiment.data.model_copy(update={"folder": Path()})
    try:
        exported.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {exported.path} ({error.strerror})") from None
    experiment.model_copy(update={"data": data}).save(exported.experiment)
    for name in (run.source_vocabulary.name, run.target_vocabulary.name):
        with atomic_write(exported.path / name) as partial:
            shutil.copyfile(run.path / name, partial)
    save_tensors(rounded, exported.best, {**header, "exported": {"weights": which, "dtype": dtype}})
    return exported.path


def _rounded(tensors: dict[str, Tensor], dtype: torch.dtype, path: Path) -> dict[str, Tensor]:
    """Cast floating-point tensors to a dtype; a tensor with several names stays shared."""
    by_identity: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if tensor.is_floating_point() and not bool(rounded.isfinite().all()):
            largest = tensor.abs().max().item()
            state = f"as large as {largest:.3g}" if math.isfinite(largest) else "that are no finite numbers"
            raise CheckpointError(
                f"{path} has weights {state} in {name}, and {str(dtype).removeprefix('torch.')} goes to "
                f"{torch.finfo(dtype).max:.3g}: choose another dtype, or other weights"
            )
        by_identity[id(tensor)] = rounded
    return {name: by_identity[id(tensor)] for name, tensor in tensors.items()}
