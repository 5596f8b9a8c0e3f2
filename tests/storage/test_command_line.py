"""`python -m fds.storage`: what is in a save, is it whole, in what do two differ, and its weights."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

import fds
from fds.command_line import main
from fds.errors import StorageError
from fds.storage.format.manifest import Chunk, SavedLeaf
from fds.storage.opening import Difference, differences, locate, open_source, verify
from fds.storage.source import Source
from tests import programs
from tests.storage.states import Template, rewrite, state_of
from tests.storage.topologies import Topology

PARAMS = {"w": torch.arange(5000.0).view(50, 100), "b": torch.ones(3, dtype=torch.bfloat16)}


def make(*transforms):
    loss = lambda params, batch: (params["w"].sum() + params["b"].sum()) * batch
    return fds.compose(*transforms, fds.adamw(0.1), fds.ema(0.9))(loss)


@pytest.fixture
def run(tmp_path):
    """A run of two ranks with saves after one and two calls."""

    def body():
        step = make(Topology(2, 1).shard())
        state = step.init(PARAMS)
        for calls in (1, 2):
            state, _ = step(state, torch.tensor(1.0))
            fds.save(tmp_path / "run", state, step, extra={"position": calls})

    fds.simulate(body, 2)
    return tmp_path / "run"


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def called(capsys, *arguments):
    """Return exit code, output and errors of the command."""
    code = main(["storage", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def cells(out):
    """Return the words of every line."""
    return [line.split() for line in out.splitlines()]


def test_a_run_is_listed_by_its_tags(run, capsys):
    code, out, _ = called(capsys, "show", run)
    header, one, two, last = cells(out)
    assert code == 0 and header == ["tag", "calls", "saved", "bytes", "run"] and last == ["latest:", "step00000002"]
    assert one[:2] == ["step00000001", "1"] and two[:2] == ["step00000002", "2"]
    record = json.loads((run / "step00000002" / "manifest.json").read_text())
    assert two[2] == record["saved"] and two[-2:] == ["kB", record["run"]] and one[-1] == two[-1]


def test_a_save_is_shown_leaf_by_leaf(run, capsys):
    for arguments in (["--tag", "step00000001"], []):
        place = run if arguments else run / "step00000001"
        code, out, err = called(capsys, "show", place, *arguments)
        assert code == 0 and not err
        lines = cells(out)
        assert out.startswith(f"{run / 'step00000001'}\n") and "  adamw(lr=0.1)" in out.splitlines()
        assert any(words[:2] == ["params.w", "float32"] and "rank0 rank1" in " ".join(words) for words in lines)
        assert any(words[:4] == ["params.b", "bfloat16", "(3,)", "rank0"] for words in lines)
        totals = {words[0]: " ".join(words[1:]) for words in lines if words and words[-1] == "kB"}
        assert totals["params"] == "2 5,003 20.0 kB" and totals["opt.exp_avg"] == "2 5,003 20.0 kB"
        assert totals["total"].startswith("11 20,016 ")
        assert json.loads(out.partition("extra: ")[2]) == {"position": 1}


def test_names_of_folders_cannot_steer_a_terminal(tmp_path, capsys):
    dir, state = tmp_path / "\x1b[31mred", state_of({"w": torch.ones(2)})
    fds.save(dir, state, Template(state))
    damaged = dir / "step00000000\x1b[2J"
    os.rename(dir / "step00000000", damaged)
    for command in ("verify", "show", "diff"):
        for more in ([], ["--all"]) if command == "verify" else ([str(dir)],) if command == "diff" else ([],):
            main(["storage", command, str(dir), *more])
    main(["storage", "export", str(dir), f"{tmp_path}/\x1bweights", "--tag", "none"])
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and r"\x1b[31mred" in said.out


def test_names_cannot_steer_a_terminal(tmp_path, capsys):
    state = state_of({"\x1b[31mred\n[bold]x[/bold]:smile:": torch.ones(2)})
    fds.save(tmp_path, state, Template(state), extra={"\x1b": "é"})
    assert called(capsys, "show", f"{tmp_path}:step00000000")[0] == 0
    code, out, _ = called(capsys, "show", tmp_path / "step00000000")
    assert code == 0 and "\x1b" not in out and r"params.\x1b[31mred\n[bold]x[/bold]:smile:" in out


def test_long_tables_are_not_wrapped_or_cut_in_files(tmp_path, capsys):
    state = state_of({"x" * 500: torch.ones(2)})
    fds.save(tmp_path, state, Template(state))
    _, out, _ = called(capsys, "show", tmp_path / "step00000000")
    assert any(words[:3] == ["params." + "x" * 500, "float32", "(2,)"] for words in cells(out))


def test_a_terminal_gets_lines_that_fit_and_nothing_is_lost(tmp_path, capsys, monkeypatch):
    state = state_of({"x" * 70 + "y": torch.ones(2, 3)})
    fds.save(tmp_path, state, Template(state))
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = called(capsys, "show", tmp_path / "step00000000")
    lines = re.sub(r"\x1b\[\d*m", "", out).splitlines()
    leaves = lines[next(i for i, line in enumerate(lines) if line.startswith("leaf")) :]
    assert max(map(len, leaves)) <= 60 and out.count("x") == 70 and "xy" in out and "(2, 3)" in out


def test_a_part_of_a_save_is_whole_as_far_as_it_goes(tmp_path, capsys):
    def body():
        step = make(Topology(2, 1).shard())
        return fds.save(tmp_path, step.init(PARAMS), step, "best", local=True)

    fds.simulate(body, 2)
    code, out, _ = called(capsys, "show", tmp_path / "rank1")
    assert code == 0 and " ".join(cells(out)[1]).endswith("part 1 of 2")
    assert verify(tmp_path / "rank0") == verify(tmp_path / "rank1") == []
    flip(tmp_path / "rank1" / "best" / "rank1.safetensors")
    assert len(verify(tmp_path / "rank1")) == 1
    code, _, err = called(capsys, "export", tmp_path / "rank0", tmp_path / "x.safetensors")
    assert code == 2 and "this part of the save belongs to another rank" in err
    assert not (tmp_path / "x.safetensors").exists()


def test_a_whole_save_verifies(run, capsys):
    assert verify(run) == verify(str(run), "step00000001") == []
    assert called(capsys, "verify", run)[:2] == (0, f"{run}: whole\n")
    code, out, _ = called(capsys, "verify", run, "--all")
    assert code == 0 and out == f"{run}:step00000001: whole\n{run}:step00000002: whole\n"


def test_every_fault_is_told(run, capsys):
    flip(run / "step00000001" / "rank0.safetensors")
    flip(run / "step00000001" / "rank1.safetensors", at=4096)
    one = verify(run, "step00000001")
    assert len(one) == 2 and all("a tensor file was changed after it was written" in line for line in one)
    assert "rank0.safetensors: " in "".join(one) and "rank1.safetensors: " in "".join(one)
    (run / "step00000002" / "rank1.safetensors").unlink()
    (two,) = verify(run)
    assert "rank1.safetensors" in two and "a tensor file is missing" in two and "more such chunks" in two
    assert verify(run, "step00000001") == one
    code, out, err = called(capsys, "verify", run, "--all")
    assert code == 1 and not err and len(out.splitlines()) == 5 and out.count(": damaged\n") == 2
    assert called(capsys, "verify", run, "--tag", "step00000002")[0] == 1


def test_a_damaged_manifest_is_a_fault_and_a_missing_save_is_refused(run, capsys):
    flip(run / "step00000002" / "manifest.json", at=200)
    (fault,) = verify(run)
    assert "manifest" in fault and "\n" not in fault
    code, out, _ = called(capsys, "verify", run, "--all")
    assert code == 1 and f"{run}:step00000001: whole\n" in out
    code, out, _ = called(capsys, "show", run)
    assert code == 0 and "manifest" in out
    rewrite(run / "step00000001", lambda record: {**record, "format": 5})
    assert "another format version" in verify(run, "step00000001")[0]
    for arguments in ([run, "step00000003"], [run / "nowhere"]):
        with pytest.raises(StorageError, match="there is no save"):
            verify(*arguments)
    for all_ in ([], ["--all"]):
        code, out, err = called(capsys, "verify", run / "nowhere", *all_)
        assert (code, out) == (2, "") and err.startswith("StorageError: there is no save here\n")


def test_weights_are_exported_from_the_command_line(run, tmp_path, capsys):
    source = open_source(run, "step00000001")
    want = torch.empty(5000)
    source.read("slots.ema.w", 0, want)
    code, out, _ = called(
        capsys, "export", run, tmp_path / "hf", "--tag", "step00000001", "--tree", "slots.ema", "--dtype", "float32"
    )
    assert code == 0 and out == f"{tmp_path}/hf/model.safetensors\n"
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["w"].view(-1), want) and found["b"].dtype is torch.float32
    assert called(capsys, "export", f"{run}:step00000002", tmp_path / "x.safetensors")[0] == 0
    assert {x.dtype for x in load_file(tmp_path / "x.safetensors").values()} == {torch.bfloat16}
    assert called(capsys, "export", run, tmp_path / "x.safetensors", "--dtype", "own")[0] == 0
    assert load_file(tmp_path / "x.safetensors")["w"].dtype is torch.float32
    code, _, err = called(capsys, "export", run, tmp_path / "y.safetensors", "--tree", "slots.eam")
    assert code == 2 and "did you mean 'slots.ema'?" in err and "Traceback" not in err


def test_what_others_wrote_is_shown_exported_and_compared_alike(run, tmp_path, capsys):
    for tag in ("step00000001", "step00000002"):
        assert called(capsys, "export", run, tmp_path / tag, "--dtype", "own", "--tag", tag)[0] == 0
    one, two = tmp_path / "step00000001", tmp_path / "step00000002"
    code, out, _ = called(capsys, "show", one)
    assert code == 0 and ["params.w", "float32", "(50,", "100)"] in cells(out)
    assert called(capsys, "verify", one)[:2] == (0, f"{one}: whole\n")
    code, out, _ = called(capsys, "diff", one, two / "model.safetensors")
    assert code == 1 and out.endswith("2 of 2 leaves differ\n")
    assert called(capsys, "export", one, tmp_path / "again", "--dtype", "own")[0] == 0
    assert called(capsys, "diff", one, tmp_path / "again")[:2] == (0, "equal: 2 leaves\n")


def test_equal_states_on_different_ranks_have_no_differences(run, tmp_path, capsys):
    step = make()
    state, _ = fds.load(run, step, PARAMS)
    fds.save(tmp_path / "alone", state, step)
    assert differences(run, tmp_path / "alone") == []
    assert called(capsys, "diff", run, tmp_path / "alone")[:2] == (0, "equal: 11 leaves\n")


def test_two_calls_are_compared_leaf_by_leaf(run, capsys):
    forms = [
        [f"{run}:step00000001", f"{run}:step00000002"],
        [run / "step00000001", run],
        [run, run, "--tags", "step00000001", "step00000002"],
    ]
    outputs = [called(capsys, "diff", *form) for form in forms]
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0][0] == 1
    lines = cells(outputs[0][1])
    assert ["step", "int64", "()", "same", "1", "of", "1", "1", "0.5"] in lines
    assert "key" not in [words[0] for words in lines]
    assert any(words[0] == "params.w" and "5,000 of 5,000" in " ".join(words) for words in lines)
    assert outputs[0][1].endswith("10 of 11 leaves differ\n")
    code, _, err = called(capsys, "diff", f"{run}:step00000001", run, "--tags", "step00000002", "step00000002")
    assert code == 2 and "two tags are named" in err


def source_of(tensors, most=3):
    """Return tensors as a source, in chunks of at most so many elements."""
    leaves = {
        name: SavedLeaf(
            str(x.dtype).removeprefix("torch."),
            tuple(x.shape),
            tuple(Chunk("a.safetensors", 0, i, min(most, x.numel() - i), "") for i in range(0, x.numel(), most)),
        )
        for name, x in tensors.items()
    }
    read = lambda name, start, out: out.copy_(tensors[name].reshape(-1)[start : start + len(out)])
    return Source("memory", leaves, read)


def test_what_differs_is_measured():
    nan, inf = math.nan, math.inf
    a = {
        "x": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "gone": torch.ones(2),
        "shape": torch.ones(2, 3),
        "kind": torch.tensor([1.0, 0.1]),
        "nan": torch.tensor([nan, 1.0]),
        "same": torch.tensor([nan, -0.0, inf]),
        "zero": torch.tensor([0.0, 1.0]),
        "z": torch.tensor([3 + 4j]),
        "empty": torch.ones(0),
    }
    b = {
        "x": torch.tensor([1.0, 2.5, 3.0, 2.0]),
        "shape": torch.ones(3, 2),
        "new": torch.ones(1),
        "kind": torch.tensor([1.0, 0.1]).bfloat16(),
        "nan": torch.tensor([nan, nan]),
        "same": a["same"].clone(),
        "zero": torch.tensor([-0.0, 1.0]),
        "z": torch.tensor([3 + 3j]),
        "empty": torch.ones(0),
    }
    found = {d.name: d for d in differences(source_of(a), source_of(b, most=2))}
    assert list(found) == ["x", "gone", "shape", "kind", "nan", "zero", "z", "new"]
    assert found["x"] == Difference("x", "float32 (4,)", "float32 (4,)", 4, 2, 2.0, 0.5)
    assert found["gone"] == Difference("gone", "float32 (2,)", "")
    assert found["new"] == Difference("new", "", "float32 (1,)")
    assert found["shape"] == Difference("shape", "float32 (2, 3)", "float32 (3, 2)")
    kind = found["kind"]
    assert (kind.right, kind.numel, kind.num_different) == ("bfloat16 (2,)", 2, 1) and 0 < kind.max_relative < 2**-8
    assert (found["nan"].num_different, found["nan"].max_abs, found["nan"].max_relative) == (1, inf, inf)
    assert (found["zero"].num_different, found["zero"].max_abs) == (1, 0.0)  # in its bits
    assert found["z"].max_abs == 1.0


@given(st.lists(st.sampled_from([0.0, 1.0, -2.0, math.inf, math.nan]), max_size=20), st.data())
def test_counts_do_not_depend_on_how_leaves_are_cut(values, data):
    other = [data.draw(st.sampled_from([v, 1.0])) for v in values]
    x, y = torch.tensor(values), torch.tensor(other)
    found = differences(
        source_of({"x": x}, data.draw(st.integers(1, 7))), source_of({"x": y}, data.draw(st.integers(1, 7)))
    )
    count = int((x.view(torch.int32) != y.view(torch.int32)).sum())
    assert [(d.num_different, d.numel) for d in found] == ([(count, len(values))] if count else [])
    if count and all(map(math.isfinite, values)):
        assert found[0].max_abs == float((x - y).abs().max())


def test_where_a_save_is_meant(run, monkeypatch):
    assert locate(run) == (run, None) and locate(run, "best") == (run, "best")
    assert locate(f"{run}:best") == locate(f"{run}/:best") == (run, "best")
    assert locate(run / "step00000001") == locate(f"{run}/step00000001/") == (run, "step00000001")
    monkeypatch.chdir(run / "step00000001")
    assert locate(".") == (run, "step00000001")
    (run.parent / "a:b").mkdir()
    assert locate(run.parent / "a:b") == (run.parent / "a:b", None)


def test_it_runs_as_a_program(run, tmp_path):
    command = [sys.executable, "-m", "fds.storage", "diff", f"{run}:step00000001", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "params.w" in done.stdout and not done.stderr
    code, said = programs.run(Path(fds.storage.__path__[0]) / "__main__.py", "show", tmp_path / "nowhere", cwd=tmp_path)
    assert code == 2 and said.startswith("StorageError: ") and "Traceback" not in said
