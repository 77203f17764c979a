import os
import subprocess

import pytest
import torch
from small_runs import copier, text

import regard_command
from regard.translation import spinning_threads
from regard.translation.spinning_threads import SETTINGS, SpinningCheck, seconds_waited


@pytest.fixture
def busy(monkeypatch):
    """A machine whose cores others occupy: threads wait as long as they run."""
    waited = iter(range(0, 10_000, 10))
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(spinning_threads, "_warned", False)
    monkeypatch.setattr(spinning_threads, "SECONDS_BETWEEN_CHECKS", 0.0)
    monkeypatch.setattr(spinning_threads, "seconds_waited", lambda: float(next(waited)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def messages(logged) -> list[str]:
    return [record.getMessage() for record in logged if record.name == spinning_threads.__name__]


def test_it_is_said_once_with_the_mend(busy, logged):
    for _ in range(3):
        SpinningCheck().check()
    [message] = messages(logged)
    assert "waited 10 s for a core" in message
    assert "set OMP_WAIT_POLICY=PASSIVE in the environment before Python starts" in message


@pytest.mark.parametrize("name", SETTINGS)
def test_who_has_chosen_how_threads_wait_is_told_nothing(busy, logged, monkeypatch, name):
    monkeypatch.setenv(name, "ACTIVE")
    SpinningCheck().check()
    assert messages(logged) == []


def test_the_command_knows_the_same_settings():
    assert SETTINGS == regard_command.WAITING


def test_one_thread_waits_for_no_other(busy, logged, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    SpinningCheck().check()
    assert messages(logged) == []


def test_threads_that_have_their_cores_are_no_matter(busy, logged, monkeypatch):
    monkeypatch.setattr(spinning_threads, "seconds_waited", lambda: 1.0)
    SpinningCheck().check()
    assert messages(logged) == []


def test_trainings_and_translations_say_it(busy, logged, monkeypatch):
    from test_translator import ENGLISH, reverser

    from regard.translation.settings import TrainingSettings
    from regard.translation.training import fit

    settings = TrainingSettings(batch_tokens=60, accelerator="cpu", max_epochs=1)
    fit(copier(), text(30), settings)
    assert len(messages(logged)) == 1
    monkeypatch.setattr(spinning_threads, "_warned", False)
    reverser(ENGLISH).translate(ENGLISH)
    assert len(messages(logged)) == 2


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="only Linux tells how long threads wait")
def test_threads_of_a_process_that_share_one_core_wait_for_it(warm_python):
    program = """
import os, threading, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from regard.translation.spinning_threads import seconds_waited
import hashlib
data, before, end = bytes(1 << 20), seconds_waited(), time.monotonic() + 1.5
def work():
    while time.monotonic() < end:
        hashlib.sha256(data)  # releases the lock of the interpreter
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
time.sleep(1)
print(seconds_waited() - before)
"""
    done = subprocess.run([*warm_python, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 0.3
    assert seconds_waited() >= 0.0
