"""Prove and measure fds on a GPU, unattended, in calls of some minutes: `python -m benchmarks.gpu` (docs/gpu.md).

A part is the tests, or a module with `cases(setting)`, which returns `records.Case`s and makes no tensors. Each case
runs once, in a process of its part, within its time; one that raises, hangs or takes the process down is recorded, and
the others go on. What is done is in `records.jsonl` at once, and later calls do not do it again.
"""
