"""What runs on two hosts without SLURM: torchrun with elastic restarts, Open MPI, names and networks that are amiss."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.clusters.hosts import environment, slow_link
from tests.clusters.lab import Lab, assert_all_once, result_of, steps_of, wait_until

_PORT = 29411
#: Else ranks may read what others posted before a restart, in the store that torchrun keeps for all attempts.
_NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(lab: Lab) -> str:
    """Two hosts, a domain across them and another's dp; the weights are those of one process."""
    alone = lab.new("alone")
    code, said = lab.nodes[0].run(lab.training(alone), cwd=alone)
    assert code == 0, said
    weights = []
    for options in ({"domain": 2}, {"domain": 2, "workers": "process"}):
        out = lab.new("torchrun")
        _run_both(lab, out, **options)
        assert_all_once(out)
        weights.append(result_of(out)["weights"])
    expected = result_of(alone)["weights"]
    assert all(abs(found - expected) <= 1e-12 * abs(expected) for found in weights), (weights, expected)
    return f"a domain of two hosts has one process's weights ({max(abs(w - expected) for w in weights):.1e} apart)"


def restarts(lab: Lab) -> str:
    """``--max-restarts``: a rank dies amid an epoch, and all begin again with the samples that are left."""
    out = lab.new("restarts")
    said = _run_both(lab, out, ["--max-restarts=2"], dies=[1, 10])
    assert "goes on from step_0008" in said, said
    assert_all_once(out)
    return "a rank died after 8 samples; both went on from there, each sample once"


def elastic(lab: Lab) -> str:
    """``--nnodes 1:2``: a host goes away amid an epoch, and the other takes the samples that are left."""
    out = lab.new("elastic")
    options = ["--nnodes=1:2", "--max-restarts=3", f"--rdzv-conf=last_call_timeout=5,{_KEEP_ALIVE}"]
    with _both(lab, out, options, pause=0.4, timeout=20) as started:
        wait_until("the first steps", lambda: steps_of(out) >= 6)
        node = lab.nodes[1]
        node.lose_power()
        try:
            code = started[0].wait(timeout=240)
        finally:
            node.link("up")
            node.begin()
            lab.slurm.start_node(node)
    said = (out / "n1.log").read_text()
    assert code == 0, said
    assert_all_once(out, repeated=1)
    assert result_of(out)["ranks"] == 1, said
    last = re.findall(r"goes on from step_(\d+)", said)
    reason = re.findall(r"^\[rank0\]: (\S*Error: .*)", said, re.MULTILINE)
    return f"went on alone after {int(last[-1])} samples, each once; said: {reason[0][:150] if reason else 'nothing'}"


_KEEP_ALIVE = "keep_alive_interval=2,keep_alive_max_attempt=3"


def mpirun(lab: Lab) -> str:
    """Open MPI over two hosts; its remote shell enters the host."""
    out = lab.new("mpirun")
    shell = out / "shell"
    enter = "\n".join(f'{node.name}) set -- {shlex.join(node.command(["bash", "-c"]))} "$*" ;;' for node in lab.nodes)
    shell.write_text(f'#!/bin/bash\nhost=$1; shift\ncase $host in\n{enter}\nesac\nexec "$@"\n')
    shell.chmod(0o755)
    network = lab.nodes[0].address.rpartition(".")[0]
    words = ["mpirun", "-n", "2", "--host", "n1:1,n2:1", "-x", "MASTER_ADDR=n1", "-x", f"MASTER_PORT={_PORT}"]
    words += ["-x", "PYTHONPATH", "-x", "PATH", "-x", "OMP_NUM_THREADS"]
    environ = {"PRTE_MCA_plm_ssh_agent": str(shell), "OMPI_MCA_plm_rsh_agent": str(shell)}  # of Open MPI 5, and 4
    environ["PRTE_MCA_oob_tcp_if_include"] = environ["OMPI_MCA_oob_tcp_if_include"] = f"{network}.0/24"
    # of the controller's host, the network alone: the shell has to see the other hosts' processes
    command = [*lab.controller.command_on_network(words), *lab.training(out, domain=2)]
    done = subprocess.run(
        command, check=False, cwd=out, env=environment(environ), text=True, capture_output=True, timeout=180
    )
    code, said = done.returncode, done.stdout + done.stderr
    assert code == 0, said
    assert_all_once(out)
    assert set(re.findall(r"on (n\d): joined", said)) == {"n1", "n2"}, said
    return "a domain of two hosts"


def debian_names(lab: Lab) -> str:
    """Hosts whose own name is 127.0.1.1, as Debian writes it, or is not known at all; torchrun needs it to be known."""
    kept, seconds = lab.nodes[0].names.read_text(), []
    try:
        for own, head in (("127.0.1.1 {name}\n", "n1"), ("", lab.nodes[0].address)):
            out = lab.new("names")
            for node in lab.nodes:
                others = [line for line in kept.splitlines(keepends=True) if not line.endswith(f"{node.name}\n")]
                node.write_names("".join(others) + own.format(name=node.name))
            _run_by_hand(lab, out, head, domain=2)
            seconds += re.findall(r"joined after (\S+) s", _said(out))
            assert_all_once(out)
    finally:
        for node in lab.nodes:
            node.write_names(kept)
    return f"joined in {', '.join(seconds)} s"


