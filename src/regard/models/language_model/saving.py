"""A language model in a folder: config.json, and the safetensors file that it names.

The weights get a new name each time, and config.json, which is replaced in one step, names them: whoever reads it finds
weights that are whole and belong to it. Those that it named before are removed last.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...errors import CheckpointError
from .coding import decoded, encoded
from .config import LanguageModelConfig
from .files import Tensors, check_same, read_json, write_json, write_tensors

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
