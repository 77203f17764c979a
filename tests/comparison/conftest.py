"""A text of reversed words, a recipe for it, and a comparison of two scores with two seeds."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.comparison import ComparisonReport, Recipe, compare, load_recipe

RECIPE = """\
name: reversed
data:
  folder: {folder}
  train: {{source: train.src, target: train.trg}}
  test: {{source: test.src, target: test.trg}}
vocabulary: characters
model: {{embedding_dim: 8, hidden_dim: 8, dropout: 0.0, decoder: {{kind: luong, input_feeding: false}}}}
training: {{batch_tokens: 400, max_epochs: 1, accelerator: cpu}}
search: {{beam: 1, max_length_ratio: 1.0}}
compare: {{measure: cross-entropy, seeds: [1, 2]}}
"""


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reversed")
    generator = random.Random(1)
    for name, count in (("train", 60), ("test", 20)):
        words = ["".join(generator.choices("abcdef", k=generator.randrange(1, 9))) for _ in range(count)]
        (folder / f"{name}.src").write_text("\n".join(words))
        (folder / f"{name}.trg").write_text("\n".join(word[::-1] for word in words))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder))
    return path


@pytest.fixture
def recipe(recipe_file: Path) -> Callable[..., Recipe]:
    """A recipe with keys of its section `compare`: `recipe(vary={...})`."""

    def load(*overrides: str, **options: Any) -> Recipe:
        return load_recipe(recipe_file, overrides, options)

    return load


SCORES = ["dot", "general"]


@pytest.fixture(scope="session")
def finished(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ComparisonReport]:
    """The folder of a comparison that has ended, and its report."""
    folder = tmp_path_factory.mktemp("comparison")
    options = {"vary": {"score": SCORES}, "lengths": [4]}
    report = compare(load_recipe(recipe_file, (), options), folder, workers=2)
    report.save(folder)
    return folder, report
