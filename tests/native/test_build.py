import ctypes
import hashlib
import os
import re
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
whole_library = pytest.mark.timeout(1800)  # two minutes of a core, which other tests may share


class Compiles:
    """Builds of two sources, and what their compiler was called for."""

    def __init__(self, folder: Path) -> None:
        self.library, self.kept, self.log = folder / "library", folder / "kept", folder / "log"
        self.library.mkdir()
        script = folder / "compiler.sh"
        script.write_text(f'echo "$@" >> {self.log}\nexec {COMPILER} "$@"\n')
        self.command = f"sh {script}"

    def __call__(self, **options: Any) -> list[str]:
        """Build, and return the sources that were compiled."""
        self.log.write_text("")
        assert build.build(self.library, **{"keep": self.kept, **options}) is None
        calls = [line.split() for line in self.log.read_text().splitlines()]
        return sorted(Path(call[call.index("-c") + 1]).name for call in calls if "-c" in call)

    def opened(self) -> ctypes.CDLL:
        assert build.damage(self.library) is None
        return ctypes.CDLL(str(self.library / build.LIBRARY))


@pytest.fixture
def compile_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiles:
    """Copies of the sources, of which two are compiled, for two variants: one that runs, and one that does not."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(build, "SOURCES", shutil.copytree(build.SOURCES, tmp_path / "sources"))
    monkeypatch.setattr(build, "SOURCES_PER_VARIANT", ("finite.c", "top_entries.c"))
    monkeypatch.setattr(build, "compiler_flags", lambda machine=None: {"strange": (), build.baseline(): ()})
    monkeypatch.delenv(build.SETTING, raising=False)
    builds = Compiles(tmp_path)
    monkeypatch.setenv("CC", builds.command)
    return builds


def test_what_was_compiled_once_is_not_compiled_again(compile_two, capfd):
    assert compile_two() == ["cpu_support.c", "finite.c", "top_entries.c"]
    line = rf"regard: compiling native code for {build.baseline()}, 2 files, on \d+ cores ... \d+ s\n"
    assert re.fullmatch(line, capfd.readouterr().err)
    before = (compile_two.library / build.LIBRARY).stat()
    assert compile_two() == []
    assert capfd.readouterr().err == ""
    after = (compile_two.library / build.LIBRARY).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # not when it was last read
    (compile_two.library / build.LIBRARY).unlink()
    assert compile_two() == []
    assert hasattr(compile_two.opened(), f"regard_finite_{build.baseline()}")


def test_a_change_compiles_what_depends_on_it(compile_two, monkeypatch):
    compile_two()
    header = build.SOURCES / "top_entries.h"
    header.write_text(header.read_text() + "/* changed */\n")
    assert "top_entries.h" in build.files_of("top_entries.c")
    assert compile_two() == ["cpu_support.c", "top_entries.c"]  # the former has the digest of all
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g0"))
    assert len(compile_two()) == 3
    monkeypatch.setenv("CC", f"{compile_two.command} -g0")
    assert len(compile_two()) == 3


@pytest.mark.parametrize("damage", [b"", b"no object", None], ids=["empty", "another", "cut"])
def test_a_damaged_object_file_is_compiled_again(compile_two, damage):
    compile_two()
    library = (compile_two.library / build.LIBRARY).read_bytes()
    for path in compile_two.kept.iterdir():
        path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert len(compile_two()) == 3
    assert (compile_two.library / build.LIBRARY).read_bytes() == library
    assert compile_two() == []


def test_where_nothing_can_be_kept_it_is_compiled_each_time(compile_two):
    (compile_two.log.parent / "file").write_text("")
    for _ in range(2):
        assert len(compile_two(keep=compile_two.log.parent / "file" / "kept")) == 3
    assert compile_two.opened()


def test_a_folder_that_cannot_be_written(compile_two):
    (compile_two.log.parent / "file").write_text("")
    nowhere = compile_two.log.parent / "file" / "library"
    assert re.match(
        rf"{nowhere}/{build.LIBRARY}\S* cannot be written: ", str(build.build(nowhere, keep=compile_two.kept))
    )


def test_object_files_that_no_build_uses_are_removed(compile_two):
    compile_two()
    unused = compile_two.kept / "unused.o"
    for path in [unused, *compile_two.kept.iterdir()]:
        path.touch()
        os.utime(path, (0, 0))
    assert compile_two() == []
    assert not unused.exists()
    assert len([*compile_two.kept.iterdir()]) == 3


def test_two_builds_at_once(compile_two):
    script = (
        "import importlib.util, pathlib, sys\n"
        f"s = importlib.util.spec_from_file_location('build', {str(build.SOURCES / 'build.py')!r})\n"
        "m = importlib.util.module_from_spec(s); s.loader.exec_module(m)\n"
        "m.SOURCES_PER_VARIANT = ('finite.c', 'top_entries.c')\n"
        f"m.compiler_flags = lambda machine: {{{build.baseline()!r}: ()}}\n"
        f"sys.exit(m.build(pathlib.Path({str(compile_two.library)!r}), keep=pathlib.Path({str(compile_two.kept)!r})))"
    )
    running = [subprocess.Popen([sys.executable, "-I", "-c", script]) for _ in range(3)]
    assert [each.wait() for each in running] == [0, 0, 0]
    assert compile_two.opened().regard_runs(build.baseline().encode()) == 1
    assert sorted(path.name for path in compile_two.library.iterdir()) == [build.LIBRARY, build.CHECKSUM]
    assert {path.suffix for path in compile_two.kept.iterdir()} == {".o"}
    assert compile_two() == []


@pytest.mark.parametrize(
    ("setting", "options", "variants"),
    [
        ("", {}, {build.baseline()}),
        ("", {"all_variants": True}, {"strange", build.baseline()}),
        ("all", {}, {"strange", build.baseline()}),
        ("strange", {}, {"strange", build.baseline()}),
        (build.baseline(), {"all_variants": True}, {build.baseline()}),
    ],
)
def test_the_variants_of_this_processor_or_those_asked_for(compile_two, monkeypatch, setting, options, variants):
    monkeypatch.setenv(build.SETTING, setting)
    compile_two(**options)
    opened = compile_two.opened()
    assert {name for name in ("strange", build.baseline()) if hasattr(opened, f"regard_finite_{name}")} == variants


def test_a_variant_in_pairs_has_code_of_its_own_only_where_pairs_are_multiplied(compile_two, monkeypatch):
    monkeypatch.setattr(
        build, "compiler_flags", lambda machine=None: {"fastbf16": (), "fast": (), build.baseline(): ()}
    )
    monkeypatch.setattr(build, "PAIRED_SOURCES", ("finite.c",))
    monkeypatch.setenv(build.SETTING, "fastbf16")
    assert compile_two() == ["cpu_support.c", *["finite.c"] * 3, *["top_entries.c"] * 2]
    opened = compile_two.opened()
    assert hasattr(opened, "regard_finite_fastbf16")
    assert hasattr(opened, "regard_top_entries_fast")  # which was not asked for, but is called
    assert not hasattr(opened, "regard_top_entries_fastbf16")


def test_a_variant_in_pairs_goes_with_the_one_that_it_calls(compile_two, monkeypatch):
    flags = {"fastbf16": (), "fast": ("-mno-such-flag",), build.baseline(): ()}
    monkeypatch.setattr(build, "compiler_flags", lambda machine=None: flags)
    monkeypatch.setattr(build, "PAIRED_SOURCES", ("finite.c",))
    compile_two(all_variants=True)
    assert not hasattr(compile_two.opened(), "regard_finite_fastbf16")
    assert hasattr(compile_two.opened(), f"regard_finite_{build.baseline()}")


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("variant", [name for name in build.compiler_flags() if name.endswith(build.PAIRED)])
def test_the_sources_that_multiply_in_pairs_are_those_compiled_for_it(variant):
    own = re.compile(
        r"\bvdpbf16ps|\bvcvtne\w*bf16|\bvpdpbusd|\bbfdot|\bbfcvt|\bbfml"  # products in pairs, and of codes in fours
        r"|\b(call|jmp|bl|b)\s+regard_decode_x\b"  # a function that has them
    )
    for source in build.SOURCES_PER_VARIANT:
        command = [str(COMPILER), "-std=gnu11", "-O1", *build.compiler_flags()[variant], "-DVARIANT=x", "-S", "-o", "-"]
        done = subprocess.run([*command, str(build.SOURCES / source)], capture_output=True, text=True, check=True)
        is_paired = own.search(done.stdout) is not None
        assert is_paired <= (source in build.PAIRED_SOURCES), source
        if (
            variant == "avx512bf16" and source != "panels.c"
        ):  # which says whether bytes are multiplied, and multiplies none
            assert is_paired == (source in build.PAIRED_SOURCES), source  # of codes no other variant has products


def test_an_unknown_variant_asked_for(compile_two, monkeypatch):
    monkeypatch.setenv(build.SETTING, "strange,stranger")
    assert build.build(compile_two.library, keep=compile_two.kept) == (
        f"REGARD_VARIANTS is 'strange,stranger', where 'stranger' is no variant: name some of "
        f"['strange', '{build.baseline()}'], or 'all'"
    )


def test_a_compiler_that_knows_no_wider_variant(compile_two, monkeypatch):
    monkeypatch.setattr(
        build, "compiler_flags", lambda machine=None: {"wide": ("-mno-such-flag",), build.baseline(): ()}
    )
    (compile_two.library / build.REASON).write_text("an older reason")
    compile_two(all_variants=True)
    assert sorted(path.name for path in compile_two.library.iterdir()) == [build.LIBRARY, build.CHECKSUM]
    assert not hasattr(compile_two.opened(), "regard_finite_wide")
    assert hasattr(compile_two.opened(), f"regard_finite_{build.baseline()}")


def test_where_object_files_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkout, in_cache = tmp_path / "checkout", tmp_path / "cache" / "regard" / "native"
    monkeypatch.setattr(build, "SOURCES", checkout / "src" / "regard" / "native")
    assert build.kept_folder() == in_cache
    checkout.mkdir()
    (checkout / "hatch_build.py").write_text("")
    assert build.kept_folder() == checkout / "build" / "native"
    assert build.kept_folder(editable=False) == in_cache
    (checkout / "build" / "native").mkdir(parents=True)
    assert build.kept_folder(editable=False) == checkout / "build" / "native"


def test_the_sum_is_what_sha256sum_checks(compile_two):
    compile_two()
    library = (compile_two.library / build.LIBRARY).read_bytes()
    assert (
        compile_two.library / build.CHECKSUM
    ).read_text() == f"{hashlib.sha256(library).hexdigest()}  libregard.so\n"


def test_every_source_is_compiled():
    assert {path.name for path in build.SOURCES.glob("*.c")} == {*build.SOURCES_PER_VARIANT, build.CPU_SUPPORT}
    assert {path.name for path in build.SOURCES.glob("*.[ch]")} == {
        *build.files_of(*build.SOURCES_PER_VARIANT, build.CPU_SUPPORT)
    }


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
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The build hook, which keeps nothing; hatchling itself is only there while a wheel is built."""
    interface = ModuleType("hatchling.builders.hooks.plugin.interface")
    links = ModuleType("hatchling.metadata.plugin.interface")
    tags = ModuleType("packaging.tags")
    monkeypatch.setattr(links, "MetadataHookInterface", object, raising=False)
    monkeypatch.setattr(interface, "BuildHookInterface", Builder, raising=False)
    monkeypatch.setattr(tags, "platform_tags", lambda: iter(["manylinux_2_36_any", "linux_any"]), raising=False)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setitem(sys.modules, links.__name__, links)
    monkeypatch.setitem(sys.modules, tags.__name__, tags)
    monkeypatch.setitem(sys.modules, "packaging", ModuleType("packaging"))
    module = runpy.run_path(str(ROOT / "hatch_build.py"))

    def load(path: Path) -> ModuleType:
        builder = module["load"](path)
        builder.kept_folder = lambda **_: tmp_path / "kept"
        return builder

    monkeypatch.setitem(module["NativeCode"].initialize.__globals__, "load", load)
    return module["NativeCode"]()


