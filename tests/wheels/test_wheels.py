import hashlib
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "wheels"))

from bill_of_materials import bill_of_materials  # noqa: E402
from cross_compiler import translated  # noqa: E402
from platforms import PLATFORMS, Platform  # noqa: E402
from wheel_contents import CHECKSUM, LIBRARY, MOST_BYTES, faults, format_and_processor  # noqa: E402

from regard.backends.cpu import build  # noqa: E402

ABOUT = "regard-1.dist-info"
HEADERS = {
    ("ELF", "x86-64"): b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", 62),
    ("ELF", "aarch64"): b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", 183),
    ("Mach-O", "x86-64"): b"\xcf\xfa\xed\xfe" + struct.pack("<I", 0x01000007),
    ("Mach-O", "aarch64"): b"\xcf\xfa\xed\xfe" + struct.pack("<I", 0x0100000C),
    ("PE", "x86-64"): b"MZ".ljust(60, b"\0") + struct.pack("<I", 64) + b"PE\0\0" + struct.pack("<H", 0x8664),
}


def library_of(platform: Platform, more: bytes = b"") -> bytes:
    """What a reader of headers and names takes for the library of a platform."""
    names = b"".join(f"\0regard_flash_{variant}\0".encode() for variant in platform.variants)
    return HEADERS[platform.file_format, platform.processor] + names + more


def files_of(platform: Platform, library: bytes | None = None) -> dict[str, bytes]:
    """The files of a wheel with nothing wrong."""
    library = library_of(platform) if library is None else library
    tags = "".join(f"Tag: py3-none-{tag}\n" for tag in platform.tag.split("."))
    return {
        "regard/__init__.py": b"",
        LIBRARY: library,
        CHECKSUM: hashlib.sha256(library).hexdigest().encode() + b"  libregard.so\n",
        f"{ABOUT}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\n{tags}".encode(),
        f"{ABOUT}/licenses/LICENSE": b"",
        f"{ABOUT}/licenses/NOTICE": b"",
        f"{ABOUT}/sboms/regard.cdx.json": b"{}",
    }


def faults_of(folder: Path, platform: Platform, files: dict[str, bytes], name: str = "") -> list[str]:
    wheel = folder / (name or f"regard-1-py3-none-{platform.tag}.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return [*faults(wheel, platform)]


MANYLINUX, MUSLLINUX = PLATFORMS[0], next(platform for platform in PLATFORMS if "musl" in platform.tag)
WINDOWS = PLATFORMS[-1]


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.tag)
def test_a_wheel_as_it_should_be_has_no_fault(tmp_path, platform):
    assert faults_of(tmp_path, platform, files_of(platform)) == []


def test_pip_reads_the_tags_and_each_platform_has_its_own():
    from packaging.utils import parse_wheel_filename

    read = [parse_wheel_filename(f"regard-1-py3-none-{platform.tag}.whl")[3] for platform in PLATFORMS]
    assert all({(tag.interpreter, tag.abi) for tag in tags} == {("py3", "none")} for tags in read)
    assert len(frozenset().union(*read)) == sum(map(len, read)) == 9
    assert {(platform.file_format, platform.processor) for platform in PLATFORMS} == HEADERS.keys()


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.tag)
def test_the_variants_of_a_platform_are_those_that_are_built(platform):
    ending = platform.tag.removesuffix("_x86_64").rpartition("_")[2] if platform.processor == "aarch64" else "x86_64"
    assert tuple(build.compiler_flags(ending)) == platform.variants


@pytest.mark.parametrize(
    ("path", "content", "fault"),
    [
        (LIBRARY, None, f"it has no {LIBRARY}"),
        (f"{ABOUT}/licenses/NOTICE", None, f"it has no {ABOUT}/licenses/NOTICE"),
        (f"{ABOUT}/sboms/regard.cdx.json", None, f"it has no {ABOUT}/sboms/regard.cdx.json"),
        ("regard_models/english_french/best.safetensors", b"", "it has regard_models/english_french/best.safetensors,"),
        ("regard/backends/cpu/flash.c", b"", "it has regard/backends/cpu/flash.c, which no wheel should"),
        ("tests/test_x.py", b"", "it has tests/test_x.py, which no wheel should"),
        (CHECKSUM, b"0" * 64, f"{LIBRARY} is not that of {CHECKSUM}"),
        (f"{ABOUT}/WHEEL", b"Root-Is-Purelib: false\nTag: py3-none-linux_x86_64\n", "its tags are ['py3-none-linux_x8"),
        (f"{ABOUT}/WHEEL", b"Root-Is-Purelib: true\n", "it says that it is for every platform"),
    ],
)
def test_a_fault_of_a_file_is_found(tmp_path, path, content, fault):
    files = files_of(MANYLINUX)
    if content is None:
        del files[path]
    else:
        files[path] = content
    assert any(found.startswith(fault) for found in faults_of(tmp_path, MANYLINUX, files))


