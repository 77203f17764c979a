"""Rules of the sources: imports go down, some things are never called, names are unique, functions are short."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import regard
from regard.kernels import nan_safety

# From top to bottom. A module may import what stands below its own line, and other modules of its own package; the
# packages of one line do not know each other. A new module has to be given its place here.
LAYERS = (
    ("regard_command",),
    ("regard.exercises",),
    ("regard.doctor",),
    ("regard.serving",),
    ("regard.explorer",),
    ("regard.comparison",),
    ("regard.steps",),
    ("regard.language",),
    ("regard.translation", "regard.huggingface", "regard.export"),
    ("regard.models",),
    ("regard.heads",),
    ("regard.nn",),
    ("regard.testing",),
    ("regard",),
    (
        "regard.advisor",
        "regard.approximations",
        "regard.differential",
        "regard.ring",
        "regard.selection",
        "regard.value_vectors",
    ),
    ("regard.linear",),
    ("regard.attention",),
    ("regard.nested", "regard.small_calls"),
    ("regard.written_pairs",),
    ("regard.kernels",),
    ("regard.native",),
    ("regard.backends.registry",),
    ("regard.backends.cpu", "regard.backends.torch", "regard.backends.triton"),
    ("regard.backends",),
    ("regard.tiles",),
    ("regard.normalizers",),
    ("regard.scores", "regard.masks", "regard.biases", "regard.lenses", "regard.positions"),
    ("regard.core",),
    ("regard.plots",),
    ("regard.utils",),
    ("regard.errors",),
    ("regard_doctor",),
)

# A page of `regard-doctor --html` is drawn by the library, where it is installed: asked for by that option alone.
OF_THE_LIBRARY = {
    ("regard_doctor.command", "regard_command.options"),
    ("regard_doctor.command", "regard.doctor.diagnosis_page"),
}

# Imports that go up for the names of types alone: under `if TYPE_CHECKING`, and never carried out.
TYPES_ONLY = {
    ("regard.core.normalizer", "regard.core.problem"),
    ("regard.core.normalizer", "regard.kernels.base"),
    ("regard.core.problem", "regard.biases"),
    ("regard.core.problem", "regard.masks"),
}

# Within regard.kernels: the kernels, and who knows them all. Any other module there is shared: a kernel knows what is
# shared and no other kernel, and what is shared knows no kernel.
KERNELS = {type(kernel).__module__ for kernel in regard.kernels.KERNELS}
KNOW_ALL_KERNELS = {f"regard.kernels{name}" for name in ("", ".hooks", ".planning.choice", ".planning.plan")}

NAMED = re.compile(r"`([A-Za-z_.]+)`")

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

ROOT = Path(regard.__file__).parent


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of the tree of a source."""
    return tuple(ast.walk(ast.parse(source)))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path
    for package in ("regard_command", "regard", "regard_doctor")
    for path in sorted((ROOT.parent / package).rglob("*.py"))
}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def place(module: str) -> str | None:
    """The line of the table that a module belongs to: the longest prefix; `regard` itself is no one's prefix."""
    named = [name for layer in LAYERS for name in layer]
    fitting = [name for name in named if module == name or (name != "regard" and module.startswith(name + "."))]
    return max(fitting, key=len, default=None)