def test_the_links_are_those_of_the_published_address(hook, monkeypatch):
    links, metadata = hook.initialize.__func__.__globals__["ProjectLinks"](), {}
    monkeypatch.delenv("REGARD_URL", raising=False)
    links.update(metadata)
    assert metadata == {"urls": {}}
    monkeypatch.setenv("REGARD_URL", "https://host/owner/regard/")
    links.update(metadata)
    assert metadata["urls"]["Source"] == "https://host/owner/regard"
    assert {"Source", "Documentation", "Changelog", "Issues"} == metadata["urls"].keys()
    monkeypatch.setenv("REGARD_URL", "host/owner")
    with pytest.raises(
        ValueError, match=r"^REGARD_URL is 'host/owner'; it needs the address .* https://host/owner/reg"
    ):
        links.update(metadata)


@pytest.mark.slow
@compiles
@whole_library
def test_a_wheel_holds_every_variant_compiled_without_a_warning_and_says_for_which_system(hook, monkeypatch):
    monkeypatch.setenv("CC", "cc -Werror -Wpedantic -Wno-overlength-strings")
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    assert hook.warnings == []
    source, checksum = data["force_include"]
    assert build.damage(Path(source).parent) is None
    assert Path(checksum).parent == Path(source).parent
    assert [*data["force_include"].values()] == [
        f"regard/backends/cpu/{name}" for name in (build.LIBRARY, build.CHECKSUM)
    ]
    assert (data["pure_python"], data["tag"]) == (False, "py3-none-linux_any")
    opened = ctypes.CDLL(source)
    opened.regard_digest.restype = ctypes.c_char_p
    assert opened.regard_digest().decode() == build.digest()
    assert all(hasattr(opened, f"regard_flash_backward_{name}") for name in build.compiler_flags())
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


