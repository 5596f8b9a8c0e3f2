"""Ranks: what a launcher says in the environment, which backends there are, whether two processes meet and sum."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Iterator

import torch
from torch.cuda import nccl

from fds.collectives.joining import backends
from fds.collectives.launch import JOBS, STARTERS, launched
from fds.command_line.doctor import Finding, Settings, run_together
from fds.errors import MeshError

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_", "CUDA_VISIBLE", "TRITON_", "PYTORCH_", "FDS_", "MASTER_")
_HOW_TO_LAUNCH = "to start two ranks: torchrun --nproc-per-node 2 train.py, or srun, or mpirun: docs/launching.md"


def launcher(settings: Settings) -> Iterator[Finding]:
    """Find which launcher started this process, if one did, and what else is set."""
    seen = {name for names in (*STARTERS.values(), *JOBS.values()) for name in names if name in os.environ}
    try:
        launch = launched(os.environ)
    except MeshError as error:
        yield Finding("launcher", error.what, "problem", error.hint or error.want)
    else:
        if launch is None:
            yield Finding("launcher", "none: one rank", advice=_HOW_TO_LAUNCH)
        else:
            at = f", rank 0 at {launch.address}:{launch.port}" if launch.address else ""
            yield Finding("launcher", f"rank {launch.rank} of {launch.world_size}{at}")
    named = sorted(seen | {name for name in os.environ if name.startswith(PREFIXES)})
    for name in named:
        yield _variable(name, os.environ[name])


def _variable(name: str, value: str) -> Finding:
    finding = Finding(name, value or "(empty)", values={"value": value})
    if name == "TRITON_INTERPRET" and value not in ("", "0"):
        return Finding(name, value, "note", "kernels run in Python, for tests: unset it to train", finding.values)
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
        return Finding(name, value or "(empty)", "note", "this hides all GPUs: unset it to use them", finding.values)
    return finding


LIMIT = 60.0  # seconds for starting two processes, and for what they do


def ranks(settings: Settings) -> Iterator[Finding]:
    """Find the backends of torch.distributed, and let two ranks shake hands over gloo."""
    is_there = backends()
    gpus = torch.cuda.is_available()
    if is_there["nccl"]:
        yield Finding("NCCL", ".".join(map(str, nccl.version())))
    else:
        advice = "several GPUs need a build of torch that has it" if gpus else "it is for GPUs"
        yield Finding("NCCL", "not in this build of torch", "problem" if gpus else "ok", advice)
    gloo = "there" if is_there["gloo"] else "not in this build of torch"
    yield Finding(
        "gloo", gloo, "ok" if is_there["gloo"] else "problem", "" if is_there["gloo"] else "install torch anew"
    )
    mpi4py = importlib.util.find_spec("mpi4py") is not None
    yield Finding(
        "mpi4py", "there" if mpi4py else "not installed", advice="mpirun does without: fds uses gloo and NCCL"
    )
    if is_there["gloo"] and not settings.quick:
        yield handshake(LIMIT)


def _free_port() -> int:
    """Return a free port of the loopback. Raises `OSError` if connections within it fail."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5.0).close()
    with socket.socket() as s:  # another port, which has had no connection
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def handshake(limit: float) -> Finding:
    """Start two fresh processes that meet over gloo and sum tensors; find how fast that is."""
    try:
        port = _free_port()
    except OSError as error:
        text = f"did not meet: 127.0.0.1, the loopback, does not answer: {error.strerror or error}"
        return Finding("two ranks", text, "problem", "ip link set lo up")
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [{**world, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"} for rank in ("0", "1")]
    ended = run_together("fds.command_line.doctor.trials", environs, arguments="handshake", limit=limit)
    failed = next(((rank, process) for rank, process in enumerate(ended) if process.code != 0), None)
    if failed is not None:
        advice = (
            "ranks cannot train together here; export GLOO_SOCKET_IFNAME=lo, or another interface (below), and retry"
        )
        return Finding("two ranks", f"did not meet: rank {failed[0]}: {failed[1].reason}", "problem", advice)
    values = json.loads(ended[0].out)
    text = (
        f"met in {values['rendezvous_s']:.1f} s; an all-reduce takes {values['latency_us']:.0f} us, "
        f"of {values['large_bytes'] / 2**20:.0f} MiB {values['bandwidth_bytes_per_s'] / 2**20:.0f} MiB/s"
    )
    return Finding("two ranks", text, values=values)
