"""Which kernels passed on which GPU: the record that decides whether a kernel runs where nobody asked for it.

`passed.json`, beside this file, holds one entry for each kernel and architecture (`Passed`). An entry counts while the
kernel is as it was: `fingerprint` is of the code of its module and of all modules of `fds.kernels` that it imports,
without comments and docstrings. A kernel that passed, and was slower than torch's operator there, is not chosen.
Versions of torch and Triton are recorded, not compared. `python -m benchmarks.gpu record` writes the file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch

from fds.errors import KernelError

HERE = Path(__file__).parent
RECORD = HERE / "passed.json"

# The module of each kernel. Entries, and `fds.kernels.chosen`, name kernels by the functions that run them.
HOMES = {
    "adamw": "elementwise.py",
    "bias_dropout_add": "dropout_add.py",
    "bias_gelu": "gelu.py",
    "bias_gelu_linear": "gelu.py",
    "cross_entropy": "token_loss.py",
    "fake_quantize": "fake_quantized.py",
    "flash_attention": "flash.py",
    "lamb": "_lamb.py",
    "layer_norm": "normalization.py",
    "linear_cross_entropy": "head_loss.py",
    "lion": "elementwise.py",
    "masked_softmax": "softmax.py",
    "pack_signs": "signs.py",
    "quantize": "quantized.py",
    "rms_norm": "normalization.py",
    "rotary": "_rotary.py",
    "sgd": "elementwise.py",
    "sparse_attention": "sparse.py",
    "sum_messages": "sums.py",
    "swiglu": "_swiglu.py",
}
# Functions and optimizers that run the kernel of another function.
SAME = {
    "adam": "adamw", "add_layer_norm": "layer_norm", "add_rms_norm": "rms_norm", "attention": "flash_attention",
    "dequantize": "sum_messages", "dropout": "bias_dropout_add", "unpack_signs": "sum_messages",
}
# They check arguments and choose, before a kernel runs, and are no part of it.
_BEFORE = {"arguments.py", "choice.py", "evidence.py"}


@attrs.frozen
class Passed:
    """All cases of a kernel passed on a GPU.

    Attributes:
        kernel: a key of `HOMES`.
        architecture: "sm_90", or as AMD names its own, "gfx942".
        gpu: the name of the device, "NVIDIA H200".
        date: of the run, "2026-12-01".
        torch: its version.
        triton: its version.
        dtypes: those of the tensors in the cases, "bfloat16".
        num_cases: how many cases passed.
        source: the `fingerprint` of the kernel that ran.
        speed: dtype -> time of torch's operator over the kernel's, the geometric mean over its measured cases; a dtype
            that was not measured is missing.
    """

    kernel: str
    architecture: str
    gpu: str
    date: str
    torch: str
    triton: str
    dtypes: tuple[str, ...] = attrs.field(converter=tuple)
    num_cases: int
    source: str
    speed: Mapping[str, float] = attrs.field(factory=dict)


def kernel_of(function: str) -> str:
    """Return the kernel that a function of `fds.kernels` or an optimizer runs; the name itself for any other."""
    return SAME.get(function, function)


def check(function: str) -> None:
    """Raise `KernelError` for a name that stands for no kernel."""
    if kernel_of(function) not in HOMES:
        raise KernelError(
            "there is no such kernel", where="kernel", got=repr(function), want=", ".join(sorted({*HOMES, *SAME}))
        )


def judge(function: str, architecture: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Return whether the kernel of a function is chosen on a GPU where nobody asked, and why, in words."""
    if not architecture:
        return False, "torch sees no such GPU"
    kernel, name = kernel_of(function), str(dtype).removeprefix("torch.")
    entry = recorded().get((kernel, architecture))
    if entry is None or name not in entry.dtypes:
        return False, f"no CUDA run of the kernel{' in ' + name if entry else ''} is recorded for {architecture}"
    there = f"on {entry.gpu} on {entry.date}"
    if entry.source != fingerprint(kernel):
        return False, f"the kernel changed since it passed {there}"
    speed = entry.speed.get(name)
    beside = "" if speed is None else f", {speed:.2f} times as fast as torch's operator"
    if speed is not None and speed < 1:
        return False, f"the kernel passed {there}, but was slower{beside.replace(',', ':')}"
    return True, f"passed {there}{beside}"


@functools.cache
def recorded() -> dict[tuple[str, str], Passed]:
    """Return the entries of the record by kernel and architecture."""
    return {(entry.kernel, entry.architecture): entry for entry in read(RECORD)}


def read(file: Path) -> list[Passed]:
    """Return the entries of a record on disk."""
    return [Passed(**entry) for entry in json.loads(file.read_text())["passed"]]


def write(file: Path, entries: list[Passed]) -> None:
    """Write a record, in place of the one that is there."""
    rows = [attrs.asdict(entry) for entry in sorted(entries, key=lambda entry: (entry.kernel, entry.architecture))]
    file.write_text(json.dumps({"passed": rows}, indent=2) + "\n")


def fingerprint(kernel: str) -> str:
    """Return 16 hexadecimal digits that change with the code of a kernel, and not with comments or docstrings."""
    files = sorted(_imported(HOMES[kernel], set()))
    return hashlib.sha256("".join(f"{name}: {_code(name)}\n" for name in files).encode()).hexdigest()[:16]


def _imported(name: str, seen: set[str]) -> set[str]:
    """Return a module and those of `fds.kernels` that it imports, as paths from here."""
    if name not in seen and name not in _BEFORE:
        seen.add(name)
        for imported in _imports(name):
            _imported(imported, seen)
    return seen


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse((HERE / name).read_text())


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    imported: list[str] = []
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fds.kernels"):
            base = "/".join((node.module or "").split(".")[2:])
            paths = (f"{base}.py", *(f"{base}/{alias.name}.py".lstrip("/") for alias in node.names))
            imported += [path for path in paths if (HERE / path).is_file()]
    return tuple(imported)


@functools.cache
def _code(name: str) -> str:
    return repr(_canonical(_tree(name)))


def _canonical(node: object) -> object:
    """Return a syntax tree as nested tuples that every version of Python makes alike, without docstrings."""
    if isinstance(node, list):
        return tuple(map(_canonical, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields: list[object] = [type(node).__name__]
    for name in node._fields:
        value = getattr(node, name, None)
        if name == "body" and isinstance(node, _DOCUMENTED) and _is_text(node.body[0]):
            value = node.body[1:]
        if value is not None and value != []:  # fields that later versions of Python added are empty
            fields.append((name, _canonical(value)))
    return tuple(fields)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