def depth(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


@functools.cache
def imports(module: str, source: str) -> list[tuple[str, bool]]:
    """Each module of regard that a source imports, anywhere in it, and whether for the names of types alone."""
    unexecuted = {
        inner
        for node in nodes(source)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return [
        (target, node in unexecuted)
        for node in nodes(source)
        for target in targets(module, node)
        if target.split(".")[0] in ("regard_command", "regard", "regard_doctor")
    ]


def targets(module: str, node: ast.AST) -> Iterator[str]:
    """What an import statement names, made absolute; nothing for any other node."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = module.split(".") if module in PACKAGES else module.split(".")[:-1]
        parents = above[: len(above) - node.level + 1] if node.level else []
        origin = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            name = f"{origin}.{alias.name}"
            yield name if name in FILES else origin


def import_faults(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module, a sentence each."""
    own = place(module)
    if own is None:
        return [f"{module} is in no line of LAYERS: give it its place"]
    faults = []
    for target, types_only in imports(module, source):
        other = place(target)
        if other is None:
            faults.append(f"{module} imports {target}, which is in no line of LAYERS")
        elif types_only:
            if depth(other) < depth(own) and (module, target) not in TYPES_ONLY:
                faults.append(f"{module} imports {target} for its types, which is not in TYPES_ONLY")
        elif other != own and depth(other) <= depth(own) and (module, target) not in OF_THE_LIBRARY:
            faults.append(f"{module} imports {target}, which is not below it")
        elif module not in KNOW_ALL_KERNELS and target in KERNELS | KNOW_ALL_KERNELS and own == "regard.kernels":
            faults.append(f"{module} imports {target}: of its package a kernel knows what all share, and no kernel")
    return faults


def usage_faults(source: str) -> list[str]:
    """Statements that the library does without, with their lines."""
    return [
        f"line {getattr(node, 'lineno', '?')}: {fault}"
        for node in nodes(source)
        for fault in [usage_fault(node)]
        if fault
    ]


def usage_fault(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Name(id="print")):
            return "print: results are returned, and the command line has a console"
        case ast.Assert():
            return "assert: it vanishes under -O; raise an error of regard.errors"
        case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
            return "torch.load: nothing is unpickled"
        case ast.Import(names=names) if {alias.name.split(".")[0] for alias in names} & UNPICKLERS:
            return "nothing is unpickled"
        case ast.ImportFrom(module=str(origin), level=0) if origin.split(".")[0] in UNPICKLERS:
            return "nothing is unpickled"
        case ast.ImportFrom(module="torch", names=names) if "load" in {alias.name for alias in names}:
            return "torch.load: nothing is unpickled"
        case _:
            return None


MOST_LINES = 60


def names_in_several_places(places: Iterable[tuple[str, str]]) -> list[str]:
    """The names that stand in more than one place, with their places."""
    found: dict[str, list[str]] = {}
    for name, place in places:
        found.setdefault(name, []).append(place)
    return [f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1]


def classes(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Each class of a module, nested ones too, with its line."""
    for node in nodes(source):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"{module}:{node.lineno}"


def long_functions(source: str) -> list[str]:
    """Functions of more than MOST_LINES lines, without their signature (a command's has its options) and docstring."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = 1 + (body[-1].end_lineno or 0) - body[0].lineno if body else 0
            if lines > MOST_LINES:
                found.append(f"line {node.lineno}: {node.name} has {lines} lines, {MOST_LINES} can be seen at once")
    return found


def callers(module: str, source: str, called: str) -> Iterator[str]:
    """The functions of a module that call one by its bare name, as `module.Class.function`, in no certain order."""
    parents = {child: node for node in nodes(source) for child in ast.iter_child_nodes(node)}
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == called:
            names, above = [], parents.get(node)
            while above is not None:
                if isinstance(above, ast.FunctionDef | ast.ClassDef):
                    names.append(above.name)
                above = parents.get(above)
            yield ".".join([module, *reversed(names)])


def unlisted(found: Iterable[str], listed: Iterable[str]) -> list[str]:
    """The dotted names of which no part, of two names at least, is listed: `b.C` lists `a.b.C.d`, and `C` does not."""
    parts = [f".{name}." for name in listed if "." in name]
    return [name for name in found if not any(part in f".{name}." for part in parts)]


ROOM_ROW = re.compile(r"^\| (`[a-z_.`, ]+`) \| (.+) \|$", flags=re.MULTILINE)
NO_SENTENCE = "WRITE ONE SENTENCE HERE."


def rooms_table(text: str) -> list[str]:
    """The rows of the table below "## Rooms" of a page."""
    section = text.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    return [match.group() for match in ROOM_ROW.finditer(section)]


def table_of_layers(layers: Iterable[tuple[str, ...]], rows: Iterable[str]) -> list[str]:
    """The rows that a table of the layers needs, one for each line, with the sentences of its rooms from `rows`."""
    sentences: dict[str, str] = {}
    for row in rows:
        names, text = row.strip("| ").split(" | ")
        found = re.findall(r"[A-Z].*?\.(?= [A-Z]|$)", text)
        sentences |= dict(zip(re.findall(r"[\w.]+", names), found, strict=False))
    lines = [[name.removeprefix("regard.") for name in layer] for layer in layers]
    return [
        f"| {', '.join(f'`{name}`' for name in line)} | {' '.join(sentences.get(name, NO_SENTENCE) for name in line)} |"
        for line in lines
    ]


def faults_by_module(find: Callable[[str, str], list[str]]) -> dict[str, list[str]]:
    """The faults that `find(module, source)` returns of each module that has some."""
    found = {module: find(module, path.read_text("utf-8")) for module, path in FILES.items()}
    return {module: faults for module, faults in found.items() if faults}


def test_imports_go_down():
    assert faults_by_module(import_faults) == {}


def named_backends(module: str, source: str) -> list[str]:
    """What a module imports of one backend, where it has to ask all, by the protocol and the registry."""
    asked = "regard.backends", "regard.backends.base", "regard.backends.registry"
    return [
        target
        for target, _ in imports(module, source)
        if target == "regard.native" or (target.startswith("regard.backends") and target not in asked)
    ]


def test_linear_attention_asks_backends_and_names_none():
    modules = {name: path for name, path in FILES.items() if name.startswith("regard.linear.")}
    assert modules
    assert [fault for name, path in modules.items() for fault in named_backends(name, path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from ..backends.registry import BACKENDS\nfrom ..backends.base import Recurrences", []),
        ("from .. import native", ["regard.native"]),
        ("from ..backends.cpu.token_step import prepare_step", ["regard.backends.cpu.token_step"]),
        ("def f():\n    from ..backends.cpu import library", ["regard.backends.cpu.library"]),
    ],
)
def test_the_checker_finds_a_backend_that_is_named(source, found):
    assert named_backends("regard.linear.recurrence", source) == found


def test_nothing_that_a_library_does_without():
    assert faults_by_module(lambda module, source: usage_faults(source)) == {}


def test_functions_can_be_seen_at_once():
    assert faults_by_module(lambda module, source: long_functions(source)) == {}


def test_modules_have_names_of_their_own():
    modules = [(module.split(".")[-1], module) for module in FILES.keys() - PACKAGES]
    assert names_in_several_places(one for one in modules if one[0] != "base") == []


def test_classes_have_names_of_their_own():
    found = (one for module, path in FILES.items() for one in classes(module, path.read_text("utf-8")))
    assert names_in_several_places(found) == []


def test_every_place_that_keeps_nan_behind_masks_is_listed():
    """The docstring of kernels/nan_safety.py names all callers of its functions, for lenses and hooks no other."""
    text = nan_safety.__doc__ or ""
    found = {
        guard: {
            caller
            for module, path in FILES.items()
            if module != nan_safety.__name__
            for caller in callers(module, path.read_text("utf-8"), guard)
        }
        for guard in ("run_nan_safe", "finite_problem", "zero_nonfinite_inputs")
    }
    assert all(found.values())
    assert unlisted(set().union(*found.values()), NAMED.findall(text)) == []
    of_lenses = text[text.index("- lenses and hooks:") :].split("\n- ")[0]
    named = [name for name in NAMED.findall(of_lenses) if "." in name]
    callers_of_lenses = found["finite_problem"] | found["zero_nonfinite_inputs"]
    assert [name for name in named if not any(f".{name}." in f".{each}." for each in callers_of_lenses)] == []


def test_every_line_of_the_table_is_there():
    named = {name for layer in LAYERS for name in layer}
    assert named <= FILES.keys()
    assert FILES.keys() >= KERNELS | KNOW_ALL_KERNELS


def test_the_page_has_each_line_of_layers_with_a_sentence_for_each_room():
    rows = rooms_table((ROOT.parents[1] / "docs" / "architecture.md").read_text("utf-8"))
    needed = table_of_layers(LAYERS, rows)
    mend = "\n".join(needed)
    assert NO_SENTENCE not in mend, f"docs/architecture.md, Rooms: give the new rooms a sentence each:\n{mend}"
    assert rows == needed, f"docs/architecture.md, Rooms: the table does not have the lines of LAYERS; make it\n{mend}"


def test_every_exception_is_needed():
    used = {
        (module, target)
        for module, path in FILES.items()
        for target, types_only in imports(module, path.read_text("utf-8"))
        if types_only
    }
    assert used >= TYPES_ONLY


# The checker itself, on sources made up to break the rules.


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("regard.errors", "import regard.kernels", "not below it"),
        ("regard.errors", "def late():\n    from . import kernels", "not below it"),
        ("regard.masks.made_up", "from ..scores import Dot", "not below it"),
        ("regard.masks", "from regard.attention import attention", "not below it"),
        ("regard.attention", "import regard", "not below it"),
        ("regard.kernels.made_up", "from .reference import ReferenceKernel", "a kernel knows"),
        ("regard.kernels.made_up", "from regard.kernels import reference", "a kernel knows"),
        ("regard.kernels.made_up", "from regard.kernels import choose", "a kernel knows"),
        ("regard.kernels.base", "from .reference import ReferenceKernel", "a kernel knows"),
        ("regard.made_up", "", "is in no line of LAYERS"),
        ("regard_command", "import regard.made_up", "is in no line of LAYERS"),
        ("regard.core.grid", "if TYPE_CHECKING:\n    from ..masks import Mask", "not in TYPES_ONLY"),
    ],
)
def test_the_checker_finds_a_wrong_import(module, source, fault):
    faults = import_faults(module, source)
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("regard_command", "import regard\nfrom regard.translation import demo"),
        ("regard.masks.made_up", "from .base import Mask\nfrom ..errors import MaskError"),
        ("regard.kernels", "from .reference import ReferenceKernel"),
        ("regard.kernels.made_up", "from .base import Kernel\nfrom ..core.problem import Problem"),
        ("regard.kernels.block_sparse", "from .dense import Rectangle"),
        ("regard.core.problem", "if TYPE_CHECKING:\n    from .masks import Mask"),
        ("regard.errors", "import regarding, torch"),
    ],
)
def test_the_checker_lets_a_right_import_pass(module, source):
    assert import_faults(module, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "print('here')",
        "def f(x):\n    assert x > 0",
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('weights')",
        "from torch import load",
    ],
)
def test_the_checker_finds_what_a_library_does_without(source):
    assert len(usage_faults(source)) == 1


