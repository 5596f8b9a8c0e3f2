"""Ranks that train case after case, by DeepSpeed together and by fds simulated on the first; a line for every case.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.fuzzing.worker OUT NUMBER ...
"""

from __future__ import annotations

import datetime
import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist

import fds
from tests.fuzzing import repaired
from tests.fuzzing.cases import drawn
from tests.fuzzing.training import Run, by_deepspeed, by_fds

PATIENCE = datetime.timedelta(seconds=90)


def main(out: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # pyright: ignore[reportMissingImports]

    CPU_Accelerator.is_fp16_supported = lambda self: True  # it computes in float16, only slowly
    CPU_Accelerator.supported_dtypes = lambda self: [torch.float32, torch.bfloat16, torch.float16]
    with mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None):
        deepspeed.init_distributed(dist_backend="gloo", timeout=PATIENCE)
    first = dist.get_rank() == 0
    for number in map(int, numbers):
        case, told = drawn(number), [None]
        if first:
            told = [tempfile.mkdtemp(prefix="fds_fuzz_")] if case.saved else [None]
        dist.broadcast_object_list(told)
        saves = None if told[0] is None else Path(told[0])
        there = _run(lambda case=case, saves=saves: by_deepspeed(case, saves, repaired.engine))
        if first:
            saved = saves if not there.error else None
            here = _run(lambda case=case, saved=saved: fds.simulate(lambda: by_fds(case, saved), case.ranks)[0])
            with Path(out).open("a") as file:
                file.write(
                    json.dumps({"number": number, "fds": attrs.asdict(here), "deepspeed": attrs.asdict(there)}) + "\n"
                )
            if saves is not None:
                shutil.rmtree(saves)
        dist.barrier()


def _run(train: Any) -> Run:
    """Return what a training gave, or what it ended with."""
    try:
        return train()
    except Exception as error:
        return Run([], [], [], [], [], {}, error=f"{type(error).__name__}: {error}"[:400])


if __name__ == "__main__":
    main(*sys.argv[1:])
