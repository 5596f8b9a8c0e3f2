"""A rank: train by one configuration after the other, as fds or as DeepSpeed does, and write down what rank 0 saw.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.peers.worker deepspeed OUT [NAME ...]
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import attrs
import torch
import torch.distributed as dist

from tests.peers.cases import CASES, REPAIRED
from tests.peers.launch import torchrun
from tests.peers.training import RANKS, Run, by_deepspeed, by_fds


def train(side: str, out: Path, names: Iterable[str] = ()) -> dict[str, Run]:
    """Return name -> run of one side, "fds" or "deepspeed", on two new processes. Raises with what they printed."""
    torchrun("tests.peers.worker", side, out, *names, ranks=RANKS)
    return {name: Run(**run) for name, run in json.loads(out.read_text()).items()}


def main(side: str, out: str, *names: str) -> None:
    torch.set_num_threads(1)
    begin(side)
    runs = {name: by_fds(CASES[name]) if side == "fds" else by_deepspeed(CASES[name]) for name in names or CASES}
    if side == "deepspeed":
        runs |= {
            f"{name}{REPAIRED}": by_deepspeed(CASES[name], empty_update=False)
            for name in runs
            if name.startswith("0 bf16")
        }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({name: attrs.asdict(run) for name, run in runs.items()}))
    dist.barrier()  # the first to leave would close the other's connections


def begin(side: str) -> None:
    """Join the other rank, as each library does it."""
    if side == "fds":
        import fds

        fds.init_distributed()
    else:
        import deepspeed  # pyright: ignore[reportMissingImports]

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # gloo carries all: its own operator for ranks of one machine is compiled first, and waits by spinning
        with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
            deepspeed.init_distributed(dist_backend="gloo")


if __name__ == "__main__":
    main(*sys.argv[1:])
