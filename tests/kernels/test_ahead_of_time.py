"""Every kernel compiles for a GPU that is not there, in every dtype, and keeps what it works on in registers.

`make test` compiles one variant of each kernel in float32 and one in 16 bits, and those near the limit; `make sweeps`
all launches in all dtypes.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests import sweeps
from tests.once import once

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).parents[2]
CASES = sorted(path.stem for path in (ROOT / "tests/kernels/cases").glob("*.py") if path.stem != "__init__")
FILES = sorted((ROOT / "fds/kernels").rglob("*.py"))
DTYPES = {"float32", "float16", "bfloat16"}
# Where the cases of a file's kernels are, if not under its own name.
ELSEWHERE = {
    "normalization": "layer_normalization",
    "normalization_backward": "layer_normalization",
    "flash_backward": "flash",
    "token_loss": "cross_entropy",
    "sparse_forward": "sparse",
    "sparse_backward": "sparse",
}
# Bytes that spill, outside of the loops, where a block has every kind of mask at once.
SPILLED = {
    ("flash_backward._queries_kernel", "64 causal key_padding bias p seed"): 8,
    ("flash_backward._keys_kernel", "256 causal key_padding bias p seed"): 8,
}
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
# What later ones spill of kernels whose launch tables are of 3.7, the release that torch's GPU builds bring.
if TRITON == (3, 8):
    SPILLED = {("flash_backward._queries_kernel", "64 causal"): 8, ("flash_backward._queries_kernel", "128 "): 24}
if TRITON >= (3, 9):
    SPILLED = {
        ("normalization_backward._long_kernel", "65536 columns"): 8,
        ("normalization_backward._long_kernel", "65536 columns, sum"): 8,
        ("gelu._backward_kernel", "64 x 4096 tanh, bias, recompute=True"): 8,
        ("gelu._backward_kernel", "64 x 4096 none, bias, recompute=True"): 8,
        ("flash._forward_kernel", "128 causal key_padding bias p seed"): 24,
        ("flash_backward._queries_kernel", "64 causal"): 24,
        ("flash_backward._queries_kernel", "128 "): 8,
        ("flash_backward._queries_kernel", "128 causal key_padding bias p seed"): 8,
        ("flash_backward._queries_kernel", "256 p seed"): 16,
        ("flash_backward._queries_kernel", "256 causal key_padding bias p seed"): 128,
        ("flash_backward._keys_kernel", "256 causal"): 240,
        ("flash_backward._keys_kernel", "256 p seed"): 192,
        ("flash_backward._keys_kernel", "256 causal key_padding bias p seed"): 328,
    }
# What has fewest registers left, or spills, of the kernels that take most of them.
NEAR = ["256 causal key_padding bias p seed", "64 256 causal key_padding bias documents relative_bias p seed"]
# What needs most shared memory of the kernels whose launch tables depend on it.
LARGE = [("flash", "128 causal"), ("layer_normalization", "65536 columns, sum made twice")]


def case_of(path: Path) -> str:
    """Return the name of the cases of a file's kernels."""
    return ELSEWHERE.get(path.stem, path.stem.lstrip("_"))


def launched_in(path: Path) -> set[str]:
    """Return the functions that a file launches: `name[grid](...)`."""
    return {
        f"{path.stem}.{node.func.value.id}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and isinstance(node.func.value.ctx, ast.Load)
        and node.func.value.id.startswith("_")
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, list[dict]]:
    """Compile in one process, for it takes seconds to start; return what each launch takes of a multiprocessor.

    Where Triton's cache is empty all cases take 400 s.
    """
    part = [] if sweeps.WHOLE else ["--cover", *(word for case in NEAR for word in ("--near", case))]

    def compile_all(folder: Path) -> None:
        code = [sys.executable, "-m", "tests.kernels.ahead_of_time", *CASES, "--each", *part]
        env = {**os.environ, "TRITON_INTERPRET": "0"}
        done = subprocess.run(code, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        (folder / "each.json").write_text(done.stdout)

    return json.loads((once(tmp_path_factory, "ahead_of_time", compile_all) / "each.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_hopper_without_spills(name, compiled):
    rows = compiled[name]
    for row in rows:
        assert row["spilled bytes"] <= SPILLED.get((row["kernel"], row["case"]), 0), row
        assert row["registers"] <= 255 and row["shared bytes"] <= 227 * 1024, row
    here = {(row["kernel"], row["dtype"]) for row in rows}
    mine = [path for path in FILES if case_of(path) == name]
    dtypes = DTYPES if sweeps.WHOLE else DTYPES & {row["dtype"] for row in rows}
    missing = {(kernel, dtype) for path in mine for kernel in launched_in(path) for dtype in dtypes} - here
    assert rows and not missing, sorted(missing)
    assert len(dtypes) > 1 and "float32" in dtypes


def test_rotary_moves_vectors_where_half_a_head_is_a_multiple_of_eight(compiled):
    for row in compiled["rotary"]:
        has_vectors = not row["case"].startswith(("24", "100"))  # halves of 12 and of 50 elements
        assert row["vectors"] >= 16 if has_vectors else row["registers"] <= 80, row


@pytest.mark.parametrize(("name", "case"), LARGE)
def test_where_shared_memory_is_short_other_rows_of_the_launch_tables_fit(name, case):
    """For sm_86, with 99 KiB, the largest; `python -m tests.kernels.ahead_of_time --target 86` compiles all."""
    code = [sys.executable, "-m", "tests.kernels.ahead_of_time", name, "--case", case, "--narrow", "--target", "86"]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([*code, "--each"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)[name]
    assert rows and all(row["shared bytes"] <= 99 * 1024 for row in rows), rows
    assert max(row["shared bytes"] for row in rows) > 48 * 1024, "not a large one"


def test_attention_in_16_bits_is_multiplied_by_hopper_s_warp_groups_and_loaded_by_its_copy_engine(compiled):
    rows = [row for row in compiled["flash"] if row["dtype"] != "float32"]
    assert len(rows) > (20 if sweeps.WHOLE else 5) and all(row["hgmma"] and row["tma"] for row in rows), rows


def test_every_file_with_kernels_has_cases():
    assert {case_of(path) for path in FILES if launched_in(path)} <= set(CASES)