def test_the_checker_finds_names_in_several_places():
    source = "class Case:\n    class Inner: ...\nclass Inner: ..."
    assert names_in_several_places(classes("one", source)) == ["Inner: one:3, one:2"]
    assert names_in_several_places([*classes("one", "class Case: ..."), ("Cases", "two:1")]) == []


def test_a_table_of_rooms_follows_the_layers():
    rows = ["| `a`, `b` | The a. B in torch.nn. |", "| `c` | C. |"]
    page = [
        "| `no` | Room. |",
        "",
        "## Rooms",
        "",
        "| room | is |",
        "| --- | --- |",
        *rows,
        "",
        "## Next",
        "| `d` | D. |",
    ]
    assert rooms_table("\n".join(page)) == rows
    assert table_of_layers([("regard.a", "regard.b"), ("regard.c",)], rows) == rows
    moved = table_of_layers([("regard.c",), ("regard.b",), ("regard.a", "regard.d")], rows)
    assert moved == ["| `c` | C. |", "| `b` | B in torch.nn. |", f"| `a`, `d` | The a. {NO_SENTENCE} |"]
    for wrong in ("| `a`, `b` | One for both. |", "| `a`, `b` | One. Two. Three. |"):
        assert table_of_layers([("regard.a", "regard.b")], [wrong]) != [wrong]


def test_the_checker_finds_a_long_function():
    lines = (MOST_LINES + 1) * "\n    pass"
    assert long_functions(f"def f():{lines}") == [
        f"line 1: f has {MOST_LINES + 1} lines, {MOST_LINES} can be seen at once"
    ]
    assert long_functions(f'def f():\n    """{lines}"""\n    pass') == []


def test_the_checker_lets_other_calls_pass():
    assert usage_faults("console.print(x)\nsafetensors.torch.load(x)\njson.load(file)\n'assert print(x)'") == []


def test_the_checker_finds_callers():
    source = (
        "def f(x):\n    g(x)\nclass C:\n    def h(self):\n        def inner(): return g(1)\n        self.g(2)\ng(3)"
    )
    assert sorted(callers("m", source, "g")) == ["m", "m.C.h.inner", "m.f"]
    assert unlisted(["a.b.C.d", "a.bb.C"], ["b.C", "C"]) == ["a.bb.C"]