def test_a_wheel_for_another_platform_has_its_tag_and_its_bill_of_materials(hook, monkeypatch, tmp_path):
    asked = {}

    builder = SimpleNamespace(build=lambda folder, **options: asked.update(options), LIBRARY="a", CHECKSUM="b")
    builder.kept_folder = lambda **_: tmp_path
    loading = hook.initialize.__func__.__globals__
    load = loading["load"]
    monkeypatch.setitem(loading, "load", lambda path: builder if path.name == "build.py" else load(path))
    core = SimpleNamespace(name="regard", dependencies=["torch>=2.11"])
    hook.metadata = SimpleNamespace(core=core, version="1.2")
    monkeypatch.setenv("REGARD_PLATFORM", "macosx_11_0_arm64")
    data: dict[str, Any] = {"force_include": {}, "sbom_files": []}
    hook.initialize("standard", data)
    assert (data["tag"], asked["machine"], asked["all_variants"]) == ("py3-none-macosx_11_0_arm64", "arm64", True)
    (bill,) = data["sbom_files"]
    assert '"purl": "pkg:pypi/regard@1.2"' in Path(bill).read_text("utf-8")
    hook.finalize("standard", data, "")


def test_a_wheel_for_another_platform_is_not_made_without_native_code(hook, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("REGARD_PLATFORM", "win_amd64")
    with pytest.raises(RuntimeError, match="there is no native code for REGARD_PLATFORM=win_amd64: no C compiler was"):
        hook.initialize("standard", {"force_include": {}, "sbom_files": []})
