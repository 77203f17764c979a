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
sys.argv = ["regard", "train", "missing.yaml"]
import regard_command
def watch(event, arguments):
    if event == "import" and arguments[0] == "torch":
        print(os.environ.get("OMP_WAIT_POLICY"))
        raise SystemExit
sys.addaudithook(watch)
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


@pytest.mark.parametrize("first", ["regard", "torch", "regard.errors"])
def test_no_garbage_is_searched_while_torch_is_loaded_and_what_comes_later_is(first):
    program = f"""
import gc, sys
import regard_command
sys.meta_path.insert(0, regard_command.LibraryFinder)
loading = []
gc.callbacks.append(lambda phase, info: loading.append("torch._C" in sys.modules))
import {first}
print(any(loading), gc.isenabled(), gc.get_freeze_count() > 100_000)
class Knot:
    pass
knot = Knot()
knot.itself = knot
del knot
print(gc.collect() > 0)
"""
    assert printed(program) == "False True True\nTrue"


def test_the_command_loads_torch_so():
    program = """
import atexit, gc, sys
import regard_command
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 100_000))
sys.argv = ["regard", "advise", "--tokens", "1024"]
regard_command.main()
"""
    assert printed(program).endswith("True True")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["steps", "--example", "list"],
        ["exercise", "list"],
        ["translate", "--help"],
        ["steps", "--sheet", "a.html", "b"],
    ],
)
def test_what_computes_nothing_loads_no_torch(arguments):
    program = (
        f"import sys; sys.argv = ['regard', *{arguments!r}]; import regard_command\n"
        "try:\n    regard_command.main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "loads"),
    [
        (["--help"], False),
        (["translate", "--help"], False),
        (["steps", "--example", "list"], False),
        (["examine", "--help"], False),
        (["doctor", "--help"], True),
    ],
)
def test_the_rules_of_the_doctor_are_loaded_by_its_command_alone(arguments, loads):
    program = (
        f"import sys; sys.argv = ['regard', *{arguments!r}]; import regard_command\n"
        "try:\n    regard_command.main()\nfinally:\n    print('regard_doctor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == str(loads), done.stderr


def test_the_benchmark_measures_what_other_processes_have():
    assert printed(LOADING.replace('"train", "missing.yaml"', '"bench"')) == "None"


def test_importing_the_library_touches_no_setting(warm_python):
    assert printed("import os, regard; print(os.environ.get('OMP_WAIT_POLICY'))", warm_python) == "None"


def test_the_console_script_is_this_one():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"regard": f"{regard_command.__name__}:{regard_command.main.__name__}"}
