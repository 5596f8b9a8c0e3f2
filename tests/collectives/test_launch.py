"""Launch environments: torchrun's, MPI's and Slurm's, whole, half and none."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from fds import collectives as c
from fds.collectives.launch import STARTERS, Launch, first_host, launched
from fds.errors import MeshError

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}

ENVIRONMENTS = {
    "none": ({"PATH": "/bin", "SLURM_JOB_ID": "1"}, None),
    "torchrun": (TORCHRUN, Launch(2, 4, 0, "host", 1234)),
    "torchrun, one process": ({"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1, 0)),
    "Slurm": (SLURM, Launch(3, 8, 1, "gpu07", 23456)),
    "Slurm with an address": (SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, Launch(3, 8, 1, "a", 5)),
    "torchrun under Slurm": (SLURM | TORCHRUN, Launch(2, 4, 0, "host", 1234)),
    "Open MPI on one node": (OMPI, Launch(1, 2, 1, "127.0.0.1", 29500)),
    "Open MPI under Slurm": (OMPI | SLURM, Launch(1, 2, 1, "127.0.0.1", 29500)),
    "PMI": (PMI | {"MASTER_ADDR": "a"}, Launch(1, 4, 1, "a", 29500)),
}


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize(("environ", "want"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_environments_are_read(environ, want):
    assert launched(environ) == want


HALVES = {
    "no size": ({"RANK": "0"}, "RANK and not WORLD_SIZE"),
    "no rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE and not RANK"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    "no number": (TORCHRUN | {"RANK": "one"}, "not a number"),
    "out of range": (TORCHRUN | {"RANK": "4"}, "0 to 3"),
    "Slurm, no size": ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_PROCID and not SLURM_NTASKS"),
    "Slurm, no nodes": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, "MASTER_ADDR"),
    "MPI on several nodes": (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpi4py"),
}


@pytest.mark.parametrize(("environ", "words"), HALVES.values(), ids=HALVES)
def test_half_an_environment_is_refused(environ, words):
    with pytest.raises(MeshError, match=words):
        launched(environ)


def test_mpi_tells_the_address_of_rank_0(monkeypatch):
    found = []
    comm = types.SimpleNamespace(bcast=lambda value, root: found.append(value) or value or ("host of rank 0", 7))
    mpi4py = types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=comm))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "mpi4py")
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    assert launched(PMI) == Launch(1, 4, 1, "host of rank 0", 7)
    assert found == [None]
    own = launched(PMI | {"PMI_RANK": "0"})
    assert own is not None and (own.address, own.port) == found[1] and own.port > 0


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-5]", "n3"),
        ("n[003,007-9]-ib,m1", "n003-ib"),
        ("r[1-2]n[04-5]", "r1n04"),
        ("login-1,gpu[1-2]", "login-1"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.fixture
def nobody_started_us(monkeypatch):
    for names in STARTERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nobody_started_us")
def test_one_process_stays_alone(monkeypatch):
    for _ in range(2):
        c.init_distributed()
        c.init_distributed(rank=0, world_size=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    c.init_distributed(check=True)
    assert not dist.is_initialized() and c.mesh(dp=-1).size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert c.simulate(lambda: c.init_distributed(), 2) == [None, None]
    assert not dist.is_initialized()


@pytest.mark.usefixtures("nobody_started_us")
@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 0},
        {"world_size": 2},
        {"rank": 0, "world_size": 2},
        {"rank": 2, "world_size": 2, "init_method": "x"},
        {"rank": 0, "world_size": 2, "init_method": "tcp://localhost:1", "backend": "mpi"},
    ],
)
def test_half_of_the_arguments_are_refused(arguments):
    with pytest.raises(MeshError):
        c.init_distributed(**arguments)


@pytest.mark.usefixtures("nobody_started_us")
@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e300, "60", None, True])
def test_what_is_no_time_is_refused(timeout):
    with pytest.raises(MeshError, match="not a time limit"):
        c.init_distributed(timeout=timeout)


SCRIPT = """
import os, torch, fds.collectives as c
c.init_distributed(timeout=30.0)
c.init_distributed()
axis = c.mesh(dp=-1)["dp"]
os.write(1, b"%d %d;" % (axis.size, int(axis.all_reduce(torch.tensor(10 ** axis.index)))))  # whole, beside the other's
"""


def test_torchrun_starts_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 11;") == 2
