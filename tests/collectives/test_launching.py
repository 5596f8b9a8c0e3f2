"""Launching: environments as torchrun, srun and mpirun were seen to set them, and the lines that are shown for them."""

import datetime
import json
import os
import re
import shlex
import socket
import sys
import time
import types
from concurrent import futures
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
import torch.nn.functional as F
from torch import nn

import fds
from fds.collectives import joining, launch
from fds.collectives.launch import STARTERS, Launch, launched
from tests import ranks
from tests.house.test_readme import blocks

ROOT = Path(__file__).parents[2]

# One rank of a run, as seen: what is read here, and what could be mistaken for it.
SEEN = {
    # Open MPI 4.1.4: mpirun -np 2
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_UNIVERSE_SIZE": "2",
        "OMPI_MCA_orte_num_nodes": "1",
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "323354625",
        "PMIX_HOSTNAME": "vm",
    },
    # MPICH 4.0.2: mpirun -np 2
    "MPICH's mpirun": {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "PMI_FD": "8",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
    },
    # Slurm 22.05.8: srun -n 2
    "srun": {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "vm",
        "SLURM_JOB_NODELIST": "vm",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    },
    # srun -N 2 --ntasks-per-node=2, two slurmd
    "srun on two nodes": {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "2",
        "SLURMD_NODENAME": "n2",
    },
    # a batch script of sbatch -n 2, outside srun
    "sbatch": {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "vm",
        "SLURM_JOB_ID": "2",
        "SLURM_GTIDS": "0",
    },
    # the shell of salloc -n 2
    "salloc": {"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "vm"},
}
PMI2 = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "13", "PMI_JOBID": "2.2"}  # besides, under srun --mpi=pmi2

MEANING = {
    "mpirun": Launch(1, 2, 1, "127.0.0.1", 29500),
    "MPICH's mpirun": Launch(1, 2, 1, "127.0.0.1", 29500),
    "srun": Launch(1, 2, 1, "vm", 20001),
    "srun on two nodes": Launch(3, 4, 1, "n1", 20002),
    "sbatch": None,
    "salloc": None,
}


@pytest.fixture
def without_mpi4py(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("without_mpi4py")
@pytest.mark.parametrize("who", SEEN)
def test_what_launchers_were_seen_to_set_is_read(who):
    assert launched(SEEN[who]) == MEANING[who]


@pytest.mark.usefixtures("without_mpi4py")
def test_launchers_inside_a_slurm_job_are_told_apart():
    assert launched(SEEN["srun"] | PMI2) == MEANING["srun"]
    assert launched(SEEN["sbatch"] | SEEN["mpirun"]) == MEANING["mpirun"]
    proxy = SEEN["srun"] | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # srun starts MPICH's proxy, which starts ranks
    assert launched(proxy | SEEN["MPICH's mpirun"]) == MEANING["MPICH's mpirun"]
    torchruns = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "7"}
    assert launched(SEEN["srun on two nodes"] | torchruns) == Launch(5, 8, 1, "n1", 7)


@pytest.mark.usefixtures("without_mpi4py")
@pytest.mark.parametrize("who", ["mpirun", "MPICH's mpirun"])
def test_mpi_on_two_nodes_asks_for_the_host_of_rank_0(who):
    alone = {name: "1" for name in launch.ON_THIS_NODE if name in SEEN[who]}
    with pytest.raises(fds.errors.MeshError, match=r"(?s)MASTER_ADDR.*hint:.* MASTER_ADDR.*mpi4py"):
        launched(SEEN[who] | alone)
    assert launched(SEEN[who] | alone | {"MASTER_ADDR": "n1"}) == Launch(1, 2, 1, "n1", 29500)


def test_mpi_is_asked_once_however_often_a_rank_looks(monkeypatch):
    asked = []
    comm = types.SimpleNamespace(bcast=lambda value, root: asked.append(value) or ("n1", 7))
    mpi4py = types.SimpleNamespace(MPI=types.SimpleNamespace(COMM_WORLD=comm))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "mpi4py")
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    launch._share_address.cache_clear()
    try:  # a rank that makes a mesh alone would wait for the others for ever
        assert [launched(SEEN["mpirun"]) for _ in range(3)] == [Launch(1, 2, 1, "n1", 7)] * 3
        assert len(asked) == 1
    finally:
        launch._share_address.cache_clear()


def train(dp) -> list[float]:
    """Train three steps on the rows of a rank, and return the losses of all rows."""
    torch.manual_seed(0)
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))

    def loss_fn(params, batch):
        x, y = batch
        return F.mse_loss(apply(params, x), y)

    step, losses = fds.compose(fds.shard_optimizer(dp, stage=2), fds.adamw(lr=1e-2))(loss_fn), []
    state = step.init(params, key=0)
    for i in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        state, metrics = step(state, [t.chunk(dp.size)[dp.index] for t in (x, x.sum(1, keepdim=True))])
        losses.append(float(metrics["loss"]))
    return losses


