"""What counts as evidence for a kernel: a run that passed, on such a GPU, of the kernel as it is, and was not slow."""

import ast
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from fds import kernels
from fds.kernels import choice, evidence, language
from fds.kernels.choice import explanations, summary
from fds.kernels.evidence import HOMES, RECORD, SAME, Passed, fingerprint, read, write
from tests.kernels.ways import traced

GPU = torch.device("cuda", 0)


def passed(kernel: str, **changes) -> Passed:
    entry = Passed(
        kernel, "sm_90", "NVIDIA H200", "2026-12-01", "2.11.0", "3.6.0", ("bfloat16", "float32"), 48,
        fingerprint(kernel), {"bfloat16": 1.07},
    )  # fmt: skip
    return attrs.evolve(entry, **changes)


@pytest.fixture
def h200(monkeypatch):
    """Return a function that makes entries the record, on a machine with a GPU that is not there."""
    monkeypatch.setattr(choice, "_architecture", lambda device: "sm_90")
    monkeypatch.setattr(choice, "_decided", {})

    def record(*entries: Passed) -> None:
        choice._decided.clear()
        monkeypatch.setattr(evidence, "recorded", lambda: {(e.kernel, e.architecture): e for e in entries})

    record()
    return record


def test_a_kernel_that_passed_runs_in_the_dtypes_in_which_it_passed(h200):
    h200(passed("swiglu"))
    assert kernels.chosen("swiglu", GPU) == kernels.chosen("swiglu", GPU, torch.bfloat16) == "triton"
    assert kernels.chosen("swiglu", GPU, torch.float16) == kernels.chosen("swiglu", GPU, torch.float64) == "reference"
    assert kernels.chosen("layer_norm", GPU) == kernels.chosen("swiglu", torch.device("cpu")) == "reference"


@pytest.mark.parametrize(
    ("changes", "dtype", "runs", "why"),
    [
        ({}, torch.bfloat16, True, "passed on NVIDIA H200 on 2026-12-01, 1.07 times as fast as torch's operator"),
        ({}, torch.float32, True, "passed on NVIDIA H200 on 2026-12-01"),  # nobody measured it
        ({}, torch.float16, False, "no CUDA run of the kernel in float16 is recorded for sm_90"),
        ({"architecture": "sm_80"}, torch.bfloat16, False, "no CUDA run of the kernel is recorded for sm_90"),
        (
            {"source": "0" * 16},
            torch.bfloat16,
            False,
            "the kernel changed since it passed on NVIDIA H200 on 2026-12-01",
        ),
        (
            {"speed": {"bfloat16": 0.93}},
            torch.bfloat16,
            False,
            "the kernel passed on NVIDIA H200 on 2026-12-01, but was slower: 0.93 times as fast as torch's operator",
        ),
        ({"speed": {"bfloat16": 1.0}}, torch.bfloat16, True, "1.00 times as fast as torch's operator"),
    ],
)
def test_what_counts_as_evidence(h200, changes, dtype, runs, why):
    h200(passed("swiglu", **changes))
    assert (kernels.chosen("swiglu", GPU, dtype) == "triton") is runs
    told = kernels.explained("swiglu", GPU, dtype)
    assert told.endswith(why) if changes.get("speed") == {"bfloat16": 1.0} else told == why


def test_scopes_overrule_evidence(h200):
    h200(passed("swiglu"))
    with kernels.only("reference"):
        assert kernels.chosen("swiglu", GPU) == "reference"
    h200()
    with kernels.prefer_triton():
        assert kernels.chosen("swiglu", GPU) == "triton"
        assert kernels.chosen("swiglu", GPU, torch.float64) == "reference"


def test_evidence_does_not_install_triton(h200, monkeypatch):
    h200(passed("swiglu"))
    monkeypatch.setattr(language, "is_there", False)
    assert kernels.chosen("swiglu", GPU) == "reference" and "not installed" in kernels.explained("swiglu", GPU)


def test_functions_that_run_the_kernel_of_another_take_its_evidence(h200):
    h200(*map(passed, HOMES))
    assert {kernels.chosen(name, GPU) for name in SAME} == {"triton"}


IN_PLAIN_TORCH = {"sign_bits", "signs_of", "BlockSelection", "select_blocks"}


def test_every_function_of_fds_kernels_has_a_kernel_and_its_file():
    functions = set(kernels.__all__) - {"chosen", "explained", "only", "prefer_triton"} - IN_PLAIN_TORCH
    assert functions == {*HOMES, *SAME} - {"adam"}  # which is an optimizer
    for name, home in HOMES.items():
        module = f"fds.kernels.{home.removesuffix('.py').replace('/', '.')}"
        assert getattr(kernels, name).__module__ == module


def test_kernels_ask_by_names_that_exist():
    """The names that are passed to the choice, in the code of kernels and of layers."""
    asked = set()
    for path in [*evidence.HERE.rglob("*.py"), *(evidence.HERE.parent / "nn").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("runs_triton", "run_triton", "_run")
            )
            if is_call and node.args and isinstance(node.args[0], ast.Constant):
                asked.add(node.args[0].value)
    assert asked == set(HOMES)


