import multiprocessing
import os
import sys
import threading

import pytest
import torch

from regard.backends.cpu import threads


@pytest.fixture(params=["OpenMP's threads", "threads of its own"], autouse=True)
def team(request, monkeypatch) -> None:
    """The threads that torch brought along, and those that serve where it brought none."""
    if request.param == "threads of its own":
        monkeypatch.setattr(threads, "_team", lambda: None)
    elif threads._team() is None:
        pytest.skip("torch has brought no OpenMP along")


def test_parts_are_even_and_cover_all():
    for begin, end, count, step in (
        (0, 0, 3, 1),
        (0, 2, 5, 1),
        (3, 100, 7, 1),
        (5, 200, 2, 64),
        (65, 70, 3, 64),
        (0, 640, 3, 64),
    ):
        found = threads.split_range(begin, end, count, step)
        assert [place for low, high in found for place in range(low, high)] == list(range(begin, end))
        assert len(found) <= count
        assert all(low % step == 0 for low, _ in found[1:])
    assert threads.split_range(0, 12, 3) == [(0, 4), (4, 8), (8, 12)]


def test_threads_are_worth_their_work(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert [threads.thread_count(work, 100) for work in (0, 99, 250, 10**6)] == [1, 1, 2, 4]


def test_each_job_is_done_once_by_its_worker():
    done = []
    threads.run_jobs(lambda worker, job: done.append((worker, job)), range(10), 3)
    assert sorted(done) == [(job // 3 if job < 6 else 2, job) for job in range(10)]
    done.clear()
    threads.run_jobs(lambda worker, job: done.append((worker, job, threading.get_ident())), range(3), 1)
    assert done == [(0, job, threading.get_ident()) for job in range(3)]
    threads.run_jobs(lambda worker, job: done.append(job), [], 3)
    assert len(done) == 3


@pytest.mark.parametrize("bad", [0, 5])
def test_an_error_of_a_worker_is_raised_when_all_have_ended(bad):
    done = []

    def call(_: int, job: int) -> None:
        if job == bad:
            raise RuntimeError(f"job {job}")
        done.append(job)

    with pytest.raises(RuntimeError, match=f"job {bad}"):
        threads.run_jobs(call, range(6), 6)
    assert len(done) == 5


def forked() -> None:
    done = []
    threads.run_jobs(lambda worker, job: done.append(job), range(4), 4)
    os._exit(0 if sorted(done) == [0, 1, 2, 3] else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    threads.run_jobs(lambda worker, job: None, range(4), 4)
    child = multiprocessing.get_context("fork").Process(target=forked)
    child.start()
    child.join(60)
    assert child.exitcode == 0
