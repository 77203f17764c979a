import ctypes
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from regard.backends.cpu import build

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc")

compiles = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
whole_library = pytest.mark.timeout(1800)  # three minutes of a core, which other tests may share


@pytest.mark.slow
@compiles
@whole_library
def test_a_compiler_that_knows_no_wider_variant(monkeypatch, tmp_path):
    wider = {"wide": ("-mno-such-flag",), build.baseline(): ()}
    monkeypatch.setattr(build, "compiler_flags", lambda: wider)
    (tmp_path / build.REASON).write_text("an older reason")
    assert build.build(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [build.LIBRARY]
    opened = ctypes.CDLL(str(tmp_path / build.LIBRARY))
    assert not hasattr(opened, "regard_flash_wide")
    assert hasattr(opened, f"regard_flash_{build.baseline()}")


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no C compiler was found: no-such-compiler: No such file or directory"),
        (
            f"{sys.executable} -c 'import sys; sys.exit(\"first line\\nfatal error: no headers\")'",
            "failed: fatal error: no",
        ),
    ],
)
def test_without_a_compiler_the_reason_is_kept(monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    (tmp_path / build.LIBRARY).write_bytes(b"an older library")
    assert reason in str(build.build(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [build.REASON]
    assert reason in (tmp_path / build.REASON).read_text("utf-8")


def test_it_builds_without_regard_and_torch():
    """As while regard is installed: by its file alone, with the modules of Python."""
    script = (
        "import sys, importlib.util as u\n"
        f"s = u.spec_from_file_location('build', {str(Path(build.__file__))!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "sys.exit(bool({'torch', 'regard', 'numpy'} & set(sys.modules)) or not m.digest())"
    )
    assert subprocess.run([sys.executable, "-I", "-c", script], check=False).returncode == 0


class Builder:
    """What hatchling gives to a hook, and what the hook tells it."""

    def __init__(self, *_: object) -> None:
        self.root = str(ROOT)
        self.warnings: list[str] = []
        self.app = SimpleNamespace(display_warning=self.warnings.append)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build hook; hatchling itself is only there while a wheel is built."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    tags = ModuleType("packaging.tags")
    monkeypatch.setattr(interface, "BuildHookInterface", Builder, raising=False)
    monkeypatch.setattr(tags, "platform_tags", lambda: iter(["manylinux_2_36_any", "linux_any"]), raising=False)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setitem(sys.modules, tags.__name__, tags)
    monkeypatch.setitem(sys.modules, "packaging", ModuleType("packaging"))
    return runpy.run_path(str(ROOT / "hatch_build.py"))["NativeCode"]()


@pytest.mark.slow
@compiles
@whole_library
def test_a_wheel_holds_every_variant_compiled_without_a_warning_and_says_for_which_system(hook, monkeypatch):
    monkeypatch.setenv("CC", "cc -Werror -Wpedantic -Wno-overlength-strings")
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    (source, target), *others = data["force_include"].items()
    assert Path(source).stat().st_size > 0
    assert (target, others) == (f"regard/backends/cpu/{build.LIBRARY}", [])
    assert (data["pure_python"], data["tag"]) == (False, "py3-none-linux_any")
    assert hook.warnings == []
    opened = ctypes.CDLL(source)
    opened.regard_digest.restype = ctypes.c_char_p
    assert opened.regard_digest().decode() == build.digest()
    assert all(hasattr(opened, f"regard_additive_backward_{name}") for name in build.compiler_flags())
    assert opened.regard_runs(build.baseline().encode()) == 1
    assert opened.regard_runs(b"sve") == 0
    hook.finalize("standard", data, "")
    assert not Path(source).exists()


def test_a_wheel_without_the_library_holds_the_reason(hook, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    assert list(data["force_include"].values()) == [f"regard/backends/cpu/{build.REASON}"]
    assert data.keys() == {"force_include"}
    assert hook.warnings[0].startswith("regard is installed without its native code: no C compiler was found")
    hook.finalize("standard", data, "")