@pytest.mark.parametrize(
    ("platform", "library", "fault"),
    [
        (MANYLINUX, library_of(WINDOWS), "its library is PE for x86-64, not ELF for x86-64"),
        (MANYLINUX, b"no library", "its library is unknown for unknown, not ELF for x86-64"),
        (MANYLINUX, library_of(MANYLINUX)[:60], "its library has no functions of the variant plain"),
        (MANYLINUX, library_of(MANYLINUX, b"GLIBC_2.34\0"), "its library needs glibc 2.34, above 2.17"),
        (MUSLLINUX, library_of(MUSLLINUX, b"GLIBC_2.2.5\0"), "its library needs glibc, which is not where musl is"),
        (MANYLINUX, library_of(MANYLINUX, b".debug_info\0"), "its library holds debugging information"),
    ],
)
def test_a_fault_of_the_library_is_found(tmp_path, platform, library, fault):
    assert fault in faults_of(tmp_path, platform, files_of(platform, library))


def test_a_wheel_that_is_too_large_or_has_another_name(tmp_path):
    files = files_of(MANYLINUX) | {"regard/large.py": bytes(MOST_BYTES)}
    name = "regard-1-cp311-cp311-linux_x86_64.whl"
    size, *others = sorted(faults_of(tmp_path, MANYLINUX, files, name))
    assert size.startswith("it has 3,0")
    assert others == [f"its name does not end with -py3-none-{MANYLINUX.tag}.whl"]


def test_the_library_that_was_built_here_is_read():
    if not (build.SOURCES / build.LIBRARY).exists():
        pytest.skip("there is no native code")
    found = format_and_processor((build.SOURCES / build.LIBRARY).read_bytes())
    assert found == (
        {"linux": "ELF", "darwin": "Mach-O", "win32": "PE"}[sys.platform],
        "aarch64" if build.baseline() == "neon" else "x86-64",
    )


def test_arguments_of_another_compiler_are_translated():
    assert translated("aarch64-linux-musl", ["-O3", "-shared"])[:4] == ["-target", "aarch64-linux-musl", "-g0", "-O3"]
    assert "-fno-slp-vectorize" in translated("x86_64-linux-musl", ["-O3"])
    assert translated("x86_64-linux-musl", ["-mavx2", "flash.c"])[3:] == ["-mavx2", "flash.c"]


@pytest.mark.parametrize(("tag", "linked"), [("win_amd64", 2), ("musllinux_1_1_aarch64", 1)])
def test_the_bill_names_each_part_once(tag, linked):
    bill = bill_of_materials("regard", "1.2", tag, ["torch>=2.11", "numpy>=1.26"])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references) == 2 + linked
    assert bill["dependencies"] == [{"ref": "pkg:pypi/regard@1.2", "dependsOn": references}]
    assert [component["purl"] for component in bill["components"][:2]] == ["pkg:pypi/torch", "pkg:pypi/numpy"]
    assert all(component["licenses"] for component in bill["components"][2:])
    assert json.loads(json.dumps(bill)) == bill


def test_both_distributions_have_the_same_licence():
    assert (ROOT / "LICENSE").read_text() == (ROOT / "src" / "regard_models" / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("ziglang") is None, reason="there is no ziglang, which `make wheels` installs")
@pytest.mark.parametrize("platform", [WINDOWS, MUSLLINUX], ids=lambda platform: platform.tag)
def test_native_code_for_another_system(tmp_path, monkeypatch, platform):
    command = [sys.executable, str(ROOT / "wheels" / "cross_compiler.py"), platform.target]
    monkeypatch.setenv("CC", shlex.join(command))
    monkeypatch.setenv(build.SETTING, "plain,avx2")
    assert build.build(tmp_path, machine="x86_64") is None
    library = (tmp_path / build.LIBRARY).read_bytes()
    assert format_and_processor(library) == (platform.file_format, platform.processor)
    assert b"regard_flash_avx2\0" in library
    assert b"regard_flash_avx512\0" not in library
    program = tmp_path / "native_check.exe"
    subprocess.run(
        [*command, "-I", build.SOURCES, ROOT / "wheels" / "native_check.c", "-o", program, "-lm"], check=True
    )
    wine = shutil.which("wine")
    if platform is WINDOWS and wine:
        environment = os.environ | {"WINEPREFIX": str(tmp_path / "wine"), "WINEDEBUG": "-all"}
        said = subprocess.run(
            [wine, program, f"Z:{tmp_path / build.LIBRARY}", "avx2", "plain"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "plain: error" in said.stdout
