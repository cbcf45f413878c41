"""What runs under SLURM: the how-to's scripts, GPU bindings, job arrays, requeued and cancelled jobs, nodes that go."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from pipelines import graphcast
from scidata.device_mesh.launch import read_launcher
from scidata.device_mesh.mesh import _device_index
from tests.clusters.hosts import ROOT
from tests.clusters.lab import NUM_SAMPLES, Lab, assert_all_once, steps_of, wait_until
from tests.clusters.slurm import GPUS
from tests.docs.blocks import blocks_of, differs
from tests.docs.surroundings import write_mesh


def how_to(lab: Lab) -> str:
    """The page's scripts and commands as printed, and what it shows of their output."""
    shown = []
    for page in ("slurm", "open_mpi"):
        folder = lab.new(page)
        for block in blocks_of((ROOT / f"docs/howto/{page}.md").read_text()):
            if block.file is not None:
                (folder / block.file).write_text(block.text)
            if block.language != "console":
                continue
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, expected = part.partition("\n")
                printed = lab.slurm.run(command, cwd=folder)
                printed = re.sub(r"^\[W.*\n", "", printed, flags=re.MULTILINE)  # torch, of hosts that DNS does not know
                amiss = differs(printed, expected, any_order=command.startswith("mpirun"))
                assert amiss is None, f"{command}\n{amiss}"
                if job := re.search(r"batch job (\d+)", printed):
                    state = lab.slurm.wait(int(job[1]), "COMPLETED|FAILED|CANCELLED|TIMEOUT")
                    assert state == "COMPLETED", f"{state}: {(folder / 'slurm.out').read_text()}"
                shown.append(command.split()[0])
    return f"{', '.join(shown)}: as shown"


_BINDINGS = (
    "--gpus-per-node=4",
    "--gpus-per-task=1",
    "--gpus-per-task=1 --gpu-bind=none",
    "--gpus-per-node=4 --gpu-bind=single:1",
    "--gpus-per-node=4 --gpu-bind=closest",
    "--gpus-per-node=4 --gpu-bind=map_gpu:3,2,1,0",
    "--gpus-per-node=4 --gpu-bind=mask_gpu:0x3,0x3,0xC,0xC",
    "--gpus-per-node=4 --gpu-bind=per_task:1",
    "--gpus-per-node=4 --gpu-bind=none",
    "--gres=gpu:4",
    "--gpus=8",
)


