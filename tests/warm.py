"""A Python that starts with torch loaded, for what pages and users start in processes of their own.

Its folder has the programs ``python``, ``scidata`` and ``torchrun``. Each has a server fork, and lends the fork its
arguments, environment, folder and open files; it passes signals on, and ends as the fork ends. The server is itself a
fork of what ``run_ranks`` forks ranks from. In a fork, ``sys.executable`` is the folder's ``python``: what torchrun,
Jupyter and ``multiprocessing`` start, starts so too. A start takes 0.1 s of a processor instead of 2.5.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from scidata.testing.ranks import fork_server

#: Beside what ranks have. Not IPython: programs take note of it.
_LOADED = ("torch.distributed.run", "matplotlib.backends.backend_agg", "jupyter_client", "prompt_toolkit")
#: What stands in a program: ``words`` are those of the command line, after Python's own name. Options that are not
#: listed, and no words, are for Python itself.
_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys

words = {words} + sys.argv[1:]
if not words or (words[0][0] == "-" and words[0] not in ("-c", "-m", "-u")):
    os.execv({python!r}, [{python!r}, *words])
files = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    said = json.dumps([words, dict(os.environ), os.getcwd(), files]).encode()
    socket.send_fds(server, [len(said).to_bytes(8, "little")], files)
    server.sendall(said)
    fork = int.from_bytes(server.recv(8), "little")
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, lambda number, frame: os.kill(fork, number))
    code = int.from_bytes(server.recv(8), "little", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[Path]:
    """Write the programs to a folder, and have a server for them until the end."""
    own = Path(sys.executable).parent
    if sys.platform != "linux":  # the same programs, which start slowly
        yield own
        return
    for name in ("python", "scidata", "torchrun"):
        words = [] if name == "python" else [str(own / name)]
        text = _PROGRAM.format(python=sys.executable, words=words, address=str(folder / "address"))
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    context = fork_server()
    ready, said = context.Pipe(duplex=False)
    server = context.Process(target=_serve, args=(str(folder), said))
    server.start()
    multiprocessing.process._children.discard(server)  # tests look for children that the library leaves
    said.close()
    try:
        ready.recv()
        yield folder
    finally:
        server.terminate()
        server.join()


def _serve(folder: str, ready: Connection) -> None:
    """Fork for each program that asks."""
    for name in _LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    shown = subprocess.run([sys.executable, "-Ic", "import sys; print(*sys.path, sep='\\n')"], stdout=-1, check=True)
    sys.path[:] = shown.stdout.decode().splitlines()
    sys.executable = str(Path(folder) / "python")
    multiprocessing.spawn.set_executable(sys.executable)
    # a fork is nobody's worker: it may have workers of its own
    multiprocessing.process._parent_process = None
    multiprocessing.current_process().name, multiprocessing.current_process()._identity = "MainProcess", ()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch over a fork
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(Path(folder) / "address"))
        server.listen(64)
        ready.send(None)
        while True:
            program, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _fork_for(program)
            program.close()


def _fork_for(program: socket.socket) -> None:
    """Fork, and say how the fork has ended; end it where the program has been killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    size, lent, _, _ = socket.recv_fds(program, 8, 250)
    with program.makefile("rb") as said:
        words, environ, folder, numbers = json.loads(said.read(int.from_bytes(size, "little")))
    fork = os.fork()
    if fork == 0:
        program.close()
        _be(words, environ, folder, dict(zip(numbers, lent, strict=True)))
    with contextlib.suppress(OSError):
        program.sendall(fork.to_bytes(8, "little"))
    for file in lent:
        os.close(file)
    ended = os.pidfd_open(fork)
    ready, _, _ = select.select([ended, program], [], [])
    if ended not in ready:
        os.kill(fork, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    with contextlib.suppress(OSError):
        program.sendall(code.to_bytes(8, "little", signed=True))
    os._exit(0)


def _be(words: list[str], environ: dict[str, str], folder: str, lent: dict[int, int]) -> None:
    """Be the Python that a program stands for, to its end."""
    files = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 250) for number, file in lent.items()}
    for file in lent.values():
        os.close(file)
    for number, file in files.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    code = 0
    try:
        _run(words)
    except SystemExit as e:
        if e.code is not None:
            code = e.code if isinstance(e.code, int) else 1
            if not isinstance(e.code, int):
                print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _run(words: list[str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    option, *rest = words
    first = "" if option == "-c" else os.getcwd() if option == "-m" else os.path.dirname(os.path.realpath(option))
    found = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [first, *found]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], main.__dict__)
    else:
        sys.argv = words
        main.__file__ = option
        exec(compile(Path(option).read_bytes(), option, "exec"), main.__dict__)