def wrong_interface(lab: Lab) -> str:
    """``GLOO_SOCKET_IFNAME=lo`` on several hosts: the error names it."""
    out = lab.new("interface")
    said = _run_both(lab, out, environ={"GLOO_SOCKET_IFNAME": "lo"}, fails=True, domain=2, timeout=10)
    assert "GLOO_SOCKET_IFNAME" in said, said
    return re.findall(r"gloo could not connect.*", said)[0][:160]


def slow_network(lab: Lab) -> str:
    """100 ms of delay, and 1 % of packets lost: carried, and the weights are the same."""
    weights, shown = [], []
    for delay, share in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.01)):
        out = lab.new("slow")
        with slow_link(lab.nodes, delay=delay, share=share) as addresses:
            began = time.monotonic()
            said = _run_by_hand(lab, out, addresses[0], {"GLOO_SOCKET_IFNAME": "slow0"}, domain=2)
        assert_all_once(out)
        weights.append(result_of(out)["weights"])
        joined = max(map(float, re.findall(r"joined after (\S+) s", said)))
        shown.append(
            f"{1000 * delay:g} ms, {100 * share:g} % lost: {time.monotonic() - began:.0f} s, joined in {joined} s"
        )
    assert weights[0] == weights[1] == weights[2], weights
    return f"{'; '.join(shown)}; the same weights"


def link_down(lab: Lab) -> str:
    """A link goes down for 3 s: carried. For good: both ranks end with an error that names the other."""
    out = lab.new("link")
    with _both(lab, out, domain=2, pause=0.2, timeout=20) as started:
        wait_until("the first steps", lambda: steps_of(out) >= 4)
        lab.nodes[1].link("down")
        with contextlib.suppress(subprocess.TimeoutExpired):
            started[0].wait(timeout=3)
        lab.nodes[1].link("up")
        assert [process.wait(timeout=120) for process in started] == [0, 0], _said(out)
    assert_all_once(out)
    out = lab.new("link")
    with _both(lab, out, domain=2, pause=0.2, timeout=10) as started:
        wait_until("the first steps", lambda: steps_of(out) >= 4)
        lab.nodes[1].link("down")
        try:
            seconds = wait_until("both ranks' errors", lambda: all(_errors(out)), 150)
        finally:
            lab.nodes[1].link("up")
    errors = _errors(out)
    assert all("RankFailedError" in found[-1] for found in errors), errors
    return f"3 s: carried; for good, after {seconds:.0f} s: {' | '.join(found[-1][:140] for found in errors)}"


def decode_node(lab: Lab) -> str:
    """``decode="node"`` with two ranks on each of two hosts: each host shares by itself, and the values are right."""
    weights = []
    for decode in ("rank", "node"):
        out = lab.new("decode")
        _run_both(lab, out, ["--nproc-per-node=2"], domain=4, decode=decode)
        assert_all_once(out)
        weights.append(result_of(out)["weights"])
    assert weights[0] == weights[1], weights
    return "4 ranks of 2 hosts: the same weights as without"


# -- starting on both hosts ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _both(
    lab: Lab, out: Path, options: list[str] | None = None, environ: dict[str, str] | None = None, **training: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a training by torchrun on both hosts; their logs are ``n1.log`` and ``n2.log``."""
    started = []
    for node in lab.nodes:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={lab.nodes[0].address}:{_PORT}", f"--rdzv-id={out.name}"]
        words += [option.format(address=node.address) for option in options or []]
        with open(out / f"{node.name}.log", "w") as log:
            command = [*words, *lab.training(out, **training)[1:]]
            variables = _NEW_STORES | (environ or {})
            started.append(node.start(command, cwd=out, environ=variables, stdout=log, stderr=subprocess.STDOUT))
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _run_both(
    lab: Lab,
    out: Path,
    options: list[str] | None = None,
    environ: dict[str, str] | None = None,
    fails: bool = False,
    **training: object,
) -> str:
    """Run a training by torchrun on both hosts to its end; return what both print."""
    with _both(lab, out, options, environ, **training) as started:
        codes = [process.wait(timeout=240) for process in started]
    assert all(codes) if fails else not any(codes), f"exit codes {codes}: {_said(out)}"
    return _said(out)


def _run_by_hand(lab: Lab, out: Path, head: str, environ: dict[str, str] | None = None, **training: object) -> str:
    """Run a training to its end, with the variables of torchrun and without its agents; return what is printed."""
    started = []
    for rank, node in enumerate(lab.nodes):
        own = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": head, "MASTER_PORT": str(_PORT)} | (environ or {})
        with open(out / f"{node.name}.log", "w") as log:
            words = lab.training(out, **training)
            started.append(node.start(words, cwd=out, environ=own, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=240) for process in started]
    assert not any(codes), f"exit codes {codes}: {_said(out)}"
    return _said(out)


def _errors(out: Path) -> list[list[str]]:
    """Return the errors that the ranks of each host have ended with."""
    logs = [path.read_text() for path in sorted(out.glob("n*.log"))]
    return [re.findall(r"^\[rank\d\]: (\S*Error: .*)", log, re.MULTILINE) for log in logs]


def _said(out: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(out.glob("n*.log")))


ALL = (torchrun, restarts, elastic, mpirun, debian_names, wrong_interface, slow_network, link_down, decode_node)
