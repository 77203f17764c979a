"""Averages of several checkpoints of one run, and deletion of the checkpoints that are no longer needed for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.checkpoint import load_weights, read_header, save_tensors
from regard.translation.run_folder import RunFolder


def average(folder: str | Path, *, last: int | None = None, best: int | None = None) -> Path:
    """Average weights that a run has saved, write average.safetensors into its folder, and return its path.

    `last` takes the latest ones, `best` those that validated best; with neither it is all that are there. A run keeps
    weights where its settings have `training.keep_last` or `training.keep_best`.

    Raises:
        ConfigurationError: both are given, or a number below 1.
        CheckpointError: the run has kept fewer, or none, or they do not fit together; the disk is full.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 6.1, who average the last 5 checkpoints, or 20.
    """
    run = RunFolder(Path(folder))
    if last is not None and best is not None:
        raise ConfigurationError("average takes the last weights or the best ones: give last= or best=, not both")
    count = last if last is not None else best
    if count is not None and count < 1:
        raise ConfigurationError(f"the number of weights to average is {count}; it needs to be at least 1")
    kept = _saved_files(run)
    if not kept or (count is not None and count > len(kept)):
        raise CheckpointError(
            f"{run.path} has kept {len(kept) or 'no'} weights{f', and {count} were asked for' if count else ''}: a run "
            "keeps those of its stops where it is trained with training.keep_last=N or training.keep_best=N"
        )
    chosen = kept if count is None else kept[-count:] if best is None else _by_score(kept)[:count]
    tensors, header = mean(chosen)
    save_tensors(tensors, run.average, header)
    return run.average


def mean(paths: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Mean of the weights in several files, and the header of the last file with the updates of all.

    What is no floating-point number has to be the same in all. Sums are in double precision.

    Raises:
        CheckpointError: a file cannot be read, or is of another model than the first.
    """
    first, header = load_weights(paths[0])
    sums = {name: tensor.double() for name, tensor in _one_name_each(first).items()}
    updates = [header.get("update")]
    for path in paths[1:]:
        tensors, header = load_weights(path)
        _check_alike(paths[0], first, path, tensors)
        updates.append(header.get("update"))
        for name, total in sums.items():
            total += tensors[name]
    by_identity = {
        id(first[name]): (total / len(paths)).to(first[name].dtype) if first[name].is_floating_point() else first[name]
        for name, total in sums.items()
    }
    return {name: by_identity[id(tensor)] for name, tensor in first.items()}, {**header, "averaged_updates": updates}


def delete_old_weights(run: RunFolder, keep_last: int, keep_best: int) -> None:
    """Delete saved weights that are neither among the last nor among the best."""
    kept = _saved_files(run)
    staying = {*kept[len(kept) - min(keep_last, len(kept)) :], *_by_score(kept)[:keep_best]}
    for path in kept:
        if path not in staying:
            path.unlink()


def _saved_files(run: RunFolder) -> list[Path]:
    """Files of the weights saved during a run, earliest first."""
    return sorted(run.saved_weights.glob("update-*.safetensors"))


def _by_score(paths: Sequence[Path]) -> list[Path]:
    """Files sorted by validation loss, best first; without validation, latest first."""
    scores = [read_header(path).get("scores", {}).get("validation_loss", 0.0) for path in paths]
    return [paths[place] for place in sorted(range(len(paths)), key=lambda place: (scores[place], -place))]


def _one_name_each(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under one of its names, the first."""
    names: dict[int, str] = {}
    return {name: tensor for name, tensor in tensors.items() if names.setdefault(id(tensor), name) == name}


def _check_alike(first: Path, one: dict[str, Tensor], path: Path, other: dict[str, Tensor]) -> None:
    for name in {**one, **other}:
        if name not in one or name not in other or one[name].shape != other[name].shape:
            raise CheckpointError(f"{path} is of another model than {first}: they differ in {name}")
        if not one[name].is_floating_point() and not torch.equal(one[name], other[name]):
            raise CheckpointError(f"{path} and {first} have different numbers in {name}, which cannot be averaged")
