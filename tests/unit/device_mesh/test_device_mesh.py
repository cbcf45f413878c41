"""Launcher variables, axis sizes and axis names: all that needs one process."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scidata.device_mesh import axes_of, axis_rank, axis_size, board, devices, domain_mesh, init_mesh
from scidata.device_mesh import mesh as mesh_module
from scidata.device_mesh.launch import Launch, read_launcher
from scidata.device_mesh.mesh import _claim_gpu, _device_index
from scidata.errors import ConfigError, LauncherError, UnknownNameError
from scidata.testing import fake_group

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[01-04,7]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
PALS = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PALS_LOCAL_RANKID": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
MPICH = {"MPI_LOCALRANKID" if name == "PALS_LOCAL_RANKID" else name: value for name, value in PALS.items()}


def without(environ, *names):
    return {k: v for k, v in environ.items() if k not in names}


# -- launchers -------------------------------------------------------------------------------------------------


def test_no_launcher_is_one_process():
    assert read_launcher({"PATH": "/bin", "MASTER_ADDR": "set by the site"}) == Launch(launcher="none")


def test_torchrun():
    expected = Launch(launcher="torchrun", rank=3, num_ranks=4, local_rank=1, address="head", port=29500)
    assert read_launcher(TORCHRUN) == expected
    assert read_launcher(TORCHRUN | SLURM | OPEN_MPI) == expected  # torchrun was started by the others
    assert read_launcher({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).num_ranks == 1
    assert read_launcher(without(TORCHRUN, "LOCAL_RANK")).local_rank is None


def test_slurm():
    launch = read_launcher(SLURM)
    assert (launch.launcher, launch.rank, launch.num_ranks, launch.local_rank) == ("SLURM", 5, 8, 1)
    assert launch.address == "node01"
    assert 10_000 <= launch.port < 30_000
    assert launch.port != read_launcher(SLURM | {"SLURM_STEP_ID": "3"}).port
    assert launch.port != read_launcher(SLURM | {"SLURM_JOB_ID": "123457"}).port
    assert read_launcher(SLURM | {"SLURM_STEP_NUM_TASKS": "6"}).num_ranks == 6  # srun -n 6 in a job of 8
    assert read_launcher(SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "1"}).address == "ib0"
    assert read_launcher(SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "1"}).port == 1
    assert read_launcher(without(SLURM, "SLURM_STEP_NODELIST") | {"SLURM_NODELIST": "a,b"}).address == "a"


# What SLURM 22.05 shows tasks 0 to 3 of a node of 4 GPUs (tests/clusters/gpus.py asks a real one), and their choices.
BINDINGS = {
    "--gpus-per-node=4": (["0,1,2,3"] * 4, [0, 1, 2, 3]),
    "--gpu-bind=none": ([None] * 4, [0, 1, 2, 3]),
    "--gpus-per-task=1": (["0", "1", "2", "3"], [0, 0, 0, 0]),
    "--gpu-bind=map_gpu:3,2,1,0": (["3", "2", "1", "0"], [0, 0, 0, 0]),
    "--gpu-bind=mask_gpu:0x3,0x3,0xC,0xC": (["0,1", "0,1", "2,3", "2,3"], [0, 1, 0, 1]),
    "--gpus-per-task=2, two tasks": (["0,1", "2,3"], [0, 1]),
}


@pytest.mark.parametrize("per_task", [{}, {"SLURM_GPUS_PER_TASK": "1"}], ids=["srun", "sbatch"])
@pytest.mark.parametrize("binding", BINDINGS)
def test_gpus_that_slurm_shows_a_task(binding, per_task):
    shown, expected = BINDINGS[binding]
    found = []
    for local, gpus in enumerate(shown):
        change = {"SLURM_GPUS_ON_NODE": "4", "SLURM_LOCALID": str(local)} | per_task
        if gpus is not None:
            change |= dict.fromkeys(("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), gpus)
        found.append(_device_index(read_launcher(SLURM | change), 4 if gpus is None else len(gpus.split(","))))
    assert found == expected


@pytest.mark.parametrize(
    ("environ", "index"),
    [
        (SLURM | {"SLURM_GPUS_ON_NODE": "2", "SLURM_STEP_GPUS": "0,1", "ROCR_VISIBLE_DEVICES": "1"}, 0),  # a wrapper
        (SLURM | {"SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_GPUS": "0"}, None),  # more tasks than GPUs
        (SLURM, None),
        (OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "1"}, 0),
        (OPEN_MPI, None),
        (PALS | {"ZE_AFFINITY_MASK": "0.1"}, 0),
        (TORCHRUN, None),
    ],
)
def test_a_rank_that_sees_one_gpu(environ, index):
    if index is None:
        with pytest.raises(LauncherError, match="process 1 of its node, but sees 1 GPUs"):
            _device_index(read_launcher(environ), 1)
    else:
        assert _device_index(read_launcher(environ), 1) == index


def test_two_ranks_with_one_gpu(monkeypatch):
    """A user may show all ranks the same GPU, as ``CUDA_VISIBLE_DEVICES=1 mpirun -n 2`` does."""
    posted = board.Postings(dist.HashStore())
    monkeypatch.setattr(board, "has_peers", lambda: True)
    monkeypatch.setattr(board, "common_postings", lambda: posted)
    monkeypatch.setattr(devices, "uuid_of", lambda _: "a")
    gpu = torch.device("cuda", 0)
    for _ in range(2):  # the group may begin anew
        _claim_gpu(read_launcher(OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "1"}), gpu)
    rank_0 = OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}
    _claim_gpu(read_launcher(rank_0 | {"CUDA_VISIBLE_DEVICES": "0"}), gpu)
    same = read_launcher(rank_0 | {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setattr(devices, "uuid_of", lambda _: "b")
    _claim_gpu(same, gpu)  # containers may number their own GPUs
    monkeypatch.setattr(devices, "uuid_of", lambda _: "a")
    with pytest.raises(LauncherError, match=r"ranks 1 and 0 of one node both have GPU 0 of CUDA_VIS.*=1"):
        _claim_gpu(same, gpu)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("node[01-04,7]", "node01"),
        ("node[7,10-12]", "node7"),
        ("rack[2-3]n[08-16],login1", "rack2n08"),
        ("node[003-004]-ib0,other", "node003-ib0"),
        ("a-b[1-2]", "a-b1"),
    ],
)
def test_first_of_a_slurm_host_list(nodes, first):
    assert read_launcher(SLURM | {"SLURM_STEP_NODELIST": nodes}).address == first


def test_slurm_without_srun():
    shell = {"SLURM_JOB_ID": "1", "SLURM_NODELIST": "n1"}
    batch = shell | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
    interactive = batch | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    for environ in (shell, batch, interactive):
        assert read_launcher(environ) == Launch(launcher="none")
        assert read_launcher(environ | {"SLURM_NTASKS": "1"}) == Launch(launcher="none")
        with pytest.raises(LauncherError, match="4 tasks, but this process was not started by srun"):
            read_launcher(environ | {"SLURM_NTASKS": "4"})


def test_open_mpi():
    expected = Launch(launcher="Open MPI", rank=1, num_ranks=2, local_rank=1, address="head", port=29500)
    assert read_launcher(OPEN_MPI) == expected
    assert read_launcher(SLURM | OPEN_MPI) == expected  # inside a job, SLURM's variables are those of mpirun's daemon
    assert read_launcher(without(OPEN_MPI, "MASTER_ADDR") | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})


def test_mpich_and_pals():
    expected = Launch(launcher="PALS", rank=1, num_ranks=2, local_rank=1, address="head", port=29500)
    assert read_launcher(PALS) == read_launcher(SLURM | PALS) == expected
    assert read_launcher(MPICH) == read_launcher(SLURM | MPICH) == replace(expected, launcher="MPICH")
    assert read_launcher(SLURM | {"PMI_RANK": "0", "PMI_SIZE": "1"}).launcher == "SLURM"  # srun --mpi=pmi2


@pytest.mark.parametrize(
    ("environ", "missing"),
    [(TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    + [(SLURM, name) for name in ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")]
    + [(OPEN_MPI, name) for name in OPEN_MPI]
    + [(MPICH, name) for name in MPICH]
    + [(PALS, name) for name in PALS if name != "PALS_LOCAL_RANKID"],
)
def test_a_launcher_half_set_up(environ, missing):
    with pytest.raises(LauncherError, match=f"{missing} is missing"):
        read_launcher(without(environ, missing))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "rank 4 .* of 4 is not possible"),
        ({"RANK": "-1"}, "not possible"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' is not an integer"),
        ({"MASTER_PORT": ""}, "MASTER_PORT='' is not an integer"),
    ],
)
def test_variables_that_make_no_sense(change, message):
    with pytest.raises(LauncherError, match=message):
        read_launcher(TORCHRUN | change)


def test_gpu_of_a_rank():
    launch = read_launcher(TORCHRUN)
    assert _device_index(launch, 2) == 1
    with pytest.raises(LauncherError, match="process 1 of its node, but sees 1 GPUs"):
        _device_index(launch, 1)
    unknown = read_launcher(without(TORCHRUN, "LOCAL_RANK"))
    assert _device_index(unknown, 1) == 0
    with pytest.raises(LauncherError, match="LOCAL_RANK is missing"):
        _device_index(unknown, 4)


@pytest.mark.parametrize(
    ("own_name", "to_master", "anywhere", "several_hosts", "expected"),
    [
        ("10.0.0.2", "10.0.0.2", "10.0.0.2", True, None),  # gloo finds it
        ("127.0.1.1", "10.0.0.2", "10.0.0.2", True, "of 10.0.0.2"),  # as Debian names a host
        (None, "10.0.0.2", "10.0.0.2", False, "of 10.0.0.2"),
        ("127.0.1.1", "127.0.0.1", "10.0.0.2", False, None),  # all on one host
        ("127.0.1.1", "127.0.1.1", "10.0.0.2", True, "of 10.0.0.2"),  # rank 0's own host
        ("127.0.1.1", "127.0.1.1", None, True, None),  # no way out
    ],
)
def test_the_interface_for_gloo(monkeypatch, own_name, to_master, anywhere, several_hosts, expected):
    assert mesh_module._interface_of(mesh_module._source_towards("127.0.0.1")) == "lo"
    monkeypatch.setattr(mesh_module, "_address_of_name", lambda: own_name)
    monkeypatch.setattr(mesh_module, "_source_towards", lambda to: to_master if to == "head" else anywhere)
    monkeypatch.setattr(mesh_module, "_interface_of", lambda local: f"of {local}")
    assert mesh_module.interface_for("head", several_hosts=several_hosts) == expected


# -- the mesh --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "shape", "names"),
    [
        ({}, (24, 1), ("dp", "domain")),
        ({"domain": 4}, (6, 4), ("dp", "domain")),
        ({"domain": -1, "dp": 3}, (3, 8), ("dp", "domain")),
        ({"domain": (2, 3)}, (4, 2, 3), ("dp", "h", "w")),
        ({"domain": (2, -1), "dp": 2}, (2, 2, 6), ("dp", "h", "w")),
        ({"domain": [2, 2], "names": ["data", "lat", "lon"]}, (6, 2, 2), ("data", "lat", "lon")),
        ({"domain": 4, "extra": {"tp": 2}}, (3, 4, 2), ("dp", "domain", "tp")),
        ({"domain": (2, 2, 2), "names": ("dp", "d", "h", "w")}, (3, 2, 2, 2), ("dp", "d", "h", "w")),
        ({"domain": 12, "dp": 2}, (2, 12), ("dp", "domain")),
    ],
)
def test_shapes(arguments, shape, names):
    with fake_group(24, rank=23):
        mesh = init_mesh(**arguments)
        assert tuple(mesh.shape) == shape
        assert mesh.mesh_dim_names == names
        assert mesh.device_type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domain": -1}, "only one axis can be inferred, not dp and domain"),
        ({"domain": 0}, "axis 'domain' has size 0"),
        ({"domain": (2, -2)}, "axis 'w' has size -2"),
        ({"domain": 2.0}, "2.0"),
        ({"names": ("dp", "dp")}, "two axes have the same name"),
        ({"names": ("dp", "domain"), "extra": {"dp": 1}}, "two axes have the same name"),
        ({"extra": {1: 2}}, "an axis is named 1; names are strings"),
        ({"names": ("dp", "h", "w")}, "need 2 names"),
        ({"names": "dp"}, "need 2 names"),
        ({"domain": (1, 1, 1)}, "needs names"),
        ({"device": "tpu"}, "device='tpu': use .*'cpu'"),
        ({"timeout": "5"}, "timeout='5': expected seconds"),
        ({"timeout": -1}, "timeout=-1: expected seconds"),
        ({"extra": ("pp", 2)}, "extra.*{'tp': 2}"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ConfigError, match=message):
        init_mesh(**arguments)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domain": 5}, r"has 24 ranks, which is no multiple of 5 .*dp=\?, domain=5"),
        ({"domain": 5, "dp": 5}, "has 24 ranks, but the mesh dp=5, domain=5 has 25; start 25 ranks"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks(arguments, message):
    with fake_group(24), pytest.raises(LauncherError, match=message):
        init_mesh(**arguments)


@pytest.fixture
def bare_environment(monkeypatch):
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_gets_a_real_group(bare_environment):
    mesh = init_mesh(device="cpu")
    assert tuple(mesh.shape) == (1, 1)
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group("domain"))
    assert x.tolist() == [1, 1]
    again = init_mesh(domain=(1, 1))  # the group that is there is used
    assert tuple(again.shape) == (1, 1, 1)


def test_one_process_cannot_be_four(bare_environment):
    with pytest.raises(LauncherError, match=r"there is no launcher.*no multiple of 4 .*torchrun --nproc-per-node 4"):
        init_mesh(domain=4, device="cpu")
    assert not dist.is_initialized()


def test_a_half_set_up_launcher_stops_init_mesh(bare_environment):
    bare_environment.setenv("RANK", "0")
    with pytest.raises(LauncherError, match="WORLD_SIZE is missing"):
        init_mesh(device="cpu")
    assert not dist.is_initialized()


SCRIPT = """
import sys, torch, torch.distributed as dist, scidata
mesh = scidata.init_mesh(domain=2, device="cpu", timeout=60)
x = torch.ones(1)
dist.all_reduce(x, group=mesh.get_group("domain"))
assert tuple(mesh.shape) == (1, 2) and x.item() == 2
sys.stdout.write(f"joined {mesh.get_local_rank('domain')}\\n")  # at once: the ranks share a pipe
sys.stdout.flush()
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"joined (\d)", done.stdout)) == ["0", "1"], (
        done.stdout
    )  # among what Gloo says, in torch 2.10


