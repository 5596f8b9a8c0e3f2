"""The suite as on CPUs of other kinds: torch, oneDNN and MKL are told which instructions to do without.

`make test-cpus` runs what computes under each kind in turn, the machine's own too. `make test` has a part of it
(tests/unit/test_cpus.py): the tests that another kind ever failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {  # what says so to torch, and to oneDNN
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "torch alone": {"ATEN_CPU_CAPABILITY": "default"},
    "own": {},
}
# what computes nothing, or runs commands and documents whose numbers the rooms have
ELSEWHERE = ("house", "examples", "benchmarks", "command_line", "reporting", "display", "monitors", "media", "typing")
SENSITIVE = (
    "tests/config/test_recorded_losses.py::test_a_json_trains_as_it_did_under_deepspeed[3 bf16 float sums]",
    "tests/config/test_initialize.py::test_with_several_microbatches_a_rank_another_number_of_ranks_may_add_in_another_order",
    "tests/optim/test_onebit_adam.py::test_low_precision_parameters_send_their_momentum_in_float32",
    "tests/kernels/test_normalization.py::test_tensors_with_gaps_and_transposed_ones_are_read_as_they_are",
    "tests/pipeline/test_failures.py::test_where_one_of_two_processes_fails_that_play_all_stages_both_say_so[2]",
)


def run(kind: str, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests as on a CPU of a kind."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **KINDS[kind]}, text=True, capture_output=True)


def main() -> int:
    """Run everything that computes under each kind, and say which failed."""
    left_out = [f"--ignore=tests/{name}" for name in ELSEWHERE]
    failed = []
    for kind in KINDS:
        done = run(kind, ["-n", os.environ.get("JOBS", "2"), *left_out, *sys.argv[1:]])
        print(f"{kind}: {done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
        failed += [kind] * (done.returncode != 0)
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
