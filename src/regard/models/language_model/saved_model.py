"""Save and load a language model in a folder: config.json, and the safetensors file that it names.

The weights get a new name each time, and config.json, which is replaced in one step, names them: whoever reads it finds
weights that are whole and belong to it. Those that it named before are removed last.

Safetensors files, read a tensor at a time, and JSON.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ...utils.atomic_files import atomic_write
from ...utils.other_types import path_of
from ...utils.safetensors_files import TensorFile, state_differences, write_tensors
from .config import CONFIG_JSON, LanguageModelConfig

EXTRA = "translation"
"""Which extra of regard brings safetensors."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no {path.name} in {path.parent}: copy it from where the rest of the folder comes from"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): truncated, or something else") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; it needs an object, {{...}}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, replacing it atomically."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=1), "utf-8")


def check_same(what: str, found: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint has the tensors that a model needs, by their names and shapes.

    Raises:
        CheckpointError: names that are missing, extra or of another shape, counted.
    """
    if differences := state_differences(found, needed):
        raise CheckpointError(f"{what}: of the {len(needed)} tensors that the model needs {differences}")


FORMAT = 1
"""Version of the layout; raised when an older regard could not read it."""
KIND = "regard.models.LanguageModel"


def save(folder: str | os.PathLike[str], config: LanguageModelConfig, state: Mapping[str, Tensor]) -> None:
    """Write configuration and weights as `LanguageModel.save`."""
    folder = path_of("folder", folder)
    model = CONFIG_JSON.encode(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    path, before = folder / "config.json", None
    if path.exists():
        header = read_json(path)
        if header.get("kind") != KIND:
            raise CheckpointError(
                f"{path} belongs to something else: save into a folder of its own, so that nothing is overwritten"
            )
        before = header.get("weights")
    name = f"model-{secrets.token_hex(4)}.safetensors"
    weights_path = folder / name
    try:
        write_tensors(weights_path, state, {"format": "pt"}, EXTRA)
        write_json(path, {"kind": KIND, "format": FORMAT, "weights": name, "model": model})
    except BaseException:
        weights_path.unlink(missing_ok=True)
        raise
    if isinstance(before, str) and Path(before).name == before:
        (folder / before).unlink(missing_ok=True)


def read(folder: str | os.PathLike[str]) -> tuple[LanguageModelConfig, Path]:
    """Read the configuration of a saved model, and the path of its weights.

    Raises:
        CheckpointError: there is none, or another one.
    """
    path = path_of("folder", folder) / "config.json"
    header = read_json(path)
    if "model_type" in header:
        raise CheckpointError(
            f"{path} is of a {header['model_type']!r} model as transformers saves it: load it with "
            "LanguageModel.from_huggingface(folder)"
        )
    if header.get("kind") != KIND:
        raise CheckpointError(f"{path} is not of a {KIND}: its kind is {header.get('kind')!r}")
    if header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has the format {header.get('format')!r}, and this regard reads {FORMAT}: install a newer one"
        )
    config, name = CONFIG_JSON.decode(header.get("model")), header.get("weights")
    if not isinstance(config, LanguageModelConfig) or not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{path} needs a LanguageModelConfig as model, and the name of a file as weights")
    return config, Path(folder) / name


def weights(path: Path, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the weights for a model whose state has these tensors."""
    tensors = TensorFile(path, extra=EXTRA)
    check_same(str(path), tensors.shapes, {name: tensor.shape for name, tensor in needed.items()})
    return {name: tensors.read(name) for name in needed}
