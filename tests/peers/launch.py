"""Start a module on the ranks of torchrun, DeepSpeed on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(module: str, *arguments: object, ranks: int) -> None:
    """Run `python -m module arguments` on new processes until they end. Raises with what they printed."""
    ended = started(module, *arguments, ranks=ranks)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(ended.args)} failed:\n{ended.stdout[-6000:]}")


def started(module: str, *arguments: object, ranks: int) -> subprocess.CompletedProcess[str]:
    """Do the same, and return how they ended, with what they printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        module,
        *map(str, arguments),
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