# -- axes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "arguments", "expected"),
    [
        (("dp", "domain"), {}, ("dp", ("domain",))),
        (("domain",), {}, (None, ("domain",))),
        (("dp",), {}, ("dp", ())),
        (("dp", "h", "w"), {}, ("dp", ("h", "w"))),
        (("h", "w"), {}, (None, ("h", "w"))),
        (("dp", "domain", "tp"), {}, ("dp", ("domain",))),
        (("dp", "lat", "lon"), {}, ("dp", ("lat", "lon"))),
        (("dp", "lat", "tp"), {}, ("dp", ("lat",))),
        (("domain", "tp"), {}, (None, ("domain",))),
        (("dp", "w", "h"), {"domain": ("h", "w")}, ("dp", ("w", "h"))),
        (("dp", "h", "w"), {"domain": "h"}, ("dp", ("h",))),
        (("data", "domain"), {"dp": "data"}, ("data", ("domain",))),
        (("data", "domain"), {"dp": None}, (None, ("domain",))),
        (("lat", "lon"), {"domain": ("lat", "lon")}, (None, ("lat", "lon"))),
        (("lat", "lon"), {"dp": None}, (None, ("lat", "lon"))),
    ],
)
def test_axes_of(names, arguments, expected):
    with fake_group(8):
        mesh = init_device_mesh("cpu", (8, 1, 1)[: len(names)], mesh_dim_names=names)
        assert axes_of(mesh, **arguments) == expected


