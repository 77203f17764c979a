"""Tensors of an encoder and decoder that transformers saved, copied into a `Transformer` of the same sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ..language_model.huggingface.hf_checkpoint import open_tensors
from ..language_model.huggingface.stored_tensors import StoredTensor
from ..language_model.saved_model import check_same
from .transformer import Transformer


def open_translator(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by their names there, not yet read.

    Raises:
        CheckpointError: there are no safetensors, or they are damaged.
    """
    return open_tensors(folder, "AutoModelForSeq2SeqLM")


def only_row(stored: StoredTensor) -> StoredTensor:
    """A vector that is stored as the one row of a matrix; another tensor is unchanged."""
    return StoredTensor(stored.shape[1:], lambda: stored.read()[0]) if stored.shape[:-1] == (1,) else stored


def drop_copies(folder: Path, stored: dict[str, StoredTensor], copies: Mapping[str, tuple[str, str]]) -> None:
    """Drop stored copies of tables: for each by its name that of the original, and the setting that says so.

    Raises:
        CheckpointError: one differs from its original.
    """
    for name, (kept, setting) in copies.items():
        if name in stored and kept in stored and not torch.equal(stored.pop(name).read(), stored[kept].read()):
            raise CheckpointError(
                f"{name} in {folder} differs from {kept}, but config.json says that they are one table: set {setting} "
                "to false there if both are meant"
            )


def fill_model(
    folder: Path,
    model: Transformer,
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    *,
    wide: Collection[str] = (),
) -> Transformer:
    """Copy stored tensors into a model, in float32; `names` are theirs by those of the model's state.

    wide: ends of the names of those that transformers keeps in float32 where the others are narrower.

    Raises:
        CheckpointError: tensors that are missing, extra or of another shape; whole numbers, as of quantised weights;
            tensors of several dtypes.
    """
    needed = model.state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in stored.items()}
    check_same(str(folder), shapes, {names[name]: list(tensor.shape) for name, tensor in needed.items()})
    read: dict[str, Tensor] = {}
    dtypes: dict[torch.dtype, str] = {}
    for ours, theirs in names.items():
        if theirs not in read:
            tensor = stored[theirs].read()
            _check_numbers(folder, theirs, tensor)
            if not (tensor.dtype == torch.float32 and theirs.endswith(tuple(wide))):
                dtypes.setdefault(tensor.dtype, theirs)
            read[theirs] = tensor.float()
        needed[ours].copy_(read[theirs])
    if len(dtypes) > 1:
        has = " and ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        raise CheckpointError(
            f"the weights in {folder} are of several dtypes, {has}, and transformers would round them all to one: save "
            "the model in one, as AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)"
            ".save_pretrained(new_folder) does"
        )
    return model.eval()


def _check_numbers(folder: Path, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CheckpointError(
            f"{name} in {folder} is {tensor.dtype}: weights need floating-point numbers of 16 bits or more, so load "
            "the model before it was quantised"
        )
