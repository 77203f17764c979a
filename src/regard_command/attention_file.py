"""Files of the attention weights of translations: heat maps as pictures, or arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from regard.errors import require
from regard.utils.atomic_files import atomic_write
from regard_command.command_error import CommandError

if TYPE_CHECKING:
    from regard.translation.translated_line import Translation


class AttentionFile(Protocol):
    """Writer of the attention weights of translations, added one by one. Each file appears only when it is complete."""

    def add(self, line: int, translation: Translation) -> None:
        """Add the weights of a line's best candidate; an empty line has none."""
        ...

    def close(self) -> None:
        """Finish the file after the last line."""
        ...


def attention_file(path: Path | None, layer: int | None = None, head: int | None = None) -> AttentionFile:
    """The writer for a file of this name; heat maps are of one layer and head, or of the mean over them.

    Raises:
        CommandError: the name ends in neither .png nor .npz.
        MissingExtra: matplotlib is not installed, and pictures are asked for.
    """
    if path is None:
        return NoAttentionFile()
    if path.suffix == ".png":
        return HeatmapFiles(path, layer, head)
    if path.suffix != ".npz":
        raise CommandError(
            f"--attention {path}: the name needs to end in .png, for pictures, or in .npz, for the weights as arrays"
        )
    return WeightArrays(path)


class NoAttentionFile:
    """Writes nothing: the command has no --attention."""

    def add(self, line: int, translation: Translation) -> None:
        """Ignore the line."""

    def close(self) -> None:
        """Do nothing."""


class HeatmapFiles:
    """One heat map a line: FILE.png for the first, FILE-2.png for the second."""

    def __init__(self, path: Path, layer: int | None, head: int | None) -> None:
        require("matplotlib", extra="plots")  # now, and not after the first translation
        self._path, self._layer, self._head = path, layer, head

    def add(self, line: int, translation: Translation) -> None:
        """Draw the heat map of a line."""
        if not translation.candidates:
            return
        path = self._path if line == 1 else self._path.with_stem(f"{self._path.stem}-{line}")
        with atomic_write(path) as partial:
            translation.heatmap(layer=self._layer, head=self._head).savefig(partial, format="png", dpi=150)

    def close(self) -> None:
        """Do nothing: `add` has written every picture."""


class WeightArrays:
    """One .npz file with, for line 1, its weights [T, S] and its tokens: `1.weights`, `1.source`, `1.target`.

    Of a model with layers and heads the weights are [T, layers, heads, S], and `1.self_weights` is beside them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, line: int, translation: Translation) -> None:
        """Collect the arrays of a line."""
        if not translation.candidates:
            return
        best = translation.candidates[0]
        self._arrays[f"{line}.weights"] = best.weights.float().numpy()
        if best.self_weights.numel():
            self._arrays[f"{line}.self_weights"] = best.self_weights.float().numpy()
        self._arrays[f"{line}.source"] = np.array(translation.source_tokens)
        self._arrays[f"{line}.target"] = np.array(best.tokens)

    def close(self) -> None:
        """Write the arrays of all lines."""
        with atomic_write(self._path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **self._arrays)
