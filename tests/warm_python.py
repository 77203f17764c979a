"""A Python that has loaded torch: a program starts in hundredths of a second rather than in seconds.

    python -IS warm_python.py SOCKET -c PROGRAM ARGUMENT...
    python -IS warm_python.py SOCKET FILE ARGUMENT...

runs a program as `python -c PROGRAM ARGUMENT...` or `python FILE ARGUMENT...` does, but in a fork of the process that
accepts connections at the socket. The fork has the standard streams, the environment and the folder of this process,
which passes signals on and ends as the fork ends.

    python warm_python.py DESCRIPTOR MODULE...

is the process that accepts connections, until its standard input is closed. It has loaded torch, the modules named and
nothing of regard, and never computes, so that a program cannot tell its forks from new processes but by their modules.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from typing import NoReturn


def ask(path: str, arguments: list[str]) -> NoReturn:
    """Run a program in a fork of the server, and end as it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as answers:
            program = int(answers.readline())
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _: os.kill(program, number))
            status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def accept_programs(listener: socket.socket) -> list[str]:
    """Accept connections; returns in a fork for each, with the arguments of its program."""
    # Who waits for a program is a fork, too; nobody waits for that one.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        if 0 in ready:
            sys.exit()
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            return start_program(connection)
        connection.close()


def start_program(connection: socket.socket) -> list[str]:
    """Return in a fork that has what the other side of the connection has, and report how that fork ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection, connection.makefile() as requests:
        request = json.loads(requests.readline())
        program = os.fork()
        if program:
            for stream in (0, 1, 2, *streams):
                os.close(stream)
            wait_for(program, connection)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    return request["arguments"]


def wait_for(program: int, connection: socket.socket) -> NoReturn:
    """Send the identifier of a process, and how it ends; it is killed where nobody is interested any more."""
    connection.sendall(f"{program}\n".encode())
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if ended in ready:
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def start(arguments: list[str]) -> None:
    """Run what stands behind `python` in a command: `-c PROGRAM ARGUMENT...` or `FILE ARGUMENT...`."""
    if arguments[0] != "-c":
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    option, source, *rest = arguments
    sys.argv, sys.path[0] = [option, *rest], ""
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "<string>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    descriptor, *more = sys.argv[1:]
    if not descriptor.isdecimal():
        ask(descriptor, more)
    for name in ("torch", *more):
        importlib.import_module(name)
    gc.freeze()  # what is loaded is not collected at the end of each fork
    start(accept_programs(socket.socket(fileno=int(descriptor))))
