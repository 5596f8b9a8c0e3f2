"""Every benchmark still runs: its smallest case, from the arguments of the command line to the tables.

`make bench-NAME` is `benchmarks/NAME.py`, and `--quick` is its smallest case. That of the kernels needs a GPU; what
runs of it without one is in tests/kernels/test_benchmark.py.
"""

import gc
import importlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cable, harness, pipeline, ranks, report, storage
from tests.ranks import Pool
from tests.tuning import starting

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"^bench-([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
NEEDS_A_GPU = {"kernels"}
ELSEWHERE = {"launches"}  # tests/benchmarks/test_launches.py
OF_PEERS = {"bert", "loading", "rows"}  # of models of transformers
WITHOUT_PEERS = {  # what of a benchmark needs no package but torch
    "analysing": ["--only", "fds"],
    "sharding": ["--only", "fds 0,DDP", "--stages", "0", "--rates", "loopback"],
    "pipeline": ["--only", "fds ZB-H1,torch 1F1B"],
    "storage": ["--only", "saving", "--ranks", "1"],
    "offload": ["--parts", "step"],
    "tensor": ["--only", "fds, sequence, loss", "--parts", "time;memory"],
    "network": [
        "--rates",
        "loopback",
        "--only",
        "DDP; fds 0, 8 bits; fds 3; fds 3, 8 bits; fds onebit_adam; fds local_updates",
    ],
}


@pytest.fixture(scope="module")
def pool():
    """Return ranks that stay, so that each imports the peers once."""
    pool = Pool()
    yield pool
    pool.end()


def on_a_rank(work, arguments):
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())  # DeepSpeed asks for it
    try:
        return work(*arguments)
    finally:
        gc.enable()  # it is off while a clock runs
        del os.environ["LOCAL_RANK"]


@pytest.fixture
def run(monkeypatch, capsys, pool, request):
    """Return a function that runs a benchmark as its command line would, and returns what it showed."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)

    def launch(work, *arguments, num_ranks=2):
        if request.node.get_closest_marker("peers"):  # DeepSpeed keeps its groups for the length of a process
            pool.end()
        return pool.run(on_a_rank, (work, arguments), num_ranks, 300.0)

    monkeypatch.setattr(ranks, "prepare", lambda modules: None)
    anywhere = lambda work, *arguments, over="", num_ranks=2: launch(work, *arguments, num_ranks=num_ranks)
    monkeypatch.setattr(ranks, "launch", anywhere)
    monkeypatch.setattr(
        storage, "launch", lambda setting, work, *rest: launch(work, setting, *rest, num_ranks=setting.num_ranks)[0]
    )
    starting.warm(monkeypatch)
    monkeypatch.setattr(harness, "PAIRS_PER_MAKING", 4)
    monkeypatch.setattr(pipeline, "MEMORY_RUNS", 1)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        assert importlib.import_module(f"benchmarks.{name}").main() == 0
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("name", sorted({*NAMES, "planning", "vocab_losses"} - NEEDS_A_GPU - ELSEWHERE - OF_PEERS))
def test_the_smallest_case_of_a_benchmark_runs(name, run):
    kept = set(report.RESULTS.iterdir())
    assert "contender" in run(name, "--quick", *WITHOUT_PEERS.get(name, []))
    assert set(report.RESULTS.iterdir()) == kept


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("pipeline", "DeepSpeed"),
        ("sharding", "DeepSpeed"),
        ("storage", "dcp.async_save"),
        ("bert", "sparse"),
        ("rows", "tiles"),
    ],
)
def test_it_runs_beside_the_peers_too(name, peer, run):
    assert peer in run(name, "--quick")


def test_there_is_one_for_every_target():
    assert {"plain", "sharding", "pipeline", "storage", "kernels"} <= set(NAMES)
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in NAMES)


def test_without_root_there_is_no_cable_and_it_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "iproute2" in cable.missing()