SCRIPT = """
import json, os, fds
from tests.collectives.test_launching import train
fds.init_distributed(timeout=60.0)
dp = fds.mesh(dp=-1)["dp"]
line = json.dumps([os.environ["GROUP_RANK"], dp.index, dp.size, train(dp)])
os.write(1, (line + chr(10)).encode())  # whole, beside the other's
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def together(target, *arguments: tuple) -> list[str]:
    """Call `target` in processes side by side, and return what each printed."""
    started = [ranks.Process(target, *each) for each in arguments]
    for each in started:
        wait([each.process.sentinel], 100)
    ends = [each.end() for each in started]
    assert [code for code, _ in ends] == [0] * len(ends), ends
    return [text for _, text in ends]


def close_to_one_process(losses: list[float]) -> bool:
    # Stage 2 sums what one process sums, in another order: a few roundings of float32 in each of three steps.
    alone = train(fds.mesh(dp=1)["dp"])
    return torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=0)


def join_under(environment: dict[str, str]) -> None:
    for name in [name for names in STARTERS.values() for name in names]:
        os.environ.pop(name, None)
    os.environ.update(environment)
    fds.init_distributed(timeout=60.0)
    dp = fds.mesh(dp=-1)["dp"]
    print(json.dumps([dp.index, dp.size, train(dp)]))


RANK_OF = {"mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "srun": ("SLURM_PROCID", "SLURM_LOCALID")}


@pytest.mark.parametrize("who", RANK_OF)
def test_two_processes_train_in_the_environment_of(who):
    port = {"MASTER_PORT": str(free_port())}
    here = {name: "localhost" if value == "vm" else value for name, value in SEEN[who].items()}
    each = [(here | port | dict.fromkeys(RANK_OF[who], str(rank)),) for rank in range(2)]
    results = [json.loads(text) for text in together(join_under, *each)]
    assert [result[:2] for result in results] == [[0, 2], [1, 2]]
    assert results[0][2] == results[1][2] and close_to_one_process(results[0][2])


def shown(document: str) -> list[str]:
    """Return the lines of the console blocks of a document that start ranks."""
    text = (ROOT / document).read_text().replace("\\\n", "")
    lines = [
        line[2:].split("#")[0]
        for language, code, _ in blocks(text)
        if language == "console"
        for line in code.splitlines()
        if line.startswith("$ ")
    ]
    return [" ".join(line.split()) for line in lines if re.match(r"(torchrun|srun|mpirun)\b", line)]


def agent(arguments: list[str]) -> None:
    """Be torchrun, which is this function."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    torch.distributed.run.main(arguments)


def test_two_agents_of_torchrun_are_two_nodes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = next(line for line in shown("docs/launching.md") if line.startswith("torchrun --nnodes 2"))
    for old, new in (("node1:29500", f"127.0.0.1:{free_port()}"), ("node 8", "node 1"), ("train.py", str(script))):
        assert old in line
        line = line.replace(old, new)
    texts = together(agent, *[(shlex.split(line)[1:],)] * 2)
    results = sorted(json.loads(found) for text in texts for found in re.findall(r"^\[.*\]$", text, re.MULTILINE))
    assert [result[:3] for result in results] == [["0", 0, 2], ["1", 1, 2]]
    assert results[0][3] == results[1][3] and close_to_one_process(results[0][3])


def test_torchrun_knows_the_flags_that_are_shown():
    lines = [line for document in ("README.md", "docs/ranks.md", "docs/launching.md") for line in shown(document)]
    torchruns = [line for line in lines if line.startswith("torchrun")]
    assert len(torchruns) >= 4
    for line in torchruns:  # argparse takes an unknown flag before the script for an error, and ends the process
        known = torch.distributed.run.parse_args(shlex.split(line)[1:])
        assert known.training_script.endswith(".py"), line


def test_the_page_shows_a_line_of_three_launchers_on_one_node_and_on_two():
    starts = [line for line in shown("docs/launching.md") if line.endswith((" train.py", "python train.py"))]
    assert {"torchrun", "srun", "mpirun"} == {line.split()[0] for line in starts}
    assert all(line in starts for line in shown("README.md"))


def test_srun_and_mpirun_are_shown_with_the_flags_that_were_tried():
    # What ran with Slurm 22.05.8 and Open MPI 4.1.4, sizes and hosts aside.
    tried = {
        "srun": {"-N", "--ntasks-per-node", "--cpus-per-task", "--kill-on-bad-exit"},
        "mpirun": {"-np", "-host", "--bind-to", "-x"},
    }
    for line in shown("docs/launching.md"):
        program, *words = shlex.split(line)
        if program in tried:
            before = words[: next(i for i, word in enumerate(words) if word in ("python", "torchrun"))]
            flags = {word.split("=")[0] for word in before if word.startswith("-")}
            assert flags <= tried[program], line


def test_every_start_of_the_same_ranks_has_a_name_of_its_own_in_a_store_that_stays():
    store, limit = dist.HashStore(), datetime.timedelta(seconds=20)

    def start(size: int) -> set[str]:
        with futures.ThreadPoolExecutor(size) as ranks:
            end = time.monotonic() + limit.total_seconds()
            name = lambda rank: joining._name_of_start(store, Launch(rank, size, 0), limit, end)
            return set(ranks.map(name, range(size)))

    store.set("asks 1", "a rank that died before it was answered")
    first, second, third = start(4), start(4), start(2)  # the last of fewer ranks: the others are gone
    assert len(first) == len(second) == len(third) == 1
    assert len(first | second | third) == 3
