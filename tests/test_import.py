"""What `import regard` gives and costs, and what is said when an optional package is missing; each in a new process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard

FUNCTIONS = {
    *(
        "advise",
        "approximation",
        "attention",
        "attention_with_lse",
        "differential_attention",
        "explain",
        "linear_attention",
        "linear_attention_with_state",
    ),
    *("merge", "model_approximation", "observe", "observe_differential_attention", "observe_linear_attention"),
    *("relative_value_attention", "scaled_dot_product_attention"),
}
SUBMODULES = {"biases", "lenses", "masks", "normalizers", "plots", "positions", "scores"}

OPTIONAL = {
    "anywidget",
    "babel",
    "koreanize_matplotlib",
    "ipywidgets",
    "libcst",
    "lightning",
    "matplotlib",
    "pydantic",
    "pytorch_lightning",
    "rich",
    "sacrebleu",
    "safetensors",
    "starlette",
    "tensorboard",
    "tokenizers",
    "torchmetrics",
    "traitlets",
    "transformers",
    "triton",
    "typer",
    "uvicorn",
    "yaml",
}

ROOT = Path(regard.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__main__.py"
]

# Put before a program, it makes packages look as if they had never been installed.
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(
    command: list[str], program: str, *, without: set[str] | frozenset[str] = frozenset()
) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process of a Python, as if some packages were not installed."""
    return subprocess.run(
        [*command, "-c", WITHOUT.format(names=set(without)) + program],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        check=False,
    )


def printed(command: list[str], program: str, *, without: set[str] | frozenset[str] = frozenset()) -> str:
    """What a program that ends well prints."""
    done = run(command, program, without=without)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_pinned():
    assert set(regard.__all__) == FUNCTIONS | SUBMODULES
    assert sorted(regard.__all__) == sorted(set(regard.__all__))
    assert all(callable(getattr(regard, name)) for name in FUNCTIONS)


def test_import_brings_torch_and_numpy_and_the_rest_when_asked_for():
    program = """
import numpy, torch
import sys
before = set(sys.modules)
import regard
new = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(*sorted(new))
print(*sorted({name.split(".")[0] for name in sys.modules}))
print(torch.cuda.is_initialized())
print("regard.models" in sys.modules, regard.models.RecurrentTranslator.__name__, "models" in dir(regard))
print(regard.translation.__name__, regard.testing.suite.__name__, hasattr(regard, "modells"))
"""
    new, loaded, cuda, *above = printed([sys.executable], program).split("\n")
    assert set(new.split()) <= {"numpy", "regard"}
    assert {"torch", "numpy", "regard"} <= set(loaded.split())
    assert not OPTIONAL & set(loaded.split())
    assert cuda == "False"
    assert above == ["False RecurrentTranslator True", "regard.translation suite False"]


def test_attention_works_without_any_optional_package_and_a_plot_names_its_extra(warm_python):
    program = """
import regard, torch
print(tuple(regard.attention(*torch.rand(3, 1, 2, 3, 5)).shape))
from regard.errors import MissingExtra
from regard.plots import heatmap
try:
    heatmap(torch.eye(2), ["a", "b"], ["c", "d"])
except MissingExtra as error:
    print(str(error).replace("\\n", " "))
"""
    shape, message = printed(warm_python, program, without=OPTIONAL).split("\n")
    assert shape == "(1, 2, 3, 5)"
    assert "'matplotlib'" in message
    assert "regard[plots]" in message


# Slow: that modules import down and in no circle is in test_architecture.py, and every run imports all of them for
# their doctests.
@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [pytest.param(MODULES, id="forwards"), pytest.param(MODULES[::-1], id="backwards")],
)
def test_every_module_can_be_imported(modules):
    program = f"""
import importlib
for name in {modules!r}:
    importlib.import_module(name)
"""
    printed([sys.executable], program)


COMMAND = "import sys; sys.argv = ['regard', 'demo']; from regard_command import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("package", "extra"),
    [("typer", "regard[translation]"), ("lightning", "regard[translation]"), ("babel", "regard[demo]")],
)
def test_the_command_without_a_package_names_the_extra(package, extra, tmp_path, monkeypatch, warm_python):
    monkeypatch.chdir(tmp_path)
    done = run(warm_python, COMMAND, without={package})
    assert done.returncode == 2, done.stderr
    assert repr(package) in done.stderr
    assert extra in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