def test_the_record_of_the_repository_is_read_and_holds_what_is_true():
    entries = read(RECORD)
    assert len({(e.kernel, e.architecture) for e in entries}) == len(entries)
    for entry in entries:
        assert entry.kernel in HOMES and entry.num_cases > 0
        assert {getattr(torch, name) for name in (*entry.dtypes, *entry.speed)} <= set(choice.DTYPES)
    assert evidence.recorded() == {(e.kernel, e.architecture): e for e in entries}


def test_a_record_is_read_as_it_was_written(tmp_path):
    entries = [passed("swiglu"), passed("adamw", architecture="sm_80"), passed("adamw", speed={})]
    write(tmp_path / "passed.json", entries)
    assert read(tmp_path / "passed.json") == [entries[1], entries[2], entries[0]]  # by kernel and architecture
    assert json.loads((tmp_path / "passed.json").read_text())["passed"][2]["kernel"] == "swiglu"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Return a folder with a copy of fds/kernels whose fingerprints are taken."""
    for path in evidence.HERE.rglob("*.py"):
        to = tmp_path / path.relative_to(evidence.HERE)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(path.read_text())
    monkeypatch.setattr(evidence, "HERE", tmp_path)
    for name in ("_tree", "_imports", "_code"):
        monkeypatch.setattr(evidence, name, of_text(getattr(evidence, name).__wrapped__))
    return tmp_path


def of_text(function: Callable[[str], object]) -> Callable[[str], object]:
    """Remember what a function returns of a file as long as its text is the same."""
    remembered = functools.cache(lambda name, text: function(name))
    return lambda name: remembered(name, (evidence.HERE / name).read_text())


def changed(file: Path, edit: Callable[[str], str]) -> list[str]:
    """Return the kernels whose fingerprint changes with the text of a file."""
    before = {name: fingerprint(name) for name in HOMES}
    file.write_text(edit(file.read_text()))
    return sorted(name for name in HOMES if fingerprint(name) != before[name])


def test_a_changed_kernel_is_no_evidence(copied):
    whose = {
        HOMES["swiglu"]: ["swiglu"],
        "gelu.py": ["bias_gelu", "bias_gelu_linear"],
        "token_loss.py": ["cross_entropy", "linear_cross_entropy"],
        "normalization_backward.py": ["layer_norm", "rms_norm"],
        "slices.py": ["adamw", "lamb", "lion", "sgd"],
        "groups.py": ["pack_signs", "quantize", "sum_messages"],
        "philox.py": ["bias_dropout_add", "flash_attention", "masked_softmax", "sparse_attention"],
        "language.py": sorted(HOMES),
    }
    for file, kernels_of_it in whose.items():
        assert changed(copied / file, lambda text: text + "\nMORE = 1\n") == kernels_of_it
    assert changed(copied / HOMES["swiglu"], lambda text: text.replace("MORE = 1", "MORE = 2")) == ["swiglu"]


def test_words_about_a_kernel_do_not_change_it(copied):
    swiglu = copied / HOMES["swiglu"]
    assert not changed(
        swiglu, lambda text: text.replace('"""Return ', '"""Give ').replace('"""SwiGLU', '"""The SwiGLU')
    )
    assert not changed(swiglu, lambda text: text.replace("\n# ", "\n# In other words: "))
    assert not changed(swiglu, lambda text: re.sub(r"inside = at < n\n", "\n    inside = (at < n)\n", text))
    assert "The SwiGLU" in swiglu.read_text() and "(at < n)" in swiglu.read_text()
    assert not changed(copied / "arguments.py", lambda text: text + "\nMORE = 1\n")  # it checks, before a kernel runs


def test_what_runs_is_told_in_one_line_or_by_kernel(h200):
    assert summary(GPU) == "torch's operators (no CUDA run of the kernel is recorded for sm_90)"
    assert summary(torch.device("cpu")) == "torch's operators (kernels run on GPUs)"
    h200(passed("swiglu", dtypes=("float32", "float16", "bfloat16"), speed={}), passed("lion", dtypes=("float32",)))
    lines = summary(GPU).splitlines()
    assert "swiglu: Triton kernel (passed on NVIDIA H200 on 2026-12-01)" in lines
    assert explanations(GPU)["lion"] == (
        "Triton kernel (passed on NVIDIA H200 on 2026-12-01) in float32; "
        "torch's operators (no CUDA run of the kernel in float16 is recorded for sm_90) in float16; "
        "torch's operators (no CUDA run of the kernel in bfloat16 is recorded for sm_90) in bfloat16"
    )
    assert len(lines) == 3 and explanations(GPU).keys() == HOMES.keys()


@traced
def test_compiled_functions_follow_evidence_without_a_graph_break(h200):
    h200(passed("swiglu"))
    torch.compiler.reset()
    runs = torch.compile(
        lambda x: x + 1 if kernels.chosen("swiglu", GPU) == "triton" else x, fullgraph=True, backend="eager"
    )
    assert runs(torch.zeros(())) == 1
    with kernels.only("reference"):
        assert runs(torch.zeros(())) == 0
    h200()
    torch.compiler.reset()
    assert runs(torch.zeros(())) == 0
    with kernels.prefer_triton():
        assert runs(torch.zeros(())) == 1
