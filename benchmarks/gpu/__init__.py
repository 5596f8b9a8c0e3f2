"""Prove and measure fds on a GPU, unattended, in calls of some minutes: `python -m benchmarks.gpu` (docs/gpu.md).

A part is a row of `parts.PARTS`: the tests, or a module with `cases(setting) -> Iterable[Case]`, which makes no tensors.
Each case runs once, in a process of its part (`worker`), within its time; one that raises, hangs or takes the process
down is recorded, and the others go on. What is done is in `records.jsonl` at once, and is not done again by later calls.
"""
