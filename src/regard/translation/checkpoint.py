"""Checkpoints as safetensors: tensors and JSON, so that opening one executes no code.

`save_weights` and `restore` keep a model's weights under a small header; `save_state` and `load_state` keep a whole
nested training state. Every file is replaced in one step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.errors import CheckpointError
from regard.utils.safetensors_files import TensorFile, state_differences, write_tensors

FORMAT = 2
"""Version of the layout; raised when an older regard could not read the file. 2: what is shared is written once."""

LONGEST_SOURCE = "longest_source"
"""The entry of a translator's header that tells how many tokens the longest source has that it was trained on."""

EXTRA = "translation"
"""The extra of regard that installs safetensors."""


def save_weights(model: nn.Module, path: str | Path, header: Mapping[str, Any]) -> None:
    """Write the model's parameters and buffers, under their own names, and a JSON header.

    Raises:
        CheckpointError: the header is not plain values, the model's state is not tensors, or the disk is full; what
            the file held before is then untouched.
    """
    save_tensors(model.state_dict(), path, header)


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path, header: Mapping[str, Any]) -> None:
    """Write a state dict that was collected before, as `save_weights` writes that of a model."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the model's state {name!r} is {type(value).__name__}; weights need to be tensors")
    first: dict[tuple, str] = {}
    shared = {
        name: other for name, value in tensors.items() if (other := first.setdefault(_memory_key(value), name)) != name
    }
    kept = {name: value for name, value in tensors.items() if name not in shared}
    _write(Path(path), kept, {"regard": regard.__version__, **header, **({"shared": shared} if shared else {})})


def load_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, on the CPU, and the header; a tensor that has several names is one under all of them.

    Raises:
        CheckpointError: the file is missing, truncated, not safetensors, or was not written by regard.
    """
    tensors, header = _read(Path(path))
    shared = header.pop("shared", {})
    if not isinstance(shared, dict) or not all(isinstance(one, str) and one in tensors for one in shared.values()):
        raise CheckpointError(_damaged(Path(path), "it has names for tensors that it does not have"))
    tensors |= {name: tensors[other] for name, other in shared.items()}
    return tensors, header


def read_header(path: str | Path) -> dict[str, Any]:
    """Read the header without the tensors; raises as `load_weights` does."""
    header = _header(Path(path), TensorFile(Path(path), extra=EXTRA).metadata)
    header.pop("shared", None)
    return header


def restore(model: nn.Module, path: str | Path, *, grown: bool = False) -> dict[str, Any]:
    """Load the weights of a checkpoint into a model and return the header.

    The tables of a `grown` model may have more rows, of words that were added to its vocabulary: these keep theirs.

    Raises:
        CheckpointError: as `load_weights`, or the checkpoint is of another model; the message tells what differs.
    """
    tensors, header = load_weights(path)
    if grown:
        tensors = {name: _with_rows(tensor, model.state_dict().get(name)) for name, tensor in tensors.items()}
    _require_same_model(Path(path), found=tensors, needed=model.state_dict())
    model.load_state_dict(tensors)
    return header


def _with_rows(tensor: Tensor, longer: Tensor | None) -> Tensor:
    """A tensor with the rows that a longer one of the same width has behind its own."""
    if longer is None or longer.ndim != tensor.ndim or longer.shape[1:] != tensor.shape[1:]:
        return tensor
    return torch.cat([tensor.to(longer), longer[len(tensor) :]]) if len(longer) > len(tensor) else tensor


def _require_same_model(path: Path, *, found: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> None:
    shapes = ({name: tensor.shape for name, tensor in tensors.items()} for tensors in (found, needed))
    if differences := state_differences(*shapes):
        raise CheckpointError(
            f"{path} is of another model than this one, of its {len(needed)} tensors {differences}; "
            "load it into the model of the experiment.yaml beside it"
        )


def save_state(state: Mapping[Any, Any], path: str | Path) -> None:
    """Write nested dicts (keys int or str), lists, tuples, tensors, numbers, strings, bools and None.

    Raises:
        CheckpointError: a value of any other type, named by its place in the state; or the disk is full.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _flatten(state, tensors, "state")
    _write(Path(path), tensors, {"state": skeleton})


def load_state(path: str | Path) -> dict[Any, Any]:
    """Read the value that `save_state` wrote: of the same types, tensors on the CPU, each in its own memory.

    Raises:
        CheckpointError: the file is missing, truncated, not safetensors, or not a training state.
    """
    tensors, header = _read(Path(path))
    if "state" not in header:
        raise CheckpointError(f"{path} holds weights alone, not the state of a training run")
    try:
        state = _unflatten(header["state"], tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(Path(path), f"the form of its state is wrong, {error!r}")) from None
    if not isinstance(state, dict):
        raise CheckpointError(_damaged(Path(path), f"its state is {type(state).__name__}, not a mapping"))
    return state


def _flatten(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """Convert a value to JSON with the exact types of containers and keys; tensors are moved to `tensors` by name."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (int, str):
                raise CheckpointError(f"{place} has the key {key!r}; a training state needs keys of type int or str")
        return {"dict": [[key, _flatten(inner, tensors, f"{place}[{key!r}]")] for key, inner in value.items()]}
    if type(value) in (list, tuple):
        inner = [_flatten(item, tensors, f"{place}[{index}]") for index, item in enumerate(value)]
        return {"tuple": inner} if type(value) is tuple else inner
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"{place} is {type(value).__name__}; a training state needs tensors, numbers, strings, bools, None, "
        "and dicts, lists and tuples of them"
    )


def _unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    match skeleton:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": items}:
            return {key: _unflatten(value, tensors) for key, value in items}
        case {"tuple": items}:
            return tuple(_unflatten(item, tensors) for item in items)
        case list():
            return [_unflatten(item, tensors) for item in skeleton]
        case _:
            return skeleton


def _memory_key(tensor: Tensor) -> tuple:
    """Key of a tensor's memory, equal for all names of one tensor, such as an embedding table that both sides share."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    try:
        text = json.dumps({"format": FORMAT, **header})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the header of {path.name} is not plain values: {error}") from None
    write_tensors(path, tensors, {"regard": text}, EXTRA)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    file = TensorFile(path, extra=EXTRA)
    header = _header(path, file.metadata)
    return {name: file.read(name) for name in file.shapes}, header


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get("regard")
    if text is None:
        raise CheckpointError(f"{path} is a safetensors file, but not a checkpoint of regard: it has no header of ours")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path, f"its header is not JSON that can be read, {error}")) from None
    if not isinstance(header, dict) or type(header.get("format")) is not int:
        raise CheckpointError(_damaged(path, "its header has no number of a format"))
    if type(header.get(LONGEST_SOURCE, 0)) is not int:
        raise CheckpointError(_damaged(path, f"{LONGEST_SOURCE} in its header is no whole number"))
    if header.pop("format") > FORMAT:
        raise CheckpointError(f"{path} was written by a newer regard than {regard.__version__}; install that one")
    return header


def _damaged(path: Path, what: str) -> str:
    return f"{path} is damaged, or was not written by regard: {what}; take another copy of it"
