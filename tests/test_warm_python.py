"""Programs of `warm_python` run as those of `python` do, and are new processes."""

import os
import signal
import subprocess
import sys

import pytest


@pytest.fixture(params=["new", "warm"])
def python(request: pytest.FixtureRequest, warm_python: list[str]) -> list[str]:
    return {"new": [sys.executable], "warm": warm_python}[request.param]


def test_streams_arguments_environment_and_folder(python, tmp_path):
    program = (
        "import os, sys\n"
        "print(sys.stdin.read(), sys.argv, os.environ['NAME'], os.getcwd(), __name__, sys.path[0] == '')\n"
        "print('error', file=sys.stderr)"
    )
    done = subprocess.run(
        [*python, "-c", program, "é", ""],
        input="input",
        capture_output=True,
        text=True,
        env=os.environ | {"NAME": "a\nb"},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "error\n")
    assert done.stdout == f"input ['-c', 'é', ''] a\nb {tmp_path} __main__ True\n"


def test_a_file(python, tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    file = tmp_path / "program.py"
    file.write_text("import sys, beside\nprint(sys.argv, __name__, __spec__, __file__, beside.NAME)")
    done = subprocess.run([*python, file, "argument"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"['{file}', 'argument'] __main__ None {file} beside\n"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_how_it_ends(python, program, status):
    done = subprocess.run([*python, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert ("ZeroDivisionError: division by zero" in done.stderr) == (program == "1 / 0")


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 7), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signals_reach_it(python, sent, status):
    if signal.getsignal(sent) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as in jobs of a shell in the background, and programs inherit that")
    program = (
        "import os, time\n"
        "try:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt: raise SystemExit(7)"
    )
    with subprocess.Popen([*python, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(sent)
        assert process.stdout.read() == b""  # the program itself has ended, too
        assert process.wait(60) == status


def test_it_has_loaded_torch_and_nothing_of_regard(warm_python):
    program = "import sys; print('torch' in sys.modules, *(name for name in sys.modules if name.startswith('regard')))"
    done = subprocess.run([*warm_python, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True"] if hasattr(os, "pidfd_open") else ["False"]
    assert done.stderr == ""
