"""`regard-doctor`: a distribution of its own, without torch and without the library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import regard
import regard_doctor
from regard_doctor import diagnosis

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
WRONG = "def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v\n"


@pytest.fixture
def alone(tmp_path):
    """A folder with the package and nothing else of the library, for a process in which torch cannot be imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "regard_doctor").symlink_to(SOURCES / "regard_doctor")
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.modules.update(torch=None, regard=None)\n")
    (tmp_path / "wrong.py").write_text(WRONG)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        code = "from regard_doctor.command import main; main()"
        told = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=told)

    return run


def test_it_finds_without_torch_and_without_the_library(alone):
    done = alone("wrong.py", "--min-severity", "error")
    assert done.returncode == 1
    assert done.stdout.startswith("wrong.py:2:12: ATT111 softmax over axis -2")


def test_a_page_needs_the_library(alone, tmp_path):
    done = alone("wrong.py", "--html", "page.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "regard: --html needs the package 'regard', which draws the page; pip install regard\n"
    assert not (tmp_path / "page.html").exists()


def test_a_mistake_of_the_user_is_one_line(alone):
    done = alone("gone")
    assert done.returncode == 2
    assert done.stderr == "regard: there is no file or folder 'gone'; name one that exists\n"


def test_the_command_of_the_library_starts_without_torch(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    code = (
        "import sys; from regard_command import main\ntry:\n    main()\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'regard' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "doctor", "wrong.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "1 False False"


def test_the_library_says_where_the_doctor_is_to_be_had(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("regard_doctor", "regard.doctor"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "regard_doctor", None)
    with pytest.raises(
        regard.errors.MissingExtra, match="'regard-doctor', which is not installed; pip install regard-doctor"
    ):
        __import__("regard.doctor")


def test_versions_and_licences_are_those_of_the_library():
    assert regard_doctor.__version__ == regard.__version__
    for name in ("LICENSE", "NOTICE"):
        assert (SOURCES / "regard_doctor" / name).read_text() == (ROOT / name).read_text()


def test_processes_are_those_asked_for_where_the_system_tells_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    asked = []

    def pool(jobs, **_):
        asked.append(jobs)
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosis, "ProcessPoolExecutor", pool)
    for jobs in (None, 2):
        with pytest.raises(KeyboardInterrupt):
            diagnosis.diagnose_files([ROOT / "conftest.py"] * 1000, jobs=jobs)
    assert asked == [3, 2]


def test_the_hook_and_the_action_run_the_command_that_is_installed():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["entry"], hook["language"]) == ("regard-doctor", "system")
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    assert any("src/regard_doctor" in step["run"] for step in steps)
