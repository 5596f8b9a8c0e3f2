"""What a launcher says in the environment, and the variables that change how ranks run."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fds.collectives.launch import JOBS, STARTERS, launched
from fds.command_line.doctor.finding import Finding, Settings
from fds.errors import MeshError

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_", "CUDA_VISIBLE", "TRITON_", "PYTORCH_", "FDS_", "MASTER_")
_NONE = "to start two ranks: torchrun --nproc-per-node 2 train.py, or srun, or mpirun: docs/launching.md"


def launcher(settings: Settings) -> Iterator[Finding]:
    """Find which launcher started this process, if one did, and what else is set."""
    seen = {name for names in (*STARTERS.values(), *JOBS.values()) for name in names if name in os.environ}
    try:
        launch = launched(os.environ)
    except MeshError as error:
        yield Finding("launcher", error.what, "problem", error.hint or error.want)
    else:
        if launch is None:
            yield Finding("launcher", "none: one rank", advice=_NONE)
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
