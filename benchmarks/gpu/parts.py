"""The parts of a run on a GPU, in their order, and how long each may take of half an hour."""

from __future__ import annotations

import attrs

from benchmarks.gpu.testing import KERNELS, OTHERS


@attrs.frozen
class Part:
    """A part: a module with `cases(setting)`, or none for tests, which pytest runs."""

    name: str
    what: str
    seconds: float  # of all calls together, where the others are asked for too
    module: str = ""
    must_pass: bool = False  # a call ends where a case of it failed: what follows would fail alike


PARTS = {
    part.name: part
    for part in (
        Part("smoke", "one case of each thing that all else stands on", 90, "benchmarks.gpu.smoke", must_pass=True),
        Part(KERNELS, "the tests of kernels on CUDA, against float64", 270),
        Part("kernels", "every kernel beside torch, torch.compile and peers", 510, "benchmarks.kernels"),
        Part("step", "whole steps of GPT-2 124M beside torch's", 420, "benchmarks.gpu.step"),
        Part(OTHERS, "all other tests on CUDA, against hand-written loops", 240),
        Part("counters", "compute-sanitizer on tiny shapes of every kernel", 270, "benchmarks.gpu.counters"),
    )
}
