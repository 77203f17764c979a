"""Lightning's checkpoints as safetensors; apart from `checkpoint`, so that translating need not load Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO

from regard.errors import CheckpointError
from regard.translation.checkpoint import load_state, save_state


class SafetensorsIO(CheckpointIO):
    """Lightning saves and resumes through `save_state` and `load_state`: nothing is pickled, nothing unpickled."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise CheckpointError("checkpoints are files on a disk here and take no storage_options")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_state(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # Lightning moves the tensors where they belong; a state that cannot run code needs no weights_only.
        return load_state(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
