"""Hosts of a small network on this machine: network namespaces with names of their own, joined by a bridge.

A process of a host sees the host's name, interface, processes, ``/etc/hosts`` and ``/dev/shm``, and no other's; files
are the machine's. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_NETWORK, _SLOW_NETWORK = "10.88.7", "10.88.8"
#: Variables of launchers and sites that would reach the processes of a host.
_FOREIGN = ("SLURM", "OMPI_", "PMI", "TORCHELASTIC", "MASTER_", "GLOO_", "RANK", "LOCAL_", "WORLD_SIZE", "CUDA_")
_SUBREAPER = 36  # of prctl
_started: set[int] = set()


def ip(*words: str, check: bool = True) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *words], check=check, capture_output=not check)


@dataclass(kw_only=True)
class Host:
    """Namespaces of its own for network, processes, mounts and name, held by a process whose end is the host's."""

    name: str
    space: str
    address: str
    names: Path  # its /etc/hosts
    holder: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the process that holds the namespaces; bash, since it takes note of orphans' ends."""
        script = (
            f'mount --bind "{self.names}" /etc/hosts && mount -t tmpfs shm /dev/shm && hostname {self.name} && '
            "echo ready && sleep infinity & wait $!; sleep infinity & wait $!"
        )
        # `ip netns exec` would mount another /sys, without which slurmd dies
        words = ["nsenter", f"--net=/run/netns/{self.space}", "unshare", "--pid", "--fork", "--kill-child", "--mount"]
        words += ["--uts", "--ipc", "--mount-proc", "bash", "-c", script]
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
        _started.add(self.holder.pid)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == b"ready\n", f"{self.name}: no namespaces"

    @property
    def pid(self) -> int:
        """The first process of the host, as this machine numbers it."""
        assert self.holder is not None
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text()
        return int(children.split()[0])

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line that runs another on this host, in the present folder."""
        return ["nsenter", f"--target={self.pid}", "--all", f"--wd={os.getcwd()}", *words]

    def command_on_network(self, words: Sequence[str]) -> list[str]:
        """Return a command line that runs another with this host's network and names, and the machine's processes."""
        names = f'mount --bind "{self.names}" /etc/hosts && exec "$@"'
        return ["nsenter", f"--net=/run/netns/{self.space}", "unshare", "--mount", "bash", "-c", names, "_", *words]

    def start(
        self, words: Sequence[str], *, cwd: Path, environ: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on this host."""
        enter = ["bash", "-c", 'cd "$0" && exec "$@"', str(cwd), *words]
        process = subprocess.Popen(self.command(enter), env=environment(environ), text=True, **options)
        _started.add(process.pid)
        return process

    def run(
        self, words: Sequence[str], *, cwd: Path, environ: Mapping[str, str] | None = None, timeout: float = 180
    ) -> tuple[int, str]:
        """Run a command on this host to its end; return its exit code, and stdout and stderr together."""
        process = self.start(words, cwd=cwd, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            text = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, text

    def has(self, word: str) -> bool:
        """Whether a process of this host has a word in its command line."""
        words = ["pgrep", "--ns", str(self.pid), "--nslist", "pid", "-f", word]
        return subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode == 0

    def lose_power(self) -> None:
        """End all processes at once, none of which can say anything: the cable is cut first."""
        self.link("down")
        self.end()

    def end(self) -> None:
        """End all processes of this host, by ending its first one."""
        if self.holder is not None:
            os.kill(self.pid, signal.SIGKILL)
            while self.holder.poll() is None:
                reap()  # the first process of a host ends after all others, some of which are this process's children
                time.sleep(0.02)
            self.holder = None

    def write_names(self, text: str) -> None:
        """Change ``/etc/hosts`` on this host."""
        self.names.write_text(text)

    def link(self, *words: str) -> None:
        """Change this host's cable: ``up``, ``down``."""
        ip("-n", self.space, "link", "set", "eth0", *words)


@contextlib.contextmanager
def slow_link(nodes: Sequence[Host], *, delay: float, share: float) -> Iterator[list[str]]:
    """Join two hosts by a further cable, ``slow0``; yield their addresses on it.

    ``delay``: seconds of each packet; ``share``: of packets that are lost.
    """
    words = [sys.executable, str(Path(__file__).with_name("relay.py")), *(node.space for node in nodes)]
    relay = subprocess.Popen([*words, str(delay), str(share)], stdout=subprocess.PIPE)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"
        addresses = [f"{_SLOW_NETWORK}.{number}" for number in (11, 12)]
        for node, address in zip(nodes, addresses, strict=True):
            ip("-n", node.space, "addr", "add", f"{address}/24", "dev", "slow0")
            ip("-n", node.space, "link", "set", "slow0", "up")
        yield addresses
    finally:
        relay.kill()
        relay.wait()


def adopt_orphans() -> None:
    """Have daemons, and what else loses its parent, become children of this process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def reap() -> None:
    """Take note of the ends of children that were not started here: adopted orphans."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(pid) not in _started:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), os.WNOHANG)


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without any launcher's variables, and this checkout first among the imports."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return kept | dict(changes or {})


@contextlib.contextmanager
def hosts(folder: Path, *, num: int = 2) -> Iterator[tuple[Host, list[Host]]]:
    """Make a controller's host, ``ctl``, and nodes ``n1``, ``n2``, …; remove them and their processes at the end."""
    lines = ["127.0.0.1 localhost", f"{_NETWORK}.1 ctl"] + [f"{_NETWORK}.{10 + n} n{n}" for n in range(1, num + 1)]
    for name in ("ctl", *(f"n{n}" for n in range(1, num + 1))):
        (folder / f"hosts.{name}").write_text("\n".join(lines) + "\n")
    mark = f"sd{os.getpid()}"
    controller = Host(name="ctl", space=f"{mark}c", address=f"{_NETWORK}.1", names=folder / "hosts.ctl")
    nodes = [
        Host(name=f"n{n}", space=f"{mark}n{n}", address=f"{_NETWORK}.{10 + n}", names=folder / f"hosts.n{n}")
        for n in range(1, num + 1)
    ]
    try:
        for host in (controller, *nodes):
            ip("netns", "add", host.space)
            ip("-n", host.space, "link", "set", "lo", "up")
        ip("-n", controller.space, "link", "add", "br0", "type", "bridge")
        ip("-n", controller.space, "addr", "add", f"{controller.address}/24", "dev", "br0")
        ip("-n", controller.space, "link", "set", "br0", "up")
        for host in nodes:
            port = f"to-{host.name}"
            ip("-n", controller.space, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.space)
            ip("-n", controller.space, "link", "set", port, "master", "br0")
            ip("-n", controller.space, "link", "set", port, "up")
            ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            host.link("up")
        for host in (controller, *nodes):
            host.begin()
        yield controller, nodes
    finally:
        for host in (*nodes, controller):
            host.end()
            ip("netns", "del", host.space, check=False)
