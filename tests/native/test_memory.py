"""The C code reads and writes only memory that is its own, and that was written before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard import native
from regard.backends.cpu import build

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("gcc")
# Freed and foreign memory ends the process; variables on the stack begin as 0xFE.., which is no address.
CHECKED = ("-O1", "-g1", "-fsanitize=address", "-ftrivial-auto-var-init=pattern")
TESTS = (
    "flash",
    "flash_weights",
    "reductions",
    "decode_rows",
    "gemv",
    "linear_recurrence",
    "additive_forward",
    "whole_additive",
    "counted_rows",
    "looked_up_rows",
    "short_attention",
    "gru_decoder",
    "top_entries",
    "top_products",
    "transformer_step",
)


def runtime(name: str) -> str | None:
    """The path of a library that comes with the compiler."""
    if COMPILER is None:
        return None
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return str(path) if path.is_absolute() and path.exists() else None


@pytest.mark.slow
@pytest.mark.usefixtures("built")
@pytest.mark.timeout(1800)  # a build and many tests, each access to memory checked
@pytest.mark.skipif(runtime("libasan.so") is None, reason="gcc has no address sanitizer here")
def test_the_tests_of_native_code_in_checked_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(COMPILER))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *CHECKED))
    fastest = native.variants()[0]
    chosen = {fastest: build.compiler_flags()[fastest], build.baseline(): ()}
    monkeypatch.setattr(build, "compiler_flags", lambda _: chosen)
    copied = tmp_path / "regard"
    shutil.copytree(ROOT / "src" / "regard", copied, ignore=shutil.ignore_patterns("__pycache__", "*.so", "static"))
    assert build.build(copied / "backends" / "cpu") is None
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libstdc++.so')}",  # torch throws exceptions of C++
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    tests = [str(ROOT / "tests" / "native" / f"test_{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert " skipped" not in done.stdout.splitlines()[-1]
