"""Processes of a ring for the tests: one import of torch, and forks of it, each of which runs jobs by name.

Run as a program it forks groups of processes; `Program` starts it, `Pool` asks it for a group and sends jobs. Jobs are
functions of ring_jobs.py.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
MOST = 5
"""The most processes of a ring in the tests."""
PATIENCE = 120.0
"""Seconds after which a job without an answer is an error of the test."""


class Program:
    """A process that has loaded torch and the jobs, and forks groups."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def fork(self, *request: object) -> None:
        """Fork a group; the arguments are those of `fork_group`."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=PATIENCE)


class Pool:
    """Processes that form a gloo group over a file in `folder`; `modules` are imported before they part."""

    def __init__(
        self, program: Program, folder: Path, processes: int, timeout: float = 60.0, modules: Sequence[str] = ()
    ) -> None:
        address = str(folder / "jobs")
        with Listener(address) as listener:
            program.fork(address, processes, str(folder / "store"), timeout, modules)
            connections = [listener.accept() for _ in range(processes)]
        self.connections: dict[int, Connection] = {connection.recv(): connection for connection in connections}

    def run(self, job: str, processes: int | None = None, /, **arguments: Any) -> list[Any]:
        """The results of a job in the first `processes` processes; of one that raises, its error as text."""
        chosen = range(len(self.connections) if processes is None else processes)
        for rank in chosen:
            self.connections[rank].send_bytes(pickle.dumps((job, len(chosen), arguments)))  # tensors by value
        return [self.answer(rank) for rank in chosen]

    def answer(self, rank: int) -> Any:
        """The result of a process; "lost" if it is gone."""
        if not self.connections[rank].poll(PATIENCE):
            raise TimeoutError(f"process {rank} has not answered for {PATIENCE} s")
        try:
            return self.connections[rank].recv()
        except (EOFError, ConnectionResetError):
            return "lost"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(None))
        for rank, connection in self.connections.items():
            assert self.answer(rank) == "lost"  # it has ended
            connection.close()


def serve(rank: int, address: str, processes: int, store: str, timeout: float) -> None:
    """Run jobs until None comes."""
    import ring_jobs

    ring_jobs.start(rank, processes, store, timeout)
    with Client(address) as connection:
        connection.send(rank)
        while (received := pickle.loads(connection.recv_bytes())) is not None:
            job, among, arguments = received
            try:
                connection.send(getattr(ring_jobs, job)(among, **arguments))
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                connection.send(told if isinstance(error, ValueError) else traceback.format_exc())


def fork_group(address: str, processes: int, store: str, timeout: float, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    for rank in range(processes):
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sys.stdin.close()
            with contextlib.suppress(EOFError):
                serve(rank, address, processes, store, timeout)
            os._exit(0)


def main() -> None:
    sys.path.insert(0, str(HERE))
    importlib.import_module("ring_jobs")  # once, before the processes part
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    for line in sys.stdin:
        fork_group(*json.loads(line))


if __name__ == "__main__":
    main()
