"""Compile kernels without a GPU: `python -m tests.kernels.ahead_of_time swiglu ... [--each | --table] [--target 86]`.

Triton is told of an H200 that is not there, or of a GPU of another compute capability: 80, 86, 89 or 120. Each module
of `tests.kernels.cases` makes the launches of one kernel as users would, on CPU tensors; what would be launched is
compiled, with the same specialisation, and not run. Without a name all are; `--table` has one line for the variants of
a kernel, `--each` the JSON of each name, with one variant in float16, which compiles as bfloat16 does. `--cover` has
one variant in float32 and one in 16 bits, float16 and bfloat16 by turns, but for the cases that `--near` names;
`--narrow` compiles only what depends on the limit of shared memory. What needs more of it than the GPU has is an error.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.absent_gpu import AbsentGpu
from fds.kernels import choice, language

BIN = Path(nvidia.__file__).parent / "bin"
CASES = Path(__file__).parent / "cases"
KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # of shared memory that a block may use, by compute capability
COLUMNS = ["kernel", "dtype", "registers", "spilled bytes", "shared bytes", "vectors", "hgmma", "tma", "case"]


def launches(
    names: list[str],
    dtypes: list[torch.dtype],
    *,
    once: Container[torch.dtype] = (),
    near: Container[str] = (),
    only: Container[str] = (),
    target: int = 90,
    narrow: bool = False,
) -> list[tuple[str, Any, torch.dtype, Any]]:
    """Return (case, function, dtype, compiled kernel) of all that the cases of some kernels launch, each once.

    In the dtypes of `once`, a kernel is compiled for the first of its cases only, and for those of `near`; `only` names
    the cases to compile, if not all. `target` is a compute capability. With `narrow` only those launches are compiled,
    before which a launch table was asked that depends on the limit of shared memory.
    """
    found: dict[tuple, tuple] = {}
    seen: set[tuple] = set()
    run, limit, now = JITFunction.run, language.shared_memory, ("", torch.float32)
    depends = not narrow

    def limit_of_target(device: torch.device) -> int:
        nonlocal depends
        depends = True
        return KIB[target]

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        nonlocal depends
        (case, dtype), is_wanted = now, depends
        depends = not narrow
        if not is_wanted or (dtype in once and case not in near and (self.fn, dtype) in seen):
            return
        seen.add((self.fn, dtype))
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault((made.metadata.hash, dtype), (case, self.fn, dtype, made))

    # before kernels are told that they are interpreted, which is decided where they are defined
    cases = [importlib.import_module(f"tests.kernels.cases.{name}").cases for name in names]
    absent: Any = AbsentGpu(target)
    driver.set_active(absent)
    JITFunction.run, language.is_interpreted, language.shared_memory = compile_only, True, limit_of_target
    try:
        with choice.only("triton"):
            for of_kernel in cases:
                for dtype in dtypes:
                    for case, thunk in of_kernel(dtype):
                        now = (case, dtype)
                        if not only or case in only:
                            thunk()
    finally:
        JITFunction.run, language.is_interpreted, language.shared_memory = run, False, limit
    return list(found.values())


def resources(made: Any) -> dict[str, int]:
    """Return what a compiled kernel takes of a multiprocessor, by NVIDIA's own tools."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([BIN / "cuobjdump", "-res-usage", file.name], check=True, capture_output=True, text=True)
    took = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    wide = r"(?:ld|st)\.global[^;]*\.v(?:4\.b32|2\.b64)|cp\.async\.c[ag]\.shared\.global [^;]*, 0x10"
    vectors = len(re.findall(wide, made.asm["ptx"]))
    return {
        "registers": took["REG"],
        "spilled bytes": took["STACK"] + took["LOCAL"],
        "shared bytes": made.metadata.shared,
        "vectors": vectors,
        "hgmma": made.asm["ptx"].count("wgmma.mma_async"),
        "tma": made.asm["ptx"].count("cp.async.bulk.tensor"),
    }


def table(rows: list[dict]) -> str:
    """Return a Markdown table with one line for each kernel and dtype: least and most of its variants."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((f"`{row['kernel']}`", row["dtype"]), []).append(row)
    numbers = COLUMNS[2:-1]
    span = lambda values: " to ".join(str(n) for n in dict.fromkeys((min(values), max(values))))
    lines = [["kernel", "dtype", "variants", *numbers], ["---"] * (3 + len(numbers))]
    for name, some in sorted(groups.items()):
        lines.append([*name, str(len(some)), *(span([row[number] for row in some]) for number in numbers)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(names: list[str], dtypes: Sequence[torch.dtype] = choice.DTYPES, **options: Any) -> list[dict]:
    """Compile what the cases of some kernels launch, and return a row for each variant; options as of `launches`."""
    return [
        {
            "kernel": f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}",
            "dtype": str(dtype).removeprefix("torch."),
            **resources(made),
            "case": case,
        }
        for case, fn, dtype, made in launches(names, list(dtypes), **options)
    ]


def too_large(rows: list[dict], target: int) -> list[str]:
    """Return a line for each variant that needs more shared memory than a GPU of this compute capability has."""
    most = KIB[target] * 1024
    return [
        f"more than {KIB[target]} KiB of shared memory: {row['shared bytes']} bytes, {row['kernel']}, {row['case']}"
        for row in rows
        if row["shared bytes"] > most
    ]


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("names", nargs="*", help="modules of tests.kernels.cases; without one all")
    parser.add_argument("--each", action="store_true", help="JSON of each name, float16 in one variant only")
    parser.add_argument("--table", action="store_true", help="one line for the variants of a kernel")
    parser.add_argument("--cover", action="store_true", help="each: one variant of a kernel in 32 and in 16 bits")
    parser.add_argument("--near", action="append", default=[], help="cover: a case of which every variant is compiled")
    parser.add_argument("--narrow", action="store_true", help="only what depends on the limit of shared memory")
    parser.add_argument("--case", action="append", default=[], help="a case to compile, by its name; without one all")
    parser.add_argument("--target", type=int, default=90, choices=KIB, help="compute capability times 10")
    options = parser.parse_args(given)
    names = options.names or sorted(path.stem for path in CASES.glob("*.py") if path.stem != "__init__")
    choices = {"only": options.case, "target": options.target, "narrow": options.narrow}
    if options.each:
        once = choice.DTYPES if options.cover else [torch.float16]
        left_out = [(torch.float16, torch.bfloat16)[i % 2] if options.cover else None for i in range(len(names))]
        dtypes = [[dtype for dtype in choice.DTYPES if dtype != out] for out in left_out]
        rows = {
            name: rows_of([name], some, once=once, near=options.near, **choices)
            for name, some in zip(names, dtypes, strict=True)
        }
        print(json.dumps(rows))
        return 0
    rows = rows_of(names, **choices)
    if options.table:
        print(table(rows))
    for row in [] if options.table else [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]:
        print(
            f"{row['kernel']:<40}{row['dtype']:<10}{row['registers']:>10}{row['spilled bytes']:>15}"
            f"{row['shared bytes']:>14}{row['vectors']:>9}{row['hgmma']:>7}{row['tma']:>5}  {row['case']}"
        )
    refused = too_large(rows, options.target)
    print("".join(f"{line}\n" for line in refused), end="")
    return 1 if refused else 0


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 compiles nothing"
    sys.exit(main(sys.argv[1:]))
