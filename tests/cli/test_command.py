"""The console script: how OpenMP threads wait is settled before torch is loaded."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import regard_command

LOADING = """
import os, sys
sys.argv = ["regard", "train"]
import regard_command
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            raise SystemExit
sys.meta_path.insert(0, Finder)
regard_command.main()
"""


def printed(program: str, python: Sequence[str] = (sys.executable,), **environment: str) -> str:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([*python, "-c", program], capture_output=True, text=True, env=clean | environment)
    assert not done.stderr
    return done.stdout.strip()


def test_threads_sleep_while_they_wait_from_before_torch_is_loaded():
    assert printed(LOADING) == "PASSIVE"


@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "1000")])
def test_a_setting_of_the_user_wins(name, value):
    assert printed(LOADING, **{name: value}) == (value if name == "OMP_WAIT_POLICY" else "None")


def test_the_benchmark_measures_what_other_processes_have():
    assert printed(LOADING.replace('"train"', '"bench"')) == "None"


def test_importing_the_library_touches_no_setting(warm_python):
    assert printed("import os, regard; print(os.environ.get('OMP_WAIT_POLICY'))", warm_python) == "None"


def test_the_console_script_is_this_one():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"regard": f"{regard_command.__name__}:{regard_command.main.__name__}"}
