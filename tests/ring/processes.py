"""Processes of a ring for the tests: one import of torch, several forks of it, each of which runs jobs by name.

Run as a program it is the processes; `Pool` starts it and sends jobs. Jobs are functions of ring_jobs.py.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
MOST = 5
"""The most processes of a ring in the tests."""
PATIENCE = 120.0
"""Seconds after which a job without an answer is an error of the test."""


class Pool:
    """Processes that form a gloo group over a file in `folder`."""

    def __init__(self, folder: Path, processes: int, timeout: float = 60.0) -> None:
        address = str(folder / "jobs")
        with Listener(address) as listener:
            self.program = subprocess.Popen(
                [sys.executable, __file__, address, str(processes), str(folder / "store"), str(timeout)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
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
            connection.close()
        self.program.wait(PATIENCE)


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


def main(address: str, processes: str, store: str, timeout: str) -> None:
    sys.path.insert(0, str(HERE))
    importlib.import_module("ring_jobs")  # once, before the processes part
    children = []
    for rank in range(int(processes)):
        if child := os.fork():
            children.append(child)
        else:
            with contextlib.suppress(EOFError):
                serve(rank, address, int(processes), store, float(timeout))
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
