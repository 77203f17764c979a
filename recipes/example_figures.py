"""Run an example and draw its figure twice: python recipes/example_figures.py NAME docs/pictures/PICTURE.png.

With the labels of the example, and beside it, as PICTURE.ko.png, with those that docs/hooks/picture_labels.json has for
it in Korean. What the example prints is printed.
"""

import argparse
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from matplotlib import rc_context
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text

from regard import plots
from regard.plots.labels import font_families

ROOT = Path(__file__).parent.parent
LABELS = json.loads((ROOT / "docs" / "hooks" / "picture_labels.json").read_text("utf-8"))


def translate(figure: Figure, labels: Mapping[str, str]) -> set[str]:
    """Put the labels of a figure in other words, and return those that are in it."""
    found = set()
    for axes in figure.axes:
        for axis in axes.xaxis, axes.yaxis:
            found |= _translate_ticks(axis, labels)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_text() in labels:
            found.add(text.get_text())
            text.set(text=labels[text.get_text()], fontfamily=font_families("가나다"))
    return found


def _translate_ticks(axis: Axis, labels: Mapping[str, str]) -> set[str]:
    """The same of the names of ticks, which an axis writes again whenever it is drawn."""
    names = [tick.get_text() for tick in axis.get_ticklabels()]
    if labels.keys().isdisjoint(names):
        return set()
    axis.set_ticklabels([labels.get(name, name) for name in names], fontfamily=font_families("가나다"))
    return labels.keys() & {*names}


def example(name: str) -> ModuleType:
    """The module of examples/NAME.py."""
    specification = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def draw(name: str, path: Path) -> None:
    """Run an example, and save its figure with labels in English and in Korean."""
    labels, save = LABELS[path.name], plots.save

    def save_both(figure: Figure, english: str) -> None:
        save(figure, english)
        missing = labels.keys() - translate(figure, labels)
        assert not missing, f"{path.name} has no {', '.join(missing)}"
        save(figure, path.with_suffix(".ko.png"))

    with patch.object(plots, "save", save_both), rc_context({"font.family": font_families("")}):
        example(name).main(["--picture", str(path)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of examples/NAME.py")
    parser.add_argument("picture", type=Path, help="where the English one goes")
    options = parser.parse_args()
    draw(options.name, options.picture)