def gpus(lab: Lab) -> str:
    """``srun`` with each binding of GPUs, with the options typed and as the batch script's."""
    folder = lab.new("gpus")
    dump = "import json, os; json.dump(dict(os.environ), open('task.' + os.environ['SLURM_PROCID'], 'w'))"
    (folder / "task.sh").write_text(f"#!/bin/bash\nexec python3 -c {shlex.quote(dump)}\n")
    wrapper = '#!/bin/bash\nexport ROCR_VISIBLE_DEVICES=$SLURM_LOCALID\nunset CUDA_VISIBLE_DEVICES\nexec "$@"\n'
    (folder / "select_gpu").write_text(wrapper)
    runs = [(f"srun -N2 --ntasks-per-node=4 {binding} bash task.sh", GPUS) for binding in _BINDINGS]
    runs.append(("srun -N2 --ntasks-per-node=4 --gpus-per-node=4 bash select_gpu bash task.sh", GPUS))
    runs.append(("srun -N2 --ntasks-per-node=2 --gpus-per-task=2 bash task.sh", 2))
    steps = ("srun bash task.sh", "srun --gpu-bind=none bash task.sh")  # SLURM_GPUS_PER_TASK is set in both
    runs += [(f"sbatch --wait -N2 --ntasks-per-node=4 --gpus-per-task=1 --wrap={step!r}", GPUS) for step in steps]
    for command, num_tasks in runs:
        lab.slurm.run(command, cwd=folder)
        taken: dict[str, set[str]] = {}
        for path in sorted(folder.glob("task.[0-9]*")):
            environ = json.loads(path.read_text())
            words = [environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")]
            visible = min((word.split(",") for word in words if word), key=len, default=[*map(str, range(GPUS))])
            gpu = visible[_device_index(read_launcher(environ), len(visible))]
            taken.setdefault(environ["SLURMD_NODENAME"], set()).add(gpu)
            path.unlink()
        assert {node: len(found) for node, found in taken.items()} == {"n1": num_tasks, "n2": num_tasks}, (
            f"{command}: {taken}"
        )
    return f"{len(runs)} ways to bind, one GPU for each task in all"


def array(lab: Lab) -> str:
    """A job array of ``scidata partition --part``, and the end of it."""
    folder = lab.new("array")
    for number in range(8):
        write_mesh(str(folder / f"mesh_{number}.nc"))
    page = (ROOT / "docs/howto/slurm.md").read_text()
    command = re.search(r"`(scidata partition '[^`]*)`", page)
    finalize = re.search(r"`(scidata partition --final[^`]*)`", page)
    assert command, "the page shows no partition"
    assert finalize, "the page shows no --finalize"
    (folder / "part.slurm").write_text(f"#!/bin/bash\n#SBATCH --output=%A_%a.out\n{command[1]}\n")
    (folder / "end.slurm").write_text(f"#!/bin/bash\n#SBATCH --output=end.out\n{finalize[1]}\n")
    parts = lab.slurm.submit("--array=0-7 part.slurm", cwd=folder)
    end = lab.slurm.submit(f"--dependency=afterok:{parts} end.slurm", cwd=folder)
    state = lab.slurm.wait(end, "COMPLETED|FAILED|CANCELLED", timeout=240)
    said = "".join(path.read_text() for path in sorted(folder.glob("*.out")))
    assert state == "COMPLETED", said
    num = lab.slurm.run("python -c \"import scidata; print(len(scidata.open_dataset('train.store')))\"", cwd=folder)
    assert num.strip() == "16", num
    return "8 parts on 2 nodes, a store of 16 samples"


def _batch(lab: Lab, folder: Path, name: str, *, end: str = "", **options: object) -> Path:
    """Write a script of two tasks, one a node."""
    command = shlex.join(lab.training(folder / "out", **options))
    (folder / "out").mkdir(exist_ok=True)
    lines = [
        "#!/bin/bash",
        "#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append",
        "#SBATCH --output=slurm.out",
    ]
    path = folder / name
    path.write_text("\n".join([*lines, f"srun --kill-on-bad-exit=1 {command}", end]) + "\n")
    return path


def _wait_for_steps(lab: Lab, job: int, out: Path) -> None:
    """Wait until a training has taken some steps, or its job has ended."""
    wait_until("the first steps", lambda: steps_of(out) >= 4 or lab.slurm.state(job) not in ("PENDING", "RUNNING"))
    assert steps_of(out) >= 4, (out.parent / "slurm.out").read_text()


def requeued(lab: Lab) -> str:
    """``scontrol requeue`` amid an epoch: the second run takes the samples that are left."""
    folder = lab.new("requeue")
    job = lab.slurm.submit(str(_batch(lab, folder, "job", pause=0.5)), cwd=folder)
    out = folder / "out"
    _wait_for_steps(lab, job, out)
    lab.slurm.run(f"scontrol requeue {job}", cwd=folder)
    wait_until("a second run", lambda: "goes on from" in (folder / "slurm.out").read_text(), 120)
    assert lab.slurm.wait(job, "COMPLETED|FAILED|CANCELLED") == "COMPLETED", (folder / "slurm.out").read_text()
    assert_all_once(out)
    said = (folder / "slurm.out").read_text()
    return f"{re.findall('goes on from .*', said)[0]}; each of {NUM_SAMPLES} samples once"


def cancelled(lab: Lab) -> str:
    """``scancel``: no process is left on a node. ``scancel --signal=USR1``: the job saves, and ends well."""
    folder = lab.new("scancel")
    job = lab.slurm.submit(str(_batch(lab, folder, "job", pause=0.3)), cwd=folder)
    _wait_for_steps(lab, job, folder / "out")
    lab.slurm.run(f"scancel {job}", cwd=folder)
    seconds = wait_until("no process is left", lambda: not any(node.has("training.py") for node in lab.nodes), 60)
    lab.slurm.wait(job, "CANCELLED")
    folder = lab.new("scancel")
    job = lab.slurm.submit(str(_batch(lab, folder, "job", pause=0.3, workers="process")), cwd=folder)
    _wait_for_steps(lab, job, folder / "out")
    lab.slurm.run(f"scancel --signal=USR1 {job}", cwd=folder)
    state = lab.slurm.wait(job, "COMPLETED|FAILED|CANCELLED")
    said = (folder / "slurm.out").read_text()
    assert state == "COMPLETED", said
    stopped = re.findall(r"stopped by a signal after (\d+)", said)
    assert len(stopped) == 2, said
    assert set(map(int, stopped)) == {steps_of(folder / "out")}, said
    return f"none left after {seconds:.1f} s; USR1: both ranks saved and ended after {stopped[0]} samples"


def before_the_time_is_up(lab: Lab) -> str:
    """``sbatch --signal``: the job of the ViT example saves, queues again, and goes on from there."""
    return _goes_on_after_a_signal(lab, "train_vit", lab.data, "--patch 8 --heads 2")


def before_the_time_of_graphs_is_up(lab: Lab) -> str:
    """The same of the GraphCast example."""
    data = lab.new("waves") / "data"
    graphcast.make(str(data), num_times=12, num_levels=2, shape=(19, 36))
    return _goes_on_after_a_signal(lab, "train_graphcast", data, "--history 1")


def _goes_on_after_a_signal(lab: Lab, script: str, data: Path, model: str) -> str:
    folder = lab.new("signal")
    (folder / "examples").symlink_to(ROOT / "examples")
    small = f"--device cpu --domain 2 --dim 8 --depth 2 --amp none --epochs 100000 {model}"
    options = "--nodes=2 --ntasks-per-node=1 --gpus-per-node=0 --cpus-per-task=1 --time=2 --signal=USR1@60"
    command = f"{options} --open-mode=append examples/{script}.slurm {data} {small} --save-every 100000"
    job = lab.slurm.submit(command, cwd=folder)
    said = folder / "slurm.out"
    wait_until("a stop", lambda: said.exists() and "a signal: stopped and saved" in said.read_text(), 150)
    stopped = re.findall(r"stopped and saved after step (\d+)", said.read_text())[0]
    shown = lambda: lab.slurm.run(f"scontrol show job {job}", cwd=folder)  # noqa: E731
    wait_until("a second run", lambda: "Restarts=1" in shown() and "RUNNING" in lab.slurm.state(job), 60)
    steps = lambda: re.findall(r"^step (\d+) (?:of|loss)", said.read_text(), re.MULTILINE)  # noqa: E731
    wait_until("its first steps", lambda: any(int(step) > int(stopped) for step in steps()[-3:]), 60)
    lab.slurm.run(f"scancel {job}", cwd=folder)
    lab.slurm.wait(job, "CANCELLED")
    assert "Traceback" not in said.read_text(), said.read_text()
    return f"stopped and saved after step {stopped}, queued again, and went on from there"


def node_goes(lab: Lab) -> str:
    """A node loses power: SLURM queues the job again, and it ends when the node is back."""
    folder = lab.new("node")
    job = lab.slurm.submit(str(_batch(lab, folder, "job", pause=0.5)), cwd=folder)
    out, node = folder / "out", lab.nodes[1]
    _wait_for_steps(lab, job, out)
    node.lose_power()
    try:
        seconds = wait_until("the job waits", lambda: "PENDING" in lab.slurm.state(job), 120)
    finally:
        node.link("up")
        node.begin()
        lab.slurm.start_node(node)
    assert lab.slurm.wait(job, "COMPLETED|FAILED|CANCELLED", timeout=180) == "COMPLETED", (
        folder / "slurm.out"
    ).read_text()
    assert_all_once(out)
    return f"queued again {seconds:.0f} s after the node went; ended with all samples, each once"


ALL = (
    how_to, gpus, array, requeued, cancelled, node_goes, before_the_time_is_up, before_the_time_of_graphs_is_up,
)  # fmt: skip