def test_axes_that_cannot_be_told_apart():
    with fake_group(8, rank=5):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "domain"))
        with pytest.raises(ConfigError, match="no axis 'dp', and axis 'data' could be the dp axis"):
            axes_of(mesh)
        with pytest.raises(UnknownNameError, match="no axis 'dommain'; did you mean 'domain'"):
            axes_of(mesh, dp="data", domain="dommain")
        with pytest.raises(ConfigError, match="both"):
            axes_of(mesh, dp="data", domain="data")
        with pytest.raises(ConfigError, match="no axis names"):
            axes_of(init_device_mesh("cpu", (8,)))


def test_the_order_of_the_axes():
    with fake_group(16, rank=5):
        mesh = init_mesh(domain=4, extra={"pp": 2}, order=("dp", "pp", "domain"))
        assert mesh.mesh_dim_names == ("dp", "pp", "domain")
        assert list(mesh.get_coordinate()) == [0, 1, 1]
        assert axes_of(mesh) == ("dp", ("domain",))
        for order in (("dp", "domain"), ("dp", "pp", "pp", "domain"), ("dp", "tp", "domain"), "domain"):
            with pytest.raises(ConfigError, match="each of the axes dp, domain, pp once"):
                init_mesh(domain=4, extra={"pp": 2}, order=order)


