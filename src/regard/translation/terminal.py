"""Terminal output: the weights of a translation as a heat map, and the progress of a training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import ArrayLike
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.text import Text
from torch import Tensor

from regard.plots.labels import visible
from regard.plots.pooling import checked_matrix
from regard.translation.callbacks import as_training
from regard.translation.lightning_module import Training

# Sixteen steps of matplotlib's viridis, dark to bright, which also the colour-blind see rise.
_VIRIDIS = (
    *("#440154", "#481a6c", "#472f7d", "#414487", "#39568c", "#31688e", "#2a788e", "#23888e"),
    *("#1f988b", "#22a884", "#35b779", "#54c568", "#7ad151", "#a5db36", "#d2e21b", "#fde725"),
)
_SHADES = tuple(Style(bgcolor=colour) for colour in _VIRIDIS)
_NARROWEST = 2  # terminal cells: about a square, and room for one wide character
_LONGEST_UPRIGHT = 12  # lines of the letters that stand one below the other
_LONGEST_ROW_NAME = 20  # terminal cells


class AlignmentTable:
    """A heat map for rich's `Console.print`: see `alignment_table`."""

    def __init__(self, weights: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
        self._weights: list[list[float]] = weights.tolist()
        self._rows = [visible(token) for token in rows]
        self._columns = [visible(token) for token in columns]
        self._top = max((w for row in self._weights for w in row if math.isfinite(w) and w > 0), default=1.0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the names of the columns, a line per row, the scale, and the number of columns left out."""
        coloured = not console.no_color and console.color_system in ("256", "truecolor")
        # Where the names of the rows are digits, the digits of the weights need to stand apart from them.
        border = " " if coloured else "|" if options.ascii_only else "│"
        margin = min(max(map(cell_len, self._rows)), _LONGEST_ROW_NAME, options.max_width // 3)
        widths = self._column_widths(options.max_width - margin - 1)
        for line in _header(self._columns, widths):
            yield _line(" " * (margin + 1), line)
        for name, weights in zip(self._rows, self._weights, strict=True):
            shown = zip(weights, widths, strict=False)
            cells = [
                self._coloured(weight, width) if coloured else self._digit(weight, width) for weight, width in shown
            ]
            yield _line(_fitted_right(name, margin) + border, *cells)
        yield Text()
        yield _line(" " * (margin + 1), *self._scale(coloured))
        if len(widths) < len(self._columns):
            hidden = len(self._columns) - len(widths)
            yield Text(f"and {hidden} more columns than there is room for", style="italic")

    def _column_widths(self, room: int) -> list[int]:
        """Widths of the columns that fit: for names side by side, or all narrow with upright names."""
        names = [cell_len(name) for name in self._columns]
        beside = [max(_NARROWEST, width + 1 if max(names) > _NARROWEST else width) for width in names]
        if sum(beside) <= room:
            return beside
        return [_NARROWEST] * min(len(names), max(1, room // _NARROWEST))

    def _coloured(self, weight: float, width: int) -> Text:
        if not math.isfinite(weight):
            return Text("?".ljust(width))
        step = round(self._part(weight) * (len(_SHADES) - 1))
        return Text(" " * width, style=_SHADES[step])

    def _digit(self, weight: float, width: int) -> Text:
        if not math.isfinite(weight):
            return Text("?".ljust(width))
        tenths = min(9, int(self._part(weight) * 10))
        return Text((str(tenths) if tenths else ".").ljust(width))

    def _part(self, weight: float) -> float:
        return min(1.0, max(0.0, weight / self._top))

    def _scale(self, coloured: bool) -> Iterator[Text]:
        if not coloured:
            yield Text(f"tenths of {self._top:.2f}; . is less than one")
            return
        yield Text("0 ")
        yield from (Text(" ", style=shade) for shade in _SHADES)
        yield Text(f" {self._top:.2f}")


def alignment_table(weights: ArrayLike | Tensor, rows: Sequence[str], columns: Sequence[str]) -> AlignmentTable:
    """A heat map of `weights` [R, C] to print with rich: output tokens down the side, input tokens along the top.

    Dark is 0, bright the greatest weight; `?` is a weight that is NaN or infinite. Where the console has no colours,
    or is a file, a digit counts the tenths. Chinese, Japanese and Korean characters take two places, as terminals draw
    them. Names that do not fit side by side stand upright; columns that do not fit even so are left out and counted.

    Raises:
        ShapeError: the weights are no matrix, or do not have a row and a column for each token.

    >>> console = Console(width=60, no_color=True)
    >>> console.print(alignment_table([[0.9, 0.1], [0.2, 0.8]], ["das", "Haus"], ["the", "house"]))
         the house
     das│9   1
    Haus│2   8
    <BLANKLINE>
         tenths of 0.90; . is less than one
    """
    return AlignmentTable(checked_matrix(weights, rows, columns), rows, columns)


def _header(names: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The names of the columns that have a width: side by side in one line, or upright where one is too narrow."""
    shown = list(zip(names, widths, strict=False))
    if all(cell_len(name) <= width for name, width in shown):
        yield "".join(set_cell_size(name, width) for name, width in shown)
        return
    letters = [_upright(name) for name, _ in shown]
    height = max(map(len, letters))
    for line in range(height):
        # All names end just above the cells.
        above = [column[line - height] if line >= height - len(column) else "" for column in letters]
        yield "".join(set_cell_size(letter, width) for letter, (_, width) in zip(above, shown, strict=True))


def _upright(name: str) -> list[str]:
    """The letters of a name with their accents, truncated if there are too many."""
    letters: list[str] = []
    for character in name:
        if letters and cell_len(character) == 0:
            letters[-1] += character
        else:
            letters.append(character)
    return letters if len(letters) <= _LONGEST_UPRIGHT else [*letters[: _LONGEST_UPRIGHT - 1], "…"]


def _fitted_right(name: str, width: int) -> str:
    if cell_len(name) > width:
        name = set_cell_size(name, width - 1) + "…"
    return " " * (width - cell_len(name)) + name


def _line(*parts: str | Text) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


SECONDS_BETWEEN_DRAWINGS = 0.25
SECONDS_BETWEEN_LINES = 30.0


def first_line(training: Training) -> str:
    """The line at the start of a training: whether it begins, resumes, or has ended already."""
    position, settings = training.progress.position, training.settings
    if training.progress.has_ended(settings):
        return (
            f"this training has ended already, after {position.update:,} updates; it goes on with larger "
            "training.max_epochs, training.max_updates or training.patience"
        )
    if position.update:
        return f"resuming after update {position.update:,}, in epoch {position.epoch + 1} of {settings.max_epochs}"
    return f"training: {len(training.plan):,} updates an epoch, {settings.max_epochs:,} epochs at most"


def metrics(training: Training) -> str:
    """The latest loss, speed and learning rate, and the scores of the last validation."""
    shown = {**training.latest, **training.progress.scores}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items())


def place_in_epoch(training: Training) -> tuple[int, int]:
    """The epoch, counted from 1, and the batches done in it; after its last batch it counts as the current one."""
    position = training.progress.position
    ended = position.batch == 0 and position.epoch > 0
    return position.epoch + (not ended), len(training.plan) if ended else position.batch


class ProgressBar(Callback):
    """A bar for the current epoch, and the metrics in lines of their own, however narrow the terminal is."""

    def __init__(self, console: Console):
        self._bar = _BarOverMetrics(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = TaskID(0)
        self._drawn = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = as_training(pl_module)
        self._bar.console.print(first_line(training), highlight=False)
        self._task = self._bar.add_task("", total=len(training.plan), epoch="")
        self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_DRAWINGS:
            self._draw(as_training(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(as_training(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(as_training(pl_module))
        self._bar.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._bar.stop()

    def _draw(self, training: Training) -> None:
        epoch, batches = place_in_epoch(training)
        self._drawn = time.monotonic()
        self._bar.metrics = metrics(training)
        self._bar.update(self._task, completed=batches, epoch=f"{epoch}/{training.settings.max_epochs}")
        self._bar.refresh()


class _BarOverMetrics(Progress):
    """rich's progress bar with a text below it, which wraps where a column would be cut."""

    metrics = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.metrics:
            yield Text(self.metrics)


class ProgressLines(Callback):
    """A line at the start, at each validation, and every half minute: for files, pipes and the logs of a cluster."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._written = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(first_line(as_training(pl_module)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if time.monotonic() - self._written > SECONDS_BETWEEN_LINES:
            self._write_progress(as_training(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_progress(as_training(pl_module))

    def _write_progress(self, training: Training) -> None:
        epoch, batches = place_in_epoch(training)
        place = f"epoch {epoch}/{training.settings.max_epochs}, {batches:,} of {len(training.plan):,} updates"
        self._write(f"{place}: {metrics(training)}".removesuffix(": "))

    def _write(self, line: str) -> None:
        self._written = time.monotonic()
        self._stream.write(f"{line}\n")
        self._stream.flush()
