"""Compile kernels for sm_90 without a GPU: `python -m tests.kernels.ahead_of_time gated ... [--each | --table]`.

Triton is told of an H200 that is not there. Each module of `tests.kernels.cases` makes the launches of one kernel as
users would, on CPU tensors; what would be launched is compiled, with the same specialisation, and not run. Without a
name all are; `--table` has one line for the variants of a kernel, `--each` the JSON of each name, with one variant in
float16, which compiles as bfloat16 does.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia as nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fds.kernels import choice, language

BIN = Path(nvidia.__file__).parent / "bin"
CASES = Path(__file__).parent / "cases"
COLUMNS = ["kernel", "dtype", "registers", "spilled bytes", "shared bytes", "vectors", "case"]


class Absent:
    """The driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def launches(
    names: list[str], dtypes: list[torch.dtype], *, once: Container[torch.dtype] = ()
) -> list[tuple[str, Any, torch.dtype, Any]]:
    """Return (case, function, dtype, compiled kernel) of all that the cases of some kernels launch, each once.

    In the dtypes of `once`, a kernel is compiled for the first of its cases only.
    """
    found: dict[tuple, tuple] = {}
    seen: set[tuple] = set()
    run, now = JITFunction.run, ("", torch.float32)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        case, dtype = now
        if dtype in once and (self.fn, dtype) in seen:
            return None
        seen.add((self.fn, dtype))
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault((made.metadata.hash, dtype), (case, self.fn, dtype, made))
        return made

    # before kernels are told that they are interpreted, which is decided where they are defined
    cases = [importlib.import_module(f"tests.kernels.cases.{name}").cases for name in names]
    driver.set_active(Absent())
    JITFunction.run, language.is_interpreted = compile_only, True
    try:
        with choice.only("triton"):
            for of_kernel in cases:
                for dtype in dtypes:
                    for case, thunk in of_kernel(dtype):
                        now = (case, dtype)
                        thunk()
    finally:
        JITFunction.run, language.is_interpreted = run, False
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


def rows_of(names: list[str], *, once: Container[torch.dtype] = ()) -> list[dict]:
    """Compile what the cases of some kernels launch, and return a row for each variant; `once` as of `launches`."""
    return [
        {
            "kernel": f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}",
            "dtype": str(dtype).removeprefix("torch."),
            **resources(made),
            "case": case,
        }
        for case, fn, dtype, made in launches(names, list(choice.DTYPES), once=once)
    ]


def main(arguments: list[str]) -> None:
    options = {"--each", "--table"} & set(arguments)
    names = [x for x in arguments if x not in options]
    names = names or sorted(path.stem for path in CASES.glob("*.py") if path.stem != "__init__")
    if "--each" in options:
        print(json.dumps({name: rows_of([name], once=[torch.float16]) for name in names}))  # it compiles as bfloat16
        return
    rows = rows_of(names)
    if options:
        print(table(rows))
        return
    for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]:
        print(
            f"{row['kernel']:<40}{row['dtype']:<10}{row['registers']:>10}{row['spilled bytes']:>15}"
            f"{row['shared bytes']:>14}{row['vectors']:>9}  {row['case']}"
        )


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 compiles nothing"
    main(sys.argv[1:])
