"""A language model in a folder: config.json, and the safetensors file that it names.

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

from ...errors import CheckpointError, require
from ...utils.atomic_files import atomic_write
from .config import LanguageModelConfig, decoded, encoded

EXTRA = "translation"
"""Which extra of regard brings safetensors."""
NAMED_AT_MOST = 3


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): truncated, or something else") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; it needs an object, {{...}}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, in one step."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=1), "utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a safetensors file, in one step."""
    torch_io = require("safetensors.torch", extra=EXTRA)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as partial:
        torch_io.save_file(plain, partial, metadata={"format": "pt"})


class Tensors:
    """The tensors of one safetensors file: shapes without reading them, and each by its name.

    Raises:
        CheckpointError: the file is missing, truncated or something else.
        MissingExtra: safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        safetensors = require("safetensors", extra=EXTRA)
        self.path = path
        try:
            self.file = safetensors.safe_open(path, framework="pt")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file ({error}): load it again") from None
        self.shapes = {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own: the file may change or vanish."""
        return self.file.get_tensor(name).clone()


def check_same(what: str, found: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> None:
    """The same names and shapes.

    Raises:
        CheckpointError: names that are missing, extra or of another shape, counted.
    """
    missing = [name for name in needed if name not in found]
    extra = [name for name in found if name not in needed]
    reshaped = [
        f"{name}: {list(found[name])} where {list(needed[name])} is needed"
        for name in needed
        if name in found and tuple(found[name]) != tuple(needed[name])
    ]
    kinds = {"missing": missing, "extra": extra, "of another shape": reshaped}
    differences = [f"{len(names)} {kind} ({_first_few(names)})" for kind, names in kinds.items() if names]
    if differences:
        raise CheckpointError(f"{what}: of the {len(needed)} tensors that the model needs {'; '.join(differences)}")


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")


FORMAT = 1
"""Version of the layout; raised when an older regard could not read it."""
KIND = "regard.models.LanguageModel"


def save(folder: str | os.PathLike[str], config: LanguageModelConfig, state: Mapping[str, Tensor]) -> None:
    """See `LanguageModel.save`."""
    folder = Path(folder)
    told = {"model": encoded(config)}
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
        write_tensors(weights_path, state)
        write_json(path, {"kind": KIND, "format": FORMAT, "weights": name, **told})
    except BaseException:
        weights_path.unlink(missing_ok=True)
        raise
    if isinstance(before, str) and Path(before).name == before:
        (folder / before).unlink(missing_ok=True)


def read(folder: str | os.PathLike[str]) -> tuple[LanguageModelConfig, Path]:
    """The configuration, and where the weights are.

    Raises:
        CheckpointError: there is none, or another one.
    """
    path = Path(folder) / "config.json"
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
    config, name = decoded(header.get("model")), header.get("weights")
    if not isinstance(config, LanguageModelConfig) or not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{path} needs a LanguageModelConfig as model, and the name of a file as weights")
    return config, Path(folder) / name


def weights(path: Path, needed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, for a model with these."""
    tensors = Tensors(path)
    check_same(str(path), tensors.shapes, {name: tensor.shape for name, tensor in needed.items()})
    return {name: tensors.read(name) for name in needed}