def test_parts_of_a_mesh():
    with fake_group(512, rank=397):
        mesh = init_mesh(domain=(4, 8), extra={"tp": 2})
        place = (axis_rank(mesh, "dp"), axis_rank(mesh, "h"), axis_rank(mesh, "w"), axis_rank(mesh, "tp"))
        assert place == (6, 0, 6, 1)
        assert (axis_size(mesh, "dp"), axis_size(mesh, "w")) == (8, 8)
        part = domain_mesh(mesh, ("w", "h"))
        assert part.mesh_dim_names == ("h", "w")
        assert tuple(part.shape) == (4, 8)
        assert domain_mesh(part, ("h", "w")) is part
        with pytest.raises(UnknownNameError, match="no axis 'domain'"):
            domain_mesh(mesh, ("domain",))
        with pytest.raises(UnknownNameError, match="no axis 'd'"):
            axis_size(mesh, "d")
        with pytest.raises(ConfigError, match="at least one axis"):
            domain_mesh(mesh, ())
    assert (axis_size(None, "dp"), axis_rank(None, "dp")) == (1, 0)


def test_all_of_a_device_goes_through_one_module():
    """torch's modules of devices, and their names, are nowhere else: they work for CUDA, ROCm, XPU and others alike."""
    root = Path(__file__).parents[3]
    files = [*root.glob("scidata/**/*.py"), *root.glob("examples/*.py")]
    found = [
        f"{file.relative_to(root)}: {line.strip()}"
        for file in files
        if file.name != "devices.py"
        for line in file.read_text("utf-8").splitlines()
        if re.search(r"torch\.(cuda|xpu)\b|backends\.cuda|[\"'](cuda|xpu)[\"']|is_cuda\b(?! is_cpu)", line)
        and "``" not in line and "ConfigError" not in line
    ]  # fmt: skip
    assert len(files) > 400
    assert found == []
